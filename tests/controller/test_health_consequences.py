"""Consequences of a GPU's condition in the controller's cycles: no new jobs, requeue, drain, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.cluster.base import NodeObservation
from gpusched.controller.slurm.nodes import record_beside_slurm
from gpusched.model.health import HealthAction
from gpusched.model.jobs import JobState
from gpusched.model.readings import GpuHealth, NodeState
from gpusched.model.resources import Inventory
from gpusched.model.slurm import SlurmNode
from gpusched.queue.store import DRAINED_BY_HEALTH, NodeRecord
from tests.builders import spec
from tests.controller.imagined import GPUS, Host, inventory, reading_of
from tests.controller.site import Site

FAILED = GpuHealth(remap_failed=True)


def declared(action: HealthAction) -> Inventory:
    """One node, on which the condition has this action."""
    whole = inventory(nodes=1)
    (partition,) = whole.partitions
    nodes = tuple(msgspec.structs.replace(n, health={"remap-failed": action}) for n in partition.nodes)
    return msgspec.structs.replace(whole, partitions=(msgspec.structs.replace(partition, nodes=nodes),))


class Sick(Site):
    """A node with a job on one GPU, which then fails."""

    def __init__(self, state: Path, action: HealthAction) -> None:
        super().__init__(state)
        self.begin(declared(action))
        self.ran = self.submit()
        self.turn(4)
        assert self.state_of(self.ran) == JobState.RUNNING
        allocation = self.job(self.ran).allocation
        assert allocation is not None
        (self.gpu,) = allocation.parts[0].gpus
        self.world.hosts["n0"].health[self.gpu] = FAILED
        self.turn(1)

    def record(self) -> Any:
        return self.store.node_records()["n0"]


@pytest.fixture
def sick(tmp_path: Path, request: pytest.FixtureRequest) -> Sick:
    return Sick(tmp_path, request.param)


@pytest.mark.parametrize("sick", [HealthAction.WARN], indirect=True)
def test_a_warning_changes_nothing(sick: Sick) -> None:
    whole = sick.submit(spec=spec(gpus_per_node=GPUS))
    sick.world.end(sick.world.running()[0][1], 0)
    sick.turn(5)
    assert sick.state_of(whole) == JobState.RUNNING
    assert [c.kind for c in sick.record().health.conditions] == ["remap-failed"]


@pytest.mark.parametrize("sick", [HealthAction.NO_NEW_JOBS], indirect=True)
def test_the_job_there_goes_on_and_the_next_get_the_other_gpus(sick: Sick) -> None:
    others = [sick.submit() for _ in range(GPUS)]
    sick.turn(5)
    assert sick.state_of(sick.ran) == JobState.RUNNING
    states = [sick.state_of(job) for job in others]
    assert states == [JobState.RUNNING] * (GPUS - 1) + [JobState.PENDING]
    given = {a.parts[0].gpus[0] for job in others[:-1] if (a := sick.job(job).allocation) is not None}
    assert given == set(range(GPUS)) - {sick.gpu}
    assert "memory rows could not be replaced" in sick.record().reason
    sick.world.end(sick.world.running()[0][1], 0)
    sick.turn(5)
    assert sick.state_of(others[-1]) == JobState.PENDING  # the GPU is free, and not given


@pytest.mark.parametrize("sick", [HealthAction.REQUEUE], indirect=True)
def test_the_job_there_is_started_again_on_another_gpu_of_the_node(sick: Sick) -> None:
    beside = sick.submit()
    sick.turn(40)
    job, allocation = sick.job(sick.ran), sick.job(sick.ran).allocation
    assert (job.state, job.attempt, job.retries) == (JobState.RUNNING, 2, 1)
    assert allocation is not None
    assert allocation.parts[0].gpus != (sick.gpu,)
    assert job.excluded_nodes == ()
    events = [e for e in sick.store.events(job_id=sick.ran) if e.kind == "ending"]
    assert [e.data["message"] for e in events] == [f"GPU {sick.gpu} of n0: memory rows could not be replaced"]
    assert sick.job(beside).attempt == 1


@pytest.mark.parametrize("sick", [HealthAction.DRAIN], indirect=True)
def test_the_node_is_drained_once_until_it_is_resumed(sick: Sick) -> None:
    later = sick.submit()
    sick.turn(3)
    record = sick.record()
    assert (record.state, record.drained_by) == (NodeState.DRAINING, DRAINED_BY_HEALTH)
    assert f"GPU {sick.gpu}: memory rows could not be replaced" in record.reason
    assert (sick.state_of(sick.ran), sick.state_of(later)) == (JobState.RUNNING, JobState.PENDING)
    sick.world.hosts["n0"].health[sick.gpu] = GpuHealth(remap_failed=False)
    sick.turn(2, seconds=400)
    assert sick.record().health.conditions == ()
    assert sick.record().state in (NodeState.DRAINING, NodeState.DRAINED)  # somebody has to look
    drained = [e for e in sick.store.events(node="n0") if e.kind == "drained"]
    assert [e.user for e in drained] == [DRAINED_BY_HEALTH]


def test_under_slurm_conditions_are_reported_and_nodes_are_left_to_slurm() -> None:
    node = declared(HealthAction.DRAIN).nodes[0]
    slurm_node = SlurmNode(name="n0", address="n0", states=("IDLE",), cpus=16, memory_mib=65536)
    host = Host("n0", health={2: FAILED})
    news = NodeObservation(began=1.0, result=reading_of(host, 1.0))
    record, events = record_beside_slurm(NodeRecord(name="n0"), node, slurm_node, news, {}, False, False, "", 1.0)
    assert [(c.index, c.kind) for c in record.health.conditions] == [(2, "remap-failed")]
    assert [e.kind for e in events if e.kind != "node_up"] == ["condition"]
    assert (record.state, record.drain_reason) == (NodeState.IDLE, None)
