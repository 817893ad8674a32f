"""dockerd inside a node, with Docker's own `--gpus` and no GPU."""

import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed import processes
from tests.testbed.cache import IMAGE
from tests.testbed.requirements import which
from tests.testbed.waiting import wait_until

if TYPE_CHECKING:
    from tests.testbed.node import TestNode

CLIENT = "/usr/bin/docker"
PRISTINE_CLIENT = "/run/gpusched-testbed/usr/bin/docker"


def why_unavailable() -> str | None:
    """Why nodes of this machine cannot run docker; None when they can."""
    missing = [c for c in ("dockerd", "containerd") if which(c) is None]
    missing += [CLIENT] if not Path(CLIENT).exists() else []
    return f"docker needs {', '.join(missing)} (Debian: docker.io)" if missing else None


def pids(node: "TestNode") -> list[int]:
    """dockerd and all it started; empty when it is not running."""
    daemons = [p for p in node.pids() if processes.command_line(p)[:1] == ["dockerd"]]
    tree = processes.tree(daemons[0]) if daemons else []
    # Its shims leave their parent, on purpose: containers survive a restart of the daemon.
    shims = [p for p in node.pids() if "containerd-shim" in "".join(processes.command_line(p)[:1])]
    return [*tree, *(p for shim in shims for p in processes.tree(shim))]


def start(node: "TestNode", rootfs_tar: Path) -> None:
    """Start dockerd unless it runs, wait for it, and import the image unless it is there.

    Raises:
        RuntimeError: The machine has no Docker engine.
    """
    if reason := why_unavailable():
        raise RuntimeError(reason)
    if not pids(node):
        data = node.disk / "docker"
        flags = ["--iptables=false", "--ip6tables=false", "--bridge=none", f"--data-root={data}", "--log-level=warn"]
        script = 'log=$1 PATH=$2:$PATH; shift 2; exec setsid dockerd "$@" >"$log" 2>&1 </dev/null &'
        log = node.disk / "docker.log"
        node.run(["sh", "-c", script, "sh", log, node.disk / "docker-bin", *flags])
        wait_until(lambda: node.run([PRISTINE_CLIENT, "info"], check=False).returncode == 0, 60, f"dockerd ({log})")
    if node.run([PRISTINE_CLIENT, "image", "inspect", IMAGE], check=False).returncode:
        changes = ["--change", "CMD /bin/sh", "--change", "ENV PATH=/bin"]
        node.run([PRISTINE_CLIENT, "import", *changes, rootfs_tar, IMAGE])


def stop(node: "TestNode") -> None:
    """End dockerd gently."""
    if daemon := pids(node)[:1]:
        processes.send(daemon[0], signal.SIGTERM)
        wait_until(lambda: processes.state(daemon[0]) in ("Z", ""), 30, f"the end of dockerd on {node.name}")


def remove_containers(node: "TestNode") -> None:
    """Remove all Docker containers of a node; without a running dockerd, by their files."""
    folder = node.disk / "docker" / "containers"
    ids = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    if ids and pids(node):
        node.run([PRISTINE_CLIENT, "rm", "--force", *ids], check=False, timeout=300)
    elif ids:
        shutil.rmtree(folder)
