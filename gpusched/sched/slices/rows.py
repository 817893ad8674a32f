"""The nodes of a split snapshot: whole GPUs and slices apart, and what is held of those that are cut on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec.structs import replace

from gpusched.model.jobs import Allocation, NodeAllocation
from gpusched.model.slices import gpu_of, is_slice, slice_index
from gpusched.model.slicetables import GPU_PARTS, parts_of
from gpusched.model.snapshot import NodeView, RunningView, SliceView, Snapshot
from gpusched.sched.slicenames import inner_name
from gpusched.sched.slices.plan import CUT_S, arrange, busy_until
from gpusched.sched.slices.tree import most_of


def rows_of(node: NodeView, asked: Iterable[str]) -> list[NodeView]:
    """Return the node without the GPUs that stay cut, and one node for each profile of its slices.

    A GPU brings an equal part of the node's cores and memory, a slice its share of that; whole GPUs have the rest.
    GPUs that are cut on demand are in both, see `holds`. ``asked``: profiles that jobs wait for.
    """
    if not node.slices and not node.cuttable:
        return [node]
    numbers: dict[str, set[int]] = {}
    for one in (*node.slices, *possible(node, asked)):
        numbers.setdefault(one.profile, set()).add(one.number)
    fixed = {gpu_of(one.number) for one in node.slices} - node.cuttable.keys()
    cores, memory_mib = amounts(node, sum(parts_of(one.profile) for one in node.slices if gpu_of(one.number) in fixed))
    rest = replace(
        node, gpus=tuple(gpu for gpu in node.gpus if gpu not in fixed), slices=(), cuttable={}, blocked=_blocked(node),
        cores=node.cores - cores, memory_mib=node.memory_mib - memory_mib,
    )  # fmt: skip
    return [rest, *(_row(node, profile, own) for profile, own in numbers.items())]


def _blocked(node: NodeView) -> dict[int, str]:
    """Return why whole GPUs cannot be used: also where a foreign process is on a slice of one that is cut on demand."""
    found = {n: why for n, why in node.blocked.items() if n not in node.cuttable or not why.startswith("SLICED")}
    strangers = {gpu_of(n): why for n, why in node.blocked.items() if is_slice(n) and why.startswith("BUSY")}
    return {gpu: why for gpu, why in strangers.items() if gpu in node.cuttable} | found


def _row(node: NodeView, profile: str, numbers: set[int]) -> NodeView:
    cores, memory_mib = amounts(node, parts_of(profile) * len(numbers))
    there = {one.number for one in node.slices if one.profile == profile}
    whole = _blocked(node)
    blocked = {n: why for n, why in node.blocked.items() if n in there}
    blocked |= {n: whole[gpu_of(n)] for n in numbers - there if gpu_of(n) in whole}
    return replace(
        node, name=inner_name(node.name, profile), partition=inner_name(node.partition, profile), slices=(), links={},
        cuttable={}, gpus=tuple(sorted(numbers)), cores=cores, memory_mib=memory_mib, blocked=blocked, sharing=None,
        shareable={},
    )  # fmt: skip


def amounts(node: NodeView, parts: int) -> tuple[int, int]:
    """Return the cores and MiB that so many parts of the node's GPUs bring."""
    whole = GPU_PARTS * max(1, len(node.gpus))
    return node.cores * parts // whole, node.memory_mib * parts // whole


def possible(node: NodeView, asked: Iterable[str]) -> list[SliceView]:
    """Return slices of the profiles asked for that are not there, and that a cut on demand could make."""
    there = {(one.number, one.profile) for one in node.slices}
    return [
        SliceView(slice_index(gpu, start), name)
        for gpu, table in node.cuttable.items()
        for profile in sorted(asked)
        for name, start in most_of(table, profile)
        if (slice_index(gpu, start), name) not in there
    ]


def holds(snapshot: Snapshot, asked: Iterable[str]) -> Iterator[RunningView]:
    """Yield what keeps GPUs that are cut on demand from jobs, as if it were a job.

    Of whole GPUs, those that are cut, until nothing runs on their slices; of slices, those that are not there yet,
    until nothing runs on the GPU; of both, what is kept for a waiting job.
    """
    if not any(node.cuttable for node in snapshot.nodes):
        return
    end, kept = busy_until(snapshot), arrange(snapshot).kept
    for node in snapshot.nodes:
        if node.cuttable:
            profiles = {one.number: one.profile for one in node.slices} | dict.fromkeys(node.gpus, "")
            comes = {gpu: max(end.get((node.name, gpu), 0.0), snapshot.now) + CUT_S for gpu in node.cuttable}
            yield from _cut_gpus(node, comes)
            yield from _not_there(node, possible(node, asked), comes)
            for (name, number), keeps in kept.items():
                if name == node.name and number in profiles:  # not what is only about to come
                    yield _hold(node, profiles[number], number, keeps.until, (0, 0))


def _cut_gpus(node: NodeView, comes: Mapping[int, float]) -> Iterator[RunningView]:
    blocked, parts = _blocked(node), 0
    for gpu in sorted(node.cuttable):
        own = [one for one in node.slices if gpu_of(one.number) == gpu]
        if not own and not node.blocked.get(gpu, "").startswith("SLICED"):
            continue
        before, parts = parts, parts + sum(parts_of(one.profile) for one in own)
        yield _hold(node, "", gpu, comes[gpu], _between(node, before, parts), gpu in blocked)


def _not_there(node: NodeView, missing: Iterable[SliceView], comes: Mapping[int, float]) -> Iterator[RunningView]:
    parts = {p: parts_of(p) * n for p, n in Counter(one.profile for one in node.slices).items()}
    blocked = _blocked(node)
    for one in missing:
        before, gpu = parts.get(one.profile, 0), gpu_of(one.number)
        parts[one.profile] = before + parts_of(one.profile)
        between = _between(node, before, parts[one.profile])
        yield _hold(node, one.profile, one.number, comes[gpu], between, gpu in blocked)


def _between(node: NodeView, before: int, after: int) -> tuple[int, int]:
    """Return cores and MiB of parts, so that the sums are those of all parts together."""
    (cores, memory_mib), (more, larger) = amounts(node, before), amounts(node, after)
    return more - cores, larger - memory_mib


def _hold(
    node: NodeView, profile: str, number: int, until: float, has: tuple[int, int], blocked: bool = False
) -> RunningView:  # fmt: skip
    """Return the hold; ``blocked``: nothing can use the number in any case, but its cores and memory others could."""
    part = NodeAllocation(
        rank=0, node=inner_name(node.name, profile), gpus=() if blocked else (number,), cores=has[0], memory_mib=has[1]
    )  # fmt: skip
    name = f"{part.node}:{number}"
    return RunningView(id=name, user="", allocation=Allocation(name, (part,)), start_time=0.0, expected_end=until)
