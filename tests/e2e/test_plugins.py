"""Components of another package that decide live: its runtime runs jobs on real nodes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

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
    assert cluster.cli("exec", running, "--", "echo", "inside").stdout == "inside\n"
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


def test_an_order_of_another_package_decides_who_starts(cluster: Cluster) -> None:
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
