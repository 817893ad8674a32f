"""Policies by name: how each orders the queue, what it may know, and its source.

A name means one thing, live and replayed. First it is that of a policy's file (the site's own, then those that come
along): order, placement and backfill are the file's. Else it is ORDER or ORDER+BACKFILL, placed best fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from gpusched.config.policies import BUILT_IN, POLICY, load_policy, policy_file
from gpusched.config.weights import DEFAULT, ModelError, TrainedModel, load_model
from gpusched.errors import UsageError
from gpusched.model.policy import SIMPLE_BACKFILLS, PolicySpec, traits_of
from gpusched.model.resources import Settings
from gpusched.model.suggest import did_you_mean
from gpusched.sched.state import (
    BEST_FIT,
    FASTEST,
    FIRST_FIT,
    MILP,
    NAIVE,
    RACK,
    RANDOM,
    SPREAD,
)
from gpusched.sim.orders import ALIASES, SUFFIXES, Knows, OrderKind, known_policies, order_rule, rule_of

HALF_LIFE_S = float(Settings().fairshare_half_life_s)

PLACEMENTS = {
    "first-fit": FIRST_FIT,
    "best-fit": BEST_FIT,
    "consolidate": BEST_FIT,
    "worst-fit": SPREAD,
    "spread": SPREAD,
    "naive": NAIVE,
    "random": RANDOM,
    "fastest": FASTEST,
    "milp": MILP,
    "rack": RACK,
    "rack-wait": RACK,
    "contention": RACK,  # these three where placement costs something: see `placed`
    "load-balancing": SPREAD,
    "tetris": SPREAD,
}


@dataclass(frozen=True, kw_only=True)
class ReplayPolicy:
    """A policy as the engine runs it.

    Attributes:
        name: As requested. order: Key of `ORDERS`.
        knows: What it may know of run times: nothing, the time limit, an estimate from the user's past jobs, or
            the real run time (oracle). Backfill needs a run time, so with it ``knows`` is at least the limit.
        source: Where it is from. placement: Its own rule, or None (the caller's).
        backfill: none, skip, easy or conservative.
        placement_wait_s: So long jobs wait at most for one rack under its ``rack-wait``, or a cheaper place under its
            ``contention``; None: as `Network` says.
        ties: Of jobs with equal estimates, the ``first`` or ``last`` submitted goes first.
        model: An agent's weights; the agent decides then, and ``order`` is only its tie-break.
        spec: The file's policy, where it is of one.
    """

    name: str
    order: str
    knows: Knows
    source: str
    backfill: str = "none"
    placement: str | None = None
    placement_wait_s: float | None = None
    ties: str = "first"
    model: TrainedModel | None = None
    spec: PolicySpec | None = None

    @property
    def by_agent(self) -> bool:
        """Whether an agent orders the queue; one that chooses sizes leaves that to the stages."""
        return self.model is not None and not (self.spec is not None and self.spec.traits.sizes)

    @property
    def kind(self) -> OrderKind:
        """Static: places in the order never change; arriving: fixed at submission; changing: asked every time."""
        return "agent" if self.by_agent else rule_of(self.order).kind

    @property
    def uses_run_time_estimates(self) -> bool:
        """Whether it uses estimated run times."""
        if self.knows != "estimate" or self.model is None or not self.by_agent:
            return self.knows == "estimate"
        others = None if self.spec is None else self.spec.agent_traits
        return traits_of(self.model.agent, others).estimates and not self.model.preempts

    @property
    def preempts(self) -> bool:
        """Whether it stops running jobs."""
        return self.kind == "preemptive" or (self.model is not None and self.model.preempts)

    @property
    def by_usage(self) -> bool:
        """Whether it, or its fallback, orders jobs by users' usage."""
        instead = None if self.spec is None else self.spec.fallback
        return "fairshare" in (self.order, instead.order if instead is not None else "")

    @property
    def chooses_sizes(self) -> bool:
        """Whether it gives resizable jobs other numbers of GPUs than requested."""
        return self.spec is not None and self.spec.sizes != "base"

    @property
    def sizes_in_order(self) -> bool:
        """Whether it chooses sizes and starts jobs in an order of its own, as agents' files may say."""
        return self.chooses_sizes and self.order != "fifo"

    @property
    def places(self) -> bool:
        """Whether an agent chooses nodes by placement costs, without which it cannot be replayed."""
        return self.by_agent and self.spec is not None and self.spec.traits.places

    @property
    def by_costs(self) -> bool:
        """Whether it decides by placement costs where they are known."""
        return self.places or self.placement == "contention"

    @property
    def restart_s(self) -> float:
        """Cost of a restart by its file, in seconds; 0 if it stops no jobs or has no file."""
        return self.spec.preempt.restart_s if self.preempts and self.spec is not None else 0.0


_ALIASES = {"fcfs": "fifo", "greedy-gain": "elastic"}  # what policies are called elsewhere


def policy_by_name(text: str) -> ReplayPolicy:
    """Return the built-in policy as `look_up`; an agent with the weights for any partition.

    Raises:
        UsageError: There is none of that name (with the nearest that there is).
        FileError: The file is wrong.
        ModelError: It is an agent's, and the weights cannot be used.
    """
    found = look_up(text)
    return found if isinstance(found, ReplayPolicy) else policy_of_spec(found, text)


def look_up(text: str, folders: tuple[Path, ...] = (BUILT_IN,)) -> ReplayPolicy | PolicySpec:
    """Return the policy called ``text``; for an agent its specification, as the weights depend on the partition.

    ``text``: a file ``*.yaml`` or a trained policy's folder; the name of one in ``folders`` (`policy_folders` of
    `gpusched.config.policies`); an order with its backfill (`policy_of_order`).

    Raises:
        UsageError: There is none of that name (with the nearest that there is).
        FileError: The file is wrong.
    """
    file = Path(text)
    if not text.endswith((".yaml", ".yml")) and not (file / POLICY).is_file():
        named = policy_file(_ALIASES.get(text, text), folders)
        if named is None:
            return policy_of_order(text, known_policies(folders))
        file = named
    spec = load_policy(file, folders)
    return spec if spec.agent is not None else policy_of_spec(spec, text)


def policy_of_order(text: str, known: tuple[str, ...] = ()) -> ReplayPolicy:
    """Return an order with its backfill, placed best fit: ``wfp3``, ``fifo+none``, ``sjf+skip``, ``f1+easy``; no file.

    Raises:
        UsageError: There is none of that name (with the nearest of ``known``).
    """
    base, backfill = text, "none"
    for suffix, found in SUFFIXES.items():
        if text.endswith(suffix):
            base, backfill = text.removesuffix(suffix), found
    base = ALIASES.get(base, base)
    rule = order_rule(base)
    if rule is None or (rule.kind == "preemptive" and backfill != "none"):
        raise UsageError(f"no policy named {text!r}{did_you_mean(text, known)}")
    return _with_backfill(ReplayPolicy(name=text, order=base, knows=rule.knows, source=rule.source), backfill)


def policy_of_spec(spec: PolicySpec, name: str | None = None, partition: str = DEFAULT) -> ReplayPolicy:
    """Return a live policy as the engine runs it.

    Raises:
        ModelError: It is an agent's, and its weights for ``partition`` cannot be used.
    """
    model = load_model(Path(spec.folder), partition, spec.agent) if spec.agent is not None else None
    if model is not None and not spec.traits.sizes:
        return _policy_of_agent(spec, name or spec.name, model)
    rule = rule_of(spec.order)
    source = f"{rule.source}; {name or spec.name}"
    if model is not None:
        source += f", sizes by {spec.agent} agent, weights {model.digest}"
    policy = ReplayPolicy(
        name=name or spec.name, order=spec.order, knows=rule.knows, source=source, placement=spec.place,
        placement_wait_s=float(spec.placement_wait_s) if spec.place in ("rack-wait", "contention") else None,
        ties=spec.ties, spec=spec, model=model,
    )  # fmt: skip
    return _with_backfill(policy, spec.backfill)


def _policy_of_agent(spec: PolicySpec, name: str, model: TrainedModel) -> ReplayPolicy:
    """Return an agent's policy; what it knows of run times is stored with its weights."""
    knows, backfill = model.knows, model.about.get("backfill", spec.backfill)
    if knows not in get_args(Knows) or backfill not in SIMPLE_BACKFILLS:
        raise ModelError(f"{model.path}: it says that it knows {knows!r} and backfills {backfill!r}", "train it again")
    power = ", preemptive" if model.preempts else ""
    source = f"{spec.agent} agent{power}, weights {model.digest}"
    return ReplayPolicy(
        name=name, order=spec.agent or "", knows=knows, source=source,  # type: ignore[arg-type]
        backfill=backfill, placement=spec.place, model=model, spec=spec,
    )  # fmt: skip


_BACKFILL_SOURCE = {
    "easy": "EASY: Lifka, JSSPP 1995",
    "conservative": "conservative backfill: Mu'alem, Feitelson, IEEE TPDS 12(6), 2001",
}


def _with_backfill(policy: ReplayPolicy, backfill: str) -> ReplayPolicy:
    """Return the policy with backfill; if that needs run times, the policy knows at least the limit."""
    knows: Knows = policy.knows
    if backfill in _BACKFILL_SOURCE and knows == "nothing":
        knows = "limit"
    source = "; ".join(x for x in (policy.source, _BACKFILL_SOURCE.get(backfill)) if x)
    return replace(policy, backfill=backfill, knows=knows, source=source)
