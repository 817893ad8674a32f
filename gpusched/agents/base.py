"""What an agent is: the modules of its folder, ``gpusched.agents.NAME``, and what each offers.

============  =====================================================  ==================================================
module        offers                                                 called by
============  =====================================================  ==================================================
``live``      `Live`: prepare, decide_queue                          `sched.agent.by_agent`, at a live decision
``replay``    `Replay`: runner, MAPS                                 `sim.agent.agent_runner`, once per replay
``train``     `Train`: train_agent                                   `agents.training.train`; may import torch
``describe``  `Describe`: what_decides                               `what_decides` below: tables, cards
============  =====================================================  ==================================================

An agent that chooses sizes of resizable jobs (`AgentTraits.sizes`) offers `Sizes` in ``live`` instead, live and in
replays, and no ``replay``: the stages of its policy's file do the rest. One that chooses nodes by what they cost
(`AgentTraits.places`) learns elsewhere: no ``train``.

Where the weights stop running jobs (`sched.agent.PREEMPT`), ``live_preempt`` and ``replay_preempt`` decide. What these
have in common is compiled and has no torch: by custom in ``decide``. A new agent is a folder, an entry each in
`model.policy.Agent` and `AGENTS`, a policy file in ``data/policies``, and its names in pyproject.toml (layers of the
agents; who has no torch). Its weights say (``about``) what it ``knows``, its ``backfill``, and ``preempt`` where they
stop jobs. `tests/docs/test_rooms.py` holds every agent to this table; ``predictor`` is none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from gpusched.config.weights import Model
from gpusched.sched.agent import Context, part_of
from gpusched.sched.reasons import Block
from gpusched.sched.sizing.question import Question
from gpusched.sched.state import Ints

if TYPE_CHECKING:
    from gpusched.agents.common.request import Report, Trained, TrainJob
    from gpusched.sim.engine.build import World
    from gpusched.sim.engine.state import Log


class Live(Protocol):
    """Decides about the queue of one partition."""

    def prepare(self, model: Model) -> Any:
        """The weights as its passes take them. ValueError: they are of another shape."""

    def decide_queue(self, prepared: Any, context: Context) -> tuple[list[int], Block]:
        """Starts what is to start, in the arrays of ``context``; the queue in its order, and what blocked it.

        `sched.agent` says which arrays it writes.

        ValueError: it cannot decide (a network's answer is no number); the fallback does then.
        """


class Sizes(Protocol):
    """Chooses sizes of one partition's resizable jobs, among those that brakes allow."""

    def prepare(self, model: Model) -> Any:
        """As of `Live`."""

    def choose_sizes(self, prepared: Any, question: Question) -> Sequence[int] | Ints:
        """A size for every job of the question, ``int64[jobs]``; see `Question` for what is sound.

        ValueError: it cannot choose; the rule of its fallback does then.
        """


class Replay(Protocol):
    """Runs replays. ``MAPS``, where it is true: also with ``place: milp`` and ``fastest``."""

    def runner(self, world: World, prepared: Any) -> Callable[[Log], int]:
        """What replays to the end; see `gpusched.sim.agent`."""


class Train(Protocol):
    """Learns."""

    def train_agent(self, job: TrainJob, report: Report) -> Trained:
        """One partition's agent."""


class Describe(Protocol):
    """Tells people what weights are."""

    def what_decides(self, model: Model) -> str:
        """One phrase, such as ``a linear rule of 21 weights (job 6, server 8, hold 7), no neural network``."""


def what_decides(model: Model) -> str:
    """What decides in trained weights, in a phrase read off the weights: a linear rule, or a neural network too."""
    describe: Describe = part_of(model.agent, "describe")
    return describe.what_decides(model)
