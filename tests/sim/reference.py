"""A slow and obvious simulator in plain Python, written from the stated semantics; shares no code with gpusched."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Node:
    gpus: int
    cores: int = 10**6
    memory: int = 10**9


@dataclass(eq=False)  # a job is itself, however much another is like it
class Job:
    submit: float
    duration: float
    limit: float
    gpus: int
    cores: int = 0
    memory: int = 0
    after: int = -1
    # what happens to it
    start: float = math.nan
    end: float = math.nan
    runs_on: list[int] = field(default_factory=list)
    parts: int = 0
    running: bool = False
    arrived: bool = False
    last_start: float = math.nan


@dataclass
class Away:
    node: int
    start: float
    end: float
    drain: bool = False


Free = list[list[int]]


class Reference:
    """One partition. ``order``: fifo, sjf or smallest; ``mode``: none (the head blocks), skip or easy."""

    def __init__(self, jobs, nodes, order="fifo", mode="none", place="best-fit", away=(), kill=False, oracle=False):
        self.jobs, self.nodes, self.order, self.mode, self.place, self.away = jobs, nodes, order, mode, place, away
        self.now = -math.inf
        self.down: set[int] = set()
        for job in jobs:
            if kill and job.duration > job.limit:
                job.duration = job.limit
            if oracle:
                job.limit = job.duration
            job.parts = self.split(job)
        self.never = [j for j, job in enumerate(jobs) if self.hopeless(job)]

    # what a job needs

    def split(self, job):
        for parts in range(1, min(len(self.nodes), max(job.gpus, 1)) + 1):
            if job.gpus % parts == 0 and self.holders(job, parts, self.whole()) >= parts:
                return parts
        return 0

    def hopeless(self, job):
        return job.parts == 0 or (job.after >= 0 and self.hopeless(self.jobs[job.after]))

    def need(self, job, parts=None):
        parts = parts or job.parts
        return [job.gpus // parts, -(-job.cores // parts), -(-job.memory // parts)]

    def whole(self):
        return [[n.gpus, n.cores, n.memory] for n in self.nodes]

    def holders(self, job, parts, free):
        return sum(all(f >= x for f, x in zip(node, self.need(job, parts), strict=True)) for node in free)

    # what is free

    def free(self, at=None):
        """Free now, or at a later time by what is expected of the running jobs; nodes that are away have nothing."""
        free = self.whole()
        for job in self.jobs:
            if job.running and (at is None or max(self.now, job.last_start + job.limit) > at):
                for node in job.runs_on:
                    free[node] = [f - x for f, x in zip(free[node], self.need(job), strict=True)]
        return [[-1, -1, -1] if i in self.down else f for i, f in enumerate(free)]

    def choose(self, job, free):
        need = self.need(job)
        fitting = [i for i, f in enumerate(free) if f[0] >= 0 and all(a >= b for a, b in zip(f, need, strict=True))]
        if len(fitting) < job.parts:
            return None
        if self.place == "best-fit":
            fitting.sort(key=lambda i: (free[i][0], free[i][1], free[i][2], i))
        elif self.place == "worst-fit":
            fitting.sort(key=lambda i: (-free[i][0], -free[i][1], -free[i][2], i))
        return fitting[: job.parts]

    # time

    def instants(self):
        times = [a.start for a in self.away] + [a.end for a in self.away]
        times += [j.submit for i, j in enumerate(self.jobs) if not j.arrived and i not in self.never]
        times += [j.last_start + j.duration for j in self.jobs if j.running]
        return [t for t in times if self.now < t < math.inf]

    def turns(self):
        """Whether something that is no event of a job or node changes what may start."""
        return False

    def run(self):
        while times := self.instants():
            self.now = min(times)
            for job in self.jobs:
                if job.running and job.last_start + job.duration == self.now:
                    job.running, job.end = False, self.now
            self.change_nodes()
            for i, job in enumerate(self.jobs):
                if i not in self.never and job.submit <= self.now:
                    job.arrived = True
            self.decide()
        return self

    def change_nodes(self):
        for a in sorted(self.away, key=lambda a: (a.end, a.node)):
            if a.end == self.now:
                self.down.discard(a.node)
        for a in self.away:
            if a.start == self.now:
                self.down.add(a.node)
                for job in self.jobs:
                    if job.running and a.node in job.runs_on and not a.drain:
                        job.running = False

    def queue(self):
        waiting = [
            (self.key(j), i)
            for i, j in enumerate(self.jobs)
            if j.arrived
            and not j.running
            and math.isnan(j.end)
            and (j.after < 0 or not math.isnan(self.jobs[j.after].end))
        ]
        empty = [[-1, -1, -1] if i in self.down else f for i, f in enumerate(self.whole())]
        return [self.jobs[i] for _, i in sorted(waiting) if self.choose(self.jobs[i], empty) is not None]

    def key(self, job):
        return {"fifo": 0, "sjf": job.duration, "smallest": job.gpus}[self.order]

    def decide(self):
        head, shadow, spare = None, math.inf, None
        for job in self.queue():
            if head is not None and self.mode == "none":
                break
            free = self.free()
            late = self.mode == "easy" and head is not None and self.now + job.limit > shadow
            if late:
                free = [[min(a, b) for a, b in zip(f, s, strict=True)] for f, s in zip(free, spare, strict=True)]
            nodes = self.choose(job, free)
            if nodes is not None:
                self.begin(job, nodes)
                if late:
                    for n in nodes:
                        spare[n] = [s - x for s, x in zip(spare[n], self.need(job), strict=True)]
            elif head is None:
                head = job
                if self.mode == "easy":
                    shadow, spare = self.reserve(head)

    def reserve(self, head):
        """When the head can start at the latest, and what it will leave then on the nodes it will take."""
        spare = [[math.inf] * 3 for _ in self.nodes]
        for time in sorted({self.now} | {max(self.now, j.last_start + j.limit) for j in self.jobs if j.running}):
            free = self.free(time)
            if (nodes := self.choose(head, free)) is not None:
                for n in nodes:
                    spare[n] = [f - x for f, x in zip(free[n], self.need(head), strict=True)]
                return time, spare
        return math.inf, spare

    def begin(self, job, nodes):
        job.running, job.last_start, job.runs_on = True, self.now, nodes
        if math.isnan(job.start):
            job.start = self.now
