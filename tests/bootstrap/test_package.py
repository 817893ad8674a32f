"""The .deb and the wheel on clean Debian systems that systemd boots, without a network: `make package-test`.

A system is a folder that mmdebstrap fills from Debian's mirror, once; each test has an overlay of it, booted by
systemd-nspawn. Its own sshd is the only node; the unit runs under systemd with all that confines it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed import processes, systems, wait_until

ROOT = Path(__file__).parents[2]
PACKAGE = os.environ.get("GPUSCHED_PACKAGE", "")
NEEDED = ("systemd-nspawn", "nsenter")
INCLUDED = ("python3", "python3-venv", "systemd", "systemd-sysv", "dbus", "openssh-server", "openssh-client")
SYSTEMS = {"bookworm": "3.11", "trixie": "3.13"}  # Debian 12 and 13, and their Python
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PACKAGE, reason="takes minutes: make package-test"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}"),
]
INVENTORY = """\
partitions:
  p:
    policy: easy
    defaults: {user: root, runtime: process, gpus: 0, cores: 2, memory: 1G}
    nodes: [{name: n1, address: 127.0.0.1}]
"""
PREPARE = """\
useradd -m alice
mkdir -p -m 700 /root/.ssh
cp /var/lib/gpusched/.ssh/id_ed25519.pub /root/.ssh/authorized_keys
ssh-keyscan -t ed25519 127.0.0.1 2>&- |
    install -o gpusched -g gpusched -m 644 /dev/stdin /var/lib/gpusched/.ssh/known_hosts
"""
JOB = "id -u; grep CapEff /proc/self/status"


class Machine:
    """A booted system."""

    def __init__(self, process: subprocess.Popen[bytes], root: Path) -> None:
        self._process, self.root = process, root

    def sh(self, script: str, user: str = "root", check: bool = True) -> str:
        """Run a script in it; returns stdout and stderr."""
        (leader,) = processes.tree(self._process.pid)[1:2]
        words = ["nsenter", "-t", str(leader), "-a", "--", "setpriv", "--reuid", user, "--regid", user, "--init-groups"]
        done = subprocess.run(
            [*words, "--reset-env", "sh", "-c", f"cd && {script}"], check=False, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3600,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{script}\n{done.stdout}"
        return done.stdout if done.returncode == 0 else f"exit {done.returncode}\n{done.stdout}"

    def submit(self, command: str) -> str:
        """Submit a job of alice's; returns its id."""
        said = self.sh(f"gpusched submit --cpus 1 --mem 100M -t 10m -- {command}", "alice")
        found = re.search(r"^\w{11}$", said, re.MULTILINE)
        assert found, said
        return found[0]

    def is_up(self) -> bool:
        assert self._process.poll() is None, "the system does not boot"
        return bool(processes.tree(self._process.pid)[1:2]) and "exit" not in self.sh(
            "systemctl is-active -q multi-user.target ssh", check=False
        )


@pytest.fixture(params=SYSTEMS)
def system(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    _, why = systems.debian(name, INCLUDED)
    if why:
        pytest.skip(why)
    return name


@pytest.fixture
def machine(system: str, tmp_path: Path) -> Iterator[Machine]:
    lower, upper, root = systems.SYSTEMS / system, tmp_path / "upper", tmp_path / "root"
    for folder in (upper, tmp_path / "work", root):
        folder.mkdir(mode=0o755)
    options = f"lowerdir={lower},upperdir={upper},workdir={tmp_path / 'work'}"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", str(root)], check=True)
    shutil.copy(PACKAGE, root / "root/gpusched.deb")
    environment = {"SYSTEMD_CGROUP_ENABLE_LEGACY_FORCE": "1"}  # cgroup v1 outside: newer systemd boots only with this
    words = ["systemd-nspawn", "-q", "-D", str(root), "--register=no", "--keep-unit", "--private-network"]
    words += [f"--setenv={name}={value}" for name, value in environment.items()]
    with (tmp_path / "console").open("wb") as console:
        process = subprocess.Popen(
            [*words, "-b", *(f"{n}={v}" for n, v in environment.items())], stdin=subprocess.DEVNULL, stdout=console,
            stderr=console, env=os.environ | environment, start_new_session=True,
        )  # fmt: skip
    machine = Machine(process, root)
    try:
        wait_until(machine.is_up, 60, "the system")
        yield machine
    finally:
        for pid in reversed(processes.tree(process.pid)):
            processes.send(pid, signal.SIGKILL)
        process.wait()
        subprocess.run(["umount", "-l", str(root)], check=True)


def test_the_package_serves_other_users_under_systemd(machine: Machine, system: str) -> None:
    said = machine.sh("DEBIAN_FRONTEND=noninteractive dpkg -i gpusched.deb")
    assert "done  /etc/systemd/system/gpusched.service" in said
    machine.sh(PREPARE)
    (machine.root / "etc/gpusched/inventory.yaml").write_text(INVENTORY)
    machine.sh("systemctl enable --now gpusched")

    job = machine.submit(f"sh -c '{JOB}'")
    # Its first copy of the queue.
    wait_until(lambda: not machine.sh(f"gpusched status {job}", "alice", check=False).startswith("exit"), 60)
    machine.sh(f"timeout 200 gpusched wait {job}", "alice")
    uid = machine.sh("id -u alice").strip()
    wait_until(lambda: machine.sh(f"gpusched logs {job}", "alice", check=False).startswith(f"{uid}\nCapEff:\t0000"), 30)
    assert machine.sh("ls /var/lib/gpusched/inbox/new", "alice", check=False).startswith("exit ")
    assert machine.sh("cat /var/lib/gpusched/gpusched.db", "alice", check=False).startswith("exit ")
    assert float(re.findall(r"level for \S+: ([0-9.]+)", machine.sh("systemd-analyze security gpusched"))[0]) < 2.0
    status = machine.sh("cat /proc/$(systemctl show -P MainPID gpusched)/status")
    assert re.findall(r"^(?:CapBnd:\t0+|NoNewPrivs:\t1|Seccomp:\t2)$", status, re.MULTILINE) == [
        "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2",
    ]  # fmt: skip

    # An upgrade leaves running jobs alone; a removal is refused.
    job = machine.submit("sleep 600")
    wait_until(lambda: "RUNNING" in machine.sh(f"gpusched status {job}", "alice"), 60, "the job")
    machine.sh("DEBIAN_FRONTEND=noninteractive dpkg -i gpusched.deb")
    wait_until(lambda: "warning" not in machine.sh("gpusched status", "alice"), 60, "the controller")
    assert "RUNNING" in machine.sh(f"gpusched status {job}", "alice")
    said = machine.sh("dpkg -r gpusched", check=False)
    assert said.startswith("exit ")
    assert "1 job on nodes would run on without a controller" in said
    machine.sh(f"gpusched cancel -y {job} && timeout 60 gpusched wait {job}; true", "alice")
    wait_until(lambda: "exit" not in machine.sh("dpkg -r gpusched", check=False), 60, "the removal")
    assert machine.sh("ls /var/lib/gpusched/gpusched.db")
    assert machine.sh("ls /etc/systemd/system/gpusched.service /usr/lib/gpusched", check=False).startswith("exit ")
    machine.sh("dpkg -P gpusched")
    assert machine.sh("ls -d /var/lib/gpusched /etc/gpusched; id gpusched", check=False).count("\n") >= 3


def test_the_wheel_is_installed_offline(machine: Machine, system: str) -> None:
    shutil.copytree(ROOT / "build" / "wheels" / SYSTEMS[system], machine.root / "root/wheels")
    machine.sh("python3 -m venv w && w/bin/pip install -q --no-index --find-links wheels gpusched-cluster")
    assert machine.sh("w/bin/gpusched --version").startswith("gpusched ")
    (machine.root / "root/inventory.yaml").write_text(INVENTORY.replace("user: root", "transport: local"))
    machine.sh("w/bin/gpusched submit --cpus 1 --mem 100M -t 10m -- true")
    wait_until(lambda: "1 COMPLETED" in machine.sh("w/bin/gpusched tick; w/bin/gpusched status --all", check=False), 60)
