"""RLTune's decisions, live and replayed."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import strategies as st

from gpusched.agents.rltune.candidates import CandidateRule, linear_of
from gpusched.agents.rltune.history import FEATURES
from gpusched.config.weights import TrainedModel
from gpusched.estimation.estimators import LastTwo
from gpusched.model.plan import Plan
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import FinishedView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import demand_of
from gpusched.sim.replay import replay
from gpusched.sim.result import ReplayResult
from tests.sched import gist_decisions as gist

EASY = PolicySpec(name="easy", place="best-fit", backfill="easy")


RLTUNE = PolicySpec(name="rltune", agent="rltune", fallback=EASY, place="best-fit", version="1")


INPUTS, HIDDEN = len(FEATURES), 8


def arrays_of(rule: CandidateRule, strength: float = 0.0, seed: int = 0, window: int = 256) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {"linear": linear_of(rule), "mean": rng.normal(size=INPUTS), "scale": rng.uniform(0.1, 1, INPUTS),
             "strength": np.array([strength]), "net.0.weight": rng.normal(size=(HIDDEN, INPUTS)),
             "net.0.bias": rng.normal(size=HIDDEN), "net.1.weight": rng.normal(size=(1, HIDDEN)),
             "net.1.bias": rng.normal(size=1)}  # fmt: skip
    return {n: a.astype(np.float32) for n, a in found.items()} | {"window": np.array([window])}


def model(arrays: dict[str, np.ndarray], path: str = "here", knows: str = "estimate") -> TrainedModel:
    return TrainedModel("rltune", arrays, {"knows": knows, "backfill": "skip"}, "", path)


def rule(order: dict[str, float]) -> CandidateRule:
    return CandidateRule("", order)


SKIP = model(arrays_of(rule({"waited": 1.0})), "skip")


WILD = [model(arrays_of(rule({"estimate": -1.0}), 1.0, s, w), f"wild {s}") for s, w in enumerate((256, 256, 4, 2))]


MODELS = st.sampled_from(WILD)


def by_agent(snap: Snapshot, of: TrainedModel | None) -> Plan:
    policies = dict.fromkeys(snap.policies, RLTUNE)
    return decide(msgspec.structs.replace(snap, policies=policies), {} if of is None else dict.fromkeys(policies, of))


def replayed(trace, pool, of: TrainedModel) -> ReplayResult:
    policy = ReplayPolicy(name="r", order="rltune", knows="estimate", source="", backfill="skip", model=of)
    return replay(trace, pool, policy)


def live_at(result: ReplayResult, now: float) -> Snapshot:
    """Return what the controller would have seen, with what has ended until then, and estimates as in the replay."""
    snap = gist.live_at(result, now)
    trace, demand = result.trace, demand_of(result.trace, result.pool)
    said = LastTwo().expected(replace(trace, wait=np.nan_to_num(result.start - trace.submit, nan=np.inf)))
    estimates = dict(zip(trace.ids, said.tolist(), strict=True))
    submitted = dict(zip(trace.ids, trace.submit.tolist(), strict=True))
    busy = tuple(msgspec.structs.replace(j, submit_time=submitted[j.id]) for j in snap.running)
    past = []
    for job in np.flatnonzero(result.end <= now).tolist():
        parts, shape = int(demand.parts[job]), int(demand.shape[job])
        gpus, cores, memory = (parts * int(c[shape]) for c in demand.requests[3:6])
        past.append(FinishedView(
            user="u", partition="p", nodes=parts, gpus=gpus, cores=cores, memory_mib=memory,
            submit_time=float(trace.submit[job]), end_time=float(result.end[job]),
            ran_s=float(result.end[job] - result.start[job]),
        ))  # fmt: skip
    waits = tuple(msgspec.structs.replace(j, estimate_s=estimates[j.id]) for j in snap.pending)
    return msgspec.structs.replace(snap, running=busy, finished=tuple(past), pending=waits)
