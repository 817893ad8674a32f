"""Recorded decisions as steps of the agent: its warm-up imitates them, and online learning goes on from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gpusched.agents.common.recorded import RecordedDecision
from gpusched.agents.dl2.decide import Actor, new_tape, seed_draws
from gpusched.agents.dl2.learn import Recording
from gpusched.agents.dl2.live import NO_TEACHER, Learning, LiveActor, choose

MIN_DECISIONS = 100
"""Fewer recorded decisions are not imitated: a rule is."""
STEPS = 8000
"""Most steps to learn from at once."""
_ROWS = 120  # of a step, on average


def record(
    prepared: LiveActor, decisions: Sequence[RecordedDecision], restart: float, seed: int, *,
    sampled: bool = False, explore: float = 0.0, steps: int = STEPS,
) -> Recording:  # fmt: skip
    """Return decisions as steps with their rewards, by the speeds that jobs reported before and after them.

    Args:
        prepared: The weights; they give the probabilities of the steps.
        decisions: What was decided. Where these are too many for ``steps``, steps are left out at random.
        restart: Cost of a resize as a fraction of a slot.
        seed: Of all draws.
        sampled: The weights decide in place of what was recorded, each step sampled.
        explore: With ``sampled``, the probability of a random initial size of a job.
        steps: Most steps.
    """
    seed_draws(seed)
    most = sum(int(one.claims.sizes.shape[0]) * one.claims.sizes.shape[1] + 1 for one in decisions)
    tape = new_tape(most, steps, min(steps * _ROWS, sum(_rows(one) for one in decisions)))
    kept, slots = min(1.0, steps / max(_count(decisions), 1)), []
    for one in decisions:
        slots.append(int(tape.number[0]))
        teacher = NO_TEACHER if sampled else one.chosen
        choose(prepared, one.claims, Learning(tape, explore, teacher, 0.0, restart, kept, one.pace))
    return Recording(tape, np.array(slots))


def _rows(one: RecordedDecision) -> int:
    """Return the most rows that a decision's steps have together."""
    jobs, most = one.claims.sizes.shape
    return int((jobs + 1) * (jobs * most + 1))


def _count(decisions: Sequence[RecordedDecision]) -> int:
    """Return the number of steps to what was chosen."""
    return sum(
        1 + int((one.claims.allowed.astype(bool) & (one.claims.sizes <= one.chosen[:, None])).sum()) - len(one.chosen)
        for one in decisions
    )


def agreement(actor: Actor, slot_s: float, decisions: Sequence[RecordedDecision]) -> tuple[float, float]:
    """Return how many of the jobs that could have several sizes get the recorded one, and how many would by chance."""
    prepared, same, chance, count = LiveActor(actor, slot_s), 0, 0.0, 0
    for one in decisions:
        choices = one.claims.allowed.sum(axis=1)
        several = choices > 1
        same += int((choose(prepared, one.claims, None) == one.chosen)[several].sum())
        chance += float((1.0 / choices[several]).sum())
        count += int(several.sum())
    return same / max(count, 1), chance / max(count, 1)
