"""Files of weights: their names, and what they say of themselves, read without numpy."""

from __future__ import annotations

import json
from pathlib import Path

from gpusched.config.policies import WEIGHTS

CARD = ".card.yaml"
DEFAULT = "default"
KEPT_ANYWAY = "kept_anyway"
"""Key of the metadata of weights that were saved although the gate of ``gpusched train`` was closed: the figures."""
_MAX_HEADER = 1 << 20


def weights_file(folder: Path, partition: str) -> Path:
    """Return a partition's weights file: its own, else the folder's ``default``, else the only one."""
    own = folder / f"{partition}{WEIGHTS}"
    if own.is_file():
        return own
    default = folder / f"{DEFAULT}{WEIGHTS}"
    found = sorted(folder.glob(f"*{WEIGHTS}"))
    return found[0] if not default.is_file() and len(found) == 1 else default


def kept_anyway(folder: str, partition: str) -> str:
    """Return why the gate was closed for a partition's weights that are used all the same; "": it was not.

    Also "" for a file that cannot be read, which its use will report.
    """
    try:
        with weights_file(Path(folder), partition).open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size)) if size <= _MAX_HEADER else {}
        return str(header.get("__metadata__", {}).get(KEPT_ANYWAY, ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
