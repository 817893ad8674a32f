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
    """The event log, in order of time and, at one instant, in the order things happened.

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
    """Runs that did not finish: preempted, resized, or on a node that failed. The job ran again later (or never).

    Attributes:
        job: ``int64[runs]``, index into the trace.
        start, end: ``float64[runs]``, seconds.
        part_offsets, part_nodes: Its nodes: ``part_nodes[part_offsets[i]:part_offsets[i + 1]]``.
        part_gpus: ``int64[runs]``: GPUs it held on each of them; None: as many as in the job's last run.
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
        policy: Its name. knows: What it was allowed to know of run times: nothing, limit, estimate or oracle.
        source: Where the policy is from. placement: The placement rule's name.
        start: ``float64[jobs]``: when the job first started, seconds on the trace's clock; NaN: never.
        last_start: ``float64[jobs]``: when its last (finished) run started; as ``start`` but for preempted and failed.
        end: ``float64[jobs]``: when it ended; NaN: never.
        part_offsets: ``int64[jobs + 1]``; part_nodes: ``int64[parts]``: the nodes of job j's last run are
            ``part_nodes[part_offsets[j]:part_offsets[j + 1]]`` (rows of ``pool``; -1 where it never ran).
        part_gpus: ``int64[jobs]``: GPUs it holds on each of its nodes, in its last run.
        killed: ``bool[jobs]``: ended by its time limit before its work was done.
        restarts: ``int64[jobs]``: runs that were cut (see ``cut``).
        infeasible: ``int64[n]``: jobs that can never run on this pool, kept out of all metrics; ``infeasible_why`` says
            why, one sentence for each.
        decisions: Instants at which the policy was asked.
        sim_seconds: Wall time inside the engine, compiling and building left out; jobs_per_s: replayed jobs over it.
        notes: What a reader of the figures must know, in sentences.
        share: ``float64[jobs]``: how much of each of its GPUs a job holds; None: all jobs hold whole ones. Two jobs on
            the same GPUs (events PAIRED, of the one that was there, and START) both hold them whole.
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
        """``bool[jobs]``: the jobs that ended; metrics cover these."""
        return np.isfinite(self.end)

    def nodes_of(self, job: int) -> Ints:
        """Return the rows of the pool that the job's last run was on."""
        return self.part_nodes[self.part_offsets[job] : self.part_offsets[job + 1]]
