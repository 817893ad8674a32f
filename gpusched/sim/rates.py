"""How fast a job runs compared with its recording: 1.0 is the speed behind its recorded duration.

A speed is a ratio of two measured figures of the same model (`gpusched.sim.profiles`). Where one of them is missing it
is 1.0, and the result's notes count the jobs that this is so for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.errors import UsageError
from gpusched.model.interference import JobClassEstimate
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of
from gpusched.sched.mapping.learned import TypeSpeeds
from gpusched.sched.slicenames import base_of
from gpusched.sched.state import Floats, Ints
from gpusched.sim.pool import Demand, Pool, demand_of
from gpusched.sim.profiles import Profiles, read_profiles
from gpusched.sim.profiles.table import model_key, split_model
from gpusched.traces.trace import Trace

AS_RECORDED = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Rates:
    """Measurements, and the GPU type on which a trace was recorded (None: the job's own, else the profile's)."""

    profiles: Profiles
    recorded_on: str | None = None


def read_rates(paths: Sequence[Path | str], recorded_on: str | None = None) -> Rates:
    """Return the rates that these files and folders of measurements give.

    Raises:
        UsageError: A file is bad or missing, or nothing was measured on ``recorded_on``.
    """
    profiles = read_profiles(paths)
    if recorded_on is not None and not profiles.type_of(recorded_on):
        known = [t for t in profiles.types if t]
        near = did_you_mean(recorded_on, known)
        raise UsageError(f"no measurements on {recorded_on!r}{near}", f"measured are {', '.join(known)}")
    return Rates(profiles=profiles, recorded_on=recorded_on)


def _alone(
    profiles: Profiles, model: str, gpu_type: str, gpus: int, spread: int | None, recorded_on: str | None,
    before: int | None,
) -> float | None:  # fmt: skip
    reference = recorded_on if recorded_on is not None else _usual_type(profiles, model)
    recorded = profiles.per_s(model, reference, before or gpus, None)
    now = profiles.per_s(model, gpu_type or reference, gpus, spread)
    return now / recorded if now and recorded else None


def _usual_type(profiles: Profiles, model: str) -> str:
    key = model_key(model)
    return profiles.recorded_on.get(key, profiles.recorded_on.get(profiles.usual.get(key, key), ""))


class Speeds(NamedTuple):
    """The speeds of a trace's jobs on a pool, in the engine's form.

    Attributes:
        row: ``int64[jobs]``: row of ``table``, -1: no figures. table: See `Sim.speed`.
        slowest, fastest: ``float64[jobs]``: alone, on the GPU types it may get.
        notes: For the result.
    """

    row: Ints
    table: Floats
    slowest: Floats
    fastest: Floats
    notes: tuple[str, ...]


class RateClass(NamedTuple):
    """Jobs with the same speed everywhere: recorded on ``before`` GPUs of type ``on`` (None: the profile's).

    ``share``: what their CPU cores and memory make of that, by those that they were recorded with.
    """

    model: str
    gpus: int
    nodes: int
    on: str | None
    before: int
    share: float = 1.0


def no_speeds(jobs: int, types: int) -> Speeds:
    """Return speeds with every job as recorded."""
    return Speeds(np.full(jobs, -1, np.int64), np.zeros((types, 0, 1)), np.ones(jobs), np.ones(jobs), ())


def speeds_of(rates: Rates, trace: Trace, pool: Pool, demand: Demand) -> Speeds:
    """Return the speeds of jobs on every GPU type of the pool, alone and beside every other job of as many GPUs."""
    jobs = len(trace)
    columns = np.column_stack((trace.model, trace.gpus, demand.parts, trace.gpu_type)).reshape(jobs, 4)
    distinct, index = np.unique(columns, axis=0, return_inverse=True)
    index = index.reshape(-1)
    count = np.bincount(index, minlength=len(distinct))
    rows: dict[RateClass, int] = {}
    row_of = np.full(len(distinct), -1, np.int64)
    lacking: Counter[str] = Counter()
    for i, (model, gpus, parts, gpu_type) in enumerate(distinct.tolist()):
        if parts == 0:
            continue
        name = trace.model_name(model)
        kind = RateClass(name, gpus, parts, recorded_on(rates, trace, name, gpu_type), gpus)
        if any(alone_on(rates, kind, t) is not None for t in pool.gpu_types):
            row_of[i] = rows.setdefault(kind, len(rows))
        else:
            lacking[f"{name} on {count_of(gpus, 'GPU')}" if name else "jobs without a model"] += int(count[i])
    row = row_of[index] if jobs else np.zeros(0, np.int64)
    table = table_of(rates, list(rows), pool.gpu_types)
    slowest, fastest = _range(row, table, pool, demand)
    return Speeds(row, table, slowest, fastest, _notes(rates, list(rows), row, pool, lacking))


def reported_speeds(learned: Mapping[str, JobClassEstimate], trace: Trace, pool: Pool, demand: Demand) -> Speeds:
    """Return the speeds of a site's own jobs on other GPU types than they ran on, as their classes reported them.

    ``learned``: estimates by job class. The rates are those by which live decisions map jobs to types.
    """
    none = no_speeds(len(trace), len(pool.gpu_types))
    if trace.ran_on is None or not learned or len(pool.gpu_types) < 2:
        return none
    kind, kinds = dict(zip(map(base_of, pool.names), pool.gpu_type.tolist(), strict=True)), list[int]()
    for nodes in trace.node_lists:
        found = {kind.get(name, -1) for name in nodes.split("|")}
        kinds.append(found.pop() if len(found) == 1 else -1)
    on = np.array([*kinds, -1], np.int64)[trace.ran_on]
    columns = np.column_stack((trace.user, trace.model, trace.gpus, on))
    distinct, index = np.unique(columns, axis=0, return_inverse=True)
    jobs = ((trace.user_name(user), trace.model_name(model), gpus) for user, model, gpus, _ in distinct.tolist())
    speeds = TypeSpeeds({}, pool.gpu_types, learned).of(jobs)
    alike = (distinct[:, 3] < 0) | (speeds.max(axis=1) == speeds.min(axis=1)) | (speeds.min(axis=1) <= 0.0)
    chosen = np.flatnonzero(~alike)
    if not len(chosen):
        return none
    relative = speeds[chosen] / speeds[chosen, distinct[chosen, 3]][:, None]
    row = np.full(len(distinct), -1, np.int64)
    row[chosen] = np.arange(len(chosen))
    row, table = row[index.reshape(-1)], np.ascontiguousarray(relative.T[:, :, None])
    slowest, fastest = _range(row, table, pool, demand)
    note = f"{count_of(int((row >= 0).sum()), 'job')} run on each GPU type as fast as jobs of their classes reported"
    return Speeds(row, table, slowest, fastest, (note,))


def fastest(
    rates: Rates | None, trace: Trace, pool: Pool, learned: Mapping[str, JobClassEstimate] = {}
) -> Floats:  # fmt: skip
    """Return each job's best speed alone on the pool's GPUs that it may get, ``float64[jobs]``; as in replays."""
    demand = demand_of(trace, pool)
    found = speeds_of(rates, trace, pool, demand) if rates else reported_speeds(learned, trace, pool, demand)
    return found.fastest


def table_of(rates: Rates, kinds: Sequence[RateClass], gpu_types: Sequence[str]) -> Floats:
    """Return the speeds ``float64[types, kinds, kinds + 1]``: see `Sim.speed`."""
    table = np.full((len(gpu_types), len(kinds), len(kinds) + 1), np.nan)
    for t, gpu_type in enumerate(gpu_types):
        for i, kind in enumerate(kinds):
            alone = alone_on(rates, kind, gpu_type)
            table[t, i, 0] = AS_RECORDED if alone is None else alone
            on = gpu_type or kind.on or _usual_type(rates.profiles, kind.model)
            for j, other in enumerate(kinds):
                slowed = rates.profiles.slowed(kind.model, on, kind.gpus, other.model)
                if slowed is not None and other.gpus == kind.gpus:
                    table[t, i, 1 + j] = table[t, i, 0] * slowed
    return table


def alone_on(rates: Rates, kind: RateClass, gpu_type: str) -> float | None:
    """Return such a job's speed alone on a GPU type; None: not measured."""
    found = _alone(rates.profiles, kind.model, gpu_type, kind.gpus, kind.nodes, kind.on, kind.before)
    return None if found is None else found * kind.share


def resized_on(rates: Rates, kind: RateClass, gpu_type: str) -> tuple[float, str]:
    """Return a job's speed alone at a size other than recorded, and how it is known.

    Measured; or, where nothing was measured at that size, as fast as at the next smaller size that was ("nearest");
    or, where there is none, or its own size was not measured, in proportion to its GPUs ("proportion").
    """
    if (exact := alone_on(rates, kind, gpu_type)) is not None:
        return exact, "measured"
    for gpus in range(kind.gpus, 0, -1):
        for nodes in (kind.nodes, None):
            found = _alone(rates.profiles, kind.model, gpu_type, gpus, nodes, kind.on, kind.before)
            if found is not None:
                return found * kind.share, "nearest"
    return kind.gpus / kind.before * kind.share, "proportion"


Held = tuple[int, float | None, float | None]
"""GPUs, CPU cores and MiB of a whole job; None: plenty."""


def share_of(rates: Rates, model: str, now: Held, before: Held) -> float:
    """Return the factor by which other CPU cores and memory change a job's speed."""
    return rates.profiles.share_of(model, *now) / rates.profiles.share_of(model, *before)


def draw_models(rates: Rates, trace: Trace, gpu_types: Sequence[str], seed: int) -> Trace:
    """Return the trace with a model, drawn evenly, for each job that has GPUs.

    From those measured on as many GPUs of all ``gpu_types``, and those of which is known how they depend on cores and
    memory alone; where there are none, from all.
    """
    models, profiles = rates.profiles.models, rates.profiles
    rng = np.random.default_rng(seed)
    drawn = np.full(len(trace), -1, np.int64)
    scaled = {split_model(name)[0] for name, _ in profiles.series}
    for gpus in np.unique(trace.gpus[trace.gpus > 0]).tolist():
        known = [
            i
            for i, name in enumerate(models)
            if split_model(name)[0] not in scaled
            or all(_alone(profiles, name, t, gpus, None, rates.recorded_on, None) is not None for t in gpu_types)
        ]
        jobs = np.flatnonzero(trace.gpus == gpus)
        drawn[jobs] = rng.choice(known or list(range(len(models))), len(jobs))
    return replace(trace, model=drawn, models=models)


def restart_seconds(trace: Trace, costs: Mapping[str, float], else_s: float) -> tuple[Floats, tuple[str, ...]]:
    """Return each job's restart cost, ``float64[jobs]``, by its model if known, and notes."""
    seconds = np.full(len(trace), float(else_s))
    if not costs:
        return seconds, ()
    keys = [model_key(name) for name in trace.models]
    by_model = np.array([costs.get(key, costs.get(split_model(key)[0], np.nan)) for key in keys] + [np.nan])
    own = by_model[trace.model]
    known = ~np.isnan(own)
    seconds[known] = own[known]
    rest = f"; {len(trace) - int(known.sum())} others cost {else_s:g} s" if not known.all() else ""
    return seconds, (f"restarts of {count_of(int(known.sum()), 'job')} cost as measured for their models{rest}",)


def recorded_on(rates: Rates, trace: Trace, model: str, gpu_type: int) -> str | None:
    """Return the job's own GPU type if its model was measured on it, else the caller's."""
    own = trace.gpu_types[gpu_type] if gpu_type >= 0 else ""
    known = own and "|" not in own and rates.profiles.per_s(model, own, 1, None) is not None
    return own if known else rates.recorded_on


def _range(row: Ints, table: Floats, pool: Pool, demand: Demand) -> tuple[Floats, Floats]:
    slowest, fastest = np.ones(len(row)), np.ones(len(row))
    shapes = len(demand.queue)
    for shape in range(shapes):
        lo, hi, mask = (int(getattr(demand.requests, name)[shape]) for name in ("lo", "hi", "mask"))
        kinds = pool.gpu_type[lo:hi]
        kinds = np.unique(kinds if mask < 0 else kinds[demand.masks[mask, lo:hi] != 0])
        jobs = np.flatnonzero((demand.shape == shape) & (row >= 0))
        if len(jobs) and len(kinds):
            speeds = table[kinds][:, row[jobs], 0]
            slowest[jobs], fastest[jobs] = speeds.min(axis=0), speeds.max(axis=0)
    return slowest, fastest


def _notes(rates: Rates, kinds: Sequence[RateClass], row: Ints, pool: Pool, lacking: Counter[str]) -> tuple[str, ...]:
    profiles = rates.profiles
    measured = int((row >= 0).sum())
    models = {model_key(k.model) for k in kinds}
    names = [name for name, of in profiles.sources if models & of]
    files = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    notes = [f"{count_of(measured, 'job')} run at measured speeds" + (f" ({files})" if files else "")]
    if lacking:
        name, most = lacking.most_common(1)[0]
        notes.append(
            f"{count_of(sum(lacking.values()), 'job')} run at their recorded speed, as none was measured: {name}"
            f" ({most}){' and others' if len(lacking) > 1 else ''}"
        )
    by_type: Counter[str] = Counter()
    jobs = np.bincount(row[row >= 0], minlength=len(kinds))
    for i, kind in enumerate(kinds):
        on = kind.on or _usual_type(profiles, kind.model)
        by_type[on or "the profile's own GPUs"] += int(jobs[i])
    if by_type:
        notes.append(
            "run times taken as recorded on "
            + ", ".join(f"{t} ({count_of(n, 'job')})" for t, n in by_type.most_common())
        )
    for gpu_type in pool.gpu_types:
        missing = [k for k in kinds if gpu_type and alone_on(rates, k, gpu_type) is None]
        if missing:
            count = int(sum(jobs[kinds.index(k)] for k in missing))
            notes.append(
                f"on {gpu_type} {count_of(count, 'job')} would run at their recorded speed: "
                f"no measured speed of {missing[0].model}"
                f" on {count_of(missing[0].gpus, 'GPU')}"
            )
    if "" in pool.gpu_types and kinds:
        notes.append("nodes without a GPU type count as the type on which run times were recorded")
    return (*notes, *(note for note, of in profiles.notes if models & of))
