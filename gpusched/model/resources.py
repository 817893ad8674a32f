"""Resources that the operator declares: partitions, nodes, flavors."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from gpusched.model.health import HealthAction
from gpusched.model.healthchecks import HealthCheck
from gpusched.model.idle import IdleRules
from gpusched.model.limits import Groups, Quotas
from gpusched.model.notices import Notices
from gpusched.model.slicetables import gpus_counted
from gpusched.model.topology import Topology


class RuntimeName(StrEnum):
    """The runtimes of this package; those of other packages are components of the group ``runtimes``."""

    PODMAN = "podman"
    DOCKER = "docker"
    APPTAINER = "apptainer"
    PROCESS = "process"


class Flavor(msgspec.Struct, frozen=True, kw_only=True):
    """A named request of GPUs, cores, memory and time (GIST paper, Table 2).

    ``gpus``, ``cores`` and ``memory_mib`` are totals over the whole job, as in the paper: a flavor larger than one node
    of its partition becomes a gang of whole equal parts. ``profile``: its GPUs are MIG slices of it; "": whole GPUs.
    """

    name: str
    gpus: int
    cores: int
    memory_mib: int
    time_limit_s: int
    profile: str = ""

    @property
    def gpus_counted(self) -> float:
        """Return its GPUs, slices by their share of one."""
        return gpus_counted(self.gpus, self.profile)


class SharingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How two jobs may share a node's GPUs, where both ask for it.

    Attributes:
        mode: What shares them: CUDA's Multi-Process Service, or the driver, by time slices.
        slowdown: By which part either of the two may be slower than alone, as predicted.
        pipe: Folder of the MPS control daemon's pipes on the node.
    """

    mode: Literal["mps", "time-slicing"]
    slowdown: float = 0.3
    pipe: str = "/tmp/nvidia-mps"


class MigSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How GPUs of a node are cut into MIG slices while jobs ask for slices, and made whole again afterwards.

    Attributes:
        gpus: NVML indices of those that may be cut; None: all of the node's.
        command: Words that run nvidia-smi as root on the node.
        cdi_command: Words that write podman's list of devices anew, after each cut.
    """

    gpus: tuple[int, ...] | None = None
    command: tuple[str, ...] = ("sudo", "-n", "/usr/bin/nvidia-smi")
    cdi_command: tuple[str, ...] = (
        "sudo", "-n", "/usr/bin/nvidia-ctk", "cdi", "generate", "--output=/var/run/cdi/nvidia.yaml",
    )  # fmt: skip


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One server as declared in inventory.yaml.

    Attributes:
        address: Host name or address for SSH (an alias of ~/.ssh/config is good).
        transport: ``ssh``, or ``local`` for the machine gpusched itself runs on; ``none``: it is never asked, and all
            that is known of it is what Slurm says.
        gpu_indices: The NVML indices to allocate; None means 0 .. gpus-1.
        become: ``sudo``: all commands run as root by it, for nodes that do not let root log in.
        rated_power_w: The server's rated power, for inefficient energy (kW x h x (1 - U)).
        fabric_address: What MASTER_ADDR says when the training network is not the SSH one.
        simulated_gpus: Readings are made up by the probe and marked as simulated (demo only).
        sharing: None: each GPU is one job's.
        health_checks: The site's own checks.
        mig: None: GPUs in MIG mode stay as they are cut.
        health: What follows from conditions, by kind; others: as in `gpusched.model.health.KINDS`.
        kernel_log: A file with the kernel's messages; None: the kernel or journald is asked.
    """

    name: str
    partition: str
    address: str
    transport: Literal["ssh", "local", "none"] = "ssh"
    user: str | None = None
    become: Literal["sudo"] | None = None
    port: int | None = None
    key: str | None = None
    gpus: int
    cores: int
    memory_mib: int
    gpu_type: str = ""
    gpu_indices: tuple[int, ...] | None = None
    rated_power_w: float | None = None
    runtime: str
    fabric_address: str | None = None
    simulated_gpus: bool = False
    sharing: SharingSettings | None = None
    health_checks: tuple[HealthCheck, ...] = ()
    mig: MigSettings | None = None
    health: dict[str, HealthAction] = {}
    kernel_log: str | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.address))  # not of all: ``health`` is a mapping

    def indices(self) -> tuple[int, ...]:
        """Return the NVML indices of the GPUs this node offers, ascending."""
        return self.gpu_indices if self.gpu_indices is not None else tuple(range(self.gpus))

    def cut_on_demand(self) -> tuple[int, ...]:
        """Return the NVML indices of the GPUs that gpusched cuts into slices and makes whole, ascending."""
        if self.mig is None:
            return ()
        return tuple(index for index in self.indices() if self.mig.gpus is None or index in self.mig.gpus)


class ResizeRules(msgspec.Struct, frozen=True, kw_only=True):
    """A partition's rules for resizable jobs.

    Attributes:
        least, most: GPUs between which they are resized; None: there is no bound.
        cooldown_s, batch: Of jobs that do not say, as in `gpusched.model.jobs.Elastic`.
        default: Jobs that say neither --resizable nor --no-resizable are.
    """

    least: int = 1
    most: int | None = None
    cooldown_s: int = 600
    batch: Literal["fixed", "scale"] = "fixed"
    default: bool = False

    def allow(self, gpus: int) -> bool:
        """Return whether a resizable job may have this many GPUs."""
        return self.least <= gpus and (self.most is None or gpus <= self.most)


class PlacementRules(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of ``max_spread`` and ``placement_wait_s``, as in `gpusched.model.jobs.JobSpec`."""

    max_spread: Literal["", "rack", "any"] = ""
    placement_wait_s: int | None = None


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """A set of similar nodes with its flavors and policy.

    ``policy`` names a file of policies/ without its suffix. ``auto_promote``: as in `Settings`; None: as it says there.
    ``preemptible``, ``placement``, ``slurm_env``: of jobs that do not say. ``resizable``: of those that can be resized.
    ``default``: Jobs that name no partition go there. ``idle``: what happens to jobs whose GPUs are idle.
    """

    name: str
    nodes: tuple[Node, ...]
    flavors: tuple[Flavor, ...]
    policy: str = "fifo"
    default_image: str | None = None
    max_time_s: int | None = None
    auto_promote: bool | None = None
    preemptible: bool = False
    resizable: ResizeRules = ResizeRules()
    placement: PlacementRules = PlacementRules()
    slurm_env: bool = False
    default: bool = False
    idle: IdleRules = IdleRules()

    def flavor(self, name: str) -> Flavor | None:
        """Return the flavor called ``name``, or None."""
        return next((f for f in self.flavors if f.name == name), None)

    @property
    def largest_flavor(self) -> Flavor | None:
        """Return the flavor with the most GPUs (then cores, then memory): the upper bound of other requests."""
        return max(self.flavors, key=lambda f: (f.gpus_counted, f.cores, f.memory_mib), default=None)


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on collected output in the state folder."""

    max_mib_per_job: int = 64
    max_total_mib: int = 10240


class BackupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Backups of the state folder that the controller makes.

    Attributes:
        to: Their folder; "": it makes none.
        every_s: Between two of them.
        keep: How many of the latest are kept, besides the last one of each of ``keep_days`` days.
    """

    to: str = ""
    every_s: int = 3600
    keep: int = 24
    keep_days: int = 7


class EventSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The receivers of each event as JSON: a file, by lines, and a webhook, by POST; "": none."""

    file: str = ""
    webhook: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Cluster-wide settings of inventory.yaml, each with a working default.

    Attributes:
        tick_s: Pause between two cycles of ``gpusched controller``.
        probe_timeout_s: A node that has not answered within it counts as not answering in this cycle.
        down_after_s: Without an answer for that long a node is DOWN (no new jobs).
        node_fail_after_s: DOWN for that long, its jobs end in NODE_FAIL (and are retried elsewhere if they may be).
        launch_timeout_s: A launch without a ready container by then is given up, and the job retried elsewhere.
        grace_s: Between the first signal and the kill.
        session_keep_s: How long a job of ``gpusched run`` is kept without a terminal attached.
        max_retries: How often a job is started again after NODE_FAIL.
        power_price_per_kwh: For costs; None shows ``-``.
        currency: What the price is in.
        admins: Users, besides root and the controller's own, who may act on all jobs and on nodes.
        shared: Other users of the login node may drop commands too (always so for the state folder /var/lib/gpusched).
        root_jobs: In a shared installation root's jobs run, as root on the nodes.
        allowed_mounts: Host folders that jobs of users other than the controller's own may mount.
        max_queued_jobs_per_user: Maximum pending jobs of one user (each array task counts).
        max_queued_jobs_by_jobs: Maximum of these that jobs may have submitted.
        max_queued_mib_per_user: Maximum MiB of these in the store.
        capabilities: Linux capabilities (without CAP_) that jobs of such users keep; all others are dropped.
        image_transports: Of `gpusched.model.images.TRANSPORTS`: what --image may name besides registries.
        job_dirs: A folder on a disk that all nodes share, where each job gets its own (GPUSCHED_JOB_DIR); None: each
            node keeps what its jobs write there.
        network: The containers' network mode for single-node jobs; gangs always use the host's.
        keep_reports_s: Nightly reports older than that are removed by the next one.
        retrain_days: So many days ``gpusched replay --nightly --auto-retrain`` trains on.
        auto_promote: A candidate of the night that proved no worse than the active policy is promoted.
    """

    tick_s: float = 5.0
    probe_timeout_s: float = 20.0
    down_after_s: float = 60.0
    node_fail_after_s: float = 600.0
    launch_timeout_s: int = 7200
    grace_s: int = 30
    session_keep_s: int = 600
    max_retries: int = 3
    power_price_per_kwh: float | None = None
    currency: str = "EUR"
    admins: tuple[str, ...] = ()
    shared: bool = False
    root_jobs: bool = False
    allowed_mounts: tuple[str, ...] = ()
    max_queued_jobs_per_user: int = 100_000
    max_queued_jobs_by_jobs: int = 100
    max_queued_mib_per_user: int = 256
    capabilities: tuple[str, ...] = ()
    image_transports: tuple[str, ...] = ()
    job_dirs: str | None = None
    network: str = "host"
    known_hosts: str | None = None
    ssh_config: str | None = None
    connect_timeout_s: float = 10.0
    fairshare_half_life_s: int = 7 * 86400
    keep_reports_s: int = 30 * 86400
    logs: LogSettings = LogSettings()
    events: EventSettings = EventSettings()
    backup: BackupSettings = BackupSettings()
    retrain_days: int = 30
    auto_promote: bool = False


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """A validated inventory.yaml. ``engine``: what starts jobs: gpusched over SSH, or Slurm."""

    path: str
    partitions: tuple[Partition, ...]
    settings: Settings = Settings()
    topology: Topology = Topology()
    engine: Literal["ssh", "slurm"] = "ssh"
    quotas: Quotas = Quotas()
    notices: Notices = Notices()

    @property
    def groups(self) -> Groups:
        """Return the groups of users."""
        return self.quotas.groups

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return all nodes, in the file's order."""
        return tuple(n for p in self.partitions for n in p.nodes)

    def declared_checks(self) -> list[tuple[str, HealthCheck]]:
        """Return the checks of all nodes: (node, check)."""
        return [(node.name, check) for node in self.nodes for check in node.health_checks]

    @property
    def default_partition(self) -> str | None:
        """Return the default partition's name; None: jobs must name one where there are several."""
        return next((p.name for p in self.partitions if p.default), None)

    def partition(self, name: str) -> Partition | None:
        """Return the partition called ``name``, or None."""
        return next((p for p in self.partitions if p.name == name), None)

    def node(self, name: str) -> Node | None:
        """Return the node called ``name``, or None."""
        return next((n for n in self.nodes if n.name == name), None)
