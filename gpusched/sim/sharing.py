"""Whether a replay shares GPUs between jobs, and its notes on that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast, get_args

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.policy import MAPPING_PLACES
from gpusched.model.units import count_of
from gpusched.sched.state import Floats, Ints, ints
from gpusched.sim.policies import PLACEMENTS, ReplayPolicy
from gpusched.traces.trace import Trace

if TYPE_CHECKING:
    from gpusched.model.interference import JobClassEstimate
    from gpusched.model.snapshot import NodeView
    from gpusched.sched.sharing.pairs import Party, Place

Share = Literal["no", "fractions", "pairs"]
Sharing = Literal["auto", "no", "fractions", "pairs"]


class SharingBeliefs(NamedTuple):
    """Which jobs agreed to share GPUs, and their slowdowns as estimated by their installation.

    Attributes:
        row: ``int64[jobs]``: index into the others; -1: it shares nothing. kind: ``int64[nodes]``, likewise.
        lost: ``float64[kinds, rows, rows]``: `kernel.beside.Pairings.cost`.
        speed: ``float64[kinds, rows, rows + 1]``: `engine.state.Pace.speed`.
        places, classes: The kinds of nodes, and the estimates of the jobs' classes.
    """

    row: Ints
    kind: Ints
    lost: Floats
    speed: Floats
    places: tuple[Place, ...]
    classes: Mapping[str, JobClassEstimate]


def sharing_beliefs(
    parties: Sequence[Party | None], nodes: Sequence[NodeView], beliefs: Mapping[str, JobClassEstimate]
) -> SharingBeliefs:
    """Return which jobs may share GPUs on these nodes, and their speeds; a party of None shares nothing."""
    from gpusched.sched.sharing.pairs import Losses, cost_table, place_of  # replays start faster without it

    losses, rows, places = Losses(beliefs), dict["Party", int](), dict["Place", int]()
    kind = ints([places.setdefault(place_of(node), len(places)) for node in nodes])
    row = ints([-1 if one is None else rows.setdefault(one, len(rows)) for one in parties])
    every, speed = list(rows), np.ones((len(places), len(rows), len(rows) + 1))
    if every:
        speed[:, :, 1:] = 1.0 / (1.0 + losses.slower(every, every))
    return SharingBeliefs(row, kind, cost_table(every, every, list(places), losses), speed, tuple(places), beliefs)


def share_for(asked: str, trace: Trace) -> Share:
    """Return the meaning of ``--share`` for a trace: "auto" honours the GPU fractions that its jobs request, if any.

    Raises:
        UsageError: There is no such way to share.
    """
    if asked == "auto":
        return "fractions" if fractional(trace) else "no"
    if asked not in get_args(Share):
        raise UsageError(f"--share {asked!r} is not known", f"one of {', '.join(get_args(Sharing))}")
    return cast(Share, asked)


def fractional(trace: Trace) -> int:
    """Return how many jobs request a part of one GPU."""
    return int(np.count_nonzero((trace.gpus == 1) & (trace.gpu_milli < 1000)))


def pairing_costs(speed: Floats) -> Floats:
    """Return `kernel.beside.Pairings.cost` of measured `engine.state.Pace.speed`: ``float64[kinds, rows, rows]``.

    The less, the more both get done, each by its own speed alone; infinite where that is no more than by taking turns,
    or was not measured: what Gavel calls space sharing (Narayanan et al., OSDI 2020).
    """
    relative = speed[:, :, 1:] / speed[:, :, :1]
    both = relative + relative.transpose(0, 2, 1)
    return np.where(both > 1.0, -both, np.inf)


def sharing_of(
    asked: Share, trace: Trace, policy: ReplayPolicy, rule: str, believed: SharingBeliefs | None, costs: bool
) -> tuple[Share, tuple[str, ...]]:
    """Return how GPUs are shared under a policy with this placement, and notes; ``costs``: whether placement costs."""
    asked, parts = asked if believed is None else "pairs", fractional(trace)
    by_pass = not costs and rule in PLACEMENTS and rule not in MAPPING_PLACES and policy.backfill != "conservative"
    whole = policy.chooses_sizes or not by_pass
    if asked != "no" and whole and (asked == "fractions" or parts > 0):
        return "no", (f"{policy.name} does not share GPUs: every job holds whole ones",)
    if asked == "no":
        return "no", (f"{count_of(parts, 'job')} that request part of a GPU hold a whole one",) if parts else ()
    notes = [f"GPUs are shared: {count_of(parts, 'job')} hold only the requested part of one"] if parts else []
    if asked == "pairs":
        where = "where measurements show more throughput together" if believed is None else "as they agreed to"
        notes.append(f"GPUs are shared: two jobs share {where}")
    return asked, tuple(notes)
