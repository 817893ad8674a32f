"""`gpusched quota`: limits and their use, the QoS classes a user may use, fair shares."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from gpusched.client.context import Client, check_admin
from gpusched.config.users import user_name
from gpusched.errors import UsageError
from gpusched.model.jobs import JobRecord
from gpusched.model.limits import LimitRule, leaf_of, split_leaf
from gpusched.model.reports import QosRow, QuotaReport, QuotaRow, ShareRow
from gpusched.model.resources import Inventory
from gpusched.model.snapshot import RunningView, Snapshot

if TYPE_CHECKING:
    from gpusched.queue.quotas import QuotaLedger

_RESOURCES: dict[str, Literal["gpus", "jobs", "queued", "gpu_hours", "time"]]
_RESOURCES = {"gpus": "gpus", "jobs": "jobs", "queued": "queued", "gpu_s": "gpu_hours", "time_s": "time"}


def quota_report(client: Client, user: str | None = None, everybody: bool = False) -> QuotaReport:
    """Return the report of the caller; for admins also of ``user`` or of ``everybody``.

    Raises:
        UsageError: There is no such user.
        GpuschedError: The caller may not see it.
    """
    from gpusched.queue.clock import ANCHOR, now_by
    from gpusched.queue.quotas import QuotaLedger, recent_quota_usage

    caller = user_name(os.getuid())
    if everybody or user not in (None, caller):
        check_admin(client)
    inventory, reader = client.inventory, client.reader
    now = now_by(reader.meta(ANCHOR)) if reader else time.time()
    active = reader.active() if reader else []
    pending = reader.waiting_by_class() if reader else {}
    users_known = _users(inventory, active, [key[0] for key in pending])
    if user is not None and user not in users_known and user != caller and not _user_exists(user):
        raise UsageError(f"there is no user '{user}'", "see 'gpusched quota --all'")
    users = tuple(users_known) if everybody else (user or caller,)
    used = recent_quota_usage(reader, inventory.quotas, now) if reader else []
    ledger = QuotaLedger(inventory.quotas, active, used, now)
    running = _running(active, ledger, now)
    return QuotaReport(
        users=users,
        rows=_rows(client, users, running, pending, ledger, now),
        classes=_classes(inventory, users, everybody),
        shares=_shares(client, users, running, everybody, now),
        now=now,
    )


def _users(inventory: Inventory, active: Iterable[JobRecord], pending_users: Iterable[str]) -> list[str]:
    """Return all users named in the inventory and all users with jobs."""
    named = [user for group in inventory.groups.groups for user in group.members]
    named += [*inventory.quotas.users, *(user for qos in inventory.quotas.qos for user in qos.users)]
    return sorted({*named, *(job.user for job in active), *pending_users})


def _user_exists(user: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _running(active: list[JobRecord], ledger: QuotaLedger, now: float) -> tuple[RunningView, ...]:
    """Return the jobs that hold resources as limits and shares count them."""
    from gpusched.queue.snapshots import expected_end, partners_of

    partners = partners_of(active)
    return tuple(
        RunningView(
            id=job.id, user=job.user, allocation=job.allocation, start_time=job.start_time or job.submit_time,
            expected_end=expected_end(job, job.start_time or now), spec=job.spec,
            shares=job.allocation.parts[0].gpus if job.id in partners else (), partner=partners.get(job.id, ""),
            group=ledger.group(job.user, job.spec.group), bounds=ledger.of(job.user, job.spec),
        )
        for job in active
        if job.allocation is not None
    )  # fmt: skip


def _rows(
    client: Client,
    users: Iterable[str],
    running: tuple[RunningView, ...],
    pending: dict[tuple[str, str, str], int],
    ledger: QuotaLedger,
    now: float,
) -> tuple[QuotaRow, ...]:
    from gpusched.sched.limits import frees_at, releases_of_bounds

    inventory, quotas = client.inventory, client.inventory.quotas
    rules: dict[tuple[tuple[str, str, str], str], LimitRule] = {}
    in_class = {(job.user, job.spec.qos) for job in running if job.spec} | {(user, qos) for user, _, qos in pending}
    for user in users:
        # A job keeps its class even if its user may no longer submit to it.
        usable = (cls for cls in quotas.qos if cls.may_use(user, inventory.groups) or (user, cls.name) in in_class)
        classes = ("", *(cls.name for cls in usable))
        for group in inventory.groups.of(user) or ("",):
            for qos in classes:
                ledger.of_kind(user, group, qos)  # adds its bounds, which need not have running jobs
                for rule in quotas.rules(user, group, qos):
                    rules.setdefault((rule.key, rule.unit), rule)
    bounds = ledger.bounds()
    releases = releases_of_bounds(
        Snapshot(now=now, nodes=(), running=running, pending=(), policies={}, bounds=bounds)
    )
    taken = {(b.rule.key, b.rule.unit): (b, releases[i]) for i, b in enumerate(bounds)}
    queued: dict[tuple[str, str, str], int] = {}
    for (name, group, qos), jobs in pending.items():
        for rule in quotas.rules(name, inventory.groups.for_job(name, group), qos):
            if rule.unit == "queued":
                queued[rule.key] = queued.get(rule.key, 0) + jobs
    found = []
    for rule in sorted(rules.values(), key=_order):
        scale = 3600 if rule.unit == "gpu_s" else 1
        amount: float | None = None if rule.unit == "time_s" else float(queued.get(rule.key, 0))
        frees = None
        if (rule.key, rule.unit) in taken:
            bound, comes_back = taken[rule.key, rule.unit]
            amount = bound.used / scale
            frees = frees_at(comes_back, 1 - bound.room) if bound.room < 1 and rule.limit > 0 else None
        found.append(
            QuotaRow(
                subject=rule.subject, resource=_RESOURCES[rule.unit], used=amount, limit=rule.limit / scale,
                reason=rule.reason, frees=frees,
            )
        )  # fmt: skip
    return tuple(found)


def _order(rule: LimitRule) -> tuple[object, ...]:
    """Return the sort key: users, then their groups, then QoS classes; each in the order of its limits."""
    user, group, qos = rule.key
    return (bool(qos), qos, bool(group), group, user, list(_RESOURCES).index(rule.unit))


def _classes(inventory: Inventory, users: Iterable[str], everybody: bool) -> tuple[QosRow, ...]:
    names = list(users)
    return tuple(
        QosRow(name=qos.name, priority=qos.priority, preemptible=qos.preemptible, exempt=qos.exempt)
        for qos in inventory.quotas.qos
        if everybody or any(qos.may_use(user, inventory.groups) for user in names)
    )


def _shares(
    client: Client, users: Iterable[str], running: tuple[RunningView, ...], everybody: bool, now: float
) -> tuple[ShareRow, ...]:
    """Return the ranks in the fair-share tree; none without groups."""
    groups, reader = client.inventory.groups, client.reader
    if not groups:
        return ()
    import numpy as np

    from gpusched.queue.snapshots import usage_by_leaf
    from gpusched.sched.fairtree import places, tree_of
    from gpusched.sched.tally import held_gpus, with_held

    usage = usage_by_leaf(reader, client.inventory, now) if reader else {}
    held = ((leaf_of(job.user, job.group), gpus) for job, gpus in held_gpus(running))
    usage_and_running = with_held(usage, held)
    members = (leaf_of(user, group.name) for group in groups.groups for user in group.members)
    leaves = sorted({*usage_and_running, *members})
    tree = tree_of(groups, [split_leaf(leaf) for leaf in leaves])
    ranks = places(tree, np.array([usage_and_running.get(leaf, 0.0) for leaf in leaves], np.float64)).tolist()
    wanted = set(users)
    rows = []
    for leaf, rank in sorted(zip(leaves, ranks, strict=True), key=lambda pair: pair[1]):
        user, group = split_leaf(leaf)
        if everybody or user in wanted:
            group_entry = groups.get(group)
            shares = group_entry.members.get(user, 1) if group_entry is not None else 1
            rows.append(ShareRow(group=group, user=user, shares=shares, gpu_hours=usage.get(leaf, 0.0), place=rank + 1))
    return tuple(rows)
