"""Where DL2's measured speeds are; `read_speeds` gives them by parameter servers and workers."""

from __future__ import annotations

from pathlib import Path

from gpusched.errors import UsageError
from gpusched.sim.profiles.dl2 import read_speeds

__all__ = ["SOURCE", "find", "read_speeds"]

SOURCE = "config_speed.txt of github.com/pengyanghua/DL2"
_NAMES = ("dl2_speed.txt.gz", "dl2_speed.txt", "config_speed.txt")


def find(beside: Path | None) -> Path:
    """The file of measured speeds: in this folder, beside the workloads, or in ``profiles`` beside their folder.

    Raises:
        UsageError: It is in none of them.
    """
    folders = [Path(), *([beside.parent, beside.parent.parent / "profiles"] if beside is not None else [])]
    for folder in folders:
        for name in _NAMES:
            if (folder / name).is_file():
                return folder / name
    raise UsageError("DL2's measured speeds are not here", f"fetch {SOURCE} and name it with --speeds")
