"""Training of a DL2 agent for one partition: imitation of its past decisions, then learning on recorded jobs.

Training data is simulated: the partition's resizable jobs share GPUs slot by slot. Arrivals, sizes and run times come
from the log. The speed of a job on n GPUs is drawn, since no log has it: a power of n, up to a number of GPUs beyond
which more do not help. The agent sees what it would see live: the measured pace at the sizes that a job has had, and an
estimate for others. Placement is not modelled; the final table comes from replays, which model it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.recorded import RecordedDecision, by_policy, recorded_decisions
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.dl2.decide import Actor, Tape
from gpusched.agents.dl2.history import MIN_DECISIONS, agreement, record
from gpusched.agents.dl2.learn import Dl2Recipe, Recording, learn
from gpusched.agents.dl2.live import NO_TEACHER, Learning, LiveActor, choose
from gpusched.agents.dl2.weights import arrays_of
from gpusched.compiled import jit
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of
from gpusched.sched.sizing.question import CAPACITY, COUNT, FREE, OTHERS, TOTAL, Claims, new_claims
from gpusched.sched.sizing.rules import RULES, wish
from gpusched.sched.sizing.settle import speed_at
from gpusched.sched.state import Floats, Ints
from gpusched.sim.engine.state import ARRIVED
from gpusched.sim.rounds import DECISIONS, NOW, SLOT_BY_SLOT, EngineRun, RoundProgress, set_rate
from gpusched.traces.trace import Trace

_JOBS = (40, 100)  # of a workload
_LOADS = (0.5, 1.3)
_POWERS = (0.3, 1.0)
_VALIDATION_SEED, _VALIDATIONS = 1 << 20, 8
_MAX_SLOTS = 4000  # of a workload
_MIN_JOBS = 40
_MIN_SLOT_S, _MEDIAN_SLOTS = 60.0, 10  # the latter: slots of a job of median run time

Policy = Callable[[Claims, int], Ints]
"""A policy: from the jobs' claims and the number of jobs still to arrive to the GPUs of each job."""


@dataclass(frozen=True)
class SizeRange:
    """The settings of jobs in the ``train`` section of a policy file.

    Attributes:
        least, most: Smallest and largest number of GPUs of a job; sizes are the powers of two between.
        restart_s: Cost of a resize.
        slot_s: Seconds between decisions; 0: a tenth of the median run time.
    """

    least: int = 1
    most: int = 8
    restart_s: float = 30.0
    slot_s: float = 0.0


class ResizableWorkload(NamedTuple):
    """Resizable jobs, by arrival.

    Attributes:
        gpus: Of the partition.
        submit: ``float64[jobs]``: in slots.
        work: ``float64[jobs]``: steps; on one GPU a job does one step per slot.
        base: ``int64[jobs]``: GPUs requested.
        sizes: ``int64[sizes]``: GPUs that any job may have. speed: ``float64[jobs, sizes]``: steps per slot on these.
    """

    gpus: int
    submit: Floats
    work: Floats
    base: Ints
    sizes: Ints
    speed: Floats


class WorkloadLog:
    """A log to draw workloads from.

    Args:
        trace: Jobs without GPUs, or with more than ``sizes``, are excluded.
        gpus: Of the partition.
        sizes: GPUs that a job may have, ascending.
        slot_s: Seconds of a slot. restart_s: Cost of a resize.

    Attributes:
        restart: Cost of a resize, in slots.
    """

    def __init__(self, trace: Trace, gpus: int, sizes: Ints, slot_s: float, restart_s: float) -> None:
        fits = np.flatnonzero((trace.gpus > 0) & (trace.gpus <= sizes[-1]) & (trace.duration > 0))
        fits = fits[np.argsort(trace.submit[fits], kind="stable")]
        self._submit, self._base = trace.submit[fits], trace.gpus[fits].astype(np.int64)
        self._run = np.maximum(trace.duration[fits], 0.2 * slot_s)
        self._gpus, self._sizes, self._slot_s, self.restart = gpus, sizes, slot_s, restart_s / slot_s

    def __len__(self) -> int:
        """Return the number of jobs to learn from."""
        return len(self._submit)

    def draw(self, rng: np.random.Generator) -> ResizableWorkload:
        """Draw consecutive jobs of the log, their arrivals scaled to a drawn load."""
        count = min(int(rng.integers(*_JOBS)), len(self))
        first = int(rng.integers(0, len(self) - count + 1))
        part = slice(first, first + count)
        base = self._sizes[np.searchsorted(self._sizes, self._base[part])]
        run = self._run[part] / self._slot_s
        power = np.where(rng.random(count) < 0.25, 1.0, rng.uniform(*_POWERS, count))
        most = rng.choice(self._sizes, count)
        speed = np.minimum(self._sizes, np.maximum(most, base)[:, None]) ** power[:, None]
        work = run * speed[np.arange(count), np.searchsorted(self._sizes, base)]
        gaps = np.diff(self._submit[part], prepend=self._submit[part.start])
        gaps = np.where(gaps > 0, gaps, rng.exponential(max(float(gaps.mean()), 1e-3), count) * 0.1)
        wanted = float((run * base).sum()) / (self._gpus * rng.uniform(*_LOADS))
        return ResizableWorkload(self._gpus, np.cumsum(gaps * (wanted / gaps.sum())), work, base, self._sizes, speed)

    def validation_workloads(self) -> list[ResizableWorkload]:
        """Draw the workloads that weights are chosen on, with seeds that training does not use."""
        return [self.draw(np.random.default_rng(_VALIDATION_SEED + k)) for k in range(_VALIDATIONS)]


def workload_log(job: TrainJob, size_range: SizeRange) -> tuple[WorkloadLog, dict[str, str]]:
    """Return the log that a training learns from, and the settings to store with its weights.

    Raises:
        UsageError: The range is invalid, or too few jobs are within it.
    """
    least, most = size_range.least, size_range.most
    if not (1 <= least <= most and size_range.slot_s >= 0 and size_range.restart_s >= 0):
        raise UsageError(f"train: {size_range} is not a range", "1 <= least <= most, no time below 0")
    sizes = np.array([1 << k for k in range(most.bit_length()) if least <= 1 << k <= most], np.int64)
    if not sizes.size:
        raise UsageError(f"train: no power of two is between {least} and {most} GPUs")
    trace = job.scenario.trace
    slot_s = size_range.slot_s or max(_MIN_SLOT_S, float(np.median(trace.duration)) / _MEDIAN_SLOTS)
    log = WorkloadLog(trace, job.scenario.pool.total_gpus, sizes, slot_s, size_range.restart_s)
    if len(log) < _MIN_JOBS:
        raise UsageError(
            f"{trace.name}: {count_of(len(log), 'job')} of at most {count_of(sizes[-1], 'GPU')}: too few to train on"
        )
    about = {"knows": "oracle", "slot_s": f"{slot_s:g}", "sizes": f"{sizes[0]}-{sizes[-1]}",
             "restart_s": f"{size_range.restart_s:g}"}  # fmt: skip
    return log, about


def by_rule(rule: str, claims: Claims) -> Ints:
    """Choose sizes by a rule, which an agent imitates in training, or is compared with."""
    wish(RULES[rule], claims)
    chosen: Ints = claims.jobs["wished"][: claims.number[COUNT]].copy()
    return chosen


def run(workload: ResizableWorkload, policy: Policy, restart: float) -> Floats:
    """Simulate a workload under a policy; return every job's end, ``float64[jobs]`` in slots."""
    engine, (count, most) = EngineRun(workload.submit, workload.work, SLOT_BY_SLOT), workload.speed.shape
    measured, held, progress = np.zeros((count, most)), np.zeros(count, np.int64), engine.progress
    while engine.next_round() and progress.counts[DECISIONS] <= _MAX_SLOTS:
        active = engine.active
        # Running jobs first, then pending ones by arrival, while each can have the smallest size.
        first = active[np.argsort(held[active] == 0, kind="stable")]
        admitted = np.sort(first[: workload.gpus // int(workload.sizes[0])])
        claims = new_claims(len(admitted), most)
        _claims(workload, admitted, progress, measured, held, restart, claims)
        chosen = policy(claims, count - int(engine.sim.counter[ARRIVED]))
        _resize(workload, admitted, chosen, progress, measured, held, restart)
    return np.where(np.isnan(engine.end), progress.time[NOW], engine.end)


@jit
def _claims(
    workload: ResizableWorkload, active: Ints, progress: RoundProgress, measured: Floats, held: Ints, restart: float,
    claims: Claims
) -> None:  # fmt: skip
    most, running, slot = workload.sizes.size, 0, progress.time[NOW]
    for i in range(active.size):
        j, job = active[i], claims.jobs[i]
        known = np.flatnonzero(measured[j] > 0.0)
        for k in range(most):
            claims.sizes[i, k], claims.allowed[i, k] = workload.sizes[k], 1
            claims.reported[i, k] = measured[j, k] > 0.0
            claims.pace[i, k] = speed_at(workload.sizes, measured[j], known, workload.sizes[k])
        now = np.searchsorted(workload.sizes, held[j]) if held[j] > 0 else 0
        job["row"], job["held"], job["count"], job["base"] = i, held[j], most, workload.base[j]
        job["restarts"], job["cost_s"], job["share"] = progress.restarts[j], restart, 1.0 / workload.gpus
        job["age_s"] = slot - workload.submit[j] if slot > workload.submit[j] else 0.0
        # Without a measurement the agent knows the run time at the requested size only, as from an exact time limit.
        work = workload.work[j] - progress.done[j]
        base = np.searchsorted(workload.sizes, workload.base[j])
        true_speed = workload.speed[j, now] if known.size > 0 else workload.speed[j, base]
        scale = 1.0 if known.size > 0 else claims.pace[i, base] / claims.pace[i, now]
        job["left_s"] = max(work / true_speed * scale, 1e-6)
        running += held[j]
    claims.number[COUNT], claims.number[CAPACITY], claims.number[TOTAL] = active.size, workload.gpus, workload.gpus
    claims.number[FREE], claims.number[OTHERS] = workload.gpus - running, 0


@jit
def _resize(
    workload: ResizableWorkload, active: Ints, chosen: Ints, progress: RoundProgress, measured: Floats, held: Ints,
    restart: float
) -> None:  # fmt: skip
    for i in range(active.size):
        j = active[i]
        k = np.searchsorted(workload.sizes, chosen[i])
        if chosen[i] != held[j]:
            set_rate(progress, j, workload.speed[j, k], restart)
        held[j], measured[j, k] = chosen[i], workload.speed[j, k]


@dataclass(frozen=True)
class Dl2TrainSettings(SizeRange):
    """The ``train`` section of the policy file; other hyper-parameters are those of DL2's public setting.

    Attributes:
        hidden, rounds, batch: As in `learn.Dl2Recipe`.
        warm_up: What is imitated first: a rule for sizes, or ``history``: the partition's own past decisions, whatever
            policy made them, or DRF's where there are too few.
    """

    hidden: int = 32
    rounds: int = 60
    batch: int = 10
    warm_up: str = "history"


class WarmUp(NamedTuple):
    """What is imitated: the decisions, or a rule if there are none. ``unseen``: later ones; ``slot_s``: of a slot."""

    rule: str = "drf"
    decisions: Sequence[RecordedDecision] = ()
    unseen: Sequence[RecordedDecision] = ()
    slot_s: float = 1.0


class PartitionWorld:
    """A `learn.Dl2World` of recorded jobs of a partition."""

    def __init__(self, log: WorkloadLog, warm_up: WarmUp = WarmUp(), seed: int = 0) -> None:
        self._log, self.draw, self.validation_workloads = log, log.draw, log.validation_workloads
        self._warm_up, self._seed = warm_up, seed

    def record(
        self, actor: Actor, workload: ResizableWorkload, tape: Tape, explore: float, seed: int, imitate: bool
    ) -> Ints:
        """Run a workload and record it; see `learn.Dl2World`."""
        slots: list[int] = []
        prepared = LiveActor(actor, 1.0)

        def policy(claims: Claims, coming: int) -> Ints:
            slots.append(int(tape.number[0]))
            teacher = by_rule(self._warm_up.rule, claims) if imitate else NO_TEACHER
            return choose(prepared, claims, Learning(tape, explore, teacher, float(coming), self._log.restart))

        run(workload, policy, self._log.restart)
        return np.array(slots)

    def recorded(self, actor: Actor) -> list[Recording]:
        """Return the partition's own decisions; see `learn.Dl2World`."""
        prepared, decisions = LiveActor(actor, self._warm_up.slot_s), self._warm_up.decisions
        return [record(prepared, decisions, self._log.restart, self._seed)] if decisions else []

    def join(self, seeds: Sequence[int]) -> None:
        """Do nothing: no speeds are shared between workloads here."""

    def jct(self, actor: Actor | None, workload: ResizableWorkload) -> float:
        """Return the mean JCT in slots; see `learn.Dl2World`."""
        prepared = LiveActor(actor, 1.0) if actor is not None else None

        def policy(claims: Claims, coming: int) -> Ints:
            return choose(prepared, claims, None) if prepared is not None else by_rule("drf", claims)

        return float((run(workload, policy, self._log.restart) - workload.submit).mean())


def _warm_up(job: TrainJob, hyper: Dl2TrainSettings, slot_s: float) -> tuple[WarmUp, str]:
    """Return what to imitate, and a note on it."""
    if hyper.warm_up != "history":
        return WarmUp(hyper.warm_up), f"warm_up: rule {hyper.warm_up}"
    trace = job.scenario.trace
    found = recorded_decisions(trace, job.scenario.pool.total_gpus, job.spec.resize)
    if len(found) < MIN_DECISIONS:
        few = f"{count_of(len(found), 'recorded decision')} on sizes; {MIN_DECISIONS} are needed"
        return WarmUp(), f"warm_up: rule {WarmUp().rule} ({few})"
    seen = len(found) * 4 // 5
    by = list(by_policy(found, trace))
    whose = by[0][0] if len(by) == 1 else ", ".join(f"{name} ({count:,})" for name, count in by)
    note = f"warm_up: history, {count_of(len(found), 'decision')} by {whose}"
    return WarmUp(decisions=found[:seen], unseen=found[seen:], slot_s=slot_s), note


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train one partition's agent; resume from a checkpoint.

    Raises:
        UsageError: A hyper-parameter is invalid, or there are too few jobs.
    """
    hyper = settings_of(Dl2TrainSettings(), job.spec.settings)
    if not (hyper.rounds > 0 and hyper.batch > 0 and hyper.hidden > 0):
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "rounds, batch and hidden are at least 1")
    if hyper.warm_up not in (names := ("history", *RULES)):
        raise UsageError(f"train: warm_up is {hyper.warm_up!r}{did_you_mean(hyper.warm_up, names)}")
    log, about = workload_log(job, hyper)
    warm_up, imitated = _warm_up(job, hyper, float(about["slot_s"]))
    recipe = Dl2Recipe(hidden=hyper.hidden, rounds=hyper.rounds, batch=hyper.batch, imitated=hyper.batch * 2)
    learned = learn(
        recipe, PartitionWorld(log, warm_up, job.seed), job.seed, job.device, os.cpu_count() or 1,
        lambda text, done: report.step(round(done * hyper.rounds), hyper.rounds), job.checkpoint,
    )  # fmt: skip
    if warm_up.unseen:
        same, chance = agreement(learned.warm, warm_up.slot_s, warm_up.unseen)
        before, _ = agreement(learned.untrained, warm_up.slot_s, warm_up.unseen)
        imitated += (
            f"; of the last {len(warm_up.unseen)}, which it had not seen, it then chose {same:.0%} of the sizes as"
            f" recorded (untrained {before:.0%}, by chance {chance:.0%})"
        )
    note = (
        f"mean JCT on {len(log.validation_workloads())} workloads drawn for the choice of weights, against DRF: "
        f"{-learned.score - 1:+.1%}; the log does not record how speed scales with GPUs: that was drawn"
    )
    return TrainerResult(
        arrays=arrays_of({"trained": learned.best}), about=about, score=learned.score, hyper_parameters=asdict(hyper),
        notes=(imitated, note), untrained=arrays_of({"trained": learned.untrained}),
    )  # fmt: skip
