"""The named arrays that the compiled passes work on; all state is explicit and changed in place.

Every integer is an int64 and every time a float64 of seconds, so that each pass is compiled once. Nodes of one
partition are neighbours: a request names its partition as the rows ``lo <= node < hi``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gpusched.compiled.arrays import Flags as Flags
from gpusched.compiled.arrays import Floats as Floats
from gpusched.compiled.arrays import Ints as Ints
from gpusched.compiled.arrays import Records as Records
from gpusched.compiled.arrays import Words as Words
from gpusched.compiled.arrays import filled as filled

# RANDOM: in replays; FASTEST, MILP: see `mapping`
FIRST_FIT, BEST_FIT, SPREAD, NAIVE, RANDOM, FASTEST, MILP, RACK = range(8)
NONE, SKIP, EASY, CONSERVATIVE = range(4)
# What a policy's file may name, and what it means to the passes.
PLACES = {"first-fit": FIRST_FIT, "best-fit": BEST_FIT, "spread": SPREAD, "naive": NAIVE}
PLACES |= {"rack": RACK, "rack-wait": RACK}  # that a job waits for its rack is in its requests
PLACES |= {"contention": RACK}  # where nothing was learned; else see `topology.queue`
BACKFILLS = {"none": NONE, "skip": SKIP, "easy": EASY, "conservative": CONSERVATIVE}

# A bound that a job counts for. bound: index into `QueueJobs.room`. unit: 0: the job takes 1 of it, else that column of
# its account says. next: row of the next, or -1.
LINK = np.dtype([("bound", np.int64), ("unit", np.int64), ("next", np.int64)])

# What a pass says of a job; 0 .. 2 also say how a request stands towards the whole partition.
OK, BAD_CONSTRAINTS, NOT_AVAILABLE, LIMIT, RESOURCES, PRIORITY, BACKFILL, POLICY, MAPPING, RESERVED = range(10)
STARTED = OK


WHOLE = 1000  # thousandths of a GPU


class SharedGpus(NamedTuple):
    """GPUs of which jobs hold parts, in thousandths.

    Attributes:
        room: ``int64[GPUs]``: what is left of each; WHOLE: no job has a part of it, it is free or a job's own.
        first: ``int64[nodes + 1]``: each node's first one.
        milli: ``int64[jobs]``: what a job has of its one GPU; WHOLE: GPUs of its own. on: ``int64[jobs]``: the GPU of
            which a running job has a part, or -1. Both are those of all copies.
    """

    room: Ints
    first: Ints
    milli: Ints
    on: Ints


class Resources(NamedTuple):
    """The resources of nodes: ``int64[nodes]`` each. A node that is not available has -1 GPUs and fits nothing.

    Attributes:
        gpus: Whole GPUs, at most 2047.
        cores: Cores, less than 2**20; may be negative where running jobs hold more than there is.
        memory: MiB, less than 2**32; may be negative like ``cores``.
        shared: What is left of GPUs that are not in ``gpus`` any more. None: jobs hold whole ones only, and nothing
            that looks at parts is compiled.
    """

    gpus: Ints
    cores: Ints
    memory: Ints
    shared: SharedGpus | None = None

    @property
    def columns(self) -> tuple[Ints, Ints, Ints]:
        """Return GPUs, cores and memory."""
        return self.gpus, self.cores, self.memory


class PlacementRequest(NamedTuple):
    """What one job asks for: ``parts`` distinct nodes of rows ``lo <= node < hi``, each giving the same.

    ``mask`` is a row of the masks (``uint8[masks, nodes]``, 1: allowed), or -1 where any node will do. ``spread``: 1:
    all nodes in one rack, 0: anywhere. ``milli``: of a single GPU so many thousandths; WHOLE, or None where no GPUs are
    shared: all of it.
    """

    lo: int
    hi: int
    parts: int
    gpus: int
    cores: int
    memory: int
    mask: int
    spread: int = 0
    milli: int | None = None


class Requests(NamedTuple):
    """Distinct requests ("shapes"), one `PlacementRequest` per index: ``int64[shapes]`` each.

    ``looser``: the request that a job tries next where this one does not fit, of a lower index; -1: none. Where no
    request has any, none is bound to one rack, and no GPUs are shared, the last three are None, and nothing of it is
    compiled: each array that passes hand on costs a replay some percent.
    """

    lo: Ints
    hi: Ints
    parts: Ints
    gpus: Ints
    cores: Ints
    memory: Ints
    mask: Ints
    spread: Ints | None
    looser: Ints | None
    milli: Ints | None = None


class QueueJobs(NamedTuple):
    """The queue's jobs.

    In replays without limits ``account``, ``room`` and ``links`` are None, and nothing of them is compiled.

    Attributes:
        shape: ``int64[jobs]``: index into `Requests`: of what the job would rather have than any looser one.
        limit: ``float64[jobs]``: time limit in seconds.
        account: ``int64[jobs, 3]``: the first of the bounds that it counts for (index into ``links``), or -1; its GPUs;
            GPU seconds that it may use in seven days.
        room: ``int64[bounds]``: what is left of each: of jobs, GPUs or GPU seconds; counted down in place.
        feasibility: ``int64[shapes]``: OK, BAD_CONSTRAINTS or NOT_AVAILABLE (see `fit.set_feasibility`).
        masks: ``uint8[masks, nodes]``.
        links: ``LINK[links]``: chains of bounds, one for all jobs that count for the same ones alike; see `bounds`.
    """

    shape: Ints
    limit: Floats
    account: Ints
    room: Ints
    feasibility: Ints
    masks: Flags
    links: Records = None  # type: ignore[assignment]


class Releases(NamedTuple):
    """What running jobs will give back, one slot per (job, node).

    Attributes:
        end: ``float64[slots]``: when, at the latest (seconds, the clock of ``now``).
        node, gpus, cores, memory, owner: ``int64[slots]``: where, what, and the job it is of.
        order: ``int64[slots]``: a permutation: the used slots, then the unused ones.
        used: ``int64[2]``: used slots; how many of them, from the first, are known to be in order of ``end``.
    """

    end: Floats
    node: Ints
    gpus: Ints
    cores: Ints
    memory: Ints
    owner: Ints
    order: Ints
    used: Ints


class Calendar(NamedTuple):
    """The reservations of nodes, one entry per (reservation, node), by begin; see `reservations.calendar`.

    Attributes:
        node, number: ``int64[entries]``: row of the node, and the reservation's number.
        begin, end: ``float64[entries]``: seconds, the clock of ``now``.
        by_end: ``int64[entries]``: the entries in order of their ends.
        base: ``int64[masks]``: the row that says what jobs of a row may use if nothing is reserved for others.
        own: ``int64[masks]``: the reservation that they are of; -1: none.
        limit: ``float64[masks]``: how long they may run, seconds.
        turns: ``float64[masks]``: when a row changes next (`calendar.turn_due`).
        closed: ``int64[nodes]``: work space.
        usable: The nodes as they are, empty of jobs.
        kept, kept_for, kept_times: ``int64[nodes]``, ``int64[2]``, ``float64[2]``: in a pass, the nodes kept for the
            first that waits for the end of a reservation; that job, and how many these are; from when (infinite: none
            are) to when, seconds; see `keeping`.
        work: The row of the masks that is for looking ahead.
    """

    node: Ints
    number: Ints
    begin: Floats
    end: Floats
    by_end: Ints
    base: Ints
    own: Ints
    limit: Floats
    turns: Floats
    closed: Ints
    usable: Resources
    kept: Ints
    kept_for: Ints
    kept_times: Floats
    work: int


class BackfillPlan(NamedTuple):
    """Planned times and nodes of pending jobs under conservative backfill; see `kernel.plan`.

    Attributes:
        points: ``POINT[points]``; those of a node are a list in order of time, which begins with the node's row.
        nodes: ``PLANNED_NODE[nodes]``. shapes: ``PLANNED_SHAPE[shapes]``.
        follows: ``int64[entries]``: the next entry of the calendar for the same node; -1: none.
        used: ``int64[2]``: points; the pass in which it was begun.
    """

    points: Records
    nodes: Records
    shapes: Records
    follows: Ints
    used: Ints


class Scratch(NamedTuple):
    """Work space, kept between passes.

    Attributes:
        chosen, keys: ``int64[nodes]``: the nodes picked by the last `place.choose` or `place.draw`, and their keys.
        future: Resources at the shadow time.
        spare: What of ``future`` the head leaves on its reserved nodes (elsewhere `UNLIMITED`).
        late: ``min(free now, spare)``: what a job may take that ends after the shadow time.
        failed, failed_late: ``int64[shapes]``: the last pass (``stamp``) in which the shape did not fit; within a pass
            free resources only shrink, so it will not fit later in it either.
        stamp: ``int64[1]``: number of the pass.
        racks: ``RACK_ROOM[nodes]``, see there. None: all nodes are in one, and nothing that looks at racks is compiled.
        calendar: When nodes are reserved. None: never, and nothing that looks at that is compiled.
        plan: Work space of conservative backfill. None: no policy backfills so, and nothing of it is compiled.
    """

    chosen: Ints
    keys: Ints
    future: Resources
    spare: Resources
    late: Resources
    failed: Ints
    failed_late: Ints
    stamp: Ints
    racks: Records | None
    calendar: Calendar | None
    plan: BackfillPlan | None


class PassOutcome(NamedTuple):
    """What the passes decided; later passes append.

    Attributes:
        code: ``int64[jobs]``: STARTED, or why not.
        started: ``int64[jobs]``: started jobs, in order; ``total[0]`` of them.
        nodes: ``int64[parts]``: their nodes; those of job j begin at ``offset[j]``; ``total[1]`` in all.
        offset: ``int64[jobs]``.
        total: ``int64[2]``: started jobs, and their parts.
        shape: ``int64[jobs]``: the request that a started job was given: its own, or a looser one.
    """

    code: Ints
    started: Ints
    nodes: Ints
    offset: Ints
    total: Ints
    shape: Ints


class ClusterState(NamedTuple):
    """What a pass reads and changes: nodes, running jobs, pending jobs, work space, answers.

    ``now``: seconds, the clock of ``releases``.
    """

    resources: Resources
    releases: Releases
    requests: Requests
    jobs: QueueJobs
    scratch: Scratch
    outcome: PassOutcome
    now: float


UNLIMITED = 1 << 40
# number: the node's rack, one of the rows. fits, free: of the rack with the row's number, while nodes are chosen: how
# many of its nodes fit, and the GPUs that all of them have free.
RACK_ROOM = np.dtype([("number", np.int64), ("fits", np.int64), ("free", np.int64)])
# What a node has free from a time on, until that of the next point (-1: for ever).
POINT = np.dtype([("time", np.float64)] + [(name, np.int64) for name in ("gpus", "cores", "memory", "next")])
# last: its last point. entry: its first one in the calendar, or -1. begin: since when it could hold the job that is
# looked at. nearest: the soonest of these of all nodes, as many as the job has parts.
PLANNED_NODE = np.dtype([(n, np.int64) for n in ("last", "entry")] + [(n, np.float64) for n in ("begin", "nearest")])
# In the pass ``stamp`` a job with this request that lasts ``at_least`` (seconds) begins at ``not_before``.
PLANNED_SHAPE = np.dtype([("stamp", np.int64), ("not_before", np.float64), ("at_least", np.float64)])


def ints(values: Sequence[int]) -> Ints:
    """Return ``int64[values]``."""
    return np.array(values, dtype=np.int64)


def new_resources(nodes: int) -> Resources:
    """Return resources of ``nodes`` nodes, all empty."""
    return resources_of(np.zeros((3, nodes), np.int64))


def resources_of(columns: Iterable[Ints]) -> Resources:
    """Return resources of these GPUs, cores and memory, none of them shared."""
    gpus, cores, memory = columns
    return Resources(gpus, cores, memory)


def copied(resources: Resources) -> Resources:
    """Return a deep copy."""
    shared = resources.shared
    whole = resources_of(column.copy() for column in resources.columns)
    return whole._replace(shared=shared and shared._replace(room=shared.room.copy()))


def new_shared_gpus(gpus: Ints, milli: Ints) -> SharedGpus:
    """Return GPUs that no jobs share yet; ``gpus: int64[nodes]``, ``milli: int64[jobs]``: see there."""
    first: Ints = np.concatenate(([0], np.cumsum(gpus)))
    return SharedGpus(np.full(int(first[-1]), WHOLE), first, milli, np.full(len(milli), -1))


def with_shared(scratch: Scratch, resources: Resources) -> Scratch:
    """Return work space for nodes that share GPUs, if these do; late jobs find parts where others do."""
    future, spare = (of._replace(shared=copied(resources).shared) for of in (scratch.future, scratch.spare))
    return scratch._replace(future=future, spare=spare, late=scratch.late._replace(shared=resources.shared))


def new_releases(slots: int) -> Releases:
    """Return empty releases with ``slots`` slots."""
    node, gpus, cores, memory, owner = (np.zeros(slots, np.int64) for _ in range(5))
    order = np.arange(slots, dtype=np.int64)
    return Releases(np.zeros(slots), node, gpus, cores, memory, owner, order, np.zeros(2, np.int64))


def new_scratch(
    nodes: int, shapes: int, rack: Ints | None = None, calendar: Calendar | None = None, planned: int | None = None
) -> Scratch:
    """Allocate work space for so many nodes and requests; ``rack: int64[nodes]``: their racks, None: all in one.

    ``planned``: how often a part of a job may begin or end in a plan (None: there is none). With racks there are a
    calendar and a plan, too, if empty ones: every pass is compiled with all three, or without racks.
    """
    chosen, keys = (np.zeros(nodes, np.int64) for _ in range(2))
    future, spare, late = (new_resources(nodes) for _ in range(3))
    failed, failed_late = (np.zeros(shapes, np.int64) for _ in range(2))
    calendar = no_calendar() if rack is not None and calendar is None else calendar
    planned = 0 if rack is not None and planned is None else planned
    entries = 0 if calendar is None else len(calendar.node)
    return Scratch(
        chosen, keys, future, spare, late, failed, failed_late, stamp=np.zeros(1, np.int64),
        racks=None if rack is None else filled(RACK_ROOM, nodes, number=rack),
        calendar=calendar,
        plan=None if planned is None else new_plan(nodes, shapes, entries, planned),
    )  # fmt: skip


def new_plan(nodes: int, shapes: int, entries: int, changes: int) -> BackfillPlan:
    """Allocate a plan for so many changes of free resources, and a calendar of so many entries."""
    return BackfillPlan(
        np.zeros(nodes + changes, POINT), np.zeros(nodes, PLANNED_NODE), np.zeros(shapes, PLANNED_SHAPE),
        np.zeros(entries, np.int64), np.zeros(2, np.int64),
    )  # fmt: skip


def no_calendar() -> Calendar:
    """Return an empty calendar."""
    none, never = np.zeros(0, np.int64), np.zeros(0)
    return Calendar(
        none, none, never, never, none, base=none, own=none, limit=never, turns=never, closed=none,
        usable=new_resources(0), kept=none, kept_for=np.zeros(2, np.int64), kept_times=np.full(2, np.inf), work=0,
    )  # fmt: skip


def new_outcome(jobs: int, parts: int) -> PassOutcome:
    """Return an outcome for that many jobs with that many parts in total."""
    code, started, offset, shape = (np.zeros(jobs, np.int64) for _ in range(4))
    return PassOutcome(code, started, np.zeros(parts, np.int64), offset, np.zeros(2, np.int64), shape)


def seed_words(seed: int) -> Words:
    """Return state for `place.next_random` (``uint64[1]``), mixed by splitmix64 (Steele, Lea, Flood, 2014)."""
    mask = (1 << 64) - 1
    z = (seed + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return np.array([(z ^ (z >> 31)) or 1], dtype=np.uint64)
