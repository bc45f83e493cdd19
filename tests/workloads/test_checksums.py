"""What a file that was changed since it was written is told."""

import pytest

from slo_bench.workloads.checksums import sealed, unsealed
from slo_bench.workloads.errors import FileFormatError


def test_windows_line_ends_of_an_experiment_are_told_as_such(tmp_path):
    inputs = tmp_path / "experiment.toml"
    inputs.write_bytes(b"a = 1\nb = 2\n")
    answers = sealed({"x": 1}, inputs)
    assert unsealed(tmp_path / "environment.json", dict(answers), inputs) == {"x": 1}
    inputs.write_bytes(b"a = 1\r\nb = 2\r\n")
    with pytest.raises(FileFormatError, match=r"Windows line ends, as git's .*experiment\.toml"):
        unsealed(tmp_path / "environment.json", dict(answers), inputs)
    inputs.write_bytes(b"a = 2\n")
    with pytest.raises(FileFormatError, match=r"does not belong to the experiment\.toml"):
        unsealed(tmp_path / "environment.json", dict(answers), inputs)
