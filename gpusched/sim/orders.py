"""Queue orders of replays by name: required knowledge, source, how often keys change; and all policy names.

Imports nothing heavy: the shell's completion asks here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpusched.config.paths import state_folder
from gpusched.config.plugins import components, installed
from gpusched.config.policies import BUILT_IN, names_in, policy_folders
from gpusched.errors import UsageError
from gpusched.queue import lastgood

Knows = Literal["nothing", "limit", "estimate", "oracle"]
OrderKind = Literal["static", "arriving", "changing", "preemptive", "agent"]


@dataclass(frozen=True, kw_only=True)
class OrderRule:
    """A queue order: what it must know, its source, and how often its keys change."""

    knows: Knows
    source: str
    kind: OrderKind = "static"


_SMITH = "shortest processing time first; W. E. Smith, Naval Research Logistics Quarterly 3, 1956"
_TANG = "Tang, Lan, Desai, Buettner: Fault-aware, utility-based job scheduling on Blue Gene/P, IEEE Cluster 2009"
_LONG = "longest processing time first; Graham, SIAM J. Applied Mathematics 17(2), 1969"

ORDERS: dict[str, OrderRule] = {
    "fifo": OrderRule(knows="nothing", source="first come, first served: (submit, id)"),
    "sjf": OrderRule(knows="limit", source=_SMITH),
    "sjf-estimate": OrderRule(knows="estimate", source=_SMITH, kind="arriving"),
    "sjf-oracle": OrderRule(knows="oracle", source=_SMITH),
    "ljf": OrderRule(knows="nothing", source="most GPUs (cores, memory) first; Narantuya et al., CMC 2022"),
    "lpt-limit": OrderRule(knows="limit", source=_LONG),
    "lpt-estimate": OrderRule(knows="estimate", source=_LONG, kind="arriving"),
    "lpt-oracle": OrderRule(knows="oracle", source=_LONG),
    "smallest": OrderRule(knows="nothing", source="fewest GPUs first; Majumdar, Eager, Bunt, SIGMETRICS 1988"),
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
    "drf-users": OrderRule(
        knows="nothing", source="dominant resource fairness between users; Ghodsi et al., NSDI 2011", kind="preemptive"
    ),
}
ALIASES = {
    "lasf": "las", "tiresias": "las", "unicep": "unicef", "spt": "sjf-oracle", "lpt": "lpt-oracle", "fcfs": "fifo",
    "sjf-limit": "sjf", "largest": "ljf", "ljf-oracle": "lpt-oracle", "ljf-limit": "lpt-limit",
    "ljf-estimate": "lpt-estimate",
}  # fmt: skip


def order_rule(name: str) -> OrderRule | None:
    """Return an order as `rule_of` does; None: there is none of that name."""
    return rule_of(name) if name in ORDERS or name in components("orders") else None


def rule_of(name: str) -> OrderRule:
    """Return a built-in order, or that of a component of the group ``orders``.

    A component's attribute ``knows`` names what it uses: ``nothing`` of run times (the default), or the ``limit``.

    Raises:
        ComponentError: It is not installed, does not work, or ``knows`` is something else.
    """
    if name in ORDERS:
        return ORDERS[name]
    component = installed("orders", name)
    match getattr(component.load(), "knows", "nothing"):
        case "nothing" | "limit" as knows:
            return OrderRule(knows=knows, source=component.origin)
        case knows:
            raise component.error(f"knows is {knows!r}, neither 'nothing' nor 'limit'")


SUFFIXES = {"+none": "none", "+skip": "skip", "-skip": "skip", "+easy": "easy", "+conservative": "conservative"}
_OFFERED = ("", "-skip", "+easy", "+conservative")
_FORMER_ORACLES = {"sjf": ("uses time limits", "sjf-oracle"), "ljf": ("takes the largest job first", "lpt-oracle")}


def known_policies(folders: tuple[Path, ...] = (BUILT_IN,)) -> tuple[str, ...]:
    """Return every name that `look_up` accepts: of files, then of orders with their backfill."""
    plain = [name for name in ORDERS if ORDERS[name].kind != "preemptive"]
    plain += [name for name in components("orders") if name not in ORDERS]
    orders = (*(name + suffix for name in plain for suffix in _OFFERED), *(n for n in ORDERS if n not in plain))
    return tuple(dict.fromkeys((*names_in(folders), *orders)))


def folders_in_force(inventory_path: Path | str | None = None) -> tuple[Path, ...]:
    """Return `policy_folders` of this inventory, else of the one in force, else of the current folder."""
    try:
        path = inventory_path or lastgood.inventory_path(state_folder())
    except UsageError:
        path = "inventory.yaml"
    return policy_folders(path)


def meaning_notes(names: Iterable[str]) -> tuple[str, ...]:
    """Return a note for each name that used to mean an oracle in replays: its meaning now, and the oracle's name."""
    bases = dict.fromkeys(next((n.removesuffix(s) for s in SUFFIXES if n.endswith(s)), n) for n in names)
    return tuple(
        f"the policy {base} {means}, as it does live; {oracle} uses real run times"
        for base, (means, oracle) in _FORMER_ORACLES.items()
        if base in bases
    )
