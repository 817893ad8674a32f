"""What the policies in use need besides gpusched itself: an optimiser, readable weights, a predictor, a trainer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from gpusched.doctor.findings import Finding
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory

PREDICTOR = "run-times.safetensors"  # sim.predictor.USUAL_NAME, which takes a compiler to import
_LEARN = "pip install 'gpusched-cluster[learn]'"


def examine_needs(inventory: Inventory, policies: Mapping[str, PolicySpec], state: Path) -> list[Finding]:
    """What is missing for the policies in charge (by partition), and what happens without it."""
    return [f for name, spec in policies.items() for f in _needs(inventory, name, spec, state)]


def _needs(inventory: Inventory, partition: str, spec: PolicySpec, state: Path) -> Iterator[Finding]:
    stages = (spec, spec.fallback) if spec.fallback is not None else (spec,)
    if any(stage.place == "milp" for stage in stages) and not _importable("highspy"):
        message = f"{partition}: place: milp needs HiGHS, which is not installed: jobs are placed greedily"
        yield Finding("policies", "optimiser", "warn", message, "pip install 'gpusched-cluster[milp]'")
    if spec.by_estimate and not (state / PREDICTOR).is_file():
        message = f"{partition}: order: sjf-estimate has no predictor: jobs go by their time limits"
        yield Finding("policies", "predictor", "warn", message, "train one: gpusched predict --train")
    if spec.agent is not None:
        fallback = spec.fallback.name if spec.fallback is not None else "fifo"
        yield from _of_agent(inventory, partition, spec.agent, fallback)


def _of_agent(inventory: Inventory, partition: str, agent: str, fallback: str) -> Iterator[Finding]:
    if not _importable("safetensors"):
        message = (
            f"{partition}: {agent}'s weights cannot be read, since safetensors is not installed: {fallback} decides"
        )
        yield Finding("policies", "weights", "fail", message, "install gpusched anew with its dependencies")
    declared = inventory.partition(partition)
    own = declared.auto_promote if declared is not None else None
    wanted = inventory.settings.auto_promote if own is None else own
    if wanted and find_spec("torch") is None:
        message = f"{partition}: auto_promote waits for agents that nobody can train here: torch is not installed"
        yield Finding("policies", "training", "warn", message, f"{_LEARN}, or copy trained policies here")


def _importable(module: str) -> bool:
    """Whether it can be imported; one that is there and broken cannot."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True
