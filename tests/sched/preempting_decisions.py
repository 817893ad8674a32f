"""Decisions of ranks that stop jobs, live and in replays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from gpusched.agents.rltune.preempting import RankingRule, model_of
from gpusched.config.weights import TrainedModel
from gpusched.estimation import REMEMBERED
from gpusched.estimation.odds import CLASSES, LEVELS
from gpusched.model.jobs import Allocation, JobSpec, NodeAllocation, Preemptions
from gpusched.model.plan import Plan, Preempt
from gpusched.model.policy import PolicySpec, PreemptionSettings
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import FinishedView, NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sim.pool import demand_of
from gpusched.sim.result import ReplayResult
from tests.sched.reserved import with_reservations

EASY = PolicySpec(name="easy", place="best-fit", backfill="easy")
PRIOR = np.random.default_rng(0).uniform(0.05, 0.6, (CLASSES, LEVELS))
RANKS = [
    RankingRule("las", {"served": 1.0}, (600.0, 3600.0)),
    RankingRule("index", {"index": 1.0}),
    RankingRule("sized", {"index": 1.0, "gpus": 0.5, "slowdown": 0.5}),
]
STAYS = RankingRule("stays", {"index": 1.0, "gpus": 0.5, "stay": 1.0})
LIMITS = [PreemptionSettings(min_run_s=0.0, per_hour=0, restart_s=0.0), PreemptionSettings(min_run_s=45.0, per_hour=1,
restart_s=20.0),
          PreemptionSettings(min_run_s=600.0, per_hour=2, restart_s=30.0)]  # fmt: skip


def policy(rules: PreemptionSettings, place: str = "first-fit") -> PolicySpec:
    return PolicySpec(name="r", agent="rltune", fallback=EASY, place=place, version="1", preempt=rules)  # type: ignore[arg-type]


def weights(rule: RankingRule) -> TrainedModel:
    return model_of(rule, PRIOR, "nothing" if rule.name == "las" else "estimate")


def by_agent(snap: Snapshot, spec: PolicySpec, of: TrainedModel) -> Plan:
    plan = decide(msgspec.structs.replace(snap, policies={"p": spec}), {"p": of})
    assert plan.troubles == {}
    return plan


def stopped(plan: Plan) -> dict[str, str]:
    """Return the preempted jobs: for which job each."""
    return {a.job_id: a.for_job for a in plan.actions if isinstance(a, Preempt)}


# Live and in the simulator

PRIORITIES = st.sampled_from([0, 0, 0, 3, -2])


class Run:
    """One run of a job in a replay."""

    def __init__(self, job: int, start: float, end: float, nodes: list[int], cut: bool) -> None:
        self.job, self.start, self.end, self.nodes, self.cut = job, start, end, nodes, cut


def runs_of(result: ReplayResult) -> list[Run]:
    cut, found = result.cut, []
    for i, job in enumerate(cut.job.tolist()):
        nodes = cut.part_nodes[cut.part_offsets[i] : cut.part_offsets[i + 1]].tolist()
        found.append(Run(job, float(cut.start[i]), float(cut.end[i]), nodes, True))
    for job in np.flatnonzero(np.isfinite(result.end)).tolist():
        nodes = result.nodes_of(job).tolist()
        found.append(Run(job, float(result.last_start[job]), float(result.end[job]), nodes, False))
    return found


class Film:
    """A replay as the controller would have seen it, just before it decided; or once what it stopped is gone."""

    def __init__(self, result: ReplayResult, ones: Sequence[Reservation] = (), remembered: int = REMEMBERED) -> None:
        self.result, self.runs, self.ones, self.remembered = result, runs_of(result), ones, remembered
        self.ended = {job: at for at, job in enumerate(result.events.subject.tolist())}  # its last event: its end
        self.demand = demand_of(result.trace, result.pool)
        self.of: dict[int, list[Run]] = {}
        for run in sorted(self.runs, key=lambda r: r.start):
            self.of.setdefault(run.job, []).append(run)

    def spec(self, job: int) -> JobSpec:
        asked, shape, may = self.demand.requests, int(self.demand.shape[job]), self.result.trace.preemptible
        return JobSpec(
            name="j", partition="p", nodes=int(asked.parts[shape]), gpus_per_node=int(asked.gpus[shape]),
            cores_per_node=int(asked.cores[shape]), memory_mib_per_node=int(asked.memory[shape]),
            time_limit_s=int(self.result.trace.limit[job]), preemptible=may is None or bool(may[job]),
        )  # fmt: skip

    def preemptions(self, cuts: list[Run]) -> Preemptions | None:
        found = Preemptions()
        for i, run in enumerate(cuts):
            found = found.once_more(run.end, "r", "1", "").with_run(run.end - run.start, i > 0)
        return found if cuts else None

    def at(self, now: float, gone: bool = False, begun: dict[str, Any] | None = None) -> Snapshot:
        result, trace, begun = self.result, self.result.trace, begun or {}
        pool, demand = result.pool, self.demand
        nodes = tuple(
            NodeView(name=name, partition="p", gpus=tuple(range(gpus)), cores=int(demand.resources.cores[i]),
                     memory_mib=int(demand.resources.memory[i]))
            for i, (name, gpus) in enumerate(zip(pool.names, pool.gpus.tolist(), strict=True))
        )  # fmt: skip
        held = dict.fromkeys(pool.names, 0)
        busy, waiting, past = [], [], dict[int, FinishedView]()
        for job in np.flatnonzero(demand.shape >= 0).tolist():
            if trace.submit[job] > now:
                continue
            runs, name, spec = self.of.get(job, []), trace.ids[job], self.spec(job)
            before = [r for r in runs if r.cut and (r.end <= now if gone else r.end < now)]
            current = next((r for r in runs if r not in before and r.start < now and (r.end > now or r.cut)), None)
            if name in begun:
                current = next(r for r in runs if r.start == now)
            submit, preemptions = float(trace.submit[job]), self.preemptions(before)
            priority = 0 if trace.priority is None else int(trace.priority[job])
            if current is not None:
                parts = []
                for rank, row in enumerate(current.nodes):
                    at = held[pool.names[row]]
                    held[pool.names[row]] += spec.gpus_per_node
                    parts.append(NodeAllocation(rank=rank, node=pool.names[row], cores=spec.cores_per_node,
                                                gpus=tuple(range(at, at + spec.gpus_per_node)),
                                                memory_mib=spec.memory_mib_per_node))  # fmt: skip
                busy.append(RunningView(
                    id=name, user="u", allocation=Allocation(name, tuple(parts)), start_time=current.start,
                    expected_end=current.start + float(trace.limit[job]), submit_time=submit, spec=spec,
                    attempt=len(before) + 1, preemptions=preemptions, priority=priority,
                ))  # fmt: skip
            elif np.isfinite(result.end[job]) and result.end[job] <= now:
                last = runs[-1]
                past[self.ended[job]] = FinishedView(
                    user="u", partition="p", nodes=spec.nodes, gpus=spec.gpus, cores=spec.nodes * spec.cores_per_node,
                    memory_mib=spec.nodes * spec.memory_mib_per_node, submit_time=submit, end_time=last.end,
                    ran_s=last.end - last.start, attempt=len(before) + 1, preemptions=preemptions,
                )  # fmt: skip
            else:
                waiting.append(PendingView(
                    id=name, user="u", spec=spec, submit_time=submit, preemptions=preemptions, priority=priority
                ))  # fmt: skip
        snap = Snapshot(now=now, nodes=nodes, running=tuple(busy), pending=tuple(waiting), policies={},
                        finished=tuple(past[at] for at in sorted(past)[-self.remembered :]))  # fmt: skip
        return with_reservations(snap, *self.ones) if self.ones else snap
