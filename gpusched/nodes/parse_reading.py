"""What a probe wrote to its stdout, as a reading. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gpusched.model.readings import ContainerReading, Gpu, NodeReading
from gpusched.nodes.parse_smi import parse_gpus

MARK = b"@gpusched-probe@ "  # as in payload/main.py

_FACTS = (
    "boot_id", "hostname", "cores", "memory_total_mib", "memory_available_mib", "load1", "disk_free_mib",
    "source", "gpu_error", "driver_version", "runtime_error", "runtime_version",
)  # fmt: skip


def find_answer(stdout: bytes) -> dict[str, Any] | None:
    """The probe's line of JSON among whatever the node's shell start-up files print; None where it is not there.

    Raises:
        ValueError: It is there, but broken.
    """
    _, mark, rest = stdout.rpartition(b"\n" + MARK)
    if not mark:
        return None
    answer = msgspec.json.decode(rest.partition(b"\n")[0])
    if not isinstance(answer, dict):
        raise ValueError("the probe's answer is not an object")
    return answer


def parse_reading(node: str, answer: dict[str, Any], sent: float, received: float) -> NodeReading:
    """The reading in an answer (`find_answer`) of the python3 payload.

    ``sent`` and ``received``: when the request left and the answer was there, Unix seconds by our clock.

    Raises:
        ValueError: The answer is not what the payload writes.
    """
    facts = {key: answer[key] for key in _FACTS if key in answer}
    gpus: Any = answer.get("gpus", [])
    if answer.get("source") == "nvidia-smi":
        known = {int(pid): process for pid, process in answer.get("processes", {}).items()}
        reading = parse_gpus(answer.get("smi_gpus", ""), answer.get("smi_apps", ""), known)
        gpus = reading.gpus
        facts.update(driver_version=reading.driver_version, gpu_error=reading.error)
        if not gpus:
            facts.update(source="none")
    began, ended = answer["clock"]
    return msgspec.convert(
        {
            **facts,
            "node": node,
            "time": received,
            "clock_skew_s": ((began - sent) + (ended - received)) / 2,
            "gpus": msgspec.convert(gpus, tuple[Gpu, ...], strict=False),
            "containers": msgspec.convert(answer.get("containers"), tuple[ContainerReading, ...] | None, strict=False),
        },
        NodeReading,
    )
