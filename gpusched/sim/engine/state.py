"""The engine's arrays, by name; a replay changes them in place.

What belongs to one job, shape or node lies together in a record array: a compiled call pays for every array
argument (numba passes seven words for each), and an event touches one job's fields at a time. With one array per field
the same loop ran at a third of the speed and took three times as long to compile.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gpusched.compiled import jit
from gpusched.sched.heaps import Heap, new_heap
from gpusched.sched.state import (
    Floats,
    Ints,
    PlacementRequest,
    QueueJobs,
    Records,
    Releases,
    Requests,
    Resources,
    Scratch,
    Words,
    copied,
    filled,
)
from gpusched.sched.topology.load import Load
from gpusched.sched.topology.slowdown import SlowdownModel
from gpusched.sched.topology.tree import LinkUse, NetworkTree
from gpusched.sim.engine.ledger import SimLedger
from gpusched.sim.engine.nodeindex import NodeIndex

FUTURE, DEPENDENT, WAITING, RUNNING, DONE, NEVER = range(6)
OVER, DECIDE, GROW = range(3)
# Events at times known in advance. NODE_RESERVED: a reservation of the node begins, or ends.
# JOB_ELIGIBLE: the job may start from now on, unless it waits for another. JOB_SETTLES: it has waited for better nodes
# long enough; the policy knows its request then.
NODE_BACK, NODE_GONE, NODE_DRAINED, NODE_RESERVED, JOB_ELIGIBLE, JOB_SETTLES = range(6)

# positions in Sim.counter
ARRIVED, CHANGED, MOVED, LOGGED, IN_SYSTEM, DECISIONS, CUTS, CUT_PARTS, READY, ENDED, RUNS, PARTS = range(12)
UNMEASURED, COUNTERS = 12, 13

_I8, _F8 = np.int64, np.float64

# arrival: when it joins the queue. submit: since when it waits. duration: how long it holds its nodes, seconds.
# expected: the run time that ordering and backfill assume, finite. overlong: its limit kills it (duration is the limit
# then). shape: -1: never runs. rank: place in the static order. child, child_begun, child_stop: ranges in
# `Sim.children` of the jobs that wait for its end, and then for its start. offset: of its nodes in `Sim.held`.
JOB = np.dtype(
    [(name, _F8) for name in ("arrival", "submit", "duration", "expected")]
    + [(name, _I8) for name in ("overlong", "shape", "rank", "user", "child", "child_begun", "child_stop", "offset")]
)
# first, start, end: first start, last start, end, NaN: not yet. due: when it will end; until: its latest end, as
# backfill assumes. left: work left at its start. needs: how many jobs it still waits for.
STATE = np.dtype(
    [("status", _I8), ("needs", _I8), ("restarts", _I8)]
    + [(name, _F8) for name in ("first", "start", "end", "due", "until", "left")]
)
# A `PlacementRequest`, the partition that it queues in, and by how much each of its GPUs counts for usage: 1, or where
# jobs have slices or shares of GPUs the parts that it is of one (`build.usage_scale`).
SHAPE = np.dtype([(name, _I8) for name in (*Requests._fields[:-2], "queue", "weight")])
# free: GPUs not held, available or not. total: GPUs it has. queue: partition.
NODE = np.dtype([("free", _I8), ("up", _I8), ("total", _I8), ("queue", _I8)])
# A running job's speed: ``rate`` from ``since`` on, when `STATE.left` of its work remained. had: seconds it had run by
# then. limit: seconds it may run in all. late: that will kill it before it is done. row: in `Pace.speed`, -1: without
# figures, at its ``own`` speed, 1 at its recorded size. share: by which the figures change with its cores and MiB.
# next: the next job on the GPU of which it has a part; mate: the job it shares all its GPUs with, split: the one with
# which they count half for usage; or -1.
RUN = np.dtype(
    [(name, _F8) for name in ("rate", "since", "had", "limit", "own", "share")]
    + [(name, _I8) for name in ("late", "row", "next", "mate", "split")]
)
CHANGE = np.dtype([("time", _F8), ("kind", _I8), ("subject", _I8)])  # a node, or a job
EVENT = np.dtype([("time", _F8), ("kind", np.int32), ("subject", np.int32)])
CUT = np.dtype([("job", _I8), ("start", _F8), ("end", _F8), ("stop", _I8), ("gpus", _I8)])


class SizeClasses(NamedTuple):
    """Resizable jobs at each of their sizes.

    Attributes:
        of: ``int64[jobs, most]``: the class (`PlacingState.classes`) at a column of the job's menu; -1: none.
        kind, gpus, best: Of each class, as in `Load.jobs`.
        own: ``int64[jobs]``: the class of a request that is the job's own at all sizes; -1: none. Empty: none at all.
    """

    of: Ints
    kind: Ints
    gpus: Ints
    best: Floats
    own: Ints


class Links(NamedTuple):
    """What running jobs share besides GPUs.

    Attributes:
        use, needs: Work space, the links of one job. found: ``int64[jobs]``: work space, its neighbours.
        sizes: Where jobs change size; else None.
    """

    tree: NetworkTree
    model: SlowdownModel
    load: Load
    use: LinkUse
    needs: Floats
    found: Ints
    sizes: SizeClasses | None = None


class Paired(NamedTuple):
    """Which pairs of jobs may share GPUs.

    Attributes:
        lost: ``float64[kinds, rows, rows]``: `kernel.beside.Pairings.cost`.
        row: ``int64[jobs]``: row of ``lost``; -1: the job shares no whole GPUs.
        equal: Whether both must have equally many.
        parted: ``int64[1]``: 1: a pair has ended since the last decision.
    """

    lost: Floats
    row: Ints
    equal: bool
    parted: Ints


class Ranks(NamedTuple):
    """Hot jobs, which go on without ranks that they lose.

    Attributes:
        fewest: ``int64[jobs]``: with how many ranks a job goes on; 0: it is not hot.
        shape, row: ``int64[jobs, most]``: its request and row of speeds with n ranks, at n - 1; -1: it has no such.
        own: ``float64[jobs, most]``: its own speed then, where it has no row.
        pause_s: ``float64[jobs]``: for how long it makes no step. ends: ``float64[jobs]``: when its time limit ends.
        losses: ``int64[jobs]``: ranks lost so far.
    """

    fewest: Ints
    shape: Ints
    row: Ints
    own: Floats
    pause_s: Floats
    ends: Floats
    losses: Ints


class Pace(NamedTuple):
    """Job speeds, and shared GPUs.

    Attributes:
        runs: ``RUN[jobs]``.
        speed: ``float64[kinds, rows, rows + 1]``: of a row of jobs on a GPU type, alone (0) and beside a job of row r
            (r + 1; NaN: not measured); 1: as recorded.
        kind: ``int64[nodes]``: GPU type.
        on: ``int64[GPUs]``: the first of the jobs that have parts of a GPU, -1: none has; empty where none ever has.
    """

    runs: Records
    speed: Floats
    kind: Ints
    on: Ints


class Sim(NamedTuple):
    """A replay's inputs and current state.

    Attributes:
        jobs: ``JOB[jobs]``. shapes: ``SHAPE[shapes]``. changes: ``CHANGE[n]`` in order of time. Never changed.
        state: ``STATE[jobs]``. node: ``NODE[nodes]``.
        clock: ``float64[3]``: now; when the policy must be asked at the latest (infinite: never); usage half-life.
        counter: ``int64[COUNTERS]``. MOVED: what happened to nodes at this instant.
        held: ``int64[parts]``: the nodes of job j from ``jobs[j]["offset"]`` on; -1: never ran.
        children: ``int64[...]``: dependent jobs; see `JOB`.
        resources: Free now; -1 GPUs where not available.
        ends: Running jobs by due time. by_free: See `NodeIndex`.
        ready: ``int64[jobs]``: jobs that came to wait at this instant; ``counter[READY]`` of them.
        ended: ``int64[...]``: jobs that stopped running, or lost a rank, at this instant; ``counter[ENDED]`` of them.
        dirty: ``int64[queues]``: partitions in which something happened.
        chosen: ``int64[nodes]``: the same array as ``Scratch.chosen``.
        pace: None where every job runs its recorded duration on GPUs of its own: then nothing of it is compiled.
        ledger: None where there are no limits of users, groups, classes or arrays, likewise.
        links: None where placement and neighbours cost nothing. pairs: Which two jobs may take the same GPUs; None:
            none. ranks: Of policies that resize jobs. All three likewise, and only with ``pace``.
    """

    jobs: Records
    shapes: Records
    changes: Records
    state: Records
    node: Records
    clock: Floats
    counter: Ints
    held: Ints
    children: Ints
    resources: Resources
    ends: Heap
    by_free: NodeIndex
    ready: Ints
    ended: Ints
    dirty: Ints
    chosen: Ints
    pace: Pace | None
    ledger: SimLedger | None = None
    links: Links | None = None
    pairs: Paired | None = None
    ranks: Ranks | None = None


class EventLog(NamedTuple):
    """The event log and interrupted runs, with spare rows; `Sim.counter` has the lengths used.

    Attributes:
        events: ``EVENT[...]``. cuts: ``CUT[...]``; ``stop``: where the run's nodes end in ``cut_nodes``; ``gpus``: on
            each of them.
    """

    events: Records
    cuts: Records
    cut_nodes: Ints


class Passes(NamedTuple):
    """What the passes of ``gpusched.sched`` need besides `Resources`.

    Attributes:
        total, usable: The pool empty: as declared; without nodes that are not available.
    """

    requests: Requests
    jobs: QueueJobs
    releases: Releases
    scratch: Scratch
    rng: Words
    total: Resources
    usable: Resources


@jit
def shape_request(shapes: Records, shape: int) -> PlacementRequest:
    """Return the request with index ``shape``."""
    of = shapes[shape]
    return PlacementRequest(
        of["lo"], of["hi"], of["parts"], of["gpus"], of["cores"], of["memory"], of["mask"], of["spread"], None
    )


def shapes_of(requests: Requests, queue: Ints, weight: Ints | int = 1) -> Records:
    """Return the requests as ``SHAPE[shapes]``; ``queue``, ``weight``: ``int64[shapes]``, see there."""
    columns = {name: c for name, c in requests._asdict().items() if name in (SHAPE.names or ()) and c is not None}
    return filled(SHAPE, len(queue), **columns, queue=queue, weight=weight)


def new_sim(
    jobs: Records, shapes: Records, node: Records, resources: Resources, *, parts: Ints, needs: Ints,
    children: Ints, changes: Records, partitions: int, runs: int, half_life_s: float, scratch: Scratch,
    by_free: NodeIndex, ledger: SimLedger | None = None,
) -> Sim:  # fmt: skip
    """Return the state before the first event, at recorded speeds; see `Sim`.

    ``parts: int64[jobs]``: the most nodes that each job may have; ``needs: int64[jobs]``: how many others it waits for;
    ``runs``: how many jobs may run at once.
    """
    jobs["offset"] = np.cumsum(parts) - parts
    return Sim(
        jobs=jobs,
        shapes=shapes,
        changes=changes,
        state=filled(STATE, len(jobs), first=np.nan, start=np.nan, end=np.nan, left=jobs["duration"], needs=needs),
        node=node,
        clock=np.array([-np.inf, np.inf, half_life_s]),
        counter=np.zeros(COUNTERS, np.int64),
        held=np.full(int(parts.sum()), -1, np.int64),
        children=children,
        resources=copied(resources),
        ends=new_heap(runs + 1),
        by_free=by_free,
        ready=np.zeros(len(jobs) + 1, np.int64),
        ended=np.zeros(2 * runs + 2, np.int64),
        dirty=np.zeros(partitions, np.int64),
        chosen=scratch.chosen,
        pace=None,
        ledger=ledger,
    )


def new_log(events: int, cuts: int, parts: int) -> EventLog:
    """Return an empty log with rows for that many events, interrupted runs, and parts of such runs."""
    return EventLog(np.zeros(events, EVENT), np.zeros(cuts, CUT), np.zeros(parts, np.int64))


def grown(log: EventLog, sim: Sim) -> EventLog:
    """Return a copy of the log with more rows."""
    cuts, parts = 2 * len(log.cuts) + len(sim.jobs), 2 * len(log.cut_nodes) + len(sim.held)
    more = new_log(2 * len(log.events), cuts, parts)
    for new, old in zip(more, log, strict=True):
        new[: len(old)] = old
    return more
