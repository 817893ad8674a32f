"""Forecasts: when a pending job is expected to start, and what would make it start sooner."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpusched.model.interference import Cost

Spread = Literal["server", "rack", "any"]


class ExpectedStart(msgspec.Struct, frozen=True, kw_only=True):
    """A job's expected start, from simulating the current queue; Unix seconds, None: it does not start.

    Attributes:
        median, low, high: Of the runs with drawn run times: the middle one, and those that 10 % and 90 % do not exceed.
        by_limits: With every job using its whole time limit.
        nodes: Where most runs start it. certain: In which part of them (0..1).
        runs: How many draws there were.
        never: Why it does not start, or "".
        assumptions: What is taken for granted, in sentences.
    """

    median: float | None = None
    low: float | None = None
    high: float | None = None
    by_limits: float | None = None
    nodes: tuple[str, ...] = ()
    certain: float = 0.0
    runs: int = 0
    never: str = ""
    assumptions: tuple[str, ...] = ()


class SpreadStart(msgspec.Struct, frozen=True, kw_only=True):
    """A job's expected start if it used nodes this close together only; from the runs of `ExpectedStart`.

    Attributes:
        spread: All in one server, in one rack, or wherever it fits first.
        how: Options of ``submit`` that ask for it.
        median, low, high: As there.
        nodes: Where most runs start it. racks: In how many racks these are; 0: there are none.
        cost: How much slower it is there than nearer; None: nothing says, or it is as near as can be.
        message: That as a sentence, or "".
    """

    spread: Spread
    how: str
    median: float | None = None
    low: float | None = None
    high: float | None = None
    nodes: tuple[str, ...] = ()
    racks: int = 0
    cost: Cost | None = None
    message: str = ""


class Sooner(msgspec.Struct, frozen=True, kw_only=True):
    """One change that would start the job sooner, checked in the same runs.

    Attributes:
        what: ``with 4 GPUs``, ``in V100``, ``after job k3f9 ends``.
        how: Options of ``submit``, or a command; "" where there is nothing to type.
        start: When it would start then (median; Unix seconds).
        now: At once.
        nodes: Where.
    """

    what: str
    how: str = ""
    start: float
    now: bool = False
    nodes: tuple[str, ...] = ()
