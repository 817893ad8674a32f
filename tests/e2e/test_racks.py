"""A job of two nodes waits for its rack, and gets it; another gives up and takes two racks. Then by what that costs."""

from __future__ import annotations

import json
import os
from math import log

import pytest

from gpusched.config.users import user_name
from gpusched.model.interference import JobClassEstimate, JobShape, SpeedSamples, job_class_of
from gpusched.queue.store import Store
from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def in_racks(stopped: Cluster, policy: str) -> Cluster:
    """One partition of four nodes in two racks."""
    stopped.write_inventory(policies={"A100": policy})
    declared = json.loads(stopped.inventory.read_text())
    first, second = (declared["partitions"].pop(name) for name in ("A100", "V100"))
    first["nodes"] += second["nodes"]
    declared["partitions"] = {"A100": first}
    declared["topology"] = {"r1": {"nodes": "dgx[001-002]"}, "r2": {"nodes": "dgx[003-004]"}}
    stopped.inventory.write_text(json.dumps(declared))
    stopped.start_controller()
    return stopped


@pytest.fixture
def racks(stopped: Cluster) -> Cluster:
    """Waiting for one rack."""
    return in_racks(stopped, "rack-wait")


def nodes_of(cluster: Cluster, job: str) -> set[str]:
    allocation = cluster.wait_state(job, "RUNNING").allocation
    assert allocation is not None
    return {part.node for part in allocation.parts}


def test_a_job_waits_for_one_rack_and_another_gives_up(racks: Cluster) -> None:
    held = {node: racks.sh("sleep 300", "--gpus", "8", "--nodelist", node) for node in ("dgx001", "dgx003")}
    for job in held.values():
        racks.wait_state(job, "RUNNING")

    assert "waits for one rack" in racks.cli("submit", "--dry-run", "-p", "A100", "--gpus", "16", "--", "x").stdout
    patient = racks.sh("sleep 300", "--gpus", "16")
    wait_until(
        lambda: "waits for one rack until" in (((j := racks.job(patient)) and j.message) or ""), what="its reason"
    )
    why = racks.json("why", patient)
    assert why["reason"] == "Resources"
    assert "at the latest (rack-wait); it could start now on 2 racks" in why["message"]
    assert [(s["spread"], s["racks"]) for s in why["spreads"]] == [("rack", 1), ("any", 2)]
    racks.cli("cancel", held["dgx003"], "--now")
    assert nodes_of(racks, patient) == {"dgx003", "dgx004"}

    racks.cli("cancel", patient, "--now")
    racks.wait_state(patient)
    third = racks.sh("sleep 300", "--gpus", "8", "--nodelist", "dgx003")
    racks.wait_state(third, "RUNNING")
    hasty = racks.sh("sleep 300", "--gpus", "16", "--placement-wait", "3s")
    assert nodes_of(racks, hasty) == {"dgx002", "dgx004"}
    bound = racks.sh("sleep 300", "--gpus", "16", "--max-spread", "rack", "-N", "2")
    alone = racks.submit("--exclusive", "-t", "5m", "--nodelist", "dgx002", command=("sleep", "300"))
    wait_until(lambda: all((j := racks.job(i)) and j.reason for i in (bound, alone)), what="reasons")
    racks.cli("cancel", hasty, "--now")
    found = racks.wait_state(alone, "RUNNING").allocation
    assert found is not None
    assert [(len(p.gpus), p.cores, p.memory_mib) for p in found.parts] == [(8, 8, 4096)]
    racks.cli("cancel", third, "--now")
    assert nodes_of(racks, bound) == {"dgx003", "dgx004"}

    racks.cli("cancel", bound, "--now")
    halves = [racks.sh("sleep 300", "--gpus", "4", "--nodelist", node) for node in ("dgx003", "dgx004")]
    for job in halves:
        racks.wait_state(job, "RUNNING")
    ranks = "[ $RANK != 0 ] || echo $WORLD_SIZE nodes, $GPUSCHED_GPUS_TOTAL GPUs"
    spread = racks.wait_state(racks.sh(ranks, "--gpus", "8", "--max-spread", "any", "--placement-wait", "0"))
    assert (spread.state, spread.spec.nodes, spread.spec.gpus_per_node) == ("COMPLETED", 2, 4)
    assert racks.logs(spread.id, "--rank", "0").strip() == "2 nodes, 8 GPUs"


def test_a_job_waits_for_the_cheapest_place_and_shows_what_its_own_costs(stopped: Cluster) -> None:
    def paces(gpus: int, racks: int, pace: float) -> SpeedSamples:
        shape = JobShape(gpu_type="A100", unit="steps", gpus=gpus, max_gpus_per_node=gpus // 2, nodes=2, racks=racks)
        return SpeedSamples(shape=shape, logs=((log(pace), 1.0),) * 5, count=5, best=log(pace))

    kind = job_class_of(user_name(os.getuid()), "train-1")
    known = JobClassEstimate(kind=kind, shapes=tuple(paces(16, racks, pace) for racks, pace in ((1, 10.0), (2, 8.0))))
    store = Store.create_or_open(stopped.state)
    with store.transaction():
        store.put_beliefs([known])
    store.close()
    in_racks(stopped, "contention")
    for node in ("dgx001", "dgx003"):
        stopped.wait_state(stopped.sh("sleep 300", "--gpus", "8", "--nodelist", node), "RUNNING")
    new = stopped.sh("sleep 300", "--gpus", "16", "--job-name", "unheard-of")
    assert nodes_of(stopped, new) == {"dgx002", "dgx004"}, "nothing says that it would lose by that"
    stopped.cli("cancel", new, "--now")
    slow = stopped.sh("sleep 300", "--gpus", "16", "--job-name", "train-8")
    wait_until(
        lambda: "waits for a better place" in (((j := stopped.job(slow)) and j.message) or ""), what="its reason"
    )
    why = stopped.json("why", slow)
    assert why["reason"] == "Policy"
    assert "at the latest; started now, it would run 25 % slower" in why["message"]
    hasty = stopped.sh("sleep 300", "--gpus", "16", "--job-name", "train-9", "--placement-wait", "0", "-t", "10m")
    assert nodes_of(stopped, hasty) == {"dgx002", "dgx004"}
    assert "on 2 racks about 25 % slower than in one" in stopped.cli("show", hasty).stdout
    assert "SLOWER" in stopped.cli("status").stdout
