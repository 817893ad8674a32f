"""Replays of policies that choose sizes, the slow way: every decision is the controller's `decide` on a snapshot."""

from __future__ import annotations

import math

import msgspec

from gpusched.config.weights import TrainedModel
from gpusched.model.jobs import Allocation, Elastic, JobSpec, Resizes
from gpusched.model.plan import Plan, Resize, Start
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.pool import Pool
from gpusched.sim.resizing import TargetSize
from gpusched.sim.stepper import Stepper
from gpusched.traces.trace import Trace

_PLENTY = 1 << 40  # cores or MiB of a node that does not model them
_LONGEST_S = 1e9


def _span(asked: tuple[int, int] | None, own: int) -> tuple[int, int] | None:
    """Its own amount is within the range, too."""
    return None if asked is None else (min(asked[0], own), max(asked[1], own))


class SizedPolicy:
    """A function for `replay`: decides as the controller does.

    ``seen``: what it was shown, and what it decided. ``lost``: ranks lost with their nodes.
    """

    def __init__(
        self, spec: PolicySpec, trace: Trace, pool: Pool, options: ReplayOptions, model: TrainedModel | None = None
    ) -> None:
        self.__name__ = spec.name
        self.seen: list[tuple[Snapshot, Plan]] = []
        self._trace = trace
        self._partitions = [name or "p" for name in pool.partitions]
        self._policies = dict.fromkeys(self._partitions, spec)
        self._models = dict.fromkeys(self._partitions, model) if model is not None else {}
        self._nodes = tuple(
            NodeView(
                name=name,
                partition=self._partitions[pool.partition[n]],
                gpus=tuple(range(int(pool.gpus[n]))),
                cores=int(pool.cores[n]) if pool.cores[n] >= 0 else _PLENTY,
                memory_mib=int(pool.memory_mib[n]) if pool.memory_mib[n] >= 0 else _PLENTY,
                gpu_type=pool.gpu_types[pool.gpu_type[n]],
            )
            for n, name in enumerate(pool.names)
        )
        self._index = {name: n for n, name in enumerate(pool.names)}
        self._elastic = options.elastic
        self._specs: dict[int, JobSpec] = {}
        self._held: dict[int, Allocation] = {}
        self._begun: dict[int, float] = {}
        self._speeds: dict[int, dict[int, float]] = {}
        self._resizes: dict[int, Resizes] = {}
        self.lost = 0

    def __call__(self, stepper: Stepper) -> None:
        """Decisions, until none is stopped to go on at another size, or starts within limits."""
        self._let_go(stepper)
        while True:
            snapshot = self._snapshot(stepper)
            plan = decide(snapshot, self._models)
            self.seen.append((snapshot, plan))
            stopped = [action for action in plan.actions if isinstance(action, Resize)]
            again = {job.id for job in snapshot.pending if job.bounds}
            for action in plan.actions:
                if isinstance(action, Start):
                    self._start(stepper, int(action.job_id), action.allocation)
            for resize in stopped:
                if self._specs[int(resize.job_id)].is_hot:
                    self._change_ranks(stepper, int(resize.job_id), resize)
                else:
                    self._stop(stepper, int(resize.job_id), resize.gpus)
            if not stopped and not any(action.job_id in again for action in plan.actions):
                return

    def _let_go(self, stepper: Stepper) -> None:
        """Hot jobs go on without the ranks whose nodes failed, as the controller lets them; their group is formed."""
        for job in stepper.running():
            nodes, held = set(stepper.nodes_of(job).tolist()), self._held[job]
            parts = tuple(part for part in held.parts if self._index[part.node] in nodes)
            if len(parts) == len(held.parts):
                continue
            assert parts[0] == held.parts[0], "not without its first"
            assert self._specs[job].is_hot
            resizes, gone = self._resizes.get(job, Resizes()), len(held.parts) - len(parts)
            self._resizes[job] = msgspec.structs.replace(
                resizes, costs_s=resizes.costs_s + gone * self._pause_s(job), measured=resizes.measured + gone,
                before=self._specs[job].gpus, formed_since=stepper.now,
            )  # fmt: skip
            self._held[job] = Allocation(held.job_id, parts)
            self._specs[job] = self._specs[job].as_allocated(self._held[job])
            self.lost += gone

    def _start(self, stepper: Stepper, job: int, allocation: Allocation) -> None:
        gpus = allocation.gpus
        if (spec := self._spec(stepper, job)).elastic is not None:
            spec = self._specs[job] = spec.as_allocated(allocation)
            ranged = spec.elastic.cores is not None or spec.elastic.memory_mib is not None
            stepper.resize(job, TargetSize(gpus, *spec.amounts, spec.nodes) if ranged else gpus)
        stepper.start(job, [self._index[part.node] for part in allocation.parts])
        self._held[job], self._begun[job] = allocation, stepper.now
        if job in self._resizes:
            self._resizes[job] = msgspec.structs.replace(self._resizes[job], resume_at=None)

    def _change_ranks(self, stepper: Stepper, job: int, resize: Resize) -> None:
        """Ranks join where the plan says, or the last leave; then the group forms for the measured time."""
        resizes, spec, pause_s = self._resizes.get(job, Resizes()), self._specs[job], self._pause_s(job)
        assert spec.elastic is not None
        self._resizes[job] = resizes.again(
            stepper.now, costs_s=resizes.costs_s + pause_s, measured=resizes.measured + 1, before=spec.gpus,
            formed_since=stepper.now,
        )  # fmt: skip
        parts = (*self._held[job].parts, *resize.joins)[: resize.gpus // spec.elastic.rank_gpus]
        assert stepper.resize(job, resize.gpus, [self._index[part.node] for part in parts])
        self._held[job] = Allocation(f"{job:06}", parts)
        self._specs[job] = spec.as_allocated(self._held[job])

    def _pause_s(self, job: int) -> float:
        known = self._trace.progress
        return 0.0 if known is None or math.isnan(known.cost_s[job]) else float(known.cost_s[job])

    def _stop(self, stepper: Stepper, job: int, gpus: int) -> None:
        resizes = self._resizes.get(job, Resizes())
        self._resizes[job] = resizes.again(
            stepper.now, resume_at=gpus, costs_s=resizes.costs_s + stepper.restart_s(job), measured=resizes.measured + 1
        )
        stepper.preempt(job)

    def _snapshot(self, stepper: Stepper) -> Snapshot:
        running = tuple(self._running(stepper, job) for job in stepper.running())
        pending = tuple(self._pending(stepper, job) for job in sorted(stepper._waiting))
        free = stepper.free_gpus
        nodes = tuple(
            node if free[n] >= 0 else msgspec.structs.replace(node, available=False)
            for n, node in enumerate(self._nodes)
        )
        return Snapshot(now=stepper.now, nodes=nodes, running=running, pending=pending, policies=self._policies)

    def _running(self, stepper: Stepper, job: int) -> RunningView:
        start, due, rate = stepper.pace_of(job)
        start, resizes = self._begun.get(job, start), self._resizes.get(job)
        if resizes is not None and resizes.formed_since is not None:
            formed = resizes.formed_since < stepper.now >= resizes.formed_since + self._pause_s(job)
            resizes = msgspec.structs.replace(resizes, before=None if formed else resizes.before)
        spec = self._spec(stepper, job).with_present_size
        reports_progress = self._trace.progress is None or not math.isnan(self._trace.progress.steps[job])
        speeds = self._speeds.setdefault(job, {})
        if reports_progress:
            speeds[spec.gpus] = rate
        return RunningView(
            id=f"{job:06}", user="", allocation=self._held[job], start_time=start,
            expected_end=start + spec.time_limit_s, own_end=due if reports_progress else None,
            submit_time=float(self._trace.submit[job]), spec=spec, resizes=resizes, speeds=speeds,
        )  # fmt: skip

    def _pending(self, stepper: Stepper, job: int) -> PendingView:
        resizes = self._resizes.get(job)
        return PendingView(
            id=f"{job:06}", user="", spec=self._spec(stepper, job), submit_time=float(self._trace.submit[job]),
            resizes=resizes, resume_at=resizes.resume_at if resizes is not None else None,
            speeds=self._speeds.get(job, {}), left=stepper.left_of(job),
        )  # fmt: skip

    def _spec(self, stepper: Stepper, job: int) -> JobSpec:
        """Return the request of the job at its present size."""
        if job not in self._specs:
            parts, gpus = stepper.parts(job)
            cores, memory = stepper.cores_and_memory(job)
            limit = float(self._trace.limit[job])
            sizes = self._sizes(job, parts * gpus)
            self._specs[job] = JobSpec(
                name="", partition=self._partitions[stepper.partition(job)], nodes=parts, gpus_per_node=gpus,
                cores_per_node=cores, memory_mib_per_node=memory,
                time_limit_s=int(min(limit, _LONGEST_S)) if math.isfinite(limit) else int(_LONGEST_S),
                elastic=Elastic(
                    sizes=sizes, base_gpus=parts * gpus, base_cores=parts * cores, base_memory_mib=parts * memory,
                    cooldown_s=0 if self._trace.progress is None else int(self._trace.progress.cooldown_s[job]),
                    rank_gpus=self._rank_gpus(job),
                    cores=_span(self._elastic.cores, parts * cores),
                    memory_mib=_span(self._elastic.memory_mib, parts * memory),
                ) if len(sizes) > 1 else None,
            )  # fmt: skip
        return self._specs[job]

    def _rank_gpus(self, job: int) -> int:
        ranks = self._elastic.rank_gpus if self._elastic is not None else None
        return 0 if ranks is None else int(ranks[job])

    def _sizes(self, job: int, own: int) -> tuple[int, ...]:
        """Its own size, and powers of two that it may have."""
        if self._elastic is None or own < 1:
            return (own,)
        if self._elastic.sizes is not None:
            return self._elastic.sizes[job]
        least, most = int(self._elastic.least[job]), int(self._elastic.most[job])
        return tuple(sorted({own, *(1 << k for k in range(most.bit_length()) if least <= 1 << k <= most)}))
