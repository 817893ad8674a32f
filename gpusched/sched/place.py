"""Which nodes: first fit, best fit, spread, random fit, and the naive draw of the GIST paper."""

from __future__ import annotations

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.state import BEST_FIT, FIRST_FIT, Flags, Request, Resources, Scratch, Words

_CORES_BITS, _MEMORY_BITS = 20, 32
_GPU_SHIFT = _CORES_BITS + _MEMORY_BITS
_S13, _S7, _S17, _S32 = np.uint64(13), np.uint64(7), np.uint64(17), np.uint64(32)


@jit
def node_fits(resources: Resources, masks: Flags, request: Request, node: int) -> bool:
    """Whether ``node`` can give one part now."""
    return (
        resources.gpus[node] >= request.gpus
        and resources.cores[node] >= request.cores
        and resources.memory[node] >= request.memory
        and (request.mask < 0 or masks[request.mask, node] != 0)
    )


@jit
def sort_key(rule: int, gpus: int, cores: int, memory: int, request: Request) -> int:
    """A node's place in the rule's order, smaller is better, from what it has free (GPUs, cores, MiB).

    BEST_FIT: least left over of GPUs, then of cores, then of memory. SPREAD: most free, in the same order. The three
    are compared exactly, one after the other, so they need no weights and no common unit.
    """
    if rule == BEST_FIT:
        left = (gpus - request.gpus) << _GPU_SHIFT
        return left + ((cores - request.cores) << _MEMORY_BITS) + (memory - request.memory)
    return -((gpus << _GPU_SHIFT) + (cores << _MEMORY_BITS) + memory)


@jit
def choose(resources: Resources, masks: Flags, request: Request, rule: int, scratch: Scratch) -> bool:
    """Picks ``request.parts`` nodes that fit, the first in the rule's order; ties go to the lower row.

    Returns:
        Whether there were enough; then ``scratch.chosen[:parts]`` holds them in the rule's order.
    """
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
        at = count - 1
        while at > 0 and scratch.keys[at - 1] > key:
            scratch.keys[at] = scratch.keys[at - 1]
            scratch.chosen[at] = scratch.chosen[at - 1]
            at -= 1
        scratch.keys[at] = key
        scratch.chosen[at] = node
    return count == request.parts


@jit
def next_random(state: Words, below: int) -> int:
    """A number ``0 <= x < below`` (below < 2**32) from xorshift64 (Marsaglia 2003); ``state: uint64[1]``, not 0.

    Without multiplication that overflows, so that it is the same as plain Python.
    """
    word = state[0]
    word ^= word << _S13
    word ^= word >> _S7
    word ^= word << _S17
    state[0] = word
    return int(((word >> _S32) * np.uint64(below)) >> _S32)


@jit
def draw(resources: Resources, masks: Flags, request: Request, rng: Words, scratch: Scratch) -> bool:
    """The naive placement as printed under Fig. 5 of Narantuya et al. (CMC 2022).

    Draws ``request.parts`` distinct nodes uniformly among those available and allowed, full or not.

    Returns:
        Whether the job fits on what was drawn (``scratch.chosen[:parts]``); if not, it goes back to the queue.
    """
    pool = 0
    for node in range(request.lo, request.hi):
        if resources.gpus[node] >= 0 and (request.mask < 0 or masks[request.mask, node] != 0):
            scratch.keys[pool] = node
            pool += 1
    if pool < request.parts:
        return False
    fits = True
    for part in range(request.parts):
        at = part + next_random(rng, pool - part)
        node = scratch.keys[at]
        scratch.keys[at] = scratch.keys[part]
        scratch.chosen[part] = node
        fits = fits and node_fits(resources, masks, request, node)
    return fits


@jit
def draw_fitting(resources: Resources, masks: Flags, request: Request, rng: Words, scratch: Scratch) -> bool:
    """Random fit: ``request.parts`` distinct nodes drawn uniformly among those that fit now.

    Returns:
        Whether there were enough; only then is anything drawn. ``scratch.chosen[:parts]`` holds them.
    """
    pool = 0
    for node in range(request.lo, request.hi):
        if node_fits(resources, masks, request, node):
            scratch.keys[pool] = node
            pool += 1
    if pool < request.parts:
        return False
    for part in range(request.parts):
        at = part + next_random(rng, pool - part)
        scratch.chosen[part] = scratch.keys[at]
        scratch.keys[at] = scratch.keys[part]
    return True
