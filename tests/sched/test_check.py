"""Refusals of the plan's check, and their text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpusched.model.jobs import Allocation, Elastic, JobSpec, JobState, NodeAllocation, Resizes
from gpusched.model.plan import CancelJob, Plan, Preempt, Reason, ReasonCode, Resize, Start
from gpusched.model.units import local_clock
from gpusched.sched.check import check
from tests.sched.worlds import NOW, node, pending, running, snapshot

NODES = [
    node("a"),
    node("b", gpu_type="P100", blocked={5: "BUSY: pid 4711 of alice"}),
    node("d", available=False, unavailable_reason="DRAINED: fan"),
    node("q", partition="q"),
]
MAY = JobSpec(name="r", partition="p", gpus_per_node=2, cores_per_node=78, memory_mib_per_node=1, time_limit_s=60,
              preemptible=True)  # fmt: skip
SIZES = Elastic(sizes=(1, 2, 4), base_gpus=2, base_cores=2, base_memory_mib=2048, cooldown_s=600)
ELASTIC = JobSpec(name="e", partition="p", gpus_per_node=2, cores_per_node=2, memory_mib_per_node=2048,
                  time_limit_s=60, elastic=SIZES)  # fmt: skip


def elastic(name: str, gpu: int, *, ran_s: float = 3600, state: JobState = JobState.RUNNING, **resizes: Any) -> Any:
    """A running resizable job on two GPUs of node q."""
    return msgspec.structs.replace(
        running(name, {"q": (gpu, gpu + 1)}, NOW + 60, cores=2), spec=ELASTIC, start_time=NOW - ran_s, state=state,
        resizes=Resizes(**resizes) if resizes else None,
    )  # fmt: skip


BUSY = [
    msgspec.structs.replace(running("r", {"a": (0, 1)}, NOW + 60, cores=78), spec=MAY),
    elastic("e", 0),
    elastic("young", 2, ran_s=599),
    elastic("frozen", 4, frozen="it did not save"),
    elastic("often", 6, times=(NOW - 3599, NOW - 90, NOW - 60, NOW - 30)),
    elastic("ending", 6, state=JobState.COMPLETING),
]


def part(where: str, *gpus: int, rank: int = 0, cores: int | None = None, memory: int | None = None) -> NodeAllocation:
    n = len(gpus)
    return NodeAllocation(
        rank=rank,
        node=where,
        gpus=gpus,
        cores=n if cores is None else cores,
        memory_mib=1024 * n if memory is None else memory,
    )


def start(job: str, *parts: NodeAllocation) -> Start:
    return Start(job, Allocation(job, parts))


JOBS = [
    pending("j", 2),
    pending("k", 2),
    pending("g", 2, nodes=2),
    pending("held", 1, held_by="admin"),
    pending("dep", 1, dependency="waiting", dependency_message="waits for job x (afterok)"),
    pending("soon", 1, eligible_time=NOW + 10),
    pending("t_1", 1, array_id="t", array_room=1),
    pending("t_2", 1, array_id="t", array_room=1),
    pending("picky", 1, nodelist=("b",), exclude=("c",), excluded_nodes=("b",)),
    pending("typed", 1, gpu_types=("A100", "V100")),
    pending("wide", 2, cores_per_node=3),
    pending("fat", 1, memory_mib_per_node=600 << 10),
    pending("none", 0, cores_per_node=1, memory_mib_per_node=1),
    msgspec.structs.replace(pending("sized", 2), spec=ELASTIC),
]

CASES = [
    ([start("zz", part("a", 2))], "job zz is not pending"),
    ([start("r", part("a", 2))], "job r is not pending"),
    ([start("j", part("b", 0, 1)), start("j", part("b", 2, 3))], "the plan already has an action for job j"),
    ([start("held", part("a", 2))], "held by an administrator"),
    ([start("dep", part("a", 2))], "waits for job x (afterok)"),
    ([start("soon", part("a", 2))], f"not before {local_clock(NOW + 10, NOW)} (begin time)"),
    (
        [start("t_1", part("b", 0)), start("t_2", part("b", 1))],
        "its array is at its limit of running tasks",
    ),
    ([Start("j", Allocation("k", (part("b", 0, 1),)))], "the allocation is of job k"),
    ([start("j")], "the allocation has no parts"),
    ([start("g", part("b", 0, 1))], "it requests 2 nodes, the plan gives 1"),
    ([start("g", part("b", 0, 1), part("b", 2, 3, rank=1))], "two parts are on the same node"),
    ([start("g", part("b", 0, 1), part("a", 2, 3))], "the ranks are not 0, 1, 2 .. in order"),
    ([start("j", part("b", 0))], "it requests 2 GPUs per node, the plan gives 1 on b"),
    ([start("j", part("b", 0, 1, cores=1))], "it requests 2 cores and 2G per node, the plan gives 1 and 2G"),
    ([start("j", part("zz", 0, 1))], "there is no node zz"),
    ([start("j", part("d", 0, 1))], "node d is not available (DRAINED: fan)"),
    ([start("j", part("q", 0, 1))], "node q is in partition q, not p"),
    ([start("picky", part("a", 2))], "node a is not in its nodelist"),
    ([start("typed", part("b", 2))], "node b has P100 GPUs; it requests A100 or V100"),
    ([start("picky", part("b", 2))], "an earlier attempt failed on node b"),
    ([start("j", part("b", 7, 8))], "node b has no GPU 8"),
    ([start("j", part("b", 4, 5))], "GPU 5 of b cannot be used (BUSY: pid 4711 of alice)"),
    ([start("j", part("a", 1, 2))], "GPU 1 of a is held by job r"),
    ([start("j", part("b", 3, 3))], "a GPU of b is allocated twice"),
    ([start("j", part("b", 0, 1)), start("k", part("b", 1, 2))], "GPU 1 of b is held by job j"),
    ([start("wide", part("a", 2, 3, cores=3))], "node a has 2 cores free, not 3"),
    ([start("fat", part("b", 0, memory=600 << 10))], "node b has 512G of memory free, not 600G"),
    ([Preempt("j")], "job j is not running"),
    ([Resize("j", 2)], "job j is not running"),
    ([Resize("r", 4)], "job r is not resizable (--resizable)"),
    ([Resize("e", 3)], "job e cannot go from 2 to 3 GPUs"),
    ([Resize("e", 2)], "job e cannot go from 2 to 2 GPUs"),
    ([Resize("young", 4)], "job young has run for less than 0:10:00"),
    ([Resize("frozen", 4)], "job frozen is no longer resized: it did not save"),
    ([Resize("often", 4)], "job often has been resized 4 times within an hour"),
    ([Resize("ending", 4)], "job ending is COMPLETING"),
    ([start("sized", part("a", 2, 3, 4))], "it may not have 3 GPUs on 1 node"),
    ([start("sized", part("a", 2, cores=7))], "it requests 1 core and 1G per node, the plan gives 7 and 1G"),
    ([Preempt("r"), start("j", part("a", 0, 1))], "GPU 0 of a is held by job r"),
]


@pytest.mark.parametrize(("actions", "why"), CASES, ids=[w for _, w in CASES])
def test_refusals_say_why(actions: list, why: str) -> None:
    snap = snapshot(NODES, JOBS, BUSY)
    plan, rejections = check(Plan(actions=tuple(actions)), snap)
    assert [(r.action, r.why) for r in rejections] == [(actions[-1], why)]
    assert plan.actions == tuple(actions[:-1])
    job_id = actions[-1].job_id
    if job_id in {j.id for j in JOBS} and not plan.actions:
        assert plan.reasons[job_id] == Reason(code=ReasonCode.REJECTED, message=f"plan check failed: {why}")


def test_sound_actions_pass_in_order() -> None:
    actions = (
        start("g", part("b", 0, 1), part("a", 2, 3, rank=1)),
        start("none", part("b", cores=1, memory=1)),
        CancelJob("held", Reason(code=ReasonCode.POLICY)),
        Resize("e", 4),
        start("sized", part("b", 6)),
        start("t_2", part("b", 7)),
    )
    plan, rejections = check(Plan(actions=actions), snapshot(NODES, JOBS, BUSY))
    assert rejections == ()
    assert plan.actions == actions
    assert plan.reasons["j"] == Reason(code=ReasonCode.POLICY, message="the policy did not choose it")
    assert not {"g", "none", "held", "t_2"} & plan.reasons.keys()


def test_gpus_of_a_resizing_job_are_not_free_before_it_ends() -> None:
    actions = (Resize("e", 1), start("j", part("q", 0, 2)))
    _, rejections = check(Plan(actions=actions), snapshot(NODES, JOBS, BUSY))
    assert [r.why for r in rejections] == ["node q is in partition q, not p"]
    here = msgspec.structs.replace(elastic("e", 0), allocation=running("e", {"a": (2, 3)}, NOW + 60).allocation)
    _, rejections = check(Plan(actions=(Resize("e", 1), start("j", part("a", 2, 4)))), snapshot(NODES, JOBS, [here]))
    assert [r.why for r in rejections] == ["GPU 2 of a is held by job e"]


def test_the_policys_own_reasons_stay() -> None:
    own = Reason(code=ReasonCode.PRIORITY, message="later")
    plan, _ = check(Plan(reasons={"j": own}), snapshot(NODES, JOBS, BUSY))
    assert plan.reasons["j"] is own
