"""DL2's agent in DL2's setting: a policy that decides by its weights and by what jobs told of their speeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.agents.dl2.decide import Actor, Present, Tape, allocate, new_tape, nobody
from gpusched.agents.dl2.observed import ObservedClasses, kinds_of, new_observed
from gpusched.agents.dl2.slots import Policy, SlotJobs, SlotProgress, jobs_of, kinds_in, play
from gpusched.agents.dl2.workloads import SLOTS, Dl2Setting, Dl2Workload, dl2, draw
from gpusched.estimation.speeds import SpeedLearner
from gpusched.sched.state import Floats, Ints

_KEPT = 0.02  # of the steps, for learning
_NOBODY: Ints = np.zeros((0, 2), np.int64)


class PlayableWorkload(NamedTuple):
    """A workload to play.

    Attributes:
        jobs: As arrays.
        names: ``jobs``' kinds, by model.
        scale: ``float64[kinds]``: times epochs a slot, that is steps/s.
    """

    jobs: SlotJobs
    names: tuple[str, ...]
    scale: Floats


def prepare(workload: Dl2Workload, speeds: Mapping[str, Floats]) -> PlayableWorkload:
    """The arrays of a workload; ``speeds``: what its jobs will tell."""
    kinds = kinds_in(workload)
    return PlayableWorkload(
        jobs_of(workload, speeds), tuple(kind.model for kind in kinds),
        np.array([kind.steps_per_epoch / workload.slot_s for kind in kinds]),
    )  # fmt: skip


class Player:
    """A policy of `slots.play`; learns speeds as it goes.

    Args:
        actor: The weights.
        observed: What jobs told before; it is changed.
        one: The workload.
        tape: Where steps are drawn and written down for learning; None: the best step is taken.
        explore: By job and slot, the chance that its size is drawn at random among those it may have.
        rng: For that. teacher: Whose sizes are taken, and written down as steps.
    """

    def __init__(
        self,
        actor: Actor,
        observed: SpeedLearner,
        one: PlayableWorkload,
        tape: Tape | None = None,
        explore: float = 0.0,
        rng: np.random.Generator | None = None,
        teacher: Policy | None = None,
    ) -> None:
        self._actor, self._observed, self._scale = actor, observed, one.scale
        self._rows = [observed.row(name) for name in one.names]
        self._tape, self._explore, self._teacher = tape, explore, teacher
        self._rng = rng or np.random.default_rng(0)
        self._kinds: ObservedClasses | None = None
        self._stayed: Ints = np.zeros(len(one.jobs.kind), np.int64)
        self.slots: list[int] = []  # the step with which each slot begins

    def __call__(self, jobs: SlotJobs, course: SlotProgress, there: Ints) -> None:
        """Sizes of one slot."""
        kinds = self._learn(jobs, course)
        capacity = np.full(2, SLOTS * jobs.nodes, np.int64)
        free = capacity.copy()
        present = Present(
            kind=jobs.kind[there], left=np.maximum(jobs.epochs[there] - course.progress.done[there], 1e-9),
            total=jobs.epochs[there], stayed=self._stayed[there].astype(np.float64), before=course.before[there],
            sizes=np.zeros((len(there), 2), np.int64),
        )  # fmt: skip
        self._stayed[there] += 1
        taught = _NOBODY
        if self._teacher is not None:
            self._teacher(jobs, course, there)
            taught = course.sizes[there]
        if self._explore > 0.0:
            self._try(kinds, present, free)
        if self._tape is not None:
            self.slots.append(int(self._tape.number[0]))
        allocate(
            self._actor, kinds, present, free, capacity, self._tape is not None, _KEPT, self._tape or new_tape(0, 0, 0),
            float((self._stayed == 0).sum()), taught, 0.0,
        )  # fmt: skip
        course.sizes[there] = present.sizes

    def _learn(self, jobs: SlotJobs, course: SlotProgress) -> ObservedClasses:
        """What is expected of the kinds, with what jobs told in the last slot."""
        news = self._kinds is None
        for job in np.flatnonzero(~np.isnan(course.speed)):
            kind = jobs.kind[job]
            size = int(course.before[job, 0]) - 1, int(course.before[job, 1]) - 1
            news |= self._observed.add_report(self._rows[kind], size, float(course.speed[job] * self._scale[kind]))
        course.speed[:] = np.nan
        if news or self._kinds is None:
            speeds = np.zeros(jobs.rate.shape)
            for kind, row in enumerate(self._rows):
                speeds[kind, 1:, 1:] = self._observed.expected(row) / self._scale[kind]
            self._kinds = kinds_of(speeds, jobs.need)
        return self._kinds

    def _try(self, kinds: ObservedClasses, present: Present, free: Ints) -> None:
        """DL2's exploration by job: sizes drawn, so that speeds become known."""
        most = kinds.relative.shape[1]
        for j in np.flatnonzero(self._rng.random(len(present.kind)) < self._explore):
            size = self._rng.integers(1, most, 2)
            need = kinds.need[present.kind[j], size[0], size[1]]
            if (need <= free).all():
                present.sizes[j] = size
                free -= need


def looked_around(speeds: Mapping[str, Floats], most: int, seed: int, workloads: int = 20) -> SpeedLearner:
    """Speeds as jobs told them in workloads in which many sizes were tried: what an agent saw before it is judged.

    Args:
        speeds: What they tell: see `sim.profiles.dl2.read_speeds`.
        most: Workers, and servers, of a job at most.
        seed: Of the draws.
        workloads: How many.
    """
    observed = new_observed(most)
    rng = np.random.default_rng(seed)
    if {kind.model for kind in dl2().models} <= set(speeds):
        for _ in range(workloads):
            drawn = draw(Dl2Setting(96), int(rng.integers(1 << 40, 1 << 50)))
            one = prepare(msgspec.structs.replace(drawn, max_tasks=most), speeds)
            play(one.jobs, Player(nobody(), observed, one, explore=0.5, rng=rng))
    return observed
