"""The reference simulator with jobs that go at rates, share GPUs and change size: as slow and as obvious.

Every running job's work is brought up to now at every instant; who sits on which GPU is a list of jobs per GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tests.sim.reference import Job, Node, Reference

MOST_PLACES = 4  # that are tried for a job that would outlast the wait of the first


@dataclass
class PacedNode(Node):
    kind: int = 0
    shared: list[list[PacedJob]] = field(default_factory=list)  # the jobs on each GPU that is shared


@dataclass(eq=False)
class PacedJob(Job):
    model: int = -1
    milli: int = 1000
    # what happens to it
    left: float = math.nan
    had: float = 0.0
    rate: float = 1.0
    resumes: float = 0.0
    mate: PacedJob | None = None
    killed: bool = False


class Speeds:
    """alone[kind][model], apart: over several nodes; beside[kind, model, other]: a factor; missing: not measured."""

    def __init__(self, alone, apart, beside):
        self.alone, self.apart, self.beside = alone, apart, beside

    def on(self, job, kind):
        if job.model < 0:
            return 1.0
        return self.alone[kind][job.model] * (self.apart if job.parts > 1 else 1.0)


class PacedReference(Reference):
    """``share``: no, fractions or pairs. ``kill``: limits end jobs, counted in time run."""

    def __init__(self, jobs, nodes, speeds, order="fifo", mode="none", place="best-fit", away=(), kill=False,
                 share="no"):  # fmt: skip
        super().__init__(jobs, nodes, order, mode, place, away)
        self.speeds, self.kill, self.share = speeds, kill, share
        self.closed: set[int] = set()
        for node in nodes:
            node.shared = [[] for _ in range(node.gpus)]
        for job in jobs:
            job.left = job.duration
            slowest = min(speeds.on(job, kind) for kind in {n.kind for n in nodes})
            job.estimate = job.duration / slowest
            if order == "sjf":
                job.limit_believed = job.estimate
            else:
                job.limit_believed = job.limit

    def key(self, job):
        return {"fifo": 0, "sjf": job.estimate, "smallest": job.gpus}[self.order]

    def part(self, job):
        return self.share != "no" and job.gpus == 1 and job.milli < 1000

    # how fast

    def rate(self, job):
        slowest = math.inf
        for n in job.runs_on:
            kind = self.nodes[n].kind
            alone = self.speeds.on(job, kind)
            beside = [
                alone * self.speeds.beside[kind, job.model, other.model]
                for other in self.neighbours(job)
                if job.model >= 0 and other.model >= 0 and (kind, job.model, other.model) in self.speeds.beside
            ]
            slowest = min(slowest, *beside, alone)
        return slowest

    def neighbours(self, job):
        if job.mate is not None:
            return [job.mate]
        return [o for n in job.runs_on for gpu in self.nodes[n].shared if job in gpu for o in gpu if o is not job]

    def progress(self, until):
        for job in self.jobs:
            if job.running:
                seconds = max(0.0, until - max(self.now, job.resumes))
                job.left -= seconds * job.rate
                job.had += seconds

    def end_of(self, job):
        rest = min(job.left / job.rate, job.limit - job.had if self.kill else math.inf)
        return max(self.now, job.resumes) + rest

    # time

    def instants(self):
        times = [a.start for a in self.away] + [a.end for a in self.away]
        times += [j.submit for i, j in enumerate(self.jobs) if not j.arrived and i not in self.never]
        times += [self.end_of(j) for j in self.jobs if j.running]
        return [t for t in times if self.now < t < math.inf]

    def run(self):
        while times := self.instants():
            then = min(times)
            ending = [j for j in self.jobs if j.running and self.end_of(j) == then]
            self.progress(then)
            self.now = then
            for job in ending:
                job.end, job.killed = self.now, job.left > 0
                self.leave(job)
            self.change_nodes()
            happened = bool(ending) or self.turns() or any(self.now in (a.start, a.end) for a in self.away)
            for i, job in enumerate(self.jobs):
                if i not in self.never and job.submit <= self.now and not job.arrived:
                    job.arrived = True
                    # one that waits for another job changes nothing, and nobody is asked
                    happened = happened or job.after < 0 or not math.isnan(self.jobs[job.after].end)
            if happened:
                self.decide()
            for job in self.jobs:
                if job.running:
                    job.rate = self.rate(job)
        return self

    def change_nodes(self):
        before = [j for j in self.jobs if j.running]
        super().change_nodes()
        for job in before:
            if not job.running:
                self.leave(job)
                job.left, job.had = job.duration, 0.0

    def leave(self, job):
        job.running = False
        if job.mate is not None:
            job.mate.mate = job.mate = None
        for node in self.nodes:
            for gpu in node.shared:
                if job in gpu:
                    gpu.remove(job)

    # what is free

    def state(self, at=None):
        """([GPUs, cores, memory] free, the thousandths used of every shared GPU) by node, now or as expected later."""
        gone = [] if at is None else [
            j for j in self.jobs if j.running and max(self.now, j.last_start + j.limit_believed) <= at
        ]  # fmt: skip
        stay = [j for j in self.jobs if j.running and all(j is not g for g in gone)]
        free = self.whole()
        used = [[sum(j.milli for j in gpu if any(j is s for s in stay)) for gpu in node.shared] for node in self.nodes]
        counted = []
        for job in stay:
            with_mate = any(job.mate is c for c in counted)
            counted.append(job)
            for n in job.runs_on:
                gpus, cores, memory = self.need(job)
                held = 0 if self.part(job) or with_mate else gpus
                free[n] = [f - x for f, x in zip(free[n], (held, cores, memory), strict=True)]
        for n, node in enumerate(used):
            free[n][0] -= sum(milli > 0 for milli in node)
        return [[-1, -1, -1] if i in self.down else f for i, f in enumerate(free)], used

    def free(self, at=None):
        return self.state(at)[0]

    def choose(self, job, free, used=None):
        if not self.part(job):
            return super().choose(job, free)
        used = used or [[0] * n.gpus for n in self.nodes]
        _, cores, memory = self.need(job)
        found = []
        for i, (gpus, has_cores, has_memory) in enumerate(free):
            left = [1000 - milli - job.milli for milli in used[i] if milli > 0 and milli + job.milli <= 1000]
            if gpus < 0 or has_cores < cores or has_memory < memory or not (left or gpus > 0):
                continue
            if self.place == "best-fit":
                found.append((min(left, default=1000 - job.milli), gpus, has_cores, has_memory, i))
            elif self.place == "worst-fit":
                found.append((-gpus, -has_cores, -has_memory, i))
            else:
                found.append((i,))
        return [min(found)[-1]] if found else None

    # deciding

    def decide(self):
        if self.share == "no":
            self.plain_decide()
        else:
            self.shared_decide()

    def plain_decide(self):
        limits = [job.limit for job in self.jobs]
        for job in self.jobs:
            job.limit = job.limit_believed
        super().decide()
        for job, limit in zip(self.jobs, limits, strict=True):
            job.limit = limit

    def shared_decide(self):
        head, shadow, closed = None, math.inf, set()
        for job in self.queue():
            if head is not None and self.mode == "none":
                break
            free, used = self.state()
            if self.mode == "easy" and head is not None and self.now + job.limit_believed > shadow:
                free = [[-1, -1, -1] if i in closed else f for i, f in enumerate(free)]
            nodes = self.choose(job, free, used)
            if nodes is not None:
                self.begin(job, nodes)
            elif head is None:
                head = job
                if self.mode == "easy":
                    shadow, closed = self.reserve_nodes(head)

        if self.share == "pairs":
            self.pair_up(list(self.queue()))

    def pair_up(self, waiting):
        """Behind the walk: beside those that run, but so that the first that waits fits no later."""
        head, shadow, alone = None, math.inf, [j for j in self.jobs if j.running and j.mate is None]
        for job in waiting:
            late = head is not None and self.now + job.limit_believed > shadow
            before = job.start, job.last_start, job.runs_on, job.resumes
            for mate in self.mates(job, alone)[: MOST_PLACES if late else 1]:
                self.begin(job, list(mate.runs_on))
                job.mate, mate.mate = mate, job
                if not late or self.reserve_nodes(head)[0] <= shadow:
                    break
                job.running, job.mate, mate.mate = False, None, None
                job.start, job.last_start, job.runs_on, job.resumes = before
            if not job.running and head is None:
                head = job
                shadow, _ = self.reserve_nodes(head)

    def reserve_nodes(self, head):
        running = [j for j in self.jobs if j.running]
        for time in sorted({self.now} | {max(self.now, j.last_start + j.limit_believed) for j in running}):
            free, used = self.state(time)
            if (nodes := self.choose(head, free, used)) is not None:
                return time, set(nodes)
        return math.inf, set()

    def mates(self, job, alone):
        """Return the jobs of ``alone`` that it may share with, the best first."""
        if self.part(job) or job.model < 0:
            return []
        free, _ = self.state()
        found = []
        for i, other in enumerate(self.jobs):
            if not any(other is one for one in alone):
                continue
            same = other.running and (other.parts, other.gpus) == (job.parts, job.gpus)
            if not same or other.mate is not None or self.part(other) or other.model < 0:
                continue
            _, cores, memory = self.need(job)
            if any(n in self.down or free[n][1] < cores or free[n][2] < memory for n in other.runs_on):
                continue
            pairs = [
                (self.nodes[n].kind, one, two)
                for n in other.runs_on
                for one, two in ((job.model, other.model), (other.model, job.model))
            ]
            if any(pair not in self.speeds.beside for pair in pairs):
                continue
            both = min(
                self.speeds.beside[k, job.model, other.model] + self.speeds.beside[k, other.model, job.model]
                for k, _, _ in pairs
            )
            if both > 1:
                found.append((-both, i))
        return [self.jobs[i] for _, i in sorted(found)]

    def begin(self, job, nodes):
        super().begin(job, nodes)
        job.resumes = self.now
        if self.part(job):
            gpus = self.nodes[nodes[0]].shared
            room = [
                (1000 - sum(j.milli for j in gpu) - job.milli, i)
                for i, gpu in enumerate(gpus)
                if gpu and sum(j.milli for j in gpu) + job.milli <= 1000
            ]
            gpu = gpus[min(room)[1]] if room else next(g for g in gpus if not g)
            gpu.append(job)
