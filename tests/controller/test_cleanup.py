"""Leftovers of ended attempts and strays: fenced, brought home, removed, and never confused by old readings."""

from __future__ import annotations

from typing import Any

import pytest

from gpusched.cluster.base import NodeObservation, RankKey
from gpusched.controller.cleanup import Cleanup, clean_up_leftovers, forget_jobs, remove_strays
from gpusched.controller.escalating import is_due, is_exhausted, stuck_event, stuck_message, with_try
from gpusched.model.jobs import container_name
from gpusched.model.readings import ContainerReading, NodeReading, ProbeFailure
from gpusched.queue.store import RankRecord
from tests.controller.imagined import inventory

NOW, ID = 1_800_000_000.0, "0123456789a"
NODES = inventory().nodes


def rank(**changes: Any) -> RankRecord:
    fields: dict[str, Any] = {"attempt": 1, "rank": 0, "node": "n0", "runtime": "podman", "launched_at": NOW - 100}
    return RankRecord(job_id=ID, **fields | changes)


def says(phase: str | None, *, began: float = NOW - 1, name: str = "", cluster: str | None = "c") -> NodeObservation:
    name = name or container_name(ID, 1, 0)
    box = ContainerReading(name=name, phase=phase, cluster_id=cluster) if phase else None  # type: ignore[arg-type]
    return NodeObservation(began=began, result=NodeReading(node="n0", time=NOW, containers=(box,) if box else ()))


def leftovers(record: RankRecord, answer: NodeObservation | None, busy: bool = False, now: float = NOW) -> Cleanup:
    observations = {"n0": answer} if answer else {}
    key = frozenset({(ID, 1, 0)}) if busy else frozenset[tuple[str, int, int]]()
    return clean_up_leftovers([record], observations, (), key, now)


def verbs(tidy: Cleanup) -> list[tuple[str, str | None]]:
    return [(w.verb, w.signal) for w in tidy.operations]


@pytest.mark.parametrize("phase", ["running", "preparing", "ready"])
def test_a_rank_that_still_lives_is_fenced_and_reported_once(phase: str) -> None:
    end = [("signal", "KILL")] if phase == "running" else [("remove", None)]  # a kill does not end what has not begun
    first = leftovers(rank(gone=True), says(phase))
    assert verbs(first) == end
    assert [e.kind for e in first.events] == ["fenced"]
    (changed,) = first.changed
    assert (changed.signalled, changed.gone) == ("FENCE", False), "its GPUs are not free"
    second = leftovers(changed, says(phase))
    assert (verbs(second), second.events) == (end, [])


def test_a_rank_that_resists_is_killed_then_removed_at_growing_pauses_then_reported_once() -> None:
    record, story, at = rank(gone=True), [], NOW
    while at < NOW + 600:
        tidy = leftovers(record, says("running"), now=at)
        for changed in tidy.changed:
            record = changed
        story += [e.kind for e in tidy.events]
        for operation in tidy.operations:
            story.append(operation.verb)
            record = with_try(record, at)
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
    assert tidy.operations == []
    assert [r.gone for r in tidy.changed] == [False]


@pytest.mark.parametrize("phase", ["running", "preparing"])
def test_an_ended_rank_holds_no_gpus_during_its_removal(phase: str) -> None:
    ended = rank(gone=True, finished_at=NOW - 5)
    assert leftovers(ended, says(phase), busy=True) == Cleanup()
    assert [r.gone for r in leftovers(ended, says(phase)).changed] == [False], "alive though nobody is at it"


@pytest.mark.parametrize("phase", ["exited", "lost"])
def test_the_output_first_then_away_with_it(phase: str) -> None:
    assert verbs(leftovers(rank(), says(phase))) == [("collect", None)]
    assert verbs(leftovers(rank(collected=True), says(phase))) == [("remove", None)]
    assert leftovers(rank(), says(phase), busy=True).operations == []


def test_a_rank_that_never_started_has_no_output_to_wait_for() -> None:
    assert verbs(leftovers(rank(), says("failed"))) == [("remove", None)]


def test_a_rank_that_is_gone_is_settled() -> None:
    assert leftovers(rank(), says(None)).settled == [rank()]
    assert leftovers(rank(collected=True), says(None)).settled != []
    assert leftovers(rank(launched_at=None), says(None)).settled != []
    too_old = leftovers(rank(), says(None, began=NOW - 200))
    assert (too_old.settled, too_old.operations) == ([], [])


def test_a_silent_node_settles_nothing_and_one_that_is_forgotten_everything() -> None:
    failure = NodeObservation(began=NOW, result=ProbeFailure(node="n0", time=NOW, kind="timeout", reason="x"))
    hung = NodeObservation(began=NOW, result=NodeReading(node="n0", time=NOW, containers=None, runtime_error="x"))
    for answer in (failure, hung, None):
        tidy = leftovers(rank(), answer)
        assert (tidy.operations, tidy.settled, tidy.changed) == ([], [], [])
    assert clean_up_leftovers([rank(node="left")], {}, (), frozenset(), NOW).settled == []
    assert clean_up_leftovers([rank(node="left")], {}, ("left",), frozenset(), NOW).settled == [rank(node="left")]


def strays(
    answer: NodeObservation, known: bool = False, busy: bool = False, removed: float | None = None,
    seen: set[RankKey] | None = None,
) -> Cleanup:  # fmt: skip
    key = (ID, 1, 0)
    one, none = frozenset({key}), frozenset[tuple[str, int, int]]()
    memory = {} if removed is None else {key: removed}
    seen = set() if seen is None else seen
    return remove_strays(NODES, one if known else none, memory, {"n0": answer}, "c", one if busy else none, NOW, seen)


def test_an_unknown_container_of_ours_is_reaped() -> None:
    tidy = strays(says("running"))
    assert verbs(tidy) == [("remove", None)]
    assert [(e.kind, e.node, e.job_id) for e in tidy.events] == [("reaped", "n0", ID)]
    reported: set[RankKey] = set()
    assert [len(strays(says("running"), seen=reported).events) for _ in range(3)] == [1, 0, 0]


@pytest.mark.parametrize("name", ["theirs", "gpusched-x", "gpusched-a-b-c", "gpusched-a-1-0-x", "xgpusched-a-1-0"])
def test_other_names_are_not_ours(name: str) -> None:
    assert strays(says("running", name=name)).operations == []


def test_known_foreign_or_busy_containers_are_left_alone() -> None:
    assert strays(says("running"), known=True).operations == []
    assert strays(says("running"), busy=True).operations == []
    assert strays(says("running", cluster="d")).operations == []


def test_a_reading_older_than_the_removal_is_not_believed_a_newer_one_is() -> None:
    assert strays(says("exited", began=NOW - 5), removed=NOW - 3).operations == []
    assert verbs(strays(says("running", began=NOW - 1), removed=NOW - 3)) == [("remove", None)]


def test_tries_are_due_at_once_then_after_pauses_that_double_up_to_a_minute() -> None:
    assert is_due(rank(), NOW)
    assert is_due(rank(tried_at=NOW), NOW), "counted anew"
    for tries, pause in ((1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (8, 60), (500, 60)):
        one = rank(tries=tries, tried_at=NOW)
        assert (is_due(one, NOW), is_due(one, NOW + pause - 0.01), is_due(one, NOW + pause)) == (False, False, True)
        assert is_due(one, NOW - 0.01), "a clock that was set back"
    again = with_try(rank(tries=2), NOW)
    assert (again.tries, again.tried_at) == (3, NOW)


def test_after_five_tries_a_rank_is_stuck_and_reported_once() -> None:
    for tries, more, gives in ((4, {}, False), (5, {}, True), (6, {}, True), (5, {"stuck": True}, False)):
        assert is_exhausted(rank(tries=tries, tried_at=NOW, **more), NOW + 60) is gives
    assert not is_exhausted(rank(tries=5, tried_at=NOW), NOW + 15.9)
    assert is_exhausted(rank(tries=5, tried_at=NOW), NOW + 16)
    event = stuck_event(rank(gpus=(2, 3), trouble="no"), NOW)
    assert (event.kind, event.job_id, event.node, event.time) == ("stuck", ID, "n0", NOW)
    assert event.data == {"attempt": 1, "rank": 0, "gpus": [2, 3], "error": "no"}


def test_the_message_about_stuck_ranks_of_a_node() -> None:
    one = rank(stuck=True, gpus=(3, 1), trouble="busy")
    assert stuck_message("n0", [one]) == f"GPU 1, 3 not allocated: attempt 1 of job {ID} cannot be killed (busy)"
    plain = rank(stuck=True, attempt=2)
    assert stuck_message("n0", [plain]) == f"attempt 2 of job {ID} cannot be killed"
    assert stuck_message("n0", [one, plain, rank(stuck=True, gpus=(1, 2))]).startswith("GPU 1, 2, 3 not allocated: ")
    assert stuck_message("n0", [plain, one]).endswith("cannot be killed, and 1 more")
    assert stuck_message("n0", [rank(stuck=True, gpus=(2004,))]).startswith("GPU 1:slice@4 not allocated: ")
    assert stuck_message("n0", [plain, one, plain]).endswith(", and 2 more")
    others = [rank(), rank(stuck=True, gone=True), rank(stuck=True, node="n1")]
    assert stuck_message("n0", others) == ""
    assert stuck_message("n0", [*others, plain]) == stuck_message("n0", [plain])


def test_a_stuck_rank_stays_stuck_and_an_ended_one_is_tried_afresh() -> None:
    stuck = rank(signalled="FENCE", stuck=True, gone=True, tries=9, tried_at=NOW - 1)
    (changed,) = leftovers(stuck, says("running")).changed
    assert (changed.stuck, changed.gone, changed.tries) == (True, False, 9)
    (over,) = leftovers(rank(tries=9, tried_at=NOW - 1, collected=True), says("exited")).changed
    assert (over.gone, over.stuck, over.tries, over.tried_at) == (True, False, 0, None)
    held = rank(gone=True, tries=9, tried_at=NOW - 1, collected=True)
    assert leftovers(held, says("exited")) == Cleanup(), "not due yet"
    assert leftovers(rank(gone=True, tries=9, tried_at=NOW - 1), says("exited")).operations, (
        "output is asked for at once"
    )


def test_one_forgotten_or_silent_rank_does_not_hide_those_after_it() -> None:
    ranks = [rank(node="left"), rank(node="silent"), rank()]
    tidy = clean_up_leftovers(ranks, {"n0": says("exited")}, ("left",), frozenset(), NOW)
    assert (tidy.settled, verbs(tidy)) == ([ranks[0]], [("collect", None)])


def test_a_stray_is_found_after_others_that_are_none_and_settled_leftovers_need_a_newer_answer() -> None:
    boxes = [
        ContainerReading(name=name, phase="running", cluster_id=cluster)
        for name, cluster in (("theirs", "c"), (container_name("a0", 1, 0), "d"), (container_name(ID, 1, 0), "c"),
                              (container_name("b0", 2, 1), None))
    ]  # fmt: skip
    answer = NodeObservation(began=NOW - 1, result=NodeReading(node="n1", time=NOW, containers=tuple(boxes)))
    silent = NodeObservation(began=NOW, result=ProbeFailure(node="n0", time=NOW, kind="timeout", reason="x"))
    removed = {(ID, 1, 0): NOW - 1}  # as old as the question
    news = {"n0": silent, "n1": answer}
    tidy = remove_strays(NODES, frozenset(), removed, news, "c", frozenset(), NOW, set())
    assert [(w.node, w.rank.job_id, w.rank.attempt, w.rank.rank, w.rank.collected) for w in tidy.operations] == [
        ("n1", "b0", 2, 1, True)
    ]
    assert leftovers(rank(), says(None, began=NOW - 100)).settled == [], "as old as the launch"


def test_the_folder_of_a_job_is_removed_once_it_has_ended_and_nothing_is_being_done_to_it() -> None:
    folders = ("runs", "busy", "no-id", "ended", "twice")
    read = NodeReading(node="n1", time=NOW, containers=(), job_folders=folders)
    hung = NodeReading(node="n2", time=NOW, containers=None, job_folders=("ended",))
    news = {name: NodeObservation(began=NOW, result=reading) for name, reading in (("n1", read), ("n2", hung))}
    busy = frozenset({("busy", 0, 0), ("twice", 1, 0)})  # the latter with an attempt
    found = forget_jobs(NODES, news, lambda job_id: job_id != "runs", busy)
    assert [(w.verb, w.node, w.key, w.rank.node, w.rank.runtime, w.rank.collected) for w in found] == [
        ("forget", "n1", (job_id, 0, 0), "n1", NODES[1].runtime, True) for job_id in ("ended", "twice")
    ]
