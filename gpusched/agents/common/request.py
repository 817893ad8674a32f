"""What is asked of ``gpusched train``, what an agent's trainer is given, and what it gives back."""

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
"""The row of a final table that shows what the agent was before it learned anything."""
_Settings = TypeVar("_Settings")


class TrainRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``gpusched train``, as given.

    Attributes:
        hold_out: Part of the workload's time span, at its end, that is not trained on but judged by.
        force: Learn from however few jobs.
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
    out: str | None = None
    device: str = "cpu"
    force: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """One agent to train: one partition, one seed.

    Attributes:
        spec: The policy; ``spec.settings`` are the hyper-parameters as its file gives them (see `settings_of`).
        partition: Whose agent it is; ``default`` where the nodes are of no inventory.
        scenario: What to learn from: a trace on its nodes, without the held-out part, as it was known at the cut.
        ended: ``bool[jobs]`` of that trace: which had ended by then; what the others ran is only what they had run.
            None: all have.
        held_out: What the final table is made on, one or more; not to be learned from.
        workload: What ``scenario`` was generated from, if it was; `generate` draws more of it.
        declared: The partition as inventory.yaml has it, if there is one.
        seed: Of everything that draws. The same seed gives the same weights, bit for bit, on a CPU.
        device: ``cpu`` or ``cuda``.
        checkpoint: Where to keep what is needed to go on after a kill.
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
    """How far a training is. ``reward``, ``utilization``: lately; None: not known. ``left_s``: seconds."""

    what: str
    done: int
    total: int
    reward: float | None
    utilization: float | None
    left_s: float | None


@dataclass
class TrainingReport:
    """Where a trainer says how it goes.

    Attributes:
        show: Called with every progress; nothing unless set.
        note: Called with a sentence worth reading.
        what: Of what the progress is.
    """

    show: Callable[[TrainingProgress], None] = lambda progress: None
    note: Callable[[str], None] = lambda line: None
    what: str = ""
    _begin: tuple[float, int] = field(default=(0.0, -1), repr=False)

    def step(self, done: int, total: int, reward: float | None = None, utilization: float | None = None) -> None:
        """``done`` of ``total`` of whatever the trainer counts are done; the time left follows from the pace."""
        now = time.monotonic()
        if self._begin[1] < 0 or done < self._begin[1]:
            self._begin = (now, done)
        since, first = self._begin
        left = (now - since) / (done - first) * (total - done) if done > first else None
        self.show(TrainingProgress(self.what, done, total, reward, utilization, left))

    def of(self, what: str) -> TrainingReport:
        """A report of something else, to the same place."""
        return TrainingReport(self.show, self.note, what)


class ResultRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the final table.

    Attributes:
        policy: Its name; ``optimum`` and ``lower bound`` are no policies.
        knows: Of run times, as in ``gpusched replay``; "" where it makes no sense.
        value: Mean of the figure. low, high: Its 95 % interval over seeds, None with fewer than two.
        figure: Which: ``mean_jct_s``, ``utilization``.
        mean_jct_s, mean_wait_s, utilization: Beside it, where known.
        change: The agent's figure over this one's, less 1. change_low, change_high: Its 95 % interval.
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


@dataclass(frozen=True, kw_only=True)
class TrainerResult:
    """What a trainer gives back.

    Attributes:
        arrays: The weights, by name.
        about: Text that belongs to them: ``knows`` (nothing, limit, estimate, oracle), ``backfill``, settings.
        score: Of the trainer's own validation; of several seeds the highest is kept.
        hyper_parameters: All of them, as used.
        notes: What a reader of the card should know, in sentences.
        rows: The final table, where the trainer makes its own; None: `gpusched.agents.common.evaluate` does.
        untrained: The weights that it began with, which the final table shows beside those it ended with.
    """

    arrays: Arrays
    about: dict[str, str]
    score: float
    hyper_parameters: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    rows: tuple[ResultRow, ...] | None = None
    untrained: Arrays | None = None


def settings_of(base: _Settings, given: Mapping[str, Any], ignore: tuple[str, ...] = ()) -> _Settings:
    """Hyper-parameters (fields: int, float, bool, str), those replaced that a policy file's ``train`` section gives.

    ``ignore``: names that are somebody else's.

    Raises:
        UsageError: There is no such hyper-parameter, or its value is of another kind.
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
