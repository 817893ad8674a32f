"""DL2's agent in DL2's setting: a policy that decides by its weights and the speeds reported by jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np

from gpusched.agents.dl2.decide import ActiveJobs, Actor, Tape, allocate, new_tape, zero_actor
from gpusched.agents.dl2.observed import ObservedClasses, kinds_of, new_observed
from gpusched.agents.dl2.slots import Policy, SlotJobs, SlotProgress, jobs_of, kinds_in, simulate
from gpusched.agents.dl2.workloads import SLOTS, Dl2Setting, Dl2Workload, dl2, draw
from gpusched.estimation.speeds import SpeedLearner
from gpusched.sched.state import Floats, Ints

_KEPT = 0.02  # fraction of steps recorded for training
_NO_TEACHER: Ints = np.zeros((0, 2), np.int64)


class PlayableWorkload(NamedTuple):
    """A workload to simulate.

    Attributes:
        jobs: As arrays.
        names: ``jobs``' kinds, by model.
        scale: ``float64[kinds]``: steps/s per epoch per slot.
    """

    jobs: SlotJobs
    names: tuple[str, ...]
    scale: Floats


def prepare(workload: Dl2Workload, speeds: Mapping[str, Floats]) -> PlayableWorkload:
    """Return the arrays of a workload; ``speeds``: those that its jobs will report."""
    kinds = kinds_in(workload)
    return PlayableWorkload(
        jobs_of(workload, speeds), tuple(kind.model for kind in kinds),
        np.array([kind.steps_per_epoch / workload.slot_s for kind in kinds]),
    )  # fmt: skip


class Player:
    """A policy for `slots.simulate` that learns speeds from running jobs.

    Args:
        actor: The weights.
        observed: Speeds reported so far; updated.
        workload: The workload.
        tape: Records sampled steps for training; None: the best step is taken.
        explore: Per job and slot, the probability of a random initial size.
        rng: For exploration. teacher: A policy to imitate: its sizes are taken and recorded as steps.
        best_sizes: In slots in which all jobs fit at their best expected sizes, they get these, and no step is chosen.
    """

    def __init__(
        self,
        actor: Actor,
        observed: SpeedLearner,
        workload: PlayableWorkload,
        tape: Tape | None = None,
        explore: float = 0.0,
        rng: np.random.Generator | None = None,
        teacher: Policy | None = None,
        best_sizes: bool = False,
    ) -> None:
        self._actor, self._observed, self._scale = actor, observed, workload.scale
        self._rows = [observed.row(name) for name in workload.names]
        self._tape, self._explore, self._teacher = tape, explore, teacher
        self._best_sizes = best_sizes
        self._rng = rng or np.random.default_rng(0)
        self._kinds: ObservedClasses | None = None
        self._age: Ints = np.zeros(len(workload.jobs.kind), np.int64)
        self.slots: list[int] = []  # the step with which each slot begins

    def __call__(self, jobs: SlotJobs, slot_progress: SlotProgress, active: Ints) -> None:
        """Choose the sizes of one slot."""
        kinds = self._learn(jobs, slot_progress)
        capacity = np.full(2, SLOTS * jobs.nodes, np.int64)
        free = capacity.copy()
        present = ActiveJobs(
            kind=jobs.kind[active], left=np.maximum(jobs.epochs[active] - slot_progress.progress.done[active], 1e-9),
            total=jobs.epochs[active], age=self._age[active].astype(np.float64), before=slot_progress.before[active],
            sizes=np.zeros((len(active), 2), np.int64),
        )  # fmt: skip
        self._age[active] += 1
        taught = _NO_TEACHER
        if self._teacher is not None:
            self._teacher(jobs, slot_progress, active)
            taught = slot_progress.sizes[active]
        if self._explore > 0.0:
            self._explore_sizes(kinds, present, free)
        if self._best_sizes and _give_best_sizes(kinds, present, free):
            slot_progress.sizes[active] = present.sizes
            return
        if self._tape is not None:
            self.slots.append(int(self._tape.number[0]))
        allocate(
            self._actor, kinds, present, free, capacity, self._tape is not None, _KEPT, self._tape or new_tape(0, 0, 0),
            float((self._age == 0).sum()), taught, 0.0, kinds,
        )  # fmt: skip
        slot_progress.sizes[active] = present.sizes

    def _learn(self, jobs: SlotJobs, slot_progress: SlotProgress) -> ObservedClasses:
        """Return the expected speeds of the kinds, updated by the reports of the last slot."""
        changed = self._kinds is None
        for job in np.flatnonzero(~np.isnan(slot_progress.speed)):
            kind = jobs.kind[job]
            size = int(slot_progress.before[job, 0]) - 1, int(slot_progress.before[job, 1]) - 1
            changed |= self._observed.add_report(
                self._rows[kind], size, float(slot_progress.speed[job] * self._scale[kind])
            )
        slot_progress.speed[:] = np.nan
        if changed or self._kinds is None:
            speeds = np.zeros(jobs.rate.shape)
            for kind, row in enumerate(self._rows):
                speeds[kind, 1:, 1:] = self._observed.expected(row) / self._scale[kind]
            self._kinds = kinds_of(speeds, jobs.need)
        return self._kinds

    def _explore_sizes(self, kinds: ObservedClasses, present: ActiveJobs, free: Ints) -> None:
        """Draw sizes of some jobs, DL2's exploration by job, so that their speeds are measured."""
        most = kinds.relative.shape[1]
        for j in np.flatnonzero(self._rng.random(len(present.kind)) < self._explore):
            size = self._rng.integers(1, most, 2)
            need = kinds.need[present.kind[j], size[0], size[1]]
            if (need <= free).all():
                present.sizes[j] = size
                free -= need


def _give_best_sizes(kinds: ObservedClasses, present: ActiveJobs, free: Ints) -> bool:
    """Give every job its best expected size; return False, and change nothing, if they do not fit together.

    Resizing is free in this setting, so nothing else could be better, and steps that are each the best for their slots
    may end beside the best size.
    """
    last = kinds.points[present.kind] - 1
    best = kinds.front[present.kind, last]
    need = kinds.need[present.kind, best[:, 0], best[:, 1]].sum(axis=0)
    if (last < 0).any() or (need > free).any():
        return False
    present.sizes[:] = best
    return True


def explored_speeds(speeds: Mapping[str, Floats], most: int, seed: int, workloads: int = 20) -> SpeedLearner:
    """Return speeds learned in exploratory workloads, known to the agent before its evaluation.

    Args:
        speeds: True speeds: see `sim.profiles.dl2.read_speeds`.
        most: Maximum workers, and servers, of a job.
        seed: Of the random draws.
        workloads: Number of workloads.
    """
    observed = new_observed(most)
    rng = np.random.default_rng(seed)
    if {kind.model for kind in dl2().models} <= set(speeds):
        for _ in range(workloads):
            drawn = draw(Dl2Setting(96), int(rng.integers(1 << 40, 1 << 50)))
            one = prepare(msgspec.structs.replace(drawn, max_tasks=most), speeds)
            simulate(one.jobs, Player(zero_actor(), observed, one, explore=0.5, rng=rng))
    return observed
