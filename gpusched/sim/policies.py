"""Policies by name: how each orders the queue, what it may know, and where it is from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.suggest import did_you_mean
from gpusched.models import DEFAULT, Model, ModelError, load_model
from gpusched.policies import POLICY, load_policy
from gpusched.sched.agents import PREEMPT
from gpusched.sched.state import BEST_FIT, EASY, FIRST_FIT, NAIVE, NONE, RANDOM, SKIP, SPREAD

Knows = Literal["nothing", "limit", "estimate", "oracle"]
Kind = Literal["static", "arriving", "changing", "preemptive", "agent"]
CONSERVATIVE = 3
NO_HISTORY_S = 3600.0  # what is believed of a job of whose user nothing has ended, where it has no limit
FASTEST, MILP = 5, 6  # not compiled: see `engine_mapped`

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
}
BACKFILLS = {"none": NONE, "skip": SKIP, "easy": EASY, "conservative": CONSERVATIVE}
_RANKED = {"nothing": 0, "limit": 1, "estimate": 2, "oracle": 3}


@dataclass(frozen=True, kw_only=True)
class ReplayPolicy:
    """A policy as the engine runs it.

    Attributes:
        name: As asked for. order: Key of `ORDERS`.
        knows: What it may know of run times: nothing, the limit asked for, an estimate from the user's past jobs, or
            the real run time (oracle). Backfill needs a run time, so with it ``knows`` is at least the limit.
        source: Where it is from. placement: Its own rule, or None (the caller's).
        backfill: none, skip, easy or conservative.
        model: An agent's weights; the agent decides then, and ``order`` is only its tie-break.
        spec: The file's policy, where it is of one.
    """

    name: str
    order: str
    knows: Knows
    source: str
    backfill: str = "none"
    placement: str | None = None
    model: Model | None = None
    spec: PolicySpec | None = None

    @property
    def kind(self) -> Kind:
        """Static: places in the order never change; arriving: fixed at submission; changing: asked every time."""
        if self.model is not None:
            return "agent"
        return ORDERS[self.order].kind

    @property
    def by_estimate(self) -> bool:
        """Whether it goes by estimates made at submission; an agent remembers by itself what has ended."""
        return self.knows == "estimate" and self.model is None

    @property
    def preempts(self) -> bool:
        """Whether it stops running jobs."""
        return self.kind == "preemptive" or (self.model is not None and self.model.about.get(PREEMPT) == "yes")

    @property
    def restart_s(self) -> float:
        """What a restart costs by its file; 0 where it stops no jobs, or has no file."""
        return self.spec.preempt.restart_s if self.preempts and self.spec is not None else 0.0


@dataclass(frozen=True, kw_only=True)
class OrderRule:
    """One way to order the queue: what it must know, its source, and how often its keys change."""

    knows: Knows
    source: str
    kind: Kind = "static"


_SMITH = "shortest processing time first; W. E. Smith, Naval Research Logistics Quarterly 3, 1956"
_TANG = "Tang, Lan, Desai, Buettner: Fault-aware, utility-based job scheduling on Blue Gene/P, IEEE Cluster 2009"
_LONG = "longest processing time first; Graham, SIAM J. Applied Mathematics 17(2), 1969"

ORDERS: dict[str, OrderRule] = {
    "fifo": OrderRule(knows="nothing", source="first come, first served: (submit, id)"),
    "sjf": OrderRule(knows="oracle", source=_SMITH),
    "sjf-limit": OrderRule(knows="limit", source=_SMITH),
    "sjf-estimate": OrderRule(knows="estimate", source=_SMITH, kind="arriving"),
    "ljf": OrderRule(knows="oracle", source=_LONG),
    "ljf-limit": OrderRule(knows="limit", source=_LONG),
    "ljf-estimate": OrderRule(knows="estimate", source=_LONG, kind="arriving"),
    "smallest": OrderRule(knows="nothing", source="fewest GPUs first; Majumdar, Eager, Bunt, SIGMETRICS 1988"),
    "largest": OrderRule(knows="nothing", source="most GPUs (cores, memory) first; Narantuya et al., CMC 2022"),
    "f1": OrderRule(knows="limit", source="F1: Carastan-Santos, de Camargo, SC 2017: log10(r) n + 870 log10(s)"),
    "fairshare": OrderRule(knows="nothing", source="least decayed GPU hours of the user; gpusched", kind="changing"),
    "wfp3": OrderRule(knows="limit", source=f"WFP3: {_TANG}", kind="changing"),
    "unicef": OrderRule(knows="limit", source=f"UNICEF (UNICEP): {_TANG}", kind="changing"),
    "multifactor": OrderRule(
        knows="nothing", source="Slurm's priority/multifactor: age, fair share, size", kind="changing"
    ),
    "srtf": OrderRule(
        knows="oracle", source="shortest remaining time first; Schrage, Operations Research 16, 1968", kind="preemptive"
    ),
    "las": OrderRule(
        knows="nothing", source="discretized 2D least attained service; Tiresias, NSDI 2019", kind="preemptive"
    ),
    "drf": OrderRule(knows="nothing", source="dominant resource fairness; Ghodsi et al., NSDI 2011", kind="preemptive"),
}
_ALIASES = {"lasf": "las", "tiresias": "las", "unicep": "unicef", "spt": "sjf", "fcfs": "fifo"}
_SUFFIXES = {"-skip": "skip", "+easy": "easy", "+conservative": "conservative"}


def known_policies() -> tuple[str, ...]:
    """Every name that `policy_by_name` takes, files aside."""
    plain = [name for name in ORDERS if ORDERS[name].kind != "preemptive"]
    return (*(name + suffix for name in plain for suffix in ("", *_SUFFIXES)), *(n for n in ORDERS if n not in plain))


def policy_by_name(text: str) -> ReplayPolicy:
    """The policy called ``text``, or the live staged policy of a file ``*.yaml``.

    Raises:
        UsageError: There is none of that name (with the nearest that there is).
        FileError: The file is wrong.
    """
    if text.endswith((".yaml", ".yml")) or Path(text, POLICY).is_file():
        return of_spec(load_policy(Path(text)), text)
    base, backfill = text, "none"
    for suffix, found in _SUFFIXES.items():
        if text.endswith(suffix):
            base, backfill = text.removesuffix(suffix), found
    base = _ALIASES.get(base, base)
    if base not in ORDERS or (ORDERS[base].kind == "preemptive" and backfill != "none"):
        raise UsageError(f"no policy is called {text!r}{did_you_mean(text, known_policies())}")
    rule = ORDERS[base]
    return _with_backfill(ReplayPolicy(name=text, order=base, knows=rule.knows, source=rule.source), backfill)


def of_spec(spec: PolicySpec, name: str | None = None, partition: str = DEFAULT) -> ReplayPolicy:
    """A live policy as the engine runs it: sjf by limit, ljf by size, as the controller does.

    Raises:
        ModelError: It is an agent's, and its weights for ``partition`` cannot be used.
    """
    if spec.agent is not None:
        return _of_agent(spec, name or spec.name, load_model(Path(spec.folder), partition, spec.agent))
    order = {"ljf": "largest", "sjf": "sjf-limit"}.get(spec.order, spec.order)
    rule = ORDERS[order]
    source = f"{rule.source}; {name or spec.name}"
    policy = ReplayPolicy(name=name or spec.name, order=order, knows=rule.knows, source=source, placement=spec.place)
    return _with_backfill(policy, spec.backfill)


def _of_agent(spec: PolicySpec, name: str, model: Model) -> ReplayPolicy:
    """An agent; what it knows of run times is written with its weights."""
    knows, backfill = model.about.get("knows", "limit"), model.about.get("backfill", spec.backfill)
    if knows not in _RANKED or backfill not in BACKFILLS:
        raise ModelError(f"{model.path}: it says that it knows {knows!r} and backfills {backfill!r}", "train it again")
    power = ", preemptive" if model.about.get(PREEMPT) == "yes" else ""
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
    """With backfill; one that needs run times knows the limit at least."""
    knows: Knows = policy.knows
    if backfill in _BACKFILL_SOURCE and _RANKED[knows] < _RANKED["limit"]:
        knows = "limit"
    source = "; ".join(x for x in (policy.source, _BACKFILL_SOURCE.get(backfill)) if x)
    return replace(policy, backfill=backfill, knows=knows, source=source)
