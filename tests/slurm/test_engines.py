"""Decisions do not depend on the engine: an equal situation over SSH and beside Slurm gives the same plan."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusched.cluster.base import NodeObservation
from gpusched.config.policies import BUILT_IN, load_policy, names_in, policy_file
from gpusched.config.weights import TrainedModel, load_model, save_model
from gpusched.controller.nodestate import with_result
from gpusched.controller.slurm.following import JobMirror
from gpusched.controller.slurm.mirror import MirrorContext
from gpusched.controller.slurm.nodes import record_beside_slurm
from gpusched.controller.slurm.requests import SlurmContext
from gpusched.model.jobs import ACTIVE, Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.plan import Plan
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.readings import NodeState
from gpusched.model.slurm import SlurmJob, SlurmNode
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import NodeRecord, Store
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from tests.builders import spec
from tests.controller.imagined import GPUS, Host, inventory, reading_of
from tests.promotion import weights
from tests.sched.rltune_decisions import arrays_of, rule
from tests.sched.topology_decisions import weights as topology_weights

NOW = 1_800_000_000.0
SSH = inventory()
SLURM = msgspec.structs.replace(SSH, engine="slurm")
UIDS = {"alice": 12301, "bob": 12302}


class Asked(NamedTuple):
    """A job as its user has it: what it asks of each node, for so long; ``ran``: it has begun, and ended (2)."""

    gpus: int
    nodes: int
    cores: int
    memory_mib: int
    minutes: int
    user: str
    age_s: int
    ran: int


JOBS = st.lists(
    st.builds(
        Asked, st.sampled_from([1, 1, 2, 3, 4]), st.sampled_from([1, 1, 1, 2, 3]), st.integers(1, 8),
        st.sampled_from([1024, 8192, 30000]), st.sampled_from([1, 5, 60, 600]), st.sampled_from(sorted(UIDS)),
        st.integers(700, 40000), st.sampled_from([0, 0, 0, 1, 1, 2]),
    ),
    min_size=1, max_size=14,
)  # fmt: skip
DOWN = st.sampled_from(["", "", "n1"])


def situation(asked: list[Asked]) -> list[JobRecord]:
    """The jobs as the SSH engine has them; who began has the lowest free GPUs of the first nodes with enough."""
    free = {node.name: list(range(GPUS)) for node in SSH.nodes}
    jobs = []
    for number, one in enumerate(asked):
        request = spec(
            name=f"kind-{one.gpus}", nodes=one.nodes, gpus_per_node=one.gpus, cores_per_node=one.cores,
            memory_mib_per_node=one.memory_mib, time_limit_s=one.minutes * 60, preemptible=False,
        )  # fmt: skip
        job = JobRecord(
            id=str(1000 + number), user=one.user, uid=UIDS[one.user], spec=request, state=JobState.PENDING,
            submit_time=NOW - one.age_s,
        )  # fmt: skip
        where = [name for name, left in free.items() if len(left) >= one.gpus][: one.nodes]
        if one.ran and len(where) == one.nodes:
            parts = tuple(
                NodeAllocation(
                    rank=rank, node=name, gpus=tuple(free[name][: one.gpus]), cores=one.cores, memory_mib=one.memory_mib
                )
                for rank, name in enumerate(where)
            )
            state, start = (JobState.RUNNING, NOW - 30.0) if one.ran == 1 else (JobState.COMPLETED, NOW - 600.0)
            for name in where if one.ran == 1 else ():
                del free[name][: one.gpus]
            job = msgspec.structs.replace(
                job, state=state, start_time=start, attempt=1, allocation=Allocation(job.id, parts),
                end_time=start + 90.0 if one.ran == 2 else None, exit_code=0 if one.ran == 2 else None,
            )  # fmt: skip
        jobs.append(job)
    return jobs


def in_slurm(job: JobRecord) -> SlurmJob:
    """The same job as Slurm has it."""
    parts = job.allocation.parts if job.allocation is not None else ()
    waits = job.state is JobState.PENDING
    return SlurmJob(
        id=job.id, raw_id=job.id, user=job.user, uid=job.uid, account="lab", qos="normal", partitions=("p",),
        name=job.spec.name, state=str(job.state), reason="Priority" if waits else "None", priority=4294901000,
        submit_time=job.submit_time, eligible_time=job.submit_time, start_time=job.start_time,
        end_time=job.end_time, time_limit_s=job.spec.time_limit_s, nodes=job.spec.nodes,
        node_names=tuple(part.node for part in parts), cpus=job.spec.nodes * job.spec.cores_per_node,
        memory_mib=job.spec.nodes * job.spec.memory_mib_per_node, gpus={"": job.spec.gpus}, requeue=True,
        exit_code=job.exit_code,
    )  # fmt: skip


def over_ssh(jobs: list[JobRecord], down: str, store: Store) -> None:
    with store.transaction():
        store.put_jobs(jobs)
        store.put_nodes(
            msgspec.structs.replace(
                with_result(NodeRecord(name=node.name), reading_of(Host(node.name), NOW)),
                state=NodeState.DOWN if node.name == down else NodeState.IDLE,
            )
            for node in SSH.nodes
        )


def beside_slurm(jobs: list[JobRecord], down: str, store: Store) -> None:
    """By Slurm's words alone: nothing of ours comes along."""
    seen = [in_slurm(job) for job in jobs]
    positions = {
        job.id: {part.node: part.gpus for part in job.allocation.parts}
        for job in jobs
        if job.allocation is not None and job.state in ACTIVE
    }
    steps = JobMirror(lambda name: None, ()).steps(
        seen, MirrorContext(site=SlurmContext(inventory=SLURM), positions=positions, now=NOW)
    )
    nodes = []
    for node in SLURM.nodes:
        word = "DOWN" if node.name == down else "IDLE"
        slurm_node = SlurmNode(
            name=node.name, address=node.address, states=(word,), cpus=node.cores, memory_mib=node.memory_mib
        )
        news = NodeObservation(began=NOW, result=reading_of(Host(node.name), NOW))
        record, _ = record_beside_slurm(NodeRecord(name=node.name), node, slurm_node, news, {}, False, "", "", NOW)
        nodes.append(record)
    with store.transaction():
        store.put_jobs(step.job for step in steps)
        store.put_nodes(nodes)


def both(asked: list[Asked], down: str, policy: PolicySpec, models: Mapping[str, TrainedModel]) -> tuple[Plan, Plan]:
    """The checked plans of one situation by the two engines."""
    jobs, plans = situation(asked), []
    with tempfile.TemporaryDirectory() as folder:
        for engine, put in ((SSH, over_ssh), (SLURM, beside_slurm)):
            store = Store.create_or_open(Path(folder) / engine.engine)
            put(jobs, down, store)
            snapshot = snapshot_of_store(store, engine, {"p": policy}, NOW, seed=7)
            plan, rejections = check(decide(snapshot, models), snapshot)
            assert rejections == ()
            assert plan.troubles == {}
            plans.append(plan)
            store.close()
    return plans[0], plans[1]


def same_decisions(ssh: Plan, slurm: Plan, down: str) -> None:
    """Whatever is decided is the same, and so is why the others wait, but for the engines' words for a node's state."""
    assert ssh.actions == slurm.actions
    if not down:
        assert ssh == slurm
    assert {job: reason.code for job, reason in ssh.reasons.items()} == {
        job: reason.code for job, reason in slurm.reasons.items()
    }


def heuristics() -> list[str]:
    found = []
    for name in names_in((BUILT_IN,)):
        file = policy_file(name, (BUILT_IN,))
        policy = load_policy(file) if file is not None else None
        if (
            policy is not None
            and policy.agent is None
            and policy.sizes == "base"
            and policy.place not in MAPPING_PLACES
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("name", heuristics())
def test_heuristics_decide_the_same(name: str) -> None:
    policy = load_policy(BUILT_IN / f"{name}.yaml")

    @settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(JOBS, DOWN)
    def same(asked: list[Asked], down: str) -> None:
        ssh, slurm = both(asked, down, policy, {})
        same_decisions(ssh, slurm, down)

    same()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PolicySpec, TrainedModel]]:
    """Folders of trained policies, as ``gpusched train`` leaves them."""
    folder = tmp_path_factory.mktemp("policies")
    (folder / "gist.yaml").write_text(weights.YAML)
    weights.write(folder / "gist/p.safetensors", seed=3)
    (folder / "rltune.yaml").write_text("agent: rltune\nfallback: easy\nbudget: 60s\n")
    (folder / "rltune").mkdir()
    arrays = arrays_of(rule({"estimate": -1.0}), 1.0, 5)
    save_model(folder / "rltune/p.safetensors", "rltune", arrays, {"knows": "estimate", "backfill": "skip"})
    (folder / "topology.yaml").write_text("agent: topology\nfallback: easy\nbudget: 60s\nplace: contention\n")
    (folder / "topology").mkdir()
    save_model(folder / "topology/p.safetensors", "topology", dict(topology_weights().arrays), {})
    return {
        name: (load_policy(folder / f"{name}.yaml"), load_model(folder / name, "p", name))
        for name in ("gist", "rltune", "topology")
    }


@pytest.mark.parametrize("agent", ["gist", "rltune", "topology"])
def test_a_trained_policys_folder_decides_the_same(
    agent: str, trained: dict[str, tuple[PolicySpec, TrainedModel]]
) -> None:
    policy, model = trained[agent]

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(JOBS, DOWN)
    def same(asked: list[Asked], down: str) -> None:
        ssh, slurm = both(asked, down, policy, {"p": model})
        same_decisions(ssh, slurm, down)

    same()


def test_the_compared_plans_contain_starts_and_reasons(
    trained: dict[str, tuple[PolicySpec, TrainedModel]],
) -> None:
    asked = [Asked(4, 1, 1, 1024, 5, "alice", 900 - n, 1 if n == 0 else 0) for n in range(5)]
    ssh, slurm = both(asked, "", trained["rltune"][0], {"p": trained["rltune"][1]})
    assert ssh == slurm
    assert len(slurm.actions) == 2
    assert len(slurm.reasons) == 2
