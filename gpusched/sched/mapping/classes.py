"""Reductions that keep the program small: similar jobs, similar nodes, and the ways to fill one node.

A way to fill a node (a pattern, Gilmore and Gomory 1961) says how many parts of each shape it takes, so whole nodes
are counted, and cores, memory and what is left over are exact without a variable for every job and node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gpusched.sched.mapping.problem import Problem, node_cost

MAX_PATTERNS = 6000


class TooManyPatterns(ValueError):
    """There are more ways to fill the nodes than can be examined; the message is one line."""


class PartShape(NamedTuple):
    """What a part takes of a node, and what must be kept apart: masks, lateness, multi-node gangs, the kind."""

    need: tuple[int, int, int]
    mask: int
    late: bool
    parts: int
    kind: int  # below 0: nodes of several kinds: their bits are set in -kind


class JobClass(NamedTuple):
    """Jobs that differ only in their place in the order, first to last."""

    jobs: list[int]
    part: tuple[tuple[int, int, int], int, bool, int]  # need, mask, late, parts
    kinds: list[int]
    user: int  # -1: a user whose cap cannot bind


class NodeClass(NamedTuple):
    """Nodes that offer the same resources to the same jobs."""

    nodes: list[int]
    resources: tuple[int, int, int]
    late_resources: tuple[int, int, int]
    total: int
    kind: int
    allows: tuple[bool, ...]


class Pattern(NamedTuple):
    """One way to fill a node of a class: the number of parts by shape, and its cost."""

    node_class: int
    counts: dict[int, int]
    cost: float


def simplified(problem: Problem) -> Problem:
    """Drop cores, or memory, where every node runs out of GPUs first."""
    resources, need, late_resources = problem.resources.copy(), problem.need.copy(), problem.late_resources.copy()
    usable = resources[:, 0] >= 0
    gpuless = need[:, 0] == 0
    for column in (1, 2):
        if need[gpuless, column].any():
            continue
        most = (need[~gpuless, column] / need[~gpuless, 0]).max(initial=0.0)
        if all((has[usable, column] >= most * has[usable, 0]).all() for has in (resources, late_resources)):
            need[:, column] = resources[:, column] = late_resources[:, column] = 0
    return replace(problem, resources=resources, need=need, late_resources=late_resources)


def job_classes(problem: Problem) -> list[JobClass]:
    """Group the jobs that could start at all into classes, ordered by their first job."""
    asked = np.bincount(problem.user, problem.parts * problem.need[:, 0], len(problem.cap))
    binding = set(np.flatnonzero(asked > problem.cap).tolist())  # users whose jobs together ask for more than the cap
    found: dict[tuple[object, ...], JobClass] = {}
    for job in range(len(problem)):
        if np.isnan(problem.gain[job]).all():
            continue
        part = (tuple(problem.need[job].tolist()), int(problem.mask[job]), bool(problem.late[job]))
        user = int(problem.user[job]) if int(problem.user[job]) in binding else -1
        key = (part, int(problem.parts[job]), user, problem.gain[job].tobytes())
        if key not in found:
            kinds = np.flatnonzero(~np.isnan(problem.gain[job])).tolist()
            if problem.mixes(job):
                kinds = [-sum(1 << kind for kind in kinds)]
            found[key] = JobClass([], (*part, int(problem.parts[job])), kinds, user)
        found[key].jobs.append(job)
    return list(found.values())


def node_classes(problem: Problem) -> list[NodeClass]:
    """Group the nodes with free resources into classes."""
    found: dict[tuple[object, ...], NodeClass] = {}
    resources, late = problem.resources.tolist(), problem.late_resources.tolist()
    for node in np.flatnonzero(problem.resources[:, 0] >= 0).tolist():
        allows = tuple(problem.allowed[:, node].tolist())
        key = (tuple(resources[node]), tuple(late[node]), int(problem.total[node]), int(problem.kind[node]), allows)
        if key not in found:
            found[key] = NodeClass([], *key)
        found[key].nodes.append(node)
    return list(found.values())


def shapes_of(classes: list[JobClass]) -> dict[PartShape, int]:
    """Return the distinct shapes and how many jobs have each."""
    found: dict[PartShape, int] = {}
    for job_class in classes:
        for kind in job_class.kinds:
            shape = PartShape(*job_class.part, kind)
            found[shape] = found.get(shape, 0) + len(job_class.jobs)
    return found


def patterns_of(problem: Problem, nodes: list[NodeClass], shapes: dict[PartShape, int]) -> list[Pattern]:
    """Return every non-empty way to fill each node class; see `check_ways`."""
    return [
        Pattern(index, counts, node_cost(problem, node.resources[0], node.total, gpus))
        for index, node in enumerate(nodes)
        for counts, gpus in _fillings(node, _fitting(node, shapes))
    ]


def check_ways(nodes: list[NodeClass], shapes: dict[PartShape, int], most: int) -> None:
    """Count the patterns without generating them.

    Raises:
        TooManyPatterns: More than ``most``.
    """
    ways = 0
    for node in nodes:
        ways += _count(node, _fitting(node, shapes), most - ways)
        if ways > most:
            raise TooManyPatterns(f"more than {most} ways to fill the nodes")


_Fitting = list[tuple[int, tuple[int, int, int], bool, int]]


def _fitting(node: NodeClass, shapes: dict[PartShape, int]) -> _Fitting:
    """Return (shape, need, late, maximum count) of the shapes that fit the node alone."""
    return [
        (i, s.need, s.late, jobs)
        for i, (s, jobs) in enumerate(shapes.items())
        if (s.kind == node.kind or (s.kind < 0 and -s.kind >> node.kind & 1))
        and (s.mask < 0 or node.allows[s.mask])
        and _covers(node.resources, s.need)
    ]


def _count(node: NodeClass, fitting: _Fitting, most: int) -> int:
    """Count the `_fillings` by what is left rather than one by one; approximate if more than ``most``."""
    states = {(node.resources, node.late_resources): 1}
    for _, need, late, fit_count in fitting:
        reached: dict[tuple[tuple[int, int, int], tuple[int, int, int]], int] = {}
        for (resources, late_resources), ways in states.items():
            left, late_left = resources, late_resources
            reached[left, late_left] = reached.get((left, late_left), 0) + ways
            for _ in range(fit_count):
                if not _covers(left, need) or (late and not _covers(late_left, need)):
                    break
                left = _less(left, need)
                late_left = _less(late_left, need) if late else late_left
                reached[left, late_left] = reached.get((left, late_left), 0) + ways
        states = reached
        if sum(states.values()) - 1 > most:
            break
    return sum(states.values()) - 1


def _fillings(node: NodeClass, fitting: _Fitting) -> Iterator[tuple[dict[int, int], int]]:
    """Return (parts by shape, GPUs taken), without the empty filling."""

    def fill(
        at: int, resources: tuple[int, int, int], late: tuple[int, int, int], counts: dict[int, int]
    ) -> Iterator[tuple[dict[int, int], int]]:
        if at == len(fitting):
            if counts:
                yield dict(counts), node.resources[0] - resources[0]
            return
        index, need, is_late, most = fitting[at]
        for count in range(most + 1):
            if count:
                if not _covers(resources, need) or (is_late and not _covers(late, need)):
                    break
                resources = _less(resources, need)
                late = _less(late, need) if is_late else late
                counts[index] = count
            yield from fill(at + 1, resources, late, counts)
        counts.pop(index, None)

    return fill(0, node.resources, node.late_resources, {})


def _covers(has: tuple[int, int, int], need: tuple[int, int, int]) -> bool:
    return has[0] >= need[0] and has[1] >= need[1] and has[2] >= need[2]


def _less(has: tuple[int, int, int], need: tuple[int, int, int]) -> tuple[int, int, int]:
    return has[0] - need[0], has[1] - need[1], has[2] - need[2]
