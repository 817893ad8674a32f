"""The sizes of pending jobs and the resizes of running ones, from a snapshot; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import ceil, inf, nan
from typing import Any

import msgspec
import numpy as np

from gpusched.compiled import NotCached
from gpusched.config.plugins import ComponentError, installed
from gpusched.config.weights import TrainedModel
from gpusched.errors import Warnings
from gpusched.model.ids import id_key
from gpusched.model.jobs import JobSpec, Resizes
from gpusched.model.plan import Reason, ReasonCode, Resize
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import Reservation
from gpusched.model.snapshot import PendingView, RunningView, Snapshot
from gpusched.sched.agent import ComponentErrors, Unusable, agent_parts, prepared_weights
from gpusched.sched.arrays import NodeArrays, waiting_of
from gpusched.sched.eligible import ineligible, may_resize
from gpusched.sched.fit import set_feasibility
from gpusched.sched.limits import Rooms
from gpusched.sched.sizing.nodes import sizing_nodes
from gpusched.sched.sizing.question import (
    COUNT,
    PART,
    ROW,
    Amounts,
    Claims,
    Question,
    Scene,
    SizingNodes,
    menus_of,
    new_claims,
    question_of,
)
from gpusched.sched.sizing.rules import RULES, SizeChooser, wish
from gpusched.sched.sizing.settle import SizingRules, gather, settle, speed_at
from gpusched.sched.sizing.shapes import granted, over_fewest, rank_view, rooms_of
from gpusched.sched.state import Ints, ints, new_scratch
from gpusched.sched.tally import closed_reason

UNSOUND = "it chose sizes that a job may not have now, or more GPUs than exist"
INSTEAD = "greedy-gain"  # of a component that does not work
_ANSWERED = ("wished", "cores", "memory")  # columns of an answer
WAITS = Reason(code=ReasonCode.POLICY, message="the policy gives it no GPUs now")


class Sized(msgspec.Struct, frozen=True):
    """The snapshot with pending jobs at the sizes they would start with, and resizes of running ones.

    Attributes:
        waits: Jobs that get no GPUs now, with the reason.
        troubles: Partition -> why its agent did not choose.
        given: Resizable jobs that wait and are to start -> GPUs; where others must shrink for them first, then.
        spare: Running jobs that could shrink now -> (GPUs, their least size).
    """

    snapshot: Snapshot
    resizes: tuple[Resize, ...] = ()
    waits: dict[str, Reason] = {}
    troubles: dict[str, str] = {}
    given: dict[str, int] = {}
    spare: dict[str, tuple[int, int]] = {}


def sizes_of(snapshot: Snapshot, world: NodeArrays, models: Mapping[str, TrainedModel] = {}) -> Sized:
    """Sizes for all partitions whose policy chooses them; the same arguments always give the same answer.

    Args:
        snapshot: What is decided on.
        world: Its nodes.
        models: Partition -> an agent's weights, where an agent chooses.
    """
    specs: dict[str, JobSpec] = {}
    found = Sized(snapshot)
    for name, policy in snapshot.policies.items():
        if policy.sizes != "base" and name in world.span:
            resizes = _Partition(snapshot, world, name, policy).decided(models.get(name), specs, found)
            found = msgspec.structs.replace(found, resizes=found.resizes + resizes)
    if not specs:
        return found
    pending = tuple(_with_spec(job, specs[job.id]) if job.id in specs else job for job in snapshot.pending)
    changed = msgspec.structs.replace(snapshot, pending=pending)
    return msgspec.structs.replace(found, snapshot=changed)


def _with_spec(job: PendingView, spec: JobSpec) -> PendingView:
    # A job that was stopped to be resized resumes before any other job takes its place.
    first = 1 << 31 if job.resume_at is not None else 0
    return msgspec.structs.replace(job, spec=spec, priority=job.priority + first)


def pace_of(speeds: dict[int, float], gpus: int) -> float:
    """Return steps a second with so many GPUs, from those reported at other sizes; see `settle.speed_at`."""
    sizes = ints(sorted(speeds))
    paces = np.array([speeds[size] for size in sorted(speeds)], np.float64)
    return speed_at(sizes, paces, np.arange(sizes.size), gpus)


class _Partition:
    """The sizing decision for one partition."""

    def __init__(self, snapshot: Snapshot, world: NodeArrays, name: str, policy: PolicySpec) -> None:
        self.snapshot, self.world, self.name, self.policy = snapshot, world, name, policy
        self.lo, self.hi = world.span[name]
        self.nodes = world.nodes[self.lo : self.hi]
        names = {node.name for node in self.nodes}
        self.all_running = [j for j in snapshot.running if any(part.node in names for part in j.allocation.parts)]
        resizable = (j for j in self.all_running if j.spec is not None and j.spec.elastic is not None)
        self.running = sorted(resizable, key=lambda j: j.id)
        self.waiting = self._queue()
        self.jobs: list[RunningView | PendingView] = [*self.running, *self.waiting]
        self.scratch = new_scratch(len(world.nodes), 0, world.rack)
        self._views: list[PendingView] = []
        self._menus: dict[tuple[object, ...], int] = {}
        self._sizes: list[dict[int, int]] = []  # of a menu: GPUs -> the view that asks for so many
        self._asked: list[dict[int, JobSpec]] = []  # of a menu: GPUs -> the request

    def decided(self, model: TrainedModel | None, specs: dict[str, JobSpec], found: Sized) -> tuple[Resize, ...]:
        """Return the resizes; write pending jobs' requests to ``specs`` and everything else to ``found``."""
        scene = self._scene()
        asked = waiting_of(self._views, self.world, {})
        requests, masks, feasibility = asked.requests, asked.jobs.masks, asked.jobs.feasibility
        shape_of = asked.jobs.shape  # of views; menus name views until now
        hot = (scene.rows["rank_gpus"] > 0) & (scene.rows["held"] > 0)
        scene.rows["rank_shape"][hot] = shape_of[scene.rows["rank_shape"][hot]]
        scene.menus.shape[:] = np.where(scene.menus.shape >= 0, np.append(shape_of, -1)[scene.menus.shape], -1)
        scratch = self.scratch._replace(calendar=asked.calendar)
        set_feasibility(self.world.total, self.world.usable, requests, asked.jobs, scratch)
        claims = new_claims(len(scene.rows) + 1, scene.menus.sizes.shape[1])
        gather(scene, self._rules(), self.world.resources, self.world.usable, feasibility, claims)
        settled = partial(settle, scene, claims, self.world.resources, requests, masks, self.scratch)
        racks = self.world.rack if self.world.racked else self.world.rack[:0]
        nodes = partial(
            sizing_nodes, scene, claims, self.world.resources, self.world.usable, requests, masks, racks, self.lo,
            self.hi,
        )  # fmt: skip
        rule, asks = self.policy.sizes, None
        if self.policy.traits.sizes:
            asks = partial(self._ask, claims, nodes, model)
        elif rule not in RULES:
            asks = partial(self._ask_component, claims, nodes)
        if why := decide_sizes(claims, RULES.get(rule, RULES[INSTEAD]), asks, settled):
            if self.policy.traits.sizes:
                found.troubles[self.name] = why
            else:
                Warnings.give(f"{component_error(rule, why).line()}; {INSTEAD} is used")
        return self._answer(scene, claims, specs, found)

    def _ask(self, claims: Claims, nodes: Callable[[], SizingNodes], model: TrainedModel | None) -> Ints:
        """Return the agent's sizes; see `ask_agent`."""
        assert self.policy.agent is not None
        if model is None:
            raise Unusable("no weights")
        try:
            return ask_agent(self.policy.agent, prepared_weights(model), self._question(claims, nodes))
        except ComponentError as error:
            raise Unusable(error.line()) from error

    def _ask_component(self, claims: Claims, nodes: Callable[[], SizingNodes]) -> Ints:
        """Return the sizes of another package's component; see `ask_component`."""
        return ask_component(self.policy.sizes, self._question(claims, nodes))

    def _question(self, claims: Claims, nodes: Callable[[], SizingNodes]) -> Question:
        specs = [self.jobs[row].spec for row in claims.jobs["row"][: claims.number[COUNT]].tolist()]
        names = tuple(spec.name if spec is not None else "" for spec in specs)
        return question_of(claims, self.name, self.snapshot.now, names, nodes)

    def _queue(self) -> list[PendingView]:
        """Return the jobs that may start, in order: those stopped to be resized first; not those without limit left."""
        now, policies = self.snapshot.now, self.snapshot.policies
        jobs = [j for j in self.snapshot.pending if j.spec.partition == self.name]
        jobs = [j for j in jobs if ineligible(j, now, policies) is None]
        rooms, queue = Rooms(self.snapshot), []
        jobs.sort(key=lambda j: (j.resume_at is None, -j.priority, -j.standing, j.submit_time, id_key(j.id)))
        for job in jobs:
            least = job.spec.elastic.sizes[0] if job.spec.elastic is not None else job.spec.gpus
            if rooms.full(job, least) is None:
                rooms.take(job, least)
                queue.append(job)
        return queue

    def _rules(self) -> SizingRules:
        soonest = min((_end_of(job) for job in self.all_running), default=inf)
        times = [j.submit_time for j in self.all_running if j.submit_time is not None]
        times += [j.submit_time for j in self.snapshot.pending if j.spec.partition == self.name]
        submits, blocks = np.array(times, np.float64), self.policy.backfill == "none"
        return SizingRules(self.snapshot.now, soonest, submits, self.policy.resize.gain, blocks, self.lo, self.hi)

    def _scene(self) -> Scene:
        rows = np.zeros(len(self.jobs), ROW)
        rows["job"] = np.arange(len(rows))
        parts: list[tuple[int, int, int, int]] = []
        for row, job in zip(rows, self.running, strict=False):
            assert job.spec is not None
            left = max(1.0, job.expected_end - self.snapshot.now)
            row["menu"], row["first"] = self._menu(job.spec, (), left, self._reserved(job)), len(parts)
            parts += self._parts(job)
            row["last"] = len(parts)
            row["held"] = job.allocation.gpus
            row["may"] = may_resize(job, self.policy.resize, self.snapshot.now) is None
            if job.spec.elastic is not None and (rank_gpus := job.spec.elastic.rank_gpus):
                row["rank_gpus"], row["rank_shape"] = rank_gpus, self._rank_view(job, left)
                row["may"] &= (row["last"] - row["first"]) * rank_gpus == row["held"]  # no rank is out of sight
            row["submit"] = job.submit_time if job.submit_time is not None else job.start_time
            row["left_s"] = _end_of(job) - self.snapshot.now
            _of_both(row, job, job.spec)
        for row, waits in zip(rows[len(self.running) :], self.waiting, strict=True):
            row["menu"] = self._menu(waits.spec, waits.excluded_nodes, waits.limit_s, waits.reserved)
            row["rigid"], row["resume"] = waits.spec.elastic is None, waits.resume_at or 0
            row["rank_gpus"] = waits.spec.elastic.rank_gpus if waits.spec.elastic is not None else 0
            row["submit"], row["left_s"] = waits.submit_time, waits.expected_s
            _of_both(row, waits, waits.spec)
        menus = menus_of(self._sizes, [_amounts(asked) for asked in self._asked])
        unusable = np.zeros((len(rows), menus.sizes.shape[1]), np.uint8)
        reported, rooms = np.full(unusable.shape, nan), Rooms(self.snapshot)
        for i, either in enumerate(self.jobs):
            bad = either.resizes.unusable if either.resizes is not None else ()
            for k, gpus in enumerate(self._sizes[rows[i]["menu"]]):
                unusable[i, k] = gpus in bad or rooms.exceeds(either, gpus)
                reported[i, k] = either.speeds.get(gpus, nan)
        return Scene(rows, np.array(parts, PART), unusable, reported, menus)

    def _rank_view(self, job: RunningView, left_s: float) -> int:
        """Return the view that asks for one more rank of a running hot job."""
        self._views.append(rank_view(job, left_s, self._reserved(job)))
        return len(self._views) - 1

    def _parts(self, job: RunningView) -> list[tuple[int, int, int, int]]:
        """Return what the job gives back, node by node; blocked GPUs are not given back."""
        found = []
        for part in job.allocation.parts:
            at = self.world.row.get(part.node, -1)
            if at >= 0:
                well = sum(g not in self.world.nodes[at].blocked for g in part.gpus)
                found.append((at, well, part.cores, part.memory_mib))
        return found

    def _reserved(self, job: RunningView) -> Reservation | None:
        """Return the reservation that it runs in."""
        reserved = self.world.reserved
        number = reserved.number.get(job.spec.reservation) if job.spec is not None else None
        return None if number is None else reserved.all[number]

    def _menu(self, spec: JobSpec, excluded: tuple[str, ...], limit_s: float, reserved: Reservation | None) -> int:
        """Return its row of the menus; equal requests share one, with feasibility checked once."""
        own = (spec.nodes, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node)
        key: tuple[object, ...] = (spec.elastic or own, spec.nodelist, spec.exclude, spec.gpu_types, excluded)
        if self.world.reserved:
            key = (*key, limit_s, reserved)
        if key not in self._menus:
            self._menus[key] = len(self._menus)
            sizes = spec.elastic.sizes if spec.elastic is not None else (spec.gpus,)
            found, requests, rooms = {}, {}, rooms_of(spec, self.nodes)
            for gpus in sizes:
                asked = over_fewest(spec, gpus, rooms) if spec.elastic is not None else spec
                found[gpus] = len(self._views) if asked is not None else -1
                if asked is not None:
                    requests[gpus] = asked
                    least = asked.least
                    if self.world.reserved:
                        least = msgspec.structs.replace(least, time_limit_s=ceil(limit_s))
                    self._views.append(
                        PendingView(
                            id="", user="", spec=least, submit_time=0, excluded_nodes=excluded, reserved=reserved
                        )
                    )
            self._sizes.append(found)
            self._asked.append(requests)
        return self._menus[key]

    def _answer(self, scene: Scene, claims: Claims, specs: dict[str, JobSpec], found: Sized) -> tuple[Resize, ...]:
        first = len(self.running)
        rows = scene.rows
        wished = {int(job["row"]): j for j, job in enumerate(claims.jobs[: claims.number[COUNT]])}
        admitted = [self.waiting[i - first].id for i in range(first, len(rows)) if rows[i]["admitted"]]
        for i, job in enumerate(self.waiting, first):
            if job.spec.elastic is None or rows[i]["least"] == 0:
                continue
            gpus, most = int(rows[i]["least"]), (0, 0)
            if rows[i]["admitted"]:
                claim = claims.jobs[wished[i]]
                gpus, most = int(claim["wished"]), (int(claim["cores"]), int(claim["memory"]))
            if rows[i]["admitted"] and gpus > 0:
                found.given[job.id] = gpus
            if gpus == 0:
                found.waits[job.id] = WAITS
                gpus = int(rows[i]["least"])
            specs[job.id] = granted(_as(job.spec, self._asked[rows[i]["menu"]][gpus]), most, self._free(job))
        resizes = []
        for i, runs in enumerate(self.running):
            gpus = int(claims.jobs[wished[i]]["wished"])
            if rows[i]["may"] and (least := int(claims.sizes[wished[i], 0])) < runs.allocation.gpus:
                found.spare[runs.id] = runs.allocation.gpus, least
            if gpus != runs.allocation.gpus:
                resizes.append(Resize(runs.id, gpus, _why(claims, wished[i], admitted)))
        return tuple(resizes)

    def _free(self, job: PendingView) -> Iterator[tuple[int, int, int]]:
        """Yield GPUs, cores and MiB that are free on the nodes that a job may use."""
        columns = (column[self.lo : self.hi].tolist() for column in self.world.resources.columns)
        for node, (gpus, cores, memory) in zip(self.nodes, zip(*columns, strict=True), strict=True):
            if not closed_reason(job, node, self.snapshot.now):
                yield gpus, cores, memory


def _amounts(asked: dict[int, JobSpec]) -> dict[int, Amounts]:
    """Return the least and the most cores and MiB on each node, by GPUs."""
    found = {gpus: (spec.least, spec) for gpus, spec in asked.items()}
    return {
        gpus: ((low.cores_per_node, low.memory_mib_per_node), (high.cores_per_node, high.memory_mib_per_node))
        for gpus, (low, high) in found.items()
    }


def _as(spec: JobSpec, asked: JobSpec) -> JobSpec:
    """Return a job's request with the shape of an equal one."""
    return msgspec.structs.replace(
        spec, nodes=asked.nodes, gpus_per_node=asked.gpus_per_node, cores_per_node=asked.cores_per_node,
        memory_mib_per_node=asked.memory_mib_per_node,
    )  # fmt: skip


def decide_sizes(claims: Claims, rule: int, asked: Callable[[], Ints] | None, settled: Callable[[], bool]) -> str:
    """Settle an agent's sizes, or the rule's if it cannot choose; return the reason then, else "".

    ``asked``: the agent's answer, which raises ValueError where there is none. ``settled``: `settle` with these claims.
    """
    why = ""
    if asked is not None and claims.number[COUNT] > 0:
        try:
            answer = asked()
            for name, column in zip(_ANSWERED, answer.T if answer.ndim > 1 else (answer,), strict=False):
                claims.jobs[name][: len(answer)] = column
            if settled():
                return ""
            why = UNSOUND
        except ValueError as error:
            why = str(error)
        for name in _ANSWERED[1:]:
            claims.jobs[name][:] = 0
    wish(rule, claims)
    sound = settled()
    assert sound, "the rule chose sizes that are not allowed"
    return why


def ask_agent(agent: str, weights: object, question: Question) -> Ints:
    """Return an agent's sizes, ``int64[jobs]``, or ``int64[jobs, 3]`` with cores and memory.

    Raises:
        ValueError: It cannot choose, or what it says is no sizes.
        ComponentError: It is another package's, and failed.
    """
    with ComponentErrors(agent):
        sizes = agent_parts(agent).sizes
        assert sizes is not None
        return _checked(sizes().choose_sizes(weights, question), question)


def ask_component(name: str, question: Question) -> Ints:
    """Return the sizes of a component of the group ``sizings``, as an agent's.

    Raises:
        ValueError: It does not work, or what it says is no sizes; see `component_error`.
    """
    own = question._replace(claims=Claims._make(array.copy() for array in question.claims))  # it may write there
    try:
        choose: SizeChooser = installed("sizings", name).load()
        return _checked(choose(own), question)
    except (Unusable, NotCached):
        raise
    except ComponentError as error:
        raise Unusable(str(error)) from error
    except Exception as error:  # another's code: anything can be wrong with it
        raise Unusable(installed("sizings", name).reason(error)) from error


def component_error(name: str, why: str) -> ComponentError:
    """Return the error of a component of the group ``sizings`` that did not choose."""
    try:
        component = installed("sizings", name)
        component.load()
    except ComponentError as error:
        return error
    return component.error(why)


def _checked(given: object, question: Question) -> Ints:
    answer, jobs = np.asarray(given), question.claims.jobs.size
    if answer.shape not in ((jobs,), (jobs, len(_ANSWERED))) or answer.dtype.kind not in "iu":
        raise Unusable("its answer is not one whole number of GPUs for each job")
    return answer


def _end_of(job: RunningView) -> float:
    """Return the job's end by its own estimate, else by its limit."""
    return job.own_end if job.own_end is not None else job.expected_end


def _of_both(row: Any, job: RunningView | PendingView, spec: JobSpec) -> None:
    """Return the fields of a row that running and pending jobs share."""
    base, resizes = spec.elastic, job.resizes or Resizes()
    gpus, cores, memory = (
        (base.base_gpus, base.base_cores, base.base_memory_mib) if base is not None else (spec.gpus, *spec.amounts)
    )
    row["base"], row["cores"], row["memory"] = gpus, cores / max(gpus, 1), memory / max(gpus, 1)
    row["restarts"], row["cost_s"] = resizes.count, resizes.cost_s or 0.0
    row["work"] = nan if job.left is None else job.left


def _why(claims: Claims, j: int, others: list[str]) -> str:
    held, gpus = int(claims.jobs[j]["held"]), int(claims.jobs[j]["wished"])
    if gpus < held:
        whom = f" for {', '.join(others[:3])}{' and others' if len(others) > 3 else ''}" if others else ""
        return f"shrinks from {held} to {gpus} GPUs{whom}"
    sizes = claims.sizes[j].tolist()
    before, then = sizes.index(held), sizes.index(gpus)
    faster = claims.pace[j, then] / claims.pace[j, before]
    known = "(reported)" if claims.reported[j, before] and claims.reported[j, then] else "(estimated)"
    return f"grows from {held} to {gpus} free GPUs: {faster:.2f} times as fast {known}"
