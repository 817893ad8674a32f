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
``decide``.
A new agent is a folder, an entry in `REGISTRY`, and one each in `describe`, `model.policy.Agent` and `AGENTS`, a policy
file in ``data/policies``, and its names in pyproject.toml (layers of the agents; who has no torch). ``predictor`` is
none yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gpusched.config.weights import TrainedModel

if TYPE_CHECKING:
    from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob
    from gpusched.agents.dl2.live import LiveActor as Dl2Weights
    from gpusched.agents.gist.networks import GistWeights as GistWeights
    from gpusched.agents.maifs.network import MaifsWeights as MaifsWeights
    from gpusched.agents.rltune.decide import PreparedScorer as RltuneWeights
    from gpusched.agents.rltune.preempt import PreemptionModel as RltuneRanks
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


def _gist_live() -> Live[GistWeights]:
    from gpusched.agents.gist import live

    return live


def _gist_replay() -> Replay[GistWeights]:
    from gpusched.agents.gist import replay

    return replay


def _gist_train() -> Train:
    from gpusched.agents.gist import train

    return train


def _rltune_live() -> Live[RltuneWeights | RltuneRanks]:
    from gpusched.agents.rltune import live

    return live


def _rltune_replay() -> Replay[RltuneWeights | RltuneRanks]:
    from gpusched.agents.rltune import replay

    return replay


def _rltune_train() -> Train:
    from gpusched.agents.rltune import train

    return train


def _dl2_sizes() -> Sizes[Dl2Weights]:
    from gpusched.agents.dl2 import live

    return live


def _dl2_train() -> Train:
    from gpusched.agents.dl2 import train

    return train


def _maifs_sizes() -> Sizes[MaifsWeights]:
    from gpusched.agents.maifs import live

    return live


def _maifs_train() -> Train:
    from gpusched.agents.maifs import train

    return train


def _topology_live() -> Live[TopologyWeights]:
    from gpusched.agents.topology import live

    return live


def _topology_replay() -> Replay[TopologyWeights]:
    from gpusched.agents.topology import replay

    return replay


REGISTRY: dict[str, AgentParts] = {
    "gist": AgentParts(live=_gist_live, replay=_gist_replay, train=_gist_train),
    "rltune": AgentParts(live=_rltune_live, replay=_rltune_replay, train=_rltune_train),
    "dl2": AgentParts(sizes=_dl2_sizes, train=_dl2_train),
    "maifs": AgentParts(sizes=_maifs_sizes, train=_maifs_train),
    "topology": AgentParts(live=_topology_live, replay=_topology_replay),
}
