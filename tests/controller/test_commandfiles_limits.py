"""Groups, classes and limits at submission: the controller believes no client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gpusched.controller import commandfiles
from gpusched.model.commands import MAX_JOB_IDS, Cancel, Hold, Requeue, Submit
from gpusched.model.jobs import JobState
from gpusched.model.limits import Group, Groups, Limits, Qos, Quotas
from tests.builders import spec
from tests.controller.applying import ADMIN, ALICE, BOB, InboxWorld, fresh_id
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
def world(tmp_path: Path) -> Iterator[InboxWorld]:
    world = InboxWorld(tmp_path)
    world.inventory = replace(world.inventory, quotas=QUOTAS)
    yield world
    world.store.close()


def refused(world: InboxWorld, uid: int = ALICE, array: tuple[int, ...] | None = None, **changes: Any) -> str:
    return world.say(Submit(time=world.now, id=fresh_id(world.now), spec=spec(**changes), array=array), uid)


def test_a_job_counts_for_the_first_group_of_its_user(world: InboxWorld) -> None:
    assert world.job(world.submit(ALICE)).spec.group == "g"
    assert world.job(world.submit(BOB)).spec.group == ""
    assert refused(world, group="h") == f"--group h: {A} is not a member; {A} is a member of: g"
    assert refused(world, group="gg").startswith("there is no group 'gg'")


def test_a_class_gives_its_priority_only_to_its_users(world: InboxWorld) -> None:
    job = world.job(world.submit(ALICE, qos="high", nice=5, preemptible=True))
    assert (job.priority, job.spec.preemptible) == (45, False), "members of a group below count, too"
    assert refused(world, BOB, qos="high") == f"--qos high: {B} may not use it; {B} may use: spare"
    job = world.job(world.submit(BOB, qos="spare", preemptible=False))
    assert (job.priority, job.spec.preemptible) == (-50, True)
    assert "there is no class 'low'" in refused(world, qos="low")
    assert len(refused(world, qos="x" * 10**6)) < 200
    assert "is not a valid name" in refused(world, group="a\nb")


def test_users_cannot_raise_their_own_priority(world: InboxWorld) -> None:
    assert "needs an admin" in refused(world, priority=1)
    assert "needs an admin" in refused(world, nice=-1)
    assert world.job(world.submit(ADMIN, nice=-1)).priority == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"gpus_per_node": 2, "nodes": 3}, f"6 GPUs exceed the limit of user {A} (4 at once) (AssocGrpGRES)"),
        ({"time_limit_s": 1801}, "(AssocMaxWallDurationPerJobLimit)"),
        ({"gpus_per_node": 4, "time_limit_s": 1800}, "may use 2.0 GPU hours"),
    ],
)
def test_a_job_that_could_never_run_is_refused(world: InboxWorld, asked: dict[str, Any], says: str) -> None:
    assert says in refused(world, **asked)
    assert refused(world, BOB, **asked) == "", "who has a limit of his own has only that"


def test_tasks_of_arrays_and_jobs_that_come_back_count_as_queued(world: InboxWorld) -> None:
    assert "3 more exceed it (AssocMaxSubmitJobLimit)" in refused(world, array=(0, 1, 2))
    assert refused(world, array=(0, 1)) == ""
    assert f"limit of user {A}: 2 of 2 pending jobs; 1 more" in refused(world)
    world.submit(ALICE, qos="spare")
    ended = world.submit(BOB)
    world.put(ended, JobState.COMPLETED, uid=ALICE, user=A)
    assert "AssocMaxSubmitJobLimit" in world.say(Requeue(time=world.now, job_ids=(ended,)), ALICE)
    assert world.job(ended).state is JobState.COMPLETED


def test_two_in_one_round_are_counted_together(world: InboxWorld) -> None:
    for _ in range(3):
        world.lay(Submit(time=world.now, id=fresh_id(world.now), spec=spec()), ALICE)
    world.apply_inbox()
    assert world.store.counts() == {"PENDING": 2}
    assert len(world.refusals()) == 1


def test_a_user_who_left_a_class_cannot_requeue_into_it(world: InboxWorld) -> None:
    job = world.submit(ALICE, qos="high")
    world.put(job, JobState.FAILED)
    world.inventory = replace(world.inventory, quotas=replace(QUOTAS, groups=Groups()))
    assert "may not use it" in world.say(Requeue(time=world.now, job_ids=(job,)), ALICE)
    other = world.submit(BOB)
    world.put(other, JobState.FAILED, spec=spec(group="g"))
    assert world.say(Requeue(time=world.now, job_ids=(other,)), BOB) == ""
    assert world.job(other).spec.group == ""


def test_a_users_commands_on_many_jobs_take_several_cycles(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of 4 MiB named a million jobs, or one job 280,000 times: it held up every cycle for a minute."""
    monkeypatch.setattr(commandfiles, "MAX_HANDLED_JOBS", 3)
    world.inventory = replace(world.inventory, quotas=Quotas())
    first, second = world.submit(ALICE), world.submit(ALICE, array=(1, 2, 3))
    others = world.submit(BOB)
    for job_ids in ((first, first), (second, "x"), (second,)):
        world.lay(Hold(time=world.now, job_ids=job_ids), ALICE)
        world.now += 0.01
    world.lay(Cancel(time=world.now, job_ids=(others,)), BOB)
    for left in (1, 0):
        world.apply_inbox()
        assert len(world.refusals()) == 1
        assert world.job(others).state is JobState.CANCELLED, "the next user's command does not wait"
        assert len(list(world.inbox.new.iterdir())) == left
    assert [e.kind for e in world.store.events(job_id=first)].count("held") == 1
    assert [e.kind for e in world.store.events(job_id=second)].count("held") == 2
    assert f"at most {MAX_JOB_IDS} jobs, this one names 10001" in world.say(
        Cancel(time=world.now, job_ids=(first,) * 10_001), ALICE
    )
    assert world.job(first).state is JobState.PENDING


def test_a_users_commands_that_take_long_take_several_cycles(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1,000 nodes, 1,000 submissions with 1,000 sizes each kept the controller busy for half an hour."""
    monkeypatch.setattr(commandfiles, "MAX_CPU_S", 1e-9)
    world.inventory = replace(world.inventory, quotas=Quotas())
    for uid in (ALICE, ALICE, BOB):
        world.lay(Submit(time=world.now, id=fresh_id(world.now), spec=spec()), uid)
    for pending in (2, 3):
        world.apply_inbox()
        assert len(world.store.jobs()) == pending, "one of each user in each cycle"


def test_ids_that_name_the_same_tasks_again_and_again_are_bounded(
    world: InboxWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 ids, each of some tasks of an array of 100,000 that have run, kept the controller busy for hours."""
    monkeypatch.setattr(commandfiles, "MAX_LOOKED_UP", 6)
    world.inventory = replace(world.inventory, quotas=Quotas())
    array, single = world.submit(ALICE, array=tuple(range(5))), world.submit(ALICE)
    with world.store.transaction():
        world.store.put_jobs(world.store.jobs_of_array(array))
    assert "names too many tasks" in world.say(
        Hold(time=world.now, job_ids=(array, f"{array}_[0-3,7]", single, single)), ALICE
    )
    assert world.job(f"{array}_3").held_by == "user"
    assert not world.job(single).held_by
    assert [row.id for row in world.store.rows_of(f"{array}_[1,3-4,9]")] == [f"{array}_{i}" for i in (1, 3, 4)]
    # Tasks that share a row cost one: a user's --all names them so.
    shared = [world.submit(ALICE, array=tuple(range(100))) for _ in range(3)]
    assert world.say(Cancel(time=world.now, job_ids=tuple(f"{one}_[0-99]" for one in shared)), ALICE) == ""
