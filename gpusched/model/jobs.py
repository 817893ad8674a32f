"""Jobs: the request and the record."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Literal, Self

import msgspec

from gpusched.model.idle import IdleState
from gpusched.model.indices import Spans, count
from gpusched.model.slicetables import gpus_counted
from gpusched.model.slurm import SlurmFacts


class JobState(StrEnum):
    """Job states, named as in Slurm."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMEOUT = "TIMEOUT"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"


ACTIVE = frozenset({JobState.STARTING, JobState.RUNNING, JobState.COMPLETING})  # hold resources
ENDED = frozenset(JobState) - ACTIVE - {JobState.PENDING}
HOUR_S = 3600.0


class DependencyKind(StrEnum):
    """Kinds of dependencies, as in sbatch --dependency."""

    AFTER = "after"  # the other has started
    AFTEROK = "afterok"
    AFTERNOTOK = "afternotok"
    AFTERANY = "afterany"
    AFTERCORR = "aftercorr"  # each task of an array on the one with its index, as afterok
    SINGLETON = "singleton"  # on all earlier jobs of its user with its name; there is no other id
    CHAIN = "chain"  # each task on the one before it, which was not cancelled and did not fail; there is no other id


WITHOUT_ID = frozenset({DependencyKind.SINGLETON, DependencyKind.CHAIN})


class Dependency(msgspec.Struct, frozen=True):
    """A dependency on another job (an array id stands for all its tasks); ``job_id`` "" where the kind implies it."""

    kind: DependencyKind
    job_id: str = ""

    @property
    def text(self) -> str:
        """Return it as given to ``--dependency``."""
        return f"{self.kind}:{self.job_id}" if self.job_id else str(self.kind)


class Mount(msgspec.Struct, frozen=True):
    """A folder or file of the node inside the container."""

    source: str
    target: str
    read_only: bool = False


class Elastic(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a resizable job, and how it is resized: by a stop once it has saved its work, or hot.

    Attributes:
        sizes: GPUs of the whole job that it may have, ascending.
        base_gpus: What its batch and learning rate were tuned for; ``base_cores`` and ``base_memory_mib`` of the whole
            job go with it, and with the GPUs at other sizes.
        cores, memory_mib: The least and the most of the whole job, between which they do so; less than what goes with
            the GPUs is given where the nodes have no more. None: exactly that.
        batch: Whether its batch size is fixed or scales with the GPUs; only passed on to the job.
        cooldown_s: Minimum run time of its current attempt, and time since the last hot resize, before a resize.
        rank_gpus: GPUs of each of its ranks, which join and leave while it runs; 0: a resize stops it.
    """

    sizes: tuple[int, ...]
    base_gpus: int
    base_cores: int
    base_memory_mib: int
    cores: tuple[int, int] | None = None
    memory_mib: tuple[int, int] | None = None
    batch: Literal["fixed", "scale"] = "fixed"
    cooldown_s: int = 600
    rank_gpus: int = 0

    def node_counts(self, gpus: int, most: int) -> Iterable[int]:
        """Return over how many equal nodes, ``most`` at most, a size may be spread, the fewest first."""
        counts = range(1, most + 1) if not self.rank_gpus else (gpus // self.rank_gpus,)
        return (n for n in counts if 1 <= n <= most and gpus % (self.rank_gpus or n) == 0)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The complete, validated request; resources are per node, a gang has ``nodes`` equal parts.

    Attributes:
        gpus_per_node, cores_per_node, memory_mib_per_node: What each of the ``nodes`` nodes gives.
        command: argv inside the container; empty runs the image's own.
        secret_names: Environment variables whose values travel apart and are never stored in clear.
        output: Path on a filesystem the node sees, with Slurm's %j %A %a %x %u %n; None keeps it on the node and
            collects it.
        signal, signal_before_s: Signal sent that long before the limit, as in sbatch --signal; also the grace signal.
        requeue: May be started again after NODE_FAIL.
        preemptible: A policy may stop it for another job and start it again later: it saves its work when it is
            signalled to end, and resumes from there.
        gpu_types: Only nodes with GPUs of one of these types; empty: any.
        elastic: It may be resized; the resources above are those of its present size. None: it may not.
        max_spread: ``server``, ``rack``: all its nodes in one, where the cluster has racks; ``any``, "": anywhere.
        max_nodes: Its GPUs may be spread in equal parts over up to so many nodes, the fewest first; the resources above
            are those of its latest start. None: exactly ``nodes``.
        placement_wait_s: How long it waits for the fewest nodes, in one rack; None: as its policy says.
        exclusive: It requests whole nodes, and uses only nodes of exactly that size.
        share: ``pairs``: its GPUs may be one other job's, too, where the node's are shared; "": they are its own.
        gpu_memory_mib: Maximum memory per GPU of a job that may share GPUs; None: not given.
        script: Text of its job script, which is run with ``command`` as its arguments; None: ``command`` is run.
        array_shape: Of an array's tasks: how many there are, the first index, the last, the step between them.
        signal_batch: Of a job with a script, the signal before the limit goes to the script's own process alone; else
            to what ``srun`` started, and not to the script.
        submit_dir: Folder of the login node that the script was submitted from; "": there is no script.
        tasks_per_node: Default ``srun`` tasks on each of its nodes.
        gpus_per_task: Default GPUs of each ``srun`` task; 0: all of its node.
        memory_mib_per_cpu: Of each core, where it was asked for so; 0: it was not.
        slurm_env: Its environment includes Slurm's variables (SLURM_JOB_ID...).
        function: Name of the Python function that it runs: its program (`Submit.program`) is put into its own folder at
            each start, and the result that it leaves there is collected beside its output. "": it has no program.
        error: As ``output``, for stderr; None: both go to ``output``.
        append: Its later starts add to these files; else they empty them.
        group: Of the inventory's groups, the one that its usage counts for; "": none.
        qos: Its class of service; "": none.
        reservation: It runs in this reservation only; "": in none.
        mail, notify: Receiver and kinds of notices (`gpusched.model.notices`).
        session: Of an interactive job: it ends after this many seconds without a terminal attached; None: not one.
        pty: Rank 0 of a session has a terminal; else stdin, stdout and stderr as they are.
        profile: Its GPUs are MIG slices of this profile, such as ``1g.10gb``; "": whole GPUs.
    """

    name: str
    partition: str
    flavor: str | None = None
    nodes: int = 1
    gpus_per_node: int
    cores_per_node: int
    memory_mib_per_node: int
    time_limit_s: int
    image: str | None = None
    command: tuple[str, ...] = ()
    workdir: str | None = None
    env: dict[str, str] = {}
    secret_names: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    output: str | None = None
    dependencies: tuple[Dependency, ...] = ()
    begin_time: float | None = None
    priority: int = 0
    nice: int = 0
    hold: bool = False
    requeue: bool = True
    preemptible: bool = False
    signal: str = "TERM"
    signal_before_s: int | None = None
    nodelist: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpu_types: tuple[str, ...] = ()
    comment: str = ""
    elastic: Elastic | None = None
    max_spread: Literal["", "server", "rack", "any"] = ""
    max_nodes: int | None = None
    placement_wait_s: float | None = None
    exclusive: bool = False
    share: Literal["", "pairs"] = ""
    gpu_memory_mib: int | None = None
    script: str | None = None
    submit_dir: str = ""
    array_shape: tuple[int, ...] = ()
    signal_batch: bool = False
    tasks_per_node: int = 1
    gpus_per_task: int = 0
    memory_mib_per_cpu: int = 0
    slurm_env: bool = False
    function: str = ""
    error: str | None = None
    append: bool = False
    group: str = ""
    qos: str = ""
    reservation: str = ""
    mail: str = ""
    notify: tuple[str, ...] = ()
    session: int | None = None
    pty: bool = False
    profile: str = ""

    @property
    def gpus(self) -> int:
        """Return the GPUs, or slices, of the whole job."""
        return self.nodes * self.gpus_per_node

    @property
    def gpus_counted(self) -> float:
        """Return the GPUs of the whole job as limits, shares and usage count them: slices by their share of a GPU."""
        return gpus_counted(self.gpus, self.profile)

    @property
    def is_hot(self) -> bool:
        """Return whether it is resized without a stop: its ranks join and leave while it runs."""
        return self.elastic is not None and self.elastic.rank_gpus > 0

    @property
    def amounts(self) -> tuple[int, int]:
        """Return cores and MiB of the whole job."""
        return self.nodes * self.cores_per_node, self.nodes * self.memory_mib_per_node

    def at_size(self, gpus: int, nodes: int, room: tuple[int, int] | None = None) -> JobSpec:
        """Return a resizable job's request for ``gpus`` GPUs on ``nodes`` nodes; cores and memory rounded up.

        Where these have a range, no more of them than the cores and MiB of each node in ``room``, but never less than
        the least that it may have.
        """
        assert self.elastic is not None
        base, has = self.elastic, room or (None, None)
        return msgspec.structs.replace(
            self,
            nodes=nodes,
            gpus_per_node=gpus // nodes,
            cores_per_node=_amount(base.base_cores * gpus, base.base_gpus, nodes, base.cores, has[0]),
            memory_mib_per_node=_amount(base.base_memory_mib * gpus, base.base_gpus, nodes, base.memory_mib, has[1]),
        )

    @property
    def least(self) -> JobSpec:
        """Return the request at its current size with its minimum cores and memory."""
        ranged = self.elastic is not None and (self.elastic.cores or self.elastic.memory_mib)
        return self.at_size(self.gpus, self.nodes, (0, 0)) if ranged else self

    @property
    def with_present_size(self) -> JobSpec:
        """Return a running hot job's request with its present size among its sizes: it may have lost a rank."""
        if self.elastic is None or not self.is_hot or self.gpus in self.elastic.sizes:
            return self
        sizes = tuple(sorted((*self.elastic.sizes, self.gpus)))
        return msgspec.structs.replace(self, elastic=msgspec.structs.replace(self.elastic, sizes=sizes))

    def as_allocated(self, allocation: Allocation) -> JobSpec:
        """Return the request of a job with several possible sizes, at its allocated size."""
        part = allocation.parts[0]
        return msgspec.structs.replace(
            self, nodes=len(allocation.parts), gpus_per_node=len(part.gpus), cores_per_node=part.cores,
            memory_mib_per_node=part.memory_mib,
        )  # fmt: skip


def _amount(of: int, base_gpus: int, nodes: int, bounds: tuple[int, int] | None, room: int | None) -> int:
    """Return cores or MiB per node, at least 1; of none, as in traces that do not know them, 0."""
    if bounds is None:
        return -(-of // (base_gpus * nodes))
    least, most = -(-bounds[0] // nodes), bounds[1] // nodes
    wished = min(-(-of // (base_gpus * nodes)), most, *([room] if room is not None else []))
    return max(1, least, wished)


class NodeAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """The allocation of one rank: GPUs (NVML indices), cores and MiB on one node."""

    rank: int
    node: str
    gpus: tuple[int, ...]
    cores: int
    memory_mib: int


class Allocation(msgspec.Struct, frozen=True):
    """The allocation of a job: one part per rank, all or nothing."""

    job_id: str
    parts: tuple[NodeAllocation, ...]

    @property
    def gpus(self) -> int:
        """Return the GPUs of the whole job."""
        return sum(len(part.gpus) for part in self.parts)


class Stops(msgspec.Struct, frozen=True, kw_only=True):
    """How often a policy stopped a job for one purpose; ``times``: Unix seconds, within an hour of the latest."""

    count: int = 0
    times: tuple[float, ...] = ()

    def too_soon(self, now: float, per_hour: int) -> bool:
        """Return whether it was stopped ``per_hour`` times within the last hour (0: no limit)."""
        return now < self.spared_until(per_hour)

    def spared_until(self, per_hour: int) -> float:
        """Return until when it is not stopped again, by as many times within an hour; -inf: it may be at once."""
        return self.times[-per_hour] + HOUR_S if 0 < per_hour <= len(self.times) else -math.inf

    def again(self, now: float, **changes: Any) -> Self:
        """Return it with one more stop and other changes."""
        times = (*(t for t in self.times if now < t + HOUR_S), now)
        return msgspec.structs.replace(self, count=self.count + 1, times=times, **changes)


class Preemptions(Stops, frozen=True, kw_only=True):
    """Preemptions of a job, and its run time before them.

    Attributes:
        policy, policy_version: Which one did it last, and in favour of which job (``for_job``; "": not known).
        kept_s: Seconds that its stopped attempts ran in all: work that it has saved.
        kept_restarts: How many of these attempts went on with earlier work, and so began with loading it.
    """

    policy: str = ""
    policy_version: str = ""
    for_job: str = ""
    kept_s: float = 0.0
    kept_restarts: int = 0

    def had_s(self, restart_s: float) -> float:
        """Return seconds of saved work, where a restart costs ``restart_s``."""
        return max(0.0, self.kept_s - restart_s * self.kept_restarts)

    def once_more(self, now: float, policy: str, version: str, for_job: str) -> Preemptions:
        """Return it after one more preemption; the attempt's run time is added at its end (`with_run`)."""
        return self.again(now, policy=policy, policy_version=version, for_job=for_job)

    def with_run(self, ran_s: float, restarted: bool) -> Preemptions:
        """Add a stopped attempt's run time; ``restarted``: it was not the job's first attempt."""
        return msgspec.structs.replace(self, kept_s=self.kept_s + ran_s, kept_restarts=self.kept_restarts + restarted)


class Resizes(Stops, frozen=True, kw_only=True):
    """Resizes of a job, and their outcomes.

    Attributes:
        before: GPUs of the attempt before the present one (or before its hot resize), to go back to; None: it has
            started up, or was not resized.
        resume_at: GPUs that it is to restart with, or fewer where the partition has fewer by then.
        start_timeout_s: Within it the job must make a step at a new size.
        why: What the last one was for.
        costs_s: Seconds from request to running again of those that started up, and their number (``measured``); of
            a hot job, the seconds without a step, as its program measured them.
        lost_s: Seconds of work that had not been saved.
        had_s: Seconds that attempts before the present one ran, which its time limit counts, too.
        unusable: Sizes at which it did not start up.
        frozen: Why it is no longer resized; "": it may be.
        next_rank: Of a hot job, the number of the next rank to join; numbers, and so names, are never used twice.
        formed_since: When the last of its ranks came or went, since when they form their group.
    """

    before: int | None = None
    resume_at: int | None = None
    start_timeout_s: float = 600.0
    why: str = ""
    costs_s: float = 0.0
    measured: int = 0
    lost_s: float = 0.0
    had_s: float = 0.0
    unusable: tuple[int, ...] = ()
    frozen: str = ""
    next_rank: int = 0
    formed_since: float | None = None

    @property
    def cost_s(self) -> float | None:
        """Return the mean seconds of a resize; None: none was measured."""
        return self.costs_s / self.measured if self.measured else None


class ResizeTo(msgspec.Struct, frozen=True, kw_only=True):
    """The size that a job is being stopped for, and when this was requested.

    Attributes:
        back: It goes back, as it did not start up at its present one.
        saved: It has said since that its work is kept.
        done: It had made its last step, and ended well.
    """

    gpus: int
    asked_at: float
    back: bool = False
    saved: bool = False
    done: bool = False


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Why a COMPLETING job is being ended, and its state once all its ranks are gone.

    Attributes:
        outcome: The state to come; PENDING means back to the queue.
        kill_at: When the grace is over and KILL is sent (Unix seconds).
        exit_code: The job's own code where a rank's exit began the ending.
        preemptions: The job's, with this one, where a policy stops it for another; its own once it waits again.
        resize: It is stopped to go on at another size.
    """

    outcome: JobState
    reason: str
    message: str = ""
    kill_at: float
    exit_code: int | None = None
    preemptions: Preemptions | None = None
    resize: ResizeTo | None = None


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A job as stored.

    Attributes:
        id: ``<id>``, or ``<id>_<index>`` for a task of an array, or ``<id>_[3-9]`` for several.
        tasks: Of a row that stands for several tasks of an array (`model.arrays`), their indices; (): it is one job.
        attempt: 0 before the first start; each start counts one up.
        reason: Slurm-like word why it is where it is (``Resources``, ``Priority``, ``NonZeroExitCode``...).
        message: The same as a sentence.
        eligible_time: Not before it (begin time, or a retry's back-off).
        energy_j: Measured so far on its own GPUs; None where nothing was measured.
        excluded_nodes: Nodes on which earlier attempts failed for the node's reasons.
        unlaunched_on: Nodes on which it could not be launched since it last ran; one may stand there more than once.
        policy, policy_version: What decided its start.
        preemptions: None: no policy has stopped it.
        resizes: None: it was never resized.
        slurm: Of a job of Slurm; None: it is ours.
        asked_by: Of a job that another one queued from inside, that one's id; "": its user queued it.
        idle: All its GPUs are idle, and there is a rule for that; None: they are not, or it is not known.
    """

    id: str
    array_id: str | None = None
    array_index: int | None = None
    tasks: Spans = ()
    user: str
    uid: int
    spec: JobSpec
    state: JobState
    reason: str = ""
    message: str = ""
    priority: int = 0
    submit_time: float
    eligible_time: float | None = None
    start_time: float | None = None
    end_time: float | None = None
    exit_code: int | None = None
    attempt: int = 0
    retries: int = 0
    held_by: Literal["", "user", "admin"] = ""
    allocation: Allocation | None = None
    ending: Ending | None = None
    energy_j: float | None = None
    excluded_nodes: tuple[str, ...] = ()
    unlaunched_on: tuple[str, ...] = ()
    master_port: int | None = None
    policy: str | None = None
    policy_version: str | None = None
    preemptions: Preemptions | None = None
    resizes: Resizes | None = None
    slurm: SlurmFacts | None = None
    asked_by: str = ""
    idle: IdleState | None = None

    @property
    def count(self) -> int:
        """Return how many jobs the record stands for."""
        return count(self.tasks) if self.tasks else 1

    @property
    def ranks(self) -> Sequence[int]:
        """Return the numbers of its ranks, ascending; a hot job's may have gaps, where ranks have left it."""
        if not self.spec.is_hot or self.allocation is None:
            return range(self.spec.nodes)
        return sorted(part.rank for part in self.allocation.parts)

    @property
    def past_ranks(self) -> range:
        """Return the numbers that ranks of it may have had."""
        joined = self.resizes.next_rank if self.resizes is not None else 0
        return range(max(joined, *(rank + 1 for rank in self.ranks), 1))

    @property
    def forming_from(self) -> int | None:
        """Return the GPUs of a hot job before its ranks came or went; None: these have formed their group since."""
        return self.resizes.before if self.spec.is_hot and self.resizes is not None else None

    @property
    def limit_s(self) -> float:
        """Return the seconds that its current attempt may run: the limit covers all resized attempts together."""
        return self.spec.time_limit_s - (self.resizes.had_s if self.resizes is not None else 0.0)

    @property
    def ran_s(self) -> float:
        """Return the run time of its last attempt in seconds; 0: it never ran, or has not ended."""
        return self.end_time - self.start_time if self.end_time is not None and self.start_time is not None else 0.0


def container_name(job_id: str, attempt: int, rank: int) -> str:
    """Return the name that prevents double starts: ``gpusched-<job>-<attempt>-<rank>``."""
    return f"gpusched-{job_id}-{attempt}-{rank}"


def parse_container_name(name: str) -> tuple[str, int, int] | None:
    """Parse `container_name`: (job id, attempt, rank), or None for other names."""
    found = re.fullmatch(r"gpusched-([^-]*)-([0-9]+)-([0-9]+)", name)
    return (found[1], int(found[2]), int(found[3])) if found else None
