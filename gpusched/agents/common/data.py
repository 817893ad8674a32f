"""Training data: traces, histories and workload descriptions placed on nodes, one `TrainingData` per partition."""

from __future__ import annotations

import contextlib
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
from gpusched.estimation.estimators import ends_of
from gpusched.model.resources import Inventory, Partition
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of, parse_time
from gpusched.queue.lastgood import inventory_or_kept
from gpusched.queue.store import Reader
from gpusched.sim.engine.build import ReplayOptions
from gpusched.sim.pool import demand_of
from gpusched.sim.power import power_model
from gpusched.sim.slicing import split_replay, with_usual_slices
from gpusched.study.own import history, limited, seen_slices, with_site_data
from gpusched.study.study import DEFAULT_LOAD, Scenario, scenario_of
from gpusched.traces.generate import generate
from gpusched.traces.slicing import of_whole_gpus, parse_trace_time, select, slice_trace
from gpusched.traces.trace import ProgressRecords, Trace
from gpusched.traces.workload import RequestedTimes, RunTime, SizeClass, Workload, load_workload

HELD_OUT_DRAWS = 5
"""Draws of a generated workload for the final table."""
FIRST_SEED, FIRST_HELD_OUT = 0, 1_000_003
_JOBS_OF_FLAVORS = 2000


Bools = npt.NDArray[np.bool_]


class TrainingData(NamedTuple):
    """The training and held-out data of one partition; see `request.TrainJob`."""

    partition: str
    declared: Partition | None
    scenario: Scenario
    held_out: tuple[Scenario, ...]
    workload: Workload | None
    ended: Bools | None = None


def load_training_data(request: TrainRequest) -> list[TrainingData]:
    """Load the data of every requested partition; ``default`` if the nodes belong to no inventory.

    Raises:
        UsageError: Options contradict each other or name something that does not exist.
        GpuschedError: A trace, the history or the inventory cannot be read, or no job remains.
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
        found = [_generated(request, workload, partition) for partition in partitions]
        return _with_site_data(found, inventory, False)
    if request.trace is not None:
        found = [_recorded(request, _trace(request, partition, len(partitions)), partition) for partition in partitions]
        return _with_site_data(found, inventory, False)
    if inventory is None:
        raise UsageError("--nodes needs a workload", "name a workload: --trace or --generate")
    own = _history(request, inventory)
    found = [_history_or_flavors(request, own, partition) for partition in partitions if partition is not None]
    return _with_site_data(found, inventory, True)


def _with_site_data(found: list[TrainingData], inventory: Inventory | None, own: bool) -> list[TrainingData]:
    """Return the data with the inventory's switches and fair shares; ``own``: and what was learned of its jobs."""
    if inventory is None:
        return found
    with contextlib.ExitStack() as opened:
        reader = Reader.open(state_folder()) if own else None
        if reader is not None:
            opened.enter_context(contextlib.closing(reader))
        half_life_s = float(inventory.settings.fairshare_half_life_s)
        of = [
            [
                with_site_data(s, inventory, reader if data.workload is None else None)._replace(
                    groups=inventory.groups, half_life_s=half_life_s
                )
                for s in scenarios
            ]
            for data in found
            for scenarios in [(data.scenario, *data.held_out)]
        ]
    return [data._replace(scenario=first, held_out=tuple(rest)) for data, (first, *rest) in zip(found, of, strict=True)]


def _inventory(request: TrainRequest) -> Inventory | None:
    """Return the named inventory, or the one in force if no other nodes are given."""
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
    """Return the trace on its nodes."""
    inventory = None if partition is None else Inventory(path="", partitions=(partition,))
    reader = Reader.open(state_folder()) if request.slices and inventory is not None else None
    with contextlib.nullcontext() if reader is None else contextlib.closing(reader):
        seen = seen_slices(reader, inventory)
    scenario = scenario_of(
        trace, nodes=request.nodes, gpus_per_node=request.gpus_per_node, inventory=inventory, load=load, seen=seen,
        power=lambda pool: power_model(pool, inventory=inventory),
    )  # fmt: skip
    if not request.slices:
        return scenario._replace(pool=replace(scenario.pool, slices=(), cuttable=()))
    pool, note = with_usual_slices(scenario.pool, scenario.trace)
    return scenario._replace(pool=pool, notes=(*scenario.notes, *note))


def _trace(request: TrainRequest, partition: Partition | None, partitions: int) -> Trace:
    from gpusched.traces.load import load

    vc = request.vc if request.vc is not None or partition is None or partitions == 1 else partition.name
    return _kept(request, load(request.trace or "", request.format, vc=vc, since=request.since, until=request.until))


def _kept(request: TrainRequest, trace: Trace) -> Trace:
    trace = replace(trace, priority=None, array=None, array_limit=None)  # an agent learns what comes after these
    return trace if request.slices else of_whole_gpus(trace)


def _recorded(request: TrainRequest, trace: Trace, partition: Partition | None) -> TrainingData:
    """Split a trace by time into the training data and a held-out part.

    Training data holds what was known at the cut: a job that ran beyond it has not ended, and its final run time is
    unknown. Without a held-out part the cut is ``--until``; without either, all jobs have ended.
    """
    scenario = _of_jobs_that_fit(_scenario(request, trace, partition, request.load))
    name = DEFAULT if partition is None else partition.name
    over = _tail_s(request, trace)
    trace = scenario.trace
    cut = float(trace.submit[0] + (trace.submit[-1] - trace.submit[0]) * (1 - request.hold_out))
    after = np.flatnonzero(trace.submit > cut)
    before, ended = known_at(trace, cut if len(after) else float(trace.submit[-1]) + over)
    if not len(before):  # all submitted at one instant: their run times are the only data
        return TrainingData(name, partition, scenario, (), None)
    held = select(trace, after, "the held-out end of the trace, started on empty nodes")
    held_out = (scenario._replace(trace=held),) if len(after) else ()
    running = int((~ended).sum())
    note = (
        f"{count_of(running, 'job')} still running at the end of the training data: counted with their run time so far"
    )
    known = scenario._replace(trace=before, notes=(*scenario.notes, note) if running else scenario.notes)
    return TrainingData(name, partition, known, held_out, None, ended)


def _of_jobs_that_fit(scenario: Scenario) -> Scenario:
    """Return the scenario without jobs that can never run there: a window of such jobs has no figures.

    Raises:
        UsageError: No job can.
    """
    trace, pool, *_ = split_replay(scenario.trace, scenario.pool, ReplayOptions())
    fits = demand_of(trace, pool).shape >= 0
    if not fits.any():
        raise UsageError(f"{trace.name}: no job can ever run on these nodes", "name larger ones")
    if fits.all():
        return scenario
    note = f"{count_of(int((~fits).sum()), 'job')} excluded that can never run on these nodes"
    return scenario._replace(trace=select(scenario.trace, fits), notes=(*scenario.notes, note))


def _tail_s(request: TrainRequest, trace: Trace) -> float:
    """Return the seconds from the last submission to ``--until``; infinite: all jobs had ended."""
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


def known_at(trace: Trace, until: float) -> tuple[Trace, Bools]:
    """Return the jobs started by ``until``, as known then, and which of them had ended: ``bool[jobs]``.

    A job still running counts with its run time so far; a pending one is excluded. In a log without waiting times a job
    counts as started at its submission.
    """
    end = ends_of(trace)
    begin, ended = end - trace.duration, end <= until
    started = np.flatnonzero((trace.submit <= until) & (ended | (begin < until)))
    ran = np.where(ended, trace.duration, until - begin)
    known = replace(select(trace, started), duration=ran[started])
    if known.progress is not None:
        known = replace(known, progress=_progress_by(known, known.progress, until))
    return known, ended[started]


def _progress_by(trace: Trace, progress: ProgressRecords, until: float) -> ProgressRecords:
    """Return the attempts begun by then, until then, and the speeds at the sizes of these."""
    begin = trace.submit[progress.run_job] + progress.run_after_s
    kept = begin < until
    job, gpus = progress.run_job[kept], progress.run_gpus[kept]
    most = int(progress.size_gpus.max(initial=0)) + 1
    had = np.isin(progress.size_job * most + progress.size_gpus, job * most + gpus)
    return replace(
        progress, run_job=job, run_gpus=gpus, run_after_s=progress.run_after_s[kept],
        run_s=np.minimum(progress.run_s[kept], until - begin[kept]),
        steps_per_s=np.where(had, progress.steps_per_s, np.nan),
    )  # fmt: skip


def _generated(request: TrainRequest, workload: Workload, partition: Partition | None) -> TrainingData:
    """Draw jobs from a description, for the partition's nodes; its load is relative to these nodes."""
    if any(size.profile for size in workload.sizes) and not request.slices:
        raise UsageError(f"{workload.name}: has jobs in MIG slices", "this agent decides about whole GPUs only")
    load = request.load if request.load is not None else workload.load
    scenario = _scenario(request, generate(workload, FIRST_SEED), partition, None)
    if load is not None and scenario.pool.total_gpus:
        workload = replace(workload, load=load, per_hour=None, load_gpus=scenario.pool.total_gpus)
        if partition is not None or request.nodes is not None:  # the notes name the load trained at
            scenario = _scenario(request, generate(workload, FIRST_SEED), partition, None)
    scenario = scenario._replace(trace=generate(workload, FIRST_SEED))
    _of_jobs_that_fit(scenario)
    draws = HELD_OUT_DRAWS if request.hold_out else 0
    held_out = tuple(scenario._replace(trace=generate(workload, FIRST_HELD_OUT + i)) for i in range(draws))
    return TrainingData(DEFAULT if partition is None else partition.name, partition, scenario, held_out, workload)


_WITHOUT_LIMITS = "the record was made under limits of users, groups or classes; training applies none"


def _history(request: TrainRequest, inventory: Inventory) -> Trace | None:
    """Return this cluster's own jobs; None: there are none yet."""
    try:
        trace = _kept(request, history(request.since, request.until, own=inventory))
    except NoHistory:
        return None
    return replace(trace, notes=(_WITHOUT_LIMITS, *trace.notes)) if limited(inventory) else trace


def _history_or_flavors(request: TrainRequest, own: Trace | None, partition: Partition) -> TrainingData:
    """Return the partition's own jobs; without any, jobs drawn from its flavors."""
    if own is not None and partition.name in own.groups:
        return _recorded(request, slice_trace(own, vc=partition.name), partition)
    if request.since is not None or request.until is not None:
        raise GpuschedError(f"{partition.name}: no job of that period has run and ended", "omit --since and --until")
    return _generated(request, workload_of(partition), partition)


def workload_of(partition: Partition) -> Workload:
    """Return a workload of the partition's flavors, equally frequent, with Poisson arrivals; run times near limit / 3.

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
