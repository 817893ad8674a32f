"""Requests from inside a job, and who answers them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpusched.cli import options
from gpusched.client.sbatch_inside import prepare
from gpusched.cluster.base import NodeObservation
from gpusched.controller.injob import InJobCommandHandler
from gpusched.model.jobs import JobState
from gpusched.model.readings import AskReading, ContainerReading, NodeReading
from gpusched.queue.store import RankRecord
from tests.controller.applying import NOW, InboxWorld


@pytest.fixture
def world(tmp_path: Path) -> Iterator[InboxWorld]:
    made = InboxWorld(tmp_path)
    yield made
    made.store.close()


def running(world: InboxWorld, uid: int, **changes: Any) -> str:
    job = world.submit(uid, name="mine", **changes)
    world.put(job, JobState.RUNNING)
    world.store.put_ranks([RankRecord(job_id=job, attempt=1, rank=0, node="n0", runtime="process")])
    return job


def ask(
    world: InboxWorld, job: str, *words: str, number: int = 1, attempt: int = 1, node: str = "n0", **more: Any
) -> str | None:
    """Return the controller's answer to that request on the node; None: nothing yet."""
    asked = AskReading(id=f"1-{number}", attempt=attempt, words=words, **more)
    container = ContainerReading(name=f"gpusched-{job}-1-0", phase="running", ask=asked)
    reading = NodeReading(node=node, time=NOW, containers=(container,))
    observed = {node: NodeObservation(began=NOW, result=reading)}
    asking = InJobCommandHandler(world.store, world.inbox, partial(prepare, options))  # new each time, as after a crash
    operations = asking.answers(observed, world.inventory, world.now)
    if not operations:
        return None
    (operation,) = operations
    assert (operation.verb, operation.node, operation.key) == ("answer", "n0", (job, 1, 0))
    assert operation.note is not None
    return operation.note.removeprefix(f"1-{number} ")
