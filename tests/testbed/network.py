"""The wires of a testbed: a bridge on the machine, and for each node a network namespace and a pair of veths.

Everything carries the testbed's index in its name and nothing else does, so what a killed run left can be found and
removed: bridge `gstbI`, namespaces `gstbI-N`, veths `gstbIvN`. Addresses are 10.(77+I).0.0/16; the machine is .0.1.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.testbed import processes

NETNS = Path("/run/netns")
MAX_INDEX = 15
PER_SUBNET = 250


def bridge(index: int) -> str:
    """The bridge's name."""
    return f"gstb{index}"


def namespace(index: int, number: int) -> str:
    """The name of a node's network namespace."""
    return f"gstb{index}-{number}"


def veth(index: int, number: int) -> str:
    """The machine's end of a node's wire."""
    return f"gstb{index}v{number}"


def address(index: int, number: int) -> str:
    """The IPv4 address of the node with this number (from 1)."""
    return f"10.{77 + index}.{1 + (number - 1) // PER_SUBNET}.{1 + (number - 1) % PER_SUBNET}"


def ip(*lines: str) -> None:
    """Run `ip` commands in one process."""
    text = "\n".join(lines) + "\n"
    done = subprocess.run(["ip", "-batch", "-"], input=text, text=True, capture_output=True)
    if done.returncode:
        raise RuntimeError(f"ip: {done.stderr.strip()}")


def create(index: int, numbers: range) -> None:
    """Make the bridge and the namespaces and wires of these nodes."""
    ip(
        f"link add {bridge(index)} type bridge",
        f"addr add 10.{77 + index}.0.1/16 dev {bridge(index)}",
        f"link set {bridge(index)} up",
        *(f"netns add {namespace(index, n)}" for n in numbers),
    )
    ip(*(line for n in numbers for line in _wire(index, n)))
    for n in numbers:
        in_namespace(index, n, f"addr add {address(index, n)}/16 dev eth0", "link set lo up", "link set eth0 up")


def _wire(index: int, n: int) -> list[str]:
    return [
        f"link add {veth(index, n)} type veth peer name eth0 netns {namespace(index, n)}",
        f"link set {veth(index, n)} master {bridge(index)} up",
    ]


def in_namespace(index: int, number: int, *lines: str) -> None:
    """Run `ip` commands in a node's namespace."""
    text = "\n".join(lines) + "\n"
    command = ["ip", "-n", namespace(index, number), "-batch", "-"]
    subprocess.run(command, input=text, text=True, capture_output=True, check=True)


def set_link(index: int, number: int, *, up: bool) -> None:
    """Plug or pull a node's cable, at the machine's end: the node keeps its address."""
    ip(f"link set {veth(index, number)} {'up' if up else 'down'}")


def destroy(index: int, timeout_s: float = 300.0) -> None:
    """Kill all that runs in the testbed's namespaces and remove them, the wires and the bridge. Idempotent.

    Raises:
        TimeoutError: A process survived SIGKILL for `timeout_s`.
    """
    names = [p for p in NETNS.glob(f"gstb{index}-*") if p.name.rpartition("-")[2].isdigit()]
    inodes = {p.stat().st_ino for p in names}
    deadline = time.monotonic() + timeout_s
    while inodes and (alive := _alive(inodes)):
        for pid in alive:
            processes.send(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {alive} of testbed {index} survived SIGKILL")
        time.sleep(0.005)
    wires = [n for n in os.listdir("/sys/class/net") if n.startswith(f"gstb{index}v")]
    lines = [*(f"link del {wire}" for wire in wires), *(f"netns del {p.name}" for p in names)]
    if Path("/sys/class/net", bridge(index)).exists():
        lines.append(f"link del {bridge(index)}")
    if lines:
        ip(*lines)


def _alive(inodes: set[int]) -> list[int]:
    return [p for p in processes.in_network_namespaces(inodes) if processes.state(p) not in ("Z", "X", "")]
