"""A short-lived container with a GPU, created as a job's would be: the only proof that jobs can start on a node."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from gpusched.doctor.findings import Finding, Status
from gpusched.model.gpustates import gpu_states
from gpusched.model.readings import GpuState, NodeReading
from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.runtimes import LaunchRequest, runtime_for
from gpusched.nodes.runtimes.engine import NO_IMAGE_EXIT_CODE, EngineRuntime
from gpusched.nodes.transport import Transport

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
    free; ``held``: GPU index -> who holds it, by the queue.

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
