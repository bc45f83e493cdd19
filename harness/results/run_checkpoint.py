"""Checkpoints: finished work on disk, so that `--resume` continues an interrupted command."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ...workloads.checksums import crc32_of, sealed, unsealed
from ...workloads.errors import FileFormatError, SloBenchError
from ...workloads.parsing import parse_json

STEP_TIME = "step_time"  # provenance of each placement's; none is simulated
_SETTINGS, _SIMULATOR = "settings_crc32", "simulator"
_BLOCK = 4096  # bytes


_OTHER_FOLDER = "choose another folder with --out"


def check_settings(
    path: Path, kept: str, now: str, holder: str = "the folder", remedy: str = _OTHER_FOLDER
) -> None:
    """Compare the settings that results were made with to those of this command.

    Args:
        path: the file with the settings.
        kept: the settings of the results.
        now: the settings of this command.
        holder: what holds the results, for the error.
        remedy: what the user can do, for the error.

    Raises:
        FileFormatError: they differ; names the first line that does.
    """
    # Not splitlines(): a damaged line end may be another line end to it.
    lines = itertools.zip_longest(kept.split("\n"), now.split("\n"), fillvalue="(nothing)")
    for number, (old, new) in enumerate(lines, start=1):
        if old != new:
            difference = f"it has {old!r} where this run has {new!r}"
            problem = f"{holder} holds another experiment: {difference}; {remedy}"
            raise FileFormatError(path, number, problem)


def check_same_simulator(path: Path, then: Mapping[str, object], now: Mapping[str, object]) -> None:
    """Compare the version and step times of simulated results (`then`) to those of this command;
    what is not known of them may be anything.

    Raises:
        SloBenchError: they differ.
    """
    for name in ("slo_bench", STEP_TIME) if now.get(STEP_TIME) else ():
        if then.get(name, now.get(name)) != now.get(name):
            versions = f"slo-bench {then.get('slo_bench')}, this is {now.get('slo_bench')}"
            problem = versions if name == "slo_bench" else "other step times"
            raise SloBenchError(
                f"{path} was begun with {problem}: it would mix results of two simulators; "
                f"{_OTHER_FOLDER}"
            )


@dataclass(frozen=True)
class Checkpoint:
    """Records of finished work: a JSON line each, with its checksum and that of `settings`.

    Records are only appended, so several processes may write the same file.
    """

    path: Path
    settings: str

    def read(self) -> list[dict[str, Any]]:
        """All records, in order. A last line that a kill left incomplete is removed.

        Raises:
            FileFormatError: a record is damaged, or was made with other settings.
        """
        if not self.path.is_file():
            return []
        with self.path.open("r+b") as file:
            cut_half_a_line(file)
            return [self._record(number, line) for number, line in enumerate(file, start=1)]

    def _record(self, number: int, text: bytes) -> dict[str, Any]:
        try:
            record = parse_json(text.decode())
        except ValueError as error:
            raise FileFormatError(self.path, number, f"is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise FileFormatError(self.path, number, "must hold a JSON object")
        if unsealed(self.path, record).pop(_SETTINGS, None) != crc32_of(self.settings.encode()):
            problem = f"the folder holds another experiment; {_OTHER_FOLDER}"
            raise FileFormatError(self.path, number, problem)
        return record

    def check_simulator(self, record: dict[str, Any], simulator: Mapping[str, object]) -> None:
        """Take the simulator from a record that was read, which must be this one.

        Raises:
            SloBenchError: it was made by another.
        """
        check_same_simulator(self.path, record.pop(_SIMULATOR, {}), simulator)

    def append(
        self, record: Mapping[str, Any], simulator: Mapping[str, object] | None = None
    ) -> None:
        """Write one record to disk; `simulator`: version and step times, where it is simulated.

        Raises:
            SloBenchError: it cannot be written.
        """
        made_by = {_SIMULATOR: simulator} if simulator else {}
        line = sealed({**record, **made_by, _SETTINGS: crc32_of(self.settings.encode())})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise SloBenchError(f"cannot write {self.path}: {error.strerror}") from error


def cut_half_a_line(file: BinaryIO) -> None:
    """Truncate an open file after its last line end, and go to its start.

    A process that was killed while it wrote leaves an incomplete last line.
    """
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _BLOCK)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        end = begin + newline + 1
        if newline >= 0:
            break
    if end < size:
        file.truncate(end)
    file.seek(0)
