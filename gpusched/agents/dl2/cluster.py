"""A partition of our own as a world for DL2's agent to learn in."""

from __future__ import annotations

import numpy as np

from gpusched.agents.common.resized import Log, Workload, by_drf, run
from gpusched.agents.dl2.decide import Actor, Tape
from gpusched.agents.dl2.live import NO_TEACHER, Learning, Prepared, choose
from gpusched.sched.sizing.question import Claims
from gpusched.sched.state import Ints


class Partition:
    """A `learn.World` of the jobs of a log."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def draw(self, rng: np.random.Generator) -> Workload:
        """See `Log.draw`."""
        return self._log.draw(rng)

    def choice(self) -> list[Workload]:
        """See `Log.choice`."""
        return self._log.choice()

    def take(self, actor: Actor, one: Workload, tape: Tape, explore: float, seed: int, taught: bool) -> Ints:
        """See `learn.World`."""
        slots: list[int] = []
        prepared = Prepared(actor, 1.0)

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

    def jct(self, actor: Actor | None, one: Workload) -> float:
        """See `learn.World`; in slots."""
        prepared = Prepared(actor, 1.0) if actor is not None else None

        def policy(claims: Claims, coming: int) -> Ints:
            chosen = choose(prepared, claims, None) if prepared is not None else by_drf(claims)
            assert chosen is not None
            return chosen

        return float((run(one, policy, self._log.restart) - one.submit).mean())
