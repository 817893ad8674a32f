"""Requests by task: nobody gets less than was asked for, in equal parts, on the fewest nodes that can give it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.client.request import SubmitRequest
from gpusched.client.sizing import ResourceRequest
from gpusched.client.tasks import size_by_tasks
from gpusched.errors import UsageError
from gpusched.model.resources import Flavor, Inventory, Node, Partition, RuntimeName

HOUR_S = 3600


def inventory(*shapes: tuple[int, int, int]) -> Inventory:
    nodes = tuple(
        Node(
            name=f"n{i}", partition="p", address=f"n{i}", gpus=gpus, cores=cores, memory_mib=mib,
            runtime=RuntimeName.PODMAN,
        )
        for i, (gpus, cores, mib) in enumerate(shapes)
    )  # fmt: skip
    total = (sum(shape[i] for shape in shapes) for i in range(3))
    gpus, cores, mib = total
    whole = Flavor(name="whole", gpus=gpus, cores=cores, memory_mib=mib, time_limit_s=HOUR_S)
    return Inventory(path="", partitions=(Partition(name="p", nodes=nodes, flavors=(whole,)),))


SHAPES = st.lists(
    st.tuples(st.sampled_from([0, 2, 4, 8]), st.sampled_from([8, 16, 64]), st.sampled_from([1000, 64_000])),
    min_size=1, max_size=5,
)  # fmt: skip
FEW = st.none() | st.integers(1, 6)
TASKS = st.builds(
    SubmitRequest, ntasks=st.none() | st.integers(1, 24), ntasks_per_node=FEW, cpus_per_task=FEW, gpus_per_task=FEW,
    mem_per_cpu=st.none() | st.integers(1, 500),
)  # fmt: skip
ASKED = st.builds(ResourceRequest, nodes=FEW, gpus=st.none() | st.integers(0, 16), gpus_per_node=FEW)


def enough_on(count: int, asked: ResourceRequest, tasks: SubmitRequest, shapes: list[tuple[int, int, int]]) -> bool:
    """Whether so many nodes can give it, counted task by task."""
    gpus = (
        asked.gpus if asked.gpus is not None else None if asked.gpus_per_node is None else asked.gpus_per_node * count
    )
    ntasks = tasks.ntasks or (tasks.ntasks_per_node or 0) * count
    if not ntasks:
        ntasks = max(1, gpus // tasks.gpus_per_task) if tasks.gpus_per_task and gpus else count
    by_task = None if tasks.gpus_per_task is None else ntasks * tasks.gpus_per_task
    if ntasks % count or (tasks.ntasks_per_node or ntasks) < ntasks // count:
        return False
    if gpus is not None and by_task is not None and by_task > gpus:
        return False
    gpus = by_task or 0 if gpus is None else gpus
    if gpus % count or (asked.gpus_per_node is not None and gpus != asked.gpus_per_node * count):
        return False
    if tasks.cpus_per_task is not None:
        cores = tasks.cpus_per_task * ntasks // count
    else:
        cores = ntasks // count
    if tasks.mem_per_cpu is None:
        return None  # type: ignore[return-value]  # in proportion: what `size` does, and tests of it
    mib = tasks.mem_per_cpu * cores
    return sum(s[0] >= gpus // count and s[1] >= cores and s[2] >= mib for s in shapes) >= count


@settings(max_examples=400, deadline=None)
@given(SHAPES, ASKED, TASKS)
def test_all_that_was_asked_for_on_the_fewest_nodes(
    shapes: list[tuple[int, int, int]], asked: ResourceRequest, tasks: SubmitRequest
) -> None:
    if tasks == SubmitRequest():
        return
    free = asked.nodes is None and not (tasks.ntasks and tasks.ntasks_per_node)
    free = free and (asked.gpus is None or asked.gpus_per_node is None)
    possible = [count for count in range(1, len(shapes) + 1) if enough_on(count, asked, tasks, shapes)]
    known = tasks.mem_per_cpu is not None
    try:
        found, on_each = size_by_tasks(asked, tasks, inventory(*shapes))
    except UsageError:
        assert not (free and known and possible)
        return
    ntasks = on_each * found.nodes
    assert asked.nodes in (None, found.nodes)
    assert tasks.ntasks in (None, ntasks)
    assert tasks.ntasks_per_node is None or on_each <= tasks.ntasks_per_node
    assert tasks.cpus_per_task is None or found.cores_per_node == tasks.cpus_per_task * on_each
    assert found.cores_per_node >= on_each
    assert asked.gpus in (None, found.gpus_per_node * found.nodes)
    assert asked.gpus_per_node in (None, found.gpus_per_node)
    assert tasks.gpus_per_task is None or found.gpus_per_node >= on_each * tasks.gpus_per_task
    assert tasks.mem_per_cpu is None or found.memory_mib_per_node == tasks.mem_per_cpu * found.cores_per_node
    if free and known:
        assert found.nodes == possible[0]


@pytest.mark.parametrize(
    ("asked", "tasks", "says"),
    [
        (
            ResourceRequest(gpus=1, cores=2),
            SubmitRequest(cpus_per_task=1),
            "--cpus-per-task and --cpus cannot be combined",
        ),
        (
            ResourceRequest(gpus=1),
            SubmitRequest(cpus_per_task=1, cpus_per_gpu=1),
            "--cpus-per-task and --cpus-per-gpu cannot",
        ),
        (ResourceRequest(gpus=1, memory_mib=9), SubmitRequest(mem_per_gpu=9), "--mem-per-gpu and --mem cannot"),
        (
            ResourceRequest(flavor="whole"),
            SubmitRequest(gpus_per_task=1),
            "--flavor whole and --gpus-per-task cannot be combined",
        ),
        (ResourceRequest(cores=1), SubmitRequest(cpus_per_gpu=1), "--cpus-per-gpu and --cpus cannot"),
        (ResourceRequest(), SubmitRequest(ntasks=2, cpus_per_gpu=1), "--cpus-per-gpu: the job requests no GPU"),
        (ResourceRequest(), SubmitRequest(ntasks=2, mem_per_gpu=1), "--mem-per-gpu: the job requests no GPU"),
        (ResourceRequest(gpus=2), SubmitRequest(ntasks=3, gpus_per_task=1), "--gpus-per-task 1 need 3 GPUs"),
        (ResourceRequest(nodes=2), SubmitRequest(ntasks=3), "--ntasks 3 cannot be split evenly across 2 nodes"),
        (ResourceRequest(nodes=1), SubmitRequest(ntasks=4, ntasks_per_node=2), "exceeds --ntasks-per-node 2"),
        (ResourceRequest(), SubmitRequest(ntasks=0), "--ntasks must be 1 to"),
        (ResourceRequest(), SubmitRequest(ntasks=10**12), "--ntasks must be 1 to"),
        (
            ResourceRequest(),
            SubmitRequest(ntasks=1000),
            "--ntasks 1000 cannot be split evenly across any number of nodes of partition p",
        ),
        (ResourceRequest(nodes=2, gpus=4, gpus_per_node=1), SubmitRequest(ntasks_per_node=1), "need -N 4, not -N 2"),
    ],
)
def test_contradictory_options_are_refused(asked: ResourceRequest, tasks: SubmitRequest, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        size_by_tasks(asked, tasks, inventory((4, 16, 64_000), (4, 16, 64_000)))
    assert says in caught.value.line()


def test_all_memory_is_that_of_the_smallest_of_the_largest_nodes() -> None:
    found, _ = size_by_tasks(
        ResourceRequest(gpus_per_node=4, nodes=2), SubmitRequest(mem_per_node=0),
        inventory((4, 16, 1000), (8, 16, 3000), (4, 16, 2000), (0, 16, 9000)),
    )  # fmt: skip
    assert found.memory_mib_per_node == 2000


def test_tasks_that_need_more_gpus_than_one_node_gives_are_put_on_several() -> None:
    found, on_each = size_by_tasks(
        ResourceRequest(gpus_per_node=2), SubmitRequest(ntasks=4, gpus_per_task=1), inventory(*[(4, 16, 64_000)] * 3)
    )
    assert (found.nodes, found.gpus_per_node, on_each) == (2, 2, 2)
