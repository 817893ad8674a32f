"""The examination of one node: three SSH execs on one connection, everything else is judging what they brought."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from gpusched.config.plugins import ComponentError
from gpusched.doctor.findings import Finding, Status, failed, worst
from gpusched.doctor.judge import judge_access, judge_gpus, judge_health, judge_host, judge_runtime
from gpusched.doctor.mig import examine_mig
from gpusched.doctor.state import QueuedNodeFacts
from gpusched.errors import GpuschedError
from gpusched.model.gpustates import gpu_states
from gpusched.model.readings import GpuState, NodeReading, Wiring
from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.inspection import RUN_TIMEOUT_S, Inspection, inspection_script, parse_inspection
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import LaunchRequest, runtime_for
from gpusched.nodes.runtimes.engine import NO_IMAGE_EXIT_CODE, EngineRuntime
from gpusched.nodes.transport import Transport, TransportError
from gpusched.queue.store import SUSPENDED_BY

_CHECK_OF_KIND = {
    "host-key-unknown": "host key",
    "host-key-changed": "host key",
    "auth": "login",
    "protocol": "shell",
}


def examine_node(
    node: Node,
    settings: Settings,
    known: QueuedNodeFacts,
    clock: Callable[[], float],
    image: str | None = None,
    *,
    starts_jobs: bool = True,
) -> tuple[list[Finding], Wiring | None]:
    """Everything about one node (``image``: its partition's), and how it is wired.

    Where it cannot be asked, there is one finding that says why. Without ``starts_jobs`` it is only read.
    """
    transport = open_transport(node, settings)
    try:
        found, wiring = _examine(transport, node, settings, known, clock, image, starts_jobs)
        return _service(node, known) + found, wiring
    except TransportError as error:
        return [failed(node.name, _CHECK_OF_KIND.get(error.kind, "ssh"), error)], None
    except GpuschedError as error:
        return [failed(node.name, "probe", error)], None
    finally:
        transport.close()


def inspect(transport: Transport, node: Node, runtimes: tuple[str, ...], mps_pipe: str = "") -> Inspection | None:
    """Return what the inspection script says about a node; None if the account's shell would not run it.

    ``mps_pipe``: the folder in which a control daemon of MPS should have its pipe; "": not checked.

    Raises:
        TransportError: The node could not be asked.
    """
    result = transport.run(inspection_script(runtimes, mps_pipe), RUN_TIMEOUT_S)
    return parse_inspection(result.stdout)


def _service(node: Node, known: QueuedNodeFacts) -> list[Finding]:
    """Report whether it was taken out of service, and by which user."""
    reason, by = known.drained.get(node.name, ("", ""))
    if not by:
        return []
    if by == SUSPENDED_BY:
        return [Finding(node.name, "service", "fail", reason, f"fix it, then: gpusched resume {node.name}")]
    hint = f"when it works again: gpusched resume {node.name}"
    return [Finding(node.name, "service", "warn", f"drained by {by}: {reason}", hint)]


def _examine(
    transport: Transport,
    node: Node,
    settings: Settings,
    known: QueuedNodeFacts,
    clock: Callable[[], float],
    image: str | None,
    starts_jobs: bool,
) -> tuple[list[Finding], Wiring | None]:
    from gpusched.nodes.probe import probe

    pipe = node.sharing.pipe if node.sharing is not None and node.sharing.mode == "mps" else ""
    inspection = inspect(transport, node, (node.runtime,), pipe)
    if inspection is None:
        message = "logged in, but the account's shell does not run `sh`"
        hint = "give the account an ordinary login shell, such as /bin/sh"
        return [Finding(node.name, "shell", "fail", message, hint)], None
    who = f" as {inspection.user}" if inspection.user else ""
    found = [Finding(node.name, "ssh", "ok", f"logged in{who}" if node.transport == "ssh" else f"this machine{who}")]
    found += judge_host(node, inspection) if starts_jobs else judge_access(node, inspection)
    try:
        reading: NodeReading | None = probe(transport, node, known.cluster_id, settings, clock, want_links=True)
    except TransportError as error:
        reading = None
        found.append(failed(node.name, "probe", error))
    if reading is not None:
        found += judge_gpus(node, reading, inspection, sizes=starts_jobs)
        found += examine_mig(transport, node, reading, inspection.user)
    found += judge_health(node, known.conditions.get(node.name, ()), reading)
    wiring = reading.wiring if reading is not None else None
    if not starts_jobs:
        return found, wiring
    runtime = judge_runtime(node, inspection, reading)
    if worst(runtime) != "fail":
        try:
            runtime += try_container(transport, node, settings, image, reading, known.held.get(node.name, {}))
        except ComponentError as error:
            runtime = [failed(node.name, "runtime", error)]
    return found + runtime, wiring


# A short-lived container with a GPU, created as a job's would be: the only proof that jobs can start on a node

_TIMEOUT_S = 200.0
_CLUSTER = "check"  # no installation's: a controller that looks on leaves it alone
_NOBODY = 65534
_HINTS: dict[str, str] = {
    RuntimeName.PODMAN: "no job can start there; after a driver upgrade, as root on the node: "
    "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    RuntimeName.DOCKER: "no job can start there; check that the NVIDIA container toolkit is set up for this driver",
}


def try_container(
    transport: Transport,
    node: Node,
    settings: Settings,
    image: str | None,
    reading: NodeReading | None,
    held: Mapping[int, tuple[str, ...]],
) -> list[Finding]:
    """Start a container with one GPU that is free, as a job's, and remove it. Nothing is pulled.

    ``image`` is the partition's own; another one that is there serves, too. Without a reading no GPU is known to be
    free; ``held``: GPU index -> the jobs that hold it, by the queue.

    Raises:
        TransportError: The node did not answer.
    """
    runtime = runtime_for(node.runtime)
    if not isinstance(runtime, EngineRuntime):
        return []
    gpus: tuple[int, ...] = ()
    if node.gpus and not node.simulated_gpus:
        free = [s.index for s in gpu_states(node, reading, held) if s.state is GpuState.FREE and s.index not in held]
        if not free:
            return [_finding(node, "ok", "not tried: no GPU is free now")]
        gpus = (free[-1],)
    request = LaunchRequest(
        name=f"gpusched-check-{secrets.token_hex(6)}", cluster_id=_CLUSTER, node=node.name, job_id="check", attempt=0,
        rank=0, image=image, workdir="/", gpus=gpus, cores=1, memory_mib=128, network=settings.network,
        run_as=(_NOBODY, _NOBODY) if settings.shared else None,
    )  # fmt: skip
    result = transport.run(runtime.trial(request), _TIMEOUT_S)
    with_gpu = f" with GPU {gpus[0]}" if gpus else ""
    if result.exit_code == 0:
        return [_finding(node, "ok", f"started one{with_gpu}")]
    if result.exit_code == NO_IMAGE_EXIT_CODE:
        wanted = image or "IMAGE"
        return [
            _finding(node, "ok", f"not tried: no image on the node yet; `{node.runtime} pull {wanted}` there first")
        ]
    return [_finding(node, "fail", f"cannot start one{with_gpu}: {result.complaint}", _HINTS[node.runtime])]


def _finding(node: Node, status: Status, message: str, hint: str = "") -> Finding:
    return Finding(node.name, "container", status, message, hint)
