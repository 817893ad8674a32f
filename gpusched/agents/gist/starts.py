"""What the agent at scale begins with: linear rules, which are all there is until a search has found better."""

from __future__ import annotations

from typing import Any

from gpusched.agents.gist.networks import heuristic
from gpusched.config.weights import Arrays

_BEST_SERVERS = {
    "gpus_left": -1.0, "cores_left": -1e-2, "memory_left": -1e-4, "empty": -0.12, "filled": 0.15, "drains_in": 0.36,
    "outlasts": 0.15, "outlasted": -0.03,
}  # fmt: skip
_FOUND = {"log_limit": -3.62, "log_gpus": 2.41, "share": -0.85, "share_of_node": 2.57, "server": _BEST_SERVERS}
_SKIP = {"one": -0.5}
STARTS: dict[str, dict[str, Any]] = {
    "wfp3, easy": {"log_age": 3.0, "log_limit": -3.0, "log_gpus": 1.0},
    "shortest limit, easy": {"log_limit": -1.0},
    "shortest limit, skip": {"log_limit": -1.0, "hold": _SKIP},
    "least work, easy": {"log_limit": -1.0, "log_gpus": -1.0},
    "least work, skip": {"log_limit": -1.0, "log_gpus": -1.0, "hold": _SKIP},
    "first come, easy": {"log_age": 1.0},
    "found, small": {"log_age": 3.6, "fits_now": 2.91, **_FOUND},
    "found, large": {"log_age": 2.2, "fits_now": 4.0, **_FOUND},
}
"""What the search may begin with: arguments of `heuristic`. The last two are what earlier searches came to, for eight
servers and for 32 (docs/concepts/gist-at-scale.md)."""


def start(name: str, width: int, seed: int = 0) -> Arrays:
    """The weights of one of `STARTS`, untrained; networks of ``width`` answer 0 (``seed``: what is drawn of them)."""
    return heuristic(width, seed, **STARTS[name])
