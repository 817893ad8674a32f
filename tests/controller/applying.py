"""A store, an inbox and a clock to apply commands with; the test chooses whose they are."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from gpusched.controller.commandfiles import CommandApplier
from gpusched.controller.secretfiles import SecretFiles
from gpusched.model import ids
from gpusched.model.commands import AnyCommand, Submit
from gpusched.model.events import Event
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.resources import Inventory
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.builders import spec
from tests.controller.imagined import inventory

ME, ALICE, BOB, ADMIN = os.getuid(), 12301, 12302, 12303
NOW = 1_800_000_000.0


_COUNT = itertools.count()


def fresh_id(now: float) -> str:
    """A job id that no other job of the test has: two that are minted in one millisecond may be the same."""
    return ids.mint(now)[:8] + f"{next(_COUNT) % 1000:03d}"


class InboxWorld:
    """A store and an inbox into which commands are put and from which they are applied."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.inbox = Inbox(state)
        self.inbox.create()
        self.store = Store.create_or_open(state)
        self.secrets = SecretFiles(state)
        self.now = NOW
        settings = msgspec.structs.replace(inventory().settings, admins=(str(ADMIN),), allowed_mounts=("/data",))
        self.inventory: Inventory = msgspec.structs.replace(inventory(), settings=settings)

    def applier(self) -> CommandApplier:
        return CommandApplier(self.store, self.inbox, self.inventory, self.secrets)

    def apply_inbox(self) -> int:
        self.now += 1
        return self.applier().apply_inbox(self.now)

    def lay(self, command: AnyCommand, uid: int = ME) -> Path:
        """Deliver a command as its owner would; returns the file."""
        before = set(self.inbox.new.iterdir())
        self.inbox.deliver(command)
        (path,) = set(self.inbox.new.iterdir()) - before
        if uid != ME:
            os.chown(path, uid, -1)
        return path

    def say(self, command: AnyCommand, uid: int = ME) -> str:
        """Deliver and apply; returns why it was refused, or ""."""
        self.lay(command, uid)
        before = len(self.refusals())
        self.apply_inbox()
        return "; ".join(str(e.data["why"]) for e in self.refusals()[before:])

    def submit(self, uid: int = ME, **changes: Any) -> str:
        more = {k: changes.pop(k) for k in ("array", "max_running", "secrets") if k in changes}
        job_id = fresh_id(self.now)
        refused = self.say(Submit(time=self.now, id=job_id, spec=spec(**changes), **more), uid)
        assert not refused, refused
        return job_id

    def job(self, job_id: str) -> JobRecord:
        found = self.store.job(job_id)
        assert found is not None
        return found

    def put(self, job_id: str, state: JobState, **changes: Any) -> JobRecord:
        """Put a job into a state, as the controller would have."""
        part = NodeAllocation(rank=0, node="n0", gpus=(0,), cores=1, memory_mib=1024)
        active = state in (JobState.STARTING, JobState.RUNNING)
        fields = {"attempt": 1, "allocation": Allocation(job_id, (part,)) if active else None, "start_time": NOW}
        job = msgspec.structs.replace(self.job(job_id), state=state, **fields | changes)
        self.store.put_jobs([job])
        return job

    def refusals(self) -> list[Event]:
        return self.kinds("refused_command")

    def kinds(self, kind: str) -> list[Event]:
        return [e for e in self.store.events() if e.kind == kind]


def names(folder: Path) -> Iterable[str]:
    return sorted(p.name for p in folder.iterdir())
