"""The transition table: what is not in it raises, with the job's events."""

from __future__ import annotations

from itertools import product

import pytest

from gpusched.model.jobs import ACTIVE, ENDED, JobRecord, JobState
from gpusched.queue.lifecycle import TRANSITIONS, IllegalTransition, transition_to
from tests import builders
from tests.controller.applying import NOW

_S = JobState


def job(state: JobState) -> JobRecord:
    return builders.job(state=state, submit_time=NOW, attempt=3, reason="Why")


@pytest.mark.parametrize(("before", "after"), sorted(TRANSITIONS))
def test_legal_ones_move_and_say_so(before: JobState, after: JobState) -> None:
    moved, event = transition_to(job(before), after, NOW + 1, event="x", data={"more": 1}, reason="New")
    assert (moved.state, moved.reason, moved.attempt) == (after, "New", 3)
    assert event.data == {"from": before, "to": after, "reason": "New", "attempt": 3, "more": 1}
    assert (event.job_id, event.user, event.time, event.kind) == ("0123456789a", "alice", NOW + 1, "x")


@pytest.mark.parametrize(("before", "after"), sorted(set(product(_S, _S)) - TRANSITIONS))
def test_illegal_ones_raise_with_the_story(before: JobState, after: JobState) -> None:
    with pytest.raises(IllegalTransition) as caught:
        transition_to(job(before), after, NOW, event="x")
    said = str(caught.value)
    assert f"job 0123456789a: {before} -> {after} is not a transition" in said
    assert "attempt 3" in said
    assert "'Why'" in said


def test_the_tables_shape() -> None:
    """What runs ends through COMPLETING; nothing that ended moves but back to the queue; no state stays as it is."""
    assert {a for a, b in TRANSITIONS if b in ENDED - {_S.CANCELLED, _S.FAILED}} == {_S.COMPLETING}
    assert {b for a, b in TRANSITIONS if a in ENDED} == {_S.PENDING}
    assert not [a for a, b in TRANSITIONS if a is b]
    assert {a for a, b in TRANSITIONS if b is _S.STARTING} == {_S.PENDING}
    assert all(any(a is state for a, _ in TRANSITIONS) for state in _S)
    assert {b for a, b in TRANSITIONS if a is _S.RUNNING} == {_S.COMPLETING, _S.FAILED}
    assert ACTIVE.isdisjoint(ENDED)
