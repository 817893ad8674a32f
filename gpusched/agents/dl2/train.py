"""Training of a DL2 agent for one partition: it imitates DRF, then learns on the partition's recorded jobs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import numpy as np

from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.resized import Range, ResizableWorkload, WorkloadLog, by_drf, log_of, run
from gpusched.agents.dl2.decide import Actor, Tape
from gpusched.agents.dl2.learn import Dl2Recipe, learn
from gpusched.agents.dl2.live import NO_TEACHER, Learning, LiveActor, choose
from gpusched.agents.dl2.weights import arrays_of
from gpusched.errors import UsageError
from gpusched.sched.sizing.question import Claims
from gpusched.sched.state import Ints


@dataclass(frozen=True)
class Dl2TrainSettings(Range):
    """The ``train`` section of its policy's file; the rest of the recipe is DL2's own setting's.

    Attributes:
        hidden, rounds, batch: As in `learn.Recipe`.
    """

    hidden: int = 32
    rounds: int = 60
    batch: int = 10


class PartitionWorld:
    """A `learn.World` of the jobs of a log: a partition of our own."""

    def __init__(self, log: WorkloadLog) -> None:
        self._log, self.draw, self.choice = log, log.draw, log.choice

    def take(self, actor: Actor, one: ResizableWorkload, tape: Tape, explore: float, seed: int, taught: bool) -> Ints:
        """See `learn.World`."""
        slots: list[int] = []
        prepared = LiveActor(actor, 1.0)

        def policy(claims: Claims, coming: int) -> Ints:
            slots.append(int(tape.number[0]))
            teacher = by_drf(claims) if taught else NO_TEACHER
            chosen = choose(prepared, claims, Learning(tape, explore, teacher, float(coming), self._log.restart))
            assert chosen is not None
            return chosen

        run(one, policy, self._log.restart)
        return np.array(slots)

    def join(self) -> None:
        """See `learn.World`: what jobs told ends with them."""

    def jct(self, actor: Actor | None, one: ResizableWorkload) -> float:
        """See `learn.World`; in slots."""
        prepared = LiveActor(actor, 1.0) if actor is not None else None

        def policy(claims: Claims, coming: int) -> Ints:
            chosen = choose(prepared, claims, None) if prepared is not None else by_drf(claims)
            assert chosen is not None
            return chosen

        return float((run(one, policy, self._log.restart) - one.submit).mean())


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """One partition's agent; goes on after a kill.

    Raises:
        UsageError: A hyper-parameter that cannot be, or too few jobs.
    """
    hyper = settings_of(Dl2TrainSettings(), job.spec.settings)
    if not (hyper.rounds > 0 and hyper.batch > 0 and hyper.hidden > 0):
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "rounds, batch and hidden are at least 1")
    log, about = log_of(job, hyper)
    recipe = Dl2Recipe(hidden=hyper.hidden, rounds=hyper.rounds, batch=hyper.batch, taught=hyper.batch * 2)
    learned = learn(
        recipe, PartitionWorld(log), job.seed, job.device, os.cpu_count() or 1,
        lambda text, done: report.step(round(done * hyper.rounds), hyper.rounds), job.checkpoint,
    )  # fmt: skip
    stages = {"trained": learned.best}
    note = (
        f"mean JCT on {len(log.choice())} workloads drawn for the choice of weights, against DRF: "
        f"{-learned.score - 1:+.1%}; how speed goes with GPUs was drawn there, for the log does not tell"
    )
    return TrainerResult(
        arrays=arrays_of(stages), about=about, score=learned.score, hyper_parameters=asdict(hyper), notes=(note,),
        untrained=arrays_of({"trained": learned.untrained}),
    )  # fmt: skip
