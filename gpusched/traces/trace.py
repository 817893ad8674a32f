"""A workload as columns: submission times, users, requests, and real run times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgressRecords:
    """Jobs' reported progress, allowed sizes, and past attempts. Unknown is NaN.

    Three tables: jobs, the sizes of each job, and its attempts, the latter two in the order of the jobs.

    Attributes:
        steps: ``float64[jobs]``: the last reported step; NaN: none was reported.
        cost_s: ``float64[jobs]``: mean seconds from being asked to change size to running again.
        cooldown_s: ``float64[jobs]``: how long it wants to run before it is resized again; 0 for rigid ones.
        size_job, size_gpus: ``int64[sizes]``: GPUs that each job may have, ascending; one size: it is rigid.
        steps_per_s: ``float64[sizes]``: how fast it said that it is there.
        run_job, run_gpus: ``int64[attempts]``: what it had in each attempt, in order.
        run_after_s, run_s: ``float64[attempts]``: when that began, seconds after its submission, and how long the
            attempt did work that counts: without saving at its end, and what was not saved.
        rank_gpus: ``int64[jobs]``: GPUs of each rank of hot jobs, which gain and lose ranks while they run (their
            ``cost_s``: mean seconds without a step); 0: a resize stops the job; None: every job.
    """

    steps: Floats
    cost_s: Floats
    cooldown_s: Floats
    size_job: Ints
    size_gpus: Ints
    steps_per_s: Floats
    run_job: Ints
    run_gpus: Ints
    run_after_s: Floats
    run_s: Floats
    rank_gpus: Ints | None = None

    def sizes(self, job: int) -> dict[int, float]:
        """Return a job's allowed GPUs, ascending -> steps per second there (NaN: unknown)."""
        rows = slice(*np.searchsorted(self.size_job, (job, job + 1)).tolist())
        return dict(zip(self.size_gpus[rows].tolist(), self.steps_per_s[rows].tolist(), strict=True))

    def speeds(self, job: int) -> dict[int, float]:
        """Return GPUs -> steps per second, where reported."""
        return {gpus: speed for gpus, speed in self.sizes(job).items() if speed > 0}


class OtherRuns(NamedTuple):
    """Recorded runs of jobs outside the trace, which count for users' usage and limits; one entry per run.

    Attributes:
        user, account, qos: As in `Trace`; -1: none.
        gpus: ``float64[runs]``: parts of shared GPUs, and of MIG slices, included.
        begin, end, limit: Seconds; since the epoch of the trace, the limit since it began.
    """

    user: Ints
    account: Ints
    qos: Ints
    gpus: Floats
    begin: Floats
    end: Floats
    limit: Floats


_NONE, _NO_TIME = np.zeros(0, np.int64), np.zeros(0)
NO_RUNS = OtherRuns(_NONE, _NONE, _NONE, _NO_TIME, _NO_TIME, _NO_TIME, _NO_TIME)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """Jobs in the order in which they join the queue, as arrays. Unknown is NaN (floats) or -1 (ints).

    Attributes:
        name: Where it comes from, for people.
        epoch: Unix seconds of time 0, or None where the trace has no calendar.
        ids: Job ids as the source has them, unique.
        submit: Seconds since the epoch of the trace; ascending, and ids where it is equal, but for ``arrival``.
        duration: Real run time in seconds, on what it really ran on (> 0); of one that had several sizes, what all its
            work would have taken with ``gpus``.
        limit: Requested time in seconds (NaN unknown).
        gpus: GPUs of the whole job (processors of an SWF log count as GPUs), or MIG slices of its ``profile``.
        gpu_milli: Thousandths of each GPU it uses: 1000 is a whole one (Alibaba v2023 shares GPUs).
        nodes: Nodes asked for; 0 leaves the split to the engine (fewest equal parts).
        cores, memory_mib: Of the whole job (-1 unknown: in proportion to its GPUs).
        user, group, model: Index into ``users``, ``groups`` (virtual cluster, partition, queue), ``models`` (workload
            name for measured profiles); -1 unknown.
        gpu_type: Index into ``gpu_types``: the type it must have (an entry may list alternatives: ``V100M16|V100M32``);
            -1 any.
        depends_on: Index of the job that must have ended before, or -1.
        status: Index into ``statuses`` (how it ended in the source), -1 unknown.
        wait: What it really waited in the source, seconds (NaN unknown).
        preemptible: Which jobs a policy may stop for others; None: any.
        account, qos: Index into ``accounts`` (the group of users that it counts for) and ``classes`` (of service); -1:
            none; None: of no job.
        priority: Explicit priority, that of its class included; larger goes first; None: 0 of every job.
        array, array_limit: Number of its array, and how many tasks of that may run at once; -1: any; None: of no job.
        arrival: When it joins the queue, ascending, seconds since the epoch of the trace: after its submission where it
            waited or ran when a window of history begins; None: all at submission.
        policy: Index into ``policies``: which one started it last; -1: not known; None: of no job.
        share_mib: Of jobs that agreed to share GPUs, the MiB that they take of each; -1: of others; None: of no job.
        nodelist, exclude: Index into ``node_lists`` (names between ``|``): its only nodes, those that it avoids; -1:
            none; None: of no job.
        ran_on: Index into ``node_lists``: all nodes on which it ran; -1: not known; None: of no job.
        max_nodes: Its GPUs may be spread over up to so many nodes, the fewest first; -1: as ``nodes`` says; None: of
            every job.
        one_rack: Which jobs run in one rack only; None: no job.
        exclusive: Which jobs have whole nodes, of exactly their size; None: no job.
        placement_wait: Seconds that it waits for the fewest nodes in one rack; -1: as its policy says; None: of every
            job.
        profile: Index into ``profiles``: of which MIG profile its GPUs are slices; -1: whole ones; None: of every job.
        command, image: Numbers that are equal where a job runs the same script and arguments, the same image; -1
            unknown; None: of no job.
        progress: Progress and sizes, where the source has any.
        others: What ran in other groups where one was selected (`slicing.slice_trace`).
        rejected: Rows kept out: (line number, why).
        notes: What a reader should know of how it came to be: sorted, scaled, what the source could not say.
    """

    name: str
    epoch: float | None
    ids: tuple[str, ...]
    submit: Floats
    duration: Floats
    limit: Floats
    gpus: Ints
    gpu_milli: Ints
    nodes: Ints
    cores: Ints
    memory_mib: Ints
    user: Ints
    group: Ints
    model: Ints
    gpu_type: Ints
    depends_on: Ints
    status: Ints
    wait: Floats
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    gpu_types: tuple[str, ...] = ()
    statuses: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    profiles: tuple[str, ...] = ()
    node_lists: tuple[str, ...] = ()
    preemptible: Flags | None = None
    account: Ints | None = None
    qos: Ints | None = None
    priority: Ints | None = None
    array: Ints | None = None
    array_limit: Ints | None = None
    arrival: Floats | None = None
    policy: Ints | None = None
    share_mib: Ints | None = None
    nodelist: Ints | None = None
    exclude: Ints | None = None
    ran_on: Ints | None = None
    max_nodes: Ints | None = None
    one_rack: Flags | None = None
    exclusive: Flags | None = None
    placement_wait: Ints | None = None
    profile: Ints | None = None
    command: Ints | None = None
    image: Ints | None = None
    progress: ProgressRecords | None = None
    others: OtherRuns = NO_RUNS
    rejected: tuple[tuple[int, str], ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.submit)

    @property
    def arrivals(self) -> Floats:
        """When each job joins the queue."""
        return self.submit if self.arrival is None else self.arrival

    @property
    def spreads(self) -> bool:
        """Whether any job says over how many nodes and racks it may be, or how long it waits for few."""
        return any(of is not None for of in (self.max_nodes, self.one_rack, self.placement_wait))

    def user_name(self, user: int) -> str:
        """Return the name of an index of ``user``; its number where the source has no names; "": unknown."""
        return "" if user < 0 else self.users[user] if user < len(self.users) else str(user)

    def model_name(self, model: int) -> str:
        """Return the name of an index of ``model``; "": unknown."""
        return "" if model < 0 else self.models[model]
