"""The examination of one node: two SSH execs on one connection, everything else is judging what they brought."""

from __future__ import annotations

from collections.abc import Callable

from gpusched.doctor.findings import Finding, failed
from gpusched.doctor.judge import judge_gpus, judge_host, judge_runtime
from gpusched.errors import GpuschedError
from gpusched.inspection import RUN_TIMEOUT_S, Inspection, inspection_script, parse_inspection
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Node, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.transport import Transport, TransportError

_CHECK_OF_KIND = {
    "host-key-unknown": "host key",
    "host-key-changed": "host key",
    "auth": "login",
    "protocol": "shell",
}


def examine_node(node: Node, settings: Settings, cluster_id: str, clock: Callable[[], float]) -> list[Finding]:
    """Everything about one node; a node that cannot be asked is one finding that says why."""
    transport = open_transport(node, settings)
    try:
        return _examine(transport, node, settings, cluster_id, clock)
    except TransportError as error:
        return [failed(node.name, _CHECK_OF_KIND.get(error.kind, "ssh"), error)]
    except GpuschedError as error:
        return [failed(node.name, "probe", error)]
    finally:
        transport.close()


def inspect(transport: Transport, node: Node, runtimes: tuple[str, ...]) -> Inspection | None:
    """What the inspection script says about a node; None where the account's shell would not run it.

    Raises:
        TransportError: The node could not be asked.
    """
    result = transport.run(inspection_script(runtimes), RUN_TIMEOUT_S)
    return parse_inspection(result.stdout)


def _examine(
    transport: Transport, node: Node, settings: Settings, cluster_id: str, clock: Callable[[], float]
) -> list[Finding]:
    from gpusched.nodes.probe import probe

    inspection = inspect(transport, node, (node.runtime.value,))
    if inspection is None:
        message = "logged in, but the account's shell does not run `sh`"
        return [
            Finding(node.name, "shell", "fail", message, "give the account an ordinary login shell, such as /bin/sh")
        ]
    who = f" as {inspection.user}" if inspection.user else ""
    found = [Finding(node.name, "ssh", "ok", f"logged in{who}" if node.transport == "ssh" else f"this machine{who}")]
    found += judge_host(node, inspection)
    try:
        reading: NodeReading | None = probe(transport, node, cluster_id, settings, clock, want_links=False)
    except TransportError as error:
        reading = None
        found.append(failed(node.name, "probe", error))
    if reading is not None:
        found += judge_gpus(node, reading, inspection)
    return found + judge_runtime(node, inspection, reading)
