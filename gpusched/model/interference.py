"""Estimates per job class: speed by placement and mutual slowdown of jobs; and slow GPUs."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from gpusched.model.units import count_of

Link = Literal["server", "nic", "uplink", "gpu"]
"""What two jobs share: a server, one of them staying in it; its NICs, both having parts elsewhere; a rack's uplink;
GPUs (and then no more is said of the rest)."""

_NUMBERS = re.compile(r"\d+")


def name_pattern(name: str) -> str:
    """Replace numbers in a job's name by ``#``: ``train-17`` and ``train-18`` are runs of the same program."""
    return _NUMBERS.sub("#", name)


def job_class_of(user: str, name: str) -> str:
    """Return the job class: one user's jobs with the same name pattern."""
    return f"{user}/{name_pattern(name)}"


class JobShape(msgspec.Struct, frozen=True, kw_only=True):
    """The resources and placement that a job ran with.

    Attributes:
        unit: What its pace counts, "samples" or "steps".
        gpus, nodes, racks: In all. max_gpus_per_node: On the node with the most.
    """

    gpu_type: str
    unit: str
    gpus: int
    max_gpus_per_node: int
    nodes: int
    racks: int


class SpeedSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Speeds of a job class at one shape.

    Attributes:
        logs: (logarithm of the pace per second as it would have been alone, weight), the latest last; an attempt
            that was alone weighs 1.
        count: How many there ever were. best: The highest reported logarithm.
    """

    shape: JobShape
    logs: tuple[tuple[float, float], ...]
    count: int
    best: float


class ContentionEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Sensitivity and pressure of a job class over one link (logarithms), with variances and covariance."""

    link: Link
    sensitivity: float
    pressure: float
    cov: tuple[float, float, float]
    count: int = 0


class ColocationSamples(msgspec.Struct, frozen=True, kw_only=True):
    """Relative speeds of a job class beside one job of another class (logarithms, latest last)."""

    link: Link
    kind: str
    logs: tuple[float, ...]
    count: int


class JobClassEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """All estimates of one job class."""

    kind: str
    shapes: tuple[SpeedSamples, ...] = ()
    links: tuple[ContentionEstimate, ...] = ()
    beside: tuple[ColocationSamples, ...] = ()


class Neighbour(msgspec.Struct, frozen=True):
    """A job, of any class, that shared a link, and for what part of the time (0 to 1)."""

    kind: str
    link: Link
    share: float


class SpeedSample(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's measured speed: per second, over ``seconds``, with its neighbours."""

    kind: str
    shape: JobShape
    pace: float
    seconds: float
    neighbours: tuple[Neighbour, ...] = ()


class AttemptSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt's speed corrected for neighbours (logarithm), and its GPUs: (node, index)."""

    job_id: str
    kind: str
    shape: JobShape
    log_pace: float
    gpus: tuple[tuple[str, int], ...]


class SlowGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU on which steps take longer than on similar GPUs.

    Attributes:
        slower: By which part: 0.12: a step takes 1.12 times as long. low, high: Bounds that hold in 95 %.
        jobs: On how many attempts' paces that rests.
        among: GPUs that all its jobs also used: any one of them may be the slow one.
    """

    node: str
    index: int
    slower: float
    low: float
    high: float
    jobs: int
    among: tuple[tuple[str, int], ...] = ()

    @property
    def line(self) -> str:
        """Return it as text for people."""
        span = f"{self.low:.0%} to {self.high:.0%}"
        text = f"{self.slower:.0%} slower than similar GPUs ({span}, {count_of(self.jobs, 'job')})"
        return text + (f"; this one, or others that its jobs also used ({len(self.among)})" if self.among else "")


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Expected relative slowdown of a step.

    Attributes:
        slower: By which part (0.18: 1.18 times as long); negative: it is faster. low, high: Bounds that are to hold in
            80 %.
        measurements: Attempts that say so.
        source: "measured" (of this kind, so); "formula" (by what was measured of this kind); "others" (of other kinds).
        note: What to bear in mind, or "".
    """

    slower: float
    low: float
    high: float
    measurements: int
    source: Literal["measured", "formula", "others"]
    note: str = ""

    def line(self, than: str = "") -> str:
        """Return it as text: "about 18 % slower than in one (12 to 25 %, 40 measurements)"."""
        what = "about as fast as" if abs(self.slower) < 0.005 else (
            f"about {100 * abs(self.slower):.0f} % {'slower' if self.slower > 0 else 'faster'} than"
        )  # fmt: skip
        sign = -1 if self.slower <= -0.005 else 1
        low, high = sorted((100 * sign * self.low, 100 * sign * self.high))
        by = {"measured": "", "formula": "estimated, ", "others": "as other kinds of jobs, "}[self.source]
        count = count_of(self.measurements, "measurement")
        return f"{what} {than} ({low:.0f} to {high:.0f} %, {by}{count})" + (f"; {self.note}" if self.note else "")


class PlaceCost(msgspec.Struct, frozen=True, kw_only=True):
    """Expected slowdown of a job at its placement.

    Attributes:
        slower: By which part, by all that is known: 0.18: 1.18 times as long as alone in one rack.
        lines: What that is made of, as a person reads it: racks (or nodes), then the neighbours that cost most.
        costs: The same as figures.
    """

    slower: float
    lines: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()


class JobClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``gpusched predict NAME`` shows of a job class.

    Attributes:
        paces: At each shape, the most measured first. links: Its sensitivity and pressure.
        lines: What was asked for, as a person reads it. costs: The same as figures, in the same order; None: nothing
            says.
    """

    kind: str
    paces: tuple[SpeedSummary, ...]
    links: tuple[ContentionSummary, ...]
    lines: tuple[str, ...] = ()
    costs: tuple[Cost | None, ...] = ()


class SpeedSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Speed per second of a job class at one shape, alone; 80 % of attempts lie in ``low`` to ``high``."""

    shape: JobShape
    pace: float
    low: float
    high: float
    measurements: int


class ContentionSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Sensitivity and pressure of a job class over a link, with 80 % intervals: (low, middle, high)."""

    link: Link
    sensitivity: tuple[float, float, float]
    pressure: tuple[float, float, float]
    measurements: int
