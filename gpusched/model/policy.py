"""Policies as their files describe them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ORDERS = ("fifo", "ljf", "sjf", "sjf-estimate", "fairshare", "smallest", "lpt-limit")
"""The orders of this package that decide live; those of other packages are components of the group ``orders``."""
# The names of this package's; those of other packages are components of the groups ``placements`` and ``sizings``.
Place = Literal["first-fit", "best-fit", "spread", "naive", "fastest", "milp", "rack", "rack-wait", "contention"]
Ties = Literal["first", "last"]
Backfill = Literal["none", "skip", "easy", "conservative"]
MAPPING_PLACES: tuple[Place, ...] = ("fastest", "milp")
SIMPLE_BACKFILLS: tuple[Backfill, ...] = ("none", "skip", "easy")  # what agents, mappings and placement by cost know


class AgentTraits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an agent that are needed without loading it.

    Attributes:
        remembers: It uses recently ended jobs. estimates: It uses estimated run times, unless it preempts.
        holds_back: It may delay jobs that would fit now.
        sizes: It chooses sizes of resizable jobs, and nothing else: the stages of its policy's file do the rest.
        places: It chooses nodes by what places cost, and which jobs wait for better ones: order and backfill are its
            policy's or its fallback's.
        online: As a shadow it learns every night from what the live policy decided.
        slices: It decides about queues of MIG slices, too; else its policy's stages or fallback do (`for_slices`).
    """

    remembers: bool = False
    estimates: bool = False
    holds_back: bool = False
    sizes: bool = False
    places: bool = False
    online: bool = False
    slices: bool = False

    @property
    def orders(self) -> bool:
        """Return whether it orders the queue itself, instead of its policy's stages."""
        return not (self.sizes or self.places)


AGENTS: dict[str, AgentTraits] = {"gist": AgentTraits(holds_back=True, slices=True),
                                  "rltune": AgentTraits(remembers=True, estimates=True, slices=True),
                                  "dl2": AgentTraits(sizes=True, online=True), "maifs": AgentTraits(sizes=True),
                                  "topology": AgentTraits(places=True)}  # fmt: skip
"""The agents of this package, known without reading entry points; a policy's file says what another package's does."""


def traits_of(agent: str | None, others: AgentTraits | None) -> AgentTraits:
    """Return an agent's properties, ``others`` if it is another package's; defaults for a staged policy (None)."""
    return (AGENTS.get(agent) if agent is not None else None) or others or AgentTraits()


class Mapping(msgspec.Struct, frozen=True, kw_only=True):
    """How ``place: milp`` and ``place: fastest`` choose nodes and GPU types; the file's ``mapping`` section.

    Attributes:
        window: So many jobs at the head of the order are looked at together.
        budget_s: The optimiser is stopped after it; the best answer by then counts.
        floor: A job does not start on a GPU type on which it goes at less than this part of its best speed; it waits
            for a better one. What blocks the queue with backfill none takes what there is; the
            head under easy goes, or waits, for where it ends first.
        order_weight: What the first of the window counts for against the last, in GPUs at full speed.
        user_share: The most of the partition's GPUs that one user may hold while another waits.
        open_cost, fragment_cost: In GPUs at full speed: of taking an empty node; of a free GPU that a typical job
            cannot use.
        speeds: Pattern of job names -> GPU type -> speed, relative to one another. The first that matches counts.
    """

    window: int = 256
    budget_s: float = 0.2
    floor: float = 0.3
    order_weight: float = 0.05
    user_share: float = 1.0
    open_cost: float = 0.02
    fragment_cost: float = 0.02
    speeds: dict[str, dict[str, float]] = {}


class PreemptionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on preemption by an agent; the file's ``preempt`` section. Live and in replays.

    Attributes:
        min_run_s: Minimum run time of a job's current attempt before it is stopped.
        per_hour: Maximum preemptions of a job within an hour; 0: unlimited.
        restart_s: Assumed cost of a restart: the time to load saved work.
    """

    min_run_s: float = 600.0
    per_hour: int = 2
    restart_s: float = 30.0


# A new rule of this package stands here, in `sched.sizing.rules`, and in pyproject.toml.
Sizing = Literal["base", "greedy-gain", "drf", "optimus", "proportional", "sia"]


class Resizing(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on resizes; the file's ``resize`` section.

    Attributes:
        min_run_s: Minimum run time of the current attempt before a resize (besides the job's own cool-down).
        per_hour: Maximum resizes of a job within an hour.
        start_timeout_s: A job that reports progress and makes no step within it goes back to the size before.
        gain: It grows only where it is faster by this part, what it loses by stopping included.
    """

    min_run_s: float = 60.0
    per_hour: int = 4
    start_timeout_s: float = 600.0
    gain: float = 0.05


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """A validated policies/<name>.yaml: the stages of a staged policy, or an agent and its fallback.

    Attributes:
        order: fifo (submit time, id), ljf (largest job first: GPUs, then cores), sjf (shortest limit first),
            sjf-estimate (shortest first by estimated run times), fairshare (least recent GPU hours of the user first).
            An agent that orders the queue itself goes before it.
        ties: With order sjf-estimate, of jobs with equal estimates: ``first`` or ``last`` submitted first. Jobs of a
            burst have equal estimates: under ``last`` its older half waits for what its first ends teach.
        place: Where a job goes among nodes that fit. An agent that chooses nodes itself goes before it. ``fastest``: on
            the GPU type it runs fastest on; ``milp``: the jobs at the head of the order all at once. ``rack``: in one
            rack if it fits, else in the fewest; ``rack-wait``: waits for one rack. ``contention``: where it and
            its neighbours lose least by what was learned of them; waits where that pays. Or another package's
            component.
        backfill: ``none`` the head of the queue blocks; ``skip`` any job that fits starts; ``easy`` any of them unless
            it would delay the head (Lifka 1995); ``conservative`` unless it would delay any job before it (Mu'alem,
            Feitelson 2001).
        version: Short digest of the file's meaning (and of the weights, with an agent); recorded with every start.
        agent: Kind of trained agent that decides; empty: none, the stages do.
        agent_traits: Of another package's agent, as installed when the file was read.
        fallback: The staged policy that decides when the agent cannot.
        folder: Where the agent's weights are.
        budget_s: A decision of the agent that takes longer is the fallback's.
        schedulers: Of an agent that chooses nodes: number of schedulers, each with a part of the partition's nodes.
        placement_wait_s: With place rack-wait, or contention: so long a job waits for a good place, then takes what is
            free.
        mapping: With place fastest or milp.
        preempt: With an agent that stops running jobs.
        sizes: Of resizable jobs: ``base``, as submitted; else the rule by which they are given GPUs
            (`sched.sizing.rules`), or another package's component. With an agent that chooses them: of its fallback.
        resize: With sizes that change.
        settings: The file's ``train`` section: the agent's hyper-parameters, as given.
    """

    name: str
    order: str = "fifo"
    ties: Ties = "first"
    place: str = "first-fit"
    backfill: Backfill = "none"
    description: str = ""
    version: str = ""
    agent: str | None = None
    agent_traits: AgentTraits | None = None
    fallback: PolicySpec | None = None
    folder: str = ""
    budget_s: float = 0.2
    schedulers: int = 1
    placement_wait_s: float = 86400.0
    mapping: Mapping = Mapping()
    preempt: PreemptionSettings = PreemptionSettings()
    sizes: str = "base"
    resize: Resizing = Resizing()
    settings: dict[str, Any] = {}

    @property
    def traits(self) -> AgentTraits:
        """Return its agent's properties; defaults for a staged policy."""
        return traits_of(self.agent, self.agent_traits)

    @property
    def for_slices(self) -> PolicySpec:
        """Return the policy that decides about queues of MIG slices.

        Without its agent, if that cannot: its stages, if those order the queue, else its fallback.
        """
        if self.agent is None or self.traits.slices:
            return self
        if self.traits.orders:
            return self.effective_fallback
        return msgspec.structs.replace(self, agent=None, agent_traits=None)  # agents size and place whole GPUs

    @property
    def effective_fallback(self) -> PolicySpec:
        """Return the policy that decides when the agent cannot: its fallback, or FIFO."""
        return self.fallback or PolicySpec(name="fifo")

    @property
    def uses_job_class_estimates(self) -> bool:
        """Return whether it, or its agent's fallback, places by job class estimates."""
        return any(spec is not None and spec.place == "contention" for spec in (self, self.fallback))

    @property
    def uses_speeds_by_type(self) -> bool:
        """Return whether it, or its agent's fallback, chooses GPU types by the speeds of job classes."""
        return any(spec is not None and spec.place in MAPPING_PLACES for spec in (self, self.fallback))

    @property
    def uses_run_time_estimates(self) -> bool:
        """Return whether it, or its agent's fallback, uses estimated run times."""
        others = (spec for spec in (self, self.fallback) if spec is not None)
        return any(spec.order == "sjf-estimate" or spec.traits.estimates for spec in others)
