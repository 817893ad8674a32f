"""Finds conditions of a node and its GPUs in its readings: when they begin and end, and what follows. Pure.

In a reading, a value shows the condition, is fine, or is unknown. If it shows it, the condition begins at once, or if
the value fluctuates (`ConditionKind.needs_two`) at the second such reading in a row. It is over when the value is fine
some time after it last showed it. Unknown values change nothing. Messages of the driver become conditions at once;
those that need an operator (`Condition.stays`) stay until the node is resumed or rebooted, or the GPU reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from gpusched.model.events import Event
from gpusched.model.health import (
    KIND,
    SILENT_XIDS,
    STICKY_KINDS,
    XIDS,
    Condition,
    GpuCounters,
    HealthAction,
    NodeHealth,
    Xid,
    action_of,
    text_of,
)
from gpusched.model.jobs import parse_container_name
from gpusched.model.readings import Gpu, NodeReading, XidMessage
from gpusched.model.resources import Node
from gpusched.model.slices import gpu_of
from gpusched.model.units import count_of

FIRST_LOOK_S = 600.0
"""When a running node's log is first read, older messages are past: what was done about them is unknown."""
MIN_APART_S = 1.0
"""Two readings are two only if they are so far apart: a wake-up may probe a node twice in a moment."""
MARGIN_C, REPLAYS, LINK_ERRORS, PAGES = 3, 8, 100, 60
"""Degrees to the limit; rises between two readings that count; retired pages (the driver's table has 64)."""
_THERMAL, _BRAKE = 0x20 | 0x40, 0x80  # of NVML's reasons: by software or hardware; by the power brake
_RECOVERY = {1: "reset the GPU", 2: "reboot the node", 3: "drain peers", 4: "drain and reset", 6: "reset the bus"}
_UNKNOWN_XID = Xid("xid-other", "not in the catalog")

Held = Mapping[int, tuple[str, ...]]


class Judgement(NamedTuple):
    """Of one reading: kind -> what was seen of one GPU; "": it is fine."""

    at: int
    gpu: str
    kinds: dict[str, str]


class HealthChange(NamedTuple):
    """A node's health after a reading, its events, and the reason to drain it, or ""."""

    health: NodeHealth
    events: list[Event]
    drain: str


def observe_health(
    before: NodeHealth, node: Node, reading: NodeReading, held: Held, now: float, places: Callable[[], dict[str, int]]
) -> HealthChange:
    """Return a node's health after a reading.

    Args:
        before: As it was.
        node: As declared, with the operator's actions.
        reading: Complete.
        held: GPU index -> ids of its jobs.
        now: Unix seconds.
        places: Gives PCI address -> GPU index as wired, for messages about a GPU that NVML does not list any more.
    """
    rebooted = before.boot_id is not None and reading.boot_id not in (None, before.boot_id)
    health = _after_boot(before) if rebooted else before
    update = _ConditionUpdate(health, now)
    counters = dict(health.counters)
    found = {gpu.index: gpu for gpu in reading.gpus}
    present = {gpu.uuid for gpu in reading.gpus}
    for index in node.indices():
        gpu, old = found.get(index), counters.get(index, GpuCounters())
        if gpu is not None and gpu.uuid is not None and gpu.uuid != old.uuid:
            if old.uuid is not None and old.uuid not in present:
                update.forget(old.uuid)  # another GPU is in its place
            update.rename(_nameless(index), gpu.uuid)
            old = GpuCounters(uuid=gpu.uuid)
        if gpu is not None and _was_reset(gpu, old):
            update.forget(old.uuid)
            old = GpuCounters(uuid=old.uuid, bus=old.bus)
        update.take(judge_gpu(index, gpu, reading, old))
        counters[index] = _counters(gpu, old)
    log_us = _take_messages(update, reading, counters, held, places, rebooted)
    after = NodeHealth(
        conditions=update.conditions(node), suspected=update.suspected(), counters=counters, log_us=log_us,
        boot_id=reading.boot_id or health.boot_id,
        log_source=reading.kernel.source if reading.kernel is not None else health.log_source,
    )  # fmt: skip
    return _consequences(before, after, update.to_notify, node, now)


def forgiven(health: NodeHealth) -> NodeHealth:
    """Return the health of a node that is resumed: what is still wrong comes back with the next readings."""
    return msgspec.structs.replace(health, conditions=(), suspected=())


# -- one GPU in one reading --------------------------------------------------------------------------------------------


def judge_gpu(index: int, gpu: Gpu | None, reading: NodeReading, before: GpuCounters) -> Judgement:
    """Return what a reading shows of a GPU; kinds of which nothing is known are not there."""
    name = (gpu.uuid if gpu is not None else None) or before.uuid or _nameless(index)
    if gpu is None or gpu.error:
        known = reading.source in ("nvml", "nvidia-smi") and not (reading.gpu_error and not reading.gpus)
        trouble = gpu.error if gpu is not None and gpu.error else "not listed"
        return Judgement(index, name, {"off-bus": trouble} if known else {})
    found = {"off-bus": ""}
    if gpu.ecc_errors is not None:
        found["ecc"] = count_of(gpu.ecc_errors, "uncorrected memory error") if gpu.ecc_errors else ""
    found |= {kind: detail for kind, detail in _judge_values(gpu, before) if detail is not None}
    return Judgement(index, name, found)


def _judge_values(gpu: Gpu, before: GpuCounters) -> Iterator[tuple[str, str | None]]:
    """Yield kind and what was seen: "" where it is fine, None where that is unknown."""
    h = gpu.health
    if h is None:
        return
    yield "needs-reset", _seen(h.recovery, bool(h.recovery), f"asks to {_RECOVERY.get(h.recovery or 0, 'recover')}")
    yield "remap-pending", _seen(h.remap_pending, bool(h.remap_pending), "memory is replaced at the next reset")
    yield "remap-failed", _seen(h.remap_failed, bool(h.remap_failed), "memory rows could not be replaced")
    yield "pages-retired", _seen(h.retired_pages, (h.retired_pages or 0) >= PAGES, f"{h.retired_pages} pages retired")
    most = before.nvlinks or 0
    down = most - (h.nvlinks or 0)
    yield "nvlink-down", _seen(h.nvlinks, down > 0, f"{down} of {count_of(most, 'NVLink')} down")
    errors = _rise(h.nvlink_errors, before.nvlink_errors)
    recoveries = _rise(h.nvlink_recoveries, before.nvlink_recoveries)
    bad = recoveries > 0 or errors >= LINK_ERRORS
    yield "nvlink-errors", _seen(h.nvlink_recoveries, bad, f"{errors} errors and {recoveries} recoveries of NVLinks")
    replays = _rise(h.pcie_replays, before.pcie_replays)
    yield "pcie-replays", _seen(h.pcie_replays, replays >= REPLAYS, f"{replays} transfers repeated over PCIe")
    width = h.pcie_width_max if h.pcie_width_max is not None else h.pcie_width
    narrow = h.pcie_width is not None and width is not None and h.pcie_width < width
    yield "pcie-width", _seen(h.pcie_width, narrow, f"PCIe with {h.pcie_width} of {width} lanes")
    slow = h.pcie_gen is not None and h.pcie_gen_max is not None and h.pcie_gen < h.pcie_gen_max
    yield "pcie-speed", _seen(h.pcie_gen, slow, f"PCIe generation {h.pcie_gen} of {h.pcie_gen_max} under load")
    yield "clocks-thermal", _seen(h.clocks, bool((h.clocks or 0) & _THERMAL), "clocks reduced by heat")
    yield "clocks-power", _seen(h.clocks, bool((h.clocks or 0) & _BRAKE), "clocks reduced by the power brake")
    near = h.thermal_margin_c is not None and h.thermal_margin_c <= MARGIN_C
    yield "temperature", _seen(gpu.temperature_c, near, f"{gpu.temperature_c} °C, {h.thermal_margin_c} below the limit")


def _nameless(index: int) -> str:
    """Return what stands for a GPU until its UUID has been read."""
    return f"#{index}"


def _seen(value: object, is_bad: bool, detail: str) -> str | None:
    return None if value is None else detail if is_bad else ""


def _rise(value: int | None, before: int | None) -> int:
    """Return by how much a counter rose; one that fell was reset."""
    return 0 if value is None or before is None else max(0, value - before)


def _was_reset(gpu: Gpu, before: GpuCounters) -> bool:
    """Return whether the GPU was reset: its counter of energy has begun again."""
    return gpu.energy_j is not None and before.energy_j is not None and gpu.energy_j < before.energy_j - 1.0


def _counters(gpu: Gpu | None, before: GpuCounters) -> GpuCounters:
    if gpu is None or gpu.error:
        return before
    h = gpu.health
    if h is None:
        return msgspec.structs.replace(before, uuid=gpu.uuid, energy_j=gpu.energy_j)
    up = [links for links in (h.nvlinks, before.nvlinks) if links is not None]
    return GpuCounters(
        uuid=gpu.uuid, bus=h.bus or before.bus, energy_j=gpu.energy_j, nvlinks=max(up) if up else None,
        nvlink_errors=h.nvlink_errors, nvlink_recoveries=h.nvlink_recoveries, pcie_replays=h.pcie_replays,
    )  # fmt: skip


# -- messages of the driver --------------------------------------------------------------------------------------------


def _take_messages(
    update: _ConditionUpdate, reading: NodeReading, counters: Mapping[int, GpuCounters], held: Held,
    places: Callable[[], dict[str, int]], rebooted: bool,
) -> int | None:  # fmt: skip
    """Take in the kernel's new messages; return up to when they are known, in microseconds since boot."""
    log, known = reading.kernel, update.before.log_us
    if log is None or not log.source:
        return known
    if known is None:
        known = 0 if rebooted else log.now_us - int(FIRST_LOOK_S * 1e6)
    new = [message for message in log.messages if message.at_us > known]
    buses = {c.bus: index for index, c in counters.items() if c.bus is not None}
    for message in new:
        _take_message(update, message, reading, counters, buses if message.bus in buses else places(), held)
    return max([known, *(message.at_us for message in new)])


def _take_message(
    update: _ConditionUpdate, message: XidMessage, reading: NodeReading, counters: Mapping[int, GpuCounters],
    buses: Mapping[str, int], held: Held,
) -> None:  # fmt: skip
    if message.switch:
        if message.fatal:
            update.note("nvswitch", None, None, f"SXid {message.number} of the NVSwitch at {message.bus}, fatal", "")
        return
    if message.number in SILENT_XIDS:
        return
    xid, index = XIDS.get(message.number, _UNKNOWN_XID), buses.get(message.bus)
    detail = f"Xid {message.number} ({xid.title})"
    if index is None or KIND[xid.kind].scope == "node":
        where = f"GPU {index}" if index is not None else f"PCI address {message.bus}"
        kind = xid.kind if KIND[xid.kind].scope == "node" else "xid-other"
        update.note(kind, None, None, f"{detail} of {where}", "")
        return
    uuid = counters[index].uuid if index in counters else None
    job = _job_of(message, reading, index, held)
    by = f", process {message.process or message.pid}" if message.pid is not None else ""
    detail += by if KIND[xid.kind].fault == "program" else ""
    update.note(xid.kind, uuid or _nameless(index), index, detail, job)


def _job_of(message: XidMessage, reading: NodeReading, index: int, held: Held) -> str:
    """Return the job whose process the message names, else the one that has the GPU; "": none, or several."""
    for gpu in reading.gpus:
        for process in gpu.processes:
            if process.pid == message.pid:
                parsed = parse_container_name(process.container) if process.container else None
                return parsed[0] if parsed else ""
    jobs = {job for number, holders in held.items() if gpu_of(number) == index for job in holders}
    return jobs.pop() if len(jobs) == 1 else ""


# -- from one reading to the next --------------------------------------------------------------------------------------


def _after_boot(health: NodeHealth) -> NodeHealth:
    """Return what a reboot leaves: states that are read again, without what came from messages."""
    kept = tuple(c for c in health.conditions if not c.stays and not c.kind.startswith("xid-"))
    buses = {i: GpuCounters(uuid=c.uuid, bus=c.bus) for i, c in health.counters.items()}
    return NodeHealth(conditions=kept, counters=buses)


class _ConditionUpdate:
    """Conditions while one reading is taken in; ``to_notify``: new ones, or of another job."""

    def __init__(self, before: NodeHealth, now: float) -> None:
        self.before, self._now = before, now
        self._found = {c.key: c for c in before.conditions}
        self._earlier = {c.key: c for c in before.suspected}
        self._suspected: list[Condition] = []
        self._fine: set[tuple[str, str | None]] = set()
        self.to_notify: list[Condition] = []

    def conditions(self, node: Node) -> tuple[Condition, ...]:
        """Return those that are not over, of GPUs that the node has."""
        order, indices = {name: place for place, name in enumerate(KIND)}, (None, *node.indices())
        found = [c for c in self._found.values() if c.index in indices and not self._is_over(c)]
        return tuple(sorted(found, key=lambda c: (c.index if c.index is not None else -1, order.get(c.kind, 0))))

    def suspected(self) -> tuple[Condition, ...]:
        """Return what was seen for the first time; what this reading does not show again was nothing."""
        return tuple(self._suspected)

    def forget(self, gpu: str | None) -> None:
        """Drop the conditions of a GPU that was reset."""
        self._found = {key: c for key, c in self._found.items() if gpu is None or c.gpu != gpu}

    def rename(self, old: str, new: str) -> None:
        """Give the conditions of a GPU its UUID."""
        for found in (self._found, self._earlier):
            for key in [key for key in found if key[1] == old]:
                renamed = msgspec.structs.replace(found.pop(key), gpu=new)
                found[renamed.key] = renamed

    def take(self, judged: Judgement) -> None:
        """Take in what a reading shows of a GPU."""
        for kind, detail in judged.kinds.items():
            if detail:
                self._see(kind, judged.gpu, judged.at, detail)
            else:
                self._fine.add((kind, judged.gpu))

    def _see(self, kind: str, gpu: str, index: int, detail: str) -> None:
        key, now = (kind, gpu), self._now
        if (old := self._found.get(key)) is not None:
            detail = old.detail if old.stays else detail
            self._found[key] = msgspec.structs.replace(old, last_seen=now, index=index, detail=detail)
            return
        first = self._earlier.get(key)
        since = first.since if first is not None else now
        condition = Condition(kind=kind, gpu=gpu, index=index, since=since, last_seen=now, detail=detail)
        if KIND[kind].needs_two and (first is None or now - first.since < MIN_APART_S):
            self._suspected.append(condition)
            return
        self._found[key] = condition
        self.to_notify.append(condition)

    def note(self, kind: str, gpu: str | None, index: int | None, detail: str, job: str) -> None:
        """Take in a message; a notice follows if it is new, or another job's."""
        key, now = (kind, gpu), self._now
        old = self._found.get(key)
        condition = Condition(
            kind=kind, gpu=gpu, index=index, since=old.since if old is not None else now, last_seen=now, detail=detail,
            job=job or None, stays=kind in STICKY_KINDS,
        )  # fmt: skip
        self._found[key] = condition
        if old is None or (job and old.job != job):
            self.to_notify.append(condition)

    def _is_over(self, condition: Condition) -> bool:
        kind = KIND.get(condition.kind)
        if kind is None or condition.stays:
            return kind is None
        is_fine = condition.key in self._fine or condition.kind.startswith("xid-")
        return is_fine and self._now - condition.last_seen >= kind.over_s


# -- what follows ------------------------------------------------------------------------------------------------------


def _consequences(
    before: NodeHealth, after: NodeHealth, to_notify: list[Condition], node: Node, now: float
) -> HealthChange:
    events = [_event("condition", c, node, now) for c in to_notify]
    left = {(c.kind, c.index) for c in after.conditions}
    events += [_event("condition_over", c, node, now) for c in before.conditions if (c.kind, c.index) not in left]
    drains = [c for c in to_notify if action_of(c.kind, node.health) is HealthAction.DRAIN]
    drain = "; ".join(f"{c.where}{': ' if c.where else ''}{text_of(c)}" for c in drains)
    return HealthChange(after, events, drain)


def _event(kind: str, condition: Condition, node: Node, now: float) -> Event:
    data = {
        "condition": condition.kind, "gpu": condition.index, "detail": text_of(condition),
        "action": str(action_of(condition.kind, node.health)),
    }  # fmt: skip
    job = condition.job if kind == "condition" and KIND[condition.kind].fault == "program" else None
    return Event(time=now, kind=kind, node=node.name, job_id=job, data=data)
