"""A table of measurements, with interpolation between them and no extrapolation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

_BATCH = re.compile(r"(?P<model>.+) \(batch size (?P<batch>[0-9]{1,9})\)")
_SEPARATORS = re.compile(r"[\s_-]+")

Spread = Literal["nodes", "apart", "any"]


class ResourceSensitivity(Protocol):
    """How a model's speed depends on CPU cores and memory."""

    def at(self, gpus: int, cores: float | None, memory_mib: float | None) -> float:
        """Return the speed with so many cores and MiB in all (None: plenty), in the model's own unit; above 0."""


class Series(NamedTuple):
    """All measurements of one model on one GPU type.

    Attributes:
        per_s: (GPUs, nodes) -> work per second of the whole job; above 0.
        spread: What ``nodes`` says: how many; whether more than one (2, "apart"); nothing (1, "any").
        batch: Samples per GPU and step where ``per_s`` counts samples; 0 where it counts steps or that is unknown.
    """

    per_s: Mapping[tuple[int, int], float]
    spread: Spread
    batch: int = 0

    def at(self, gpus: int, nodes: int) -> float | None:
        """Return work per second on ``gpus`` GPUs over ``nodes`` nodes; None: neither measured nor interpolated.

        Between two measured numbers of GPUs on as many nodes, and else between two measured numbers of nodes with as
        many GPUs, it is linear.
        """
        nodes = {"nodes": nodes, "apart": min(nodes, 2), "any": 1}[self.spread]
        if (gpus, nodes) in self.per_s:
            return self.per_s[gpus, nodes]
        by_gpus = {g: v for (g, n), v in self.per_s.items() if n == nodes}
        by_nodes = {n: v for (g, n), v in self.per_s.items() if g == gpus}
        for known, at in ((by_gpus, gpus), (by_nodes, nodes)):
            if found := _around(known, at):
                low, high, share = found
                return known[low] * (1 - share) + known[high] * share
        return None

    def closest(self, gpus: int) -> float | None:
        """Return work per second on ``gpus`` GPUs over the fewest nodes for which it is known."""
        most = max((n for _, n in self.per_s), default=0)
        found = (self.at(gpus, nodes) for nodes in range(1, most + 1))
        return next((value for value in found if value is not None), None)


def _around(known: Iterable[int], at: int) -> tuple[int, int, float] | None:
    """Return the known numbers next below and above ``at``, and its relative position between them."""
    below, above = [k for k in known if k < at], [k for k in known if k > at]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    return low, high, (at - low) / (high - low)


@dataclass(frozen=True, kw_only=True, eq=False)
class Profiles:
    """Measured speeds and sensitivities.

    Attributes:
        series: (model, GPU type) -> its measurements. Names are as `model_key` and `type_key` give them; a type of ""
            is one that the source does not name, used for any type without figures of its own.
        beside: (model, GPU type, GPUs, other model) -> its speed beside the other, each on all of the same GPUs, by
            its speed alone there.
        recorded_on: Model -> the type on which its run times were recorded unless stated.
        usual: Model without a batch size -> the key of the batch size that it is taken at.
        sensitivity: Model -> how its speed depends on CPU cores and memory.
        sources: Names of the files, each with the models in it. notes: Choices made, likewise.
    """

    series: Mapping[tuple[str, str], Series]
    beside: Mapping[tuple[str, str, int, str], float] = field(default_factory=dict)
    recorded_on: Mapping[str, str] = field(default_factory=dict)
    usual: Mapping[str, str] = field(default_factory=dict)
    sensitivity: Mapping[str, ResourceSensitivity] = field(default_factory=dict)
    sources: tuple[tuple[str, frozenset[str]], ...] = ()
    notes: tuple[tuple[str, frozenset[str]], ...] = ()

    @property
    def types(self) -> tuple[str, ...]:
        """The measured GPU types, longest names first."""
        return tuple(sorted({t for _, t in self.series}, key=lambda t: (-len(t), t)))

    @property
    def models(self) -> tuple[str, ...]:
        """The measured models, sorted; one with a usual batch size without its others."""
        named = {name for name, _ in self.series if split_model(name)[0] not in self.usual}
        return tuple(sorted(named | self.usual.keys() | self.sensitivity.keys()))

    def type_of(self, gpu_type: str) -> str | None:
        """Return the measured type of a node's GPU type: of the same name, or the longest that its name contains."""
        wanted = type_key(gpu_type)
        return next((t for t in self.types if t and t in wanted), "" if "" in self.types else None)

    def per_s(self, model: str, gpu_type: str, gpus: int, nodes: int | None = 1) -> float | None:
        """Return a model's work per second alone on ``gpus`` GPUs over ``nodes`` nodes (None: the fewest known).

        A batch size that was not measured lies between its neighbours: its step time is linear in the batch size.
        """
        found = [
            (series.batch, series.at(gpus, nodes) if nodes is not None else series.closest(gpus), share)
            for series, share in self._neighbours(model_key(model), gpu_type)
        ]
        if not found or any(value is None for _, value, _ in found):
            return None
        if len(found) == 1:
            return found[0][1]
        step_s = sum(share * batch / value for batch, value, share in found if value is not None)
        return sum(share * batch for batch, _, share in found) / step_s

    def _neighbours(self, model: str, gpu_type: str) -> list[tuple[Series, float]]:
        """Return a model's series, or those of the two nearest batch sizes, with their weights."""
        kind = self.type_of(gpu_type)
        if kind is None:
            return []
        for name in (model, self.usual.get(model, model)):
            for of in (kind, ""):
                if (name, of) in self.series:
                    return [(self.series[name, of], 1.0)]
        base, batch = split_model(model)
        batches = [
            series.batch for (name, of), series in self.series.items()
            if of == kind and series.batch and split_model(name)[0] == base
        ]  # fmt: skip
        if (found := _around(batches, batch)) is None:
            return []
        low, high, share = found
        return [
            (self.series[with_batch(base, low), kind], 1 - share),
            (self.series[with_batch(base, high), kind], share),
        ]

    def share_of(self, model: str, gpus: int, cores: float | None, memory_mib: float | None) -> float:
        """Return `ResourceSensitivity.at`; 1.0 for an unknown model."""
        key = model_key(model)
        base = split_model(key)[0]
        if key not in self.sensitivity and not any(name == base for name, _ in self.series):
            key = base
        found = self.sensitivity.get(key)
        return 1.0 if found is None else found.at(gpus, cores, memory_mib)

    def notes_of(self, model: str) -> tuple[str, ...]:
        """Return notes on choices made for a model's figures."""
        names = {model_key(model), split_model(model_key(model))[0]}
        return tuple(note for note, of in self.notes if names & of)

    def slowed(self, model: str, gpu_type: str, gpus: int, neighbour: str) -> float | None:
        """Return a model's speed beside another on the same GPUs, relative to alone; None: not measured."""
        kind = self.type_of(gpu_type)
        return None if kind is None else self.beside.get((model_key(model), kind, gpus, model_key(neighbour)))


def model_key(model: str) -> str:
    """Return a model's name as used in the table."""
    return " ".join(model.lower().split())


def type_key(gpu_type: str) -> str:
    """Return a GPU type's name as used in the table: capitals, without blanks, hyphens and underscores."""
    return _SEPARATORS.sub("", gpu_type.upper())


def split_model(key: str) -> tuple[str, int]:
    """Return a model's name and batch size (0: none given)."""
    match = _BATCH.fullmatch(key)
    return (match["model"], int(match["batch"])) if match else (key, 0)


def with_batch(model: str, batch: int) -> str:
    """Return the key of a model at a batch size per GPU, as Gavel writes it."""
    return f"{model} (batch size {batch})"


def merged(parts: Iterable[Profiles]) -> Profiles:
    """Merge tables into one; later measurements replace earlier ones."""
    series: dict[tuple[str, str], Series] = {}
    beside: dict[tuple[str, str, int, str], float] = {}
    recorded_on: dict[str, str] = {}
    usual: dict[str, str] = {}
    sensitivity: dict[str, ResourceSensitivity] = {}
    sources: list[tuple[str, frozenset[str]]] = []
    notes: list[tuple[str, frozenset[str]]] = []
    for part in parts:
        for key, new in part.series.items():
            old = series.get(key)
            same = old is not None and (old.spread, old.batch) == (new.spread, new.batch)
            series[key] = new._replace(per_s={**old.per_s, **new.per_s}) if old is not None and same else new
        beside |= part.beside
        recorded_on = {**part.recorded_on, **recorded_on}
        usual |= part.usual
        sensitivity |= part.sensitivity
        sources += part.sources
        notes += part.notes
    return Profiles(
        series=series, beside=beside, recorded_on=recorded_on, usual=usual, sensitivity=sensitivity,
        sources=tuple(sources), notes=tuple(dict.fromkeys(notes)),
    )  # fmt: skip
