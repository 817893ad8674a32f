"""Typed rows of the node, power and quota screens, between the services that compute them and the views."""

from __future__ import annotations

from typing import Literal

import msgspec

from gpusched.model.health import HealthAction
from gpusched.model.readings import GpuProcess, GpuState, GpuWiring, Nic, NodeState
from gpusched.model.topology import Switch

By = Literal["partition", "node", "user", "job"]


class SliceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG slice of a GPU; ``label``: its name in allocations, such as ``3:1g.10gb@4``."""

    label: str
    profile: str
    start: int
    uuid: str | None = None
    state: GpuState
    reason: str = ""
    job: str | None = None
    user: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None


class GpuRow(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a node; unknown figures are None.

    ``job`` and ``user`` are the holder's, ``shared_with`` and ``shared_user`` the other one's where two jobs share it;
    ``energy_j`` is NVML's counter since the driver was loaded; ``slices``: of a GPU that is cut.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    state: GpuState
    reason: str = ""
    job: str | None = None
    user: str | None = None
    shared_with: str | None = None
    shared_user: str | None = None
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    utilization_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    energy_j: float | None = None
    ecc_errors: int | None = None
    mig_mode: bool | None = None
    processes: tuple[GpuProcess, ...] = ()
    slices: tuple[SliceRow, ...] = ()


class ReservationRow(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation that has not ended.

    Attributes:
        gpus: Of its nodes. begin, end: Unix seconds.
        running: Jobs that run in it. late: Jobs that run on its nodes, not in it, and may last until after its begin.
    """

    name: str
    kind: Literal["reservation", "maintenance"]
    state: Literal["planned", "active"]
    nodes: tuple[str, ...]
    gpus: int
    begin: float
    end: float
    users: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    by: str = ""
    reason: str = ""
    running: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


class ConditionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One condition of a node or a GPU.

    Attributes:
        condition: Its kind. gpu: NVML index; None: of the node. uuid: The GPU's.
        action: What follows from it here.
        since, last_seen: Unix seconds.
        detail: What was seen. advice: What to do.
        job: The job on the GPU then, where it is its program's fault. check: The site's own check that found it.
    """

    condition: str
    gpu: int | None = None
    uuid: str | None = None
    action: HealthAction
    since: float
    last_seen: float
    detail: str
    advice: str = ""
    job: str | None = None
    check: str | None = None


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node with its GPUs.

    Attributes:
        gpus_free: GPUs that a job could be given now: none where the node takes no new jobs.
        power_w: Sum over the GPUs whose power is known; None where none is.
        memory_total_mib, memory_free_mib, cores_total, cores_free: Declared, and not held by jobs.
        source: Where the figures come from; ``simulated`` ones are made up for a demo.
        last_seen: When the node last answered (Unix seconds); ``age_s`` seconds ago.
        stale: The figures are old; the node has not been probed recently.
        reserved: Its present reservation, else the next, in words; None: none.
        conditions: Of the node and its GPUs, also by the site's own checks.
        slices: Profile of its MIG slices -> those that a job could be given now, and all.
    """

    name: str
    partition: str
    state: NodeState
    reason: str = ""
    gpus_total: int
    gpus_free: int
    power_w: float | None = None
    power_limit_w: float | None = None
    rated_power_w: float | None = None
    cores_total: int
    cores_free: int
    memory_total_mib: int
    memory_free_mib: int
    load1: float | None = None
    disk_free_mib: int | None = None
    clock_skew_s: float | None = None
    source: Literal["nvml", "nvidia-smi", "none", "simulated", "slurm"] = "none"
    driver_version: str | None = None
    runtime_error: str | None = None
    last_seen: float | None = None
    age_s: float | None = None
    stale: bool = False
    gpus: tuple[GpuRow, ...] = ()
    reserved: str | None = None
    conditions: tuple[ConditionRow, ...] = ()
    slices: dict[str, tuple[int, int]] = {}

    @property
    def simulated(self) -> bool:
        """Return whether the figures are simulated."""
        return self.source == "simulated"


class FailureRow(msgspec.Struct, frozen=True, kw_only=True):
    """Attempts of the last days on one GPU, or on a node (``gpu`` None), against those of the same jobs elsewhere.

    Attributes:
        attempts, failed: On it; series of failures of the same job name on the same GPUs count once.
        out_of_memory: Attempts that ran out of memory, which are in no other number.
        compared, failed_compared: Those of users' job names that ran elsewhere, too.
        expected: Failures if these had failed as often as elsewhere.
        p_value: Probability of ``failed``, or more, by chance. corrected: For the number of GPUs and nodes.
        named: Whether ``corrected`` is at most 0.05.
    """

    node: str
    gpu: int | None
    attempts: int
    failed: int
    out_of_memory: int
    compared: int
    failed_compared: int
    expected: float
    p_value: float
    corrected: float
    named: bool


class WiredNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place in the topology, and its internal wiring.

    Attributes:
        switch: The switch above it; None: unknown.
        gpus_total: As declared.
        read: Whether the rest was ever read.
        islands: GPUs that NVLink connects, by index.
        domains: NVLink domains of its GPUs, which may span nodes.
        fabric_gbps: What its NICs carry for jobs on several nodes, together, one direction.
    """

    name: str
    partition: str
    switch: str | None = None
    gpus_total: int
    read: bool = False
    islands: tuple[tuple[int, ...], ...] = ()
    domains: tuple[str, ...] = ()
    fabric_gbps: float | None = None
    gpus: tuple[GpuWiring, ...] = ()
    nics: tuple[Nic, ...] = ()


class TopologyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster's topology and its source; parents precede children."""

    source: Literal["declared", "discovered", "none"]
    switches: tuple[Switch, ...]
    nodes: tuple[WiredNode, ...]


class FlavorRow(msgspec.Struct, frozen=True, kw_only=True):
    """A flavor and whether it could start now.

    Attributes:
        nodes: Over how many nodes its gang goes; None where it never fits the partition.
        share: Its dominant share of the partition (the paper's λ).
        free_now: How many such jobs would fit side by side on what is free now.
    """

    partition: str
    flavor: str
    gpus: int
    cores: int
    memory_mib: int
    time_limit_s: int
    nodes: int | None
    share: float
    free_now: int


class PowerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the power report; None is unknown, or has no meaning for this kind of row.

    Attributes:
        name: Partition, node, user or job id.
        hours: Length of the row's window (Eq. 3's T for partitions and nodes), None for users and jobs.
        gpu_hours: GPU hours held by jobs.
        utilization: Eq. 4 of the paper (see `gpusched.accounting.report`); for users and jobs their part of it.
        measured_utilization: NVML's, over the GPU time whose utilization is known (0..1).
        idle_gpu_hours: GPU hours held at nearly no measured utilization. idle_energy_kwh: measured in these;
            ``idle_energy_unknown_share``: part of them without a measurement (0..1).
        energy_kwh: Measured; partitions and nodes with their idle GPUs, users and jobs with the GPUs they held only.
        energy_unknown_share: Part of the row's GPU time without a measurement (0..1): then the energy is a lower bound.
        rated_kwh: Rated power times hours.
        inefficient_kwh: Rated power times hours times (1 - U); ``inefficient_cost`` is what it costs.
        cost: Of the measured energy.
    """

    name: str
    partition: str | None = None
    user: str | None = None
    hours: float | None = None
    gpu_hours: float = 0.0
    utilization: float | None = None
    measured_utilization: float | None = None
    idle_gpu_hours: float | None = None
    idle_energy_kwh: float | None = None
    idle_energy_unknown_share: float | None = None
    energy_kwh: float | None = None
    energy_unknown_share: float | None = None
    rated_kwh: float | None = None
    inefficient_kwh: float | None = None
    inefficient_cost: float | None = None
    cost: float | None = None


class HeldIdle(msgspec.Struct, frozen=True, kw_only=True):
    """A job that holds idle GPUs.

    Attributes:
        gpus: GPUs it holds; ``idle_gpus`` of them (on average) at nearly no utilization.
        idle_s: Since how long.
    """

    job: str
    name: str
    user: str
    partition: str
    nodes: tuple[str, ...]
    gpus: int
    idle_gpus: int
    idle_s: float


class IdleRow(msgspec.Struct, frozen=True, kw_only=True):
    """GPU hours that a job, or all jobs of a user, held below the threshold of utilization.

    Attributes:
        job, name, partition: None: the row is a user's.
        gpu_hours: All that were held.
        idle_gpu_hours: Those of them that were idle, ``energy_kwh`` what was measured in them, and its ``cost``.
        energy_unknown_share: Part of the idle hours whose energy was not measured (0..1): it is a lower bound.
        running: The job holds them still.
    """

    user: str
    job: str | None = None
    name: str | None = None
    partition: str | None = None
    gpu_hours: float
    idle_gpu_hours: float
    energy_kwh: float | None
    energy_unknown_share: float | None
    cost: float | None
    running: bool = False


class IdleReport(msgspec.Struct, frozen=True, kw_only=True):
    """Idle GPU hours by holder over [since, until] (Unix seconds); the most first."""

    since: float
    until: float
    currency: str
    price_per_kwh: float | None
    users: tuple[IdleRow, ...]
    jobs: tuple[IdleRow, ...]
    total: IdleRow


class PowerReport(msgspec.Struct, frozen=True, kw_only=True):
    """The power report over [since, until] (Unix seconds).

    ``unheld_kwh``: measured energy of unallocated GPUs (included in partition and node rows, not in users').
    ``simulated``: nodes whose figures are made up.
    """

    since: float
    until: float
    by: By
    currency: str
    price_per_kwh: float | None
    rows: tuple[PowerRow, ...]
    total: PowerRow
    unheld_kwh: float | None
    held_idle: tuple[HeldIdle, ...]
    simulated: tuple[str, ...] = ()


class QuotaRow(msgspec.Struct, frozen=True, kw_only=True):
    """One limit and its usage.

    Attributes:
        subject: ``user ann``, ``group physics``, ``class high``, ``user ann in class high``.
        resource: gpus, jobs, queued, gpu_hours, or time (seconds, of each job).
        used: GPU hours: of the last seven days and, for running jobs, up to their limits; None: it is of each job.
        reason: Of a job that it keeps from starting, or that it refuses.
        frees: Where nothing is left: when something comes back at the latest (Unix seconds), as far as is known.
    """

    subject: str
    resource: Literal["gpus", "jobs", "queued", "gpu_hours", "time"]
    used: float | None
    limit: float
    reason: str
    frees: float | None = None

    @property
    def left(self) -> float | None:
        """Return what is left; never below 0."""
        return None if self.used is None else max(0.0, self.limit - self.used)


class QosRow(msgspec.Struct, frozen=True, kw_only=True):
    """A class of service that the user may use; ``preemptible`` None: as each job says."""

    name: str
    priority: int
    preemptible: bool | None
    exempt: bool


class ShareRow(msgspec.Struct, frozen=True, kw_only=True):
    """A user's standing in a group under fair share.

    ``gpu_hours``: used lately, decayed. ``place``: 1 goes first; users who are equal share it.
    """

    group: str
    user: str
    shares: int
    gpu_hours: float
    place: int


class QuotaReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of ``gpusched quota``; ``users``: the users it covers."""

    users: tuple[str, ...]
    rows: tuple[QuotaRow, ...] = ()
    classes: tuple[QosRow, ...] = ()
    shares: tuple[ShareRow, ...] = ()
    now: float


class PolicyStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start that a policy decided; ``time``: Unix seconds."""

    job: str
    time: float
    nodes: tuple[str, ...]


class PolicyDecisions(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which a policy was active in a partition, and the starts it decided.

    Attributes:
        act, user: The change that made it active, and who made it ("": a change of files).
        digest: Of its weights; "": it has none. since, until: Unix seconds; None: it is active.
    """

    partition: str
    policy: str
    version: str
    digest: str
    act: str
    user: str
    since: float
    until: float | None
    forced: bool
    starts: tuple[PolicyStart, ...]
