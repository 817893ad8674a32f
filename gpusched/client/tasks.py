"""Requests by task, as in Slurm: tasks, and what each task, GPU, core or node gets -> equal parts on nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gpusched.client.sizing import ResourceRequest, SizedRequest, partition_of, size
from gpusched.config.validate import MAX_COUNT, nodes_that_hold, usable_nodes
from gpusched.errors import UsageError
from gpusched.model.resources import Inventory, Node
from gpusched.model.units import count_of


class TaskRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for besides the totals; None: it was left out. ``mem_per_node_mib`` 0: all that nodes have."""

    ntasks: int | None = None
    ntasks_per_node: int | None = None
    cpus_per_task: int | None = None
    cpus_per_gpu: int | None = None
    gpus_per_task: int | None = None
    mem_per_node_mib: int | None = None
    mem_per_gpu_mib: int | None = None
    mem_per_cpu_mib: int | None = None


_CORES = ("cpus_per_task", "cpus_per_gpu")
_MEMORY = ("mem_per_node_mib", "mem_per_gpu_mib", "mem_per_cpu_mib")


def size_by_tasks(asked: ResourceRequest, tasks: TaskRequest, inventory: Inventory) -> tuple[SizedRequest, int]:
    """Equal parts on the fewest nodes, and how many tasks each of them has.

    Without a number of tasks there is one on each node; of GPUs by task only, as many as there are GPUs for. Cores are
    what was said, else what goes with the GPUs, at least one for each task (where memory is asked for by core, just
    one). Tasks are split equally over the nodes.

    Raises:
        UsageError: As `gpusched.client.sizing.size`, or the options contradict each other.
    """
    _check(asked, tasks)
    if asked.flavor is not None:
        found = size(asked, inventory)
        return found, _on_each(_count(asked, tasks, found.nodes, found.nodes * found.gpus_per_node), found.nodes)
    partition = partition_of(asked, inventory)
    nodes = usable_nodes(partition, asked.nodelist, asked.exclude, asked.gpu_types)
    fixed = _node_count(asked, tasks)
    if fixed is not None:
        return _over(asked, tasks, fixed, nodes, inventory)
    wrong: list[UsageError] = []
    for count in range(1, max(1, len(nodes)) + 1):
        try:
            found, on_each = _over(asked, tasks, count, nodes, inventory)
        except UsageError as error:
            wrong.append(error)
            continue
        if nodes_that_hold(nodes, found.gpus_per_node, found.cores_per_node, found.memory_mib_per_node) >= count:
            return found, on_each
    if len(wrong) == max(1, len(nodes)):  # the first had nothing to split
        raise wrong[0]
    raise UsageError(
        f"{_said(asked, tasks)} cannot be split evenly across any number of nodes of partition {partition.name}",
        f"its {count_of(len(nodes), 'usable node')} {'has' if len(nodes) == 1 else 'have'} at most "
        f"{count_of(max((n.gpus for n in nodes), default=0), 'GPU')} and "
        f"{count_of(max((n.cores for n in nodes), default=0), 'core')}",
    )


def _check(asked: ResourceRequest, tasks: TaskRequest) -> None:
    given = {name: value for name, value in msgspec.structs.asdict(tasks).items() if value is not None}
    for name, value in given.items():
        if not (0 if name in ("gpus_per_task", "mem_per_node_mib") else 1) <= value <= MAX_COUNT and "mib" not in name:
            raise UsageError(f"{_option(name)} must be 1 to {MAX_COUNT}, found {value}")
    memory, cores = [n for n in _MEMORY if n in given], [n for n in _CORES if n in given]
    for names, total, option in ((cores, asked.cores, "--cpus"), (memory, asked.memory_mib, "--mem")):
        both = [*map(_option, names), *([option] if total is not None else [])]
        if len(both) > 1:
            raise UsageError(f"{both[0]} and {both[1]} cannot be combined", "use one of the two")
    if asked.flavor is not None and (said := [n for n in (*_CORES, "gpus_per_task", *_MEMORY) if n in given]):
        raise UsageError(f"--flavor {asked.flavor} and {_option(said[0])} cannot be combined", "use one of the two")


def _node_count(asked: ResourceRequest, tasks: TaskRequest) -> int | None:
    """How many nodes the request names; None: the fewest."""
    if asked.nodes is not None:
        return asked.nodes
    if tasks.ntasks and tasks.ntasks_per_node:
        return -(-tasks.ntasks // tasks.ntasks_per_node)
    if asked.gpus is not None and asked.gpus_per_node:
        return max(1, asked.gpus // asked.gpus_per_node)
    return None


def _over(
    asked: ResourceRequest, tasks: TaskRequest, count: int, nodes: list[Node], inventory: Inventory
) -> tuple[SizedRequest, int]:
    gpus = asked.gpus if asked.gpus is not None or asked.gpus_per_node is None else asked.gpus_per_node * count
    ntasks = _count(asked, tasks, count, gpus)
    on_each = _on_each(ntasks, count)
    if tasks.ntasks_per_node is not None and on_each > tasks.ntasks_per_node:
        raise UsageError(
            f"--ntasks {ntasks} on {count_of(count, 'node')} exceeds --ntasks-per-node {tasks.ntasks_per_node}"
        )
    by_task = None if tasks.gpus_per_task is None else tasks.gpus_per_task * ntasks
    if by_task is not None and (gpus is not None and by_task > gpus):
        raise UsageError(
            f"{count_of(ntasks, 'task')} with --gpus-per-task {tasks.gpus_per_task} need "
            f"{count_of(by_task, 'GPU')}, not {gpus}"
        )
    gpus = by_task if gpus is None else gpus
    cores = asked.cores
    if tasks.cpus_per_task is not None:
        cores = tasks.cpus_per_task * ntasks
    elif tasks.cpus_per_gpu is not None:
        if not gpus:
            raise UsageError("--cpus-per-gpu: the job requests no GPU", "use --gpus, or --cpus-per-task")
        cores = max(ntasks, tasks.cpus_per_gpu * gpus)
    elif cores is None and (not gpus or tasks.mem_per_cpu_mib is not None):
        cores = ntasks
    memory = asked.memory_mib
    if tasks.mem_per_gpu_mib is not None:
        if not gpus:
            raise UsageError("--mem-per-gpu: the job requests no GPU", "use --gpus, or --mem-per-node")
        memory = tasks.mem_per_gpu_mib * gpus
    elif tasks.mem_per_node_mib:
        memory = tasks.mem_per_node_mib * count
    whole = msgspec.structs.replace(asked, nodes=count, gpus=gpus, cores=cores, memory_mib=memory, gpus_per_node=None)
    if asked.gpus_per_node is not None and gpus != asked.gpus_per_node * count:
        whole = msgspec.structs.replace(whole, gpus_per_node=asked.gpus_per_node)  # `size` says what is wrong
    found = size(whole, inventory)
    found = msgspec.structs.replace(found, cores_per_node=max(found.cores_per_node, on_each))
    if tasks.mem_per_cpu_mib is not None:
        found = msgspec.structs.replace(found, memory_mib_per_node=tasks.mem_per_cpu_mib * found.cores_per_node)
    elif tasks.mem_per_node_mib == 0:
        found = msgspec.structs.replace(found, memory_mib_per_node=_all_memory(found, nodes))
    return found, on_each


def _count(asked: ResourceRequest, tasks: TaskRequest, nodes: int, gpus: int | None) -> int:
    if tasks.ntasks is not None:
        return tasks.ntasks
    if tasks.ntasks_per_node is not None:
        return tasks.ntasks_per_node * nodes
    if tasks.gpus_per_task and gpus:
        return max(1, gpus // tasks.gpus_per_task)
    return nodes


def _on_each(ntasks: int, nodes: int) -> int:
    if ntasks % nodes:
        raise UsageError(
            f"--ntasks {ntasks} cannot be split evenly across {count_of(nodes, 'node')}", "choose another -N"
        )
    return ntasks // nodes


def _all_memory(found: SizedRequest, nodes: list[Node]) -> int:
    """MiB that each of so many nodes has at least: those with most memory of those that are large enough."""
    enough = [n.memory_mib for n in nodes if n.gpus >= found.gpus_per_node and n.cores >= found.cores_per_node]
    return sorted(enough, reverse=True)[found.nodes - 1] if len(enough) >= found.nodes else found.memory_mib_per_node


def _option(name: str) -> str:
    return "--" + name.removesuffix("_mib").replace("_", "-")


def _said(asked: ResourceRequest, tasks: TaskRequest) -> str:
    """The request in its own options."""
    words: Iterable[tuple[str, object]] = (
        ("--gpus", asked.gpus), ("--gpus-per-node", asked.gpus_per_node), ("--cpus", asked.cores),
        *((_option(name), value) for name, value in msgspec.structs.asdict(tasks).items() if "mib" not in name),
    )  # fmt: skip
    return " ".join(f"{option} {value}" for option, value in words if value is not None) or "the job's parts"
