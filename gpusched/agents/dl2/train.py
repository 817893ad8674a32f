"""Training of a DL2 agent for one partition: imitation of DRF, then reinforcement learning on recorded jobs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

import numpy as np

from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.resizable import ResizableWorkload, SizeRange, WorkloadLog, drf_policy, run, workload_log
from gpusched.agents.dl2.decide import Actor, Tape
from gpusched.agents.dl2.learn import Dl2Recipe, learn
from gpusched.agents.dl2.live import NO_TEACHER, Learning, LiveActor, choose
from gpusched.agents.dl2.weights import arrays_of
from gpusched.errors import UsageError
from gpusched.sched.sizing.question import Claims
from gpusched.sched.state import Ints


@dataclass(frozen=True)
class Dl2TrainSettings(SizeRange):
    """The ``train`` section of the policy file; other hyper-parameters are those of DL2's public setting.

    Attributes:
        hidden, rounds, batch: As in `learn.Dl2Recipe`.
    """

    hidden: int = 32
    rounds: int = 60
    batch: int = 10


class PartitionWorld:
    """A `learn.Dl2World` of recorded jobs of a partition."""

    def __init__(self, log: WorkloadLog) -> None:
        self._log, self.draw, self.validation_workloads = log, log.draw, log.validation_workloads

    def record(
        self, actor: Actor, workload: ResizableWorkload, tape: Tape, explore: float, seed: int, imitate: bool
    ) -> Ints:
        """Run a workload and record it; see `learn.Dl2World`."""
        slots: list[int] = []
        prepared = LiveActor(actor, 1.0)

        def policy(claims: Claims, coming: int) -> Ints:
            slots.append(int(tape.number[0]))
            teacher = drf_policy(claims) if imitate else NO_TEACHER
            return choose(prepared, claims, Learning(tape, explore, teacher, float(coming), self._log.restart))

        run(workload, policy, self._log.restart)
        return np.array(slots)

    def join(self) -> None:
        """Do nothing: no speeds are shared between workloads here."""

    def jct(self, actor: Actor | None, workload: ResizableWorkload) -> float:
        """Return the mean JCT in slots; see `learn.Dl2World`."""
        prepared = LiveActor(actor, 1.0) if actor is not None else None

        def policy(claims: Claims, coming: int) -> Ints:
            return choose(prepared, claims, None) if prepared is not None else drf_policy(claims)

        return float((run(workload, policy, self._log.restart) - workload.submit).mean())


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train one partition's agent; resume from a checkpoint.

    Raises:
        UsageError: A hyper-parameter is invalid, or there are too few jobs.
    """
    hyper = settings_of(Dl2TrainSettings(), job.spec.settings)
    if not (hyper.rounds > 0 and hyper.batch > 0 and hyper.hidden > 0):
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "rounds, batch and hidden are at least 1")
    log, about = workload_log(job, hyper)
    recipe = Dl2Recipe(hidden=hyper.hidden, rounds=hyper.rounds, batch=hyper.batch, imitated=hyper.batch * 2)
    learned = learn(
        recipe, PartitionWorld(log), job.seed, job.device, os.cpu_count() or 1,
        lambda text, done: report.step(round(done * hyper.rounds), hyper.rounds), job.checkpoint,
    )  # fmt: skip
    stages = {"trained": learned.best}
    note = (
        f"mean JCT on {len(log.validation_workloads())} workloads drawn for the choice of weights, against DRF: "
        f"{-learned.score - 1:+.1%}; how speed goes with GPUs was drawn there, for the log does not tell"
    )
    return TrainerResult(
        arrays=arrays_of(stages), about=about, score=learned.score, hyper_parameters=asdict(hyper), notes=(note,),
        untrained=arrays_of({"trained": learned.untrained}),
    )  # fmt: skip
