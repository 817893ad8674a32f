"""Small decisions that compile all passes of a policy, before the first cycle and for new policies."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from gpusched.config.weights import TrainedModel
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import Allocation, Elastic, JobSpec, NodeAllocation
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.reservations import Reservation
from gpusched.model.resources import SharingSettings
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.decide import decide
from gpusched.sched.state import PLACES


def warm_up(policies: Iterable[PolicySpec] = (), shares: bool = False) -> None:
    """Make a small decision with every pass that these policies need, so that all are compiled or loaded.

    ``shares``: nodes share GPUs.
    """
    asked = list(policies)
    for policy in [policy for policy in asked if policy.sizes != "base"][:1]:  # one compiles all rules
        decide(small_snapshot(policy))
    plans = any("conservative" in (policy.backfill, policy.effective_fallback.backfill) for policy in asked)
    for backfill in ("easy", "conservative") if plans else ("easy",):  # one pass has all other rules
        decide(small_snapshot(PolicySpec(name="warm-up", backfill=backfill)))
    for policy in [policy for policy in asked if policy.place not in (*PLACES, *MAPPING_PLACES)][:1]:
        decide(small_snapshot(PolicySpec(name="warm-up", place=policy.place, backfill="easy")))
    decide(_reserved(small_snapshot(PolicySpec(name="warm-up"))))
    if shares:
        decide(with_sharing(small_snapshot(PolicySpec(name="warm-up"))))
    if any(policy.uses_job_class_estimates for policy in asked):
        decide(_with_beliefs(small_snapshot(PolicySpec(name="warm-up", place="contention"))))


def warm_up_agent(policy: PolicySpec, model: TrainedModel) -> None:
    """Make a small decision with an agent's passes; weights that fail on it are ignored."""
    decide(
        _with_beliefs(small_snapshot(policy)) if policy.uses_job_class_estimates else small_snapshot(policy),
        {"p": model},
    )


def _reserved(snapshot: Snapshot) -> Snapshot:
    reservation = Reservation(name="r", nodes=("n",), begin=1.0, end=2.0)
    return replace(snapshot, nodes=tuple(replace(node, reservations=(reservation,)) for node in snapshot.nodes))


def with_sharing(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with jobs that may share the GPUs of its one node."""
    spec = replace(snapshot.pending[0].spec, gpus_per_node=1, share="pairs", gpu_memory_mib=1)
    asked = [replace(job, spec=spec) for job in snapshot.pending]
    node = replace(snapshot.nodes[0], sharing=SharingSettings(mode="time-slicing"), shareable=dict.fromkeys((0, 1), 2))
    return replace(snapshot, nodes=(node,), pending=tuple(asked))


def _with_beliefs(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, beliefs={"u/j": JobClassEstimate(kind="u/j")})


def small_snapshot(policy: PolicySpec) -> Snapshot:
    """Return a small snapshot on which all passes of a policy are compiled."""

    def spec(gpus: int) -> JobSpec:
        elastic = Elastic(sizes=(1, 2), base_gpus=1, base_cores=1, base_memory_mib=1)
        return JobSpec(
            name="j", partition="p", gpus_per_node=gpus, cores_per_node=1, memory_mib_per_node=1, time_limit_s=60,
            elastic=elastic if policy.sizes != "base" else None,
        )  # fmt: skip

    held = NodeAllocation(rank=0, node="n", gpus=(0,), cores=1, memory_mib=1)
    return Snapshot(
        now=0.0,
        nodes=(NodeView(name="n", partition="p", gpus=(0, 1), cores=4, memory_mib=4),),
        running=(RunningView(id="r", user="u", allocation=Allocation("r", (held,)), start_time=0.0, expected_end=9.0),),
        pending=tuple(
            PendingView(id=str(n), user="u", spec=spec(gpus), submit_time=0.0, speeds={1: 1.0}, left=1.0)
            for n, gpus in enumerate((2, 1, 1))
        ),
        policies={"p": policy},
    )


def trial_of(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with small jobs in every partition, so that each policy decides; no solver runs."""
    policies = {n: replace(p, place="fastest") if p.place == "milp" else p for n, p in snapshot.policies.items()}
    more = [
        replace(job, id=f"{name}-{job.id}", spec=replace(job.spec, partition=name), submit_time=snapshot.now)
        for name, policy in policies.items()
        for job in small_snapshot(policy).pending
    ]
    return replace(snapshot, policies=policies, pending=(*snapshot.pending, *more))
