"""Ranks that join and leave a running job: what was meant happens once, and what happens is settled by looking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings

from gpusched.controller.cycle import Cycle
from gpusched.controller.hot import _formed, _reported
from gpusched.controller.ranks import ReconcileResult
from gpusched.model.jobs import Elastic, JobSpec, JobState, Resizes
from gpusched.model.policy import PolicySpec, Resizing
from gpusched.model.readings import NodeReading, ProgressReading
from gpusched.queue.store import RunRecord
from tests.builders import job as job_record
from tests.builders import spec
from tests.controller.crash_orders import CrashOrders
from tests.controller.imagined import GPUS, Box, inventory
from tests.controller.site import ImaginedSite

RULES = Resizing(min_run_s=0.0, per_hour=1000, gain=0.05, start_timeout_s=100.0)
POLICIES = {"p": PolicySpec(name="hot", place="best-fit", backfill="easy", sizes="proportional", resize=RULES)}


def hot_spec(*sizes: int, ranks: int = 1, **more: Any) -> JobSpec:
    """A job whose ranks have the least of the sizes; at first so many of them."""
    size = sizes[0] * ranks
    elastic = Elastic(
        sizes=sizes, base_gpus=size, base_cores=ranks, base_memory_mib=1024 * ranks, cooldown_s=0, rank_gpus=sizes[0]
    )
    return spec(
        elastic=elastic, nodes=ranks, gpus_per_node=sizes[0], cores_per_node=1, memory_mib_per_node=1024, **more
    )


class Site(ImaginedSite):
    policies = POLICIES

    def crash(self, late: bool) -> None:
        self.cluster.crash(late)
        self.restart()

    def ranks(self, job_id: str) -> list[int]:
        allocation = self.job(job_id).allocation
        return [part.rank for part in allocation.parts] if allocation is not None else []

    def began(self, job_id: str) -> list[int]:
        """The ranks that began to run, in order."""
        return [int(name.split("-")[3]) for name in self.world.starts if name.split("-")[1] == job_id]

    def end(self, job_id: str, rank: int, code: int = 0) -> None:
        for _, box in self.world.running():
            if box.name.startswith(f"gpusched-{job_id}-") and box.name.endswith(f"-{rank}"):
                self.world.end(box, code)

    def events(self, job_id: str, kind: str) -> list[dict[str, Any]]:
        return [event.data for event in self.store.events(job_id=job_id) if event.kind == kind]

    def runs(self, job_id: str) -> list[RunRecord]:
        return [run for run in self.store.runs(0, self.world.now + 1) if run.job_id == job_id]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


def running(site: Site, *sizes: int) -> str:
    """A hot job at its least size beside a rigid one on each other node, all of which run."""
    others = [site.submit_spec(spec(gpus_per_node=GPUS)) for _ in range(2)]
    site.turn()
    job = site.submit_spec(hot_spec(*sizes))
    site.turn(2)
    assert {str(site.job(j).state) for j in (job, *others)} == {"RUNNING"}
    return job


def with_room(site: Site, job: str, nodes: int = 2) -> None:
    """End the others on so many nodes."""
    for _, box in [found for found in site.world.running() if found[1].name.split("-")[1] != job][:nodes]:
        site.world.end(box, 0)


def pair(site: Site) -> str:
    """A hot job that has two whole nodes, its group formed, beside a rigid one on the third."""
    job = running(site, 4, 8)
    with_room(site, job, nodes=1)
    site.turn(4)
    site.turn(2, 31)
    assert site.ranks(job) == [0, 1]
    return job


def grown(site: Site, *sizes: int) -> str:
    """A hot job that has all three nodes, its group formed."""
    job = running(site, *sizes)
    with_room(site, job)
    site.turn(4)
    site.turn(2, 31)
    assert site.ranks(job) == [0, 1, 2]
    assert site.job(job).resizes is not None
    return job


def test_it_grows_without_a_stop(site: Site) -> None:
    job = grown(site, 2, 4, 6)
    found = site.job(job)
    assert (found.state, found.attempt, found.spec.nodes, found.spec.gpus) == (JobState.RUNNING, 1, 3, 6)
    assert site.began(job) == [0, 1, 2]
    (resized,) = site.events(job, "resized")
    assert (resized["gpus_from"], resized["gpus_to"]) == (2, 6)
    runs = site.runs(job)
    assert [(run.gpus, run.nodes) for run in runs] == [(2, runs[0].nodes), (6, {"n0": 2, "n1": 2, "n2": 2})]
    assert runs[0].end_time == runs[1].start_time


@pytest.mark.parametrize("late", [False, True])
def test_a_controller_that_dies_between_the_intent_to_grow_and_its_effect(site: Site, late: bool) -> None:
    job = running(site, 2, 4, 6)
    with_room(site, job)
    site.turn(heard=False)
    assert site.ranks(job) == [0, 1, 2], "the intent"
    assert site.began(job) == [0], "and no more yet"
    site.crash(late)
    site.turn(4)
    assert site.ranks(job) == [0, 1, 2]
    assert site.began(job) == [0, 1, 2], "each once"


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_controller_that_dies_between_the_intent_to_shrink_and_its_effect(site: Site, turns: int, late: bool) -> None:
    job = pair(site)
    other = site.submit_spec(spec(gpus_per_node=GPUS))
    site.turn(turns, heard=False)  # the intent, then the signal, which nobody hears
    assert site.ranks(job) == [0, 1], "it has them until they are gone"
    site.crash(late)
    site.turn(6)
    assert site.ranks(job) == [0]
    assert site.job(other).state is JobState.RUNNING
    assert site.began(job) == [0, 1]
    assert site.job(job).attempt == 1


def test_gpus_are_free_only_once_the_rank_is_gone(site: Site) -> None:
    job = pair(site)
    boxes = [box for _, box in site.world.running() if box.name.endswith("-1") and job in box.name]
    boxes[0].stuck = True
    other = site.submit_spec(spec(gpus_per_node=GPUS))
    site.turn(4)
    assert site.ranks(job) == [0, 1]
    site.turn(12, 30)
    assert site.ranks(job) == [0], "it goes on without what cannot be killed"
    assert site.job(other).state is JobState.PENDING, "whose GPUs are in use"
    boxes[0].stuck = False
    site.turn(6, 60)
    assert site.job(other).state is JobState.RUNNING


def test_a_rank_that_leaves_has_the_grace_period_to_do_so(site: Site) -> None:
    job = pair(site)
    (first, _) = (rank for rank in site.store.ranks() if rank.job_id == job)
    leftover = msgspec.structs.replace(first, attempt=0, gone=True, launched_at=site.world.now + 99)
    site.store.put_ranks([leftover])
    site.submit_spec(spec(gpus_per_node=GPUS))
    site.turn(heard=False)
    (leaves,) = [rank for rank in site.store.ranks() if rank.job_id == job and rank.hot == "leaves"]
    assert (leaves.attempt, leaves.rank) == (1, 1)
    assert leaves.leave_by == site.world.now + site.cycle.inventory.settings.grace_s


def test_a_job_that_ends_as_a_rank_leaves_has_its_outcome_in_its_last_run(site: Site) -> None:
    job = pair(site)
    site.submit_spec(spec(gpus_per_node=GPUS))
    site.turn(heard=False)
    site.end(job, 1)
    site.end(job, 0)
    site.turn(3)
    assert site.job(job).state is JobState.COMPLETED
    assert [run.outcome for run in site.runs(job)][-1] == "COMPLETED"
    assert all(run.end_time is not None for run in site.runs(job))


def test_remaining_ranks_go_on_and_a_new_rank_has_a_new_number(site: Site) -> None:
    job = grown(site, 2, 4, 6)
    site.end(job, 1, 137)
    for seconds in (1, 3):
        site.turn(1, seconds)
        assert site.ranks(job) == [0, 1, 2], "the others may be about to fail, too: within 5 s"
    site.turn()
    assert site.ranks(job) == [0, 2]
    (lost,) = [data for data in site.events(job, "rank_left") if "message" in data]
    assert lost["message"].startswith("continues without rank 1 on ")
    assert lost["message"].endswith("it exited with 137")
    site.turn(4, 31)
    assert site.ranks(job) == [0, 2, 3]
    assert site.began(job) == [0, 1, 2, 3]
    assert site.job(job).attempt == 1
    assert [run.gpus for run in site.runs(job)] == [2, 6, 4, 6]


def test_a_job_that_makes_no_step_after_a_loss_begins_again(site: Site) -> None:
    """Torch waits for a rank that was killed while its group formed."""
    job = pair(site)
    (first,) = [box for _, box in site.world.running() if box.name == f"gpusched-{job}-1-0"]
    first.progress = ProgressReading(step=1.0, nodes=2.0, age_s=0.0)  # of the group before
    site.end(job, 1, 137)
    site.turn(3, 6)
    assert site.ranks(job) == [0]
    site.turn(2, 30)
    assert (site.job(job).state, site.job(job).attempt) == (JobState.RUNNING, 1)
    site.turn(8, 10)
    assert (site.job(job).state, site.job(job).attempt) == (JobState.RUNNING, 2)
    (ending,) = site.events(job, "ending")
    assert ending["message"] == "its ranks formed no new group after one left: no step within 100 s"


def test_a_program_that_fails_on_all_ranks_has_failed(site: Site) -> None:
    job = grown(site, 2, 4, 6)
    site.end(job, 1, 3)
    site.turn()
    for rank in (0, 2):
        site.end(job, rank, 3)
    site.turn(3)
    assert (site.job(job).state, site.job(job).exit_code) == (JobState.FAILED, 3)


def test_a_hot_job_with_too_few_ranks_left_ends_like_others(site: Site) -> None:
    asked = hot_spec(2, ranks=2)
    elastic = msgspec.structs.replace(asked.elastic, sizes=(4, 6)) if asked.elastic else None
    job = site.submit_spec(msgspec.structs.replace(asked, elastic=elastic))
    site.turn(3)
    site.turn(4, 31)
    assert site.ranks(job) == [0, 1, 2]
    site.end(job, 2, 1)
    site.turn(2, 6)
    assert site.ranks(job) == [0, 1]
    site.end(job, 1, 1)
    site.turn(3, 6)
    assert site.job(job).state is not JobState.RUNNING


def test_a_dead_node_takes_its_rank_only_and_is_fenced_when_it_comes_back(site: Site) -> None:
    job = grown(site, 2, 4, 6)
    allocation = site.job(job).allocation
    assert allocation is not None
    dead = site.world.hosts[allocation.parts[1].node]
    dead.up = False
    site.turn(4, 31)
    assert site.ranks(job) == [0, 2]
    assert site.job(job).attempt == 1
    dead.up = True
    site.turn(6, 31)
    assert site.began(job) == [0, 1, 2, 3]
    assert [box.name[-1] for _, box in site.world.running()].count("1") == 0, "the old one is killed"
    assert site.ranks(job) == [0, 2, 3]


def about_to_join(site: Site, job: str) -> Box:
    """The container of a rank that is to join, as it is prepared."""
    with_room(site, job)
    site.turn()
    (box,) = (box for host in site.world.hosts.values() for box in host.boxes.values() if box.phase == "preparing")
    return box


def test_a_rank_that_cannot_be_launched_leaves_the_job_as_it_was(site: Site) -> None:
    job = running(site, 2, 4)
    about_to_join(site, job).phase = "failed"
    site.turn(6)
    found = site.job(job)
    assert (found.state, site.ranks(job), found.attempt) == (JobState.RUNNING, [0], 1)
    assert found.resizes is not None
    assert found.resizes.unusable == (4,), "not tried again"
    assert (found.resizes.count, found.resizes.next_rank) == (1, 2), "of the resize that was begun"
    assert site.events(job, "rank_left")[0]["message"].endswith("it could not join: killed")


@pytest.mark.parametrize(("code", "unusable", "why"), [(0, (), "exited"), (3, (4,), "it exited with 3")])
def test_a_rank_that_has_ended_before_it_joined_counts_against_its_size_unless_it_ended_well(
    site: Site, code: int, unusable: tuple[int, ...], why: str
) -> None:
    job = running(site, 2, 4)
    site.world.end(about_to_join(site, job), code)
    site.turn(2)
    resizes = site.job(job).resizes
    assert resizes is not None
    assert (site.job(job).state, resizes.unusable) == (JobState.RUNNING, unusable)
    assert site.events(job, "rank_left")[0]["message"].endswith(f"it could not join: {why}")


def test_a_rank_that_is_not_there_in_time_is_removed_and_the_job_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.cycle.inventory = msgspec.structs.replace(
        site.cycle.inventory, settings=msgspec.structs.replace(site.cycle.inventory.settings, launch_timeout_s=60)
    )
    job = running(site, 2, 4)
    monkeypatch.setattr(site.world, "progress", lambda: None)
    with_room(site, job)
    site.turn(2)
    assert site.ranks(job) == [0, 1]
    site.turn(4, 31)
    assert (site.job(job).state, site.ranks(job)) == (JobState.RUNNING, [0])
    assert len([box for host in site.world.hosts.values() for box in host.boxes.values()]) == 1
    assert "it could not join: its container was not ready within" in site.events(job, "rank_left")[0]["message"]


def test_without_a_group_in_time_the_ranks_that_joined_leave_and_the_size_is_not_tried_again(site: Site) -> None:
    job = running(site, 4, 8)
    (first,) = [box for _, box in site.world.running() if box.name == f"gpusched-{job}-1-0"]
    first.progress = ProgressReading(step=1.0, nodes=1.0, age_s=0.0)
    with_room(site, job, nodes=1)
    site.turn(4)
    assert site.ranks(job) == [0, 1]
    before = site.job(job).resizes
    assert before is not None
    assert before.formed_since is not None
    site.turn(1, before.formed_since + 99 - site.world.now)
    assert site.job(job).resizes == before
    site.turn(1, before.formed_since + 100 - site.world.now, heard=False)
    why = "back to 4 GPUs: no group of 2 ranks within 100 s"
    assert site.events(job, "resizing")[-1] == {"gpus_from": 8, "gpus_to": 4, "message": why, "hot": True}
    assert site.job(job).resizes == msgspec.structs.replace(
        before, before=8, unusable=(8,), count=before.count + 1, why=why, formed_since=None
    )
    (leaves,) = [rank for rank in site.store.ranks() if rank.job_id == job and rank.hot == "leaves"]
    grace_s = site.cycle.inventory.settings.grace_s
    assert (leaves.rank, leaves.leave_by) == (1, pytest.approx(site.world.now + grace_s, abs=1))
    site.turn(9, 31)
    assert (site.ranks(job), site.job(job).state, site.job(job).attempt) == ([0], JobState.RUNNING, 1)
    assert site.began(job) == [0, 1]


def test_its_time_limit_is_that_of_rank_0(site: Site) -> None:
    job = running(site, 2, 4)
    limit = site.job(job).spec.time_limit_s
    site.turn(1, limit - 100)
    with_room(site, job)
    site.turn(4, 5)
    assert site.ranks(job) == [0, 1]
    site.turn(6, 30)
    assert site.job(job).state is JobState.TIMEOUT


def test_a_hot_job_is_charged_for_what_it_held(site: Site) -> None:
    job = pair(site)
    other = site.submit_spec(spec(gpus_per_node=GPUS))
    site.turn(8, 5)
    assert site.job(other).state is JobState.RUNNING
    site.end(job, 0)
    site.turn(4, 5)
    runs = site.runs(job)
    assert [run.gpus for run in runs] == [4, 8, 4]
    held = sum(run.gpus * ((run.end_time or 0) - run.start_time) for run in runs)
    charged = sum(row.gpu_s for row in site.store.usage(0) if row.job_id == job)
    # Usage begins with the allocation and a run with the container; a part ends with the cycle that sees its end.
    assert held - 1 <= charged <= held + 8 * 5.1
    for run in runs:
        assert run.nodes == {node: 4 for node in run.nodes}


class HotOrders(CrashOrders):
    """`CrashOrders` with jobs whose ranks join and leave."""

    def _start_controller(self) -> None:
        super()._start_controller()
        self.cycle = Cycle(self.store, self.state, inventory(), POLICIES, self.cluster, clock=lambda: self.world.now)

    def _share(self, gpus: int, nodes: int) -> dict[str, Any]:
        # Two nodes hold all of it: one may be lost from the inventory.
        return {"elastic": hot_spec(gpus, 2 * gpus, ranks=nodes).elastic} if gpus else {}

    def _cycle(self, fates: list[str], seconds: int) -> None:
        super()._cycle(fates, seconds)
        # A rank that fails while the group forms is taken for a rank that found none: the job is tried again.
        events = self.store.events(limit=100_000)
        failed = [e.job_id for e in events if "formed no new group" in str(e.data.get("message"))]
        backs = [e.job_id for e in self.store.events(limit=100_000) if "back to" in str(e.data.get("message"))]
        self.disturbed.update(job for job in (*failed, *backs) if job is not None)


TestHotOrders = HotOrders.TestCase
TestHotOrders.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize(("said", "age_s", "ran_s", "counts"), [
    (7.0, 1.0, 1.0, 7.0), (9e15, 1.0, 1.0, 40.0), (7.0, 0.5, 39.0, 7.0),
    (7.0, 0.5, 50.0, None),  # of a group that began before
])  # fmt: skip
def test_a_pause_is_no_longer_than_the_time_since_it_was_asked_for(
    said: float, age_s: float, ran_s: float, counts: float | None
) -> None:
    """One job's figure decides whether others are asked to give up GPUs."""
    progress = ProgressReading(step=1.0, nodes=2.0, ran_s=ran_s, paused_s=said, age_s=age_s)
    observed = {"n": SimpleNamespace(result=NodeReading(node="n", time=140.0))}
    rank: Any = SimpleNamespace(container=SimpleNamespace(progress=progress), rank=SimpleNamespace(node="n"))
    inputs: Any = SimpleNamespace(now=140.0, observations=observed)
    assert _reported([rank], Resizes(times=(100.0,)), inputs) == (2, counts)


@pytest.mark.parametrize(("paused_s", "mean_s"), [(7.0, 5.0), (None, 3.0)])
def test_each_pause_counts_in_the_mean_cost_of_a_resize(paused_s: float | None, mean_s: float) -> None:
    resizes = Resizes(before=4, formed_since=90.0, costs_s=3.0, measured=1)
    step = ReconcileResult(job=job_record("j", spec=hot_spec(2, 4), resizes=resizes))
    _formed(step, paused_s, 100.0)
    assert step.job.resizes is not None
    assert (step.job.resizes.cost_s, step.job.resizes.before) == (mean_s, None)
    assert [event.data for event in step.events] == [{"gpus_from": 4, "gpus_to": 2, "cost_s": paused_s}]
