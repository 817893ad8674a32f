"""Whether jobs fail more often on a GPU or node than the same users' jobs of the same names do elsewhere.

The test is exact, stratified, one-sided (Cochran-Mantel-Haenszel's, by the exact distribution): within a stratum every
attempt is as likely to be one of those that failed. The failures on a GPU are then a sum of hypergeometric numbers. A
bad script fails everywhere and says nothing of a GPU; its stratum adds as much to what is expected as to what is seen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from gpusched.model.jobs import JobState
from gpusched.model.reports import FailureRow
from gpusched.model.slices import gpu_of
from gpusched.queue.attempts import EndedAttempt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

DAYS = 30
NAMED_BELOW = 0.05
"""A GPU is named where its p-value, corrected for the number of GPUs and nodes, is at most that."""
_FAILED = (JobState.FAILED, JobState.NODE_FAIL)

Unit = tuple[str, int | None]
"""Node and GPU index; None: the node as a whole."""
Stratum = tuple[str, str]
"""User, and job name; of array tasks, the array."""


class _Counts(NamedTuple):
    """Attempts of one stratum: all, and those that failed; here, and those that failed here."""

    attempts: int
    failed: int
    here: int
    failed_here: int


def failure_rows(attempts: Iterable[EndedAttempt]) -> list[FailureRow]:
    """Return a row for each GPU and node that attempts ran on, the least probable by chance first.

    Attempts that ran out of memory are counted by themselves: neither as failures nor among the others.
    """
    compared, of_memory = _compared(attempts)
    strata: dict[Stratum, list[int]] = defaultdict(_none)
    by_unit: dict[Unit, dict[Stratum, list[int]]] = defaultdict(lambda: defaultdict(_none))
    for stratum, units, failed in compared:
        for sums in (strata[stratum], *(by_unit[unit][stratum] for unit in units)):
            sums[0] += 1
            sums[1] += failed
    counts = {
        unit: [_Counts(*strata[stratum], *here) for stratum, here in strata_here.items()]
        for unit, strata_here in by_unit.items()
    }
    known = sorted(counts.keys() | of_memory.keys(), key=lambda unit: (unit[0], -1 if unit[1] is None else unit[1]))
    probabilities = {unit: _p_value(counts.get(unit, [])) for unit in known}
    corrected = _holm(probabilities)
    rows = [_row(unit, counts.get(unit, []), of_memory[unit], probabilities[unit], corrected[unit]) for unit in known]
    return sorted(rows, key=lambda row: (row.p_value, -row.failed))


def _compared(
    attempts: Iterable[EndedAttempt],
) -> tuple[list[tuple[Stratum, frozenset[Unit], bool]], Counter[Unit]]:
    """Return (stratum, units, whether it failed) of what is compared, and the number that ran out of memory by unit.

    Failures of a stratum that follow one another without a success between them count once for the same GPUs: a script
    that fails at once frees its GPU, and the next of its kind starts on the same one.
    """
    compared: list[tuple[Stratum, frozenset[Unit], bool]] = []
    of_memory: Counter[Unit] = Counter()
    seen: dict[Stratum, set[frozenset[Unit]]] = defaultdict(set)
    for attempt in sorted(attempts, key=lambda one: (one.start_time, one.job_id)):
        units = frozenset[Unit]((node, None) for node in attempt.gpus) | {
            (node, gpu_of(number)) for node, gpus in attempt.gpus.items() for number in gpus
        }
        stratum = attempt.user, attempt.array_id or attempt.name
        if attempt.outcome == JobState.OUT_OF_MEMORY:
            of_memory.update(units)
        elif attempt.outcome not in _FAILED:
            seen.pop(stratum, None)
            compared.append((stratum, units, False))
        elif units not in seen[stratum]:
            seen[stratum].add(units)
            compared.append((stratum, units, True))
    return compared, of_memory


def _none() -> list[int]:
    """Return the start of a sum: attempts, and those that failed."""
    return [0, 0]


def _row(unit: Unit, counts: Sequence[_Counts], of_memory: int, p_value: float, corrected: float) -> FailureRow:
    comparable = [c for c in counts if c.attempts > c.here]
    expected = sum(c.here * (c.failed - c.failed_here) / (c.attempts - c.here) for c in comparable)
    return FailureRow(
        node=unit[0], gpu=unit[1], attempts=sum(c.here for c in counts), failed=sum(c.failed_here for c in counts),
        out_of_memory=of_memory, compared=sum(c.here for c in comparable),
        failed_compared=sum(c.failed_here for c in comparable), expected=expected, p_value=p_value, corrected=corrected,
        named=corrected <= NAMED_BELOW,
    )  # fmt: skip


def _p_value(counts: Iterable[_Counts]) -> float:
    """Return the probability of so many failures here, or more, if they do not depend on the place in each stratum."""
    counts = [c for c in counts if c.failed and 0 < c.here < c.attempts]
    seen = sum(c.failed_here for c in counts)
    if seen <= sum(c.here * c.failed / c.attempts for c in counts):
        return 1.0  # no more than expected: of no interest, and most units
    import numpy as np

    total: NDArray[np.float64] = np.ones(1)
    for c in counts:
        total = np.convolve(total, _hypergeometric(c.attempts, c.failed, c.here))
    return float(min(1.0, total[seen:].sum()))


@lru_cache(maxsize=65536)  # of a stratum only ``here`` varies, over few values
def _hypergeometric(attempts: int, failed: int, here: int) -> NDArray[np.float64]:
    """Return ``float64[min(here, failed) + 1]``: the probabilities of 0, 1 ... failures here."""
    import numpy as np

    found = np.zeros(min(here, failed) + 1)
    for k in range(max(0, here + failed - attempts), len(found)):
        ways = _log_choose(failed, k) + _log_choose(attempts - failed, here - k)
        found[k] = math.exp(ways - _log_choose(attempts, here))
    return found


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _holm(probabilities: Mapping[Unit, float]) -> dict[Unit, float]:
    """Return p-values corrected by Holm's method: the chance that any unit without fault is named is bounded."""
    corrected: dict[Unit, float] = {}
    largest = 0.0
    ordered = sorted(probabilities.items(), key=lambda pair: pair[1])
    for rank, (unit, p) in enumerate(ordered):
        largest = max(largest, min(1.0, p * (len(ordered) - rank)))
        corrected[unit] = largest
    return corrected
