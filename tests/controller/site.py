"""A controller's cycles on an imagined cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpusched.controller.cycle import Cycle
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.applying import fresh_id
from tests.controller.crash_orders import POLICIES
from tests.controller.imagined import Host, ImaginedCluster, World, inventory


class Turns:
    """A controller's cycles by turns: time goes on, nodes go on, a cycle runs, nodes answer."""

    world: World
    store: Store
    cycle: Cycle
    cluster: ImaginedCluster

    def turn(self, times: int = 1, seconds: float = 1, heard: bool = True) -> None:
        """``heard``: the nodes' answers reach the controller."""
        for _ in range(times):
            self.world.now += seconds
            self.world.progress()
            self.cycle.run(0)
            if heard:
                self.cluster.deliver(lambda _: "ok")

    def job(self, job_id: str) -> JobRecord:
        found = self.store.job(job_id)
        assert found is not None
        return found


class ImaginedSite(Turns):
    """A controller over three imagined nodes of four GPUs."""

    policies: Mapping[str, PolicySpec] = POLICIES

    def __init__(self, state: Path) -> None:
        self.state = state
        self.inbox = Inbox(state)
        self.inbox.create()
        self.world = World(hosts={n.name: Host(n.name) for n in inventory().nodes})
        self.store = Store.create_or_open(state)
        self.begin(inventory())

    def begin(self, declared: Inventory) -> None:
        self.cluster = ImaginedCluster(self.world)
        self.cycle = Cycle(
            self.store, self.state, declared, self.policies, self.cluster, clock=lambda: self.world.now
        )  # fmt: skip

    def restart(self) -> None:
        """The controller dies and is started again."""
        self.store.close()
        self.store = Store.create_or_open(self.state)
        self.begin(self.cycle.inventory)

    def submit_spec(self, asked: JobSpec) -> str:
        """Submit a request, a little later than the one before."""
        self.world.now += 0.002
        command = Submit(time=self.world.now, id=ids.mint(self.world.now), spec=asked)
        self.inbox.deliver(command)
        return command.id


class Site(ImaginedSite):
    def state_of(self, job: str) -> JobState | None:
        found = self.store.job(job)
        return found.state if found else None

    def submit(self, **more: object) -> str:
        command = Submit(time=self.world.now, id=fresh_id(self.world.now), spec=spec())
        self.inbox.deliver(msgspec.structs.replace(command, **more))
        return command.id

    def secrets(self) -> list[str]:
        return sorted(p.name for p in (self.state / "secrets").glob("*"))
