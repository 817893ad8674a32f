"""What lies in the spool folder of a job with a script, on each of its nodes."""

from __future__ import annotations

import shlex
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

SPOOL = "/var/spool/gpusched"
"""Where the folder is inside containers."""
RUN = "run"
"""The file in it that is the job's program; the command's words are its arguments."""

CONTROLLER_COMMANDS = ("squeue", "sacct", "scancel", "sbatch")
"""Programs that ask the controller, as `scontrol requeue` does."""

_HERE = Path(__file__).parent
_PORTS = 8


class StepNode(msgspec.Struct, frozen=True):
    """One of the job's nodes: its name, and where the others reach it."""

    name: str
    address: str


class StepSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the programs of the folder.

    Attributes:
        attempt: Names the job and which start of it; steps of another one are refused.
        rank: Of the node that the folder is for.
        nodes: All of the job's, by rank.
        ports: On the first free one of these a node listens for steps.
        tasks_per_node, gpus_per_task: For steps that do not say; 0: all GPUs for each.
        connect_s: So long a step waits for a node to take it.
        warning: Signal that warns of the limit; "": none does.
        warned: Its receivers.
    """

    attempt: str
    rank: int
    nodes: tuple[StepNode, ...]
    ports: tuple[int, ...] = ()
    tasks_per_node: int = 1
    gpus_per_task: int = 0
    connect_s: float = 60.0
    warning: str = ""
    warned: Literal["steps", "script"] = "steps"


def step_ports(master_port: int) -> tuple[int, ...]:
    """Ports for the nodes behind the first: MASTER_PORT itself, which only the first one uses, and the next ones."""
    return tuple(range(master_port, master_port + _PORTS))


def spool_files(script: str, settings: StepSettings, key: str | None) -> dict[str, str]:
    """Name -> text. ``key``: the job's certificate and private key, in PEM; None on one node, where nothing listens."""
    words = {
        "rank": settings.rank, "nodes": len(settings.nodes), "node": settings.nodes[settings.rank].name,
        "tasks_per_node": settings.tasks_per_node, "warning": settings.warning, "warned": settings.warned,
    }  # fmt: skip
    files = {
        RUN: "#!/bin/sh\n" + _text("run.sh"),
        "script": script,
        "login": 'unset BASH_ENV\nPATH=$GPUSCHED_SPOOL/bin:$PATH\n',
        "settings": "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in words.items()),
        "settings.json": msgspec.json.encode(settings).decode(),
        "bin/srun": "#!/bin/sh\n" + _text("srun.sh"),
        "bin/scontrol": "#!/bin/sh\n" + _text("scontrol.sh"),
        **{f"bin/{name}": f'#!/bin/sh\nprogram={name}\n. "$GPUSCHED_SPOOL/ask"\n' for name in CONTROLLER_COMMANDS},
        "ask": _text("ask.sh"),
        **_library(),
    }  # fmt: skip
    return files if key is None else files | {"key.pem": key}


@lru_cache
def _library() -> dict[str, str]:
    """Return the package that srun is made of, under its own name: an image may have another gpusched."""
    steps = "lib/gpusched/nodes/batch/steps"
    packages = [steps.rsplit("/", number)[0] + "/__init__.py" for number in range(1, 4)]
    modules = {f"{steps}/{path.name}": path.read_text() for path in sorted((_HERE / "steps").glob("*.py"))}
    return {name: "" for name in packages} | modules


@lru_cache
def _text(name: str) -> str:
    return (_HERE / name).read_text()
