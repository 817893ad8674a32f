"""Components of another package that decide live, on real nodes: runtime, order, placement, sizing rule, agent."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from gpusched.config.weights import save_model
from tests.e2e.conftest import Cluster
from tests.plugin.building import HERE, install
from tests.testbed import Testbed, wait_until


@pytest.fixture(scope="module")
def cluster(testbed_session: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run a cluster of nodes with the distribution's runtime and order; all commands have it installed."""
    folder = tmp_path_factory.mktemp("plugins")
    path = os.pathsep.join([str(HERE.parents[1]), str(install(folder))])

    class WithPlugin(Cluster):
        runtime = "process"  # as for the tests' helpers; see the nodes below

        def env(self, **more: str) -> dict[str, str]:
            return super().env(**{"PYTHONPATH": path} | more)

    made = WithPlugin(testbed_session, folder, ("A100",))
    mine = folder / "policies" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("order: short-and-small\nplace: best-fit\nbackfill: none\n")
    nodes = {node.name: {"runtime": "nice"} for node in testbed_session.nodes}
    made.write_inventory(policies={"A100": "mine"}, nodes=nodes)
    made.start_controller(program=("-P", "-m", "gpusched"))  # a Python of its own, for the variable
    yield made
    made.close()
    testbed_session.reset()


def test_a_runtime_of_another_package_runs_jobs(cluster: Cluster) -> None:
    job = cluster.submit("--gpus", "1", command=("sh", "-c", "nice; exit 3"))
    ended = cluster.wait_state(job)
    assert (str(ended.state), ended.exit_code) == ("FAILED", 3)
    assert cluster.logs(job) == "7\n"
    running = cluster.submit("--gpus", "1", command=("sleep", "1000"))
    cluster.wait_state(running, "RUNNING")
    assert cluster.cli("exec", running, "--", "nice").stdout == "7\n"
    cluster.cli("cancel", running)
    assert str(cluster.wait_state(running).state) == "CANCELLED"
    cluster.wait_clean()
    refused = cluster.cli("submit", "-p", "A100", "--gpus", "1", "--image", "busybox", "--", "true", check=False)
    assert "runs jobs without containers; --image does not apply" in refused.stderr


def test_without_its_package_the_runtime_is_one_line_and_jobs_go_on(cluster: Cluster) -> None:
    running = cluster.submit("--gpus", "1", command=("sleep", "1000"))
    cluster.wait_state(running, "RUNNING")
    without = {"PYTHONPATH": str(HERE.parents[1])}
    said = cluster.cli("check", "dgx001", check=False, env=without)
    assert 'runtime: found "nice", expected one of' in said.stdout
    assert cluster.cli("status", env=without).returncode == 0
    cluster.cli("cancel", running)
    cluster.wait_state(running)


def test_an_order_of_another_package_decides_which_job_starts(cluster: Cluster) -> None:
    all_gpus = ["--nodes", "2", "--gpus-per-node", "8"]
    first = cluster.submit(*all_gpus, command=("sleep", "1000"))
    cluster.wait_state(first, "RUNNING")
    long = cluster.submit(*all_gpus, "--time", "2h", command=("sleep", "1000"))
    short = cluster.submit(*all_gpus, "--time", "1h", command=("sleep", "1000"))
    wait_until(lambda: cluster.state_of(short) == "PENDING", 30, "the queue to be taken up")
    cluster.cli("cancel", first)
    cluster.wait_state(short, "RUNNING")
    assert cluster.state_of(long) == "PENDING"
    cluster.cli("cancel", long, short)
    for job in (long, short):
        cluster.wait_state(job)


def decides(cluster: Cluster, policy: str, text: str) -> None:
    """Give the partition this policy, and wait until a job has been started by it: new ones are compiled for first."""
    (cluster.folder / "policies" / f"{policy}.yaml").write_text(text)
    nodes = {node.name: {"runtime": "nice"} for node in cluster.testbed.nodes}
    cluster.write_inventory(policies={"A100": policy}, nodes=nodes)

    def started_by_it() -> bool:
        ended = cluster.wait_state(cluster.submit("--gpus", "1"))
        return ended.policy.startswith(policy)

    wait_until(started_by_it, 60, f"{policy} in charge")


def test_a_placement_of_another_package_chooses_nodes(cluster: Cluster) -> None:
    """Of two free nodes a part of one is the last; one that fails is best-fit, with one line in the log."""
    decides(cluster, "ends", "place: from-both-ends\nbackfill: easy\n")
    for options, node in (("--gpus", "1"), "dgx003"), (("--gpus", "8"), "dgx001"):
        job = cluster.submit(*options, command=("sleep", "1000"))
        running = cluster.wait_state(job, "RUNNING")
        assert running.allocation is not None
        assert [part.node for part in running.allocation.parts] == [node]
        cluster.cli("cancel", job)
        cluster.wait_state(job)
    cluster.wait_clean()
    decides(cluster, "fails", "place: raising\nbackfill: easy\n")
    line = "placement 'raising' of gpusched-example 1.0 does not work: ZeroDivisionError: no such place"
    assert cluster.controller_log.count(line) == 1
    said = cluster.cli("policy", "list")
    assert "gpusched-example 1.0" in said.stdout


def test_a_sizing_rule_of_another_package_gives_gpus(cluster: Cluster) -> None:
    """Of two that wait for 8 GPUs the older one gets all but the other's least."""
    decides(cluster, "turns", "sizes: one-at-a-time\nbackfill: easy\n")
    held = [cluster.submit("--gpus", "8", command=("sleep", "1000")) for _ in range(2)]
    for job in held:
        cluster.wait_state(job, "RUNNING")
    sized = ["--resizable", "--sizes", "1,2,4,6"]
    old, young = (cluster.submit(*sized, command=("sleep", "1000")) for _ in range(2))
    wait_until(lambda: cluster.state_of(young) == "PENDING", 30, "the queue to be taken up")
    cluster.cli("cancel", held[0])
    assert [cluster.wait_state(job, "RUNNING").spec.gpus for job in (old, young)] == [6, 2]
    cluster.cli("cancel", held[1], old, young)
    for job in (held[1], old, young):
        cluster.wait_state(job)


def test_an_agent_of_another_package_decides_which_job_starts(cluster: Cluster) -> None:
    """The small job starts before the large one; an agent that fails leaves it to its fallback, as status says."""
    for agent in ("trusting", "wrong-key"):
        folder = cluster.folder / "policies" / f"by-{agent}"
        folder.mkdir()
        save_model(folder / "A100.safetensors", agent, {"trust": np.ones(1)}, {"knows": "limit"})
    decides(cluster, "by-trusting", "agent: trusting\nfallback: easy\nplace: best-fit\n")
    all_gpus = ["--nodes", "2", "--gpus-per-node", "8"]
    first = cluster.submit(*all_gpus, command=("sleep", "1000"))
    cluster.wait_state(first, "RUNNING")
    large = cluster.submit(*all_gpus, command=("sleep", "1000"))
    small = cluster.submit("--gpus", "4", command=("sleep", "1000"))
    wait_until(lambda: cluster.state_of(small) == "PENDING", 30, "the queue to be taken up")
    cluster.cli("cancel", first)
    cluster.wait_state(small, "RUNNING")
    assert cluster.state_of(large) == "PENDING"
    cluster.cli("cancel", large, small)
    for job in (large, small):
        cluster.wait_state(job)
    assert "fallback" not in cluster.cli("status").stdout
    nodes = {node.name: {"runtime": "nice"} for node in cluster.testbed.nodes}
    (cluster.folder / "policies" / "by-wrong-key.yaml").write_text("agent: wrong-key\nfallback: easy\n")
    cluster.write_inventory(policies={"A100": "by-wrong-key"}, nodes=nodes)
    cluster.submit("--gpus", "1")
    wait_until(lambda: "KeyError: 'no such weight'" in cluster.cli("status").stdout, 60, "its fallback in charge")
    ended = cluster.wait_state(cluster.submit("--gpus", "1"))
    assert str(ended.state) == "COMPLETED"
