"""The reason of a pending job in a plan is what the passes answer for that job alone, and without what was in its way:
limits, GPUs that others have, reservations, racks.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.plan import LIMITS, ReasonCode
from gpusched.model.snapshot import PendingView, Snapshot
from gpusched.sched.decide import ask, decide
from gpusched.sched.explain import explain
from tests.sched.limited import limited
from tests.sched.reserved import reserved_snapshots
from tests.sched.worlds import after, snapshots
from tests.strategies import among


def undrawn(snap: Snapshot) -> Snapshot:
    """Where the naive placement is, nobody knows what it draws."""
    drawn = {name: replace(p, place="first-fit") for name, p in snap.policies.items() if p.place == "naive"}
    return replace(snap, policies=snap.policies | drawn)


@st.composite
def by_agents(draw: st.DrawFn) -> Snapshot:
    """Nodes are reserved, and agents without weights are in charge: what decides are the stages of their policies."""
    snap = undrawn(draw(reserved_snapshots()))
    agents = {name: draw(among("rltune", "dl2", "topology")) for name in snap.policies}
    policies = {name: replace(p, agent=agents[name], fallback=p) for name, p in snap.policies.items()}
    return replace(snap, policies=policies)


WORLDS = st.one_of(
    limited().map(lambda world: world[0]), limited(racked=True).map(lambda world: world[0]),
    snapshots(racked=True), reserved_snapshots(racked=True), by_agents(),
)  # fmt: skip
IMPOSSIBLE = {ReasonCode.BAD_CONSTRAINTS, ReasonCode.REQ_NODE_NOT_AVAIL}
IN_THE_WAY = {ReasonCode.RESOURCES, ReasonCode.PRIORITY, ReasonCode.BACKFILL}


def alone(snap: Snapshot, job: PendingView, **more: object) -> ReasonCode | None:
    """Return the reason of the job if no other is pending; None: it starts."""
    reason = ask(replace(snap, pending=(job,), **more), job.id, job.spec.partition).reason
    return None if reason is None else reason.code


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(WORLDS)
def test_each_reason_goes_with_what_it_names(snap: Snapshot) -> None:
    snap = undrawn(snap)
    snap = after(snap, decide(snap))
    plan = decide(snap)
    if plan.actions:
        return
    for job in snap.pending:
        said = plan.reasons[job.id]
        explanation = explain(snap, job.id)
        assert explanation.reason == said, "why and the plan"
        assert bool(explanation.nodes) == any(node.partition == job.spec.partition for node in snap.nodes)
        if said.code in LIMITS:
            free = replace(job, bounds=())
            assert alone(snap, job) == said.code, "a limit holds whatever else is pending"
            assert alone(snap, free) not in LIMITS
            assert alone(snap, free, running=()) is None, "nothing but the limit and what others have"
        elif said.code in IN_THE_WAY:
            assert alone(snap, job) in (None, ReasonCode.RESOURCES)
            assert alone(snap, job, running=()) is None, "its GPUs are free, and nobody is before it"
            if said.code is ReasonCode.RESOURCES:
                assert alone(snap, job) is ReasonCode.RESOURCES
        elif said.code in IMPOSSIBLE:
            assert alone(snap, job, running=()) is said.code, "whatever is free"
        assert (explanation.position is None) == (said.code not in IN_THE_WAY | {ReasonCode.POLICY})
