"""What an agent is: the parts that its folder offers, each a module with the functions of a protocol; and the registry.

============  =====================================================  ==================================================
module        offers                                                 called by
============  =====================================================  ==================================================
``live``      `Live`: prepare, decide_queue                          `sched.agent.by_agent`, at a live decision
``replay``    `Replay`: runner, maps                                 `sim.runs`, once per replay
``train``     `Train`: train_agent                                   `agents.training.train`; may import torch
============  =====================================================  ==================================================

An agent that chooses sizes of resizable jobs (`AgentTraits.sizes`) offers `Sizes` in ``live`` instead, live and in
replays, and no ``replay``: the stages of its policy's file do the rest. One that chooses nodes by what they cost
(`AgentTraits.places`) learns elsewhere: no ``train``.

What the weights can is the type of what ``prepare`` makes of them, once, when they are loaded: RLTune's stop running
jobs (`TrainedModel.preempts`) or do not. What the parts have in common is compiled and has no torch: by custom in
``decide``. A new agent is a folder, an entry each in `describe`, `model.policy.Agent` and `AGENTS`, a policy file in
``data/policies``, and its names in pyproject.toml (layers of the agents; who has no torch). ``predictor`` is none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gpusched.config.weights import TrainedModel
from gpusched.model.policy import AGENTS, Agent, AgentTraits

if TYPE_CHECKING:
    from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob
    from gpusched.agents.dl2 import live as dl2_live
    from gpusched.agents.dl2 import train as dl2_train
    from gpusched.agents.dl2.live import LiveActor as Dl2Weights
    from gpusched.agents.gist import live as gist_live
    from gpusched.agents.gist import replay as gist_replay
    from gpusched.agents.gist import train as gist_train
    from gpusched.agents.gist.networks import GistWeights as GistWeights
    from gpusched.agents.maifs import live as maifs_live
    from gpusched.agents.maifs import train as maifs_train
    from gpusched.agents.maifs.network import MaifsWeights as MaifsWeights
    from gpusched.agents.rltune import live as rltune_live
    from gpusched.agents.rltune import replay as rltune_replay
    from gpusched.agents.rltune import train as rltune_train
    from gpusched.agents.rltune.decide import PreparedScorer as RltuneWeights
    from gpusched.agents.rltune.preempt import PreemptionModel as RltuneRanks
    from gpusched.agents.topology import live as topology_live
    from gpusched.agents.topology import replay as topology_replay
    from gpusched.agents.topology.network import TopologyWeights as TopologyWeights
    from gpusched.sched.agent import Context
    from gpusched.sched.reasons import QueueBlock
    from gpusched.sched.sizing.question import Question
    from gpusched.sched.state import Ints
    from gpusched.sim.engine.build import SimWorld
    from gpusched.sim.engine.state import EventLog

P = TypeVar("P")
"""The weights as an agent's passes take them."""
Taken = TypeVar("Taken", contravariant=True)


class Live(Protocol[P]):
    """Decides about the queue of one partition."""

    def prepare(self, model: TrainedModel) -> P:
        """The weights as its passes take them. ValueError: they are of another shape."""

    def decide_queue(self, prepared: P, context: Context) -> tuple[list[int], QueueBlock]:
        """Starts what is to start, in the arrays of ``context``; the queue in its order, and what blocked it.

        It takes started jobs off ``world.resources`` and notes them in ``releases`` and ``outcome``, as
        `kernel.queue_pass` does.

        ValueError: it cannot decide (a network's answer is no number); the fallback does then.
        """


class Sizes(Protocol[P]):
    """Chooses sizes of one partition's resizable jobs, among those that brakes allow."""

    def prepare(self, model: TrainedModel) -> P:
        """As of `Live`."""

    def choose_sizes(self, prepared: P, question: Question) -> Sequence[int] | Ints:
        """A size for every job of the question, ``int64[jobs]``; see `Question` for what is sound.

        ValueError: it cannot choose; the rule of its fallback does then.
        """


class Replay(Protocol[Taken]):
    """Runs replays."""

    def maps(self, model: TrainedModel) -> bool:
        """Whether it leaves nodes to ``place: milp`` and ``fastest``."""

    def runner(self, world: SimWorld, prepared: Taken) -> tuple[SimWorld, Callable[[EventLog], int]]:
        """The world with all that it needs, and what replays it to the end: see `sim.runs.Runner`."""


class Train(Protocol):
    """Learns."""

    def train_agent(self, job: TrainJob, report: TrainingReport) -> TrainerResult:
        """One partition's agent."""


@dataclass(frozen=True)
class AgentParts:
    """An agent's parts, each imported when it is asked for: what lists policies imports none. None: not offered."""

    live: Callable[[], Live[Any]] | None = None
    sizes: Callable[[], Sizes[Any]] | None = None
    replay: Callable[[], Replay[Any]] | None = None
    train: Callable[[], Train] | None = None


def _parts_of(agent: Agent, traits: AgentTraits) -> AgentParts:
    """Return what an agent's folder offers, by its traits."""
    live, replay, train = (
        partial[Any](import_module, f"gpusched.agents.{agent}.{name}") for name in ("live", "replay", "train")
    )
    if traits.sizes:
        return AgentParts(sizes=live, train=train)
    return AgentParts(live=live, replay=replay, train=None if traits.places else train)


REGISTRY: dict[str, AgentParts] = {agent: _parts_of(agent, traits) for agent, traits in AGENTS.items()}

if TYPE_CHECKING:  # modules that are imported by name have no types there: here they are held to the protocols
    _gist: tuple[Live[GistWeights], Replay[GistWeights], Train] = (gist_live, gist_replay, gist_train)
    _rltune: tuple[Live[RltuneWeights | RltuneRanks], Replay[RltuneWeights | RltuneRanks], Train] = (
        rltune_live, rltune_replay, rltune_train
    )  # fmt: skip
    _dl2: tuple[Sizes[Dl2Weights], Train] = (dl2_live, dl2_train)
    _maifs: tuple[Sizes[MaifsWeights], Train] = (maifs_live, maifs_train)
    _topology: tuple[Live[TopologyWeights], Replay[TopologyWeights]] = (topology_live, topology_replay)
