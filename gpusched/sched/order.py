"""The order of a queue: explicit priority first, then the policy's key, then Slurm's priority, submit time and id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.config.plugins import OURS, ComponentError, installed
from gpusched.errors import Warnings
from gpusched.model.ids import id_key
from gpusched.sched.state import Floats, Ints

Columns = Sequence[Floats | Ints]
"""An order's sort keys, ``float64[jobs]`` or ``int64[jobs]`` each: the first that differs decides, smaller first."""


class Keys(NamedTuple):
    """The sort keys of jobs, one entry per job.

    Attributes:
        priority: ``int64``, larger goes first.
        standing: ``int64``: Slurm's own priority, larger goes first; 0 for jobs of ours.
        submit: ``float64``, Unix seconds.
        gpus, cores, memory: ``int64``, of the whole job (all its parts); MiB.
        limit: ``float64``, seconds. expected: ``float64``: the estimated run time, where there is none the limit.
        usage: ``float64``: of the job's user, see `tally.usage_of`.
    """

    priority: Ints
    standing: Ints
    submit: Floats
    gpus: Ints
    cores: Ints
    memory: Ints
    limit: Floats
    expected: Floats
    usage: Floats

    def of(self, jobs: Ints) -> Keys:
        """Return the entries of these jobs."""
        return Keys._make(column[jobs] for column in self)


def fifo(keys: Keys) -> Columns:
    """Order by submit time alone."""
    return ()


def shortest_limit(keys: Keys) -> Columns:
    """Order by limit, shortest first (``sjf``): W. E. Smith, Naval Research Logistics Quarterly 3, 1956."""
    return (keys.limit,)


def longest_limit(keys: Keys) -> Columns:
    """Order by limit, longest first (``lpt-limit``): Graham, SIAM J. Applied Mathematics 17(2), 1969."""
    return (-keys.limit,)


def shortest_estimate(keys: Keys) -> Columns:
    """Order by estimated run time, shortest first (``sjf-estimate``)."""
    return (keys.expected,)


def largest(keys: Keys) -> Columns:
    """Order by GPUs, then cores, then memory, most first (``ljf``): Narantuya et al., CMC 2022."""
    return -keys.gpus, -keys.cores, -keys.memory


def smallest(keys: Keys) -> Columns:
    """Order by GPUs, fewest first: Majumdar, Eager, Bunt, SIGMETRICS 1988."""
    return (keys.gpus,)


def fairshare(keys: Keys) -> Columns:
    """Order by the user's decayed usage, least first; with groups by their tree."""
    return (keys.usage,)


def columns_of(order: str, keys: Keys) -> list[Ints | Floats]:
    """Return the sort columns of an order, most significant first; smaller values go first.

    Raises:
        ComponentError: It is not installed, cannot be loaded, or its columns are not a number for each job.
    """
    component = installed("orders", order)
    by: Callable[[Keys], Columns] = component.load()
    if component.distribution == OURS:
        return list(by(keys))
    try:
        columns = [np.asarray(column, np.float64) for column in by(keys)]
    except Exception as error:  # another's code: anything can be wrong with it
        raise component.failed(error) from error
    if any(column.shape != keys.submit.shape or np.isnan(column).any() for column in columns):
        raise component.error("it did not return one number for each job")
    return list(columns)


def queue_order(order: str, keys: Keys, ids: Sequence[str], ties: str = "first") -> Ints:
    """Return the jobs (indices into ``keys`` and ``ids``) from first to last, ``int64[jobs]``.

    ``order``: A component of the group ``orders``. ``ties``: As a policy's. Ties are broken by Slurm's
    priority where jobs are Slurm's, then by submit time, then by id. An order that does not work is fifo, with a
    warning: a queue must not stop for it.
    """
    try:
        own: Columns = columns_of(order, keys)
    except ComponentError as error:
        Warnings.give(f"{error.line()}; fifo is used")
        own = []
    return ranked_by([*own, -keys.submit] if ties == "last" else own, keys, ids)


def ranked_by(own: Columns, keys: Keys, ids: Sequence[str]) -> Ints:
    """Return the same by these columns between the explicit priority and Slurm's."""
    columns = sort_columns(own, keys)
    ranked = np.lexsort(columns[::-1])
    return _by_id_where_equal(ranked, columns, ids)


def sort_columns(own: Columns, keys: Keys) -> list[Ints | Floats]:
    """Return a queue's sort keys except ids, most significant first: an order's columns between the others."""
    return [-keys.priority, *own, -keys.standing, keys.submit]


def _by_id_where_equal(ranked: Ints, columns: list[Ints | Floats], ids: Sequence[str]) -> Ints:
    """Sort runs of jobs that are equal in all ``columns`` by id: mostly array tasks."""
    if ranked.size < 2:
        return ranked
    equal = np.ones(ranked.size - 1, dtype=np.bool_)
    for column in columns:
        values = column[ranked]
        equal &= values[1:] == values[:-1]
    if not equal.any():
        return ranked
    edges = np.diff(np.concatenate(([0], equal.astype(np.int8), [0])))
    for first, last in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        ranked[first : last + 1] = sorted(ranked[first : last + 1], key=lambda job: id_key(ids[job]))
    return ranked
