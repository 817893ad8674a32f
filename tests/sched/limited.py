"""Snapshots in which limits count, drawn at random, and what is taken of each limit counted by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from hypothesis import strategies as st
from msgspec.structs import replace

from gpusched.model.limits import WEEK_S, Bound, Group, Groups, LimitRule, Limits, Qos, Quotas
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from tests.sched.worlds import snapshots
from tests.strategies import among

USERS = ("alice", "bob", "carol")
Past = tuple[tuple[str, str, str, float, int], ...]  # user, group, class, until, GPU seconds

limits = st.builds(
    Limits,
    gpus=st.sampled_from([None, None, 0, 1, 2, 4, 6]),
    jobs=st.sampled_from([None, None, 1, 2, 3]),
    gpu_hours=st.sampled_from([None, None, 0.5, 2, 10]),
)


FORMER = st.lists(st.sampled_from(USERS), max_size=3)


@st.composite
def quotas(draw: st.DrawFn) -> Quotas:
    """Two groups below another one, or not, and two classes."""
    top = Group(name="top", limits=draw(limits))
    a = Group(name="a", parent=draw(among("", "top")), members={"alice": 1, "bob": 2}, limits=draw(limits))
    b = Group(name="b", parent="top", members={"bob": 1}, limits=draw(limits), shares=3)
    high = Qos(name="high", limits=draw(limits), per_user=draw(limits), exempt=draw(st.booleans()))
    users = {"alice": draw(limits)} if draw(st.booleans()) else {}
    return Quotas(each=draw(limits), users=users, groups=Groups(groups=(top, a, b)), qos=(high,))


@st.composite
def limited(draw: st.DrawFn, **kind: bool) -> tuple[Snapshot, Quotas, Past]:
    """A snapshot with its limits, and what was used in the last days."""
    snap, known = draw(snapshots(**kind)), draw(quotas())
    groups = {user: among(*known.groups.of(user) or [""]) for user in USERS}
    classes = among("", "", "high")

    def of_pending(job: PendingView) -> PendingView:
        return replace(job, group=draw(groups[job.user]), spec=replace(job.spec, qos=draw(classes)))

    def of_running(job: RunningView) -> RunningView:
        return replace(job, group=draw(groups[job.user]))

    past = tuple(
        (user, draw(groups[user]), draw(classes), snap.now - draw(among(10.0, 90_000.0, 600_000.0)), 1800)
        for user in draw(FORMER)
    )
    snap = replace(
        snap, pending=tuple(of_pending(job) for job in snap.pending), groups=known.groups,
        running=tuple(of_running(job) for job in snap.running),
    )  # fmt: skip
    return with_bounds(snap, known, past), known, past


def class_of(job: PendingView | RunningView) -> str:
    return job.spec.qos if job.spec is not None else ""


def rules_of(job: PendingView | RunningView, known: Quotas) -> list[LimitRule]:
    found = known.rules(job.user, job.group, class_of(job))
    return [rule for rule in found if rule.unit in ("gpus", "jobs", "gpu_s")]


def taken(
    known: Quotas, jobs: Iterable[tuple[PendingView | RunningView, int, float]], past: Past, now: float
) -> Counter:
    """Return the use of each limit: by jobs (with GPUs and seconds they may still run), and in the last seven days."""
    found: Counter = Counter()
    for job, gpus, left in jobs:
        for rule in rules_of(job, known):
            found[rule] += {"gpus": gpus, "jobs": 1, "gpu_s": int(gpus * min(left, WEEK_S))}[rule.unit]
    for user, group, qos, until, gpu_s in past:
        for rule in known.rules(user, group, qos):
            if rule.unit == "gpu_s" and until + WEEK_S > now:
                found[rule] += gpu_s
    return found


def with_bounds(snap: Snapshot, known: Quotas, past: Past, charged: Mapping[str, float] = {}) -> Snapshot:
    """With the bounds as they stand now, each job's in the order of its rules.

    ``charged``: running job -> seconds that count of it, where these are not those to its limit.
    """
    jobs = [*snap.pending, *snap.running]
    rules = list(dict.fromkeys(rule for job in jobs for rule in rules_of(job, known)))
    left = {r.id: charged.get(r.id, max(0.0, r.expected_end - snap.now)) for r in snap.running}
    used = taken(known, ((r, r.allocation.gpus, left[r.id]) for r in snap.running), past, snap.now)
    frees = {
        rule: tuple(
            sorted((u + WEEK_S, s) for *who, u, s in past if u + WEEK_S > snap.now and rule in known.rules(*who))
        )
        for rule in rules
        if rule.unit == "gpu_s"
    }
    place = {rule: i for i, rule in enumerate(rules)}
    return replace(
        snap,
        bounds=tuple(Bound(rule, used[rule], frees.get(rule, ())) for rule in rules),
        pending=tuple(replace(j, bounds=tuple(place[r] for r in rules_of(j, known))) for j in snap.pending),
        running=tuple(replace(j, bounds=tuple(place[r] for r in rules_of(j, known))) for j in snap.running),
    )
