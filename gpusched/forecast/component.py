"""Forecasts in which another package's component chooses nodes, by the live pass (`sched.placement`), run by Python.

Such a forecast is slower by far, so only short queues have one; in long ones these partitions place by best fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import numpy as np

from gpusched.compiled import in_python
from gpusched.forecast.initial import InitialState, simulated_policy
from gpusched.forecast.run import (
    WORK,
    ForecastPass,
    QueueArrays,
    decide_forecast,
    decide_partition,
    forecast_pass,
    in_order,
    update_started_fit,
)
from gpusched.model.policy import Place
from gpusched.model.snapshot import Snapshot
from gpusched.sched.arrays import NodeArrays
from gpusched.sched.placement import NodeChooser, pass_by_component
from gpusched.sched.state import ClusterState, Ints
from gpusched.sim.engine.loop import Decide, looped

LONGEST_QUEUE = 200  # jobs that wait or run
_WORK = 20_000  # what a pass, and a start in it, cost in entries of a compiled queue: about a millisecond


def component_of(snapshot: Snapshot, partition: str) -> str | None:
    """Return the name of another package's placement in a partition; None: it has a placement of this package."""
    policy = snapshot.policies.get(partition)
    place = None if policy is None else simulated_policy(policy).place
    return None if place in get_args(Place) else place


def uses_components(snapshot: Snapshot) -> bool:
    """Return whether forecasts ask other packages' placements, if there are any: the queue is short enough."""
    return len(snapshot.pending) + len(snapshot.running) <= LONGEST_QUEUE


def forecast_by_components(names: Mapping[int, str], world: NodeArrays, initial: InitialState) -> Decide[QueueArrays]:
    """Return `run.run_forward` in which these partitions (index: component) are placed by their components.

    The rule of partition ``i`` (`run.QUEUE`) becomes ``-1 - i``, by which the pass knows it.
    """
    gpu_type, passes = np.array([node.gpu_type for node in world.nodes]), initial.passes
    choosers = {
        -1 - i: NodeChooser(name, passes.usable, gpu_type, passes.rng, replays=False) for i, name in names.items()
    }
    for rule in choosers:
        initial.queues["rule"][-1 - rule] = rule

    def by_component(state: ClusterState, queue: Ints, backfill: int, more: ForecastPass) -> None:
        """Run one partition's pass: by its component if it has one, else as compiled."""
        if more.place not in choosers:
            forecast_pass(state, queue, backfill, more)
            return
        waiting = in_order(more.arrays, -1 - more.place)
        pass_by_component(state, waiting, backfill, choosers[more.place])
        more.arrays.counter[WORK] += _WORK * (1 + state.outcome.total[0])
        update_started_fit(more.arrays, state.resources, state.requests, state.jobs.masks)

    decide = in_python(decide_partition, forecast_pass=by_component)
    return looped(in_python(decide_forecast, decide_partition=decide), compiled=False)
