"""Training of a DL2 agent for one partition: imitation of its past decisions, then learning on recorded jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.recorded import RecordedDecision, by_policy, recorded_decisions
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.resizable import ResizableWorkload, SizeRange, WorkloadLog, by_rule, run, workload_log
from gpusched.agents.dl2.decide import Actor, Tape
from gpusched.agents.dl2.history import MIN_DECISIONS, agreement, record
from gpusched.agents.dl2.learn import Dl2Recipe, Recording, learn
from gpusched.agents.dl2.live import NO_TEACHER, Learning, LiveActor, choose
from gpusched.agents.dl2.weights import arrays_of
from gpusched.errors import UsageError
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of
from gpusched.sched.sizing.question import Claims
from gpusched.sched.sizing.rules import RULES
from gpusched.sched.state import Ints


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
