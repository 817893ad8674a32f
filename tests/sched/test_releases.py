"""The list of releases against a plain Python list; and the passes called from other compiled code."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.compiled import jit
from gpusched.sched.kernel.by_rule import PlacementRule, pass_by_rule
from gpusched.sched.releases import add, drop, settle
from gpusched.sched.state import (
    BEST_FIT,
    EASY,
    ClusterState,
    PlacementRequest,
    QueueJobs,
    Releases,
    Requests,
    Resources,
    new_outcome,
    new_releases,
    new_scratch,
    seed_words,
)

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.floats(0, 100)),
        st.tuples(st.just("drop"), st.integers(0, 9), st.just(0.0)),
        st.tuples(st.just("settle"), st.just(0), st.just(0.0)),
        st.tuples(st.just("many"), st.integers(0, 9), st.floats(0, 100)),
    ),
    max_size=40,
)


def ends(releases: Releases) -> list[tuple[float, int]]:
    slots = releases.order[: releases.used[0]]
    return [(float(releases.end[s]), int(releases.owner[s])) for s in slots]


@settings(max_examples=200, deadline=None)
@given(OPERATIONS)
def test_releases_behave_like_a_sorted_list(operations: list[tuple[str, int, float]]) -> None:
    releases, model = new_releases(2000), []
    request = PlacementRequest(0, 1, 1, 1, 1, 1, -1)
    for what, owner, end in operations:
        if what in ("add", "many"):
            for k in range(30 if what == "many" else 1):
                time = (end * (k + 1) * 7.3) % 100
                add(releases, time, 0, request, owner)
                model.append((time, owner))
        elif what == "drop":
            assert drop(releases, owner) == sum(1 for _, o in model if o == owner)
            model = [(e, o) for e, o in model if o != owner]
        else:
            settle(releases)
            assert [e for e, _ in ends(releases)] == sorted(e for e, _ in model)
        assert sorted(ends(releases)) == sorted(model)
        assert sorted(releases.order) == list(range(2000))


@jit
def _fill_and_empty(cluster, releases, requests, jobs, queue, scratch, outcome, rng):
    state = ClusterState(cluster, releases, requests, jobs, scratch, outcome, 0.0)
    pass_by_rule(state, queue, EASY, PlacementRule(BEST_FIT, rng))
    dropped = 0
    for i in range(outcome.total[0]):
        dropped += drop(releases, outcome.started[i])
    return dropped


def test_the_passes_can_be_called_from_compiled_code() -> None:
    def ints(*values: int) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    requests = Requests(ints(0), ints(3), ints(2), ints(4), ints(1), ints(1), ints(-1), None, None)
    jobs = QueueJobs(
        ints(0, 0, 0, 0), np.full(4, 60.0), np.full((4, 3), -1), ints(), ints(0), np.zeros((0, 3), np.uint8)
    )
    resources = Resources(ints(8, 8, -1), ints(9, 9, 9), ints(9, 9, 9))
    outcome, releases = new_outcome(4, 8), new_releases(8)
    dropped = _fill_and_empty(
        resources, releases, requests, jobs, np.arange(4), new_scratch(3, 1), outcome, seed_words(1)
    )
    assert dropped == 4
    assert outcome.total.tolist() == [2, 4]
    assert resources.gpus.tolist() == [0, 0, -1]
    assert releases.used.tolist()[0] == 0
