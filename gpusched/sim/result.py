"""The result of one replay: every job's start, end and nodes, and the events in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from gpusched.sched.state import Floats, Ints
from gpusched.sim.pool import Pool
from gpusched.traces.trace import Trace

START, END, KILLED, PREEMPTED, NODE_FAIL, NODE_DOWN, NODE_DRAIN, NODE_UP, PAIRED, RESIZED = range(10)
EVENT_KINDS = (
    "START", "END", "KILLED", "PREEMPTED", "NODE_FAIL", "NODE_DOWN", "NODE_DRAIN", "NODE_UP", "PAIRED", "RESIZED",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """The event log, by time; events at one instant are in the order in which they happened.

    Attributes:
        time: ``float64[events]``, seconds on the trace's clock.
        kind: ``uint8[events]``, index into `EVENT_KINDS`.
        subject: ``int64[events]``: the job (index into the trace), or the node for NODE_DOWN, NODE_DRAIN, NODE_UP.
    """

    time: Floats
    kind: npt.NDArray[np.uint8]
    subject: Ints

    def tobytes(self) -> bytes:
        """Return the whole log as bytes: equal for equal inputs and seed."""
        return self.time.tobytes() + self.kind.tobytes() + self.subject.tobytes()


@dataclass(frozen=True, kw_only=True, eq=False)
class CutRuns:
    """Runs that did not finish: preempted, resized, or on a node that failed. The job may have run again later.

    Attributes:
        job: ``int64[runs]``, index into the trace.
        start, end: ``float64[runs]``, seconds.
        part_offsets, part_nodes: Nodes of run i: ``part_nodes[part_offsets[i]:part_offsets[i + 1]]``.
        part_gpus: ``int64[runs]``: GPUs held on each of its nodes; None: as many as in the job's last run.
    """

    job: Ints
    start: Floats
    end: Floats
    part_offsets: Ints
    part_nodes: Ints
    part_gpus: Ints | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ReplayResult:
    """One replay of a trace on a pool under a policy. Arrays ``[jobs]`` are in the trace's order.

    Attributes:
        policy: Its name. knows: What it may know of run times: nothing, limit, estimate or oracle.
        source: Where the policy comes from. placement: Name of the placement rule.
        start: ``float64[jobs]``: when the job first started, seconds on the trace's clock; NaN: never.
        last_start: ``float64[jobs]``: when its last run started; differs from ``start`` only for jobs with cut runs.
        end: ``float64[jobs]``: when it ended; NaN: never.
        part_offsets: ``int64[jobs + 1]``; part_nodes: ``int64[parts]``: the nodes of job j's last run are
            ``part_nodes[part_offsets[j]:part_offsets[j + 1]]`` (rows of ``pool``; -1 where it never ran).
        part_gpus: ``int64[jobs]``: GPUs held on each of its nodes in its last run.
        killed: ``bool[jobs]``: ended by its time limit before its work was done.
        restarts: ``int64[jobs]``: number of its cut runs (see ``cut``).
        infeasible: ``int64[n]``: jobs that can never run on this pool, excluded from all metrics; ``infeasible_why``
            has one sentence for each.
        decisions: How often the policy was called.
        sim_seconds: Wall time inside the engine, without compiling and building; jobs_per_s: replayed jobs over it.
        notes: Sentences that a reader of the figures must know.
        share: ``float64[jobs]``: fraction of each of its GPUs that a job holds; None: all jobs hold whole GPUs. Two
            jobs on the same GPUs (event PAIRED of the first, START of the second) both hold them whole.
        shared: How GPUs were shared: no, fractions or pairs.
    """

    policy: str
    knows: str
    source: str
    placement: str
    seed: int
    trace: Trace
    pool: Pool
    start: Floats
    last_start: Floats
    end: Floats
    part_offsets: Ints
    part_nodes: Ints
    part_gpus: Ints
    killed: npt.NDArray[np.bool_]
    restarts: Ints
    infeasible: Ints
    infeasible_why: tuple[str, ...]
    cut: CutRuns
    events: Events
    decisions: int
    sim_seconds: float
    jobs_per_s: float
    notes: tuple[str, ...] = field(default=())
    share: Floats | None = None
    shared: str = "no"

    @property
    def ran(self) -> npt.NDArray[np.bool_]:
        """Return which jobs ended, ``bool[jobs]``; metrics cover these."""
        return np.isfinite(self.end)

    def nodes_of(self, job: int) -> Ints:
        """Return the rows of the pool that the job's last run was on."""
        return self.part_nodes[self.part_offsets[job] : self.part_offsets[job + 1]]
