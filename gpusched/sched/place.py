"""Node selection: first fit, best fit, spread, by racks, random fit, and the naive draw of the GIST paper."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import (
    BEST_FIT,
    FIRST_FIT,
    RACK,
    WHOLE,
    Flags,
    Ints,
    PlacementRequest,
    Records,
    Resources,
    Scratch,
    SharedGpus,
    Words,
)

_CORES_BITS, _MEMORY_BITS = 20, 32
_GPU_SHIFT = _CORES_BITS + _MEMORY_BITS
_S13, _S7, _S17, _S32 = np.uint64(13), np.uint64(7), np.uint64(17), np.uint64(32)


@jit
def node_fits(resources: Resources, masks: Flags, request: PlacementRequest, node: int) -> bool:
    """Return whether ``node`` can host one part now."""
    return (
        gives_gpus(resources.shared, resources.gpus[node], request, node)
        and resources.cores[node] >= request.cores
        and resources.memory[node] >= request.memory
        and (request.mask < 0 or masks[request.mask, node] != 0)
    )


@jit
def sort_key(rule: int, gpus: int, cores: int, memory: int, request: PlacementRequest) -> int:
    """Return a node's sort key by the rule, smaller is better, from its free GPUs, cores and MiB.

    BEST_FIT, RACK: least left over of GPUs, then of cores, then of memory. SPREAD: most free, in the same order. The
    three are compared exactly, one after the other, so they need no weights and no common unit.
    """
    if rule == BEST_FIT or rule == RACK:
        left = (gpus - request.gpus) << _GPU_SHIFT
        return left + ((cores - request.cores) << _MEMORY_BITS) + (memory - request.memory)
    return -((gpus << _GPU_SHIFT) + (cores << _MEMORY_BITS) + memory)


@jit
def choose(resources: Resources, masks: Flags, request: PlacementRequest, rule: int, scratch: Scratch) -> bool:
    """Pick ``request.parts`` nodes that fit, the first in the rule's order; ties go to the lower row.

    Returns:
        Whether there were enough; then ``scratch.chosen[:parts]`` holds them in the rule's order.
    """
    if is_part(request.milli):
        return _choose_one(resources, masks, request, rule, scratch)
    if by_rack(scratch.racks, rule, request):
        return _choose_by_rack(scratch.racks, resources, masks, request, rule, scratch)
    count = 0
    for node in range(request.lo, request.hi):
        gpus, cores, memory = resources.gpus[node], resources.cores[node], resources.memory[node]
        if gpus < request.gpus or cores < request.cores or memory < request.memory:
            continue
        if request.mask >= 0 and masks[request.mask, node] == 0:
            continue
        if rule == FIRST_FIT:
            scratch.chosen[count] = node
            count += 1
            if count == request.parts:
                return True
            continue
        key = sort_key(rule, gpus, cores, memory, request)
        if count < request.parts:
            count += 1
        elif key >= scratch.keys[count - 1]:
            continue
        _insert(scratch.keys, scratch.chosen, node, key, 0, count - 1)
    return count == request.parts


@jit
def _insert(keys: Ints, chosen: Ints, node: int, key: int, first: int, at: int) -> None:
    """Insert a node into ``chosen[first : at + 1]`` by its key, replacing the one at ``at``."""
    while at > first and keys[at - 1] > key:
        keys[at] = keys[at - 1]
        chosen[at] = chosen[at - 1]
        at -= 1
    keys[at] = key
    chosen[at] = node


# Parts of GPUs; functions take `PlacementRequest.milli` and `Resources.shared` apart, as those with racks do below.


@jit
def is_part(milli: int | None) -> bool:
    """Return whether a request is for a part of one GPU."""
    if milli is None:
        return False
    return milli < WHOLE


@jit
def gives_gpus(shared: SharedGpus | None, free: int, request: PlacementRequest, node: int) -> bool:
    """Return whether a node with so many free GPUs has those of a request."""
    if shared is None:
        return free >= request.gpus
    return free >= request.gpus or (free >= 0 and with_room(shared, request.milli, node) >= 0)


@jit
def with_room(shared: SharedGpus | None, milli: int | None, node: int) -> int:
    """Return the GPU of a node that others share on which such a part leaves the least; -1: none."""
    if shared is None:
        return -1
    if milli is None:
        return -1
    best, least = -1, WHOLE
    for gpu in range(shared.first[node], shared.first[node + 1]):
        if milli <= shared.room[gpu] < least:
            best, least = gpu, shared.room[gpu]
    return best


@jit
def _choose_one(resources: Resources, masks: Flags, request: PlacementRequest, rule: int, scratch: Scratch) -> bool:
    """Choose one node, for a part of a GPU or by RACK.

    Best fit is by what is left of the GPU, then as for others. RACK: the node with least GPUs left over, among equals
    the one in the rack with the fewest free, then the best fit. Ties go to the lower row.
    """
    best, least = -1, (0, 0, 0, 0)
    if rule == RACK:
        max_in_rack(scratch.racks, resources, masks, request)
    for node in range(request.lo, request.hi):
        if not node_fits(resources, masks, request, node):
            continue
        if rule == FIRST_FIT:
            best = node
            break
        gpus, left, free = resources.gpus[node], 0, 0
        if rule == BEST_FIT or rule == RACK:
            left = _left_of_gpu(resources.shared, request.milli, node)
        if rule == RACK:
            free = _free_in_rack(scratch.racks, node)
        fit = sort_key(rule, gpus, resources.cores[node], resources.memory[node], request)
        key = (left, gpus if rule == RACK else 0, free, fit)
        if best < 0 or key < least:
            best, least = node, key
    scratch.chosen[0] = best
    return best >= 0


@jit
def _left_of_gpu(shared: SharedGpus | None, milli: int | None, node: int) -> int:
    if milli is None:
        return 0
    gpu = with_room(shared, milli, node)
    if shared is None or gpu < 0:
        return WHOLE - milli
    return int(shared.room[gpu] - milli)


# With racks; functions take `Scratch.racks` apart: where it is None, numba compiles only what is left without it.


@jit
def by_rack(racks: Records | None, rule: int, request: PlacementRequest) -> bool:
    """Return whether placement depends on racks."""
    if racks is None:
        return False
    return rule == RACK or request.spread != 0


@jit
def _choose_by_rack(
    racks: Records | None, resources: Resources, masks: Flags, request: PlacementRequest, rule: int, scratch: Scratch
) -> bool:
    """Choose from as few racks as can hold the parts, from one if ``request.spread``.

    One rack that holds all parts that are left, and has the fewest GPUs free; where none does, the one that holds most
    of them. Within a rack in the rule's order; ties go to the lower row.
    """
    if racks is None:
        return False
    if request.parts == 1 and rule == RACK:
        return _choose_one(resources, masks, request, rule, scratch)
    max_in_rack(racks, resources, masks, request)
    found = 0
    while found < request.parts:
        best, left = -1, request.parts - found
        for node in range(request.lo, request.hi):
            rack = racks[node]["number"]
            if racks[rack]["fits"] > 0 and (best < 0 or _nearer(racks, rack, best, left)):
                best = rack
        if best < 0 or (request.spread != 0 and racks[best]["fits"] < left):
            return False
        found = _fill_from(racks, resources, masks, request, rule, best, found, scratch)
        racks[best]["fits"] = 0
    return True


@jit
def max_in_rack(racks: Records | None, resources: Resources, masks: Flags, request: PlacementRequest) -> int:
    """Return the most fitting nodes in one rack; set ``racks`` for the racks of the request's partition."""
    most = 0
    if racks is None:
        return most
    for node in range(request.lo, request.hi):
        room = racks[racks[node]["number"]]
        room["fits"] = 0
        room["free"] = 0
    for node in range(request.lo, request.hi):
        racks[racks[node]["number"]]["free"] += max(0, resources.gpus[node])
        if node_fits(resources, masks, request, node):
            most = max(most, count_fit(racks, node))
    return most


@jit
def count_fit(racks: Records | None, node: int) -> int:
    """Count a fitting node; return the number in its rack."""
    if racks is None:
        return 0
    room = racks[racks[node]["number"]]
    room["fits"] += 1
    return int(room["fits"])


@jit
def _free_in_rack(racks: Records | None, node: int) -> int:
    if racks is None:
        return 0
    return int(racks[racks[node]["number"]]["free"])


@jit
def _nearer(racks: Records, rack: int, other: int, left: int) -> bool:
    """Return whether a rack is preferred to another for the ``left`` parts."""
    holds, other_holds = racks[rack]["fits"] >= left, racks[other]["fits"] >= left
    if holds != other_holds:
        return bool(holds)
    if holds:
        return bool(racks[rack]["free"] < racks[other]["free"])
    return bool(racks[rack]["fits"] > racks[other]["fits"])


@jit
def _fill_from(
    racks: Records,
    resources: Resources,
    masks: Flags,
    request: PlacementRequest,
    rule: int,
    rack: int,
    found: int,
    scratch: Scratch,
) -> int:
    """Append nodes of a rack to the ``found`` in ``scratch.chosen``, in the rule's order; return the count."""
    first, count = found, found
    for node in range(request.lo, request.hi):
        if racks[node]["number"] != rack or not node_fits(resources, masks, request, node):
            continue
        key = node
        if rule != FIRST_FIT:
            key = sort_key(rule, resources.gpus[node], resources.cores[node], resources.memory[node], request)
        if count < request.parts:
            count += 1
        elif key >= scratch.keys[count - 1]:
            continue
        _insert(scratch.keys, scratch.chosen, node, key, first, count - 1)
    return count


@jit
def next_random(state: Words, below: int) -> int:
    """Return ``0 <= x < below`` (below < 2**32) from xorshift64 (Marsaglia 2003); ``state: uint64[1]``, not 0.

    Without multiplication that overflows, so that it is the same as plain Python.
    """
    word = state[0]
    word ^= word << _S13
    word ^= word >> _S7
    word ^= word << _S17
    state[0] = word
    return int(((word >> _S32) * np.uint64(below)) >> _S32)


@jit
def draw(resources: Resources, masks: Flags, request: PlacementRequest, rng: Words, scratch: Scratch) -> bool:
    """Draw nodes by the naive placement as printed under Fig. 5 of Narantuya et al. (CMC 2022).

    Draws ``request.parts`` distinct nodes uniformly among those available and allowed, full or not.

    Returns:
        Whether the job fits on what was drawn (``scratch.chosen[:parts]``); if not, it goes back to the queue.
    """
    pool = 0
    for node in range(request.lo, request.hi):
        if resources.gpus[node] >= 0 and (request.mask < 0 or masks[request.mask, node] != 0):
            scratch.keys[pool] = node
            pool += 1
    if not _draw_from(pool, request.parts, rng, scratch):
        return False
    for part in range(request.parts):
        if not node_fits(resources, masks, request, scratch.chosen[part]):
            return False
    return True


@jit
def draw_fitting(resources: Resources, masks: Flags, request: PlacementRequest, rng: Words, scratch: Scratch) -> bool:
    """Draw ``request.parts`` distinct nodes uniformly among those that fit now.

    Returns:
        Whether there were enough; only then is anything drawn. ``scratch.chosen[:parts]`` holds them.
    """
    pool = 0
    for node in range(request.lo, request.hi):
        if node_fits(resources, masks, request, node):
            scratch.keys[pool] = node
            pool += 1
    return _draw_from(pool, request.parts, rng, scratch)


@jit
def _draw_from(pool: int, parts: int, rng: Words, scratch: Scratch) -> bool:
    """Draw so many of ``scratch.keys[:pool]`` into ``scratch.chosen``; return whether there are enough."""
    if pool < parts:
        return False
    for part in range(parts):
        at = part + next_random(rng, pool - part)
        scratch.chosen[part] = scratch.keys[at]
        scratch.keys[at] = scratch.keys[part]
    return True
