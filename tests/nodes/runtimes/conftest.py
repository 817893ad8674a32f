"""`world`: every runtime in turn, on a real node each; apptainer has a system of its own (test_apptainer.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.transport import Transport
from tests.nodes.runtimes.world import World
from tests.testbed import Testbed
from tests.testbed import docker as docker_engine

NODES = {"process": 3, "podman": 0, "docker": 1}


Connections = dict[str, Transport]


@pytest.fixture(scope="module")
def connections() -> Iterator[Connections]:
    """Those of a file's worlds, by kind: each is made once."""
    made: Connections = {}
    yield made
    for transport in made.values():
        transport.close()


def make_world(kind: str, testbed: Testbed, connections: Connections, runtime: RuntimeName | None = None) -> World:
    test_node = testbed.nodes[NODES[kind]]
    if kind == "docker":
        if reason := docker_engine.why_unavailable():
            pytest.skip(reason)
        test_node.start_docker()
    runtime = runtime or RuntimeName(kind)
    node = Node(
        name=test_node.name, partition="p", address=test_node.address, port=test_node.port, user="root",
        key=str(testbed.identity), gpus=8, cores=4, memory_mib=8192, runtime=runtime,
    )  # fmt: skip
    if kind not in connections:
        connections[kind] = open_transport(node, Settings(known_hosts=str(testbed.known_hosts)))
    return World(runtime, connections[kind], test_node, test_node.name)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Processes of this machine, in a folder of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    node = Node(
        name="here", partition="p", address="", transport="local", gpus=0, cores=1, memory_mib=1,
        runtime=RuntimeName.PROCESS,
    )  # fmt: skip
    made = World(RuntimeName.PROCESS, open_transport(node, Settings()), None, "here")
    yield made
    made.clean()
    made.transport.close()


@pytest.fixture(params=["local", "process", "podman", "docker"])
def world(request: pytest.FixtureRequest, connections: Connections) -> Iterator[World]:
    if request.param == "local":
        yield request.getfixturevalue("local")
        return
    made = make_world(request.param, request.getfixturevalue("testbed"), connections)
    yield made
    made.clean()


@pytest.fixture(params=["podman", "docker"])
def engine(request: pytest.FixtureRequest, testbed: Testbed, connections: Connections) -> Iterator[World]:
    made = make_world(request.param, testbed, connections)
    yield made
    made.clean()


@pytest.fixture
def process(testbed: Testbed, connections: Connections) -> Iterator[World]:
    made = make_world("process", testbed, connections)
    yield made
    made.clean()
