"""Translation of the passes' codes into a reason for every pending job; equal reasons share one object."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from gpusched.model.plan import Reason, ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays, PendingArrays, racks_for_ask
from gpusched.sched.eligible import ARRAY_FULL
from gpusched.sched.fit import request_of, shortfall, unreserved, unreserved_row
from gpusched.sched.limits import LimitReasons
from gpusched.sched.place import max_in_rack
from gpusched.sched.reservations.rules import reserved_text
from gpusched.sched.slicenames import base_of
from gpusched.sched.state import (
    BACKFILL,
    BAD_CONSTRAINTS,
    LIMIT,
    MAPPING,
    NOT_AVAILABLE,
    POLICY,
    PRIORITY,
    RESERVED,
    RESOURCES,
    STARTED,
    Resources,
    new_scratch,
)
from gpusched.sched.text import (
    DELAYS_SOME,
    ELSEWHERE,
    HELD_BACK,
    jobs_ahead,
    keeps_room,
    not_available,
    rounding_step,
    scattered,
    shortage,
    starts_in,
    would_delay,
)
from gpusched.sched.topology.spread import (
    SpreadRequest,
    current_requests,
    rack_wait_text,
    rack_wait_until,
    split_requests,
    wait_ends_at,
)

_UNLUCKY = Reason(
    code=ReasonCode.POLICY,
    message="the naive placement drew a node that is too small; it draws again in the next cycle",
)


class QueueBlock(NamedTuple):
    """What blocked a partition's queue: the policy, the first job not started (-1), its start (seconds)."""

    policy: PolicySpec
    head: int
    shadow: float


def holds_back(code: int) -> bool:
    """Return whether jobs with this reason delay others as they wait."""
    return RESOURCES <= code < RESERVED


class Verdicts:
    """The reasons for one snapshot's codes (``codes[job]``)."""

    def __init__(self, snapshot: Snapshot, world: NodeArrays, waiting: PendingArrays, codes: list[int]) -> None:
        self._now = snapshot.now
        self._world, self._waiting, self._codes = world, waiting, codes
        self._holding = {code for code in set(codes) if holds_back(code)}
        self._shapes, self._lo = waiting.jobs.shape.tolist(), waiting.requests.lo.tolist()
        self._by_shape: dict[tuple[int, int, bool], Reason] = {}
        self._limits, self._bounds = LimitReasons(snapshot), len(snapshot.bounds)
        self._accounts, self._links = waiting.jobs.account, waiting.jobs.links.tolist()
        self._room: list[int] = waiting.jobs.room.tolist()
        self._by_account: dict[tuple[int, ...], Reason] = {}
        self._of_reserved: dict[tuple[int, float, str], Reason] = {}
        self._reserved_on: dict[int, list[Reservation]] = {}

    def add(self, queue: list[int], block: QueueBlock, reasons: dict[str, Reason], only: int | None = None) -> None:
        """Write the reasons of one partition's queue; ``only``: of that job alone."""
        views, codes, shapes = self._waiting.views, self._codes, self._shapes
        same_for_all = {
            BACKFILL: self._delayed(block),
            POLICY: HELD_BACK if block.policy.agent else _UNLUCKY,
            MAPPING: ELSEWHERE,
        }
        ahead, until = 0, 0  # from so many jobs on, their number is said otherwise
        for job in queue:
            code = codes[job]
            if code == STARTED:
                continue
            view, before = views[job], ahead
            if code in self._holding:
                ahead += 1 + view.behind
            if only is not None and job != only:
                continue
            if code == PRIORITY:
                if before >= until:
                    behind = Reason(code=ReasonCode.PRIORITY, message=jobs_ahead(before))
                    step = rounding_step(before)
                    until = (before // step + 1) * step
                reason = behind
            elif code == LIMIT:
                reason = self._limit(job)
            elif code in same_for_all:
                reason = same_for_all[code]
            else:
                patient = self._is_patient(job, block.policy)  # of one that is, other things may be said
                reason = self._by_shape.get((code, shapes[job], patient)) or self._short(code, patient, job, block)
            reasons[view.id] = reason

    def _limit(self, job: int) -> Reason:
        """Return the reason of the first bound that leaves too little once all are started."""
        key = tuple(self._accounts[job].tolist())
        found = self._by_account.get(key)
        if found is None:
            found = self._by_account[key] = next(self._exceeded(*key))[1]
        return found

    def exceeded(self, job: int) -> list[tuple[int, Reason]]:
        """Return every bound that leaves too little for the job once all are started, with its reason."""
        return list(self._exceeded(*self._accounts[job].tolist()))

    def _exceeded(self, at: int, gpus: int, gpu_s: int) -> Iterator[tuple[int, Reason]]:
        while at >= 0:
            bound, unit, at = self._links[at]
            scale = self._waiting.scale if unit else 1
            cost, left = (1, gpus, gpu_s)[unit] / scale, self._room[bound] / scale
            if cost > max(left, 0):
                yield bound, self._limits.of(bound, cost, left) if bound < self._bounds else ARRAY_FULL

    def _delayed(self, block: QueueBlock) -> Reason:
        if block.head < 0:
            return Reason(code=ReasonCode.BACKFILL)
        if block.policy.backfill == "conservative":
            return Reason(code=ReasonCode.BACKFILL, message=DELAYS_SOME)
        head = self._waiting.views[block.head].id
        if self._codes[block.head] == POLICY and block.policy.place == "contention":
            return Reason(code=ReasonCode.BACKFILL, message=keeps_room(head))
        return Reason(code=ReasonCode.BACKFILL, message=would_delay(head, block.shadow - self._now))

    def _is_patient(self, job: int, policy: PolicySpec) -> bool:
        """Return whether the job may still wait for better nodes."""
        view = self._waiting.views[job]
        several = view.spec.nodes > 1 or view.spec.max_nodes is not None
        return several and self._now < rack_wait_until(view, policy)

    def _short(self, code: int, patient: bool, job: int, block: QueueBlock) -> Reason:
        """Return the reason for RESOURCES, NOT_AVAILABLE or BAD_CONSTRAINTS, with figures; shared except the head's."""
        shape = self._shapes[job]
        if code == BAD_CONSTRAINTS:
            message = self._shortage("needs", "there", self._world.total, job)
            reason = Reason(code=ReasonCode.BAD_CONSTRAINTS, message=message)
        elif code == RESERVED:
            reason = self._reserved(shape, job)
            waits = self._waits(job, block.policy) if patient and self.racks_now(job) is not None else ""
            return Reason(code=reason.code, message=f"{reason.message}; {waits}") if waits else reason
        elif code == NOT_AVAILABLE:
            message = self._shortage("needs", "usable", self._world.usable, job)
            requests = self._waiting.requests
            missing = not_available(self._world.nodes[requests.lo[shape] : requests.hi[shape]])
            reason = Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=f"{message}; not available: {missing}")
        else:
            waits = self._waits(job, block.policy) if patient else ""
            message = waits or self._shortage("waits for", "free", self._world.resources, job)
            if job == block.head:
                return Reason(code=ReasonCode.RESOURCES, message=message + starts_in(block.shadow - self._now))
            reason = Reason(code=ReasonCode.RESOURCES, message=message)
            if waits:  # another one's wait ends at another time
                return reason
        self._by_shape[code, shape, patient] = reason
        return reason

    def _reserved(self, shape: int, job: int) -> Reason:
        """Return the reason of a job that waits for reservations to end; none else is reserved that it could use."""
        view = self._waiting.views[job]
        key = (self._lo[shape], view.limit_s, view.spec.reservation)
        if key not in self._of_reserved:
            reserved, lo, hi = self._world.reserved, key[0], int(self._waiting.requests.hi[shape])
            if key[0] not in self._reserved_on:  # by begin, as their numbers are
                numbers = set(reserved.of[(reserved.node >= lo) & (reserved.node < hi)].tolist())
                self._reserved_on[key[0]] = [reserved.all[number] for number in sorted(numbers)]
            text = reserved_text(self._reserved_on[key[0]], key[2], key[1], self._now)
            self._of_reserved[key] = Reason(code=ReasonCode.REQ_NODE_NOT_AVAIL, message=text)
        return self._of_reserved[key]

    def _waits(self, job: int, policy: PolicySpec) -> str:
        """Return a note that the job waits for one rack; else ""."""
        until = self.waits_until(job, policy)
        view = self._waiting.views[job]
        return "" if until is None else rack_wait_text(until, self._now, policy, view, self.racks_now(job))

    def waits_until(self, job: int, policy: PolicySpec) -> float | None:
        """Return until when a job waits for better nodes than are free now (Unix seconds); None: it does not."""
        view = self._waiting.views[job]

        def asked_at(at: float) -> tuple[SpreadRequest, ...]:
            possible = partial(self._racks, self._world.usable, job, reserved=False)
            return current_requests(view, policy, at, self._world.racked, lambda ask: possible(ask) is not None)

        return wait_ends_at(view, policy, asked_at, self._now)

    def racks_now(self, job: int) -> int | None:
        """Return on how many racks a job could start once all are started; None: it could not."""
        found = (self._racks(self._world.resources, job, ask) for ask in split_requests(self._waiting.views[job].spec))
        return next((racks for racks in found if racks is not None), None)

    def _racks(self, resources: Resources, job: int, ask: SpreadRequest, reserved: bool = True) -> int | None:
        waiting, mask = self._waiting, int(self._waiting.requests.mask[self._shapes[job]])
        mask = mask if reserved else unreserved_row(waiting.calendar, mask)
        return racks_for_ask(resources, self._world, waiting.jobs.masks, mask, waiting.views[job].spec.partition, ask)

    def _shortage(self, verb: str, free: str, resources: Resources, job: int) -> str:
        request, profile = request_of(self._waiting.requests, self._shapes[job]), self._waiting.views[job].spec.profile
        if free != "free" and len(self._waiting.calendar.base):
            request = unreserved(self._waiting.calendar, request)
        dimension, count, nearest = shortfall(resources, self._waiting.jobs.masks, request)
        has = int(resources.columns[dimension - 1][nearest]) if nearest >= 0 else 0  # of GPUs, cores or memory
        needs = (int(request.gpus), int(request.cores), int(request.memory))
        if dimension < 0:
            racks = new_scratch(len(self._world.nodes), 0, self._world.rack).racks
            most = int(max_in_rack(racks, resources, self._waiting.jobs.masks, request))
            return scattered(verb, free, int(request.parts), needs, most, profile)
        name = base_of(self._world.nodes[nearest].name) if nearest >= 0 else ""
        return shortage(verb, free, dimension, int(request.parts), needs, int(count), name, has, profile)
