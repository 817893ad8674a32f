"""Updates interference beliefs by the measured pace of ended attempts, their neighbours and their GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpusched.model.interference import AttemptSpeed, JobShape, Link, Neighbour, SpeedSample, job_class_of
from gpusched.model.jobs import JobRecord
from gpusched.model.progress import JobProgress
from gpusched.model.resources import Inventory
from gpusched.queue.store import RunRecord, Store
from gpusched.sched.interference.beliefs import learn_attempt

MAX_PER_CYCLE = 64  # attempts per cycle, so that many ends at once do not delay it
_MAX_NEIGHBOURS = 64  # neighbours considered, the longest ones first
_MIN_SHARE = 0.01


def learn(store: Store, inventory: Inventory, ended: Sequence[JobRecord]) -> None:
    """Update the beliefs by these attempts, inside the transaction that records their end: exactly once, or not at all.

    ``ended``: the jobs as they ran, with their allocation. Only the last part of an attempt counts: the window of
    `JobProgress.steps_per_s`, and the neighbours at that time.
    """
    paces: list[tuple[JobRecord, _AttemptPace]] = []
    for job in ended:
        if job.allocation is not None and job.allocation.gpus and len(paces) < MAX_PER_CYCLE:
            reports = (report for report in store.progress_of_job(job.id) if report.attempt == job.attempt)
            paces += [(job, _AttemptPace(pace, report.since, report.at))
                      for report in reports if (pace := _pace(report)) is not None
                      and report.since is not None and report.at is not None and report.since < report.at]  # fmt: skip
    if not paces:
        return
    runs = store.runs(min(pace.since for _, pace in paces), max(pace.until for _, pace in paces))
    inputs = _LearningInputs(store, inventory, inventory.topology.racks(), runs, {})
    for job, attempt in paces:
        sample = inputs.sample(job, attempt)
        kinds = {sample.kind, *(n.kind for n in sample.neighbours)}
        known = {kind: belief for kind in kinds if (belief := store.belief(kind)) is not None}
        changed, log_pace = learn_attempt(known, sample)
        store.put_beliefs(changed)
        if log_pace is not None and job.allocation is not None:
            gpus = tuple(sorted((p.node, index) for p in job.allocation.parts for index in p.gpus))
            store.add_pace(
                AttemptSpeed(job_id=job.id, kind=sample.kind, shape=sample.shape, log_pace=log_pace, gpus=gpus)
            )


class _AttemptPace(NamedTuple):
    """The pace of an attempt, (per second, unit), between these times."""

    pace: tuple[float, str]
    since: float
    until: float


def _pace(progress: JobProgress) -> tuple[float, str] | None:
    """Return the samples per second if reported, else the steps; None: neither."""
    if progress.samples_per_s is not None:
        return progress.samples_per_s, "samples"
    return None if progress.steps_per_s is None else (progress.steps_per_s, "steps")


class _LearningInputs(NamedTuple):
    """The attempts in the time in question; node -> rack; a cache of job names."""

    store: Store
    inventory: Inventory
    racks: Mapping[str, str]
    runs: Sequence[RunRecord]
    names: dict[str, str]

    def sample(self, job: JobRecord, attempt: _AttemptPace) -> SpeedSample:
        """Return an attempt's pace with its shape and its neighbours."""
        parts = Counter({part.node: len(part.gpus) for part in (job.allocation.parts if job.allocation else ())})
        types = {node.gpu_type for name in parts if (node := self.inventory.node(name)) is not None}
        shape = JobShape(
            gpu_type="+".join(sorted(types)), unit=attempt.pace[1], gpus=parts.total(),
            max_gpus_per_node=max(parts.values()), nodes=len(parts),
            racks=len({self.racks.get(node, "") for node in parts}),
        )  # fmt: skip
        return SpeedSample(
            kind=job_class_of(job.user, job.spec.name), shape=shape,
            pace=attempt.pace[0], seconds=attempt.until - attempt.since,
            neighbours=self._neighbours(job, set(parts), attempt.since, attempt.until),
        )  # fmt: skip

    def _neighbours(self, job: JobRecord, nodes: set[str], since: float, until: float) -> tuple[Neighbour, ...]:
        found: list[tuple[float, Link, RunRecord]] = []
        for run in self.runs:
            end = until if run.end_time is None else min(run.end_time, until)
            share = (end - max(run.start_time, since)) / (until - since)
            link: Link | None
            if share > _MIN_SHARE and run.job_id != job.id:
                link = "gpu" if _same_gpus(job, run) else shared_link(nodes, set(run.nodes), self.racks)
                found += [(share, link, run)] if link is not None else []
        found.sort(key=lambda item: (-item[0], item[2].job_id, item[2].attempt))
        return tuple(
            Neighbour(job_class_of(run.user, self._name(run.job_id)), link, share)
            for share, link, run in found[:_MAX_NEIGHBOURS]
        )

    def _name(self, job_id: str) -> str:
        if job_id not in self.names:
            job = self.store.job(job_id)
            self.names[job_id] = job.spec.name if job is not None else "?"
        return self.names[job_id]


def _same_gpus(job: JobRecord, run: RunRecord) -> bool:
    parts = job.allocation.parts if job.allocation is not None else ()
    return any(set(part.gpus) & set(run.shareable.get(part.node, ())) for part in parts)


def shared_link(nodes: set[str], other_nodes: set[str], racks: Mapping[str, str]) -> Link | None:
    """Return the narrowest link that two jobs on these nodes share; None: none."""
    if nodes & other_nodes:
        return "nic" if len(nodes) > 1 and len(other_nodes) > 1 else "server"
    switches = _switches(nodes, racks), _switches(other_nodes, racks)
    return "uplink" if len(switches[0]) > 1 and len(switches[1]) > 1 and switches[0] & switches[1] else None


def _switches(nodes: Iterable[str], racks: Mapping[str, str]) -> set[str]:
    return {racks[node] for node in nodes if node in racks}
