"""From the passes' codes to a reason for every job that waits; equal reasons are one object."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays, Waiting, racks_for_ask
from gpusched.sched.eligible import ARRAY_FULL
from gpusched.sched.fit import request_of, shortfall
from gpusched.sched.place import most_in_rack
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
    new_scratch,
)
from gpusched.sched.text import (
    ELSEWHERE,
    HELD_BACK,
    before_it,
    keeps_room,
    not_available,
    rounded,
    scattered,
    shortage,
    starts_in,
    would_delay,
)
from gpusched.sched.topology.spread import Ask, gives_up, splits, waits_text

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
        same_for_all = {
            ARRAY_LIMIT: ARRAY_FULL,
            BACKFILL: self._delayed(block),
            POLICY: HELD_BACK if block.policy.agent else _UNLUCKY,
            MAPPING: ELSEWHERE,
        }
        ahead = 0
        for job in queue:
            code = codes[job]
            if code == STARTED:
                continue
            if code == PRIORITY:
                reason = self._before(ahead)
            elif code in same_for_all:
                reason = same_for_all[code]
            else:
                reason = self._by_shape.get((code, shapes[job])) or self._short(code, shapes[job], job, block)
            ahead += 1 + views[job].behind if code >= RESOURCES else 0
            reasons[views[job].id] = reason

    def _delayed(self, block: Block) -> Reason:
        if block.head < 0 or block.shadow == float("inf"):
            return Reason(code=ReasonCode.BACKFILL)
        head = self._waiting.views[block.head].id
        if self._codes[block.head] == POLICY and block.policy.place == "contention":
            return Reason(code=ReasonCode.BACKFILL, message=keeps_room(head))
        return Reason(code=ReasonCode.BACKFILL, message=would_delay(head, block.shadow - self._now))

    def _before(self, ahead: int) -> Reason:
        figure = rounded(ahead)
        if figure not in self._ahead:
            self._ahead[figure] = Reason(code=ReasonCode.PRIORITY, message=before_it(ahead))
        return self._ahead[figure]

    def _short(self, code: int, shape: int, job: int, block: Block) -> Reason:
        """The reason of RESOURCES, NOT_AVAILABLE and BAD_CONSTRAINTS, with figures; shared but for the head's."""
        if code == BAD_CONSTRAINTS:
            message = self._shortage("needs", "there", self._world.total, shape)
            reason = Reason(code=ReasonCode.BAD_CONSTRAINTS, message=message)
        elif code == NOT_AVAILABLE:
            message = self._shortage("needs", "usable", self._world.usable, shape)
            requests = self._waiting.requests
            missing = not_available(self._world.nodes[requests.lo[shape] : requests.hi[shape]])
            reason = Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=f"{message}; not available: {missing}")
        else:
            waits = self._waits(shape, job, block)
            message = waits or self._shortage("waits for", "free", self._world.resources, shape)
            if job == block.head:
                return Reason(code=ReasonCode.RESOURCES, message=message + starts_in(block.shadow - self._now))
            reason = Reason(code=ReasonCode.RESOURCES, message=message)
            if waits:  # another one's wait ends at another time
                return reason
        self._by_shape[code, shape] = reason
        return reason

    def _waits(self, shape: int, job: int, block: Block) -> str:
        """Of a job that waits for one rack, that it does; else ""."""
        view, requests, jobs = self._waiting.views[job], self._waiting.requests, self._waiting.jobs
        request = request_of(requests, shape)
        ask = Ask(request.parts, request.gpus, request.cores, request.memory, request.spread != 0)
        asked = (ask,) if requests.looser is None or requests.looser[shape] < 0 else (ask, ask)
        until = gives_up(view, block.policy, asked, self._now)
        if until is None:
            return ""
        found = (
            racks_for_ask(self._world.resources, self._world, jobs.masks, request.mask, view.spec.partition, looser)
            for looser in splits(view.spec)
        )
        on = next((racks for racks in found if racks is not None), None)
        return waits_text(until, self._now, block.policy, view, on)

    def _shortage(self, verb: str, free: str, resources: Resources, shape: int) -> str:
        request = request_of(self._waiting.requests, shape)
        dimension, count, nearest = shortfall(resources, self._waiting.jobs.masks, request)
        has = int(resources[dimension - 1][nearest]) if nearest >= 0 else 0  # of GPUs, cores or memory
        needs = (int(request.gpus), int(request.cores), int(request.memory))
        if dimension < 0:
            racks = new_scratch(len(self._world.nodes), 0, self._world.rack).racks
            most = int(most_in_rack(racks, resources, self._waiting.jobs.masks, request))
            return scattered(verb, free, int(request.parts), needs, most)
        name = self._world.nodes[nearest].name if nearest >= 0 else ""
        return shortage(verb, free, dimension, int(request.parts), needs, int(count), name, has)
