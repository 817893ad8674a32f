"""What a policy knows of run times, and the static ranks that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.estimation.features import NO_HISTORY_S
from gpusched.model.units import count_of
from gpusched.sched.order import Keys, columns_of
from gpusched.sched.state import Floats, Ints
from gpusched.sim.orders import Knows, order_rule
from gpusched.sim.policies import ReplayPolicy
from gpusched.traces.trace import Trace


class Knowledge(NamedTuple):
    """The run times that a policy uses.

    Attributes:
        expected: ``float64[jobs]``: run times in seconds, finite and positive.
        knows: What that really is, to be printed with the result.
        notes: Where it differs from what the policy declared.
    """

    expected: Floats
    knows: Knows
    notes: tuple[str, ...]


def knowledge_of(trace: Trace, policy: ReplayPolicy) -> Knowledge:
    """Return real run times for an oracle, else time limits.

    Where a trace has no limits at all, what needs them (estimates do not) is given the real run times and is called an
    oracle; where only some jobs have none, these count with the longest limit of the trace.
    """
    known = np.isfinite(trace.limit) & (trace.limit > 0)
    if policy.knows in ("oracle", "nothing"):
        return Knowledge(trace.duration, policy.knows, ())
    if not known.any() and policy.knows == "estimate":  # its estimates need none
        return Knowledge(np.full(len(trace), NO_HISTORY_S), "estimate", ())
    if not known.any():
        note = f"{policy.name} uses time limits, but the trace has none: it was given the real run times (an oracle)"
        return Knowledge(trace.duration, "oracle", (note,))
    expected = np.where(known, trace.limit, trace.limit[known].max())
    missing = int((~known).sum())
    notes = (f"{count_of(missing, 'job')} without a time limit: the longest of the trace is used",) if missing else ()
    return Knowledge(expected, policy.knows, notes)


def static_ranks(order: str, trace: Trace, expected: Floats, duration: Floats) -> Ints:
    """Return each job's rank in an order that never changes, ``int64[jobs]``; ties by (submit, id).

    Orders that change, and agents, get their tie-break: by (submit, id).

    Args:
        order: Its name, as of `sim.orders`.
        trace: The jobs.
        expected: What the policy expects of run times, seconds.
        duration: The real ones.
    """
    begin = float(trace.submit[0]) if len(trace) else 0.0
    of_replays: dict[str, list[Floats | Ints]] = {  # what no live decision can know
        "sjf-oracle": [duration],
        "lpt-oracle": [-duration],
        "f1": [np.log10(expected) * trace.gpus + 870 * np.log10(np.maximum(trace.submit - begin, 1.0))],
    }
    rule = order_rule(order)  # None: an agent's order
    if order in of_replays:
        columns = of_replays[order]
    elif rule is None or rule.kind != "static":
        columns = []
    else:
        columns = columns_of(order, keys_of(trace, expected))
    return ranks_by(columns, len(trace))


def keys_of(trace: Trace, expected: Floats) -> Keys:
    """Return what orders go by, for all jobs of a trace: without priorities and usage."""
    none, no_usage = np.zeros(len(trace), np.int64), np.zeros(len(trace))
    return Keys(none, none, trace.submit, trace.gpus, trace.cores, trace.memory_mib, expected, expected, no_usage)


def ranks_by(columns: Sequence[Floats | Ints], jobs: int) -> Ints:
    """Return each job's rank by these columns, ``int64[jobs]``; ties by (submit, id)."""
    return np.argsort(np.lexsort([*columns, np.arange(jobs)][::-1]))
