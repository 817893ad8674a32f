"""The reference simulator under limits of users, groups and classes; what has been used is summed anew each time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tests.sim.reference import Reference
from tests.sim.reference_orders import Conservative, Srtf

HOUR, WEEK = 3600, 7 * 24 * 3600


@dataclass
class Bound:
    """``counts``: whether a job counts for it. ``unit``: jobs, gpus or gpu_s."""

    unit: str
    most: int
    counts: Any

    def cost(self, job):
        return {"jobs": 1, "gpus": job.gpus, "gpu_s": int(job.gpus * min(job.limit, WEEK))}[self.unit]


@dataclass
class Run:
    job: Any
    start: float
    end: float = field(default=math.nan)


class Bounded:
    """Beside one of the references: ``bounds``, and the runs that count for them."""

    at_every_hour = False

    def __init__(self, jobs, *args, bounds=(), **options):
        self.bounds, self.runs, self.planned = bounds, [], []
        super().__init__(jobs, *args, **options)

    def hopeless(self, job):
        return any(b.counts(job) and b.cost(job) > b.most for b in self.bounds) or super().hopeless(job)

    # what is taken

    def used(self, bound, hour):
        """GPU seconds of runs that are over, of the seven days before that hour began and since."""
        return sum(
            run.job.gpus * max(0.0, run.end - max(run.start, hour * HOUR - WEEK))
            for run in self.runs
            if not math.isnan(run.end) and bound.counts(run.job)
        )

    def full(self, job):
        for bound in self.bounds:
            if not bound.counts(job):
                continue
            holding = [j for j in self.jobs if j.running or any(j is p for p in self.planned)]
            taken = sum(bound.cost(j) for j in holding if bound.counts(j))
            if bound.unit == "gpu_s":
                taken += self.used(bound, self.now // HOUR)
            if bound.cost(job) > max(bound.most - taken, 0):
                return True
        return False

    def queue(self):
        for job in super().queue():
            if not self.full(job):
                yield job

    # what runs

    def begin(self, job, nodes):
        self.close()
        super().begin(job, nodes)
        self.runs.append(Run(job, self.now))

    def close(self):
        for run in self.runs:
            if math.isnan(run.end) and not (run.job.running and run.job.last_start == run.start):
                run.end = self.now

    def change_nodes(self):
        self.close()
        super().change_nodes()
        self.close()

    # time

    def instants(self):
        self.usual = super().instants()
        waits = any(j.arrived and not j.running and math.isnan(j.end) for j in self.jobs)
        if waits and self.total(self.now // HOUR) > 0:
            return [*self.usual, (self.now // HOUR + 1) * HOUR]
        return self.usual

    def total(self, hour):
        return sum(self.used(b, hour) for b in self.bounds if b.unit == "gpu_s")

    def turns(self):
        """Whether something has just left the seven days."""
        if self.now % HOUR:
            return False
        return self.at_every_hour or self.total(self.now // HOUR) < self.total(self.now // HOUR - 1)

    def decide(self):
        if self.now in self.usual or self.turns():
            self.planned, begun = [], -1
            while begun < len(self.runs):  # what has started may let others start
                begun = math.inf if self.at_every_hour else len(self.runs)
                super().decide()
                self.close()
            self.planned = []


class BoundedReference(Bounded, Reference):
    pass


class BoundedConservative(Bounded, Conservative):
    pass


class BoundedSrtf(Bounded, Srtf):
    """A limit keeps who waits from nodes; what is stopped counts until it is gone."""

    at_every_hour = True

    def choose(self, job, free, used=None):
        return None if not job.running and self.full(job) else super().choose(job, free, used)

    def take(self, room, job, nodes, gpu=-1):
        super().take(room, job, nodes, gpu)
        if not job.running:
            self.planned.append(job)
