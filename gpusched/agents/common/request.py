"""The request of ``gpusched train``, the input of an agent's trainer, its progress and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from gpusched.config.weights import Arrays
from gpusched.errors import UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.suggest import did_you_mean

if TYPE_CHECKING:
    from gpusched.agents.common.checkpoint import Checkpoint
    from gpusched.model.resources import Partition
    from gpusched.study.study import Scenario
    from gpusched.traces.workload import Workload

UNTRAINED = "untrained start"
"""The row of the final table for the agent with its initial weights."""
_Settings = TypeVar("_Settings")


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``gpusched train``, as given.

    Attributes:
        hold_out: Fraction of the workload's time span, at its end, kept for evaluation.
        slices: Keep jobs in MIG slices: the agent decides about them.
        force: Train on any number of jobs.
        keep_anyway: Save weights although they are worse than their start or the best rule, or not judged.
        judged_later: Save weights that no held-out part judges: the caller judges them by later days.
    """

    policy: str
    partition: str | None = None
    trace: str | None = None
    generate: str | Workload | None = None
    format: str | None = None
    vc: str | None = None
    since: str | None = None
    until: str | None = None
    load: float | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    inventory: str | None = None
    seeds: tuple[int, ...] = (0,)
    hold_out: float = 0.2
    slices: bool = False
    out: str | None = None
    device: str = "cpu"
    force: bool = False
    keep_anyway: bool = False
    judged_later: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One agent to train: one partition, one seed.

    Attributes:
        spec: The policy; ``spec.settings`` are the hyper-parameters of its file (see `settings_of`).
        partition: Of the agent; ``default`` if the nodes belong to no inventory.
        scenario: Training data: a trace on its nodes, without the held-out part, as known at the cut.
        ended: ``bool[jobs]`` of that trace: ended by the cut; the others count with their run time so far. None: all
            ended.
        held_out: Scenarios of the final table, one or more; not for training.
        workload: The source of a generated ``scenario``; `generate` draws more from it.
        declared: The partition in inventory.yaml, if any.
        seed: Of all random draws. The same seed gives the same weights, bit for bit, on a CPU.
        device: ``cpu`` or ``cuda``.
        checkpoint: The state to resume from after a kill.
    """

    spec: PolicySpec
    partition: str
    scenario: Scenario
    held_out: tuple[Scenario, ...]
    workload: Workload | None
    declared: Partition | None
    seed: int
    device: str
    checkpoint: Checkpoint
    ended: npt.NDArray[np.bool_] | None = None


class TrainingProgress(NamedTuple):
    """Progress of a training. ``reward``, ``utilization``: recent; None: unknown. ``left_s``: seconds."""

    label: str
    done: int
    total: int
    reward: float | None
    utilization: float | None
    left_s: float | None


@dataclass
class TrainingReport:
    """The receiver of a trainer's progress.

    Attributes:
        show: Called with every `TrainingProgress`.
        note: Called with a message for the user.
        label: What the progress is of.
    """

    show: Callable[[TrainingProgress], None] = lambda progress: None
    note: Callable[[str], None] = lambda line: None
    label: str = ""
    _begin: tuple[float, int] = field(default=(0.0, -1), repr=False)

    def step(self, done: int, total: int, reward: float | None = None, utilization: float | None = None) -> None:
        """Report ``done`` of ``total`` units; the time left follows from the pace."""
        now = time.monotonic()
        if self._begin[1] < 0 or done < self._begin[1]:
            self._begin = (now, done)
        since, first = self._begin
        left = (now - since) / (done - first) * (total - done) if done > first else None
        self.show(TrainingProgress(self.label, done, total, reward, utilization, left))

    def of(self, label: str) -> TrainingReport:
        """Return a report with another label and the same receivers."""
        return TrainingReport(self.show, self.note, label)


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the final table.

    Attributes:
        policy: Its name; ``optimum`` and ``lower bound`` are not policies.
        bound: Whether it is no rule to be measured by, but a bound: ``lower bound`` and exact optima.
        knows: Information on run times, as in ``gpusched replay``; "" if not applicable.
        value: Mean of the figure. low, high: Its 95 % interval over seeds; None with fewer than two.
        figure: ``mean_jct_s`` or ``utilization``.
        mean_jct_s, mean_wait_s, utilization: Further figures, where known.
        change: The agent's figure divided by this one, minus 1. change_low, change_high: Its 95 % interval.
    """

    policy: str
    knows: str = ""
    figure: str
    value: float | None
    low: float | None = None
    high: float | None = None
    mean_jct_s: float | None = None
    mean_wait_s: float | None = None
    utilization: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    bound: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainerResult:
    """The result of a trainer.

    Attributes:
        arrays: The weights, by name.
        about: Their metadata: ``knows`` (nothing, limit, estimate, oracle), ``backfill``, settings.
        score: Of the trainer's own validation; the seed with the highest is kept.
        hyper_parameters: All, as used.
        notes: Sentences for readers of the card.
        rows: The final table, if the trainer makes its own; None: `gpusched.agents.common.evaluate` makes it.
        untrained: The initial weights, also shown in the final table.
    """

    arrays: Arrays
    about: dict[str, str]
    score: float
    hyper_parameters: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    rows: tuple[ResultRow, ...] | None = None
    untrained: Arrays | None = None


def settings_of(base: _Settings, given: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> _Settings:
    """Return hyper-parameters (fields: int, float, bool, str) with the values of a policy file's ``train`` section.

    ``ignore``: names used by other readers of the section.

    Raises:
        UsageError: There is no such hyper-parameter, or its value has another type.
    """
    known: dict[str, Any] = asdict(base)  # type: ignore[call-overload]
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in ignore:
            continue
        if name not in known:
            raise UsageError(f"train: there is no hyper-parameter {name!r}{did_you_mean(name, sorted(known))}")
        default = known[name]
        if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not type(default):
            raise UsageError(f"train: {name} is {value!r}, expected such as {default!r}")
        values[name] = value
    return replace(base, **values)  # type: ignore[type-var]
