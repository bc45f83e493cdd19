"""Five ways in which a file is damaged."""

from collections.abc import Callable
from pathlib import Path


def flipped(data: bytes) -> bytes:
    """The data with one bit of the byte in the middle changed."""
    middle = len(data) // 2
    return data[:middle] + bytes(b ^ 1 for b in data[middle : middle + 1]) + data[middle + 1 :]


# Each takes the file, and a whole one of the same name that another run wrote.
DAMAGE: dict[str, Callable[[Path, Path], object]] = {
    "half": lambda path, other: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path, other: path.write_bytes(b""),
    "flipped": lambda path, other: path.write_bytes(flipped(path.read_bytes())),
    "of another run": lambda path, other: path.write_bytes(other.read_bytes()),
    "gone": lambda path, other: path.unlink(),
}
