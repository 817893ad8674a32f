"""From what was asked (a flavor, or GPUs, cores and memory in total) to equal parts on whole nodes. Pure."""

from __future__ import annotations

import msgspec

from gpusched.config.validate import (
    check_gpu_types,
    check_nodes,
    known_partition,
    max_time,
    nodes_that_hold,
    usable_nodes,
)
from gpusched.errors import UsageError
from gpusched.model.resources import Flavor, Inventory, Partition
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import format_memory


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; None where nothing was said. ``gpus``, ``cores`` and ``memory_mib`` are totals."""

    partition: str | None = None
    flavor: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    cores: int | None = None
    memory_mib: int | None = None
    time_limit_s: int | None = None
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpu_types: tuple[str, ...] = ()


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The request made whole: ``nodes`` equal parts."""

    partition: str
    flavor: str | None
    nodes: int
    gpus_per_node: int
    cores_per_node: int
    memory_mib_per_node: int
    time_limit_s: int


class _Total(msgspec.Struct, frozen=True):
    gpus: int
    cores: int
    memory_mib: int


def size(wish: Wish, inventory: Inventory) -> Size:
    """Fill in what was not said and split the whole over the fewest nodes.

    Raises:
        UsageError: Unknown partition or flavor, options that contradict each other, or a size no nodes can give.
    """
    if all(v is None for v in (wish.flavor, wish.gpus, wish.gpus_per_node, wish.cores, wish.memory_mib)):
        names = ", ".join(dict.fromkeys(f.name for p in inventory.partitions for f in p.flavors))
        raise UsageError("say what the job needs: --flavor, or --gpus, --cpus, --mem", f"flavors: {names}")
    partition = _partition(wish, inventory)
    check_nodes(inventory, partition, (*wish.nodelist, *wish.exclude))
    check_gpu_types(partition, wish.gpu_types)
    for option, value in (("-N", wish.nodes), ("--cpus", wish.cores)):
        if value is not None and value < 1:
            raise UsageError(f"{option} must be at least 1, found {value}")
    for option, value in (("--gpus", wish.gpus), ("--gpus-per-node", wish.gpus_per_node)):
        if value is not None and value < 0:
            raise UsageError(f"{option} must not be negative, found {value}")
    flavor = _flavor(wish, partition)
    total = _total_of_flavor(wish, flavor) if flavor else _total_of_parts(wish, partition)
    return _split(wish, partition, flavor, total)


def _partition(wish: Wish, inventory: Inventory) -> Partition:
    if wish.partition is not None:
        return known_partition(inventory, wish.partition)
    names = [p.name for p in inventory.partitions]
    if wish.flavor is not None:
        having = [p for p in inventory.partitions if p.flavor(wish.flavor)]
        if not having:
            flavors = [f.name for p in inventory.partitions for f in p.flavors]
            raise UsageError(f"there is no flavor '{wish.flavor}'{did_you_mean(wish.flavor, flavors)}")
        names = [p.name for p in having]
    elif wish.nodelist:
        names = list(dict.fromkeys(n.partition for n in inventory.nodes if n.name in wish.nodelist)) or names
    if len(names) > 1:
        what = f"flavor '{wish.flavor}' is in several partitions" if wish.flavor else "there are several partitions"
        raise UsageError(f"{what}: {', '.join(names)}", "say which one with -p")
    return known_partition(inventory, names[0])


def _flavor(wish: Wish, partition: Partition) -> Flavor | None:
    if wish.flavor is None:
        return None
    flavor = partition.flavor(wish.flavor)
    if flavor is None:
        near = did_you_mean(wish.flavor, [f.name for f in partition.flavors])
        raise UsageError(f"partition {partition.name} has no flavor '{wish.flavor}'{near}")
    return flavor


def _total_of_flavor(wish: Wish, flavor: Flavor) -> _Total:
    for option, value in (("--gpus", wish.gpus), ("--cpus", wish.cores), ("--mem", wish.memory_mib)):
        if value is not None:
            raise UsageError(f"--flavor {flavor.name} already says it, so {option} has no place", "use one of the two")
    return _Total(flavor.gpus, flavor.cores, flavor.memory_mib)


def _total_of_parts(wish: Wish, partition: Partition) -> _Total:
    """GPUs, cores and memory in total; what was not said in proportion to the largest flavor."""
    gpus = _gpus(wish) or 0
    largest = partition.largest_flavor
    if largest is None:
        nodes = partition.nodes
        largest = Flavor(
            name="", time_limit_s=0, gpus=sum(n.gpus for n in nodes),
            cores=sum(n.cores for n in nodes), memory_mib=sum(n.memory_mib for n in nodes),
        )  # fmt: skip
    if wish.cores is not None:
        cores = wish.cores
    elif gpus and largest.gpus:
        cores = max(1, largest.cores * gpus // largest.gpus)
    else:
        cores = wish.nodes or 1
    if wish.memory_mib is not None:
        memory = wish.memory_mib
    elif gpus and largest.gpus:
        memory = max(1, largest.memory_mib * gpus // largest.gpus)
    else:
        memory = max(1, largest.memory_mib * cores // largest.cores)
    return _Total(gpus, cores, memory)


def _gpus(wish: Wish) -> int | None:
    if wish.gpus_per_node is None:
        return wish.gpus
    if wish.gpus is not None and (wish.gpus_per_node == 0) != (wish.gpus == 0):
        raise UsageError(f"--gpus {wish.gpus} and --gpus-per-node {wish.gpus_per_node} contradict each other")
    if wish.gpus is None:
        return wish.gpus_per_node * (wish.nodes or 1)
    return wish.gpus


def _node_count(wish: Wish, gpus: int) -> int | None:
    """How many nodes were asked for, by -N or by GPUs per node; None where the fewest will do."""
    if not wish.gpus_per_node:
        return wish.nodes
    if gpus % wish.gpus_per_node:
        raise UsageError(f"{gpus} GPUs are not a multiple of --gpus-per-node {wish.gpus_per_node}")
    count = gpus // wish.gpus_per_node
    if wish.nodes is not None and wish.nodes != count:
        raise UsageError(
            f"{gpus} GPUs with --gpus-per-node {wish.gpus_per_node} are {count} nodes, but -N says {wish.nodes}"
        )
    return count


def _split(wish: Wish, partition: Partition, flavor: Flavor | None, total: _Total) -> Size:
    count = _node_count(wish, total.gpus)
    if count is not None and total.gpus % count:
        raise UsageError(f"{total.gpus} GPUs cannot be split into {count} equal parts", "choose another -N")
    nodes = usable_nodes(partition, wish.nodelist, wish.exclude, wish.gpu_types)
    counts = [count] if count is not None else range(1, len(nodes) + 1)
    for parts in counts:
        part = _part(wish, total, parts)
        fits = nodes_that_hold(nodes, part.gpus, part.cores, part.memory_mib) >= parts
        if total.gpus % parts == 0 and (fits or count is not None):
            return Size(
                partition=partition.name,
                flavor=flavor.name if flavor else None,
                nodes=parts,
                gpus_per_node=part.gpus,
                cores_per_node=part.cores,
                memory_mib_per_node=part.memory_mib,
                time_limit_s=_time_limit(wish, partition, flavor),
            )
    raise UsageError(
        f"{total.gpus} GPUs, {total.cores} cores, {format_memory(total.memory_mib)} of memory fit on no number "
        f"of equal nodes of partition {partition.name}",
        f"its {len(nodes)} usable nodes have at most {max((n.gpus for n in nodes), default=0)} GPUs, "
        f"{max((n.cores for n in nodes), default=0)} cores, "
        f"{format_memory(max((n.memory_mib for n in nodes), default=0))} of memory",
    )


def _part(wish: Wish, total: _Total, parts: int) -> _Total:
    """One of equal parts: what was asked for explicitly is rounded up, what follows from a flavor is not exceeded."""
    cores = -(-total.cores // parts) if wish.cores is not None else max(1, total.cores // parts)
    memory = -(-total.memory_mib // parts) if wish.memory_mib is not None else max(1, total.memory_mib // parts)
    return _Total(total.gpus // parts, cores, memory)


def _time_limit(wish: Wish, partition: Partition, flavor: Flavor | None) -> int:
    if wish.time_limit_s is not None:
        return wish.time_limit_s
    largest = flavor or partition.largest_flavor
    limits = [t for t in (largest.time_limit_s if largest else None, max_time(partition)) if t is not None]
    if not limits:
        raise UsageError(f"partition {partition.name} has no default time limit", "say one with -t")
    return min(limits)
