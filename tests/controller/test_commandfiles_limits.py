"""Groups, classes and limits at submission: the controller believes no client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpusched.model.commands import Requeue, Submit
from gpusched.model.jobs import JobState
from gpusched.model.limits import Group, Groups, Limits, Qos, Quotas
from tests.builders import spec
from tests.controller.folding import ADMIN, ALICE, BOB, Desk, fresh_id
from tests.controller.rights import needs_root

pytestmark = needs_root
A, B = str(ALICE), str(BOB)
GROUPS = Groups(groups=(Group(name="top"), Group(name="g", parent="top", members={A: 1}), Group(name="h")))
QUOTAS = Quotas(
    each=Limits(gpus=4, queued=2, time_s=1800, gpu_hours=1),
    users={B: Limits()},
    groups=GROUPS,
    qos=(
        Qos(name="high", priority=50, groups=("top",), preemptible=False),
        Qos(name="spare", priority=-50, preemptible=True, exempt=True),
    ),
)


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    desk.inventory = replace(desk.inventory, quotas=QUOTAS)
    yield desk
    desk.store.close()


def refused(desk: Desk, uid: int = ALICE, array: tuple[int, ...] | None = None, **changes: Any) -> str:
    return desk.say(Submit(time=desk.now, id=fresh_id(desk.now), spec=spec(**changes), array=array), uid)


def test_a_job_counts_for_the_first_group_of_its_user(desk: Desk) -> None:
    assert desk.job(desk.submit(ALICE)).spec.group == "g"
    assert desk.job(desk.submit(BOB)).spec.group == ""
    assert refused(desk, group="h") == f"--group h: {A} is not a member; {A} is a member of: g"
    assert refused(desk, group="gg").startswith("there is no group 'gg'")


def test_a_class_gives_its_priority_to_whom_it_is_open(desk: Desk) -> None:
    job = desk.job(desk.submit(ALICE, qos="high", nice=5, preemptible=True))
    assert (job.priority, job.spec.preemptible) == (45, False), "members of a group below count, too"
    assert refused(desk, BOB, qos="high") == f"--qos high: {B} may not use it; {B} may use: spare"
    job = desk.job(desk.submit(BOB, qos="spare", preemptible=False))
    assert (job.priority, job.spec.preemptible) == (-50, True)
    assert "there is no class 'low'" in refused(desk, qos="low")
    assert len(refused(desk, qos="x" * 10**6)) < 200
    assert "is not a valid name" in refused(desk, group="a\nb")


def test_nobody_makes_his_own_priority(desk: Desk) -> None:
    assert "needs an admin" in refused(desk, priority=1)
    assert "needs an admin" in refused(desk, nice=-1)
    assert desk.job(desk.submit(ADMIN, nice=-1)).priority == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpus_per_node": 2, "nodes": 3}, f"6 GPUs exceed the limit of user {A} (4 at once) (AssocGrpGRES)"),
        ({"time_limit_s": 1801}, "(AssocMaxWallDurationPerJobLimit)"),
        ({"gpus_per_node": 4, "time_limit_s": 1800}, "may use 2.0 GPU hours"),
    ],
)
def test_what_could_never_run_is_refused(desk: Desk, asked: dict[str, Any], says: str) -> None:
    assert says in refused(desk, **asked)
    assert refused(desk, BOB, **asked) == "", "who has a limit of his own has only that"


def test_tasks_of_arrays_and_jobs_that_come_back_count_as_queued(desk: Desk) -> None:
    assert "3 more exceed it (AssocMaxSubmitJobLimit)" in refused(desk, array=(0, 1, 2))
    assert refused(desk, array=(0, 1)) == ""
    assert f"limit of user {A}: 2 of 2 pending jobs; 1 more" in refused(desk)
    desk.submit(ALICE, qos="spare")
    ended = desk.submit(BOB)
    desk.put(ended, JobState.COMPLETED, uid=ALICE, user=A)
    assert "AssocMaxSubmitJobLimit" in desk.say(Requeue(time=desk.now, job_ids=(ended,)), ALICE)
    assert desk.job(ended).state is JobState.COMPLETED


def test_two_in_one_round_are_counted_together(desk: Desk) -> None:
    for _ in range(3):
        desk.lay(Submit(time=desk.now, id=fresh_id(desk.now), spec=spec()), ALICE)
    desk.fold()
    assert desk.store.counts() == {"PENDING": 2}
    assert len(desk.refusals()) == 1


def test_whoever_left_a_class_does_not_come_back_into_it(desk: Desk) -> None:
    job = desk.submit(ALICE, qos="high")
    desk.put(job, JobState.FAILED)
    desk.inventory = replace(desk.inventory, quotas=replace(QUOTAS, groups=Groups()))
    assert "may not use it" in desk.say(Requeue(time=desk.now, job_ids=(job,)), ALICE)
    other = desk.submit(BOB)
    desk.put(other, JobState.FAILED, spec=spec(group="g"))
    assert desk.say(Requeue(time=desk.now, job_ids=(other,)), BOB) == ""
    assert desk.job(other).spec.group == ""
