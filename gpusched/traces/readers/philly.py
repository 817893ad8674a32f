"""Microsoft's Philly, its own ``cluster_job_log`` (Jeon et al., ATC 2019): msr-fiddle/philly-traces, CC-BY-4.0.

A JSON list of jobs, each with its attempts: when one started and ended, and on which GPUs of which servers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpusched.errors import FileError
from gpusched.traces.readers.columns import Table, open_text, stem
from gpusched.traces.readers.draft import Draft, to_times
from gpusched.traces.trace import Trace

_BLANK = re.compile(r"[\s,]*")
_COLUMNS = ("jobid", "user", "vc", "status", "submitted_time", "first_start", "run_time", "gpus", "flaw")
_GAP = re.compile(r"[ \t\r\n]*")


def read(path: Path, *, strict: bool) -> Trace:
    """Read the trace: run time summed over the attempts, GPUs of the largest, waiting until the first.

    Jobs without attempts and those still running at the snapshot are left out; a job of which another attempt lacks a
    time (a flaw of the original's logging) is rejected.

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    with open_text(path) as text:
        objects = _objects(path, text.read())
    jobs = [_job(value) for _, value in objects]
    lines = np.array([line for line, _ in objects], np.int64)
    columns: dict[str, Sequence[str]] = {name: [job[name] for job in jobs] for name in _COLUMNS}
    draft = Draft(Table(str(path), lines, columns), strict=strict)
    flaws = draft.text("flaw")
    unused = draft.where("flaw", lambda flaw: flaw.startswith(("never", "still")))
    draft.leave_out(unused, "attempts", "a job that has run and ended", lambda row: f"a job that {flaws[row]}")
    draft.reject(draft.where("flaw", bool), "attempts", "a start and an end of each", lambda row: flaws[row])
    submit, first = draft.times("submitted_time"), draft.numbers("first_start")
    draft.reject(first < submit, "attempts", "a first start not before submitted_time", lambda row: "an earlier one")
    return draft.trace(
        stem(path), epoch=None, rebase=True, ids=draft.ids("jobid"), submit=submit,
        duration=draft.numbers("run_time", "attempts of more than 0 s together", above=0),
        gpus=draft.whole("gpus", "at least one GPU", minimum=1), columns={"wait": first - submit}, names={
            "user": draft.names("user", optional=True), "group": draft.names("vc", optional=True),
            "status": draft.names("status", optional=True),
        },
    )  # fmt: skip


def _objects(path: Path, text: str) -> list[tuple[int, dict[str, Any]]]:
    """Parse the list's objects one by one, with the lines they begin on for errors."""
    decode = json.JSONDecoder().raw_decode
    at = _end_of(_GAP, text, 0)
    if text[at : at + 1] != "[":
        raise FileError(str(path), 1, "", "no list", "a JSON list of jobs (Philly's cluster_job_log)")
    found: list[tuple[int, dict[str, Any]]] = []
    line, counted, at = 1, 0, at + 1
    while True:
        at = _end_of(_BLANK, text, at)
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            return found
        try:
            value, end = decode(text, at)
        except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
            where = text.count("\n", 0, getattr(error, "pos", at)) + 1
            raise FileError(str(path), where, "", f"a JSON error ({error})", "valid JSON") from None
        found.append((line, value if isinstance(value, dict) else {}))
        at = end


def _job(value: dict[str, Any]) -> dict[str, str]:
    """Return one job's columns as text; ``flaw`` describes invalid attempts."""
    job = {name: _text(value.get(name)) for name in ("jobid", "user", "vc", "status", "submitted_time")}
    attempts = value.get("attempts")
    attempts = [a for a in attempts if isinstance(a, dict)] if isinstance(attempts, list) else []
    starts = to_times([_text(a.get("start_time")) for a in attempts])
    ends = to_times([_text(a.get("end_time")) for a in attempts])
    job["flaw"] = _flaw(starts.tolist(), ends.tolist())
    usable = not job["flaw"]
    job["first_start"] = str(starts[0]) if usable else ""
    job["run_time"] = str(float(np.sum(ends - starts))) if usable else ""
    job["gpus"] = str(max((_gpus(a) for a in attempts), default=0))
    return job


def _flaw(starts: list[float], ends: list[float]) -> str:
    if not starts:
        return "never started"
    for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1):
        if start != start:
            return f"attempt {number} without a start_time"
        if end != end:
            return "still runs" if number == len(starts) else f"attempt {number} without an end_time"
        if end < start:
            return f"attempt {number} ending before it starts"
    return ""


def _gpus(attempt: dict[str, Any]) -> int:
    detail = attempt.get("detail")
    servers = [s for s in detail if isinstance(s, dict)] if isinstance(detail, list) else []
    return sum(len(s["gpus"]) for s in servers if isinstance(s.get("gpus"), list))


def _text(value: Any) -> str:
    return "" if value is None or value == "None" else str(value)


def _end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at
