"""Progress that jobs report themselves, and their speed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

_SLOWEST = 1e-9  # steps a second: a job may report steps so small that a pace is 0, or that no time divides by it
_WINDOW_S = 600.0  # pace is that of the last one to two of these: a job may slow down, and its first steps are slow


class JobProgress(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt's progress. Times in Unix seconds, by the controller's clock.

    Attributes:
        gpus: Of the whole job in this attempt; of a hot job at present.
        parts: GPUs, steps and seconds of the sizes that a hot job had before in this attempt.
        step, of: Where it is, and how many steps there are in all; None: not known.
        samples_per_s: As the job says it.
        at: When it wrote ``step``.
        first_step, first_at: Of this attempt.
        since_step, since: Where the measuring of its pace begins; ``mid_step``, ``mid_at``: where it will next.
        saved_step, saved_at: Up to where its work is kept; None: not said.
        trouble: What is wrong with the files that it wrote last; "": nothing.
    """

    job_id: str
    attempt: int
    gpus: int
    step: float | None = None
    of: float | None = None
    samples_per_s: float | None = None
    at: float | None = None
    first_step: float | None = None
    first_at: float | None = None
    since_step: float | None = None
    since: float | None = None
    mid_step: float | None = None
    mid_at: float | None = None
    saved_step: float | None = None
    saved_at: float | None = None
    trouble: str = ""
    parts: tuple[tuple[int, float, float], ...] = ()

    def resized(self, gpus: int) -> JobProgress:
        """Return it at another size, at which nothing is measured yet."""
        return msgspec.structs.replace(
            self, gpus=gpus, parts=(*self.parts, (self.gpus, *self._measured)), first_step=None, first_at=None,
            since_step=None, since=None, mid_step=None, mid_at=None,
        )  # fmt: skip

    @property
    def _measured(self) -> tuple[float, float]:
        """Return steps and seconds at its size since it was first read there."""
        if self.step is None or self.first_step is None or self.at is None or self.first_at is None:
            return 0.0, 0.0
        return max(0.0, self.step - self.first_step), self.at - self.first_at

    def with_step(self, step: float, of: float | None, samples_per_s: float | None, at: float) -> JobProgress:
        """Update from progress.json; unchanged content changes nothing."""
        said = msgspec.structs.replace(self, of=of, samples_per_s=samples_per_s)
        if step == self.step:
            return said
        # The first one at its size, or it went back to what is saved.
        if self.step is None or self.at is None or self.since is None or step < self.step:
            return msgspec.structs.replace(
                said, step=step, at=at, since_step=step, since=at, mid_step=step, mid_at=at,
                first_step=step if self.first_step is None else self.first_step,
                first_at=at if self.first_at is None else self.first_at,
            )  # fmt: skip
        at = max(at, self.at)
        if self.mid_at is not None and at - self.mid_at >= _WINDOW_S:
            said = msgspec.structs.replace(
                said, since_step=self.mid_step, since=self.mid_at, mid_step=step, mid_at=at
            )  # fmt: skip
        return msgspec.structs.replace(said, step=step, at=at)

    def shifted(self, by_s: float) -> JobProgress:
        """Return it with all times shifted, after the clock was set."""
        times = {n: getattr(self, n) for n in ("at", "first_at", "since", "mid_at", "saved_at")}
        return msgspec.structs.replace(self, **{n: t + by_s for n, t in times.items() if t is not None})

    @property
    def steps_per_s(self) -> float | None:
        """Return its recent speed; None until the first step after it was first read."""
        if self.step is None or self.at is None or self.since is None or self.since_step is None:
            return None
        passed = self.at - self.since
        return pace if passed > 0 and (pace := (self.step - self.since_step) / passed) > _SLOWEST else None

    @property
    def fraction(self) -> float | None:
        """Return the completed part, 0 to 1; None: unknown."""
        return None if self.step is None or not self.of else min(1.0, self.step / self.of)

    def end(self) -> float | None:
        """Return the expected end at its recent speed (Unix seconds); None: unknown."""
        pace = self.steps_per_s
        if pace is None or self.of is None or self.step is None or self.at is None:
            return None
        return self.at + max(0.0, self.of - self.step) / pace

    def left_s(self, now: float) -> float | None:
        """Return seconds from ``now`` to its `end`; None: unknown."""
        end = self.end()
        return None if end is None else max(0.0, end - now)


def speeds_of(attempts: Iterable[JobProgress]) -> dict[int, float]:
    """Return GPUs -> steps per second, over all attempts with that many GPUs."""
    steps: dict[int, tuple[float, float]] = {}
    for one in attempts:
        for gpus, more, seconds in (*one.parts, (one.gpus, *one._measured)):
            made, passed = steps.get(gpus, (0.0, 0.0))
            steps[gpus] = made + more, passed + seconds
    paces = {gpus: made / passed for gpus, (made, passed) in steps.items() if passed > 0}
    return {gpus: pace for gpus, pace in paces.items() if pace > _SLOWEST}


def steps_left(attempts: Sequence[JobProgress]) -> float | None:
    """Return a job's remaining steps by its last report; None: unknown."""
    last = attempts[-1] if attempts else None
    return None if last is None or last.of is None or last.step is None else max(0.0, last.of - last.step)
