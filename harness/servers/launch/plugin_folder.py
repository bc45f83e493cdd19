"""Our package as a folder for PYTHONPATH, so that a server finds it and its entry points there
without having it installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from ....workloads.errors import SloBenchError

_PACKAGE = Path(__file__).resolve().parents[3]
# Both servers load their group in every one of their processes.
_ENTRY_POINTS = """\
[vllm.general_plugins]
slo_bench = slo_bench.harness.servers.plugins.vllm.plugin:register

[sglang.srt.plugins]
slo_bench = slo_bench.harness.servers.plugins.sglang.plugin:register
"""
_VERSION = version("slo-bench")
_METADATA = f"Metadata-Version: 2.1\nName: slo-bench\nVersion: {_VERSION}\n"


def plugin_folder(under: Path) -> Path:
    """The folder, made if it is not there yet.

    Raises:
        SloBenchError: it cannot be written.
    """
    content = f"{_PACKAGE}\n{_METADATA}\n{_ENTRY_POINTS}"
    folder = under / "plugins" / hashlib.sha256(content.encode()).hexdigest()[:12]
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=folder.parent))
        (part / "slo_bench").symlink_to(_PACKAGE, target_is_directory=True)
        info = part / f"slo_bench-{_VERSION}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(_METADATA, "utf-8")
        (info / "entry_points.txt").write_text(_ENTRY_POINTS, "utf-8")
    except OSError as error:
        raise SloBenchError(f"{folder} cannot be written: {error.strerror}") from error
    with contextlib.suppress(OSError):  # somebody was quicker: theirs is the same
        part.rename(folder)
    shutil.rmtree(part, ignore_errors=True)
    return folder
