"""Placement by a component of the group ``placements``: it ranks the nodes on which a job fits.

A component compares nodes, and cannot choose one that does not fit; whether a job fits, when, and what is kept for the
head is decided by the compiled passes. The walk is that of `kernel.queue_pass`, run by Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.compiled import NotCached
from gpusched.config.plugins import ComponentError, installed
from gpusched.errors import Warnings
from gpusched.sched.backfill import attempt_any, protect, reserve_any
from gpusched.sched.fit import request_of, with_mask
from gpusched.sched.kernel.queue_pass import Pass, queue_pass
from gpusched.sched.order import Columns
from gpusched.sched.state import (
    FIRST_FIT,
    STARTED,
    ClusterState,
    Flags,
    Ints,
    PlacementRequest,
    Resources,
    Scratch,
    Words,
    resources_of,
)

INSTEAD = "best-fit"  # live, of a component that does not work


class FittingNodes(NamedTuple):
    """The nodes on which a part of a job fits, one entry for each, in the inventory's order.

    Attributes:
        free: What they have free: ``gpus``, ``cores``, ``memory`` (MiB), ``int64[nodes]`` each. At the head's
            reservation: at the time for which nodes are kept.
        total: What they have free when empty.
        gpu_type: ``str[nodes]``. rack: ``int64[nodes]``: a number of the node's rack.
    """

    free: Resources
    total: Resources
    gpu_type: npt.NDArray[np.str_]
    rack: Ints


Placement = Callable[[PlacementRequest, FittingNodes], Columns]
"""A job (``request.parts`` nodes, ``request.gpus``, ``cores`` and ``memory`` on each) and nodes -> what to order the
nodes by: the first column that differs decides, smaller first; ties go to the earlier node."""


def first_fit(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """Take the first nodes; compiled in `place.choose`, like the other two."""
    return ()


def best_fit(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """Take the nodes with least left over: of GPUs, then of cores, then of memory."""
    return nodes.free.columns


def spread(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """Take the nodes with most free, in the same order."""
    return -nodes.free.gpus, -nodes.free.cores, -nodes.free.memory


class NodeChooser:
    """Chooses nodes by a component, in one pass or one replay.

    Args:
        name: Of the component. total: The nodes, empty of jobs. gpu_type: ``str[nodes]``.
        replays: Whether a component that fails ends the run. Live `INSTEAD` takes its place, with a warning.

    Raises:
        ComponentError: In a replay, if it is not installed or cannot be imported.
    """

    def __init__(
        self, name: str, total: Resources, gpu_type: npt.NDArray[np.str_], rng: Words, *, replays: bool
    ) -> None:
        self.rng = rng
        self._name, self._total, self._gpu_type, self._replays = name, total, gpu_type, replays
        self._by: Placement = best_fit
        try:
            self._by = installed("placements", name).load()
        except ComponentError as error:
            self._fail(error)

    def choose(self, free: Resources, masks: Flags, request: PlacementRequest, scratch: Scratch) -> None:
        """Set ``scratch.chosen`` to the nodes for a request that fits (`place.choose`), the first by the component."""
        rows = np.arange(request.lo, request.hi)
        fits = (free.gpus[rows] >= request.gpus) & (free.cores[rows] >= request.cores)
        fits &= free.memory[rows] >= request.memory
        if request.mask >= 0:
            fits &= masks[request.mask, rows] != 0
        rows = rows[fits]
        rack = np.zeros(len(rows), np.int64) if scratch.racks is None else scratch.racks["number"][rows]
        ranked = self._ranked(
            request, FittingNodes(_at(free, rows), _at(self._total, rows), self._gpu_type[rows], rack)
        )
        if request.spread:
            ranked = _first_rack(ranked, rack, request.parts)
        scratch.chosen[: request.parts] = rows[ranked[: request.parts]]

    def _ranked(self, request: PlacementRequest, nodes: FittingNodes) -> Ints:
        """Return the nodes, ``int64[nodes]`` of their indices, from first to last."""
        count = len(nodes.rack)
        try:
            columns = self._columns(request, nodes)
        except ComponentError as error:
            self._fail(error)
            columns = best_fit(request, nodes)
        ranked: Ints = np.lexsort([np.arange(count), *columns[::-1]])
        return ranked

    def _columns(self, request: PlacementRequest, nodes: FittingNodes) -> Columns:
        """Return the component's answer.

        Raises:
            ComponentError: It failed, or the answer is not a number for each node.
        """
        try:
            found = self._by(request, nodes)
            given: list[Any] = [np.asarray(c) for c in (found.columns if isinstance(found, Resources) else found)]
        except NotCached:  # a trial of what is compiled, not the component's fault
            raise
        except Exception as error:  # another's code: anything can be wrong with it
            raise installed("placements", self._name).failed(error) from error
        for column in given:
            if column.shape != nodes.rack.shape or column.dtype.kind not in "iufb" or np.isnan(column).any():
                raise installed("placements", self._name).error("it did not return one number for each node")
        return given

    def _fail(self, error: ComponentError) -> None:
        """End a replay; live go on with `INSTEAD`."""
        if self._replays:
            raise error
        Warnings.give(f"{error.line()}; {INSTEAD} is used")
        self._by = best_fit


def _at(resources: Resources, rows: Ints) -> Resources:
    return resources_of(column[rows] for column in resources.columns)


def _first_rack(ranked: Ints, rack: Ints, parts: int) -> Ints:
    """Return the nodes of the rack that has so many of them first."""
    has = np.zeros(int(rack.max(initial=0)) + 1, np.int64)
    for node in ranked.tolist():
        has[rack[node]] += 1
        if has[rack[node]] == parts:
            own: Ints = ranked[rack[ranked] == rack[node]]
            return own
    raise AssertionError("a request that fits in one rack fits in none")


def _attempt(state: ClusterState, job: int, late: bool, first: bool, by: NodeChooser) -> tuple[int, int]:
    """Try to place a job; whether it fits does not depend on the component."""
    code, given = attempt_any(state, int(state.jobs.shape[job]), FIRST_FIT, late, by.rng)
    if code == STARTED:
        free = state.scratch.late if late else state.resources
        by.choose(free, state.jobs.masks, request_of(state.requests, given), state.scratch)
    return code, given


def _hold(state: ClusterState, job: int, code: int, by: NodeChooser) -> float:
    """Reserve nodes of the component's choice for the head, at the earliest time at which it fits."""
    _, releases, requests, jobs, scratch, _, now = state
    shadow, given = reserve_any(
        state.resources, releases, jobs.masks, requests, int(jobs.shape[job]), FIRST_FIT, now, float(jobs.limit[job]),
        scratch,
    )  # fmt: skip
    request, calendar = request_of(requests, given), scratch.calendar
    if shadow < np.inf:
        # where nodes are reserved, the calendar's row says which are the job's at that time
        between = calendar is not None and calendar.node.size > 0
        own = with_mask(request, calendar.work) if calendar is not None and between else request
        by.choose(scratch.future, jobs.masks, own, scratch)
    protect(state.resources, request, shadow < np.inf, scratch)
    return shadow


pass_by_component: Pass[NodeChooser] = queue_pass(_attempt, _hold, compiled=False)
"""The pass of these placements; backfill none, skip or easy."""
