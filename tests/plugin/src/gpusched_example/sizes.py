"""A sizing rule: all spare GPUs go to one job after the other, those that have run or waited for longest first."""

from __future__ import annotations

import numpy as np

from gpusched.sched.sizing.question import Question


def one_at_a_time(question: Question) -> list[int]:
    """Return a size for each job: one that is allowed, and all of them at most ``question.capacity``.

    There is always room for the least sizes; 0 lets a job wait that does not run yet.
    """
    claims = question.claims
    allowed = [sizes[may != 0].tolist() for sizes, may in zip(claims.sizes, claims.allowed, strict=True)]
    sizes = [least for least, *_ in allowed]
    spare = question.capacity - sum(sizes)
    for job in np.argsort(-claims.jobs["age_s"], kind="stable").tolist():
        most = max(size for size in allowed[job] if size - sizes[job] <= spare)
        spare -= most - sizes[job]
        sizes[job] = most
    return sizes


def half(question: Question) -> list[float]:
    """Answer wrongly, as code can: the rule greedy-gain decides, and a line says so."""
    return [size / 2 for size in one_at_a_time(question)]


def too_many(question: Question) -> list[int]:
    """Give more GPUs than there are: the same."""
    return [question.capacity + 1] * len(question.claims.jobs)


def dividing(question: Question) -> list[int]:
    """Fail, as code can: the same."""
    return [1 // 0]
