"""One job's page: its history and curves for everyone, and its command and output for those who may see them."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from gpusched.client.context import Client
from gpusched.client.costs import place_costs
from gpusched.client.logs import LogRequest, show_log
from gpusched.client.resolve import Resolver
from gpusched.client.sharing import sharing_of
from gpusched.errors import GpuschedError
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.queue.store import UsageRow
from gpusched.views.jobs import idle_line, preemptions_line, resizes_line, resources_line
from gpusched.views.show import event_line, private_fields
from gpusched.web.rows import job_row

TAIL_LINES, TAIL_BYTES = 400, 256 * 1024
_MAX_READERS, _MAX_OF_ONE, _SLOT_TIMEOUT_S = 8, 2, 10.0
_CONTROLS = re.compile(
    r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"
)
_slots = threading.BoundedSemaphore(_MAX_READERS)
_slots_of_one = defaultdict[str, threading.BoundedSemaphore](partial(threading.BoundedSemaphore, _MAX_OF_ONE))


def one_job(client: Client, text: str) -> JobRecord:
    """Return the named job; for an array's own id, the first task that has not ended.

    Raises:
        UsageError: No such job.
        GpuschedError: The controller refused its submission.
    """
    jobs = Resolver(client).target(text).jobs
    return next((job for job in jobs if job.state not in ENDED), jobs[0])


def details(client: Client, job: JobRecord, *, private: bool) -> dict[str, Any]:
    """Return the job's row, lines, events and curves; with ``private`` also what it runs."""
    reader = client.reader
    progress = reader.progress_of_job(job.id) if reader else []
    usage = reader.usage_of_job(job.id) if reader else []
    measured = any(row.gpu_s > row.energy_unknown_s for row in usage)
    partner, shared = sharing_of(client, job)
    cost = place_costs(client, (job,)).get(job.id)
    energy = sum(row.energy_j for row in usage) if measured else None
    row = job_row(job, energy, progress[-1] if progress else None, partner)
    lines = [
        ("requested", resources_line(job)),
        ("stopped", preemptions_line(job)),
        ("resized", resizes_line(job)),
        ("shares", shared),
        ("idle", idle_line(job, time.time())),
        ("place", "; ".join(cost.lines) if cost is not None else ""),
        ("after", ", ".join(f"{d.kind}:{d.job_id}" for d in job.spec.dependencies)),
        ("decided by", f"{job.policy} {job.policy_version or ''}".strip() if job.policy else ""),
    ]
    return {
        "job": row,
        "lines": [line for line in lines if line[1]],
        "events": [[round(e.time, 1), event_line(e)] for e in (reader.events(job_id=job.id) if reader else ())],
        "curves": _curves(usage),
        "private": [field for field in private_fields(job) if field[1]] if private else None,
    }


def _curves(usage: Iterable[UsageRow]) -> list[dict[str, Any]]:
    """Return for each node the points of its buckets: begin, measured utilization (0..1), mean W per GPU."""
    by_node: dict[str, list[list[float | None]]] = {}
    for row in usage:
        if row.gpu_s <= 0:
            continue
        use = round(row.util_s / row.util_known_s, 4) if row.util_known_s else None
        known_s = row.gpu_s - row.energy_unknown_s
        watts = round(row.energy_j / known_s, 1) if known_s > 0 else None
        by_node.setdefault(row.node, []).append([row.bucket, use, watts])
    return [{"node": node, "points": points} for node, points in sorted(by_node.items())]


@contextmanager
def _read_slot(viewer: str) -> Iterator[None]:
    """Limit concurrent log reads, those of one viewer too: each may wait for a node that does not answer."""
    with ExitStack() as held:
        for slots in (_slots_of_one[viewer], _slots):
            if not slots.acquire(timeout=_SLOT_TIMEOUT_S):
                raise GpuschedError("too many logs are being read", "try again")
            held.callback(slots.release)
        yield


def log_tail(client: Client, job: JobRecord, rank: int, attempt: int | None, viewer: str) -> str:
    """Return the last lines of the job's output, as plain text, for this user.

    Raises:
        GpuschedError: There is none, or it cannot be read.
    """
    chunks: deque[bytes] = deque()
    size = 0

    def keep(_: int, chunk: bytes) -> None:
        nonlocal size
        chunks.append(chunk)
        size += len(chunk)
        while size - len(chunks[0]) > TAIL_BYTES:
            size -= len(chunks.popleft())

    is_own_job = os.geteuid() == job.uid
    request = LogRequest(job=job.id, rank=rank, attempt=attempt, tail=TAIL_LINES, own_files=is_own_job)
    with _read_slot(viewer):
        show_log(client, request, keep, lambda _: None)
    return plain_text(b"".join(chunks)[-TAIL_BYTES:])


def plain_text(output: bytes) -> str:
    """Return what a terminal would show, without colors; of an overwritten line, the last state."""
    lines = output.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")
    return "\n".join(_CONTROLS.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in lines)
