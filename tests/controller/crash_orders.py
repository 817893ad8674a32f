"""Orders of operations between which a controller dies."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpusched.controller.cycle import Cycle
from gpusched.model import ids
from gpusched.model.commands import Cancel, Requeue, Submit
from gpusched.model.jobs import ENDED, JobSpec, JobState, parse_container_name
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, SharingSettings
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.controller.imagined import Host, ImaginedCluster, World, inventory, without

FATE = st.sampled_from(["ok", "ok", "lost", "unheard", "wait"])


POLICIES = {"p": PolicySpec(name="easy", backfill="easy", place="best-fit")}


class CrashOrders(RuleBasedStateMachine):
    """Submissions, failures and restarts in any order; then peace, in which everything must come to its end."""

    preemptible = False
    sharing: SharingSettings | None = None

    def __init__(self) -> None:
        super().__init__()
        self.state = Path(tempfile.mkdtemp(prefix="gpusched-crash-"))
        self.world = World(hosts={n.name: Host(n.name) for n in inventory().nodes})
        self.jobs: list[str] = []
        self.left: set[str] = set()  # nodes that an edit of inventory.yaml has lost
        self.disturbed: set[str] = set()  # jobs that may rightly be started more than once
        self.doubled: Counter[tuple[str, int]] = Counter()
        self._start_controller()

    @initialize()
    def begin(self) -> None:
        Inbox(self.state).create()

    def _start_controller(self) -> None:
        self.store = Store.create_or_open(self.state)
        self.cluster = ImaginedCluster(self.world)
        self.cycle = Cycle(
            self.store, self.state, self._inventory(), POLICIES, self.cluster, clock=lambda: self.world.now
        )

    def _inventory(self) -> Inventory:
        return without(self.left, self.sharing)

    # -- what people do

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def edit_the_inventory(self, node: str) -> None:
        """A node is lost from it, or back in it: no job's affair. (One: where two are left every request fits.)"""
        self.left = {node} - self.left
        self.cycle.inventory = self._inventory()

    @rule(gpus=st.integers(0, 4), nodes=st.integers(1, 2), limit=st.sampled_from([20, 3600]), requeue=st.booleans())
    def submit(self, gpus: int, nodes: int, limit: int, requeue: bool) -> None:
        spec = JobSpec(
            name="j", partition="p", nodes=nodes, gpus_per_node=gpus, cores_per_node=1, memory_mib_per_node=1024,
            time_limit_s=limit, image="i", requeue=requeue, preemptible=self.preemptible,
        )  # fmt: skip
        spec = msgspec.structs.replace(spec, **self._share(gpus, nodes))
        self.world.now += 0.002  # ids are minted by the millisecond
        job_id = ids.mint(self.world.now)[:8] + f"{len(self.jobs):03d}"  # hypothesis wants the same ones every time
        Inbox(self.state).deliver(Submit(time=self.world.now, id=job_id, spec=spec))
        self.jobs.append(job_id)

    def _share(self, gpus: int, nodes: int) -> dict[str, Any]:
        """Return the changes to a job's request."""
        return {}

    @rule(data=st.data(), again=st.booleans(), now=st.booleans())
    def cancel_or_requeue(self, data: st.DataObject, again: bool, now: bool) -> None:
        if not self.jobs:
            return
        job_id = data.draw(st.sampled_from(self.jobs))
        self.disturbed.add(job_id)
        self.world.now += 0.002
        command = (
            Requeue(time=self.world.now, job_ids=(job_id,))
            if again
            else Cancel(time=self.world.now, job_ids=(job_id,), now=now)
        )
        Inbox(self.state).deliver(command)

    # -- what the world does

    @rule(data=st.data(), code=st.sampled_from([0, 0, 0, 1]))
    def job_exits(self, data: st.DataObject, code: int) -> None:
        running = self.world.running()
        if running:
            _, box = data.draw(st.sampled_from(running))
            self.world.end(box, code)

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def cut_or_join(self, node: str) -> None:
        host = self.world.hosts[node]
        host.up = not host.up
        self._disturb(host)

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def reboot(self, node: str) -> None:
        host = self.world.hosts[node]
        self._disturb(host)
        host.reboot()

    def _disturb(self, host: Host) -> None:
        """Whatever holds something of the node, or is on its way there, may be tried again."""
        self.disturbed.update(r.job_id for r in self.store.ranks() if r.node == host.name)
        for operation in self.cluster._pending.values():
            self.disturbed.add(operation.key[0])

    # -- what the controller does, and how it dies

    @rule(data=st.data(), seconds=st.sampled_from([1, 5, 40]))
    def cycles(self, data: st.DataObject, seconds: int) -> None:
        for fates in data.draw(st.lists(st.lists(FATE, max_size=4), min_size=1, max_size=4)):
            self._cycle(fates, seconds)

    @rule(data=st.data())
    def one_cycle(self, data: st.DataObject) -> None:
        self._cycle(data.draw(st.lists(FATE, min_size=1, max_size=4)), 1)

    def _cycle(self, fates: list[str], seconds: int) -> None:
        self.world.now += seconds
        self.world.progress()
        self.cycle.run(0)
        # A node may have gone between the probe and the launch.
        self.disturbed.update(r.job_id for r in self.store.ranks() if not self.world.hosts[r.node].up)
        queue = list(fates)
        self.cluster.deliver(lambda _: queue.pop() if queue else "ok")
        self.no_gpu_twice()

    @rule(node=st.sampled_from(["n0", "n1", "n2"]))
    def slow_probe(self, node: str) -> None:
        """A probe has read the node now, and its answer will be heard in a later cycle."""
        self.cluster.overtaken(node)

    @rule(late=st.booleans())
    def kill_controller(self, late: bool) -> None:
        self.cluster.crash(late)
        self.store.close()
        self._start_controller()

    # -- what must hold

    @invariant()
    def no_gpu_twice(self) -> None:
        used: dict[tuple[str, int], list[str]] = {}
        for host, box in self.world.running():
            for gpu in box.gpus:
                used.setdefault((host.name, gpu), []).append(box.name.split("-")[1])
        assert not [gpu for gpu, jobs in used.items() if len(jobs) > 1 and not self._may_share(jobs)]

    def _may_share(self, jobs: list[str]) -> bool:
        """Whether these may have the same GPU."""
        return False

    @invariant()
    def nothing_runs_twice(self) -> None:
        starts = Counter(self.world.starts)
        assert not [name for name, n in starts.items() if n > 1], "a container began twice"
        attempts: dict[str, set[int]] = {}
        for name in starts:
            key = parse_container_name(name)
            assert key is not None
            attempts.setdefault(key[0], set()).add(key[1])
        assert not [j for j, a in attempts.items() if len(a) > 1 and j not in self.disturbed], "run again without need"

    @invariant()
    def nothing_is_lost(self) -> None:
        waiting = {name.partition(".")[0] for name in (p.name for p in Inbox(self.state).new.glob("*.submit"))}
        for job_id in self.jobs:
            assert job_id in waiting or self.store.job(job_id) is not None

    @invariant()
    def no_allocation_overlaps(self) -> None:
        held: dict[tuple[str, int], list[str]] = {}
        for job in self.store.active():
            assert job.allocation is not None
            for part in job.allocation.parts:
                for gpu in part.gpus:
                    held.setdefault((part.node, gpu), []).append(job.id)
        assert not [gpu for gpu, jobs in held.items() if len(jobs) > 1 and not self._may_share(jobs)]

    def teardown(self) -> None:
        """Peace: all nodes up, all replies arrive, jobs end by themselves. Then nothing may be left anywhere."""
        for host in self.world.hosts.values():
            host.up = True
        self.cycle.inventory = inventory(sharing=self.sharing)
        for _ in range(60):
            self.world.now += 30
            self.world.progress()
            self.cycle.run(0)
            self.cluster.deliver(lambda _: "ok")
            for _, box in self.world.running():
                self.world.end(box, 0)
            if self._settled():
                break
        left = {
            j: str(job.state) + " " + job.message
            for j in self.jobs
            if (job := self.store.job(j)) and job.state not in ENDED
        }
        assert not left, left
        assert not self.store.ranks()
        assert not [b.name for h in self.world.hosts.values() for b in h.boxes.values()]
        assert all(run.end_time is not None for run in self.store.runs(0, self.world.now + 1))
        for job_id in self.jobs:
            job = self.store.job(job_id)
            assert job is not None
            if job_id not in self.disturbed and job.exit_code in (0, None):
                assert job.state in (JobState.COMPLETED, JobState.TIMEOUT, JobState.PENDING), job
        self.store.close()
        shutil.rmtree(self.state)

    def _settled(self) -> bool:
        ended = all((job := self.store.job(j)) is not None and job.state in ENDED for j in self.jobs)
        return ended and not self.store.ranks() and not any(h.boxes for h in self.world.hosts.values())
