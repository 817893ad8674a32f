"""The parts of an agent, each a module that implements a protocol, and the registry of agents.

============  =====================================================  ==================================================
module        offers                                                 called by
============  =====================================================  ==================================================
``live``      `Live`: prepare, decide_queue                          `sched.agent.decide_by_agent`, at a live decision
``replay``    `Replay`: runner, maps                                 `sim.replay`, once per replay
``train``     `Train`: train_agent                                   `agents.training.train`; may import torch
``online``    `Online`: update_agent                                 `agents.training.online`, at night for a shadow
============  =====================================================  ==================================================

An agent that sizes resizable jobs (`AgentTraits.sizes`) has the part ``sizes``, `Sizes` (here in the module ``live``),
used live and in replays, instead of ``live`` and ``replay``: the other stages of its policy file are the built-in ones.

``prepare`` converts the weights once, when they are loaded; the type it returns says what they can do: those of RLTune
preempt running jobs (`TrainedModel.preempts`) or do not. Code shared by the parts is compiled, does not import torch,
and is by convention in ``decide``. To add an agent here, add a folder, an entry in `describe` and
`model.policy.AGENTS`, a policy file in ``data/policies``, and its names in pyproject.toml (entry points; layers of the
agents; modules without torch). Another package adds an `AgentParts` as a component of the group ``agents``; the
smallest are a `common.ordering.OrderingAgent`, and one with the part ``sizes``. ``predictor`` is not an agent yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gpusched.config.plugins import installed
from gpusched.config.weights import TrainedModel
from gpusched.model.policy import AGENTS, AgentTraits

if TYPE_CHECKING:
    from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob
    from gpusched.agents.dl2 import live as dl2_live
    from gpusched.agents.dl2 import online as dl2_online
    from gpusched.agents.dl2 import train as dl2_train
    from gpusched.agents.dl2.live import LiveActor as Dl2Weights
    from gpusched.agents.gist import live as gist_live
    from gpusched.agents.gist import replay as gist_replay
    from gpusched.agents.gist import train as gist_train
    from gpusched.agents.gist.networks import GistWeights as GistWeights
    from gpusched.agents.gist.paper_pass import PaperWeights as PaperWeights
    from gpusched.agents.maifs import live as maifs_live
    from gpusched.agents.maifs import train as maifs_train
    from gpusched.agents.maifs.live import LiveAgents as LiveAgents
    from gpusched.agents.rltune import live as rltune_live
    from gpusched.agents.rltune import replay as rltune_replay
    from gpusched.agents.rltune import train as rltune_train
    from gpusched.agents.rltune.decide import PreparedScorer as RltuneWeights
    from gpusched.agents.rltune.preempt import PreemptionModel as RltuneRanks
    from gpusched.agents.topology import live as topology_live
    from gpusched.agents.topology import replay as topology_replay
    from gpusched.agents.topology import train as topology_train
    from gpusched.agents.topology.network import TopologyWeights as TopologyWeights
    from gpusched.sched.agent import Context
    from gpusched.sched.reasons import QueueBlock
    from gpusched.sched.sizing.question import Question
    from gpusched.sched.state import Ints
    from gpusched.sim.engine.build import SimWorld
    from gpusched.sim.engine.state import EventLog

P = TypeVar("P")
"""The weights, in the form that an agent's compiled passes take."""
Prepared = TypeVar("Prepared", contravariant=True)


class Live(Protocol[P]):
    """Decides about the queue of one partition."""

    def prepare(self, model: TrainedModel) -> P:
        """Convert the weights for the compiled passes. ValueError: they have the wrong shape."""

    def decide_queue(self, prepared: P, context: Context) -> tuple[list[int], QueueBlock]:
        """Start jobs in the arrays of ``context``; return the queue in order, and what blocked it.

        Started jobs are subtracted from ``world.resources`` and recorded in ``releases`` and ``outcome``, as in
        `kernel.queue_pass`.

        ValueError: it cannot decide (a network's output is NaN); the fallback policy decides instead.
        """


class Sizes(Protocol[P]):
    """Chooses the sizes of one partition's resizable jobs, among those that resize limits allow."""

    def prepare(self, model: TrainedModel) -> P:
        """Convert the weights for the compiled passes, as in `Live`."""

    def choose_sizes(self, prepared: P, question: Question) -> Sequence[int] | Ints:
        """Return a size for every job of the question, ``int64[jobs]``; see `Question` for what is valid.

        ValueError: it cannot choose; the fallback rule chooses instead.
        """


class Replay(Protocol[Prepared]):
    """Runs replays."""

    def maps(self, model: TrainedModel) -> bool:
        """Return whether it leaves node selection to ``place: milp`` and ``fastest``."""

    def runner(self, world: SimWorld, prepared: Prepared) -> tuple[SimWorld, Callable[[EventLog], int]]:
        """Return the prepared world, and the function that replays it to its end: see `sim.replay.Runner`."""


class Train(Protocol):
    """Trains weights."""

    def train_agent(self, job: TrainJob, report: TrainingReport) -> TrainerResult:
        """Train the agent of one partition."""


class Online(Protocol):
    """Updates the weights of a shadow by what the live policy decided since the last update."""

    def update_agent(self, job: TrainJob, model: TrainedModel, since: float) -> TrainerResult:
        """Return weights that go on from ``model``, by what happened after ``since`` (seconds of the job's trace).

        GpuschedError: there is too little to learn from, or nothing better was found.
        """


@dataclass(frozen=True)
class AgentParts:
    """An agent's parts, each imported on first use, so that listing policies imports none. None: not offered.

    Attributes:
        traits: What it does; ``places`` only in this package.
        devices: What ``train`` can use: ``cpu``, and ``cuda`` if ``TrainJob.device`` is honoured; others are refused.
        describe: A phrase on what its weights are.
    """

    live: Callable[[], Live[Any]] | None = None
    sizes: Callable[[], Sizes[Any]] | None = None
    replay: Callable[[], Replay[Any]] | None = None
    train: Callable[[], Train] | None = None
    online: Callable[[], Online] | None = None
    traits: AgentTraits = field(default_factory=AgentTraits)
    describe: Callable[[TrainedModel], str] | None = None
    devices: tuple[str, ...] = ("cpu",)


_ON_GPU = ("dl2", "gist")  # of the latter only the variants in the paper's setting


def _parts_of(agent: str) -> AgentParts:
    """Return the parts that an agent's folder has, by its traits."""
    live, replay, train, online = (
        partial[Any](import_module, f"gpusched.agents.{agent}.{name}") for name in ("live", "replay", "train", "online")
    )
    traits, devices = AGENTS[agent], ("cpu", "cuda") if agent in _ON_GPU else ("cpu",)
    if traits.sizes:
        learns = online if traits.online else None
        return AgentParts(sizes=live, train=train, online=learns, traits=traits, devices=devices)
    return AgentParts(live=live, replay=replay, train=train, traits=traits, devices=devices)


GIST, RLTUNE, DL2, MAIFS, TOPOLOGY = map(_parts_of, ("gist", "rltune", "dl2", "maifs", "topology"))
REGISTRY = {"gist": GIST, "rltune": RLTUNE, "dl2": DL2, "maifs": MAIFS, "topology": TOPOLOGY}
"""Those of this package, found without reading entry points."""


def installed_parts(agent: str) -> AgentParts:
    """Return the parts of an agent, of this package or another.

    Raises:
        ComponentError: It is another package's, and is not installed, cannot be imported, or lacks a part.
    """
    if agent in REGISTRY:
        return REGISTRY[agent]
    component = installed("agents", agent)
    parts = component.load()
    if not isinstance(parts, AgentParts):
        raise component.error(f"it is a {type(parts).__name__}, not gpusched.agents.base.AgentParts")
    for name in ("sizes",) if parts.traits.sizes else ("live", "replay"):
        if getattr(parts, name) is None:
            raise component.error(f"it has no part '{name}'")
    return parts


if TYPE_CHECKING:  # imports by name are untyped: check here that the modules implement the protocols
    _gist: tuple[Live[GistWeights | PaperWeights], Replay[GistWeights | PaperWeights], Train] = (
        gist_live, gist_replay, gist_train
    )  # fmt: skip
    _rltune: tuple[Live[RltuneWeights | RltuneRanks], Replay[RltuneWeights | RltuneRanks], Train] = (
        rltune_live, rltune_replay, rltune_train
    )  # fmt: skip
    _dl2: tuple[Sizes[Dl2Weights], Train, Online] = (dl2_live, dl2_train, dl2_online)
    _maifs: tuple[Sizes[LiveAgents], Train] = (maifs_live, maifs_train)
    _topology: tuple[Live[TopologyWeights], Replay[TopologyWeights], Train] = (
        topology_live, topology_replay, topology_train
    )  # fmt: skip
