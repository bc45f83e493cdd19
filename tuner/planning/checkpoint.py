"""`plan.json`: levels that were run, so that a plan that was cut short goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...harness.results.run_folder import write_whole
from ...workloads.errors import FileFormatError, SloBenchError

FILE = "plan.json"


@dataclass
class PlanningCheckpoint:
    """Levels by what was simulated: does it carry the rate (1 or 0), attainment, its interval."""

    asked: str
    path: Path | None = None
    levels: dict[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path | None, resume: bool, asked: str) -> PlanningCheckpoint:
        """What a folder holds; nothing without one.

        Raises:
            SloBenchError: it holds a plan that is not to be gone on with, or one for something
                else, or a file that cannot be read.
        """
        if folder is None:
            return cls(asked)
        path = folder / FILE
        if not path.exists():
            return cls(asked, path)
        if not resume:
            raise SloBenchError(
                f"{folder} holds a plan; go on with it by --resume, or choose another --out"
            )
        try:
            kept = json.loads(path.read_text("utf-8"))
            levels: dict[str, Sequence[float]] = {
                str(name): [float(x) for x in level] for name, level in kept["levels"].items()
            }
            before = kept["asked"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise FileFormatError(path, None, f"no plan: {error!r}") from None
        if before != asked or any(len(level) != 4 for level in levels.values()):
            raise SloBenchError(f"{folder} holds a plan for something else; choose another --out")
        return cls(asked, path, levels)

    def keep(self, name: str, level: Sequence[float]) -> None:
        """Remember, on disk too."""
        self.levels[name] = level
        if self.path is not None:
            kept = {"asked": self.asked, "levels": self.levels}
            write_whole(self.path, [json.dumps(kept, indent=1).encode()])
