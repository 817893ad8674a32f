"""Whole cycles over an imagined cluster: what only shows when the parts work together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.cluster.base import Outcome
from gpusched.controller.collected import LONGEST_PAUSE_S, MAX_FAILURES
from gpusched.controller.cycle import Cycle
from gpusched.model import ids
from gpusched.model.commands import Cancel, Submit
from gpusched.model.jobs import ENDED, JobState
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.controller.folding import spec
from tests.controller.imagined import Host, ImaginedCluster, World, inventory
from tests.controller.test_crash_orders import POLICIES


class Site:
    def __init__(self, state: Path) -> None:
        self.state = state
        self.inbox = Inbox(state)
        self.inbox.create()
        self.world = World(hosts={n.name: Host(n.name) for n in inventory().nodes})
        self.store = Store.create_or_open(state)
        self.cluster = ImaginedCluster(self.world)
        self.cycle = Cycle(
            self.store, state, inventory(), POLICIES, self.cluster, clock=lambda: self.world.now
        )  # fmt: skip

    def turn(self, times: int = 1, seconds: float = 1) -> None:
        for _ in range(times):
            self.world.now += seconds
            self.world.progress()
            self.cycle.run(0)
            self.cluster.deliver(lambda _: "ok")

    def submit(self, **more: object) -> str:
        command = Submit(time=self.world.now, id=ids.mint(self.world.now), spec=spec())
        self.inbox.deliver(msgspec.structs.replace(command, **more))
        return command.id

    def secrets(self) -> list[str]:
        return sorted(p.name for p in (self.state / "secrets").glob("*"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


SECRET = {"spec": spec(secret_names=("A",)), "secrets": {"A": "s3cr3t"}}


def test_the_secrets_of_an_array_go_when_its_last_tasks_end_together(site: Site) -> None:
    site.submit(array=(0, 1), **SECRET)
    site.turn(3)
    assert len(site.secrets()) == 1
    boxes = [box for _, box in site.world.running()]
    assert len(boxes) == 2
    for box in boxes:
        site.world.end(box, 0)
    site.turn(2)
    assert site.secrets() == []


@pytest.mark.parametrize("more", [{}, {"array": (0, 1, 2)}])
def test_the_secrets_of_what_is_cancelled_before_it_began_go_too(site: Site, more: dict[str, object]) -> None:
    job = site.submit(**SECRET | {"spec": spec(secret_names=("A",), hold=True)} | more)
    site.turn()
    assert len(site.secrets()) == 1
    site.inbox.deliver(Cancel(time=site.world.now, job_ids=(job,)))
    site.turn()
    assert site.secrets() == []


def test_secrets_stay_for_a_retry(site: Site) -> None:
    site.submit(**SECRET)
    site.turn(3)
    ((host, _),) = site.world.running()
    host.up = False
    site.turn(5, 30)
    assert len(site.world.starts) == 2
    assert len(site.secrets()) == 1


def test_an_output_that_cannot_be_had_is_asked_for_again_then_given_up(site: Site) -> None:
    site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.world.end(box, 0)
    for _ in range(MAX_FAILURES):
        assert host.boxes, "nothing is removed whose output is not home"
        site.cycle.run(0)
        for key, work in list(site.cluster._pending.items()):
            assert work.verb == "collect"
            del site.cluster._pending[key]
            site.cluster._done.append(Outcome(work=work, time=site.world.now, error="podman is ill"))
        site.world.now += LONGEST_PAUSE_S
    site.turn(3)
    assert not host.boxes
    assert not site.store.ranks()


def test_why_a_job_is_tried_again_is_not_overwritten_by_its_waiting(site: Site) -> None:
    job = site.submit()
    site.turn(3)
    ((host, _),) = site.world.running()
    host.boxes.clear()
    site.turn(4)
    waiting = site.store.job(job)
    assert waiting is not None
    assert (waiting.state, waiting.reason) == (JobState.PENDING, "BeginTime")
    assert "tried again after 10 s" in waiting.message
    host.up = False
    site.turn(3, 20)
    assert len(site.world.starts) == 2


def test_a_reading_from_before_the_removal_is_no_news(site: Site) -> None:
    site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.world.end(box, 0)
    for _ in range(4):
        site.cluster.overtaken(host.name)
        site.turn()
    assert not site.store.ranks()
    kinds = [e.kind for e in site.store.events()]
    assert "reaped" not in kinds
    assert "fenced" not in kinds
    assert {j.state for j in site.store.jobs()} <= ENDED


def test_a_collection_that_breaks_off_is_not_begun_anew_at_once_for_ever(site: Site) -> None:
    job = site.submit()
    site.turn(3)
    ((_, box),) = site.world.running()
    site.world.end(box, 0)
    asked = 0
    for _ in range(600):  # ten minutes, a cycle each second
        site.world.now += 1
        site.cycle.run(0)
        asked += len(site.cluster._pending)
        site.cluster.deliver(lambda _: "lost")
    assert 5 < asked < 15
    told = [e for e in site.store.events(job_id=job) if e.kind == "work_failed"]
    assert len(told) == 1
    site.turn(3, LONGEST_PAUSE_S)  # the connection is well again
    assert not site.store.ranks()


def test_every_tick_counts_an_output_that_cannot_be_had(site: Site) -> None:
    site.submit()
    site.turn(3)
    ((host, box),) = site.world.running()
    site.world.end(box, 0)
    for _ in range(MAX_FAILURES):
        assert host.boxes
        site.cycle = Cycle(site.store, site.state, inventory(), POLICIES, site.cluster, clock=lambda: site.world.now)
        site.cycle.run(0)
        for key, work in list(site.cluster._pending.items()):
            del site.cluster._pending[key]
            site.cluster._done.append(Outcome(work=work, time=site.world.now, error="podman is ill"))
        site.world.now += 60
        site.cycle.run(0)  # settles
        site.cluster._pending.clear()
    site.turn(3)
    assert not host.boxes
