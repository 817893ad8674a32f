"""Shorthand for the tests of this folder."""

import contextlib
from collections.abc import Iterator
from typing import Any

from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.transport import RemoteScript, Transport
from tests.testbed import Testbed, TestNode


def declare(testbed: Testbed, node: TestNode, **changes: Any) -> Node:
    """The node as an inventory would declare it."""
    fields: dict[str, Any] = {
        "name": node.name, "partition": "p", "address": node.address, "user": "root", "key": str(testbed.identity),
        "gpus": node.gpus, "cores": 4, "memory_mib": 4096, "runtime": RuntimeName.PROCESS,
    }  # fmt: skip
    return Node(**{**fields, **changes})


def settings_for(testbed: Testbed, **changes: Any) -> Settings:
    """Settings that trust the testbed's host keys and read no personal SSH config."""
    config = testbed.root / "empty_ssh_config"
    config.touch()
    fields: dict[str, Any] = {"known_hosts": str(testbed.known_hosts), "ssh_config": str(config)}
    return Settings(**{**fields, **changes})


@contextlib.contextmanager
def opened(node: Node, settings: Settings) -> Iterator[Transport]:
    """A transport that is closed again."""
    transport = open_transport(node, settings)
    try:
        yield transport
    finally:
        transport.close()


def sh(text: str, stdin: bytes = b"") -> RemoteScript:
    """A shell command."""
    return RemoteScript(("sh", "-c", text), stdin)
