"""Workloads of DL2's public setting, read from JSON or drawn."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from gpusched.errors import FileError
from gpusched.study.paper import Paper, read_paper
from gpusched.traces.readers.columns import open_text

SLOTS = 8
"""CPU slots, and GPU slots, of a node."""
MAX_TASKS = 16
"""Default maximum of workers, and of servers, of a job."""
_Count = Annotated[int, Meta(ge=1, le=100_000)]
_Slots = Annotated[int, Meta(ge=0, le=SLOTS)]
_Positive = Annotated[float, Meta(gt=0, le=1e12)]


class ModelClass(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of all jobs of a model. ``worker``, ``server``: (CPU slots, GPU slots) of one task."""

    model: str
    epochs: _Positive
    steps_per_epoch: _Positive
    worker: tuple[_Slots, _Slots]
    server: tuple[_Slots, _Slots]


class Dl2Job(ModelClass, frozen=True, kw_only=True):
    """A job of a workload."""

    arrival_slot: Annotated[int, Meta(ge=0, le=1_000_000)]


class Dl2Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs in the order of their numbers, and the nodes they share.

    Attributes:
        setting: Its name.
        seed: Of the draw.
        max_tasks: Maximum of workers, and of servers, of a job.
        slot_s: Seconds between decisions.
    """

    setting: str
    nodes: _Count
    seed: int
    max_tasks: Annotated[int, Meta(ge=1, le=64)] = MAX_TASKS
    slot_s: _Positive = 1200.0
    jobs: Annotated[tuple[Dl2Job, ...], Meta(min_length=1, max_length=100_000)]


def read_workloads(path: Path) -> list[Dl2Workload]:
    """Read the workloads of a JSON file, decompressed if needed.

    Raises:
        FileError: The content is invalid.
    """
    with open_text(path) as text:
        content = text.read()
    try:
        return msgspec.json.decode(content, type=list[Dl2Workload])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise FileError(str(path), None, "", str(error), "a list of workloads of DL2's setting") from None


class Dl2Setting(msgspec.Struct, frozen=True):
    """Nodes, jobs, and the maximum of arrivals in a slot."""

    nodes: int
    jobs: int = 60
    arrivals: int = 3


class Dl2Rival(msgspec.Struct, frozen=True, kw_only=True):
    """A policy of the scenario: a rule, with speeds mispredicted by up to a fraction ``wrong``; or the agent.

    An agent is given by the weights of its ``score``, with every speed known, or by the ``stage`` of its training.
    """

    rule: str = ""
    wrong: float = 0.0
    score: dict[str, float] = {}
    stage: str = ""


class Dl2(Paper, frozen=True, kw_only=True):
    """The scenario: see ``scenarios/dl2.yaml``."""

    policies: dict[str, Dl2Rival]
    clusters: dict[str, Dl2Setting]
    models: tuple[ModelClass, ...]


@cache
def dl2() -> Dl2:
    """Return the shipped scenario."""
    return read_paper("dl2", Dl2)


def draw(name: str | Dl2Setting, seed: int) -> Dl2Workload:
    """Draw a workload of a setting: random models; arrivals per slot between half the maximum and the maximum.

    The default arrival pattern of DL2's code cannot be run; the distribution of arrivals is our choice.
    """
    setting, models = dl2().clusters[name] if isinstance(name, str) else name, dl2().models
    rng = np.random.default_rng(seed)
    jobs: list[Dl2Job] = []
    slot = 0
    while len(jobs) < setting.jobs:
        coming = int(rng.integers(-(-setting.arrivals // 2), setting.arrivals + 1))
        for kind in rng.integers(len(models), size=min(coming, setting.jobs - len(jobs))).tolist():
            jobs.append(Dl2Job(arrival_slot=slot, **msgspec.structs.asdict(models[kind])))
        slot += 1
    label = name if isinstance(name, str) else f"{name.nodes} nodes"
    return Dl2Workload(setting=label, nodes=setting.nodes, seed=seed, jobs=tuple(jobs))
