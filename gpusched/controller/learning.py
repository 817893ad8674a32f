"""What the paces of ended attempts say of their kinds, of those that ran beside them, and of their GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpusched.model.interference import AttemptSpeed, JobShape, Link, Neighbour, SpeedSample, job_class_of
from gpusched.model.jobs import JobRecord
from gpusched.model.progress import JobProgress
from gpusched.model.resources import Inventory
from gpusched.queue.store import RunRecord, Store
from gpusched.sched.interference.beliefs import learned

MOST_AT_ONCE = 64  # attempts that a cycle learns from, so that it is not held up where very many end together
_MOST_BESIDE = 64  # neighbours that are looked at, the longest ones first
_LEAST_SHARE = 0.01


def learn(store: Store, inventory: Inventory, ended: Sequence[JobRecord]) -> None:
    """Take up what these attempts told, inside the transaction that writes down their end: once, or not at all.

    ``ended``: the jobs as they ran, with their allocation. What they told late in the attempt counts: the window of
    `JobProgress.steps_per_s`, and who was beside them then.
    """
    told: list[tuple[JobRecord, _AttemptPace]] = []
    for job in ended:
        if job.allocation is not None and job.allocation.gpus and len(told) < MOST_AT_ONCE:
            of_attempt = (one for one in store.progress_of_job(job.id) if one.attempt == job.attempt)
            told += [(job, _AttemptPace(pace, one.since,
            one.at)) for one in of_attempt if (pace := _pace(one)) is not None
                     and one.since is not None and one.at is not None and one.since < one.at]  # fmt: skip
    if not told:
        return
    runs = store.runs(min(one.since for _, one in told), max(one.until for _, one in told))
    scene = _LearningInputs(store, inventory, inventory.topology.racks(), runs, {})
    for job, one in told:
        seen = scene.measured(job, one)
        kinds = {seen.kind, *(n.kind for n in seen.neighbours)}
        known = {kind: belief for kind in kinds if (belief := store.belief(kind)) is not None}
        changed, log_pace = learned(known, seen)
        store.put_beliefs(changed)
        if log_pace is not None and job.allocation is not None:
            gpus = tuple(sorted((p.node, index) for p in job.allocation.parts for index in p.gpus))
            store.add_pace(AttemptSpeed(job_id=job.id, kind=seen.kind, shape=seen.shape, log_pace=log_pace, gpus=gpus))


class _AttemptPace(NamedTuple):
    """What an attempt told: (a second, of what), between these times."""

    pace: tuple[float, str]
    since: float
    until: float


def _pace(told: JobProgress) -> tuple[float, str] | None:
    """Its samples a second where it says these, else its steps; None: it told neither."""
    if told.samples_per_s is not None:
        return told.samples_per_s, "samples"
    return None if told.steps_per_s is None else (told.steps_per_s, "steps")


class _LearningInputs(NamedTuple):
    """All attempts of the time in question; node -> rack; names of jobs that were looked up."""

    store: Store
    inventory: Inventory
    racks: Mapping[str, str]
    runs: Sequence[RunRecord]
    names: dict[str, str]

    def measured(self, job: JobRecord, told: _AttemptPace) -> SpeedSample:
        """What an attempt told, where it was and who was beside it."""
        parts = Counter({part.node: len(part.gpus) for part in (job.allocation.parts if job.allocation else ())})
        types = {node.gpu_type for name in parts if (node := self.inventory.node(name)) is not None}
        shape = JobShape(
            gpu_type="+".join(sorted(types)), unit=told.pace[1], gpus=parts.total(), most=max(parts.values()),
            nodes=len(parts), racks=len({self.racks.get(node, "") for node in parts}),
        )  # fmt: skip
        return SpeedSample(
            kind=job_class_of(job.user, job.spec.name), shape=shape, pace=told.pace[0], seconds=told.until - told.since,
            neighbours=self._beside(job, set(parts), told.since, told.until),
        )  # fmt: skip

    def _beside(self, job: JobRecord, nodes: set[str], since: float, until: float) -> tuple[Neighbour, ...]:
        found: list[tuple[float, Link, RunRecord]] = []
        for run in self.runs:
            end = until if run.end_time is None else min(run.end_time, until)
            share = (end - max(run.start_time, since)) / (until - since)
            link: Link | None
            if share > _LEAST_SHARE and run.job_id != job.id:
                link = "gpu" if _same_gpus(job, run) else shared_link(nodes, set(run.nodes), self.racks)
                found += [(share, link, run)] if link is not None else []
        found.sort(key=lambda one: (-one[0], one[2].job_id, one[2].attempt))
        return tuple(
            Neighbour(job_class_of(run.user, self._name(run.job_id)), link, share)
            for share, link, run in found[:_MOST_BESIDE]
        )

    def _name(self, job_id: str) -> str:
        if job_id not in self.names:
            job = self.store.job(job_id)
            self.names[job_id] = job.spec.name if job is not None else "?"
        return self.names[job_id]


def _same_gpus(job: JobRecord, run: RunRecord) -> bool:
    parts = job.allocation.parts if job.allocation is not None else ()
    return any(set(part.gpus) & set(run.shareable.get(part.node, ())) for part in parts)


def shared_link(mine: set[str], its: set[str], racks: Mapping[str, str]) -> Link | None:
    """The link that two jobs on these nodes share, the narrowest of several; None: none."""
    if mine & its:
        return "nic" if len(mine) > 1 and len(its) > 1 else "server"
    both = _switches(mine, racks), _switches(its, racks)
    return "uplink" if len(both[0]) > 1 and len(both[1]) > 1 and both[0] & both[1] else None


def _switches(nodes: Iterable[str], racks: Mapping[str, str]) -> set[str]:
    return {racks[node] for node in nodes if node in racks}
