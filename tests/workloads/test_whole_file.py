import os
import stat
import threading

import pytest

from slo_bench.workloads.errors import SloBenchError
from slo_bench.workloads.whole_file import write_whole


def test_write_whole_follows_a_link_and_keeps_the_mode(tmp_path):
    target, link = tmp_path / "a" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_bytes(b"old")
    target.chmod(0o600)
    link.symlink_to(target)
    write_whole(link, [b"new"])
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_write_whole_writes_into_a_fifo(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    contents = []
    reader = threading.Thread(target=lambda: contents.append(fifo.read_bytes()))
    reader.start()
    write_whole(fifo, [b"through"])
    reader.join()
    assert contents == [b"through"]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_write_whole_to_a_full_device_is_an_error(tmp_path):
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
        full.write_bytes(b"")
    except OSError:
        pytest.skip("no device can be made here")
    with pytest.raises(SloBenchError, match="No space left on device"):
        write_whole(full, [b"x"])
    assert stat.S_ISCHR(full.stat().st_mode)


def test_write_whole_does_not_follow_a_link_at_its_part_file(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "out"
    victim.write_bytes(b"precious")
    (tmp_path / f".out.{os.getpid()}.part").symlink_to(victim)
    write_whole(path, [b"x"])
    assert victim.read_bytes() == b"precious"
    assert path.read_bytes() == b"x"


def test_write_whole_removes_its_part_file_on_failure(tmp_path):
    def fails():
        yield b"x"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_whole(tmp_path / "out", fails())
    assert list(tmp_path.iterdir()) == []


def test_write_whole_below_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SloBenchError, match="cannot write"):
        write_whole(tmp_path / "file" / "out", [b"x"])
