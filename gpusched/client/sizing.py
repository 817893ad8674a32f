"""Turn a request (a flavor, or GPUs, cores and memory in total) into equal parts on nodes. Pure."""

from __future__ import annotations

from collections import Counter

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
from gpusched.model.slicetables import parts_of, whole_gpus
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import amounts_of, count_of


class ResourceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The requested resources; None if left out. ``gpus``, ``cores`` and ``memory_mib`` are totals.

    ``profile``: the GPUs are MIG slices of it.
    ``core_range`` and ``memory_range``: (minimum, maximum) for amounts that are derived from the GPUs.
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
    profile: str = ""


class SizedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The complete request: ``nodes`` equal parts."""

    partition: str
    flavor: str | None
    nodes: int
    gpus_per_node: int
    cores_per_node: int
    memory_mib_per_node: int
    time_limit_s: int
    profile: str = ""


class _Total(msgspec.Struct, frozen=True):
    gpus: int
    cores: int
    memory_mib: int


def size(request: ResourceRequest, inventory: Inventory) -> SizedRequest:
    """Fill in what was left out and split the total over the fewest nodes.

    Raises:
        UsageError: Unknown partition or flavor, contradicting options, or a size that no nodes can provide.
    """
    if all(v is None for v in (request.flavor, request.gpus, request.gpus_per_node, request.cores, request.memory_mib)):
        names = ", ".join(dict.fromkeys(f.name for p in inventory.partitions for f in p.flavors))
        raise UsageError("no resources requested: use --flavor, or --gpus, --cpus, --mem", f"flavors: {names}")
    partition = partition_of(request, inventory)
    check_nodes(inventory, partition, (*request.nodelist, *request.exclude))
    check_gpu_types(partition, request.gpu_types)
    if partition.nodes and not usable_nodes(partition, request):
        raise UsageError(
            f"--nodelist, --exclude and --gpu-type leave none of the nodes of partition {partition.name}", "change one"
        )
    for option, value in (("-N", request.nodes), ("--cpus", request.cores)):
        if value is not None and value < 1:
            raise UsageError(f"{option} must be at least 1, found {value}")
    for option, value in (("--gpus", request.gpus), ("--gpus-per-node", request.gpus_per_node)):
        if value is not None and value < 0:
            raise UsageError(f"{option} must not be negative, found {value}")
    flavor = _flavor(request, partition)
    total = _total_of_flavor(request, flavor) if flavor else _total_of_parts(request, partition)
    return _split(request, partition, flavor, total)


def partition_of(request: ResourceRequest, inventory: Inventory) -> Partition:
    """Return the partition that was requested, or the only possible one, or the default.

    Raises:
        UsageError: There is none, or several.
    """
    if request.partition is not None:
        return known_partition(inventory, request.partition)
    names = [p.name for p in inventory.partitions]
    if request.flavor is not None:
        candidates = [p for p in inventory.partitions if p.flavor(request.flavor)]
        if not candidates:
            flavors = [f.name for p in inventory.partitions for f in p.flavors]
            raise UsageError(f"there is no flavor '{request.flavor}'{did_you_mean(request.flavor, flavors)}")
        names = [p.name for p in candidates]
    elif request.nodelist:
        names = list(dict.fromkeys(n.partition for n in inventory.nodes if n.name in request.nodelist)) or names
    if len(names) > 1 and inventory.default_partition in names:
        return known_partition(inventory, inventory.default_partition)
    if len(names) > 1:
        problem = f"flavor '{request.flavor}' is in" if request.flavor else "there are"
        hint = "choose one with -p, or ask an admin for a default partition (default: true)"
        raise UsageError(f"{problem} several partitions: {', '.join(names)}", hint)
    return known_partition(inventory, names[0])


def _flavor(request: ResourceRequest, partition: Partition) -> Flavor | None:
    if request.flavor is None:
        return None
    flavor = partition.flavor(request.flavor)
    if flavor is None:
        near = did_you_mean(request.flavor, [f.name for f in partition.flavors])
        raise UsageError(f"partition {partition.name} has no flavor '{request.flavor}'{near}")
    return flavor


def _total_of_flavor(request: ResourceRequest, flavor: Flavor) -> _Total:
    for option, value in (
        ("--gpus", request.gpus), ("--mig", request.profile or None), ("--cpus", request.cores),
        ("--mem", request.memory_mib),
    ):  # fmt: skip
        if value is not None:
            raise UsageError(f"--flavor {flavor.name} and {option} cannot be combined", "use one of the two")
    return _Total(flavor.gpus, flavor.cores, flavor.memory_mib)


def covers(has: tuple[int, int, int], needs: tuple[int, int, int]) -> bool:
    """Return whether the GPUs, cores and MiB are enough."""
    return all(h >= n for h, n in zip(has, needs, strict=True))


def _total_of_parts(request: ResourceRequest, partition: Partition) -> _Total:
    """Return GPUs, cores and memory in total; amounts left out are in proportion to the largest flavor."""
    gpus = _gpus(request) or 0
    largest = partition.largest_flavor
    if largest is None:
        nodes = partition.nodes
        largest = Flavor(
            name="", time_limit_s=0, gpus=sum(n.gpus for n in nodes),
            cores=sum(n.cores for n in nodes), memory_mib=sum(n.memory_mib for n in nodes),
        )  # fmt: skip
    part, whole = gpus * parts_of(request.profile), largest.gpus * parts_of(largest.profile)
    if request.cores is not None:
        cores = request.cores
    elif gpus and largest.gpus:
        cores = max(1, largest.cores * part // whole)
    else:
        cores = request.nodes or 1
    if request.memory_mib is not None:
        memory = request.memory_mib
    elif gpus and largest.gpus:
        memory = max(1, largest.memory_mib * part // whole)
    else:
        memory = max(1, largest.memory_mib * cores // largest.cores)
    return _Total(gpus, _within(request.core_range, cores), _within(request.memory_range, memory))


def _within(bounds: tuple[int, int] | None, amount: int) -> int:
    return amount if bounds is None else min(max(amount, bounds[0]), bounds[1])


def _gpus(request: ResourceRequest) -> int | None:
    if request.gpus_per_node is None:
        return request.gpus
    if request.gpus is not None and (request.gpus_per_node == 0) != (request.gpus == 0):
        raise UsageError(f"--gpus {request.gpus} and --gpus-per-node {request.gpus_per_node} contradict each other")
    if request.gpus is None:
        return request.gpus_per_node * (request.nodes or 1)
    return request.gpus


def _node_count(request: ResourceRequest, gpus: int) -> int | None:
    """Return the number of nodes requested, by -N or by GPUs per node; None for the fewest."""
    if not request.gpus_per_node:
        return request.nodes
    if gpus % request.gpus_per_node or not gpus:
        raise UsageError(f"{count_of(gpus, 'GPU')} is not a multiple of --gpus-per-node {request.gpus_per_node}")
    count = gpus // request.gpus_per_node
    if request.nodes is not None and request.nodes != count:
        given = f"{count_of(gpus, 'GPU')} with --gpus-per-node {request.gpus_per_node}"
        raise UsageError(f"{given} need -N {count}, not -N {request.nodes}")
    return count


def _split(request: ResourceRequest, partition: Partition, flavor: Flavor | None, total: _Total) -> SizedRequest:
    count = _node_count(request, total.gpus)
    if count is not None and total.gpus % count:
        raise UsageError(
            f"{count_of(total.gpus, 'GPU')} cannot be split evenly across {count_of(count, 'node')}",
            "choose another -N",
        )
    nodes, profile = usable_nodes(partition, request), flavor.profile if flavor else request.profile
    counts = [count] if count is not None else range(1, len(nodes) + 1)
    smallest = total
    if request.core_range or request.memory_range:
        cores, memory = (request.core_range or (total.cores,))[0], (request.memory_range or (total.memory_mib,))[0]
        smallest = _Total(total.gpus, cores, memory)
    # The fewest nodes win; on as many nodes, the derived amounts are preferred to the minimum of the ranges.
    for node_count, amounts in ((count, option) for count in counts for option in dict.fromkeys((total, smallest))):
        part = _part(request, amounts, node_count)
        fits = nodes_that_hold(nodes, whole_gpus(part.gpus, profile), part.cores, part.memory_mib) >= node_count
        if total.gpus % node_count == 0 and (fits or count is not None):
            return SizedRequest(
                partition=partition.name,
                flavor=flavor.name if flavor else None,
                nodes=node_count,
                gpus_per_node=part.gpus,
                cores_per_node=part.cores,
                memory_mib_per_node=part.memory_mib,
                time_limit_s=_time_limit(request, partition, flavor),
                profile=profile,
            )
    gpus, cores, memory = (max(amounts, default=0) for amounts in ([n.gpus for n in nodes], [n.cores for n in nodes],
                                                                [n.memory_mib for n in nodes]))  # fmt: skip
    raise UsageError(
        f"{amounts_of(total.gpus, total.cores, total.memory_mib, profile)} of memory cannot be split evenly across "
        f"any number of nodes of partition {partition.name}",
        f"its {count_of(len(nodes), 'usable node')} {'has' if len(nodes) == 1 else 'have'} at most "
        f"{amounts_of(gpus, cores, memory)} of memory",
    )


def _part(request: ResourceRequest, total: _Total, parts: int) -> _Total:
    """Return one of the equal parts: explicit amounts are rounded up, amounts of a flavor are rounded down."""
    explicit = request.cores or request.core_range, request.memory_mib or request.memory_range
    cores = -(-total.cores // parts) if explicit[0] is not None else max(1, total.cores // parts)
    memory = -(-total.memory_mib // parts) if explicit[1] is not None else max(1, total.memory_mib // parts)
    return _Total(total.gpus // parts, cores, memory)


def whole_nodes(sized: SizedRequest, request: ResourceRequest, inventory: Inventory) -> SizedRequest:
    """Return the same number of whole nodes, of the smallest node size that there are enough of.

    Raises:
        UsageError: No node size has enough nodes.
    """
    nodes = usable_nodes(known_partition(inventory, sized.partition), request)
    needs = (sized.gpus_per_node, sized.cores_per_node, sized.memory_mib_per_node)
    node_sizes = Counter((n.gpus, n.cores, n.memory_mib) for n in nodes)
    enough = [node_size for node_size, count in node_sizes.items() if count >= sized.nodes and covers(node_size, needs)]
    if not enough:
        raise UsageError(
            f"--exclusive: partition {sized.partition} lacks {count_of(sized.nodes, 'large enough node')} of one size"
        )
    gpus, cores, memory = min(enough)
    return msgspec.structs.replace(sized, gpus_per_node=gpus, cores_per_node=cores, memory_mib_per_node=memory)


def _time_limit(request: ResourceRequest, partition: Partition, flavor: Flavor | None) -> int:
    if request.time_limit_s is not None:
        return request.time_limit_s
    largest = flavor or partition.largest_flavor
    limits = [t for t in (largest.time_limit_s if largest else None, max_time(partition)) if t is not None]
    if not limits:
        raise UsageError(f"partition {partition.name} has no default time limit", "set one with -t")
    return min(limits)
