"""A controller beside a wall clock that may be set while it runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpusched.controller.cycle import Cycle
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobRecord
from gpusched.model.resources import Inventory
from gpusched.queue.clock import ANCHOR, Clock, follow_wall_clock
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.applying import fresh_id
from tests.controller.crash_orders import POLICIES
from tests.controller.imagined import Host, ImaginedCluster, World, inventory

LIMIT_S = 60
"""Time limit of its jobs."""


class ClockSite:
    """A controller beside a wall clock that is ``ahead`` of the boot clock; nothing else sees the difference."""

    def __init__(self, state: Path, declared: Inventory | None = None) -> None:
        self.state, self.ahead, self.inventory = state, 0.0, declared or inventory()
        self.inbox = Inbox(state)
        self.inbox.create()
        self.world = World(hosts={n.name: Host(n.name) for n in self.inventory.nodes})
        self._begin()

    def _begin(self) -> None:
        self.store = Store.create_or_open(self.state)
        self.clock = Clock(self.wall, lambda: self.world.now, "this")
        self.clock.resume(self.store.meta(ANCHOR), float(self.store.meta("heartbeat") or 0))
        self.store.set_meta(ANCHOR, self.clock.anchor())
        self.cluster = ImaginedCluster(self.world, self.clock)
        self._cycle()

    def _cycle(self) -> None:
        self.cycle = Cycle(self.store, self.state, self.inventory, POLICIES, self.cluster, self.clock)

    def wall(self) -> float:
        return self.world.now + self.ahead

    def turn(self, seconds: float = 1.0) -> None:
        self.world.now += seconds
        if follow_wall_clock(self.store, self.clock):
            self._cycle()
        self.cycle.run(0)
        self.cluster.deliver(lambda _: "ok")

    def restart(self) -> None:
        self.store.close()
        self._begin()

    def submit(self, **changes: Any) -> str:
        asked = spec(**({"time_limit_s": LIMIT_S} | changes))
        command = Submit(time=self.wall(), id=fresh_id(self.wall()), spec=asked)
        self.inbox.deliver(command)
        return command.id

    def job(self, job_id: str) -> JobRecord:
        found = self.store.job(job_id)
        assert found is not None
        return found


@contextmanager
def clock_site(declared: Inventory | None = None) -> Iterator[ClockSite]:
    state = Path(tempfile.mkdtemp(prefix="gpusched-clock-"))
    site = ClockSite(state, declared)
    yield site
    site.store.close()
    shutil.rmtree(state)
