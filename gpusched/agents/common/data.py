"""What a training learns from: traces, histories and descriptions brought to nodes, one `Material` per partition."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gpusched.agents.common.request import TrainRequest
from gpusched.config.paths import state_folder
from gpusched.config.weights import DEFAULT
from gpusched.errors import GpuschedError, NoHistory, UsageError
from gpusched.estimation.predictor import ends_of
from gpusched.model.resources import Inventory, Partition
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of, parse_time
from gpusched.queue.lastgood import inventory_or_kept
from gpusched.sim.power import power_model
from gpusched.study.own import history, limited
from gpusched.study.study import DEFAULT_LOAD, Scenario, scenario_of
from gpusched.traces.generate import generate
from gpusched.traces.slicing import parse_trace_time, select, slice_trace
from gpusched.traces.trace import Trace
from gpusched.traces.workload import RequestedTimes, RunTime, SizeClass, Workload, load_workload

HELD_OUT_DRAWS = 5
"""How many other draws of a generated workload the final table is made on."""
FIRST_SEED, FIRST_HELD_OUT = 0, 1_000_003
_JOBS_OF_FLAVORS = 2000


Bools = npt.NDArray[np.bool_]


class Material(NamedTuple):
    """One partition's: what to learn from and what to judge by; see `request.TrainJob`."""

    partition: str
    declared: Partition | None
    scenario: Scenario
    held_out: tuple[Scenario, ...]
    workload: Workload | None
    ended: Bools | None = None


def materials(request: TrainRequest) -> list[Material]:
    """For every partition that is asked for, or ``default`` where the nodes are of no inventory.

    Raises:
        UsageError: Options contradict each other or name what does not exist.
        GpuschedError: A trace, the history or the inventory cannot be read, or no job is left.
    """
    if request.trace is not None and request.generate is not None:
        raise UsageError("--trace and --generate cannot be combined", "use one of them")
    if not 0 <= request.hold_out < 1:
        raise UsageError(f"--hold-out {request.hold_out:g}: expected a fraction, such as 0.2")
    inventory = _inventory(request)
    partitions = _partitions(request, inventory)
    if request.generate is not None:
        drawn = request.generate
        workload = load_workload(drawn) if isinstance(drawn, str) else drawn
        return [_generated(request, workload, partition) for partition in partitions]
    if request.trace is not None:
        return [_recorded(request, _trace(request, partition, len(partitions)), partition) for partition in partitions]
    if inventory is None:
        raise UsageError("--nodes needs a workload", "name a workload: --trace or --generate")
    own = _history(request, inventory)
    return [_history_or_flavors(request, own, partition) for partition in partitions if partition is not None]


def _inventory(request: TrainRequest) -> Inventory | None:
    """The one named; the one in force where no other nodes are given."""
    if request.inventory is not None:
        return inventory_or_kept(Path(request.inventory), state_folder())
    own = request.trace is None and request.generate is None
    elsewhere = request.nodes is not None or request.gpus_per_node is not None
    if elsewhere or not (own or request.partition is not None):
        return None
    return inventory_or_kept(None, state_folder())


def _partitions(request: TrainRequest, inventory: Inventory | None) -> list[Partition | None]:
    if inventory is None:
        if request.partition is not None:
            raise UsageError("--partition names a partition of an inventory", "omit --nodes and --gpus-per-node")
        return [None]
    if request.partition is None:
        return list(inventory.partitions)
    found = inventory.partition(request.partition)
    if found is None:
        names = [p.name for p in inventory.partitions]
        raise UsageError(f"there is no partition {request.partition!r}{did_you_mean(request.partition, names)}")
    return [found]


def _scenario(request: TrainRequest, trace: Trace, partition: Partition | None, load: float | None) -> Scenario:
    """The trace on its nodes."""
    inventory = None if partition is None else Inventory(path="", partitions=(partition,))
    return scenario_of(
        trace, nodes=request.nodes, gpus_per_node=request.gpus_per_node, inventory=inventory, load=load,
        power=lambda pool: power_model(pool, inventory=inventory),
    )  # fmt: skip


def _trace(request: TrainRequest, partition: Partition | None, partitions: int) -> Trace:
    from gpusched.traces.load import load

    vc = request.vc if request.vc is not None or partition is None or partitions == 1 else partition.name
    return load(request.trace or "", request.format, vc=vc, since=request.since, until=request.until)


def _recorded(request: TrainRequest, trace: Trace, partition: Partition | None) -> Material:
    """A trace, parted by time into what is learned from and what is held out.

    What is learned from is what was known at the cut: a job that ran on beyond it has not ended, and how long it ran in
    the end is not told. Without a held-out part the cut is ``--until``; without that either, all is past.
    """
    scenario = _scenario(request, trace, partition, request.load)
    name = DEFAULT if partition is None else partition.name
    over = _over_s(request, trace)
    trace = scenario.trace
    cut = float(trace.submit[0] + (trace.submit[-1] - trace.submit[0]) * (1 - request.hold_out))
    after = np.flatnonzero(trace.submit > cut)
    before, ended = known_by(trace, cut if len(after) else float(trace.submit[-1]) + over)
    if not len(before):  # all came at one moment: what they ran is all there is
        return Material(name, partition, scenario, (), None)
    held = select(trace, after, "the held-out end of the trace, started on empty nodes")
    held_out = (scenario._replace(trace=held),) if len(after) else ()
    running = int((~ended).sum())
    note = (
        f"{count_of(running, 'job')} still running at the end of the training data: counted with their run time so far"
    )
    told = scenario._replace(trace=before, notes=(*scenario.notes, note) if running else scenario.notes)
    return Material(name, partition, told, held_out, None, ended)


def _over_s(request: TrainRequest, trace: Trace) -> float:
    """Seconds from the last submission to ``--until``, when what is learned from ends; infinite: when all had ended."""
    if request.until is None:
        return float("inf")
    try:
        if request.trace is None:
            until = parse_time(request.until, time.time()) - (trace.epoch or 0.0)
        else:
            until = parse_trace_time(trace, request.until)
    except (ValueError, UsageError):
        return 0.0
    return max(0.0, until - float(trace.submit[-1]))


def known_by(trace: Trace, until: float) -> tuple[Trace, Bools]:
    """The jobs that had begun by ``until``, as they were known then, and which of them had ended: ``bool[jobs]``.

    A job that still ran has the run time that it had had: more than that nobody could know. One that waited is not
    there. Where the log has no waiting times a job counts as begun when it was submitted.
    """
    end = ends_of(trace)
    begin, ended = end - trace.duration, end <= until
    there = np.flatnonzero((trace.submit <= until) & (ended | (begin < until)))
    ran = np.where(ended, trace.duration, until - begin)
    return replace(select(trace, there), duration=ran[there]), ended[there]


def _generated(request: TrainRequest, workload: Workload, partition: Partition | None) -> Material:
    """Draws of a description, on the partition's nodes; its load is one on these nodes."""
    load = request.load if request.load is not None else workload.load
    scenario = _scenario(request, generate(workload, FIRST_SEED), partition, None)
    if load is not None and scenario.pool.total_gpus:
        workload = replace(workload, load=load, per_hour=None, load_gpus=scenario.pool.total_gpus)
        if partition is not None or request.nodes is not None:  # its notes are to be of the load that is learned at
            scenario = _scenario(request, generate(workload, FIRST_SEED), partition, None)
    scenario = scenario._replace(trace=generate(workload, FIRST_SEED))
    draws = HELD_OUT_DRAWS if request.hold_out else 0
    held_out = tuple(scenario._replace(trace=generate(workload, FIRST_HELD_OUT + i)) for i in range(draws))
    return Material(DEFAULT if partition is None else partition.name, partition, scenario, held_out, workload)


_WITHOUT_LIMITS = "the record was made under limits of users, groups or classes; training applies none"


def _history(request: TrainRequest, inventory: Inventory) -> Trace | None:
    """This cluster's own jobs; None: there are none yet."""
    try:
        trace = history(request.since or "30d", request.until, own=inventory)
    except NoHistory:
        return None
    return replace(trace, notes=(_WITHOUT_LIMITS, *trace.notes)) if limited(inventory) else trace


def _history_or_flavors(request: TrainRequest, own: Trace | None, partition: Partition) -> Material:
    """The partition's own jobs; where there are none yet, its flavors, drawn: they say what may come."""
    if own is not None and partition.name in own.groups:
        return _recorded(request, slice_trace(own, vc=partition.name), partition)
    if request.since is not None or request.until is not None:
        raise GpuschedError(f"{partition.name}: no job of that period has run and ended", "omit --since and --until")
    return _generated(request, workload_of(partition), partition)


def workload_of(partition: Partition) -> Workload:
    """Jobs of the partition's flavors, equally often, arriving at random, run times about a third of the limits.

    Raises:
        UsageError: It has no flavors that use GPUs.
    """
    flavors = [f for f in partition.flavors if f.gpus > 0]
    if not flavors:
        raise UsageError(
            f"{partition.name} has no flavors to generate jobs from", "name a workload: --trace or --generate"
        )
    flavors.sort(key=lambda f: f.gpus)
    run_times = [RunTime(parts=((1.0, f.time_limit_s / 3, 0.8),), maximum_s=float(f.time_limit_s)) for f in flavors]
    sizes = (
        SizeClass(gpus=f.gpus, share=1 / len(flavors), run_time=r) for f, r in zip(flavors, run_times, strict=True)
    )
    limits = RequestedTimes(
        menu_s=tuple(sorted({float(f.time_limit_s) for f in flavors})), over_median=2.0, over_sigma=0.6
    )
    return Workload(
        name=f"generated from the flavors of {partition.name}", jobs=_JOBS_OF_FLAVORS, start=0.0, load=DEFAULT_LOAD,
        load_gpus=sum(n.gpus for n in partition.nodes), sizes=tuple(sizes), run_time=run_times[0], limits=limits,
    )  # fmt: skip
