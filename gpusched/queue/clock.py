"""The controller's clock: durations are unaffected when the wall clock is set; dates follow it.

Unix seconds at an anchor, plus what the boot clock (CLOCK_BOOTTIME) has counted since. When the wall clock is set,
the anchor moves together with every stored time that still counts (`shift_times`): dates are right again, and no
duration has changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gpusched.model.events import Event
from gpusched.model.jobs import Ending, JobRecord, Stops
from gpusched.model.recovery import UNSETTLED, Unsettled

if TYPE_CHECKING:
    from gpusched.queue.store import NodeRecord, Store

T = TypeVar("T", bound=msgspec.Struct)
S = TypeVar("S", bound=Stops)

STEP_S = 2.0  # smaller steps are ignored
RECENT_S = 3600.0  # attempts that ended this recently may still be charged and counted
ANCHOR = "clock"  # of the meta table


class Anchor(msgspec.Struct, frozen=True):
    """Within one boot of this machine, Unix seconds are ``offset`` more than its boot clock."""

    boot_id: str
    offset: float


def boot_id() -> str:
    """Return the id of this machine's current boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def boot_seconds() -> float:
    """Return seconds since boot; time suspended counts."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def now_by(anchor: str | None) -> float:
    """Return Unix seconds by the clock of the controller that stored this `ANCHOR`; without a valid one, wall time."""
    kept = _decoded(anchor)
    return kept.offset + boot_seconds() if kept is not None and kept.boot_id == boot_id() else time.time()


def _decoded(anchor: str | None) -> Anchor | None:
    try:
        return msgspec.json.decode(anchor, type=Anchor) if anchor else None
    except msgspec.MsgspecError:
        return None


class Clock:
    """Unix seconds now, returned when called.

    Args:
        wall: Unix seconds that may be set at any time.
        boot: Seconds that only ever go on (`boot_seconds`).
        this_boot: What ``boot`` counts from.

    Attributes:
        offset: Unix seconds minus ``boot``.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        boot: Callable[[], float] = boot_seconds,
        this_boot: str | None = None,
    ) -> None:
        self._wall, self.boot = wall, boot
        self._boot_id = boot_id() if this_boot is None else this_boot
        self.offset = wall() - boot()

    def __call__(self) -> float:
        """Return Unix seconds now."""
        return self.offset + self.boot()

    def resume(self, anchor: str | None, heartbeat: float) -> None:
        """Continue from the previous controller's clock.

        The duration of a reboot is unknown, but now is not earlier than the last ``heartbeat``.
        """
        kept = _decoded(anchor)
        if kept is not None and kept.boot_id == self._boot_id:
            self.offset = kept.offset
        else:
            self.offset = max(self.offset, heartbeat - self.boot())

    def stepped(self) -> float:
        """Return by how many seconds the wall clock was set since the last `follow`; 0.0 below `STEP_S`."""
        step = self._wall() - self()
        return step if abs(step) >= STEP_S else 0.0

    def follow(self, step: float) -> None:
        """Follow the wall clock; stored times must have been shifted (`shift_times`)."""
        self.offset += step

    def anchor(self, step: float = 0.0) -> str:
        """Return the anchor for `resume`, as it will be after a step."""
        return msgspec.json.encode(Anchor(self._boot_id, self.offset + step)).decode()


def follow_wall_clock(store: Store, clock: Clock) -> float:
    """Adjust stored times after the machine's clock was set, so that no duration changes.

    Returns:
        By how many seconds it was set; 0.0: it was not.
    """
    if step := clock.stepped():
        with store.transaction():
            shift_times(store, step, clock())
            store.set_meta(ANCHOR, clock.anchor(step))
            store.append([Event(time=clock() + step, kind="clock_stepped", data={"seconds": round(step, 3)})])
        clock.follow(step)
    return step


def shift_times(store: Store, step: float, now: float) -> None:
    """Shift every stored time that still counts by ``step`` seconds, within the caller's transaction.

    What ended longer ago keeps its dates, and so do events. ``now``: Unix seconds before the step.
    """
    store.put_jobs([_job(job, step) for job in store.rows(since=now - RECENT_S)])
    of_rank = (
        "intended_at", "launched_at", "finished_at", "leave_by", "idle_signalled_at", "warned_at", "tried_at",
    )  # fmt: skip
    store.put_ranks([_with_moved(rank, step, *of_rank) for rank in store.ranks()])
    store.put_nodes([_record(record, step) for record in store.node_records().values()])
    store.shift_rows(step, now - RECENT_S)
    if kept := store.meta(UNSETTLED):
        moved = _with_moved(msgspec.json.decode(kept, type=Unsettled), step, "since")
        store.set_meta(UNSETTLED, msgspec.json.encode(moved).decode())
    if heartbeat := store.number("heartbeat", 0.0):
        store.set_meta("heartbeat", str(heartbeat + step))


def _job(job: JobRecord, step: float) -> JobRecord:
    """Shift a job's times; begin times that a user gave are dates and stay."""
    date = job.eligible_time is not None and job.eligible_time == job.spec.begin_time
    names = ("submit_time", "start_time", "end_time", *(() if date else ("eligible_time",)))
    changed = _with_moved(job, step, *names)
    return msgspec.structs.replace(
        changed,
        ending=_ending(job.ending, step),
        preemptions=job.preemptions and _stops(job.preemptions, step),
        resizes=job.resizes and _with_moved(_stops(job.resizes, step), step, "formed_since"),
        idle=job.idle and _with_moved(job.idle, step, "since", "at", "warned_at", "acted_at"),
    )


def _ending(ending: Ending | None, step: float) -> Ending | None:
    if ending is None:
        return None
    return msgspec.structs.replace(
        _with_moved(ending, step, "kill_at"),
        preemptions=ending.preemptions and _stops(ending.preemptions, step),
        resize=ending.resize and _with_moved(ending.resize, step, "asked_at"),
    )


def _stops(stops: S, step: float) -> S:
    return msgspec.structs.replace(stops, times=tuple(t + step for t in stops.times))


def _record(record: NodeRecord, step: float) -> NodeRecord:
    reading = record.reading
    if reading is not None:
        skew = None if reading.clock_skew_s is None else reading.clock_skew_s - step
        reading = msgspec.structs.replace(reading, time=reading.time + step, clock_skew_s=skew)
    health = msgspec.structs.replace(
        record.health,
        **{
            name: tuple(_with_moved(one, step, "since", "last_seen") for one in getattr(record.health, name))
            for name in ("conditions", "suspected")
        },
    )
    cuts = {gpu: _with_moved(cut, step, "began", "ended", "retry_at") for gpu, cut in record.cuts.items()}
    moved = _with_moved(record, step, "last_seen", "down_since")
    return msgspec.structs.replace(moved, reading=reading, health=health, cuts=cuts)


def _with_moved(struct: T, step: float, *names: str) -> T:
    times = {name: getattr(struct, name) for name in names}
    return msgspec.structs.replace(struct, **{name: t + step for name, t in times.items() if t is not None})
