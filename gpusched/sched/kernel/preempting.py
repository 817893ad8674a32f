"""The pass in which running jobs may be stopped: who keeps its nodes, who is given others, live and in replays.

Its queue has those that run beside those that wait. Nobody starts in it: who is given nodes may have to wait until
others have left them.
"""

from __future__ import annotations

from typing import NamedTuple

from gpusched.compiled import jit
from gpusched.sched.bounds import charge
from gpusched.sched.fit import request_of
from gpusched.sched.kernel.queue_pass import nothing_held, queue_pass
from gpusched.sched.reclaim import Holders, displaces, keeps
from gpusched.sched.state import PRIORITY, ClusterState, Flags, Ints, Resources

GIVEN = 101
"""In place of a code: it is given nodes that it does not have, on which others may still be."""


class Sharing(NamedTuple):
    """What is shared out, and who is given what.

    Attributes:
        whole, idle: What those before left of all that can be shared out, and of what nobody runs on.
        usable: The nodes as they are, empty of jobs.
        runs: ``uint8[jobs]``. first: ``int64[jobs]``: where a running job's nodes begin in ``holders.held``.
        holders: Those that run, in the queue's order, so many of them as ``through: int64[2]`` says: how many have been
            gone through, and all.
        rule: How jobs are placed.
        order: ``int64[jobs]``: who is given nodes, first to last; ``used[0]`` of them.
        nodes: ``int64[parts]``: theirs, of job j from ``offset[j]`` on (``int64[jobs]``); ``used[1]`` in all.
        cleared: ``uint8[jobs]``: whether others have to leave nodes that it is given.
    """

    whole: Resources
    idle: Resources
    usable: Resources
    runs: Flags
    first: Ints
    holders: Holders
    through: Ints
    rule: int
    order: Ints
    nodes: Ints
    offset: Ints
    used: Ints
    cleared: Flags


@jit
def _keeps(state: ClusterState, job: int, of: Sharing) -> bool:
    if not of.runs[job]:
        return False
    request = request_of(state.requests, state.jobs.shape[job])
    kept = keeps(of.whole, of.usable, request, of.holders.held, of.first[job])
    of.holders.kept[of.through[0]] = kept
    of.through[0] += 1
    return kept


@jit
def _place(state: ClusterState, job: int, late: bool, first: bool, of: Sharing) -> tuple[int, int]:
    jobs, scratch, shape = state.jobs, state.scratch, state.jobs.shape[job]
    request, idle = request_of(state.requests, shape), of.idle
    if not displaces(
        of.whole, idle, of.usable, jobs.masks, request, of.rule, scratch, of.holders, of.through[1], of.through[0]
    ):
        scratch.failed[shape] = scratch.stamp[0]
        return PRIORITY, shape
    of.order[of.used[0]], of.offset[job] = job, of.used[1]
    for part in range(request.parts):
        node = scratch.chosen[part]
        of.nodes[of.used[1] + part] = node
        if idle.gpus[node] < 0 or idle.cores[node] < 0 or idle.memory[node] < 0:
            of.cleared[job] = 1
    of.used[0] += 1
    of.used[1] += request.parts
    if not of.runs[job]:
        charge(jobs.links, jobs.room, jobs.account, job)
    return GIVEN, shape


preempting_pass = queue_pass(_place, nothing_held, keeps=_keeps)
