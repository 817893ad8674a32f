"""An imagined world behind the `Cluster` port, for searching crash orders by the thousand (hypothesis).

It stands beside, never instead of, the end-to-end tests on real nodes in tests/e2e: there a handful of crashes is tried
for real, here every order of lost replies, late launches, dead nodes and restarts that hypothesis can think of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from gpusched.cluster.base import NodeObservation, Operation, OperationOutcome, RankKey
from gpusched.model.jobs import container_name
from gpusched.model.readings import (
    ContainerReading,
    Gpu,
    GpuHealth,
    GpuProcess,
    NodeReading,
    ProbeFailure,
    ProgressReading,
)
from gpusched.model.resources import (
    Flavor,
    Inventory,
    MigSettings,
    Node,
    Partition,
    RuntimeName,
    Settings,
    SharingSettings,
)
from gpusched.model.slices import Cut, MigSlice, gpu_of
from gpusched.queue.clock import Clock

GPUS, GPU_MIB = 4, 41 << 10


@dataclass
class Box:
    """A container on an imagined node. ``stuck``: neither signals nor removals do anything."""

    name: str
    gpus: tuple[int, ...]
    hold: bool
    phase: str = "preparing"
    began: float = 0.0  # by the world's clock
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int | None = None
    stuck: bool = False
    survives: tuple[str, ...] = ()  # signals
    progress: ProgressReading | None = None  # as its job says


@dataclass
class Host:
    """An imagined node: it works on whether anyone can reach it or not."""

    name: str
    up: bool = True
    boot: int = 0
    ahead: float = 0.0  # its wall clock, against the world's
    reports_run_time: bool = True  # whether it says how long containers have run
    engine: bool = True  # whether its container engine answers
    use: float | None = None  # utilization of its GPUs in percent
    own_use: dict[int, float | None] = field(default_factory=dict)  # of some of them
    processes: tuple[GpuProcess, ...] = ()  # on each of them
    boxes: dict[str, Box] = field(default_factory=dict)
    health: dict[int, GpuHealth] = field(default_factory=dict)  # of its GPUs
    mig: dict[int, tuple[tuple[str, int], ...]] = field(default_factory=dict)  # GPUs in MIG mode: (profile, start)
    cuts: list[Cut] = field(default_factory=list)  # that were carried out, in order

    def cut(self, cut: Cut, half: bool = False) -> str:
        """As the real script: nothing while a container is on the GPU. ``half``: it is broken off."""
        used = [b.name for b in self.boxes.values() if b.phase in ("preparing", "ready", "running", "lost")
                and cut.gpu in map(gpu_of, b.gpus)]  # fmt: skip
        if used:
            return f"GPU {cut.gpu} is in use by {used[0]}"
        self.cuts.append(cut)
        if half:
            self.mig[cut.gpu] = cut.slices[:1]
        elif cut.slices:
            self.mig[cut.gpu] = cut.slices
        else:
            self.mig.pop(cut.gpu, None)
        return ""

    def gpu(self, index: int, now: float) -> Gpu:
        slices = tuple(
            MigSlice(gpu=index, start=start, profile=profile, uuid=f"MIG-{index}-{start}", gi=start, ci=0, device=i)
            for i, (profile, start) in enumerate(self.mig.get(index, ()))
        )
        return Gpu(
            index=index, uuid=f"GPU-{self.name}-{index}", energy_j=now * 100, memory_total_mib=GPU_MIB,
            utilization_pct=self.own_use.get(index, self.use), processes=self.processes, mig_mode=index in self.mig,
            slices=slices, health=self.health.get(index),
        )  # fmt: skip

    def reboot(self) -> None:
        self.boot += 1
        for box in self.boxes.values():
            if box.phase in ("running", "preparing"):
                box.phase = "lost"  # the attempt's folder is on disk and says that it was claimed


@dataclass
class World:
    """All hosts and the clock; it outlives controllers."""

    now: float = 1_800_000_000.0
    hosts: dict[str, Host] = field(default_factory=dict)
    starts: list[str] = field(default_factory=list)  # names of boxes, each time one begins to run
    signals: list[str | None] = field(default_factory=list)  # that reached a running box

    def run_of(self, key: RankKey) -> list[Box]:
        return [box for host in self.hosts.values() for box in host.boxes.values() if box.name == container_name(*key)]

    def progress(self) -> None:
        """Launchers do their work."""
        for host in self.hosts.values():
            for box in host.boxes.values():
                if box.phase == "preparing":
                    self._ready(box, host.ahead)

    def _ready(self, box: Box, ahead: float) -> None:
        if box.hold:
            box.phase = "ready"
        else:
            self.begin(box, ahead)

    def begin(self, box: Box, ahead: float = 0.0) -> None:
        box.phase, box.began, box.started_at = "running", self.now, self.now + ahead
        self.starts.append(box.name)

    def end(self, box: Box, code: int) -> None:
        box.phase, box.exit_code, box.finished_at = "exited", code, self.now

    def running(self) -> list[tuple[Host, Box]]:
        return [(h, b) for h in self.hosts.values() for b in h.boxes.values() if b.phase == "running"]

    def carry_out(self, operation: Operation) -> str:
        """Do an operation on its node, as the real scripts do: idempotent, and refusing a second launch of a name."""
        host = self.hosts[operation.node]
        if operation.cut is not None:
            return host.cut(operation.cut)
        name = container_name(*operation.key)
        box = host.boxes.get(name)
        if operation.verb == "launch":
            assert operation.request is not None
            if box is None:
                host.boxes[name] = Box(name=name, gpus=operation.request.gpus, hold=operation.request.hold)
        elif operation.verb == "start" and box is not None and box.phase == "ready":
            self.begin(box, host.ahead)
        elif operation.verb == "signal" and box is not None and box.phase == "running":
            if box.stuck:
                return "it is stuck"
            self.signals.append(operation.signal)
            if operation.signal not in box.survives:
                self.end(box, 137 if operation.signal == "KILL" else 143)
        elif operation.verb == "remove" and box is not None and box.stuck:
            return "it is stuck"
        elif operation.verb == "remove":
            host.boxes.pop(name, None)
        return ""


class ImaginedCluster:
    """One controller's connection to the world; a crash drops it together with the replies it waited for."""

    def __init__(self, world: World, dates: Clock | None = None) -> None:
        self.world, self._dates = world, dates
        self._pending: dict[RankKey, Operation] = {}
        self._done: list[OperationOutcome] = []
        self._late: dict[str, NodeObservation] = {}
        self.asked: list[str] = []  # nodes, one by one
        self.drained: set[str] = set()  # as of the last observation

    def overtaken(self, node: str) -> None:
        """Probe now, be heard in the next cycle."""
        host = self.world.hosts[node]
        if host.up:
            self._late[node] = NodeObservation(began=self.world.now, result=reading_of(host, self.world.now))

    def observe(
        self,
        nodes: Iterable[Node],
        patience_s: float,
        known: Container[str] = frozenset(),
        drained: Container[str] = frozenset(),
    ) -> dict[str, NodeObservation]:
        self.world.now += 0.01
        self.drained = {name for name in self.world.hosts if name in drained}
        news: dict[str, NodeObservation] = {}
        for node in nodes:
            if node.name in known:
                continue
            self.asked.append(node.name)
            host = self.world.hosts[node.name]
            result: NodeReading | ProbeFailure
            if host.up:
                result = reading_of(host, self.world.now)
            else:
                result = ProbeFailure(node=node.name, time=self.world.now, kind="timeout", reason="no answer")
            news[node.name] = NodeObservation(began=self.world.now, result=result)
        news.update(self._late)
        self._late.clear()
        return {name: self._dated(observation) for name, observation in news.items()}

    def _dated(self, observation: NodeObservation) -> NodeObservation:
        """As in `SshCluster`: an event is dated when it is reported."""
        if self._dates is None:
            return observation
        offset, result = self._dates.offset, observation.result
        if isinstance(result, NodeReading) and result.clock_skew_s is not None:
            result = replace(result, clock_skew_s=result.clock_skew_s - offset)
        return NodeObservation(began=observation.began + offset, result=replace(result, time=result.time + offset))

    def perform(self, works: Iterable[Operation]) -> None:
        for operation in works:
            self._pending.setdefault(operation.key, operation)

    def finished(self) -> list[OperationOutcome]:
        done, self._done = self._done, []
        offset = self._dates.offset if self._dates else 0.0
        return [replace(outcome, time=outcome.time + offset) for outcome in done]

    def busy(self) -> frozenset[RankKey]:
        return frozenset(self._pending)

    def close(self) -> None:
        pass

    def deliver(self, fate: Callable[[Operation], str]) -> None:
        """Settle what is under way: ``fate`` says ok, lost (not done, error), unheard (done, error) or wait."""
        for key, operation in list(self._pending.items()):
            verdict = fate(operation) if self.world.hosts[operation.node].up else "lost"
            if verdict == "wait":
                continue
            del self._pending[key]
            if verdict == "half" and operation.cut is not None:
                said = self.world.hosts[operation.node].cut(operation.cut, half=True)
            else:
                said = self.world.carry_out(operation) if verdict in ("ok", "unheard") else ""
            self.world.now += 0.001
            lost = verdict != "ok"
            error = "connection lost" if lost else said
            self._done.append(OperationOutcome(operation=operation, time=self.world.now, error=error, transient=lost))

    def crash(self, late: bool) -> None:
        """The controller dies; what it had sent arrives all the same, or never."""
        for operation in self._pending.values():
            if late and self.world.hosts[operation.node].up:
                self.world.carry_out(operation)
        self._pending.clear()


def reading_of(host: Host, now: float) -> NodeReading:
    boxes = host.boxes.values() if host.engine else None
    return NodeReading(
        node=host.name,
        time=now,
        boot_id=f"{host.name}-{host.boot}",
        clock_skew_s=host.ahead,
        source="nvml",
        gpus=tuple(host.gpu(index, now) for index in range(GPUS)),
        containers=None
        if boxes is None
        else tuple(
            ContainerReading(
                name=box.name,
                phase=box.phase,  # type: ignore[arg-type]
                exit_code=box.exit_code,
                started_at=box.started_at,
                finished_at=box.finished_at,
                ran_s=now - box.began if box.phase == "running" and host.reports_run_time else None,
                error="killed" if box.phase == "failed" else None,
                progress=box.progress,
            )
            for box in boxes
        ),
    )


def inventory(nodes: int = 3, sharing: SharingSettings | None = None) -> Inventory:
    declared = tuple(
        Node(
            name=f"n{i}", partition="p", address=f"n{i}", gpus=GPUS, cores=16, memory_mib=65536,
            rated_power_w=1000.0, runtime=RuntimeName.PODMAN, sharing=sharing,
        )
        for i in range(nodes)
    )  # fmt: skip
    flavors = (Flavor(name="f", gpus=2 * GPUS, cores=32, memory_mib=131072, time_limit_s=3600),)
    partition = Partition(name="p", nodes=declared, flavors=flavors, policy="easy")
    settings = Settings(down_after_s=30, node_fail_after_s=60, grace_s=10, max_retries=2)
    return Inventory(path="inventory.yaml", partitions=(partition,), settings=settings)


def on_demand(gpus: tuple[int, ...] | None = None) -> Inventory:
    """The inventory whose nodes have these GPUs cut on demand; all where None."""
    declared = inventory()
    (partition,) = declared.partitions
    nodes = tuple(replace(node, mig=MigSettings(gpus=gpus)) for node in partition.nodes)
    return replace(declared, partitions=(replace(partition, nodes=nodes),))


def without(names: Collection[str], sharing: SharingSettings | None = None) -> Inventory:
    """`inventory` after an edit that lost some nodes."""
    whole = inventory(sharing=sharing)
    (partition,) = whole.partitions
    left = tuple(node for node in partition.nodes if node.name not in names)
    return msgspec.structs.replace(whole, partitions=(msgspec.structs.replace(partition, nodes=left),))
