"""The waiting jobs as arrays."""

from __future__ import annotations

from gpusched.model.jobs import Resizes
from gpusched.model.snapshot import PendingView
from gpusched.sched.arrays import PendingArrays, node_arrays_of, waiting_of
from tests.sched.worlds import node, pending, snapshot


def arrays(*jobs: PendingView) -> PendingArrays:
    """Of these jobs, on two nodes of partition ``p``."""
    snap = snapshot([node("n1"), node("n2")], list(jobs))
    return waiting_of(list(snap.pending), node_arrays_of(snap), {}, snap)


def test_a_resized_job_that_had_more_than_its_limit_has_none_left() -> None:
    """It had slightly more, as it was stopped late."""
    waiting = arrays(pending("j", 1, limit=600, resizes=Resizes(had_s=700.0)), pending("k", 1, limit=600))
    assert waiting.jobs.limit.tolist() == [0.0, 600.0]


def test_a_job_that_asks_for_millions_of_nodes_takes_no_room_for_them() -> None:
    """Slurm lets such jobs wait; of nodes there are two, in a partition without nodes none."""
    waiting = arrays(pending("many", 1, nodes=50_000_000), pending("one", 1), pending("none", 1, partition="q"))
    assert waiting.parts == 2 + 1
