"""The order of a queue: explicit priority first, then the policy's key, then Slurm's priority, submit time and id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, assert_never

import numpy as np

from gpusched.model.ids import id_key
from gpusched.model.policy import Order
from gpusched.sched.state import Floats, Ints


class Keys(NamedTuple):
    """What jobs are ordered by, one entry per job.

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
        """The entries of these jobs."""
        return Keys._make(column[jobs] for column in self)


def queue_order(order: Order, keys: Keys, ids: Sequence[str]) -> Ints:
    """The jobs (indices into ``keys`` and ``ids``) from first to last, ``int64[jobs]``.

    fifo: by submit time. ljf: largest first, by GPUs, cores, memory (Narantuya et al., CMC 2022). sjf: shortest limit
    first; sjf-estimate: shortest estimated run time. fairshare: least usage of the user first, with groups by their
    tree. Ties always by Slurm's priority where jobs are Slurm's, then by submit time, then id.
    """
    columns: list[Ints | Floats] = [-keys.priority]
    if order == "ljf":
        columns += [-keys.gpus, -keys.cores, -keys.memory]
    elif order == "sjf":
        columns.append(keys.limit)
    elif order == "sjf-estimate":
        columns.append(keys.expected)
    elif order == "fairshare":
        columns.append(keys.usage)
    elif order != "fifo":
        assert_never(order)
    columns += [-keys.standing, keys.submit]
    ranked = np.lexsort(columns[::-1])
    return _by_id_where_equal(ranked, columns, ids)


def _by_id_where_equal(ranked: Ints, columns: list[Ints | Floats], ids: Sequence[str]) -> Ints:
    """Puts runs of jobs that are equal in all ``columns`` into order of id: array tasks mostly, and few else."""
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
