"""Groups and classes of jobs, and limits that a job can never meet. Pure: used by clients and the controller."""

from __future__ import annotations

import msgspec

from gpusched.config.fields import is_name
from gpusched.errors import UsageError
from gpusched.model.jobs import JobSpec
from gpusched.model.limits import LimitRule, limit_units
from gpusched.model.resources import Inventory
from gpusched.model.suggest import did_you_mean
from gpusched.model.units import count_of, format_duration, gpus_of


def with_group_and_class(spec: JobSpec, user: str, inventory: Inventory) -> JobSpec:
    """Return the request with its group, and preemptible as its class says.

    Raises:
        UsageError: It names a group or a class that its user may not, or asks for what its limits never let it have.
    """
    groups, quotas = inventory.groups, inventory.quotas
    for option, name in (("--group", spec.group), ("--qos", spec.qos)):
        if name and not is_name(name):  # it goes into messages
            raise UsageError(f"{option} {name[:80]!r} is not a valid name")
    if spec.group:
        _check_group(spec.group, user, inventory)
    if spec.qos:
        qos = quotas.of_class(spec.qos)
        known = [one.name for one in quotas.qos]
        if qos is None:
            has = f"known: {', '.join(known)}" if known else "the inventory declares none"
            raise UsageError(f"there is no class '{spec.qos}'{did_you_mean(spec.qos, known)}", has)
        if not qos.may_use(user, groups):
            usable = [one.name for one in quotas.qos if one.may_use(user, groups)]
            raise UsageError(f"--qos {spec.qos}: {user} may not use it", f"{user} may use: {_listed(usable)}")
        if qos.preemptible is not None:
            spec = msgspec.structs.replace(spec, preemptible=qos.preemptible)
    group = groups.for_job(user, spec.group)
    if group != spec.group:
        spec = msgspec.structs.replace(spec, group=group)
    for rule in quotas.rules(user, group, spec.qos):
        if why := _impossible_reason(rule, spec):
            raise UsageError(f"{why} ({rule.reason})", "'gpusched quota' shows your limits")
    return spec


def max_time_limit(user: str, group: str, qos: str, inventory: Inventory) -> int | None:
    """Return the longest time limit such a job may request, seconds; None: unlimited."""
    counts = inventory.groups.for_job(user, group)
    return min((r.limit for r in inventory.quotas.rules(user, counts, qos) if r.unit == "time_s"), default=None)


def priority_of(spec: JobSpec, inventory: Inventory) -> int:
    """Return a job's initial priority: its own plus its class's."""
    qos = inventory.quotas.of_class(spec.qos)
    return spec.priority - spec.nice + (qos.priority if qos is not None else 0)


def _check_group(name: str, user: str, inventory: Inventory) -> None:
    groups = inventory.groups
    own = groups.of(user)
    if groups.get(name) is None:
        raise UsageError(f"there is no group '{name}'{did_you_mean(name, [g.name for g in groups.groups])}")
    if name not in own:
        raise UsageError(f"--group {name}: {user} is not a member", f"{user} is a member of: {_listed(own)}")


def _impossible_reason(rule: LimitRule, spec: JobSpec) -> str:
    """Return why a job could never run under this limit; "": it could."""
    gpus = spec.elastic.sizes[0] if spec.elastic is not None else spec.gpus_counted
    words = gpus_of(spec.gpus, spec.profile) if spec.profile else count_of(int(gpus), "GPU")
    if rule.unit == "time_s":
        if spec.time_limit_s > rule.limit:
            asked, limit = format_duration(spec.time_limit_s), format_duration(rule.limit)
            return f"--time {asked} exceeds the limit of {rule.subject} ({limit})"
    elif rule.unit == "gpus" and gpus > rule.limit:
        return f"{words} exceed the limit of {rule.subject} ({rule.limit} at once)"
    elif rule.unit == "gpu_s" and (needs := limit_units("gpu_s", gpus, spec.time_limit_s)) > rule.limit:
        return (
            f"{words} for {format_duration(spec.time_limit_s)} may use {needs / 3600:.1f} GPU hours; "
            f"the limit of {rule.subject} is {rule.limit / 3600:.1f} in seven days"
        )
    elif rule.unit in ("jobs", "queued") and rule.limit < 1:
        return f"{rule.subject} may not run jobs"
    return ""


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
