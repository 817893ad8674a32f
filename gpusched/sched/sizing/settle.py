"""The common steps of sizing: which jobs are admitted, which sizes are allowed, which wishes are carried out."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.backfill import take
from gpusched.sched.fit import request_of
from gpusched.sched.place import choose
from gpusched.sched.sizing.question import CAPACITY, COUNT, FREE, OTHERS, TOTAL, Claims, Scene
from gpusched.sched.sizing.ranks import join_nodes
from gpusched.sched.sizing.rules import index_of
from gpusched.sched.state import BEST_FIT, OK, Flags, Floats, Ints, Requests, Resources, Scratch

_SCALING = 0.8  # of a job with one known speed: twice the GPUs, 2 ** 0.8 times the speed
_SOON = 10.0  # a job ends soon: within so many times the cost of a stop
_DEFAULT_LEFT_S = 3600.0  # of a job that does not report its progress
_RECENT_SUBMISSIONS = 8  # submissions by which is judged how long a size lasts


class SizingRules(NamedTuple):
    """The inputs of a decision beside the scene.

    Attributes:
        now: Seconds. soonest: When the first of those that run ends; infinite: none runs.
        submits: ``float64[...]``: when those that run or wait were submitted.
        gain: One grows only where it is faster by this part.
        blocks: The first that is not admitted blocks all behind it (backfill none).
        lo, hi: The partition's nodes.
    """

    now: float
    soonest: float
    submits: Floats
    gain: float
    blocks: bool
    lo: int
    hi: int


@jit
def gather(
    scene: Scene, rules: SizingRules, resources: Resources, usable: Resources, feasibility: Ints, claims: Claims
) -> None:
    """Select the jobs to get GPUs and their sizes; set ``claims`` and which of ``scene.rows`` are admitted.

    A rigid job may have what is free, and what those that run would give down to their least sizes. So may a resizable
    one if no job ends soon, compared with the cost of stopping one; else it starts on what is free.
    """
    rows, count = scene.rows, 0
    free, total, spare, dearest = 0, 0, 0, 0.0
    known, cores, memory = np.empty(scene.menus.sizes.shape[1], np.int64), 0, 0
    for node in range(rules.lo, rules.hi):
        free += max(0, resources.gpus[node])
        if usable.gpus[node] >= 0:
            total += usable.gpus[node]
            cores += max(0, usable.cores[node])
            memory += max(0, usable.memory[node])
    has = (max(total, 1), max(cores, 1), max(memory, 1))
    # running jobs come first in the rows: `spare`, what they would give, must be known before a pending one is admitted
    for i in range(rows.size):
        if rows[i]["held"] == 0:
            break
        rows[i]["may"] = rows[i]["may"] and _gives_back_all(scene, usable, i)
        _claim(scene, claims, feasibility, i, count, known, rules.now, has)
        if rows[i]["may"]:
            dearest = max(dearest, rows[i]["cost_s"])
            spare += rows[i]["held"] - claims.sizes[count, 0]
        count += 1
    running, horizon_s = count, _horizon_s(rules)
    patient = _SOON * dearest < rules.soonest - rules.now < np.inf
    taken, rigid, others, blocked = 0, 0, 0, False
    for i in range(running, rows.size):
        row = rows[i]
        row["admitted"], row["least"] = 0, 0
        if not _claim(scene, claims, feasibility, i, count, known, rules.now, has):
            continue  # it could not run here now: it blocks no job
        least = claims.sizes[count, 0]
        row["least"] = least
        # shrinking others counts where no running job ends soon, and always for rigid jobs and for those to be resumed
        may_have = free + (spare if patient or row["rigid"] or row["resume"] else 0)
        others += 1
        blocked = blocked or (rules.blocks and taken + least > may_have)
        if blocked or taken + least > may_have:
            continue
        taken += least
        row["admitted"] = 1
        if row["rigid"]:
            rigid += least
        else:
            count += 1
            others -= 1
    number = claims.number
    number[COUNT], number[FREE], number[TOTAL], number[OTHERS] = count, free - rigid, total, others
    number[CAPACITY] = free - rigid  # rigid jobs start at their only size, so no claim may count on those GPUs
    for j in range(running):
        number[CAPACITY] += claims.jobs[j]["held"]
        _limit_changes(claims, j, rows[claims.jobs[j]["row"]]["may"], patient or taken > free, horizon_s, rules.gain)


@jit
def _horizon_s(rules: SizingRules) -> float:
    """Estimate how long a larger size will last, by the recent submission rate."""
    latest, known = np.full(_RECENT_SUBMISSIONS, -np.inf), min(rules.submits.size, _RECENT_SUBMISSIONS)
    for submit in rules.submits:
        if submit > latest[0]:
            at = 0
            while at + 1 < _RECENT_SUBMISSIONS and latest[at + 1] < submit:
                latest[at] = latest[at + 1]
                at += 1
            latest[at] = submit
    return float((rules.now - latest[_RECENT_SUBMISSIONS - known]) / known) if known > 0 else _DEFAULT_LEFT_S


@jit
def _gives_back_all(scene: Scene, usable: Resources, i: int) -> bool:
    """Return whether others could use what a running job has: its nodes available, no GPU blocked."""
    gpus = 0
    for at in range(scene.rows[i]["first"], scene.rows[i]["last"]):
        if usable.gpus[scene.parts[at]["node"]] < 0:
            return False
        gpus += scene.parts[at]["gpus"]
    return bool(gpus == scene.rows[i]["held"])


@jit
def _claim(
    scene: Scene, claims: Claims, feasibility: Ints, i: int, j: int, known: Ints, now: float, has: tuple[int, int, int]
) -> bool:
    """Fill claim ``j`` from row ``i`` with the sizes that it can have; return whether there are any.

    These are sizes that some of the nodes, empty, could give, and at which it started up if it had them. One that was
    stopped to go on at another size does not take more than that, where it can have as little. ``known``: work space,
    indices; ``has``: GPUs, cores and MiB of the partition.
    """
    row, job = scene.rows[i], claims.jobs[j]
    held, at, resume = row["held"], row["job"], row["resume"]
    reported, unusable = scene.reported[at], scene.unusable[at]
    menu, shapes = scene.menus.sizes[row["menu"]], scene.menus.shape[row["menu"]]
    sizes, shape, allowed = claims.sizes[j], claims.shape[j], claims.allowed[j]
    pace, is_reported, most = claims.pace[j], claims.reported[j], menu.size
    known_count, barred = 0, True
    for k in range(most):
        barred = barred and (menu[k] < 0 or unusable[k] != 0)
        if not np.isnan(reported[k]):
            known[known_count] = k
            known_count += 1
    count = 0
    # the second round runs only if the cap of a resumed job left it no size at all
    for capped in (True, False):
        for k in range(most if count == 0 else 0):
            gpus = menu[k]
            possible = shapes[k] >= 0 and feasibility[shapes[k]] == OK and (held == 0 or row["may"])
            possible = possible and (not unusable[k] or (barred and held == 0 and gpus == row["base"]))
            if gpus < 0 or not (gpus == held > 0 or possible) or (capped and 0 < resume < gpus):
                continue
            has_speed = not np.isnan(reported[k])
            sizes[count], shape[count], allowed[count], is_reported[count] = gpus, shapes[k], 1, has_speed
            pace[count] = reported[k] if has_speed else speed_at(menu, reported, known[:known_count], gpus)
            count += 1
    for k in range(count, most):
        sizes[k] = shape[k] = allowed[k] = is_reported[k] = 0
        pace[k] = 0.0
    job["row"], job["held"], job["count"], job["base"] = i, held, count, row["base"]
    job["restarts"], job["wished"], job["cores"], job["memory"] = row["restarts"], 0, 0, 0
    left = row["left_s"]
    if held == 0 or left == np.inf:
        left = min(_DEFAULT_LEFT_S, left)
    if held == 0 and known_count > 0 and not row["rigid"] and not np.isnan(row["work"]):
        left = row["work"] / speed_at(menu, reported, known[:known_count], menu[0])
    job["left_s"], job["age_s"], job["cost_s"] = max(1.0, left), max(0.0, now - row["submit"]), row["cost_s"]
    job["share"] = max(1.0 / has[0], row["cores"] / has[1], row["memory"] / has[2])
    return count > 0


@jit
def speed_at(sizes: Ints, speeds: Floats, known: Ints, gpus: int) -> float:
    """Return steps a second with so many GPUs, by a power law through the sizes where it is known.

    ``sizes``: ``int64[most]``, ascending; ``speeds``: ``float64[most]``, at these; ``known``: ``int64[n]``, the indices
    at which the speed is known.
    """
    if known.size == 0:
        return float(gpus**_SCALING)
    if known.size == 1:
        if sizes[known[0]] == gpus:
            return float(speeds[known[0]])
        return float(speeds[known[0]] * (gpus / sizes[known[0]]) ** _SCALING)
    above = 0
    while above < known.size - 1 and sizes[known[above]] <= gpus:
        above += 1
    low, high = known[max(0, above - 1)], known[max(1, above)]
    for k in (low, high):
        if sizes[k] == gpus:
            return float(speeds[k])
    slope = math.log(speeds[high] / speeds[low]) / math.log(sizes[high] / sizes[low])
    if sizes[low] < gpus < sizes[high]:
        return float(speeds[low] * (gpus / sizes[low]) ** slope)
    nearest = low if gpus < sizes[low] else high
    return float(speeds[nearest] * (gpus / sizes[nearest]) ** min(1.0, max(0.0, slope)))


@jit
def _limit_changes(claims: Claims, j: int, may: bool, shrinks: bool, horizon_s: float, gain: float) -> None:
    """Set the sizes a running job may move to: larger ones that pay, smaller ones if it may be stopped."""
    held = claims.jobs[j]["held"]
    for k in range(claims.jobs[j]["count"]):
        gpus = claims.sizes[j, k]
        changes = may and (shrinks if gpus < held else _pays(claims, j, k, horizon_s, gain))
        claims.allowed[j, k] = gpus == held or changes


@jit
def _pays(claims: Claims, j: int, k: int, horizon_s: float, gain: float) -> bool:
    """Return whether growing pays, by the job's own pace and cost, before it may have to shrink again."""
    job = claims.jobs[j]
    before, then = claims.pace[j, index_of(claims, j, job["held"])], claims.pace[j, k]
    part, lasts = 1.0, min(job["left_s"], horizon_s)
    if job["age_s"] + job["cost_s"] > 0.0:
        # Sia: what a job gets of its speed where it goes on stopping as often as it did so far.
        part = max(0.0, job["age_s"] - job["restarts"] * job["cost_s"]) / (job["age_s"] + job["cost_s"])
    return bool(then * part >= before * (1.0 + gain) and (then - before) * lasts > before * job["cost_s"])


@jit
def settle(
    scene: Scene, claims: Claims, resources: Resources, requests: Requests, masks: Flags, scratch: Scratch
) -> bool:
    """Carry out what is possible of the wishes, in ``wished``; return whether they are valid.

    A job shrinks only as far as another takes its GPUs, and only where all jobs that it shrinks for then
    fit. No job grows into GPUs that another only gives up now: that is for the next decision, when they are free.

    Returns:
        False, and nothing is done, where a size is not allowed, or all of them are more than the capacity.
    """
    if not _is_sound(claims):
        return False
    jobs, number = claims.jobs, claims.number
    for growing in (True, False):  # where not all of it has a place, at least what is for those that wait
        if not growing:
            for j in range(number[COUNT]):
                jobs[j]["wished"] = min(jobs[j]["wished"], jobs[j]["held"]) if jobs[j]["held"] else jobs[j]["wished"]
        _undo_needless_shrinks(claims)
        if not _any_shrinks(claims):
            _keep_growth_that_fits(scene, claims, resources, requests, masks, scratch)
            return True
        if _all_fit(scene, claims, resources, requests, masks, scratch):
            _defer_growth(claims)
            return True
    for j in range(number[COUNT]):
        if jobs[j]["held"] > 0:
            jobs[j]["wished"] = jobs[j]["held"]
    _keep_growth_that_fits(scene, claims, resources, requests, masks, scratch)
    return True


@jit
def _is_sound(claims: Claims) -> bool:
    """Return whether all wishes are allowed and within the capacity; 0 for a running job becomes its least size."""
    jobs, left = claims.jobs, claims.number[CAPACITY]
    for j in range(claims.number[COUNT]):
        sound = jobs[j]["wished"] == 0 and jobs[j]["held"] == 0
        for k in range(jobs[j]["count"]):
            if jobs[j]["wished"] == 0 and jobs[j]["held"] > 0 and claims.allowed[j, k]:
                jobs[j]["wished"] = claims.sizes[j, k]
            sound = sound or (claims.allowed[j, k] != 0 and claims.sizes[j, k] == jobs[j]["wished"])
        if not sound:
            return False
        left -= jobs[j]["wished"]
    return bool(left >= 0)


@jit
def _undo_needless_shrinks(claims: Claims) -> None:
    """Undo shrinking that no job benefits from, the largest first."""
    jobs, surplus = claims.jobs, claims.number[CAPACITY]
    for j in range(claims.number[COUNT]):
        surplus -= jobs[j]["wished"]
    while True:
        best, most = -1, 0
        for j in range(claims.number[COUNT]):
            gives = jobs[j]["held"] - jobs[j]["wished"] if jobs[j]["held"] > 0 else 0
            if most < gives <= surplus:
                best, most = j, gives
        if best < 0:
            return
        jobs[best]["wished"] = jobs[best]["held"]
        surplus -= most


@jit
def _any_shrinks(claims: Claims) -> bool:
    for j in range(claims.number[COUNT]):
        if claims.jobs[j]["wished"] < claims.jobs[j]["held"]:
            return True
    return False


@jit
def trial_copy(scratch: Scratch, resources: Resources) -> Resources:
    """Copy the resources into work space."""
    trial = scratch.future
    trial.gpus[:], trial.cores[:], trial.memory[:] = resources.gpus, resources.cores, resources.memory
    return trial


@jit
def _give_back(scene: Scene, first: int, last: int, trial: Resources, sign: int) -> None:
    """Give back these parts of a running job (1), or take them again (-1)."""
    for at in range(first, last):
        part = scene.parts[at]
        if trial.gpus[part["node"]] >= 0:
            trial.gpus[part["node"]] += sign * part["gpus"]
        trial.cores[part["node"]] += sign * part["cores"]
        trial.memory[part["node"]] += sign * part["memory"]


@jit
def _place(shape: int, requests: Requests, masks: Flags, trial: Resources, scratch: Scratch) -> bool:
    """Take the best fitting nodes for a request; return whether there were any."""
    request = request_of(requests, shape)
    if not choose(trial, masks, request, BEST_FIT, scratch):
        return False
    for part in range(request.parts):
        take(trial, request, scratch.chosen[part])
    return True


@jit
def _join(
    scene: Scene, claims: Claims, j: int, requests: Requests, masks: Flags, trial: Resources, scratch: Scratch
) -> bool:
    """Take nodes that a hot job does not have yet for the ranks that are to join; return whether there were enough."""
    found = joining(scene, claims, j, requests, masks, trial, scratch)
    for node in found:
        take(trial, request_of(requests, scene.rows[claims.jobs[j]["row"]]["rank_shape"]), node)
    return found.size > 0


@jit
def joining(
    scene: Scene, claims: Claims, j: int, requests: Requests, masks: Flags, resources: Resources, scratch: Scratch
) -> Ints:
    """Return the nodes on which the additional ranks of a hot job would join; none if some find no node."""
    job, row = claims.jobs[j], scene.rows[claims.jobs[j]["row"]]
    found = np.empty((job["wished"] - job["held"]) // row["rank_gpus"], np.int64)
    held = np.empty(row["last"] - row["first"], np.int64)
    for at in range(held.size):
        held[at] = scene.parts[row["first"] + at]["node"]
    request = request_of(requests, row["rank_shape"])
    return found[:0] if join_nodes(resources, masks, request, held, scratch.racks, found) < found.size else found


@jit
def _changed(
    scene: Scene, claims: Claims, j: int, requests: Requests, masks: Flags, trial: Resources, scratch: Scratch
) -> bool:
    """Place a job at its wished size, after `_let_go`; return whether it fitted."""
    row = scene.rows[claims.jobs[j]["row"]]
    if row["rank_gpus"] == 0 or claims.jobs[j]["held"] == 0:
        return bool(_place(_shape(claims, j), requests, masks, trial, scratch))
    shrinks = claims.jobs[j]["wished"] < claims.jobs[j]["held"]
    return bool(shrinks or _join(scene, claims, j, requests, masks, trial, scratch))


@jit
def _start(
    scene: Scene, claims: Claims, j: int, requests: Requests, masks: Flags, trial: Resources, scratch: Scratch
) -> None:
    """Place a job that is to start; a hot one, whose ranks need a node each, at a smaller size where that one fits."""
    job, wished = claims.jobs[j], claims.jobs[j]["wished"]
    if _place(_shape(claims, j), requests, masks, trial, scratch) or scene.rows[job["row"]]["rank_gpus"] == 0:
        return
    for k in range(index_of(claims, j, wished) - 1, -1, -1):
        job["wished"] = claims.sizes[j, k]
        if claims.allowed[j, k] and _place(_shape(claims, j), requests, masks, trial, scratch):
            return
    job["wished"] = wished  # it waits


@jit
def _let_go(scene: Scene, claims: Claims, j: int, trial: Resources, sign: int) -> None:
    """Give back what a changed job releases (1), or take it again (-1): all of it, or a hot job's last ranks."""
    job, row = claims.jobs[j], scene.rows[claims.jobs[j]["row"]]
    first, last = row["first"], row["last"]
    if row["rank_gpus"] > 0:
        first = min(last, first + job["wished"] // row["rank_gpus"])
    _give_back(scene, first, last, trial, sign)


@jit
def _shape(claims: Claims, j: int) -> int:
    """Return the index of a claim's request at its chosen size."""
    return int(claims.shape[j, index_of(claims, j, claims.jobs[j]["wished"])])


@jit
def _all_fit(
    scene: Scene, claims: Claims, resources: Resources, requests: Requests, masks: Flags, scratch: Scratch
) -> bool:
    """Return whether all jobs that change or start fit together."""
    trial, jobs, rows = trial_copy(scratch, resources), claims.jobs, scene.rows
    for j in range(claims.number[COUNT]):
        if jobs[j]["held"] > 0 and jobs[j]["wished"] != jobs[j]["held"]:
            _let_go(scene, claims, j, trial, 1)
    for j in range(claims.number[COUNT]):
        stays = jobs[j]["wished"] == jobs[j]["held"]  # also one that is to wait
        if not stays and not _changed(scene, claims, j, requests, masks, trial, scratch):
            return False
    for i in range(rows.size):
        rigid = rows[i]["held"] == 0 and rows[i]["rigid"] and rows[i]["admitted"]
        if rigid and not _place(scene.menus.shape[rows[i]["menu"], 0], requests, masks, trial, scratch):
            return False
    return True


@jit
def _keep_growth_that_fits(
    scene: Scene, claims: Claims, resources: Resources, requests: Requests, masks: Flags, scratch: Scratch
) -> None:
    """Keep growth that fits beside the starting jobs, one job after the other."""
    trial, jobs, rows = trial_copy(scratch, resources), claims.jobs, scene.rows
    for i in range(rows.size):
        if rows[i]["held"] == 0 and rows[i]["rigid"] and rows[i]["admitted"]:
            _place(scene.menus.shape[rows[i]["menu"], 0], requests, masks, trial, scratch)
    for j in range(claims.number[COUNT]):
        if jobs[j]["held"] == 0 and jobs[j]["wished"] > 0:
            _start(scene, claims, j, requests, masks, trial, scratch)
    for j in range(claims.number[COUNT]):
        if jobs[j]["wished"] > jobs[j]["held"] > 0:
            _let_go(scene, claims, j, trial, 1)
            if not _changed(scene, claims, j, requests, masks, trial, scratch):
                _let_go(scene, claims, j, trial, -1)
                jobs[j]["wished"] = jobs[j]["held"]


@jit
def _defer_growth(claims: Claims) -> None:
    """Defer growth into GPUs that others release until those are free."""
    jobs, room = claims.jobs, claims.number[FREE]
    for j in range(claims.number[COUNT]):
        room -= jobs[j]["wished"] if jobs[j]["held"] == 0 else 0
    for j in range(claims.number[COUNT]):
        more = jobs[j]["wished"] - jobs[j]["held"] if jobs[j]["held"] > 0 else 0
        if more > 0:
            if more <= room:
                room -= more
            else:
                jobs[j]["wished"] = jobs[j]["held"]
