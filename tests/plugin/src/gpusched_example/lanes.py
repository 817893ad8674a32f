"""A format of traces: ``user gpus submitted ran`` a line, times in seconds, below the line ``# lanes``."""

from __future__ import annotations

from pathlib import Path

from gpusched.traces.readers.columns import read_fields, stem
from gpusched.traces.readers.draft import Draft
from gpusched.traces.trace import Trace


class Lanes:
    """Reads the format; ``matches`` is optional: without it users say ``--format lanes``."""

    def matches(self, path: Path) -> bool:
        """Return whether the file is of this format."""
        with path.open(errors="replace") as file:
            return file.readline().strip() == "# lanes"

    def __call__(self, path: Path, *, strict: bool) -> Trace:
        """Return the trace; rows with values that cannot be are rejected by line."""
        draft = Draft(read_fields(path, ("user", "gpus", "submitted", "ran"), None, "#"), strict=strict)
        return draft.trace(
            stem(path),
            epoch=None,
            ids=tuple(str(number) for number in range(len(draft))),
            submit=draft.numbers("submitted", "seconds since the log's start", minimum=0),
            duration=draft.numbers("ran", "a run time of more than 0 s", above=0),
            gpus=draft.whole("gpus", "a number of GPUs of at least 1", minimum=1),
            names={"user": draft.names("user")},
        )


lanes = Lanes()
