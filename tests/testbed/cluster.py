"""The testbed as a whole: make it, use it, remove it without a trace."""

import atexit
import fcntl
import json
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO

from tests.testbed import cgroups, files, network, slurm_files
from tests.testbed.cache import Cache, build
from tests.testbed.hardware import A100, V100
from tests.testbed.node import TestNode
from tests.testbed.requirements import why_unavailable

LOCKS = Path("/run/gpusched-testbed-locks")


class Testbed:
    """A cluster of `count` nodes: odd ones are A100 servers, even ones V100 servers.

    Args:
        root: Folder for keys, logs and the nodes' disks; made where missing. What an earlier testbed left there
            (host keys, homes, containers) is used again.
        index: Which of the machine's testbeds this is: bridge, addresses (10.(77+index).0.0/16) and names derive
            from it. None takes the first one that no running process holds.
        count: Number of nodes.
        gpus: GPUs per node, 0 to 8.

    Attributes:
        nodes: The nodes, dgx001 first.
        identity: Private key that logs in as root on every node.
        known_hosts: The nodes' host keys, under names and addresses.
    """

    __test__ = False  # pytest: not a test class

    def __init__(self, root: Path, index: int | None = None, count: int = 4, gpus: int = 8) -> None:
        self.root = Path(root).absolute()
        self.identity = self.root / "id_ed25519"
        self.known_hosts = self.root / "known_hosts"
        self.nodes: list[TestNode] = []
        self._wanted_index = index
        self._index = -1
        self._count = count
        self._gpus = gpus
        self._lock: IO[str] | None = None
        self._owner = 0

    @property
    def index(self) -> int:
        """The index in use; -1 while the testbed is down."""
        return self._index

    def __enter__(self) -> "Testbed":
        self.up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Start all nodes and wait until their sshds answer; first remove what a killed run left on this index.

        Raises:
            RuntimeError: The machine cannot run it, or another process uses the index.
        """
        if self._lock is not None:
            return
        if reason := why_unavailable():
            raise RuntimeError(reason)
        cache = build()
        self._take_index()
        self._owner = os.getpid()
        atexit.register(self.down)
        try:
            _sweep(self._index)
            self._lock_write({"root": str(self.root), "pid": os.getpid()})
            numbers = range(1, self._count + 1)
            disk = self.root / "nodes"
            models = {n: A100 if n % 2 else V100 for n in numbers}
            self.nodes = [TestNode(self._index, n, models[n], self._gpus, disk / f"dgx{n:03d}", cache) for n in numbers]
            self._write_files(cache)
            network.create(self._index, numbers)
            for node in self.nodes:
                node.boot()
            self._each(TestNode.wait_ready)
        except BaseException:
            self.down()
            raise

    def _write_files(self, cache: Cache) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        if not self.identity.exists():
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", str(self.identity)]
            subprocess.run(command, check=True)
        hosts = "127.0.0.1 localhost\n" + "".join(f"{n.address} {n.name}\n" for n in self.nodes)
        keys = self.identity.with_suffix(".pub")
        for node in self.nodes:
            files.write_disk(
                node.disk, name=node.name, gpus=node.gpus, hosts=hosts, authorized_keys=keys, cache=cache
            )  # fmt: skip
        files.make_host_keys([n.disk for n in self.nodes])
        self.known_hosts.write_text("".join(f"{n.known_hosts_line()}\n" for n in self.nodes))

    def down(self) -> None:
        """Kill everything the testbed started and remove its network. Idempotent; the files in `root` stay."""
        if self._lock is None or os.getpid() != self._owner:  # a forked child must not end its parent's testbed
            return
        atexit.unregister(self.down)
        try:
            network.destroy(self._index)
            for node in self.nodes:
                node.forget()
            cgroups.remove([i for n in self.nodes for i in cgroups.container_ids(n.disk)])
        finally:
            self._lock_write({})
            self._lock.close()
            self._lock = None
            self._index = -1

    def detach(self) -> None:
        """Leave the nodes running when this process ends; `sweep(index)` ends them."""
        assert self._lock is not None
        atexit.unregister(self.down)
        self._lock_write({"root": str(self.root), "detached": True})
        self._lock.close()
        self._lock = None

    def reset(self) -> None:
        """`TestNode.reset` on every node."""
        self._each(TestNode.reset)

    def node(self, name: str) -> TestNode:
        """The node with this name."""
        return next(n for n in self.nodes if n.name == name)

    def write_ssh_config(self, path: Path | None = None) -> Path:
        """Write a file for `ssh -F` that knows the nodes by name; by default `root/ssh_config`."""
        path = path or self.root / "ssh_config"
        common = [
            "Host *",
            "  User root",
            f'  IdentityFile "{self.identity}"',
            "  IdentitiesOnly yes",
            f'  UserKnownHostsFile "{self.known_hosts}"',
            "  GlobalKnownHostsFile /dev/null",
            "  StrictHostKeyChecking yes",
            "  UpdateHostKeys no",
            "  BatchMode yes",
            "  ConnectTimeout 10",
        ]
        hosts = [f"Host {n.name}\n  HostName {n.address}" for n in self.nodes]
        path.write_text("\n".join([*hosts, *common]) + "\n")
        return path

    def describe(self) -> dict[str, object]:
        """Addresses and keys, ready for JSON."""
        return {
            "index": self.index,
            "identity": str(self.identity),
            "known_hosts": str(self.known_hosts),
            "ssh_config": str(self.write_ssh_config()),
            "user": "root",
            "image": "localhost/gs/busybox:1",
            "nodes": [
                {"name": n.name, "address": n.address, "port": n.port, "model": n.model.key, "gpus": n.gpus}
                for n in self.nodes
            ],
        }

    def _each(self, action: Callable[[TestNode], None]) -> None:
        with ThreadPoolExecutor(max_workers=16) as pool:
            list(pool.map(action, self.nodes))

    def _take_index(self) -> None:
        wanted = self._wanted_index
        for index in range(network.MAX_INDEX + 1) if wanted is None else [wanted]:
            lock = _open_lock(index)
            if lock is None:
                continue
            if wanted is None and _read(lock).get("detached"):
                lock.close()
                continue
            self._lock, self._index = lock, index
            return
        raise RuntimeError(f"testbed {'0..15' if wanted is None else wanted} is in use by another process")

    def _lock_write(self, state: dict[str, object]) -> None:
        assert self._lock is not None
        self._lock.seek(0)
        self._lock.truncate()
        json.dump(state, self._lock)
        self._lock.flush()


def _open_lock(index: int) -> IO[str] | None:
    """The locked lock file of an index, or None when another process holds it."""
    LOCKS.mkdir(exist_ok=True)
    file = (LOCKS / str(index)).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _read(lock: IO[str]) -> dict[str, object]:
    lock.seek(0)
    text = lock.read()
    return dict(json.loads(text)) if text else {}


def _sweep(index: int) -> None:
    """Remove what a killed or detached run with this index left."""
    slurm_files.sweep(index)
    network.destroy(index)
    path = LOCKS / str(index)
    state = json.loads(path.read_text() or "{}")
    if root := state.get("root"):
        cgroups.remove([i for disk in Path(root, "nodes").glob("*") for i in cgroups.container_ids(disk)])


def sweep(index: int) -> None:
    """End a detached testbed, or the remains of a killed one.

    Raises:
        RuntimeError: A running process holds it.
    """
    lock = _open_lock(index)
    if lock is None:
        raise RuntimeError(f"testbed {index} is in use by a running process")
    with lock:
        _sweep(index)
        lock.truncate(0)
