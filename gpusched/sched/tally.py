"""A job's needs on a node, what excludes it from one, and users' recent usage: in plain Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec.structs import replace

from gpusched.model.jobs import JobSpec
from gpusched.model.limits import leaf_of, split_leaf
from gpusched.model.policy import PolicySpec
from gpusched.model.slicetables import gpus_counted
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.model.units import count_of, format_memory, gpus_of
from gpusched.sched.reservations.rules import closed_text
from gpusched.sched.slicenames import profile_of
from gpusched.sched.text import gpus_called, listed, listed_types

Amounts = tuple[int, int, int]
"""GPUs, cores and MiB of a node."""


def need(spec: JobSpec) -> Amounts:
    """Return GPUs, cores and MiB per node."""
    return spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node


def covers(has: Amounts, needs: Amounts) -> bool:
    """Return whether every amount is enough."""
    return all(h >= n for h, n in zip(has, needs, strict=True))


def at_size(spec: JobSpec, gpus: int, nodes: int, rooms: Mapping[Amounts, int]) -> JobSpec | None:
    """Return a resizable job's request over so many nodes; None: no fit. ``rooms``: amounts -> nodes that have them.

    Where its cores and memory have ranges, with the most of them that so many nodes have: of cores first.
    """
    found = spec.at_size(gpus, nodes)
    least = need(found.least)
    having = {room: count for room, count in rooms.items() if covers(room, least)}
    if sum(having.values()) < nodes:
        return None
    cores = _most_on(nodes, ((room[1], count) for room, count in having.items()))
    enough = min(cores, found.cores_per_node)
    memory = _most_on(nodes, ((room[2], count) for room, count in having.items() if room[1] >= enough))
    found = spec.at_size(gpus, nodes, (cores, memory))
    needs = need(found)
    return found if sum(count for room, count in having.items() if covers(room, needs)) >= nodes else None


def _most_on(nodes: int, amounts: Iterable[tuple[int, int]]) -> int:
    """Return the most that so many nodes have each; ``amounts``: an amount, and how many nodes have it."""
    found = 0
    for amount, count in sorted(amounts, reverse=True):
        found, nodes = amount, nodes - count
        if nodes <= 0:
            break
    return found


def over_more_nodes(spec: JobSpec, most: int) -> Iterator[JobSpec]:
    """Yield the same GPUs as more and smaller parts, over the fewest nodes first."""
    gpus, cores, memory = (spec.nodes * n for n in need(spec))
    for parts in range(spec.nodes + 1, min(gpus, most) + 1):
        if gpus % parts == 0:
            yield replace(
                spec, flavor=None, nodes=parts, gpus_per_node=gpus // parts, cores_per_node=-(-cores // parts),
                memory_mib_per_node=-(-memory // parts),
            )  # fmt: skip


def excluded_by(spec: JobSpec, node: NodeView) -> str:
    """Return why the request excludes the node even if it were empty; "" if it does not."""
    if node.partition != spec.partition:
        return f"is in partition {node.partition}"
    if spec.nodelist and node.name not in spec.nodelist:
        return "not in its nodelist"
    if node.name in spec.exclude:
        return "excluded by the job"
    if spec.gpu_types and node.gpu_type not in spec.gpu_types:
        return f"has {gpus_called(node.gpu_type)}, not {listed_types(spec.gpu_types)}"
    if spec.exclusive and (len(node.gpus), node.cores, node.memory_mib) != need(spec):
        return "differs in size from the whole nodes it requests"
    return ""


def barred(job: PendingView, node: NodeView) -> str:
    """Return why the job may never use the node even if it were empty; "" if it may."""
    if why := excluded_by(job.spec, node):
        return why
    if job.reserved is not None and all(reservation.name != job.reserved.name for reservation in node.reservations):
        return f"is not in {job.reserved.what}"
    return "an earlier attempt failed here" if node.name in job.excluded_nodes else ""


def closed_reason(job: PendingView, node: NodeView, now: float) -> str:
    """Return why the job may not start on the node now even if it were empty; "" if it may."""
    return barred(job, node) or (closed_text(job, node, now) if node.reservations else "")


def with_held(usage: Mapping[str, float], held: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return recent GPU hours by `leaf_of` user and group, plus one for each GPU ``held``: (leaf, GPUs).

    Without the second part, a user whose jobs have just begun would look idle until usage has accrued.
    """
    found = dict(usage)
    for leaf, gpus in held:
        found[leaf] = found.get(leaf, 0.0) + gpus
    return found


def held_gpus(running: Iterable[RunningView]) -> Iterator[tuple[RunningView, float]]:
    """Yield running jobs with their GPUs: a slice counts as its share, and of a GPU that two have each has half."""
    running = list(running)
    partners = {job.id: job for job in running if job.partner}
    for job in running:
        gpus, other = gpus_counted(job.allocation.gpus, job.spec.profile if job.spec else ""), partners.get(job.partner)
        if other is not None and job.shares and other.shares:
            gpus = len(job.shares) - len(set(job.shares) & set(other.shares)) / 2
        yield job, gpus


def usage_of(snapshot: Snapshot) -> dict[str, float]:
    """Return fair-share usage: user -> recent GPU hours (``snapshot.usage``, decayed) plus one per GPU held now.

    With groups: `leaf_of` user and group -> place by their tree (`fairtree`).
    """
    held = ((leaf_of(job.user, job.group), gpus) for job, gpus in held_gpus(snapshot.running))
    usage = with_held(snapshot.usage, held)
    if not snapshot.groups or not any(policy.order == "fairshare" for policy in _asked(snapshot)):
        return usage
    import numpy as np  # explaining needs neither this nor compiled code

    from gpusched.sched.fairtree import places, tree_of

    leaves = list(usage.keys() | {leaf_of(job.user, job.group) for job in snapshot.pending})
    tree = tree_of(snapshot.groups, [split_leaf(leaf) for leaf in leaves])
    found = places(tree, np.array([usage.get(leaf, 0.0) for leaf in leaves], np.float64))
    return {leaf: float(place) for leaf, place in zip(leaves, found.tolist(), strict=True)}


def _asked(snapshot: Snapshot) -> list[PolicySpec]:
    return [policy.fallback or policy for policy in snapshot.policies.values()]  # the fallback may have to decide


def total_of(node: NodeView) -> Amounts:
    """Return a node's declared resources."""
    return len(node.gpus), node.cores, node.memory_mib


def shortfall_of(node: NodeView, free: Amounts, needs: Amounts) -> tuple[Literal["gpus", "cores", "memory"], str]:
    """Return (dimension, text) of a node that does not fit: ``2 of 8 GPUs free, needs 4 (3 held by jobs, 1 LOST)``."""
    total = total_of(node)
    if free[0] < needs[0]:
        what = gpus_of(total[0], profile_of(node.name))
        return "gpus", f"{free[0]} of {what} free, needs {needs[0]}{_gpus_gone(node, free[0])}"
    if free[1] < needs[1]:
        held = f" ({total[1] - free[1]} held by jobs)" if total[1] > free[1] else ""
        return "cores", f"{max(0, free[1])} of {count_of(total[1], 'core')} free, needs {needs[1]}{held}"
    held = f" ({format_memory(total[2] - free[2])} held by jobs)" if total[2] > free[2] else ""
    text = f"{format_memory(max(0, free[2]))} of {format_memory(total[2])} memory free, needs {format_memory(needs[2])}"
    return "memory", text + held


def _gpus_gone(node: NodeView, free: int) -> str:
    """Return what holds the GPUs that are not free: `` (3 held by jobs, 2 foreign: pid 4711 of alice, 1 LOST)``."""
    blocked = {g: why for g, why in sorted(node.blocked.items()) if g in node.gpus}
    held = len(node.gpus) - len(blocked) - free
    gone = [f"{held} held by jobs"] if held else []
    kinds: dict[str, list[str]] = {}
    for why in blocked.values():
        kind, _, detail = why.partition(": ")
        kinds.setdefault(kind, []).append(detail)
    for kind, details in kinds.items():
        known = list(dict.fromkeys(d for d in details if d))
        if kind != "BUSY":  # how to repair it is said elsewhere
            known = [d.partition(";")[0] for d in known if kind == "UNUSABLE"]
        gone.append(f"{len(details)} {'foreign' if kind == 'BUSY' else kind}" + (f": {listed(known)}" if known else ""))
    return f" ({', '.join(gone)})" if gone else ""
