"""Training of a DL2 agent for one partition: it imitates DRF, then learns on the partition's recorded jobs."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass

from gpusched.agents.common.request import Report, Trained, TrainJob, settings_of
from gpusched.agents.common.resized import Range, log_of
from gpusched.agents.dl2.cluster import Partition
from gpusched.agents.dl2.learn import Recipe, learn
from gpusched.agents.dl2.weights import arrays_of
from gpusched.errors import UsageError


@dataclass(frozen=True)
class Hyper(Range):
    """The ``train`` section of its policy's file; the rest of the recipe is DL2's own setting's.

    Attributes:
        hidden, rounds, batch: As in `learn.Recipe`.
    """

    hidden: int = 32
    rounds: int = 60
    batch: int = 10


def train_agent(job: TrainJob, report: Report) -> Trained:
    """One partition's agent; goes on after a kill.

    Raises:
        UsageError: A hyper-parameter that cannot be, or too few jobs.
    """
    hyper = settings_of(Hyper(), job.spec.settings)
    if not (hyper.rounds > 0 and hyper.batch > 0 and hyper.hidden > 0):
        raise UsageError(f"train: {asdict(hyper)} is no recipe", "rounds, batch and hidden are at least 1")
    log, about = log_of(job, hyper)
    recipe = Recipe(hidden=hyper.hidden, rounds=hyper.rounds, batch=hyper.batch, taught=hyper.batch * 2)
    learned = learn(
        recipe, Partition(log), job.seed, job.device, os.cpu_count() or 1,
        lambda text, done: report.step(round(done * hyper.rounds), hyper.rounds), job.checkpoint,
    )  # fmt: skip
    stages = {"trained": learned.best}
    note = (
        f"mean JCT on {len(log.choice())} workloads drawn for the choice of weights, against DRF: "
        f"{-learned.score - 1:+.1%}; how speed goes with GPUs was drawn there, for the log does not tell"
    )
    return Trained(
        arrays=arrays_of(stages), about=about, score=learned.score, hyper_parameters=asdict(hyper), notes=(note,),
        untrained=arrays_of({"trained": learned.untrained}),
    )  # fmt: skip
