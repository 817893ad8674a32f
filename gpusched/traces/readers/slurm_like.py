"""Helios and Acme: one CSV row per Slurm-like job with its submit, start and end time.

SenseTime's Helios, ``cluster_log.csv`` of one of its clusters (Hu et al., SC 2021): S-Lab-System-Group/HeliosData.
Shanghai AI Lab's Acme, ``trace_seren.csv`` and ``trace_kalos.csv`` (Hu et al., NSDI 2024): InternLM/AcmeTrace.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpusched.model.units import count_of
from gpusched.traces.readers.columns import read_csv, stem
from gpusched.traces.readers.draft import MAX_WHOLE, Draft
from gpusched.traces.trace import Floats, Ints, Trace

_REQUIRED = ("job_id", "user", "gpu_num", "state", "submit_time", "start_time", "end_time")
_OPTIONAL = ("cpu_num", "node_num", "duration", "queue")
_ACTIVE = frozenset({"PENDING", "RUNNING", "SUSPENDED"})


def read_helios(path: Path, *, strict: bool) -> Trace:
    """Read the trace; ``vc`` is the group. Times are the cluster's own clock (no zone is given).

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    return _read(path, "a Helios cluster_log.csv", "vc", (), strict)


def read_acme(path: Path, *, strict: bool) -> Trace:
    """Read the trace; the workload ``type`` (Pretrain, Evaluation...) is the group. Kalos gives memory per pod (node).

    Raises:
        FileError: Not such a file; or strict, and a row is bad.
    """
    return _read(path, "an Acme job trace", "type", ("mem_per_pod_GB",), strict)


def _read(path: Path, what: str, group: str, more: tuple[str, ...], strict: bool) -> Trace:
    """Read the trace; ``group`` names the column of the jobs' groups.

    Run time is ``end_time`` - ``start_time`` and waiting ``start_time`` - ``submit_time``: Acme's Kalos log counts the
    waiting into its ``duration``. Jobs that never started, or have not ended, are left out. CPU-only jobs are kept.
    """
    draft = Draft(read_csv(path, what, _REQUIRED, (*_OPTIONAL, group, *more)), strict=strict)
    ids, submit = draft.ids("job_id"), draft.times("submit_time")
    _leave_out_without_run(draft)
    start, end = draft.times("start_time"), draft.times("end_time")
    duration = end - start
    draft.reject(start < submit, "start_time", "a time not before submit_time")
    draft.reject(duration <= 0, "end_time", "a time after start_time")
    cores = draft.whole("cpu_num", "a whole number of CPUs", optional=True)
    nodes = draft.whole("node_num", "a whole number of nodes", optional=True, unknown=0)
    gpus = draft.whole("gpu_num", "a whole number of GPUs (0 for a CPU job)")
    _note_differing(draft, duration)
    columns: dict[str, Floats | Ints] = {"cores": cores, "nodes": nodes, "wait": start - submit}
    if draft.has("mem_per_pod_GB"):
        columns["memory_mib"] = _memory_mib(draft, nodes)
    return draft.trace(
        stem(path), epoch=None, rebase=True, ids=ids, submit=submit, duration=duration, gpus=gpus, columns=columns,
        names={
            "user": draft.names("user", optional=True), "group": draft.names(group, optional=True),
            "status": draft.names("state"),
        },
    )  # fmt: skip


def _leave_out_without_run(draft: Draft) -> None:
    draft.leave_out(draft.where("state", lambda s: s.upper() in _ACTIVE), "state", "a job that has ended")
    cancelled = draft.where("state", lambda s: s.upper().startswith("CANCEL"))
    starts, ends = draft.text("start_time"), draft.text("end_time")
    no_run = np.fromiter((not a or a == b for a, b in zip(starts, ends, strict=True)), np.bool_, len(draft))
    draft.leave_out(cancelled & no_run, "start_time", "a job that ran before it was cancelled")


def _memory_mib(draft: Draft, nodes: Ints) -> Ints:
    gb = draft.numbers("mem_per_pod_GB", "a number of GB", minimum=0, optional=True)
    known = np.isfinite(gb) & (nodes > 0)
    mib = np.where(known, np.where(known, gb, 0) * nodes * 1024, -1.0)
    draft.reject(mib > MAX_WHOLE, "mem_per_pod_GB", "an amount that machines can have")
    return np.round(np.minimum(mib, MAX_WHOLE)).astype(np.int64)


def _note_differing(draft: Draft, duration: Floats) -> None:
    if not draft.has("duration"):
        return
    recorded = draft.numbers("duration", "a number of seconds", optional=True)
    with np.errstate(invalid="ignore"):
        differing = int(np.count_nonzero(draft.kept & (np.abs(recorded - duration) > 1)))
    if differing:
        draft.notes.append(
            f"{count_of(differing, 'row')} with a duration other than end_time - start_time, which is used"
        )
