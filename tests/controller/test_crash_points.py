"""A controller killed between every two operations of its own: on the store, on files, on nodes. Each point is passed.

At each operation the process forks. The child takes a copy of the state folder as it is now, forgets the controller in
its memory as ``kill -9`` would, and goes on with another one to the end of the story; there all must be as if nothing
had happened.
"""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gpusched.cluster.base import Operation
from gpusched.controller.cycle import Cycle
from gpusched.model import commands as c
from gpusched.model.jobs import ENDED, JobState
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.imagined import ImaginedCluster, World
from tests.controller.site import Site

LIMIT_S = 60.0
FILES = ("unlink", "rename", "replace", "link", "fsync", "rmdir")
READS = ("SELECT", "PRAGMA", "BEGIN", "SAVEPOINT", "RELEASE", "ROLLBACK")
END = {
    "plain": (JobState.COMPLETED, 0), "gang": (JobState.COMPLETED, 0), "secret": (JobState.FAILED, 3),
    "cancelled": (JobState.CANCELLED, 143), "limit": (JobState.TIMEOUT, 143),
}  # fmt: skip


class Watched:
    """A connection that says when it is about to write."""

    def __init__(self, real: Any, point: Callable[[str], None]) -> None:
        self._real, self._point = real, point

    def execute(self, sql: str, *values: Any) -> Any:
        if sql == "COMMIT" or not (self._real.in_transaction or sql.lstrip().upper().startswith(READS)):
            self._point(sql)
        return self._real.execute(sql, *values)

    def executemany(self, sql: str, *values: Any) -> Any:
        if not self._real.in_transaction:
            self._point(sql)
        return self._real.executemany(sql, *values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class WatchedCluster(ImaginedCluster):
    """A port that says when it is used."""

    def __init__(self, world: World, point: Callable[[str], None]) -> None:
        super().__init__(world)
        self._point = point

    def observe(self, *args: Any, **more: Any) -> Any:
        self._point("observe")
        return super().observe(*args, **more)

    def perform(self, works: Iterable[Operation]) -> None:
        for operation in works:
            self._point(f"perform {operation.verb}")
            super().perform([operation])

    def finished(self) -> Any:
        self._point("finished")
        found = super().finished()
        if found:
            self._point("finished, not yet recorded")
        return found


class Story(Site):
    """Five jobs from submission to the last trace of them; `point` is called before each operation."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.turns = 0
        self.jobs: dict[str, str] = {}
        self.points: Counter[str] = Counter()
        self.failed: list[str] = []
        self._is_mortal = False

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From here on it dies at each operation."""
        self._is_mortal = True
        self.cluster = WatchedCluster(self.world, self.point)
        self.store._db = Watched(self.store._db, self.point)  # type: ignore[assignment]
        self.cycle = Cycle(self.store, self.state, self.cycle.inventory, self.policies, self.cluster,
                           clock=lambda: self.world.now)  # fmt: skip
        for name in FILES:
            given = getattr(os, name)

            def call(*args: Any, name: str = name, given: Any = given, **more: Any) -> Any:
                self.point(name)
                return given(*args, **more)

            monkeypatch.setattr(os, name, call)

    def point(self, what: str) -> None:
        if not self._is_mortal:
            return
        self.points[what.split("(")[0].strip()[:40]] += 1
        for late in (False, True) if self.cluster._pending else (False,):
            # A lock that another thread held at the fork, such as SQLite's, is held in the child for ever: once more.
            if not any(self._lives_on(what, late) for _ in range(3)):
                self.failed.append(f"before {what!r} of turn {self.turns}, late={late}: it hung")

    def _lives_on(self, what: str, late: bool) -> bool:
        """Die and live on, in a child; return whether it ended in time."""
        if not (child := os.fork()):
            self._live_on(what, late)
        handle, end = os.pidfd_open(child), select.poll()  # numbers of descriptors may be too large for select
        try:
            end.register(handle, select.POLLIN)
            ended = bool(end.poll(1000 * LIMIT_S))
        finally:
            os.close(handle)
        if not ended:
            os.kill(child, signal.SIGKILL)
        if os.waitpid(child, 0)[1] and ended:
            self.failed.append(f"before {what!r} of turn {self.turns}, late={late}")
        return ended

    def _live_on(self, what: str, late: bool) -> None:
        """In the child: another controller, on a copy."""
        try:
            self._is_mortal = False
            copy = self.state.with_name(f"dead-{os.getpid()}")
            shutil.copytree(self.state, copy)
            self.cluster.crash(late)
            self.state, self.inbox = copy, Inbox(copy)
            self.store = Store.create_or_open(copy)
            self.begin(self.cycle.inventory)
            self.play()
            self.check()
            self.store.close()
            shutil.rmtree(copy)
            os._exit(0)
        except BaseException:
            print(f"\ndied before {what!r} of turn {self.turns}, late={late}", file=sys.stderr)
            traceback.print_exc()
            os._exit(1)

    def write_orders(self) -> None:
        """Lay the submissions into the inbox."""
        self.jobs = {
            "plain": self.submit(spec=spec(gpus_per_node=2)),
            "gang": self.submit(spec=spec(nodes=2, gpus_per_node=2)),
            "secret": self.submit(spec=spec(secret_names=("S",)), secrets={"S": "x"}),
            "cancelled": self.submit(spec=spec(time_limit_s=3600)),
            "limit": self.submit(spec=spec(time_limit_s=20)),
        }

    def play(self) -> None:
        """Play what is left of the story, from the present turn on."""
        while self.turns < 40 and not (self.turns > 8 and self._is_over()):
            self.turns += 1
            mortal, self._is_mortal = self._is_mortal, False
            self._happens()  # of which nothing is the controller's
            self._is_mortal = mortal
            self.turn(seconds=4)

    def _is_over(self) -> bool:
        return not self.store.ranks() and all(self.state_of(job) in ENDED for job in self.jobs.values())

    def _happens(self) -> None:
        if self.turns == 5:
            self.inbox.deliver(c.Cancel(time=self.world.now, job_ids=(self.jobs["cancelled"],)))
        for _, box in self.world.running() if self.turns >= 7 else ():
            job = box.name.split("-")[1]
            if job == self.jobs["secret"]:
                self.world.end(box, 3)
            elif job in (self.jobs["plain"], self.jobs["gang"]):
                self.world.end(box, 0)

    def check(self) -> None:
        """All is as without a death."""
        found = {name: (self.job(job).state, self.job(job).exit_code) for name, job in self.jobs.items()}
        assert found == END, (found, [(e.kind, e.job_id, e.data) for e in self.store.events()])
        assert {self.job(job).attempt for job in self.jobs.values()} == {1}
        assert max(Counter(self.world.starts).values()) == 1, self.world.starts
        assert len(self.world.starts) == 6
        assert self.store.ranks() == []
        assert [box for host in self.world.hosts.values() for box in host.boxes] == []
        assert os.listdir(self.inbox.new) == []
        assert self.secrets() == []
        runs = self.store.runs(0, self.world.now + 1)
        assert sorted(run.job_id for run in runs) == sorted(self.jobs.values())
        assert all(run.end_time is not None for run in runs)


@pytest.mark.slow
def test_killed_between_every_two_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    story = Story(tmp_path / "state")
    story.write_orders()
    gc.freeze()  # or each child would look at, and so copy, all of this process
    story.watch(monkeypatch)
    story.play()
    story._is_mortal = False
    story.check()
    gc.unfreeze()
    record_property("figure", f"crash points of a controller: {story.points.total()} passed")
    assert story.failed == [], f"{len(story.failed)} of {story.points.total()}"
    assert story.points.total() > 60
    assert {"COMMIT", "unlink", "perform launch", "perform remove", "perform signal"} <= set(story.points)
    story.store.close()
