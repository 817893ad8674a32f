"""How outcomes of operations change rank records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.cluster.base import Operation, OperationOutcome, RankKey
from gpusched.controller.outcomes import OutcomeRecorder
from gpusched.controller.outputs import MAX_FAILURES, CollectionRetries
from gpusched.queue.store import RankRecord, Store
from tests.builders import job

RANK = RankRecord(job_id="j", attempt=1, rank=0, node="n0", runtime="podman")


class Ended:
    """A store with one rank, and the outcomes of operations on it."""

    def __init__(self, store: Store) -> None:
        self.store, self.launch_errors, self.at = store, dict[RankKey, str](), 100.0
        self.recorder = OutcomeRecorder(store, CollectionRetries(), self.launch_errors)
        store.put_ranks([RANK])

    def record(self, verb: Any, error: str = "", transient: bool = False, **of: Any) -> RankRecord:
        (rank,) = self.store.ranks()
        self.at += 1
        operation = Operation(verb=verb, node=rank.node, rank=rank, **of)
        self.recorder.record([OperationOutcome(operation=operation, time=self.at, error=error, transient=transient)])
        (rank,) = self.store.ranks()
        return rank

    def kinds(self) -> list[str]:
        return [event.kind for event in self.store.events()]


@pytest.fixture
def ended(tmp_path: Path) -> Iterator[Ended]:
    store = Store.create_or_open(tmp_path)
    yield Ended(store)
    store.close()


def test_an_output_that_the_node_refuses_is_given_up_after_a_few_tries(ended: Ended) -> None:
    ranks = [ended.record("collect", "no such log") for _ in range(MAX_FAILURES)]
    assert [rank.refusals for rank in ranks] == [1, 2, 3, 4, 5]
    assert [rank.collected for rank in ranks] == [False, False, False, False, True]
    assert ended.kinds() == ["work_failed"], "the same error is one event"


def test_an_output_behind_a_lost_connection_is_never_given_up_and_said_once(ended: Ended) -> None:
    ranks = [ended.record("collect", f"lost {n}", transient=True) for n in range(3 * MAX_FAILURES)]
    assert (ranks[-1].refusals, ranks[-1].collected, ended.kinds()) == (0, False, ["work_failed"])
    assert [rank.trouble for rank in ranks[MAX_FAILURES - 2 :][:2]] == ["", f"lost {MAX_FAILURES - 1}"]


def test_a_delivered_kill_is_a_try_and_a_leftover_stays_marked(ended: Ended) -> None:
    assert (ended.record("signal", signal="TERM").signalled, ended.record("signal", signal="KILL").tries) == ("TERM", 1)
    ended.store.put_ranks([msgspec.structs.replace(RANK, signalled="FENCE")])
    assert ended.record("signal", signal="KILL").signalled == "FENCE"


def test_a_removal_is_remembered_for_ten_minutes(ended: Ended) -> None:
    ended.store.put_jobs([job("j")])  # its rank's record stays until a probe finds nothing
    ended.record("remove")
    assert ended.recorder.removed_lately(700.9) == {("j", 1, 0): 101.0}
    assert ended.recorder.removed_lately(701.0) == {}


def test_a_warning_of_the_limit_does_not_count_as_asked_to_end(ended: Ended) -> None:
    rank = ended.record("signal", signal="TERM", for_warning=True)
    assert (rank.signalled, rank.warned_at, ended.kinds()) == (None, 101.0, ["signalled"])


def test_a_rejected_launch_is_reported_to_the_launcher_but_not_a_lost_one(ended: Ended) -> None:
    ended.record("launch", "lost", transient=True)
    assert ended.launch_errors == {}
    ended.record("launch", "no such image")
    assert ended.launch_errors == {("j", 1, 0): "no such image"}
    assert ended.record("launch").launched_at == ended.at


def test_output_that_could_not_be_collected_is_tried_again_after_a_pause_that_doubles() -> None:
    retries, key = CollectionRetries(), ("j", 1, 0)
    assert retries.is_due(key, 0.0)
    for failures, pause in enumerate((2.0, 4.0, 8.0), 1):
        assert retries.failed(key, 1000.0) == failures
        assert [retries.is_due(key, 1000.0 + s) for s in (0.0, pause - 0.1, pause)] == [False, False, True]
        assert retries.is_due(key, 999.9), "a clock that was set back delays nothing"
    for _ in range(20):
        retries.failed(key, 1000.0)
    assert [retries.is_due(key, 1000.0 + s) for s in (599.9, 600.0)] == [False, True]
    retries.forget(key)
    assert retries.is_due(key, 1000.0)
