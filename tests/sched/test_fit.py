"""What is short of a request: the first figure of which too few nodes have enough, and the nearest node."""

from __future__ import annotations

import numpy as np
import pytest

from gpusched.sched.arrays import allowed_nodes
from gpusched.sched.fit import ALLOWED, CORES, GPUS, MEMORY, shortfall
from gpusched.sched.state import PlacementRequest, Resources

# the second is not there, the fourth has too few cores, the fifth too little memory
FREE = Resources(np.array([8, -1, 4, 4, 8, 0]), np.array([9, 9, 9, 1, 9, 9]), np.array([7, 9, 7, 7, 2, 7]))
MASKS = np.array([[1, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]], np.uint8)


@pytest.mark.parametrize(
    ("parts", "gpus", "cores", "memory", "mask", "found"),
    [
        (2, 4, 9, 7, -1, (-1, 2, -1)),
        (2, 4, 9, 7, 0, (-1, 2, -1)),
        (4, 4, 1, 2, -1, (-1, 4, -1)),
        (4, 4, 1, 2, 0, (GPUS, 3, 0)),
        (5, 0, 1, 2, -1, (-1, 5, -1)),
        (6, 0, 1, 2, -1, (ALLOWED, 5, -1)),
        (2, 1, 1, 1, 1, (ALLOWED, 1, -1)),
        (1, 9, 1, 1, -1, (GPUS, 0, 0)),
        (1, 5, 1, 1, 1, (GPUS, 0, 2)),
        (1, 4, 10, 1, -1, (CORES, 0, 0)),
        (4, 4, 2, 1, -1, (CORES, 3, 0)),
        (1, 4, 1, 8, -1, (MEMORY, 0, 0)),
        (3, 4, 2, 3, -1, (MEMORY, 2, 0)),
    ],
)
def test_the_first_figure_of_which_too_few_nodes_have_enough(
    parts: int, gpus: int, cores: int, memory: int, mask: int, found: tuple[int, int, int]
) -> None:
    request = PlacementRequest(0, 6, parts, gpus, cores, memory, mask)
    assert shortfall(FREE, MASKS, request) == found


def test_the_nearest_node_is_the_first_with_most_of_the_figure_among_those_with_enough_before_it() -> None:
    """Nodes of a partition: here the third to the sixth."""
    free = Resources(*(np.array([99, 99, *of, 99]) for of in ([2, 4, 4, 3], [9, 5, 6, 8], [1, 1, 2, 3])))
    for asked, found in (((5, 1, 1), (GPUS, 0, 3)), ((3, 9, 1), (CORES, 0, 5)), ((4, 5, 3), (MEMORY, 0, 4))):
        assert shortfall(free, MASKS, PlacementRequest(2, 6, 1, *asked, -1)) == found


def test_a_job_may_use_the_nodes_of_its_list_that_are_of_its_types_and_not_excluded() -> None:
    row, types = {"a": 0, "b": 1, "c": 2, "d": 3}, ["A100", "V100", "A100", "A100"]
    assert allowed_nodes(row, types, ["a", "b", "c"], ["c"], ["A100"]).tolist() == [1, 0, 0, 0]
    assert allowed_nodes(row, types, [], ["c"], ["A100"]).tolist() == [1, 0, 0, 1]
    assert allowed_nodes(row, types, ["b", "c"], [], []).tolist() == [0, 1, 1, 0]
