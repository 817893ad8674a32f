"""Where jobs run costs something: a reference as slow and as obvious as can be, in plain Python.

`ends` takes starts and nodes as given and lets the jobs run; `Decider` says who starts where by the blind rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Cluster:
    gpus: list[int]
    rack: list[int]  # -1: none
    parent: dict[int, int] = field(default_factory=dict)  # switch -> switch above; -1: none
    uplink: dict[int, float] = field(default_factory=dict)  # switch -> how much longer than on a NIC
    nvswitch: bool = False

    def path(self, node: int) -> list[int]:
        found, at = [], self.rack[node]
        while at != -1:
            found.append(at)
            at = self.parent.get(at, -1)
        return found


@dataclass
class Kinds:
    of: list[tuple[float, float, float, float, float]]  # compute, bus a and b, net a and b
    ratio: list[list[float]] | None = None
    by_sum: bool = False


def ring(meet: int) -> float:
    return 2 * (meet - 1) / meet


def sends(cluster: Cluster, kinds: Kinds, kind: int, nodes: list[int], gpus: int) -> dict[tuple[str, int], float]:
    """Link -> seconds of a step on it."""
    _, bus_a, bus_b, net_a, net_b = kinds.of[kind]
    found: dict[tuple[str, int], float] = {}
    if gpus > 1 and not cluster.nvswitch:
        found |= {("bus", n): bus_a + bus_b * ring(gpus) for n in nodes}
    if len(nodes) > 1:
        found |= {("nic", n): net_a + net_b * ring(len(nodes)) for n in nodes}
        for switch in {s for n in nodes for s in cluster.path(n)}:
            below = [n for n in nodes if switch in cluster.path(n)]
            if len(below) == len(nodes) or not cluster.uplink.get(switch):
                continue
            above = cluster.parent.get(switch, -1)
            # what hangs directly below the next switch up and has a part: switches and nodes
            meeting = set()
            for n in nodes:
                path = cluster.path(n)
                steps = [*path, -1]
                if above in steps:
                    at = steps.index(above)
                    meeting.add(("node", n) if at == 0 else ("switch", path[at - 1]))
            found["up", switch] = cluster.uplink[switch] * (net_a + net_b * ring(len(meeting)))
    return found


def step(kinds: Kinds, kind: int, sent: dict[tuple[str, int], float]) -> float:
    return kinds.of[kind][0] + max(sent.values(), default=0.0)


def speed(kinds: Kinds, cluster: Cluster, me: tuple, others: list[tuple], best: float) -> float:
    """(kind, nodes, gpus) beside others; 1: as where it is fastest."""
    kind, nodes, _ = me
    if kinds.ratio is not None:
        lost, left = 0.0, 1.0
        for other, there, _ in others:
            if len(nodes) > 1 and len(there) > 1 and set(nodes) & set(there):
                lost, left = lost + 1 - kinds.ratio[kind][other], left * kinds.ratio[kind][other]
        return max(1 - lost, 0.05) if kinds.by_sum else left
    mine = sends(cluster, kinds, *me)
    worst = 0.0
    for link, seconds in mine.items():
        beside = 0.0
        for other in others:
            theirs = sends(cluster, kinds, *other)
            beside += theirs.get(link, 0.0) / step(kinds, other[0], theirs)
        worst = max(worst, seconds * (1 + beside))
    return best / (kinds.of[kind][0] + worst)


def ends(cluster: Cluster, kinds: Kinds, starts, places, work, best) -> list[float]:
    """When jobs end that start at ``starts`` on ``places`` ((kind, nodes, gpus)) with ``work`` seconds to do."""
    left, done = list(work), [math.nan] * len(work)
    now = min(starts)
    while any(math.isnan(end) for end in done):
        on = [j for j in range(len(work)) if starts[j] <= now and math.isnan(done[j])]
        rate = {j: speed(kinds, cluster, places[j], [places[o] for o in on if o != j], best[j]) for j in on}
        coming = [s for s in starts if s > now]
        then = min([now + left[j] / rate[j] for j in on] + coming)
        for j in on:
            left[j] -= (then - now) * rate[j]
            if left[j] <= 1e-9 * work[j]:
                done[j] = then
        now = then
    return done


class Decider:
    """Starts by rules that know nothing of slowdown: jobs of G GPUs in equal parts; any that fits starts."""

    def __init__(
        self, cluster: Cluster, rule: str, wait: float, hold: float, limits: list[float] | None = None
    ) -> None:
        self.cluster, self.rule, self.wait, self.hold = cluster, rule, wait, hold
        self.limits = limits  # by job: EASY backfill; None: any that fits starts

    def ways(self, gpus: int) -> list[tuple[int, bool]]:
        """(nodes, whether in one rack), as they are tried; those that do not fit the empty cluster are none."""
        has = self.cluster.gpus
        counts = [n for n in range(1, len(has) + 1) if gpus % n == 0 and sum(g >= gpus // n for g in has) >= n]
        counts = counts[::-1] if self.rule == "load-balancing" else counts
        both = [(n, one) for n in counts for one in ((True, False) if self.rule.startswith("rack") else (False,))]
        return [way for way in both if self.nodes(gpus, way, has) is not None]

    def nodes(self, gpus: int, way: tuple[int, bool], free: list[int]) -> list[int] | None:
        count, one = way
        part = gpus // count
        fits = [n for n in range(len(free)) if free[n] >= part]
        if self.rule in ("load-balancing", "tetris"):
            return sorted(fits, key=lambda n: (-free[n], n))[:count] if len(fits) >= count else None
        tight = lambda nodes: sorted(nodes, key=lambda n: (free[n], n))  # noqa: E731
        if not self.rule.startswith("rack"):
            return tight(fits)[:count] if len(fits) >= count else None
        rack = [r if r >= 0 else -1 - n for n, r in enumerate(self.cluster.rack)]
        if all(r < 0 for r in self.cluster.rack):
            rack = [0] * len(free)
        room = {r: sum(f for n, f in enumerate(free) if rack[n] == r) for r in rack}
        if count == 1:
            return sorted(fits, key=lambda n: (free[n], room[rack[n]], n))[:1] or None
        found: list[int] = []
        left = {r: [n for n in fits if rack[n] == r] for r in dict.fromkeys(rack[n] for n in fits)}
        while len(found) < count:
            need = count - len(found)
            whole = [r for r in left if len(left[r]) >= need]
            if not whole and (one or not left):
                return None
            pick = min(whole, key=lambda r: (room[r], rack.index(r))) if whole else None
            pick = max(left, key=lambda r: (len(left[r]), -rack.index(r))) if pick is None else pick
            found += tight(left.pop(pick))[:need]
        return found

    def run(self, kinds: Kinds, jobs) -> tuple[list[float], list[list[int]], list[float]]:
        """``jobs``: (submit, work, gpus, kind) by submit; starts, nodes and ends."""
        free, now = list(self.cluster.gpus), jobs[0][0]
        start, end = [math.nan] * len(jobs), [math.nan] * len(jobs)
        left, place = [job[1] for job in jobs], [None] * len(jobs)
        best = [self.best(kinds, gpus, kind) for _, _, gpus, kind in jobs]
        self.first, self.since = len(jobs), now
        while True:
            (self.decide if self.limits is None else self.backfill)(jobs, now, free, start, place, end)
            on = [j for j in range(len(jobs)) if start[j] <= now and math.isnan(end[j])]
            rate = {j: speed(kinds, self.cluster, place[j], [place[o] for o in on if o != j], best[j]) for j in on}
            times = [now + left[j] / rate[j] for j in on] + [job[0] for job in jobs if job[0] > now]
            waiting = [j for j in range(len(jobs)) if jobs[j][0] <= now and math.isnan(start[j])]
            if min(waiting, default=len(jobs)) != self.first:
                self.first, self.since = min(waiting, default=len(jobs)), now
            waits = [jobs[j][0] + self.wait for j in waiting if self.rule == "rack-wait"] + [
                self.since + self.hold for _ in waiting[:1]
            ]
            times += [t for t in waits if t > now]
            if not times:
                return start, [p[1] for p in place], end
            then = min(times)
            for j in on:
                left[j] -= (then - now) * rate[j]
                if left[j] <= 1e-9 * jobs[j][1]:
                    end[j] = then
                    for n in place[j][1]:
                        free[n] += place[j][2]
            now = then

    def queue(self, jobs, now, start) -> list[int]:
        key = (lambda j: (-jobs[j][2], j)) if self.rule == "tetris" else (lambda j: j)
        return sorted((j for j in range(len(jobs)) if jobs[j][0] <= now and math.isnan(start[j])), key=key)

    def ways_now(self, job, now) -> list[tuple[int, bool]]:
        ways = self.ways(job[2])
        return ways[:1] if self.rule == "rack-wait" and now < job[0] + self.wait else ways

    def backfill(self, jobs, now, free, start, place, end) -> None:
        """The first that cannot start has nodes from ``shadow`` on; of these, who ends later gets what it leaves."""
        first, shadow, spare = None, math.inf, {}
        for j in self.queue(jobs, now, start):
            late = now + self.limits[j] > shadow
            room = [min(f, spare.get(n, f)) for n, f in enumerate(free)] if late else free
            ways = self.ways_now(jobs[j], now)
            found = next(((w, n) for w in ways if (n := self.nodes(jobs[j][2], w, room)) is not None), None)
            if found is not None:
                (count, _), nodes = found
                part = jobs[j][2] // count
                start[j], place[j] = now, (jobs[j][3], nodes, part)
                for n in nodes:
                    free[n] -= part
                    if late and n in spare:
                        spare[n] -= part
            elif first is None:
                first = j
                shadow, (count, _), nodes, future = min(
                    (self.earliest(jobs, j, way, now, free, start, place, end) for way in ways), key=lambda f: f[0]
                )
                spare = {n: future[n] - jobs[j][2] // count for n in nodes}

    def earliest(self, jobs, j, way, now, free, start, place, end):
        """When a job fits so, by limits; on which nodes, and what these have free then."""
        running = [o for o in range(len(jobs)) if not math.isnan(start[o]) and math.isnan(end[o])]
        over = {o: max(now, start[o] + self.limits[o]) for o in running}
        for time in sorted({now, *over.values()}):
            future = list(free)
            for o in (o for o in running if over[o] <= time):
                for n in place[o][1]:
                    future[n] += place[o][2]
            if (nodes := self.nodes(jobs[j][2], way, future)) is not None:
                return time, way, nodes, future
        raise AssertionError("it fits the empty cluster")

    def decide(self, jobs, now, free, start, place, end) -> None:
        holds = len(jobs)
        for j in self.queue(jobs, now, start):
            if j > holds:
                continue
            for way in self.ways_now(jobs[j], now):
                nodes = self.nodes(jobs[j][2], way, free)
                if nodes is not None:
                    start[j], place[j] = now, (jobs[j][3], nodes, jobs[j][2] // way[0])
                    for n in nodes:
                        free[n] -= jobs[j][2] // way[0]
                    break
            else:
                if j == self.first and now >= self.since + self.hold:
                    holds = j

    def best(self, kinds: Kinds, gpus: int, kind: int) -> float:
        """Seconds of a step alone where that is least, over all ways on the empty cluster in as few racks as can be."""
        if kinds.ratio is not None:
            return 1.0
        blind = Decider(self.cluster, "rack", 0, 0)
        places = [(way, blind.nodes(gpus, way, self.cluster.gpus)) for way in blind.ways(gpus)]
        return min(step(kinds, kind, sends(self.cluster, kinds, kind, n, gpus // w[0])) for w, n in places)


def overlaps(starts, finish, places, gpus: list[int]) -> bool:
    """Whether a node ever gave more than it has."""
    for now in starts:
        used = [0] * len(gpus)
        for s, e, (_, nodes, part) in zip(starts, finish, places, strict=True):
            for n in nodes if s <= now < e else ():
                used[n] += part
        if any(u > g for u, g in zip(used, gpus, strict=True)):
            return True
    return False
