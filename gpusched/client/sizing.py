"""From what was asked (a flavor, or GPUs, cores and memory in total) to equal parts on whole nodes. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Literal

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
from gpusched.model.jobs import Elastic
from gpusched.model.resources import Flavor, Inventory, Partition
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import amounts_of, count_of


class ResourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for; None where it was left out. ``gpus``, ``cores`` and ``memory_mib`` are totals.

    ``core_range`` and ``memory_range``, in their place: the least and the most, for what is left out.
    """

    partition: str | None = None
    flavor: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    cores: int | None = None
    memory_mib: int | None = None
    core_range: tuple[int, int] | None = None
    memory_range: tuple[int, int] | None = None
    time_limit_s: int | None = None
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpu_types: tuple[str, ...] = ()


class SizedRequest(msgspec.Struct, frozen=True, kw_only=True):
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


def size(asked: ResourceRequest, inventory: Inventory) -> SizedRequest:
    """Fill in what was left out and split the whole over the fewest nodes.

    Raises:
        UsageError: Unknown partition or flavor, options that contradict each other, or a size no nodes can give.
    """
    if all(v is None for v in (asked.flavor, asked.gpus, asked.gpus_per_node, asked.cores, asked.memory_mib)):
        names = ", ".join(dict.fromkeys(f.name for p in inventory.partitions for f in p.flavors))
        raise UsageError("no resources requested: use --flavor, or --gpus, --cpus, --mem", f"flavors: {names}")
    partition = partition_of(asked, inventory)
    check_nodes(inventory, partition, (*asked.nodelist, *asked.exclude))
    check_gpu_types(partition, asked.gpu_types)
    for option, value in (("-N", asked.nodes), ("--cpus", asked.cores)):
        if value is not None and value < 1:
            raise UsageError(f"{option} must be at least 1, found {value}")
    for option, value in (("--gpus", asked.gpus), ("--gpus-per-node", asked.gpus_per_node)):
        if value is not None and value < 0:
            raise UsageError(f"{option} must not be negative, found {value}")
    flavor = _flavor(asked, partition)
    total = _total_of_flavor(asked, flavor) if flavor else _total_of_parts(asked, partition)
    return _split(asked, partition, flavor, total)


def partition_of(asked: ResourceRequest, inventory: Inventory) -> Partition:
    """Return the partition that was asked for, or the only one that it can be, or the default.

    Raises:
        UsageError: There is none, or several.
    """
    if asked.partition is not None:
        return known_partition(inventory, asked.partition)
    names = [p.name for p in inventory.partitions]
    if asked.flavor is not None:
        having = [p for p in inventory.partitions if p.flavor(asked.flavor)]
        if not having:
            flavors = [f.name for p in inventory.partitions for f in p.flavors]
            raise UsageError(f"there is no flavor '{asked.flavor}'{did_you_mean(asked.flavor, flavors)}")
        names = [p.name for p in having]
    elif asked.nodelist:
        names = list(dict.fromkeys(n.partition for n in inventory.nodes if n.name in asked.nodelist)) or names
    if len(names) > 1 and inventory.default_partition in names:
        return known_partition(inventory, inventory.default_partition)
    if len(names) > 1:
        what = f"flavor '{asked.flavor}' is in several partitions" if asked.flavor else "there are several partitions"
        hint = "choose one with -p, or ask an admin for a default partition (default: true)"
        raise UsageError(f"{what}: {', '.join(names)}", hint)
    return known_partition(inventory, names[0])


def _flavor(asked: ResourceRequest, partition: Partition) -> Flavor | None:
    if asked.flavor is None:
        return None
    flavor = partition.flavor(asked.flavor)
    if flavor is None:
        near = did_you_mean(asked.flavor, [f.name for f in partition.flavors])
        raise UsageError(f"partition {partition.name} has no flavor '{asked.flavor}'{near}")
    return flavor


def _total_of_flavor(asked: ResourceRequest, flavor: Flavor) -> _Total:
    for option, value in (("--gpus", asked.gpus), ("--cpus", asked.cores), ("--mem", asked.memory_mib)):
        if value is not None:
            raise UsageError(f"--flavor {flavor.name} and {option} cannot be combined", "use one of the two")
    return _Total(flavor.gpus, flavor.cores, flavor.memory_mib)


def covers(has: tuple[int, int, int], needs: tuple[int, int, int]) -> bool:
    """Whether GPUs, cores and MiB are enough."""
    return all(h >= n for h, n in zip(has, needs, strict=True))


def _total_of_parts(asked: ResourceRequest, partition: Partition) -> _Total:
    """GPUs, cores and memory in total; what was left out in proportion to the largest flavor."""
    gpus = _gpus(asked) or 0
    largest = partition.largest_flavor
    if largest is None:
        nodes = partition.nodes
        largest = Flavor(
            name="", time_limit_s=0, gpus=sum(n.gpus for n in nodes),
            cores=sum(n.cores for n in nodes), memory_mib=sum(n.memory_mib for n in nodes),
        )  # fmt: skip
    if asked.cores is not None:
        cores = asked.cores
    elif gpus and largest.gpus:
        cores = max(1, largest.cores * gpus // largest.gpus)
    else:
        cores = asked.nodes or 1
    if asked.memory_mib is not None:
        memory = asked.memory_mib
    elif gpus and largest.gpus:
        memory = max(1, largest.memory_mib * gpus // largest.gpus)
    else:
        memory = max(1, largest.memory_mib * cores // largest.cores)
    return _Total(gpus, _within(asked.core_range, cores), _within(asked.memory_range, memory))


def _within(bounds: tuple[int, int] | None, amount: int) -> int:
    return amount if bounds is None else min(max(amount, bounds[0]), bounds[1])


def _gpus(asked: ResourceRequest) -> int | None:
    if asked.gpus_per_node is None:
        return asked.gpus
    if asked.gpus is not None and (asked.gpus_per_node == 0) != (asked.gpus == 0):
        raise UsageError(f"--gpus {asked.gpus} and --gpus-per-node {asked.gpus_per_node} contradict each other")
    if asked.gpus is None:
        return asked.gpus_per_node * (asked.nodes or 1)
    return asked.gpus


def _node_count(asked: ResourceRequest, gpus: int) -> int | None:
    """How many nodes were asked for, by -N or by GPUs per node; None where the fewest will do."""
    if not asked.gpus_per_node:
        return asked.nodes
    if gpus % asked.gpus_per_node:
        raise UsageError(f"{count_of(gpus, 'GPU')} is not a multiple of --gpus-per-node {asked.gpus_per_node}")
    count = gpus // asked.gpus_per_node
    if asked.nodes is not None and asked.nodes != count:
        raise UsageError(
            f"{count_of(gpus, 'GPU')} with --gpus-per-node {asked.gpus_per_node} need -N {count}, not -N {asked.nodes}"
        )
    return count


def _split(asked: ResourceRequest, partition: Partition, flavor: Flavor | None, total: _Total) -> SizedRequest:
    count = _node_count(asked, total.gpus)
    if count is not None and total.gpus % count:
        raise UsageError(
            f"{count_of(total.gpus, 'GPU')} cannot be split evenly across {count_of(count, 'node')}",
            "choose another -N",
        )
    nodes = usable_nodes(partition, asked.nodelist, asked.exclude, asked.gpu_types)
    counts = [count] if count is not None else range(1, len(nodes) + 1)
    lean = total
    if asked.core_range or asked.memory_range:
        cores, memory = (asked.core_range or (total.cores,))[0], (asked.memory_range or (total.memory_mib,))[0]
        lean = _Total(total.gpus, cores, memory)
    for parts, amounts in ((count, of) for count in counts for of in dict.fromkeys((total, lean))):
        part = _part(asked, amounts, parts)
        fits = nodes_that_hold(nodes, part.gpus, part.cores, part.memory_mib) >= parts
        if total.gpus % parts == 0 and (fits or count is not None):
            return SizedRequest(
                partition=partition.name,
                flavor=flavor.name if flavor else None,
                nodes=parts,
                gpus_per_node=part.gpus,
                cores_per_node=part.cores,
                memory_mib_per_node=part.memory_mib,
                time_limit_s=_time_limit(asked, partition, flavor),
            )
    most = (max(amounts, default=0) for amounts in ([n.gpus for n in nodes], [n.cores for n in nodes],
                                                    [n.memory_mib for n in nodes]))  # fmt: skip
    raise UsageError(
        f"{amounts_of(total.gpus, total.cores, total.memory_mib)} of memory cannot be split evenly across "
        f"any number of nodes of partition {partition.name}",
        f"its {count_of(len(nodes), 'usable node')} {'has' if len(nodes) == 1 else 'have'} at most "
        f"{amounts_of(*most)} of memory",
    )


def _part(asked: ResourceRequest, total: _Total, parts: int) -> _Total:
    """One of equal parts: what was asked for explicitly is rounded up, what follows from a flavor is not exceeded."""
    explicit = asked.cores or asked.core_range, asked.memory_mib or asked.memory_range
    cores = -(-total.cores // parts) if explicit[0] is not None else max(1, total.cores // parts)
    memory = -(-total.memory_mib // parts) if explicit[1] is not None else max(1, total.memory_mib // parts)
    return _Total(total.gpus // parts, cores, memory)


def whole_nodes(sized: SizedRequest, asked: ResourceRequest, inventory: Inventory) -> SizedRequest:
    """As many nodes, each whole: of the smallest size of which there are enough.

    Raises:
        UsageError: There are not so many of any size.
    """
    nodes = usable_nodes(known_partition(inventory, sized.partition), asked.nodelist, asked.exclude, asked.gpu_types)
    needs = (sized.gpus_per_node, sized.cores_per_node, sized.memory_mib_per_node)
    kinds = Counter((n.gpus, n.cores, n.memory_mib) for n in nodes)
    enough = [of for of, count in kinds.items() if count >= sized.nodes and covers(of, needs)]
    if not enough:
        raise UsageError(
            f"--exclusive: partition {sized.partition} lacks {count_of(sized.nodes, 'large enough node')} of one size"
        )
    gpus, cores, memory = min(enough)
    return msgspec.structs.replace(sized, gpus_per_node=gpus, cores_per_node=cores, memory_mib_per_node=memory)


def _time_limit(asked: ResourceRequest, partition: Partition, flavor: Flavor | None) -> int:
    if asked.time_limit_s is not None:
        return asked.time_limit_s
    largest = flavor or partition.largest_flavor
    limits = [t for t in (largest.time_limit_s if largest else None, max_time(partition)) if t is not None]
    if not limits:
        raise UsageError(f"partition {partition.name} has no default time limit", "set one with -t")
    return min(limits)


def elastic_of(
    base: SizedRequest,
    asked: ResourceRequest,
    sizes: tuple[int, ...],
    batch: Literal["fixed", "scale"],
    cooldown_s: int,
) -> Elastic:
    """What a resizable job may have besides its base."""
    return Elastic(
        sizes=sizes,
        base_gpus=base.nodes * base.gpus_per_node,
        base_cores=base.nodes * base.cores_per_node,
        base_memory_mib=base.nodes * base.memory_mib_per_node,
        cores=asked.core_range,
        memory_mib=asked.memory_range,
        batch=batch,
        cooldown_s=cooldown_s,
    )
