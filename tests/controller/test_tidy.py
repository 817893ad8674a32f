"""Leftovers of ended attempts and strays: fenced, brought home, removed, and never confused by old readings."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.cluster.base import Observation, RankKey
from gpusched.controller.pressing import tried
from gpusched.controller.tidy import Tidy, reap_strays, tidy_leftovers
from gpusched.model.jobs import container_name
from gpusched.model.readings import ContainerReading, NodeReading, ProbeFailure
from gpusched.queue.store import RankRecord
from tests.controller.imagined import inventory

NOW, ID = 1_800_000_000.0, "0123456789a"
NODES = inventory().nodes


def rank(**changes: Any) -> RankRecord:
    fields: dict[str, Any] = {"attempt": 1, "rank": 0, "node": "n0", "runtime": "podman", "launched_at": NOW - 100}
    return RankRecord(job_id=ID, **fields | changes)


def says(phase: str | None, *, began: float = NOW - 1, name: str = "", cluster: str | None = "c") -> Observation:
    name = name or container_name(ID, 1, 0)
    box = ContainerReading(name=name, phase=phase, cluster_id=cluster) if phase else None  # type: ignore[arg-type]
    return Observation(began=began, result=NodeReading(node="n0", time=NOW, containers=(box,) if box else ()))


def leftovers(record: RankRecord, answer: Observation | None, busy: bool = False, now: float = NOW) -> Tidy:
    observations = {"n0": answer} if answer else {}
    key = frozenset({(ID, 1, 0)}) if busy else frozenset[tuple[str, int, int]]()
    return tidy_leftovers([record], observations, (), key, now)


def verbs(tidy: Tidy) -> list[tuple[str, str | None]]:
    return [(w.verb, w.signal) for w in tidy.works]


@pytest.mark.parametrize("phase", ["running", "preparing", "ready"])
def test_what_still_lives_is_fenced_and_told_of_once(phase: str) -> None:
    end = [("signal", "KILL")] if phase == "running" else [("remove", None)]  # a kill does not end what has not begun
    first = leftovers(rank(gone=True), says(phase))
    assert verbs(first) == end
    assert [e.kind for e in first.events] == ["fenced"]
    (changed,) = first.changed
    assert (changed.signalled, changed.gone) == ("FENCE", False), "its GPUs are not free"
    second = leftovers(changed, says(phase))
    assert (verbs(second), second.events) == (end, [])


def test_one_that_resists_is_killed_then_removed_at_growing_pauses_then_told_of_once() -> None:
    record, story, at = rank(gone=True), [], NOW
    while at < NOW + 600:
        tidy = leftovers(record, says("running"), now=at)
        for changed in tidy.changed:
            record = changed
        story += [e.kind for e in tidy.events]
        for work in tidy.works:
            story.append(work.verb)
            record = tried(record, at)
        at += 0.5
    assert story[:7] == ["fenced", "signal", "signal", "signal", "remove", "remove", "stuck"]
    assert set(story[7:]) == {"remove"}
    assert len(story) < 20
    assert (record.stuck, record.gone) == (True, False)
    over = leftovers(record, says("exited"), now=at)
    assert [(r.stuck, r.gone) for r in over.changed] == [(False, True)]
    assert verbs(over) == [("collect", None)]


def test_its_gpus_are_not_free_even_while_another_work_is_under_way() -> None:
    tidy = leftovers(rank(gone=True), says("running"), busy=True)
    assert tidy.works == []
    assert [r.gone for r in tidy.changed] == [False]


@pytest.mark.parametrize("phase", ["running", "preparing"])
def test_what_ended_holds_no_gpus_while_it_is_being_removed(phase: str) -> None:
    ended = rank(gone=True, finished_at=NOW - 5)
    assert leftovers(ended, says(phase), busy=True) == Tidy()
    assert [r.gone for r in leftovers(ended, says(phase)).changed] == [False], "alive though nobody is at it"


@pytest.mark.parametrize("phase", ["exited", "lost"])
def test_the_output_first_then_away_with_it(phase: str) -> None:
    assert verbs(leftovers(rank(), says(phase))) == [("collect", None)]
    assert verbs(leftovers(rank(collected=True), says(phase))) == [("remove", None)]
    assert leftovers(rank(), says(phase), busy=True).works == []


def test_what_was_never_started_has_no_output_to_wait_for() -> None:
    assert verbs(leftovers(rank(), says("failed"))) == [("remove", None)]


def test_what_is_not_there_any_more_is_settled() -> None:
    assert leftovers(rank(), says(None)).settled == [rank()]
    assert leftovers(rank(collected=True), says(None)).settled != []
    assert leftovers(rank(launched_at=None), says(None)).settled != []
    too_old = leftovers(rank(), says(None, began=NOW - 200))
    assert (too_old.settled, too_old.works) == ([], [])


def test_a_silent_node_settles_nothing_and_one_that_is_forgotten_everything() -> None:
    failure = Observation(began=NOW, result=ProbeFailure(node="n0", time=NOW, kind="timeout", reason="x"))
    hung = Observation(began=NOW, result=NodeReading(node="n0", time=NOW, containers=None, runtime_error="x"))
    for answer in (failure, hung, None):
        tidy = leftovers(rank(), answer)
        assert (tidy.works, tidy.settled, tidy.changed) == ([], [], [])
    assert tidy_leftovers([rank(node="left")], {}, (), frozenset(), NOW).settled == []
    assert tidy_leftovers([rank(node="left")], {}, ("left",), frozenset(), NOW).settled == [rank(node="left")]


def strays(
    answer: Observation, known: bool = False, busy: bool = False, removed: float | None = None,
    told: set[RankKey] | None = None,
) -> Tidy:  # fmt: skip
    key = (ID, 1, 0)
    one, none = frozenset({key}), frozenset[tuple[str, int, int]]()
    memory = {} if removed is None else {key: removed}
    told = set() if told is None else told
    return reap_strays(NODES, one if known else none, memory, {"n0": answer}, "c", one if busy else none, NOW, told)


def test_an_unknown_container_of_ours_is_reaped() -> None:
    tidy = strays(says("running"))
    assert verbs(tidy) == [("remove", None)]
    assert [(e.kind, e.node, e.job_id) for e in tidy.events] == [("reaped", "n0", ID)]
    told: set[RankKey] = set()
    assert [len(strays(says("running"), told=told).events) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("name", ["theirs", "gpusched-x", "gpusched-a-b-c", "gpusched-a-1-0-x", "xgpusched-a-1-0"])
def test_other_names_are_not_ours(name: str) -> None:
    assert strays(says("running", name=name)).works == []


def test_what_is_known_or_anothers_or_under_way_is_left_alone() -> None:
    assert strays(says("running"), known=True).works == []
    assert strays(says("running"), busy=True).works == []
    assert strays(says("running", cluster="d")).works == []


def test_a_reading_older_than_the_removal_is_not_believed_a_newer_one_is() -> None:
    assert strays(says("exited", began=NOW - 5), removed=NOW - 3).works == []
    assert verbs(strays(says("running", began=NOW - 1), removed=NOW - 3)) == [("remove", None)]
