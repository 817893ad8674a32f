"""Online learning: the weights of a shadow go on from what another, live policy decided, and from what that brought.

The states are those that the cluster was in. Two kinds of steps are learned from: those of the live policy, imitated by
their advantage; and steps sampled with the present weights from the same states, in simulation, which is where the
agent explores. Rewards are by the speeds that jobs reported before and after the decision: the normalised progress
within a slot, short jobs weighted more, as in `gpusched.agents.dl2.learn`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.recorded import RecordedDecision, recorded_decisions
from gpusched.agents.common.request import TrainerResult, TrainJob
from gpusched.agents.common.torch_ import set_up
from gpusched.agents.dl2.decide import SHORT_JOB_POWER, Actor
from gpusched.agents.dl2.history import STEPS, record
from gpusched.agents.dl2.learn import Dl2Recipe, Dl2Trainer, PublicSetting, Recording
from gpusched.agents.dl2.live import LiveActor, choose, prepare
from gpusched.agents.dl2.weights import arrays_of
from gpusched.config.weights import TrainedModel
from gpusched.errors import GpuschedError
from gpusched.model.units import count_of
from gpusched.sched.state import Ints

MIN_NEW = 20
"""Fewer new decisions change nothing: there is an update when there are as many."""
_CRITIC = "critic."
_EVERY = 5  # of the decisions one is kept apart, to choose the weights by


class OnlineRecipe(NamedTuple):
    """Hyper-parameters of one update.

    Attributes:
        rounds: Each learns from recorded steps once, then from sampled ones.
        replayed: Earlier decisions for each new one, so that what was learned before is not lost.
        steps: Most of each kind in a round.
        rate: Learning rate. explore: Probability of a random initial size of a job, when sampling.
    """

    rounds: int = 12
    replayed: float = 1.0
    steps: int = STEPS // 2
    rate: float = 0.003
    explore: float = 0.05


def update_agent(
    job: TrainJob, model: TrainedModel, since: float, recipe: OnlineRecipe = OnlineRecipe()
) -> TrainerResult:
    """Return weights that go on from ``model`` by the decisions made after ``since`` (seconds of the trace).

    Raises:
        GpuschedError: There are too few new decisions, no weights were found that bring more than these, or torch is
            not installed.
        ValueError: The weights have another shape.
    """
    start = prepare(model)
    decisions = recorded_decisions(job.scenario.trace, job.scenario.pool.total_gpus, job.spec.resize)
    new = [one for one in decisions if one.at > since]
    if len(new) < MIN_NEW:
        raise GpuschedError(f"{count_of(len(new), 'new decision')} on sizes; {MIN_NEW} are needed")
    restart = float(model.about.get("restart_s", 0.0)) / start.slot_s
    learner = _Online(job, model, start, restart, recipe)
    best, before, least = learner.run(new, [one for one in decisions if one.at <= since])
    live = progress(new, [one.chosen for one in new], start.slot_s, restart)
    if least <= before:
        raise GpuschedError(f"nothing better found by {count_of(len(new), 'new decision')} on sizes")
    note = (
        f"online, from {count_of(len(new), 'new decision')}: normalised progress per slot in states kept apart "
        f"{before:.4f} before, {least:.4f} after; of the live policy in all new states {live:.4f}"
    )
    critic = {f"{_CRITIC}{name}": part for name, part in learner.trainer.critic_arrays().items()}
    return TrainerResult(
        arrays=arrays_of({"trained": best}) | critic, about=dict(model.about), score=least,
        hyper_parameters=recipe._asdict(), notes=(note,), untrained=arrays_of({"trained": start.actor}),
    )  # fmt: skip


class _Online:
    """One update."""

    def __init__(
        self, job: TrainJob, model: TrainedModel, start: LiveActor, restart: float, recipe: OnlineRecipe
    ) -> None:
        hidden = len(start.actor.bias)
        public = Dl2Recipe(hidden=hidden, rate=recipe.rate, replayed=1, entropy=(0.003, 0.001))
        self.trainer = Dl2Trainer(public, PublicSetting(public, {}), job.seed, 1, set_up(job.seed, job.device))
        critic = {n.removeprefix(_CRITIC): a for n, a in model.arrays.items() if n.startswith(_CRITIC)}
        self.trainer.start_from(start.actor, critic)
        self._recipe, self._slot_s, self._restart = recipe, start.slot_s, restart
        self._rng = np.random.default_rng(job.seed)

    def run(self, new: Sequence[RecordedDecision], old: Sequence[RecordedDecision]) -> tuple[Actor, float, float]:
        """Return the best weights, and the progress by the first and by these in states that are kept apart."""
        recipe, rng = self._recipe, self._rng
        apart, ours = new[::_EVERY], [one for i, one in enumerate(new) if i % _EVERY]
        best = self.trainer.networks.weights()
        before = most = self._progress(best, apart)
        for number in range(recipe.rounds):
            again = rng.permutation(len(old))[: round(recipe.replayed * len(ours))]
            states = [*ours, *(old[i] for i in again.tolist())]
            self.trainer.imitate_by_advantage([self._record(states, False)])
            self.trainer.improve([self._record(states, True)], number / recipe.rounds)
            actor = self.trainer.networks.weights()
            if (now := self._progress(actor, apart)) > most:
                best, most = actor, now
        return best, before, most

    def _record(self, states: Sequence[RecordedDecision], sampled: bool) -> Recording:
        prepared = LiveActor(self.trainer.networks.weights(), self._slot_s)
        seed, explore = int(self._rng.integers(1 << 31)), self._recipe.explore if sampled else 0.0
        return record(prepared, states, self._restart, seed, sampled=sampled, explore=explore, steps=self._recipe.steps)

    def _progress(self, actor: Actor, states: Sequence[RecordedDecision]) -> float:
        prepared = LiveActor(actor, self._slot_s)
        return progress(states, [choose(prepared, one.claims, None) for one in states], self._slot_s, self._restart)


def progress(decisions: Sequence[RecordedDecision], chosen: Sequence[Ints], slot_s: float, restart: float) -> float:
    """Return the normalised progress per slot, 0 to 1: how fast jobs are against their best sizes, short ones first.

    Args:
        decisions: The states, with the speeds reported before and after.
        chosen: Of each, the jobs' GPUs.
        slot_s: Seconds of a slot.
        restart: Cost of a resize as a fraction of it.
    """
    gained = whole = 0.0
    for one, sizes in zip(decisions, chosen, strict=True):
        jobs, allowed = one.claims.jobs, one.claims.allowed.astype(bool)
        known, true = np.where(allowed, one.claims.pace, 0.0), np.where(allowed, one.pace, 0.0)
        row = np.arange(len(jobs))
        at = (one.claims.sizes == sizes[:, None]).argmax(axis=1)
        now = np.where(jobs["held"] > 0, (one.claims.sizes == jobs["held"][:, None]).argmax(axis=1), 0)
        left = jobs["left_s"] / slot_s * one.claims.pace[row, now] / known.max(axis=1)
        weight = np.maximum(left, 0.5) ** -SHORT_JOB_POWER
        runs = np.where((jobs["held"] > 0) & (jobs["held"] != sizes), 1.0 - restart, 1.0)
        gained += float((weight * runs * true[row, at] / true.max(axis=1)).sum())
        whole += float(weight.sum())
    return gained / max(whole, 1e-12)
