"""The messages that explain why a job waits; plain Python, shared by `decide` and `explain`."""

from __future__ import annotations

from collections.abc import Iterable

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.slices import gpu_label, is_slice
from gpusched.model.snapshot import NodeView
from gpusched.model.units import count_of, format_duration, format_memory, gpus_of
from gpusched.sched.slicenames import base_of, profile_of

ALLOWED, GPUS, CORES, MEMORY = 0, 1, 2, 3
ELSEWHERE = Reason(
    code=ReasonCode.POLICY,
    message="fits now, but is kept for a faster GPU type, or the GPUs for other jobs",
)
HELD_BACK = Reason(
    code=ReasonCode.POLICY,
    message="fits now, but the agent keeps the servers free for jobs that it expects to use them better",
)


def listed(words: list[str], most: int = 3) -> str:
    """Format as ``a, b, c and 4 more``."""
    shown = ", ".join(words[:most])
    return f"{shown} and {len(words) - most} more" if len(words) > most else shown


def gpus_called(gpu_type: str) -> str:
    """Format as ``V100 GPUs``; without a type in the inventory, say so."""
    return f"{gpu_type} GPUs" if gpu_type else "GPUs of a type the inventory does not name"


def listed_types(names: tuple[str, ...]) -> str:
    """Format as ``A100 or V100``."""
    return " or ".join(names)


def not_available(nodes: Iterable[NodeView]) -> str:
    """Return which of these nodes are unavailable: ``dgx002 (DRAINED: fan), GPU 3 of dgx001 (BUSY: ...)``."""
    words = []
    for node in nodes:
        if not node.available:
            words.append(f"{base_of(node.name)} ({node.unavailable_reason or 'not available'})")
        else:
            own = ((g, why) for g, why in sorted(node.blocked.items()) if g in node.gpus)
            words += [f"{called(g, node.name)} ({why})" for g, why in own]
    return listed(words)


def called(number: int, node: str) -> str:
    """Return ``GPU 3 of dgx001``, or ``slice 3:1g.10gb@4 of dgx001``; ``node``: as in a split snapshot."""
    what = f"slice {gpu_label(number, profile_of(node))}" if is_slice(number) else f"GPU {number}"
    return f"{what} of {base_of(node)}"


def amount(dimension: int, value: int, profile: str = "") -> str:
    """Format an amount with its unit: ``4 GPUs``, ``2 slices of 1g.10gb``, ``16 cores``, ``64G of memory``."""
    if dimension == MEMORY:
        return f"{format_memory(value)} of memory"
    return gpus_of(value, profile) if dimension == GPUS else count_of(value, "core")


def shortage(
    verb: str, free: str, dimension: int, parts: int, needs: tuple[int, int, int], count: int, nearest: str, has: int,
    profile: str = "",
) -> str:  # fmt: skip
    """Return what is short, with figures: ``waits for 4 GPUs on one node; most free on one node: 2 (dgx001)``.

    Args:
        verb: ``waits for`` or ``needs``.
        free: What the figures say of the nodes: ``free``, ``usable`` or ``there``.
        dimension: ALLOWED, GPUS, CORES or MEMORY, see `fit.shortfall`.
        parts: Nodes asked for.
        needs: GPUs, cores and MiB per node.
        count: Nodes that have enough of it.
        nearest: The node that comes nearest, or "".
        has: What that one has.
        profile: The GPUs are slices of it.
    """
    if dimension == ALLOWED:
        exist = ("exists" if count == 1 else "exist") if free == "there" else free
        return f"{verb} {count_of(parts, 'node')} it may use; {count} {exist}"
    need = amount(dimension, needs[dimension - 1], profile)
    gpus = f" with {amount(GPUS, needs[0], profile)}" if dimension > GPUS and needs[0] else ""
    free = "" if free == "there" else f" {free}"
    if parts > 1:
        have = "1 node has" if count == 1 else f"{count or 'no'} nodes have"
        return f"{verb} {need}{gpus} on each of {parts} nodes; {have} enough{free}"
    best = (format_memory(max(has, 0)) if dimension == MEMORY else str(max(has, 0))) if nearest else "none"
    return f"{verb} {need}{gpus} on one node; most{free} on one node: {best}" + (f" ({nearest})" if nearest else "")


def scattered(verb: str, free: str, parts: int, needs: tuple[int, int, int], most: int, profile: str = "") -> str:
    """Report enough nodes, but not in one rack: ``waits for 2 nodes in one rack, each with 4 GPUs; ...``."""
    each = amount(GPUS, needs[0], profile) if needs[0] else amount(CORES, needs[1])
    free = "" if free == "there" else f" {free}"
    return f"{verb} {count_of(parts, 'node')} in one rack, each with {each}; most{free} in one rack: {most}"


def jobs_ahead(ahead: int) -> str:
    """Return how many jobs are ahead, `rounded`."""
    verb = "job of equal or higher priority is" if ahead == 1 else "jobs of equal or higher priority are"
    return f"{ahead} {verb} ahead of it" if ahead < 100 else f"at least {rounded(ahead)} {verb} ahead of it"


def rounded(ahead: int) -> int:
    """Round down to two digits above 100, so that many jobs share few messages from cycle to cycle."""
    step = rounding_step(ahead)
    return ahead // step * step


def rounding_step(ahead: int) -> int:
    """Return the unit that `rounded` rounds down to."""
    step = 1
    while ahead >= 100 * step:
        step *= 10
    return step


def starts_in(seconds: float) -> str:
    """Return ``; by the time limits it can start in 2:05:00``, or nothing if unknown."""
    return f"; can start within {format_duration(seconds)}, by time limits" if seconds != float("inf") else ""


def keeps_room(head: str) -> str:
    """Return why a fitting job is held back while the head could start but waits for a better place."""
    return f"fits now, but would run past the start of job {head}, which waits for a better place"


DELAYS_SOME = "fits now, but would delay a job before it"


def would_delay(head: str, seconds: float) -> str:
    """Return why a fitting job is held back."""
    return f"fits now, but would delay job {head}, which can start in {format_duration(seconds)}"
