"""The groups of jobs that run alike, the narrowest first: of one burst, command, name, image, request, user, partition.

Of jobs without a user the partition (virtual cluster) takes the user's place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gpusched.compiled.arrays import Floats, Ints
from gpusched.model.interference import name_pattern

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace

BURST_GAP_S = 600.0  # jobs of one burst follow each other within this time
# Each kind of group, and what is kept of its counts when one more of its jobs has ended.
KINDS = {
    "burst": 0.95,
    "user, command": 0.9,
    "user, name, GPUs": 0.9,
    "user, name": 0.9,
    "user, image": 0.9,
    "user, GPUs, limit": 0.9,
    "user": 0.9,
    "name": 0.95,
    "partition, GPUs": 0.98,
    "partition": 0.98,
    "limit": 0.99,
    "all": 0.995,
}
KEEPS: Floats = np.array(list(KINDS.values()))
NARROW = 7  # kinds of one user's jobs
NAMED = 8  # kinds by user or name


def groups_of(trace: Trace) -> Ints:
    """Return each job's groups, ``int64[jobs, KINDS]``; -1: the trace does not say, or the next wider is the same."""
    jobs = len(trace)
    names: dict[str, int] = {}
    pattern = np.array([names.setdefault(name_pattern(name), len(names)) for name in trace.models] + [-1], np.int64)
    name, nothing = pattern[trace.model], np.full(jobs, -1, np.int64)
    users = (trace.user >= 0).any()
    owner = trace.user if users else trace.group + 1
    limit = np.where(trace.limit > 0, trace.limit, -1.0).astype(np.int64)
    command, image = (nothing if column is None else column for column in (trace.command, trace.image))
    request = (owner, name, command, trace.gpus, trace.nodes, trace.cores, trace.memory_mib, limit)
    parts: tuple[tuple[Ints, ...], ...] = (
        (bursts_of(trace.submit, _numbered(*request)),), (owner, command), (owner, name, trace.gpus), (owner, name),
        (owner, image), (owner, trace.gpus, limit + 1), (owner,), (name,), (trace.group, trace.gpus), (trace.group,),
        (limit,), (np.zeros(jobs, np.int64),),
    )  # fmt: skip
    found, first, wider = np.full((jobs, len(parts)), -1, np.int64), 0, nothing
    for kind in range(len(parts) - 1, -1, -1):
        known = np.all([part >= 0 for part in parts[kind]], axis=0)
        if not known.any():
            continue
        group = np.full(jobs, -1, np.int64)
        group[known] = _numbered(*(part[known] for part in parts[kind]))
        if kind == len(parts) - 1 or not np.array_equal(group, wider):
            found[known, kind] = group[known] + first
            first += int(group.max()) + 1
            wider = group
    return found


def _numbered(*columns: npt.NDArray[Any]) -> Ints:
    """Return the numbers of distinct rows, in the order in which they first appear."""
    _, place, index = np.unique(np.column_stack(columns), axis=0, return_index=True, return_inverse=True)
    rank = np.empty(len(place), np.int64)
    rank[np.argsort(place, kind="stable")] = np.arange(len(place))
    return rank[index.reshape(-1)]


def bursts_of(submit: Floats, kind: Ints) -> Ints:
    """Return each job's burst: jobs of one kind, each submitted within `BURST_GAP_S` of the one before."""
    if not len(submit):
        return np.zeros(0, np.int64)
    order = np.lexsort((submit, kind))
    new = np.ones(len(submit), np.bool_)
    new[1:] = (kind[order][1:] != kind[order][:-1]) | (np.diff(submit[order]) > BURST_GAP_S)
    burst = np.empty(len(submit), np.int64)
    burst[order] = np.cumsum(new) - 1
    return burst
