"""Workload descriptions for generation: a small YAML file, its validated form, and back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import gpusched
from gpusched.config.yamlfile import Value, parse_file
from gpusched.model.slices import is_profile
from gpusched.model.units import in_calendar, parse_duration

HOURS, WEEKDAYS = 24, 7
MAX_JOBS = 100_000_000
_YEARS_100 = 100 * 365 * 86400.0
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?s")
_PROFILE = "a MIG profile such as 1g.10gb"
_EXPECTED_TIME = "a time such as 90s, 15m, 2h or 7d"


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Run times: a mixture of lognormals with a Pareto tail.

    Attributes:
        parts: (weight, median in seconds, sigma of the logarithm).
        tail_share: Part of the jobs in the tail; 0 without one.
        tail_from_s, tail_alpha: Pareto with this scale and exponent; the mixture stays below ``tail_from_s``.
        minimum_s, maximum_s: Bounds of all.
    """

    parts: tuple[tuple[float, float, float], ...]
    tail_share: float = 0.0
    tail_from_s: float = 0.0
    tail_alpha: float = 0.0
    minimum_s: float = 1.0
    maximum_s: float = _YEARS_100


@dataclass(frozen=True, kw_only=True)
class SizeClass:
    """Jobs of one GPU count: their share, and their run times where different.

    With a MIG ``profile`` the GPUs are slices of it.
    """

    gpus: int
    share: float
    run_time: RunTime | None = None
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class RequestedTimes:
    """Requested times: the smallest menu entry of at least run time times a lognormal factor of at least 1.

    Attributes:
        menu_s: What users ask for, ascending.
        over_median, over_sigma: Of the factor.
        exceeded: Part of the jobs that ask for less than they run (and would be stopped).
    """

    menu_s: tuple[float, ...]
    over_median: float = 3.0
    over_sigma: float = 1.0
    exceeded: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A description of a workload to generate.

    Attributes:
        name: Of the trace.
        jobs: How many.
        start: Unix seconds at which it begins.
        per_hour: Mean arrivals; None where ``load`` says it.
        load, load_gpus: Offered load on that many GPUs.
        hours: Weight of each hour of the day (UTC); all equal without a daily cycle.
        weekdays: Weight of each day from Monday.
        burst_share: Part of the jobs that come in bursts (of one user and one size).
        burst_size: Mean jobs of a burst.
        burst_within_s: Mean time of a burst's jobs after its first.
        sizes: GPUs of the jobs.
        run_time: Of sizes without their own.
        limits: None: no limits are asked for.
        users, user_zipf: How many, and the exponent of how unequal: the k-th most active submits 1/k^s as much.
        groups: Name -> weight.
    """

    name: str = "generated"
    jobs: int
    start: float
    per_hour: float | None = None
    load: float | None = None
    load_gpus: int = 0
    hours: tuple[float, ...] = (1.0,) * HOURS
    weekdays: tuple[float, ...] = (1.0,) * WEEKDAYS
    burst_share: float = 0.0
    burst_size: float = 1.0
    burst_within_s: float = 60.0
    sizes: tuple[SizeClass, ...]
    run_time: RunTime
    limits: RequestedTimes | None = None
    users: int = 0
    user_zipf: float = 1.0
    groups: tuple[tuple[str, float], ...] = ()


# From YAML

PHILLY_LIKE = Path(gpusched.__file__).with_name("scenarios") / "philly-like.yaml"
"""A generated Philly-like workload, for use without a real trace."""


def load_workload(path: Path | str) -> Workload:
    """Load a workload description from a YAML file.

    Raises:
        FileError: It cannot be read, or a key is wrong (file, line, key, found and expected).
    """
    return read_workload(parse_file(path, "a workload description"))


def read_workload(root: Value) -> Workload:
    """Read a workload description from a mapping; raises as `load_workload`."""
    known = ("name", "jobs", "start", "arrivals", "sizes", "run_time", "limits", "users", "groups")
    fields = root.fields("a mapping with jobs, arrivals, sizes and run_time", known)
    for name, expected in (("jobs", "how many jobs"), ("arrivals", "a mapping"), ("sizes", "a list of sizes"),
                           ("run_time", "a mapping with parts")):  # fmt: skip
        if name not in fields:
            raise root.missing(name, expected)
    users = fields["users"].fields("a mapping with count and zipf", ("count", "zipf")) if "users" in fields else {}
    groups = fields["groups"].fields("a mapping of weights by name") if "groups" in fields else {}
    return Workload(
        **_arrivals(fields["arrivals"]),
        name=fields["name"].text("a name") if "name" in fields else "generated",
        jobs=fields["jobs"].whole(1, MAX_JOBS),
        start=_start(fields["start"]) if "start" in fields else _start_of("2026-01-05"),
        sizes=_sizes(fields["sizes"]),
        run_time=_run_time(fields["run_time"]),
        limits=_limits(fields["limits"]) if "limits" in fields else None,
        users=users["count"].whole(1, 10_000_000) if "count" in users else 0,
        user_zipf=users["zipf"].number(0, 10) if "zipf" in users else 1.0,
        groups=tuple((name, value.number(0, 1e12)) for name, value in groups.items()),
    )


def _arrivals(value: Value) -> dict[str, Any]:
    fields = value.fields("a mapping", ("per_hour", "load", "gpus", "hours", "weekdays", "bursts"))
    found: dict[str, Any] = {}
    if ("per_hour" in fields) == ("load" in fields):
        raise value.error("either per_hour, or load and gpus", "both" if "load" in fields else "neither")
    if "per_hour" in fields:
        found["per_hour"] = fields["per_hour"].number(1e-6, 1e9)
    else:
        found["load"] = fields["load"].number(1e-6, 1000)
        if "gpus" not in fields:
            raise value.missing("gpus", "the GPUs of the cluster that is to see this load")
        found["load_gpus"] = fields["gpus"].whole(1, 100_000_000)
    for name, count in (("hours", HOURS), ("weekdays", WEEKDAYS)):
        if name in fields:
            found[name] = _weights(fields[name], count)
    if "bursts" in fields:
        bursts = fields["bursts"].fields("a mapping", ("share", "size", "within"))
        found["burst_share"] = bursts["share"].number(0, 1) if "share" in bursts else 0.0
        found["burst_size"] = bursts["size"].number(1, 1e6) if "size" in bursts else 10.0
        found["burst_within_s"] = _seconds(bursts["within"]) if "within" in bursts else 60.0
    return found


def _weights(value: Value, count: int) -> tuple[float, ...]:
    expected = f"a list of {count} weights, not all 0"
    weights = tuple(item.number(0, 1e12) for item in value.items(expected))
    if len(weights) != count or not any(weights):
        raise value.error(expected, f"{len(weights)} weights")
    return weights


def _sizes(value: Value) -> tuple[SizeClass, ...]:
    sizes = []
    for item in value.items("a list of sizes"):
        fields = item.fields("a mapping", ("gpus", "share", "run_time", "profile"))
        for name in ("gpus", "share"):
            if name not in fields:
                raise item.missing(name, "a number")
        own = _run_time(fields["run_time"]) if "run_time" in fields else None
        profile = fields["profile"].text(_PROFILE) if "profile" in fields else ""
        if "profile" in fields and not is_profile(profile):
            raise fields["profile"].error(_PROFILE)
        gpus = fields["gpus"].whole(1 if profile else 0, 1_000_000)
        sizes.append(SizeClass(gpus=gpus, share=fields["share"].number(0, 1e12), run_time=own, profile=profile))
    if not any(size.share for size in sizes):
        raise value.error("at least one size with a share above 0", "none")
    return tuple(sizes)


def _run_time(value: Value) -> RunTime:
    fields = value.fields("a mapping with parts", ("parts", "tail", "min", "max"))
    parts = []
    for item in fields["parts"].items("a list of parts") if "parts" in fields else []:
        part = item.fields("a mapping with weight, median and sigma", ("weight", "median", "sigma"))
        if "median" not in part:
            raise item.missing("median", _EXPECTED_TIME)
        weight = part["weight"].number(0, 1e12) if "weight" in part else 1.0
        parts.append((weight, _seconds(part["median"]), part["sigma"].number(0, 20) if "sigma" in part else 1.0))
    if not any(weight for weight, _, _ in parts):
        raise value.missing("parts", "a list of lognormals: {weight: 1, median: 10m, sigma: 1.5}")
    tail = fields["tail"].fields("a mapping", ("share", "from", "alpha")) if "tail" in fields else {}
    for name in ("share", "from", "alpha") if tail else ():
        if name not in tail:
            raise fields["tail"].missing(name, "a value")
    minimum = _seconds(fields["min"]) if "min" in fields else 1.0
    maximum = _seconds(fields["max"]) if "max" in fields else _YEARS_100
    if maximum < minimum:
        raise fields["max"].error("a time not below min")
    return RunTime(
        parts=tuple(parts), minimum_s=minimum, maximum_s=maximum,
        tail_share=tail["share"].number(0, 1) if tail else 0.0,
        tail_from_s=_seconds(tail["from"]) if tail else 0.0,
        tail_alpha=tail["alpha"].number(0.01, 100) if tail else 0.0,
    )  # fmt: skip


def _limits(value: Value) -> RequestedTimes:
    fields = value.fields("a mapping with menu", ("menu", "over", "exceeded"))
    menu = [_seconds(item) for item in fields["menu"].items("a list of times")] if "menu" in fields else []
    if not menu:
        raise value.missing("menu", "a list of times users ask for, such as [1h, 12h, 1d, 7d]")
    over = fields["over"].fields("a mapping with median and sigma", ("median", "sigma")) if "over" in fields else {}
    return RequestedTimes(
        menu_s=tuple(sorted(menu)),
        over_median=over["median"].number(1, 1e6) if "median" in over else 3.0,
        over_sigma=over["sigma"].number(0, 20) if "sigma" in over else 1.0,
        exceeded=fields["exceeded"].number(0, 1) if "exceeded" in fields else 0.0,
    )


def _seconds(value: Value) -> float:
    def convert(text: str) -> float:
        return float(text[:-1]) if _SECONDS.fullmatch(text) else float(parse_duration(text))

    seconds = value.converted(convert, _EXPECTED_TIME)
    if not 0 < seconds <= _YEARS_100:
        raise value.error(_EXPECTED_TIME + ", above 0")
    return seconds


def _start(value: Value) -> float:
    return value.converted(_start_of, "a date such as 2026-01-05")


def _start_of(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


# To YAML


class _Dumper(yaml.SafeDumper):
    """Writes numbers with six significant digits and without exponents, as `Value.number` reads them."""


def _number(dumper: _Dumper, number: float) -> yaml.Node:
    text = _plain(number)
    return dumper.represent_scalar(f"tag:yaml.org,2002:{'float' if '.' in text else 'int'}", text)


_Dumper.add_representer(float, _number)


def workload_text(workload: Workload) -> str:
    """Return the YAML text that `load_workload` reads back."""
    arrivals: dict[str, Any] = {"load": workload.load, "gpus": workload.load_gpus}
    if workload.per_hour is not None:
        arrivals = {"per_hour": workload.per_hour}
    for name, weights in (("hours", workload.hours), ("weekdays", workload.weekdays)):
        if len(set(weights)) > 1:
            arrivals[name] = list(weights)
    if workload.burst_share > 0:
        arrivals["bursts"] = {
            "share": workload.burst_share, "size": workload.burst_size, "within": f"{_plain(workload.burst_within_s)}s"
        }  # fmt: skip
    found: dict[str, Any] = {
        "name": workload.name,
        "jobs": workload.jobs,
        "start": f"{datetime.fromtimestamp(in_calendar(workload.start), UTC):%Y-%m-%dT%H:%M:%S}",
        "arrivals": arrivals,
        "sizes": [
            {"gpus": size.gpus, "share": size.share}
            | ({"profile": size.profile} if size.profile else {})
            | ({} if size.run_time is None else {"run_time": _run_time_keys(size.run_time)})
            for size in workload.sizes
        ],
        "run_time": _run_time_keys(workload.run_time),
    }
    if (limits := workload.limits) is not None:
        over = {"median": limits.over_median, "sigma": limits.over_sigma}
        menu = [f"{_plain(s)}s" for s in limits.menu_s]
        found["limits"] = {"menu": menu, "over": over, "exceeded": limits.exceeded}
    if workload.users:
        found["users"] = {"count": workload.users, "zipf": workload.user_zipf}
    if workload.groups:
        found["groups"] = dict(workload.groups)
    text = yaml.dump(found, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return f"# hours: from midnight, UTC; weekdays: from Monday\n{text}"


def _run_time_keys(run_time: RunTime) -> dict[str, Any]:
    parts = [{"weight": w, "median": f"{_plain(median)}s", "sigma": sigma} for w, median, sigma in run_time.parts]
    tail = {"share": run_time.tail_share, "from": f"{_plain(run_time.tail_from_s)}s", "alpha": run_time.tail_alpha}
    bounds = {"min": f"{_plain(run_time.minimum_s)}s", "max": f"{_plain(run_time.maximum_s)}s"}
    return {"parts": parts} | ({"tail": tail} if run_time.tail_share > 0 else {}) | bounds


def _plain(number: float) -> str:
    text = f"{float(f'{number:.6g}'):.9f}"
    return text.rstrip("0").rstrip(".")
