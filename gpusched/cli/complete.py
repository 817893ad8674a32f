"""Completion callbacks for typer; each imports what it needs only when the shell asks."""

from __future__ import annotations

import importlib
from collections.abc import Callable

Offer = Callable[[str], list[str]]


def _lazy(name: str) -> Offer:
    def offer(incomplete: str) -> list[str]:
        try:
            found: list[str] = getattr(importlib.import_module("gpusched.client.completions"), name)(incomplete)
            return found
        except Exception:  # a shell that asks must never see an error
            return []

    return offer


live_jobs = _lazy("live_jobs")
pending_jobs = _lazy("pending_jobs")
all_jobs = _lazy("all_jobs")
nodes = _lazy("nodes")
partitions = _lazy("partitions")
flavors = _lazy("flavors")
policies = _lazy("policies")
replays = _lazy("replays")
agents = _lazy("agents")
gpu_types = _lazy("gpu_types")
states = _lazy("states")
