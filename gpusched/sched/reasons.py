"""From the passes' codes to a reason for every job that waits; equal reasons are one object."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays, Waiting
from gpusched.sched.eligible import ARRAY_FULL
from gpusched.sched.fit import request_of, shortfall
from gpusched.sched.state import (
    ARRAY_LIMIT,
    BACKFILL,
    BAD_CONSTRAINTS,
    MAPPING,
    NOT_AVAILABLE,
    POLICY,
    PRIORITY,
    RESOURCES,
    STARTED,
    Resources,
)
from gpusched.sched.text import (
    CORES,
    ELSEWHERE,
    GPUS,
    HELD_BACK,
    before_it,
    listed,
    rounded,
    shortage,
    starts_in,
    would_delay,
)

_UNLUCKY = Reason(
    code=ReasonCode.POLICY,
    message="the naive placement drew a node on which it does not fit; it draws again next cycle",
)


class Block(NamedTuple):
    """What stopped one partition's queue: the policy, the first job that did not start (-1), when it can (seconds)."""

    policy: PolicySpec
    head: int
    shadow: float


class Verdicts:
    """Turns one snapshot's codes (``codes[job]``) into reasons."""

    def __init__(self, snapshot: Snapshot, world: NodeArrays, waiting: Waiting, codes: list[int]) -> None:
        self._now = snapshot.now
        self._world, self._waiting, self._codes = world, waiting, codes
        self._shapes = waiting.jobs.shape.tolist()
        self._by_shape: dict[tuple[int, int], Reason] = {}
        self._ahead: dict[int, Reason] = {}

    def add(self, queue: list[int], block: Block, reasons: dict[str, Reason]) -> None:
        """Writes the reasons of one partition's queue."""
        views, codes, shapes = self._waiting.views, self._codes, self._shapes
        delayed = self._delayed(block)
        ahead = 0
        for job in queue:
            code = codes[job]
            if code == STARTED:
                continue
            if code == PRIORITY:
                reason = self._before(ahead)
            elif code == ARRAY_LIMIT:
                reason = ARRAY_FULL
            elif code == BACKFILL:
                reason = delayed
            elif code == POLICY:
                reason = HELD_BACK if block.policy.agent else _UNLUCKY
            elif code == MAPPING:
                reason = ELSEWHERE
            else:
                reason = self._by_shape.get((code, shapes[job])) or self._short(code, shapes[job], job, block)
            ahead += code >= RESOURCES
            reasons[views[job].id] = reason

    def _delayed(self, block: Block) -> Reason:
        if block.head < 0 or block.shadow == float("inf"):
            return Reason(code=ReasonCode.BACKFILL)
        head = self._waiting.views[block.head].id
        return Reason(code=ReasonCode.BACKFILL, message=would_delay(head, block.shadow - self._now))

    def _before(self, ahead: int) -> Reason:
        figure = rounded(ahead)
        reason = self._ahead.get(figure)
        if reason is None:
            reason = self._ahead[figure] = Reason(code=ReasonCode.PRIORITY, message=before_it(ahead))
        return reason

    def _short(self, code: int, shape: int, job: int, block: Block) -> Reason:
        """The reason of RESOURCES, NOT_AVAILABLE and BAD_CONSTRAINTS, with figures; shared but for the head's."""
        if code == BAD_CONSTRAINTS:
            message = self._shortage("needs", "there", self._world.total, shape)
            reason = Reason(code=ReasonCode.BAD_CONSTRAINTS, message=message)
        elif code == NOT_AVAILABLE:
            message = self._shortage("needs", "usable", self._world.usable, shape)
            missing = not_available(self._world, *self._span(shape))
            reason = Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=f"{message}; not available: {missing}")
        else:
            message = self._shortage("waits for", "free", self._world.resources, shape)
            if job == block.head:
                return Reason(code=ReasonCode.RESOURCES, message=message + starts_in(block.shadow - self._now))
            reason = Reason(code=ReasonCode.RESOURCES, message=message)
        self._by_shape[code, shape] = reason
        return reason

    def _span(self, shape: int) -> tuple[int, int]:
        return int(self._waiting.requests.lo[shape]), int(self._waiting.requests.hi[shape])

    def _shortage(self, verb: str, free: str, resources: Resources, shape: int) -> str:
        request = request_of(self._waiting.requests, shape)
        dimension, count, nearest = shortfall(resources, self._waiting.jobs.masks, request)
        has = 0
        if nearest >= 0:
            column = (
                resources.gpus if dimension == GPUS else resources.cores if dimension == CORES else resources.memory
            )
            has = int(column[nearest])
        needs = (int(request.gpus), int(request.cores), int(request.memory))
        name = self._world.nodes[nearest].name if nearest >= 0 else ""
        return shortage(verb, free, dimension, int(request.parts), needs, int(count), name, has)


def not_available(world: NodeArrays, lo: int, hi: int) -> str:
    """What of these rows is not there for now: ``dgx002 (DRAINED: fan), GPU 3 of dgx001 (BUSY: ...)``."""
    words = []
    for node in world.nodes[lo:hi]:
        if not node.available:
            words.append(f"{node.name} ({node.unavailable_reason or 'not available'})")
        else:
            words += [f"GPU {g} of {node.name} ({why})" for g, why in sorted(node.blocked.items()) if g in node.gpus]
    return listed(words)
