"""Two jobs on the same GPUs, as the controller has them: who is there when, who pays what, and whatever breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from gpusched.cluster.requests import environment
from gpusched.controller.cycle import Cycle
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.interference import job_class_of
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.progress import JobProgress
from gpusched.model.resources import Inventory, SharingSettings
from gpusched.nightly.proof import scenario_for
from gpusched.nodes.runtimes.apptainer import Apptainer
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.nodes.runtimes.engine import Docker, Podman
from gpusched.queue.inbox import Inbox
from gpusched.queue.promotions import Shadow
from gpusched.queue.store import Store
from gpusched.sim.profiles import Profiles
from gpusched.sim.rates import Rates
from gpusched.study.options import ReplayRequest
from gpusched.study.request import resolve
from gpusched.traces.readers.history import trace_of
from tests.builders import spec
from tests.controller.crash_orders import POLICIES, CrashOrders
from tests.controller.imagined import GPUS, Host, ImaginedCluster, World, inventory
from tests.controller.site import Turns

TURNS = SharingSettings(mode="time-slicing", slowdown=1.0)


class Site(Turns):
    """A controller over one imagined node of four GPUs, which two jobs may share."""

    def __init__(self, state: Path) -> None:
        self.state, self.inbox = state, Inbox(state)
        self.inbox.create()
        self.world = World(hosts={"n0": Host("n0")})
        self.store = Store.create_or_open(state)
        self.start_controller(inventory(1, TURNS))

    def start_controller(self, declared: Inventory) -> None:
        self.cluster = ImaginedCluster(self.world)
        self.cycle = Cycle(self.store, self.state, declared, POLICIES, self.cluster, clock=lambda: self.world.now)

    def submit(self, gpus: int, name: str = "j", **more: Any) -> str:
        self.world.now += 0.002
        asked = {"share": "pairs", "gpu_memory_mib": 20 << 10} | more
        command = Submit(
            time=self.world.now, id=ids.mint(self.world.now), spec=spec(gpus_per_node=gpus, name=name, **asked)
        )
        self.inbox.deliver(command)
        return command.id

    def gpus(self, job_id: str) -> tuple[int, ...]:
        allocation = self.job(job_id).allocation
        return allocation.parts[0].gpus if allocation else ()

    def end(self, job_id: str) -> None:
        for _, box in self.world.running():
            if box.name.startswith(f"gpusched-{job_id}-"):
                self.world.end(box, 0)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


def test_a_shadow_shares_too(site: Site) -> None:
    site.store.put_shadow(Shadow(partition="p", spec=POLICIES["p"], since=0.0, by="ann"))
    site.submit(GPUS)
    site.turn(3)
    site.submit(2)
    site.turn(4)
    shadow = site.store.shadows()["p"]
    assert (shadow.trouble, shadow.live_starts, shadow.shadow_starts) == ("", 2, 2)
    assert shadow.same == shadow.decisions


def test_a_sharing_job_pays_half_and_its_end_leaves_the_other_running(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    first = site.submit(GPUS)
    site.turn(3)
    second, third = site.submit(2), site.submit(1)
    site.turn(4)
    assert [site.gpus(job) for job in (first, second)] == [(0, 1, 2, 3), (0, 1)]
    assert site.job(third).state is JobState.PENDING, "one partner and no more"
    site.turn(20)
    site.end(second)
    site.turn(3)
    assert [site.job(job).state for job in (first, second)] == [JobState.RUNNING, JobState.COMPLETED]
    assert site.gpus(third) == (0,), "and now it may have another"
    stories = {
        job: [e.data["with"] for e in site.store.events(job_id=job) if e.kind == "sharing"]
        for job in (first, second, third)
    }
    assert stories == {first: [second, third], second: [first], third: [first]}
    site.turn(5)
    for job in (first, third):
        site.end(job)
    site.turn(5)
    energies = {job: site.job(job).energy_j or 0.0 for job in (first, second, third)}
    rows = site.store.usage(0)
    held = sum(row.energy_j for row in rows if row.job_id)
    assert sum(energies.values()) == pytest.approx(held)
    assert energies[second] > 0
    (run,) = (run for run in site.store.runs(0, site.world.now + 1) if run.job_id == second)
    assert run.end_time is not None
    assert energies[second] == pytest.approx(100.0 * 2 / 2 * (run.end_time - run.start_time), rel=0.15)
    for node_s in {row.bucket: 0 for row in rows}:
        total = sum(row.gpu_s for row in rows if row.bucket == node_s)
        assert total <= GPUS * 300 + 1e-6
    assert sum(row.gpu_s for row in rows) * 100 == pytest.approx(sum(row.energy_j for row in rows))
    runs = site.store.runs(0, site.world.now)
    (whole,) = (run for run in runs if run.job_id == first)
    assert whole.shareable == {"n0": (0, 1, 2, 3)}
    declared = site.cycle.inventory
    history = trace_of(site.store, name="own")
    assert history.share_mib is not None
    assert history.share_mib.tolist() == [20 << 10] * 3
    scenario = scenario_for(history, declared, declared.partitions[0], reader=site.store)
    assert scenario.believed is not None
    assert scenario.believed.row.tolist() == [0, 0, 0]
    assert np.isfinite(scenario.believed.lost).all()  # a site that allows much
    monkeypatch.setenv("GPUSCHED_STATE", str(site.state))
    monkeypatch.setattr("gpusched.study.request.own_inventory", lambda: declared)
    monkeypatch.setattr("gpusched.study.request._rates", lambda *of: Rates(profiles=Profiles(series={})))
    (planned,) = resolve(ReplayRequest(load=2.0, policies=("fifo",)))
    stretched = planned.scenario.believed
    assert stretched is not None, "also at another load, and at measured speeds"
    assert stretched.row.tolist() == [0, 0, 0]
    (seconds,) = site.store.gpu_seconds_by_user(0, 1e12, site.world.now).values()
    alone = GPUS * ((whole.end_time or 0) - whole.start_time)
    assert seconds == pytest.approx(alone, rel=0.01), "of one user, each GPU once while two of his jobs had it"


def test_jobs_launched_before_sharing_stay_alone(site: Site) -> None:
    site.start_controller(inventory(1))
    first = site.submit(GPUS)
    site.turn(3)
    second = site.submit(1)
    site.start_controller(inventory(1, TURNS))
    site.turn(4)
    assert site.job(first).state is JobState.RUNNING
    assert site.job(second).state is JobState.PENDING
    site.end(first)
    site.turn(4)
    assert site.job(second).state is JobState.RUNNING


def report_pace(site: Site, job: str, pace: float) -> None:
    now = site.world.now
    progress = JobProgress(job_id=job, attempt=1, gpus=GPUS).with_step(0.0, None, None, now - 60)
    with site.store.transaction():
        site.store.put_progress([progress.with_step(60 * pace, None, None, now)])


def test_the_cost_of_sharing_is_learned_from_shared_runs(site: Site) -> None:
    for _ in range(2):
        alone = site.submit(GPUS, "a")
        site.turn(3)
        site.turn(7, 10)
        report_pace(site, alone, 10.0)
        site.end(alone)
        site.turn(4)
    pair = [site.submit(GPUS, "a"), site.submit(GPUS, "b")]
    site.turn(5)
    assert [site.gpus(job) for job in pair] == [tuple(range(GPUS))] * 2
    site.turn(7, 10)
    report_pace(site, pair[0], 5.0)
    for job in pair:
        site.end(job)
    site.turn(4)
    beliefs = site.store.beliefs()
    own = beliefs[job_class_of(site.job(pair[0]).user, "a")]
    (beside,) = own.beside
    assert (beside.link, beside.kind, beside.count) == ("gpu", job_class_of(site.job(pair[0]).user, "b"), 1)
    assert [link.link for belief in beliefs.values() for link in belief.links] == ["gpu", "gpu"]


def test_only_jobs_that_may_share_get_the_mps_variables() -> None:
    part = NodeAllocation(rank=0, node="n0", gpus=(2, 3), cores=1, memory_mib=1)
    for sharing, share, uses_mps in (
        (SharingSettings(mode="mps", pipe="/run/mps"), "pairs", True),
        (SharingSettings(mode="mps"), "", False),
        (TURNS, "pairs", False),
        (None, "pairs", False),
    ):
        asked = spec(gpus_per_node=2, share=share, gpu_memory_mib=20480 if share else None)
        job = JobRecord(id="j", user="u", uid=1, spec=asked, state=JobState.STARTING, submit_time=0.0, attempt=1,
                  allocation=Allocation("j", (part,)))  # fmt: skip
        env = environment(job, part, inventory(1, sharing))
        mps = {name: value for name, value in env.items() if name.startswith("CUDA_MPS")}
        limits = {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20480M,1=20480M"}
        assert mps == (limits if uses_mps else {})


@pytest.mark.parametrize("runtime", [Podman(), Docker(), Apptainer()])
def test_a_container_reaches_the_daemon_of_mps(runtime: Podman | Docker | Apptainer) -> None:
    request = LaunchRequest(
        name="gpusched-j-1-0", cluster_id="c", node="n", job_id="j", attempt=1, rank=0, image="i", command=("x",),
        gpus=(0,), cores=1, memory_mib=64,
    )  # fmt: skip
    plain, mps = (
        runtime.launch(msgspec.structs.replace(request, mps_pipe=pipe)).stdin.decode() for pipe in (None, "/run/mps")
    )
    assert "/run/mps" not in plain
    assert "type=bind,src=/run/mps,dst=/run/mps" in mps
    if not isinstance(runtime, Apptainer):  # which has the node's /dev/shm anyway
        assert ("--ipc host" in plain, "--shm-size" in plain) == (False, True)
        assert ("--ipc host" in mps, "--shm-size" in mps) == (True, False)


class SharingOrders(CrashOrders):
    """`CrashOrders` with jobs of which most may share."""

    sharing = TURNS

    def _share(self, gpus: int, nodes: int) -> dict[str, Any]:
        agrees = gpus and nodes == 1 and len(self.jobs) % 4
        agreed = {"share": "pairs", "gpu_memory_mib": 20 << 10, "gpus_per_node": GPUS - len(self.jobs) % 2}
        return agreed if agrees else {}

    def _may_share(self, jobs: list[str]) -> bool:
        found = [job for name in jobs if (job := self.store.job(name)) is not None]
        return len(found) == 2 and all(job.spec.share for job in found)


TestSharingOrders = SharingOrders.TestCase
TestSharingOrders.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
