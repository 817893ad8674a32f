"""Turn requests by task, as in Slurm (tasks, and resources per task, GPU, core or node), into equal parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpusched.client.request import SubmitRequest
from gpusched.client.sizing import ResourceRequest, SizedRequest, partition_of, size
from gpusched.config.validate import MAX_COUNT, nodes_that_hold, usable_nodes
from gpusched.errors import UsageError
from gpusched.model.resources import Inventory, Node
from gpusched.model.slicetables import whole_gpus
from gpusched.model.units import count_of

_CORES = ("cpus_per_task", "cpus_per_gpu")
_MEMORY = ("mem_per_node", "mem_per_gpu", "mem_per_cpu")  # of mem_per_node 0 is all memory of a node
_OPTIONS = ("ntasks", "ntasks_per_node", *_CORES, "gpus_per_task", *_MEMORY)


def task_options(request: SubmitRequest) -> dict[str, int]:
    """Return the options of a request that are by task, core or GPU."""
    return {name: value for name in _OPTIONS if (value := getattr(request, name)) is not None}


def size_by_tasks(request: ResourceRequest, tasks: SubmitRequest, inventory: Inventory) -> tuple[SizedRequest, int]:
    """Return equal parts on the fewest nodes, and the number of tasks per node.

    The default is one task per node; with only GPUs per task, as many tasks as the GPUs allow. Cores are as requested,
    else in proportion to the GPUs, at least one per task (exactly one if memory is requested by core). Tasks are split
    equally over the nodes.

    Raises:
        UsageError: As `gpusched.client.sizing.size`, or the options contradict each other.
    """
    _check(request, tasks)
    if request.flavor is not None:
        found = size(request, inventory)
        ntasks = _task_count(request, tasks, found.nodes, found.nodes * found.gpus_per_node)
        return found, _tasks_per_node(ntasks, found.nodes)
    partition = partition_of(request, inventory)
    nodes = usable_nodes(partition, request)
    fixed = _node_count(request, tasks)
    if fixed is not None:
        return _size_on(request, tasks, fixed, nodes, inventory)
    errors: list[UsageError] = []  # of node counts that the request cannot be split over
    for count in range(1, max(1, len(nodes)) + 1):
        try:
            found, tasks_per_node = _size_on(request, tasks, count, nodes, inventory)
        except UsageError as error:
            errors.append(error)
            continue
        gpus = whole_gpus(found.gpus_per_node, found.profile)
        if nodes_that_hold(nodes, gpus, found.cores_per_node, found.memory_mib_per_node) >= count:
            return found, tasks_per_node
    if len(errors) == max(1, len(nodes)):  # no number of nodes works: show the basic error
        raise errors[0]
    text = _request_text(request, tasks)
    raise UsageError(
        f"{text} cannot be split evenly across any number of nodes of partition {partition.name}",
        f"its {count_of(len(nodes), 'usable node')} {'has' if len(nodes) == 1 else 'have'} at most "
        f"{count_of(max((n.gpus for n in nodes), default=0), 'GPU')} and "
        f"{count_of(max((n.cores for n in nodes), default=0), 'core')}",
    )


def _check(request: ResourceRequest, tasks: SubmitRequest) -> None:
    given = task_options(tasks)
    for name, value in given.items():
        if name not in _MEMORY and not (0 if name == "gpus_per_task" else 1) <= value <= MAX_COUNT:
            raise UsageError(f"{_option(name)} must be 1 to {MAX_COUNT}, found {value}")
    if request.nodes is not None and request.nodes < 1:
        raise UsageError(f"-N must be at least 1, found {request.nodes}")
    memory, cores = [n for n in _MEMORY if n in given], [n for n in _CORES if n in given]
    for names, total, option in ((cores, request.cores, "--cpus"), (memory, request.memory_mib, "--mem")):
        both = [*map(_option, names), *([option] if total is not None else [])]
        if len(both) > 1:
            raise UsageError(f"{both[0]} and {both[1]} cannot be combined", "use one of the two")
    sized = [n for n in (*_CORES, "gpus_per_task", *_MEMORY) if n in given]
    if request.flavor is not None and sized:
        raise UsageError(f"--flavor {request.flavor} and {_option(sized[0])} cannot be combined", "use one of the two")


def _node_count(request: ResourceRequest, tasks: SubmitRequest) -> int | None:
    """Return the requested number of nodes; None for the fewest."""
    if request.nodes is not None:
        return request.nodes
    if tasks.ntasks and tasks.ntasks_per_node:
        return -(-tasks.ntasks // tasks.ntasks_per_node)
    if request.gpus is not None and request.gpus_per_node:
        return max(1, request.gpus // request.gpus_per_node)
    return None


def _size_on(
    request: ResourceRequest, tasks: SubmitRequest, count: int, nodes: list[Node], inventory: Inventory
) -> tuple[SizedRequest, int]:
    gpus = request.gpus if request.gpus is not None or request.gpus_per_node is None else request.gpus_per_node * count
    ntasks = _task_count(request, tasks, count, gpus)
    tasks_per_node = _tasks_per_node(ntasks, count)
    if tasks.ntasks_per_node is not None and tasks_per_node > tasks.ntasks_per_node:
        raise UsageError(
            f"--ntasks {ntasks} on {count_of(count, 'node')} exceeds --ntasks-per-node {tasks.ntasks_per_node}"
        )
    task_gpus = None if tasks.gpus_per_task is None else tasks.gpus_per_task * ntasks
    if task_gpus is not None and (gpus is not None and task_gpus > gpus):
        raise UsageError(
            f"{count_of(ntasks, 'task')} with --gpus-per-task {tasks.gpus_per_task} need "
            f"{count_of(task_gpus, 'GPU')}, not {gpus}"
        )
    gpus = task_gpus if gpus is None else gpus
    cores = request.cores
    if tasks.cpus_per_task is not None:
        cores = tasks.cpus_per_task * ntasks
    elif tasks.cpus_per_gpu is not None:
        if not gpus:
            raise UsageError("--cpus-per-gpu: the job requests no GPU", "use --gpus, or --cpus-per-task")
        cores = max(ntasks, tasks.cpus_per_gpu * gpus)
    elif cores is None and (not gpus or tasks.mem_per_cpu is not None):
        cores = ntasks  # else `size` derives the cores from the GPUs
    memory = request.memory_mib
    if tasks.mem_per_gpu is not None:
        if not gpus:
            raise UsageError("--mem-per-gpu: the job requests no GPU", "use --gpus, or --mem-per-node")
        memory = tasks.mem_per_gpu * gpus
    elif tasks.mem_per_node:
        memory = tasks.mem_per_node * count
    total = msgspec.structs.replace(request, nodes=count, gpus=gpus, cores=cores, memory_mib=memory, gpus_per_node=None)
    if request.gpus_per_node is not None and gpus != request.gpus_per_node * count:
        total = msgspec.structs.replace(total, gpus_per_node=request.gpus_per_node)  # `size` raises the error
    found = size(total, inventory)
    found = msgspec.structs.replace(found, cores_per_node=max(found.cores_per_node, tasks_per_node))
    if tasks.mem_per_cpu is not None:
        found = msgspec.structs.replace(found, memory_mib_per_node=tasks.mem_per_cpu * found.cores_per_node)
    elif tasks.mem_per_node == 0:
        found = msgspec.structs.replace(found, memory_mib_per_node=_all_memory(found, nodes))
    return found, tasks_per_node


def _task_count(request: ResourceRequest, tasks: SubmitRequest, nodes: int, gpus: int | None) -> int:
    if tasks.ntasks is not None:
        return tasks.ntasks
    if tasks.ntasks_per_node is not None:
        return tasks.ntasks_per_node * nodes
    if tasks.gpus_per_task and gpus:
        return max(1, gpus // tasks.gpus_per_task)
    return nodes


def _tasks_per_node(ntasks: int, nodes: int) -> int:
    if ntasks % nodes:
        raise UsageError(
            f"--ntasks {ntasks} cannot be split evenly across {count_of(nodes, 'node')}", "choose another -N"
        )
    return ntasks // nodes


def _all_memory(found: SizedRequest, nodes: list[Node]) -> int:
    """Return the MiB that at least ``nodes`` of the large enough nodes have."""
    gpus = whole_gpus(found.gpus_per_node, found.profile)
    enough = [n.memory_mib for n in nodes if n.gpus >= gpus and n.cores >= found.cores_per_node]
    return sorted(enough, reverse=True)[found.nodes - 1] if len(enough) >= found.nodes else found.memory_mib_per_node


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _request_text(request: ResourceRequest, tasks: SubmitRequest) -> str:
    """Return the request in its own options."""
    words: Iterable[tuple[str, object]] = (
        ("--gpus", request.gpus), ("--gpus-per-node", request.gpus_per_node), ("--cpus", request.cores),
        *((_option(name), value) for name, value in task_options(tasks).items() if name not in _MEMORY),
    )  # fmt: skip
    return " ".join(f"{option} {value}" for option, value in words if value is not None) or "the job's parts"
