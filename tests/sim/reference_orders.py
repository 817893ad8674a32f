"""The reference for what the plain one lacks: SRTF with restarts, conservative backfill, and orders that change."""

from __future__ import annotations

import math

from tests.sim.reference import Reference
from tests.sim.reference_rates import PacedReference


class Srtf(PacedReference):
    """Least work left first; who is in the way is stopped, keeps its work, and pays what its restart costs later."""

    def __init__(self, *args, restart_s=0.0, by_model=None, **options):
        super().__init__(*args, **options)
        self.restart_s, self.by_model = restart_s, by_model or {}
        for job in self.jobs:
            job.restarts = 0

    def change_nodes(self):
        before = [j for j in self.jobs if j.running]
        super().change_nodes()
        for job in before:
            job.restarts += not job.running

    def decide(self):
        active = [
            (j.left, i)
            for i, j in enumerate(self.jobs)
            if j.arrived and math.isnan(j.end) and (j.after < 0 or not math.isnan(self.jobs[j.after].end))
        ]
        # what nobody has, and what is left of all: GPUs, cores and memory by node, and the thousandths used of each GPU
        idle, whole = self.state(), ([], [[0] * node.gpus for node in self.nodes])
        whole[0].extend([-1, -1, -1] if i in self.down else f for i, f in enumerate(self.whole()))
        plan, kept = [], []
        for _, i in sorted(active):
            job = self.jobs[i]
            if job.running and all(n in self.down or self.left_for(job, n, *whole) for n in job.runs_on):
                kept.append(i)
                self.take(whole, job, job.runs_on, self.gpu_of(job))
                continue
            room = next((room for room in (idle, whole) if self.choose(job, *room)), None)
            if room is not None:
                nodes = self.choose(job, *room)
                gpu = self.gpu_for(job, nodes[0], room[1], idle[1]) if self.part(job) else -1
                self.take(whole, job, nodes, gpu)
                self.take(idle, job, nodes, gpu)
                plan.append((job, nodes, gpu))
        for i, job in enumerate(self.jobs):
            if job.running and i not in kept:
                self.leave(job)
                job.restarts += 1
        for job, nodes, gpu in plan:
            Reference.begin(self, job, nodes)
            if gpu >= 0:
                self.nodes[nodes[0]].shared[gpu].append(job)
            job.resumes = self.now + (self.by_model.get(job.model, self.restart_s) if job.restarts else 0.0)

    def gpu_of(self, job):
        gpus = self.nodes[job.runs_on[0]].shared
        return next((i for i, gpu in enumerate(gpus) if any(one is job for one in gpu)), -1)

    def left_for(self, job, n, free, used):
        """Whether those before it left it what it has of a node."""
        gpus, cores, memory = self.need(job)
        if self.part(job) and used[n][self.gpu_of(job)] > 0:
            gpus = 0 if used[n][self.gpu_of(job)] + job.milli <= 1000 else math.inf
        return all(f >= x for f, x in zip(free[n], (gpus, cores, memory), strict=True))

    def gpu_for(self, job, n, used, now):
        """The GPU that is fullest with it; else a new one, rather one that nobody shares now."""
        fits = [(1000 - milli, i) for i, milli in enumerate(used[n]) if milli > 0 and milli + job.milli <= 1000]
        return min(fits or [(now[n][i] > 0, i) for i, milli in enumerate(used[n]) if milli == 0])[1]

    def take(self, room, job, nodes, gpu=-1):
        free, used = room
        for n in nodes:
            gpus, cores, memory = self.need(job)
            if gpu >= 0:
                gpus = 0 if used[n][gpu] > 0 else 1
                used[n][gpu] += job.milli
            free[n] = [f - x for f, x in zip(free[n], (gpus, cores, memory), strict=True)]


class Conservative(PacedReference):
    """Everybody has a reservation, made anew in order of the queue at every decision."""

    def decide(self):
        soon = math.nextafter(self.now, math.inf)
        planned = [
            (-math.inf, max(j.last_start + j.limit_believed, soon), j, j.runs_on) for j in self.jobs if j.running
        ]
        for job in self.queue():
            times = sorted({self.now} | {t for start, end, _, _ in planned for t in (start, end) if t > self.now})
            for start in times:
                end = start + job.limit_believed
                free = [self.free_at(planned, t) for t in times if t == start or start < t < end]
                least = [[min(column) for column in zip(*node, strict=True)] for node in zip(*free, strict=True)]
                nodes = self.choose(job, least)
                if nodes is not None:
                    planned.append((start, end, job, nodes))
                    if start == self.now:
                        self.begin(job, nodes)
                    break

    def free_at(self, planned, time):
        free = self.whole()
        for start, end, job, nodes in planned:
            if start <= time < end:
                for n in nodes:
                    free[n] = [f - x for f, x in zip(free[n], self.need(job), strict=True)]
        return [[-1, -1, -1] if i in self.down else f for i, f in enumerate(free)]


class Changing(PacedReference):
    """Orders whose keys change while jobs wait: wfp3 and unicef (limits), n GPUs, waited w, expected r."""

    def key(self, job):
        waited, expected = self.now - job.submit, job.limit_believed
        if self.order == "wfp3":
            return -((waited / expected) ** 3) * job.gpus
        return -waited / (max(math.log2(max(job.gpus, 1)), 1e-15) * expected)
