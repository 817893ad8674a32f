"""The run times that a policy may use in a replay, and the ranks of jobs in orders that never change."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.estimation.last_two import NO_HISTORY_S
from gpusched.model.units import count_of
from gpusched.sched.order import Columns, Keys, columns_of, sort_columns
from gpusched.sched.state import Floats, Ints
from gpusched.sim.orders import Knows, order_rule
from gpusched.sim.policies import ReplayPolicy
from gpusched.traces.trace import Trace


class Knowledge(NamedTuple):
    """The run times that a policy uses.

    Attributes:
        expected: Run times in seconds, ``float64[jobs]``, finite and positive.
        knows: What they really are, to be printed with the result; not always what the policy declared.
        notes: Sentences about the difference.
    """

    expected: Floats
    knows: Knows
    notes: tuple[str, ...]


def knowledge_of(trace: Trace, policy: ReplayPolicy) -> Knowledge:
    """Return real run times for an oracle, else time limits; estimates are made during the replay.

    If only some jobs have a limit, the others get the longest limit of the trace. If no job has one, a policy that
    needs limits is given the real run times, and is called an oracle; one that estimates starts from a constant.
    """
    known = np.isfinite(trace.limit) & (trace.limit > 0)
    if policy.knows in ("oracle", "nothing"):  # a policy that knows nothing does not read them
        return Knowledge(trace.duration, policy.knows, ())
    if not known.any() and policy.knows == "estimate":
        return Knowledge(np.full(len(trace), NO_HISTORY_S), "estimate", ())
    if not known.any():
        note = f"{policy.name} uses time limits, but the trace has none: it was given the real run times (an oracle)"
        return Knowledge(trace.duration, "oracle", (note,))
    expected = np.where(known, trace.limit, trace.limit[known].max())
    missing = int((~known).sum())
    notes = (f"{count_of(missing, 'job')} without a time limit: the longest of the trace is used",) if missing else ()
    return Knowledge(expected, policy.knows, notes)


def static_ranks(order: str, trace: Trace, expected: Floats, duration: Floats) -> Ints:
    """Return each job's rank in an order that never changes, ``int64[jobs]``: 0 goes first; ties by (submit, id).

    Explicit priorities go before it. For an order that changes, and for an agent's, the ranks are by (priority, submit,
    id): its tie-break.

    Args:
        order: Its name, as of `sim.orders`.
        trace: The jobs.
        expected: Run times as the policy expects them, ``float64[jobs]``, seconds.
        duration: The real ones.
    """
    begin, keys = float(trace.submit.min(initial=np.inf)), keys_of(trace, expected)
    rule, columns = order_rule(order), list[Floats | Ints]()  # None: an agent's order
    # The first three cannot be live: they need real run times, or the trace's begin.
    if order in ("sjf-oracle", "lpt-oracle"):
        columns = [duration if order == "sjf-oracle" else -duration]
    elif order == "f1":
        columns = [np.log10(expected) * trace.gpus + 870 * np.log10(np.maximum(trace.submit - begin, 1.0))]
    elif rule is not None and rule.kind == "static":
        columns = columns_of(order, keys)
    return ranks_by(columns, keys)


def keys_of(trace: Trace, expected: Floats) -> Keys:
    """Return the keys of orders for all jobs of a trace, without usage."""
    zeros = np.zeros(len(trace), np.int64)
    return Keys(
        priority=zeros if trace.priority is None else trace.priority, standing=zeros, submit=trace.submit,
        gpus=trace.gpus, cores=trace.cores, memory=trace.memory_mib, limit=expected, expected=expected,
        usage=np.zeros(len(trace)),
    )  # fmt: skip


def explicit_priorities(trace: Trace) -> Ints:
    """Return the explicit priorities as `sched.sorting.by_priority` takes them: empty where the trace has none."""
    # A copy: joblib hands large arrays over as maps, which compiled code would be compiled for anew.
    return np.zeros(0, np.int64) if trace.priority is None else np.array(trace.priority, np.int64)


def ranks_by(own: Columns, keys: Keys) -> Ints:
    """Return each job's rank by these columns, as live (`sched.order.ranked_by`), ``int64[jobs]``."""
    # The job at each rank (the last key of lexsort is the most significant), inverted to the rank of each job.
    return np.argsort(np.lexsort([*sort_columns(own, keys), np.arange(len(keys.submit))][::-1]))
