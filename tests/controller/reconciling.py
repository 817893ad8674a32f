"""One job's reconciliation, with its ranks as nodes report them."""

from __future__ import annotations

from typing import Any

from gpusched.cluster.base import NodeObservation
from gpusched.controller.ranks import ReconcileInput, ReconcileResult
from gpusched.model.jobs import Ending, JobRecord, JobState, container_name
from gpusched.model.readings import ContainerReading, NodeReading, ProbeFailure
from gpusched.model.resources import Settings
from gpusched.queue.store import RankRecord
from tests import builders

NOW = 1_800_000_000.0


ID = "0123456789a"


SETTINGS = Settings(grace_s=10, max_retries=2, node_fail_after_s=60)


def job(state: JobState, nodes: int = 1, **changes: Any) -> JobRecord:
    fields: dict[str, Any] = {
        "nodes": {f"n{r}": (0,) for r in range(nodes)}, "spec": builders.spec(nodes=nodes), "submit_time": NOW - 1000,
        "start_time": None if state is JobState.STARTING else NOW - 100,
    }  # fmt: skip
    return builders.job(ID, state, **fields | changes)


def ranks(nodes: int = 1, **changes: Any) -> list[RankRecord]:
    fields: dict[str, Any] = {"runtime": "podman", "gpus": (0,), "launched_at": NOW - 200, "boot_id": "b"}
    return [RankRecord(job_id=ID, attempt=1, rank=r, node=f"n{r}", **fields | changes) for r in range(nodes)]


def says(
    phase: str | None, rank: int = 0, *, skew: float = 0.0, boot: str = "b", **more: Any
) -> dict[str, NodeObservation]:
    """A node's answer: its container in a phase (None: nothing there)."""
    box = ContainerReading(name=container_name(ID, 1, rank), phase=phase, **more) if phase else None  # type: ignore[arg-type]
    reading = NodeReading(
        node=f"n{rank}", time=NOW, boot_id=boot, clock_skew_s=skew, containers=(box,) if box else (),
    )  # fmt: skip
    return {f"n{rank}": NodeObservation(began=NOW - 0.1, result=reading)}


def silent(rank: int = 0) -> dict[str, NodeObservation]:
    failure = ProbeFailure(node=f"n{rank}", time=NOW, kind="timeout", reason="no answer")
    return {f"n{rank}": NodeObservation(began=NOW - 3, result=failure)}


def world(*answers: dict[str, NodeObservation], **changes: Any) -> ReconcileInput:
    fields: dict[str, Any] = {"dead": frozenset(), "busy": frozenset()}
    observations = {k: v for answer in answers for k, v in answer.items()}
    return ReconcileInput(now=NOW, settings=SETTINGS, observations=observations, **fields | changes)


def ending(step: ReconcileResult) -> Ending:
    assert step.job.ending is not None
    return step.job.ending


def verbs(step: ReconcileResult) -> list[tuple[str, int, str | None]]:
    return [(w.verb, w.rank.rank, w.signal) for w in step.operations]
