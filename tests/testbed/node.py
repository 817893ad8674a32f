"""One node of the testbed: how to start it, look into it, and make it fail."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.testbed import cgroups, docker, files, network, processes, sshd
from tests.testbed.cache import LIBRARY, Cache
from tests.testbed.hardware import A100_MIG, Model, nvml_conf
from tests.testbed.requirements import which
from tests.testbed.waiting import wait_until

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUN = "/run/gpusched-testbed"
HANG = f"{RUN}/hung"
NODE_INIT = Path(__file__).with_name("node_init.sh")
NVIDIA_SMI = Path(__file__).with_name("nvidia_smi.py")

Argument = str | os.PathLike[str]


class TestNode:
    """A GPU server made of namespaces. Made and started by `Testbed.up`.

    Attributes:
        name: Host name, as `dgx001`.
        number: 1 for the first node of a testbed.
        address: IPv4 address, reachable from the machine and from the other nodes.
        port: sshd's port, 22.
        gpus: Number of GPUs.
        model: The GPU model.
        disk: The node's folder on the machine: home, container store, logs (`ssh/log`, `docker.log`, `boot.log`).
        is_cut: Whether its network cable is pulled.
        init_pid: The machine's id of its PID 1; 0 while it is not up.
        healed: Why `reset` had to switch the node off and on, one text per time.
    """

    __test__ = False  # pytest: not a test class

    def __init__(self, index: int, number: int, model: Model, gpus: int, disk: Path, cache: Cache) -> None:
        self.name = f"dgx{number:03d}"
        self.number = number
        self.address = network.address(index, number)
        self.port = 22
        self.model = model
        self.gpus = gpus
        self.disk = disk
        self.is_cut = False
        self.init_pid = 0
        self.healed: list[str] = []
        self.figures: dict[str, object] = {}  # what NVML answers besides, also after `nvml_reset`
        self._index = index
        self._cache = cache
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._was_off = False

    def __repr__(self) -> str:
        return f"TestNode({self.name!r}, {self.address})"

    # ---- life -----------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start the node's processes, without waiting for them."""
        files.new_boot_id(self.disk)
        self.nvml_reset()
        server = which("sshd") or "sshd"
        node = map(str, [NODE_INIT, self.name, self.disk, self._cache.library, files.library_folder(), server])
        namespaces = ["--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        netns = network.NETNS / network.namespace(self._index, self.number)
        with (self.disk / "boot.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["nsenter", f"--net={netns}", "unshare", *namespaces, "sh", *node],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": PATH}, start_new_session=True,
            )  # fmt: skip

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until sshd answers.

        Raises:
            RuntimeError: The node died on the way up; the message carries its log.
            TimeoutError: It did not come up in time.
        """
        with suppress(TimeoutError):
            wait_until(self.answers, timeout_s / 12, least_s=0.0)
        assert self._process is not None
        unshare = self._process.pid
        self.init_pid = wait_until(lambda: processes.tree(unshare)[1:2], what=f"PID 1 of {self.name}")[0]
        wait_until(lambda: "tini" in processes.command_line(self.init_pid)[:1], what=f"tini on {self.name}")
        sshd.start(self)  # at once where it answers; on a busy machine its first start may have failed

    def answers(self, timeout_s: float = 5.0) -> bool:
        """Whether sshd greets who connects, over the network, within `timeout_s` seconds.

        Raises:
            RuntimeError: The node is dead; the message carries its log.
        """
        if self._process is not None and self._process.poll() is not None:
            logs = [self.disk / "boot.log", self.disk / "ssh" / "log"]
            said = "".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())
            raise RuntimeError(f"{self.name} did not start: {said.strip()}")
        try:
            # A short wait to connect: a packet lost while the link comes up is sent again only after a second.
            with socket.create_connection((self.address, self.port), timeout=0.1) as connection:
                connection.settimeout(timeout_s)
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False

    def power_off(self) -> None:
        """Pull the cable, then kill every process: nobody hears a goodbye. `join` is for cut nodes only."""
        network.set_link(self._index, self.number, up=False)
        self.is_cut = True
        if self._process is not None:
            for pid in processes.tree(self._process.pid):
                processes.send(pid, signal.SIGKILL)
        self.forget()
        self._frozen = False
        self._was_off = True
        cgroups.remove(cgroups.container_ids(self.disk))

    def power_on(self) -> None:
        """Start a node that is off, with its old disk and a new boot id, and wait for its sshd."""
        if self._process is None:
            self.boot()
            self.join()
            self.wait_ready()

    def reboot(self) -> None:
        """`power_off`, then `power_on`."""
        self.power_off()
        self.power_on()

    def forget(self) -> None:
        """Collect the node's process after something else killed it."""
        if self._process is not None:
            self._process.wait()
            self._process = None
        self.init_pid = 0

    @property
    def boot_id(self) -> str:
        """Return /proc/sys/kernel/random/boot_id of the node."""
        return (self.disk / "boot_id").read_text().strip()

    # ---- inside ---------------------------------------------------------------------------------------------

    def enter(self, argv: Sequence[Argument]) -> list[Argument]:
        """The command line that runs `argv` on the node, from the machine, as root in root's home.

        Raises:
            RuntimeError: The node is not up.
        """
        if not self.init_pid:
            raise RuntimeError(f"{self.name} is not up")
        flags = ["--mount", "--uts", "--ipc", "--net", "--pid", "--wd=/root"]
        environment = [f"PATH={PATH}", "HOME=/root", "USER=root", "LANG=C.UTF-8"]
        return ["nsenter", "--target", str(self.init_pid), *flags, "env", "-i", *environment, *argv]

    def run(
        self, argv: Sequence[Argument], input: str | None = None, check: bool = True, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node without SSH, even when its network is cut or its sshd stopped.

        Raises:
            subprocess.CalledProcessError: It failed, and `check` is true; the error's notes carry its stderr.
            subprocess.TimeoutExpired: It took longer than `timeout` seconds; it has been killed.
        """
        command = self.enter(argv)
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                out, err = process.communicate(input or "", timeout)
            except BaseException:
                for pid in processes.tree(process.pid):
                    processes.send(pid, signal.SIGKILL)
                raise
        if check and process.returncode:
            error = subprocess.CalledProcessError(process.returncode, shlex.join(map(str, argv)), out, err)
            error.add_note(f"{self.name} said: {err.strip()}")
            raise error
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def pids(self) -> list[int]:
        """The machine's ids of all processes of the node, containers' included, parents first."""
        return processes.tree(self.init_pid) if self.init_pid else []

    # ---- NVML -----------------------------------------------------------------------------------------------

    def nvml_set(self, values: Mapping[str, object] | None = None, **more: object) -> None:
        """Change what NVML answers, from the next call on: `nvml_set({"gpu3.error": 15}, count=7)`."""
        path = self.disk / "nvml" / "nvml.conf"
        lines = "".join(f"{key}={value}\n" for key, value in {**(values or {}), **more}.items())
        self._write_nvml(path.read_text() + lines)

    def nvml_reset(self) -> None:
        """Back to healthy, idle GPUs."""
        self._write_nvml(nvml_conf(self.model, self.number, self.gpus))
        self.nvml_set(self.figures)

    def _write_nvml(self, text: str) -> None:
        part = self.disk / "nvml" / "nvml.conf.part"
        part.write_text(text)
        part.rename(part.with_name("nvml.conf"))

    def install_nvidia_smi(self) -> None:
        """Give the node nvidia-smi and nvidia-ctk (nvidia_smi.py) until it is reset; a V100 is cut as an A100 is."""
        for name in ("nvidia-smi", "nvidia-ctk"):
            self.install_script(name, NVIDIA_SMI.read_text())
        self.nvml_set({f"gpu*.mig_profile.{number}": line for number, line in A100_MIG.items()}, **{"gpu*.mig": 0})

    def cut_gpu(self, gpu: int, *profiles: str) -> None:
        """Switch a GPU's MIG mode on and cut it so, by nvidia-smi's words: `cut_gpu(3, "1g.10gb:0", "3g.40gb:4")`."""
        self.install_nvidia_smi()
        self.nvml_set({f"gpu{gpu}.mig": 1})
        if profiles:
            self.run(["nvidia-smi", "mig", "-i", str(gpu), "-cgi", ",".join(profiles), "-C"])

    def hide_nvml(self) -> None:
        """Take libnvidia-ml.so.1 away: a node without the driver."""
        self.run(["rm", "-f", f"{files.library_folder()}/{LIBRARY}"])

    def show_nvml(self) -> None:
        """Put libnvidia-ml.so.1 back where it is not there."""
        if not Path(f"/proc/{self.init_pid}/root{files.library_folder()}/{LIBRARY}").exists():
            self.run(["cp", self._cache.library, f"{files.library_folder()}/{LIBRARY}"])

    # ---- faults ---------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop all processes, as a machine that swaps to death: the kernel still answers TCP, nothing else does."""
        assert self._process is not None
        self._frozen = True  # before it is done: what stops half-way has to be thawed too
        processes.stop_tree(self._process.pid)

    def thaw(self) -> None:
        """Let the processes of a frozen node run again."""
        if self._process is not None:
            processes.continue_tree(self._process.pid)
        self._frozen = False

    def cut(self) -> None:
        """Pull the network cable."""
        network.set_link(self._index, self.number, up=False)
        self.is_cut = True

    def join(self) -> None:
        """Plug the network cable in again."""
        network.set_link(self._index, self.number, up=True)
        self.is_cut = False

    def stop_sshd(self, *, sessions: bool = False) -> None:
        """Kill sshd: new connections are refused. Open ones live on, unless `sessions` is true."""
        sshd.stop(self, sessions=sessions)

    def start_sshd(self) -> None:
        """Start sshd where it is not running, and wait until it answers.

        Raises:
            TimeoutError: It does not, not even after it was started again; the message says what is known.
        """
        sshd.start(self)

    def new_host_key(self) -> str:
        """Restart sshd with another host key, as after a reinstallation. The testbed's known_hosts stays as it was.

        Returns:
            The line that a known_hosts file should have from now on.
        """
        key = self.disk / "ssh" / "hostkey"
        key.unlink()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "host", "-f", key], check=True)
        self.stop_sshd()
        self.start_sshd()
        return self.known_hosts_line()

    def known_hosts_line(self) -> str:
        """The node's present host key as a line for known_hosts, under its name and its address."""
        kind, key = (self.disk / "ssh" / "hostkey.pub").read_text().split()[:2]
        return f"{self.name},{self.address} {kind} {key}"

    def hang_runtime(self, name: str) -> None:
        """Replace a command, as `podman`, by one that never returns."""
        self.run(["ln", "-sf", "/bin/sleep", HANG])
        self.install_script(name, f"#!/bin/sh\nexec {HANG} infinity\n")

    def unhang_runtime(self, name: str) -> None:
        """Give a hanging command back, and end the calls that hang."""
        self.remove_script(name)
        for pid in self.pids():
            if processes.command_line(pid)[:1] == [HANG]:
                processes.send(pid, signal.SIGKILL)

    def hide(self, command: str) -> None:
        """Uninstall a command from this node: `command not found`."""
        self._hidden = self._hidden | {command}
        self.run(["rm", "-f", *(f"{folder}/{command}" for folder in PATH.split(":"))])

    def unhide(self, command: str) -> None:
        """Install a hidden command again."""
        self._hidden = self._hidden - {command}
        script = "for f in local/bin sbin bin; do [ ! -e $0/usr/$f/$1 ] || cp -a $0/usr/$f/$1 /usr/$f/$1; done"
        self.run(["sh", "-c", script, RUN, command])

    @property
    def _hidden(self) -> frozenset[str]:
        return frozenset((self.disk / "hidden").read_text().split())

    @_hidden.setter
    def _hidden(self, commands: frozenset[str]) -> None:
        (self.disk / "hidden").write_text("".join(f"{c}\n" for c in sorted(commands)))

    def install_script(self, name: str, text: str) -> None:
        """Put an executable first in the PATH of this node only, as a fake nvidia-smi. Survives a reboot."""
        part = self.disk / "bin" / f".{name}.part"
        part.write_text(text)
        part.chmod(0o755)
        part.rename(self.disk / "bin" / name)

    def remove_script(self, name: str) -> None:
        """Remove what `install_script` installed."""
        (self.disk / "bin" / name).unlink(missing_ok=True)

    # ---- docker ---------------------------------------------------------------------------------------------

    def start_docker(self) -> None:
        """Give the node a working `docker` with `--gpus` and the testbed's image. Takes about a second at first."""
        docker.start(self, self._cache.rootfs_tar)
        self.unhide("docker")
        (self.disk / "bin" / "docker").unlink(missing_ok=True)
        (self.disk / "bin" / "docker").symlink_to(docker.CLIENT)

    def stop_docker(self) -> None:
        """End dockerd; the client stays and cannot reach it."""
        docker.stop(self)

    def slurmd_pids(self) -> list[int]:
        """The machine's ids of slurmd where `SlurmSite` started it; its jobs' processes are not among them."""
        return [p for p in self.pids() if Path("".join(processes.command_line(p)[:1])).name == "slurmd"]

    # ---- between tests --------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Undo every fault and remove what tests left: containers, processes, files in the home but `.cache`.

        Open SSH connections stay open. dockerd goes on running but its client is hidden again. A node that cannot be
        put right while it runs is switched off and on: one broken node must not fail all later tests.
        """
        try:
            self._reset()
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            self.healed.append(f"{self.name} was switched off and on because it could not be reset: {error}")
            self.power_off()
            self._reset()

    def _reset(self) -> None:
        was_whole = not (self._frozen or self.is_cut or self._process is None)
        if self._frozen:
            self.thaw()
        if self.is_cut:
            self.join()
        self.power_on()
        self.nvml_reset()
        for script in (self.disk / "bin").iterdir():
            script.unlink()
        self._remove_containers()
        # A removal that was killed between podman's storage and its database leaves what only the latter knows.
        if "podman" in self._kill_leftovers() or self._was_off:
            self._podman_remove()
            self._was_off = False
        for command in self._hidden - set(files.HIDDEN_AT_FIRST):
            self.unhide(command)
        for command in set(files.HIDDEN_AT_FIRST) - self._hidden:
            self.hide(command)
        self.show_nvml()
        if (self.disk / "ssh" / "hostkey").read_text() != (self.disk / "ssh" / "hostkey.original").read_text():
            files.restore_host_key(self.disk)
            self.stop_sshd()
        if not (was_whole and sshd.is_up(self)):  # to connect, as the start does, takes most of a reset
            self.start_sshd()
        for path in (self.disk / "home").iterdir():
            if path.is_dir() and not path.is_symlink() and path.name != ".cache":
                shutil.rmtree(path)
            elif path.name != ".cache":
                path.unlink()

    def _remove_containers(self) -> None:
        store = next(self.disk.glob("containers/storage/*-containers/containers.json"), None)
        if store is not None and store.read_text().strip() not in ("", "[]", "null"):
            self._podman_remove()
        docker.remove_containers(self)

    def _podman_remove(self) -> None:
        self.run(["/usr/bin/podman", "rm", "--all", "--force", "--time", "0"], check=False, timeout=300)

    def _kill_leftovers(self) -> set[str]:
        """Kill all but PID 1 and its sleeper, sshd and its connections, dockerd with what it runs, and slurmd.

        Returns the names of the killed commands.
        """
        keep = {self.init_pid, *docker.pids(self), *self.slurmd_pids()}
        killed = {}
        for pid in self.pids():
            words = processes.command_line(pid)
            title = " ".join(words)
            ours = title.startswith("sshd:") and not sshd.is_foreign(self, pid)
            if pid not in keep and words != ["sleep", "infinity"] and not ours:
                processes.send(pid, signal.SIGKILL)
                killed[pid] = Path(words[0]).name if words else ""
        wait_until(lambda: all(processes.state(p) in ("Z", "X", "") for p in killed), what=f"leftovers on {self.name}")
        return set(killed.values())
