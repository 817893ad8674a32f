"""Metrics as text: OpenMetrics 1.0, or the older text format of Prometheus, which node_exporter's collector reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate

from gpusched.model.metrics import Family, Histogram

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_UNITS = ("seconds", "joules", "watts", "ratio")


def metrics_text(families: Iterable[Family], openmetrics: bool = True) -> str:
    """Return the families with samples as text.

    In OpenMetrics the name of a counter is without ``_total``, which its samples have; in the older format with it.
    """
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines += _lines(family, openmetrics)
    return "\n".join((*lines, "# EOF", "") if openmetrics else (*lines, ""))


def _lines(family: Family, openmetrics: bool) -> Iterator[str]:
    metric = family.metric
    total = "_total" if metric.kind == "counter" else ""
    name = metric.name if openmetrics else metric.name + total
    yield f"# TYPE {name} {metric.kind}"
    if openmetrics and (unit := metric.name.rpartition("_")[2]) in _UNITS:
        yield f"# UNIT {name} {unit}"
    yield f"# HELP {name} {metric.help}"
    for values, value in family.samples:
        labels = _labels(metric.labels, values)
        if isinstance(value, Histogram):
            yield from _histogram(metric.name, labels, value)
        else:
            yield f"{metric.name}{total}{{{labels}}} {value}" if labels else f"{metric.name}{total} {value}"


@lru_cache(maxsize=1 << 16)  # many metrics have the labels of each node
def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True))


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterator[str]:
    bounds = (*map(str, histogram.bounds), "+Inf")
    before = f"{labels}," if labels else ""
    for bound, count in zip(bounds, accumulate(histogram.counts), strict=True):
        yield f'{name}_bucket{{{before}le="{bound}"}} {count}'
    own = f"{{{labels}}}" if labels else ""
    yield f"{name}_count{own} {sum(histogram.counts)}"
    yield f"{name}_sum{own} {histogram.sum}"
