"""Training of an RLTune agent: choose a base rule, train a network on top, keep it only if it helps."""

from __future__ import annotations

import time
from dataclasses import asdict

import numpy as np

from gpusched.agents.common import torch_
from gpusched.agents.common.checkpoint import with_prefix
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob
from gpusched.agents.rltune.candidates import ORDERS, CandidateRule, arrays_of, without_net
from gpusched.agents.rltune.choosing import Option, choose_base, choose_strength
from gpusched.agents.rltune.decide import PreparedScorer
from gpusched.agents.rltune.episodes import Episode, cut_episodes, simulate
from gpusched.agents.rltune.evaluation import (
    TraceEvaluation,
    evaluations,
    mapped_evaluations,
    mean_cost,
    placement_of,
    windows,
)
from gpusched.agents.rltune.ppo import Learner
from gpusched.agents.rltune.preempting import train_preempting
from gpusched.agents.rltune.settings import RltuneSettings, read
from gpusched.agents.rltune.table import table
from gpusched.errors import UsageError
from gpusched.model.units import count_of

STRENGTHS = (1.0, 0.5)
_SNAPSHOTS = 4  # of the network, to choose from


def train_agent(job: TrainJob, report: TrainingReport) -> TrainerResult:
    """Train one agent.

    Raises:
        UsageError: A hyper-parameter is invalid, or there are too few jobs.
    """
    if job.spec.settings.get("preempt", False) is not False:
        return train_preempting(job, report)
    settings = read(job.spec.settings)
    trace, declared = job.scenario.trace, job.declared is not None
    if len(trace) < 10:
        raise UsageError(f"{trace.name}: {count_of(len(trace), 'job')}: too few to train on", "use more")
    torch_.set_up(job.seed)
    early, last = windows(job.scenario, settings)
    learned = [one for window in early for one in evaluations(window, job.scenario, settings, declared)]
    later = evaluations(last, job.scenario, settings, declared)  # for the choice
    judged, judged_later = (mapped_evaluations(of, settings, job.spec, job.scenario) for of in (learned, later))
    advance = report.of("base rule").step
    choice = choose_base([*learned, *later], settings, advance, [*judged, *judged_later])
    gain = 1 - np.exp(choice.cost - choice.usual_cost)
    report.note(f"base rule: {choice.rule.name}, {-gain:+.1%} of cost against {choice.usual} on the training part")
    base = without_net(choice.rule, settings)
    options, pace = _train_networks(job, settings, learned, base, report)
    found, words = choose_strength(options, base, judged, judged_later, settings)
    report.note(f"network: {found.name}" + (f" x {found.strength:g}" if found.strength else ": none was surely better"))
    notes = (f"base rule: {choice.rule.name}", f"network: {found.name} x {found.strength:g}", *words, pace)
    about = {"knows": settings.knows, "backfill": "skip" if settings.backfill else "none", "base": choice.rule.name,
             "objective": settings.objective}  # fmt: skip
    rows, gaps = table(found.prepared, job, settings, report, *placement_of(job.spec, job.scenario))
    cost = mean_cost([one.play(found.prepared) for one in judged_later], settings.objective)
    return TrainerResult(
        arrays=arrays_of(found.prepared), about=about, score=-cost, hyper_parameters=asdict(settings),
        notes=(*notes, *gaps), rows=rows,
    )  # fmt: skip


def _train_networks(
    job: TrainJob,
    settings: RltuneSettings,
    replays: list[TraceEvaluation],
    base: PreparedScorer,
    report: TrainingReport,
) -> tuple[list[Option], str]:
    """Return the trained networks at several strengths, and the speed of training as a sentence."""
    learner = Learner(base, settings, job.seed)
    episodes, costs = _episodes(job, settings, replays, base)
    network_report, begin = report.of("network"), time.perf_counter()
    first, kept = 0, []
    if (saved := job.checkpoint.load()) is not None:
        arrays, state = saved
        learner.restore(arrays, state["numbers"])
        first = state["done"]
        kept = [with_prefix(f"kept{k}.", arrays) for k in range(state["kept"])]
    else:
        learner.imitate(episodes, lambda done: network_report.step(0, settings.iterations))
        kept.append(learner.net.arrays())
    every = max(settings.iterations // _SNAPSHOTS, 1)
    for iteration in range(first, settings.iterations):
        reward = learner.improve(episodes, costs)
        if (iteration + 1) % every == 0:
            kept.append(learner.net.arrays())
        network_report.step(iteration + 1, settings.iterations, reward=reward)
        if job.checkpoint.due():
            arrays, numbers = learner.state()
            packed = {f"kept{k}.{name}": a for k, one in enumerate(kept) for name, a in one.items()}
            job.checkpoint.save(arrays | packed, {"numbers": numbers, "done": iteration + 1, "kept": len(kept)})
    seconds = time.perf_counter() - begin
    pace = f"{learner.steps:,} environment steps, learning included, in {seconds:.0f} s"
    options = [
        Option("imitation" if k == 0 else f"iteration {k * every}", s, learner.policy(s, arrays))
        for k, arrays in enumerate(kept)
        for s in STRENGTHS
    ]
    return options, pace


def _episodes(
    job: TrainJob, settings: RltuneSettings, replays: list[TraceEvaluation], base: PreparedScorer
) -> tuple[list[Episode], list[float]]:
    """Return sequences from the earlier part's replays, and the base policy's cost on each."""
    rng = np.random.default_rng(job.seed)
    episodes: list[Episode] = []
    for evaluation in replays:
        before = evaluation.result(base)
        if before is not None:
            episodes += cut_episodes(before, settings, max(settings.sequences // len(replays), 1), rng)
    against = _reference(settings)
    return episodes, [
        simulate(e, against, 0.0, 1, 1, settings.train_window).figures.cost(settings.objective) for e in episodes
    ]


def _reference(settings: RltuneSettings) -> PreparedScorer:
    """Return the reference policy of rewards."""
    order = ORDERS["fifo" if settings.base in ("fcfs", "fifo-skip") else settings.base]
    prepared = without_net(CandidateRule(settings.base, order), settings, settings.train_window)
    return prepared._replace(backfill=0 if settings.base == "fcfs" else 1)
