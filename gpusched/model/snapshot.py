"""The frozen snapshot for a decision, with its time ``now``."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import combinations

import msgspec

from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import Allocation, JobSpec, JobState, Preemptions, Resizes
from gpusched.model.limits import Bound, Groups
from gpusched.model.policy import PolicySpec
from gpusched.model.reservations import Reservation
from gpusched.model.resources import SharingSettings
from gpusched.model.slices import SliceProfile
from gpusched.model.topology import Topology


class SliceView(msgspec.Struct, frozen=True):
    """A MIG slice in a snapshot: its number in allocations, and its profile."""

    number: int
    profile: str


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node in a snapshot.

    Attributes:
        gpus: NVML indices that can be allocated at all when the node is well (declared).
        blocked: GPU index -> why it cannot be used now though no job of ours holds it (``BUSY: ...``, ``LOST: ...``).
        available: False when DOWN, DRAINED, DRAINING or never read; ``unavailable_reason`` says why.
        links: GPU index -> GPU index -> closeness (larger is nearer), as in `Gpu.links`.
        failed_recently: Attempts failed here; the job it concerns carries the exclusion itself.
        sharing: As declared. shareable: GPU index -> its memory in MiB, of those that two jobs may have: it is known,
            and no foreign process is on them. Empty without ``sharing``.
        reservations: Of it, such as are not over, by begin.
        slices: Of its GPUs that are cut, which are among ``gpus`` nevertheless; ``blocked`` has slices, too, by number.
        cutting: GPU index -> (profile, start) of the slices that it is being cut into; none: it is being made whole.
        cuttable: GPU index -> what it can be cut into, of those that are cut and made whole on demand.
    """

    name: str
    partition: str
    gpus: tuple[int, ...]
    cores: int
    memory_mib: int
    gpu_type: str = ""
    blocked: dict[int, str] = {}
    available: bool = True
    unavailable_reason: str = ""
    links: dict[int, dict[int, int]] = {}
    sharing: SharingSettings | None = None
    shareable: dict[int, int] = {}
    reservations: tuple[Reservation, ...] = ()
    slices: tuple[SliceView, ...] = ()
    cutting: dict[int, tuple[tuple[str, int], ...]] = {}
    cuttable: dict[int, tuple[SliceProfile, ...]] = {}


class RunningView(msgspec.Struct, frozen=True, kw_only=True):
    """An active job in a snapshot.

    Attributes:
        start_time: Of its present attempt; of one that has not begun to run, its submission.
        expected_end: Start + limit (Unix seconds); of one that is being ended, when it is killed.
        submit_time: None: unknown.
        own_end: Expected end at its reported speed (Unix seconds); None: no report.
        state: STARTING, RUNNING or COMPLETING.
        attempt: 1 for the first. spec: None: unknown; then it cannot be preempted.
        speeds: GPUs of the whole job -> reported steps per second. left: remaining steps.
        shares: GPUs of its node that it may have together with another job: it asked for that, and was launched so.
        partner: The job that has some of them, too; "": none. Of such GPUs ``allocation`` has those that come free
            when it ends: the one of the two that ends last has them. It may not be preempted meanwhile.
        group: The group that it counts for; "": none. bounds: The limits that it counts for, of `Snapshot.bounds`.
        tied: Why it could not restart in time if it were preempted, as its nodes are reserved soon; "".
    """

    id: str
    user: str
    allocation: Allocation
    start_time: float
    expected_end: float
    own_end: float | None = None
    array_id: str | None = None
    submit_time: float | None = None
    state: JobState = JobState.RUNNING
    attempt: int = 1
    priority: int = 0
    spec: JobSpec | None = None
    preemptions: Preemptions | None = None
    resizes: Resizes | None = None
    speeds: dict[int, float] = {}
    left: float | None = None
    shares: tuple[int, ...] = ()
    partner: str = ""
    group: str = ""
    bounds: tuple[int, ...] = ()
    tied: str = ""


def without_double_counting(one: RunningView, other: RunningView) -> tuple[RunningView, RunningView]:
    """Count each GPU that two jobs share at the one that ends last, after which it is free."""
    first = (one.expected_end, one.id) < (other.expected_end, other.id)
    early, late = (one, other) if first else (other, one)
    kept = set(late.allocation.parts[0].gpus)
    part = early.allocation.parts[0]
    part = msgspec.structs.replace(part, gpus=tuple(gpu for gpu in part.gpus if gpu not in kept))
    early = msgspec.structs.replace(early, allocation=Allocation(early.id, (part, *early.allocation.parts[1:])))
    return (early, late) if first else (late, early)


def with_partners(views: Iterable[RunningView], ready: Container[str]) -> tuple[RunningView, ...]:
    """Add shared GPUs, of the jobs that are ``ready`` for it, and partners; count a GPU that two jobs hold at one."""
    found = {view.id: view for view in views}
    by_gpu: dict[tuple[str, int], list[str]] = {}
    for view in found.values():
        if view.spec is None or not view.spec.share:
            continue
        # Jobs that may share GPUs run on one node, so their first part is their only one.
        part = view.allocation.parts[0]
        if view.id in ready:
            found[view.id] = msgspec.structs.replace(view, shares=part.gpus)
        for gpu in part.gpus:
            by_gpu.setdefault((part.node, gpu), []).append(view.id)
    for pair in {(job, other) for holders in by_gpu.values() for job, other in combinations(holders, 2)}:
        both = without_double_counting(found[pair[0]], found[pair[1]])
        for job, view, partner in zip(pair, both, reversed(pair), strict=True):
            assert view.spec is not None
            spec = msgspec.structs.replace(view.spec, preemptible=False)
            found[job] = msgspec.structs.replace(view, spec=spec, partner=partner)
    return tuple(found.values())


class FinishedView(msgspec.Struct, frozen=True, kw_only=True):
    """A job that ended by itself: its total request, and its last run time in seconds. Times in Unix seconds.

    ``attempt`` and ``preemptions``: as in `RunningView`; ``profile``: as in `JobSpec`.
    """

    user: str
    partition: str
    nodes: int
    gpus: int
    cores: int
    memory_mib: int
    submit_time: float
    end_time: float
    ran_s: float
    profile: str = ""
    attempt: int = 1
    preemptions: Preemptions | None = None


class PendingView(msgspec.Struct, frozen=True, kw_only=True):
    """A pending job in a snapshot.

    ``dependency``: "" met, "waiting" or "never", with ``dependency_message``. ``estimate_s``: how long a predictor
    expected at its submission that it runs; None: no predictor is in use. ``resume_at``: GPUs to restart
    with after a resize. ``behind``: number of its array's next tasks, which are not considered. ``speeds``, ``left``:
    as in `RunningView`. ``barred``: why Slurm, which has it, lets it not start, in its words; "": it does.
    ``standing``: its priority in Slurm, which takes the place of submission time in the policy's order; 0: it is ours.
    ``awaits``: what it waits for until its ``eligible_time``, where that is no time that was set for it.
    ``group``, ``bounds``: as in `RunningView`, in order of display.
    ``reserved``: the reservation that it runs in, and in no other place. ``unreserved``: why it can never run in the
    one it asks for, as things are; "": it can.
    """

    id: str
    user: str
    spec: JobSpec
    submit_time: float
    priority: int = 0
    standing: int = 0
    held_by: str = ""
    eligible_time: float | None = None
    awaits: str = ""
    excluded_nodes: tuple[str, ...] = ()
    dependency: str = ""
    dependency_message: str = ""
    array_id: str | None = None
    array_room: int | None = None  # how many more tasks of its array may start now; None: no bound
    behind: int = 0
    estimate_s: float | None = None
    preemptions: Preemptions | None = None
    resizes: Resizes | None = None
    resume_at: int | None = None
    speeds: dict[int, float] = {}
    left: float | None = None
    barred: str = ""
    group: str = ""
    bounds: tuple[int, ...] = ()
    reserved: Reservation | None = None
    unreserved: str = ""

    @property
    def limit_s(self) -> float:
        """Return its remaining time limit in seconds: the limit covers all resized attempts together."""
        return self.spec.time_limit_s - (self.resizes.had_s if self.resizes is not None else 0.0)

    @property
    def expected_s(self) -> float:
        """Return its expected run time in seconds: the estimate, at most its limit; without one, the limit."""
        return self.limit_s if self.estimate_s is None else min(self.estimate_s, self.limit_s)

    def started(self, allocation: Allocation, now: float) -> RunningView:
        """Return the active job that a start makes of it."""
        return RunningView(
            id=self.id, user=self.user, allocation=allocation, start_time=now, expected_end=now + self.limit_s,
            array_id=self.array_id, state=JobState.STARTING, spec=self.spec,
        )  # fmt: skip


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All information that a policy may use.

    Attributes:
        policies: Partition name -> its policy.
        usage: User -> recent GPU hours, decayed (fair share); with groups by `leaf_of` user and group.
        seed: For policies that draw (the paper's naive one); changes every cycle.
        finished: Jobs that ended lately, for agents that learn from them; empty where no policy asks for them.
        topology: As declared, else as discovered.
        beliefs: Kind of job -> what was learned of it; empty where no policy asks for it, and no GPUs are shared.
        bounds: The limits that jobs here count for. groups: The tree by which shares are fair.
    """

    now: float
    nodes: tuple[NodeView, ...]
    running: tuple[RunningView, ...]
    pending: tuple[PendingView, ...]
    policies: dict[str, PolicySpec]
    usage: dict[str, float] = {}
    seed: int = 0
    finished: tuple[FinishedView, ...] = ()
    topology: Topology = Topology()
    beliefs: dict[str, JobClassEstimate] = {}
    bounds: tuple[Bound, ...] = ()
    groups: Groups = Groups()
