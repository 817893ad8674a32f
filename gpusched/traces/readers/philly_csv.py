"""Philly as later simulators sample it: a CSV of submit_time, duration_s (run time summed over attempts), num_gpus, vc.

Optional columns: job_id, user. Source of the jobs: msr-fiddle/philly-traces (Jeon et al., ATC 2019), CC-BY-4.0.
"""

from __future__ import annotations

from pathlib import Path

from gpusched.traces.readers.columns import read_csv, stem
from gpusched.traces.readers.draft import Draft
from gpusched.traces.trace import Trace

COLUMNS = ("submit_time", "duration_s", "num_gpus")


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace; jobs without a ``job_id`` column are numbered by row, from 1.

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    draft = Draft(read_csv(path, "a Philly CSV", COLUMNS, ("vc", "job_id", "user")), strict=strict)
    names = {"group": draft.names("vc", optional=not draft.has("vc"))}
    if draft.has("user"):
        names["user"] = draft.names("user", optional=True)
    ids = draft.ids("job_id") if draft.has("job_id") else tuple(map(str, range(1, len(draft) + 1)))
    return draft.trace(
        stem(path),
        epoch=None,
        rebase=True,
        ids=ids,
        submit=draft.times("submit_time"),
        duration=draft.numbers("duration_s", "a run time of more than 0 s", above=0),
        gpus=draft.whole("num_gpus", "a whole number of GPUs, at least 1", minimum=1),
        names=names,
    )
