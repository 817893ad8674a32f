"""Ends of jobs are seen as they happen: with a tick of ten minutes all of this would hang."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from functools import partial
from pathlib import Path

import pytest

import gpusched
from tests.e2e.conftest import Cluster, functions
from tests.testbed import Testbed, processes, wait_until

NODES = {"podman": "dgx001", "docker": "dgx003", "process": "dgx002", "process without python3": "dgx004"}
CHANNEL = ("closefd=False", "#end")
"""In the command lines of what waits on a node for our jobs' ends."""


@pytest.fixture(scope="module")
def ticking_seldom(testbed_session: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running cluster whose nodes run jobs in different ways, and whose tick never comes."""
    cluster = Cluster(testbed_session, tmp_path_factory.mktemp("ends"))
    testbed_session.node(NODES["docker"]).start_docker()
    testbed_session.node(NODES["process without python3"]).hide("python3")
    runtimes = {name: {"runtime": how.split()[0]} for how, name in NODES.items()}
    cluster.write_inventory({"tick": "10m"}, nodes=runtimes)
    cluster.start_controller()
    yield cluster
    cluster.close()
    testbed_session.reset()


@pytest.fixture
def site(ticking_seldom: Cluster) -> Iterator[Cluster]:
    """It, empty before each test."""
    yield ticking_seldom
    ticking_seldom.clear()


def all_of(how: str) -> tuple[str, ...]:
    """Options for all of a node, of what can be had where GPUs cannot be read."""
    all_gpus = () if "without" in how else ("--gpus", "8")
    return (
        *all_gpus,
        "--cpus",
        "2",
        "--mem",
        "4G",
        "-p",
        "A100" if how in ("podman", "docker") else "V100",
        "--nodelist",
        NODES[how],
    )


def channels(cluster: Cluster, node: str) -> list[str]:
    found = [" ".join(processes.command_line(pid)) for pid in cluster.node(node).pids()]
    return [line for line in found if any(mark in line for mark in CHANNEL)]


def has_none(cluster: Cluster, node: str) -> bool:
    return not channels(cluster, node)


@pytest.mark.parametrize("how", NODES)
def test_the_next_job_starts_when_the_one_before_has_ended(
    site: Cluster, how: str, share: Path, record_property: Callable[[str, object], None]
) -> None:
    site.runtime = how.split()[0]
    wait = f"until [ -e {share}/go ]; do sleep 0.05; done; touch {share}/end"
    mount = () if site.runtime == "process" else ("--mount", f"{share}:{share}")
    first = site.sh(wait, *all_of(how), *mount)
    second = site.sh("exit 3", *all_of(how))
    site.wait_state(first, "RUNNING", timeout=90)
    site.wait_state(second, "PENDING")
    (share / "go").touch()
    site.wait_state(first, "COMPLETED", timeout=90)
    assert site.wait_state(second, "FAILED", timeout=90).exit_code == 3
    seen = next(event.time for event in site.events(first) if event.kind == "ended")
    ended = (share / "end").stat().st_mtime  # podman gives its ends in whole seconds
    record_property("figure", f"the end of a job ({how}) was seen {seen - ended:.2f} s after it")


def test_nothing_waits_on_a_node_once_the_controller_is_gone_and_a_new_one_waits_again(site: Cluster) -> None:
    site.runtime = "process"
    job = site.sh("exec sleep 7002", *all_of("process"))
    bare = site.sh("exec sleep 7002", *all_of("process without python3"))
    nodes = (NODES["process"], NODES["process without python3"])
    site.wait_state(job, "RUNNING", timeout=90)
    site.wait_state(bare, "RUNNING", timeout=90)
    for node in nodes:
        wait_until(partial(channels, site, node), what="a channel")
    site.kill_controller()
    for node in nodes:
        wait_until(partial(has_none, site, node), what="the channel to end")
    site.start_controller()
    for node in nodes:
        wait_until(partial(channels, site, node), what="a channel")
        for pid in site.node(node).pids():
            if processes.command_line(pid) == ["sleep", "7002"]:
                os.kill(pid, signal.SIGKILL)
    assert site.wait_state(job, timeout=90).exit_code == 137
    assert site.wait_state(bare, timeout=90).exit_code == 137


def waits_for(path: str) -> str:
    while not os.path.exists(path):
        time.sleep(0.05)
    return path


@functions
def test_futures_are_done_in_the_order_in_which_their_jobs_end(site: Cluster, tmp_path: Path) -> None:
    site.runtime = "process"
    cluster = gpusched.Cluster(state=site.state, inventory=site.inventory)
    paths = [str(tmp_path / name) for name in "abc"]
    futures = [
        cluster.submit(waits_for, path, partition="V100", nodelist=NODES["process"], gpus=1, time="10m")
        for path in paths
    ]
    for future in futures:
        site.wait_state(future.id, "RUNNING", timeout=90)
    seen = []
    left = list(reversed(paths))
    Path(left[0]).touch()
    for done in as_completed(futures, timeout=300):
        seen.append(done.result(0))
        for path in left[len(seen) : len(seen) + 1]:
            Path(path).touch()
    assert seen == left
