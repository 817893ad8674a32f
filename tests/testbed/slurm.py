"""A Slurm site on a testbed: slurmctld, slurmdbd, MariaDB and munged on the machine, slurmd on every node."""

import atexit
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.testbed import processes, slurm_files
from tests.testbed.cluster import Testbed
from tests.testbed.node import PATH, TestNode
from tests.testbed.requirements import which
from tests.testbed.waiting import wait_until

USERS = slurm_files.USERS
OPERATOR = slurm_files.OPERATOR


class SlurmSite:
    """Slurm for the nodes of a running testbed: partition A100 (dgx001, dgx003..) and V100 (dgx002, dgx004..).

    Jobs run as root or as one of `USERS`, whom every Debian has; both are in account `lab`, and in `small`, of which
    two jobs may run at once where Slurm enforces limits. `OPERATOR` has Slurm's admin level of that name. Everything
    lies in a folder of its own below /tmp, which nodes and machine share and users may read; sockets have short paths
    there.

    Args:
        testbed: It is up already. Several sites live side by side, one a testbed.
        orders: Node -> minor numbers of its GPUs in the order of gres.conf, so that IDX is not the minor number.
        settings: What slurm.conf has besides, or instead of `slurm_files.SETTINGS`; "" leaves a setting out.

    Attributes:
        env: The environment in which Slurm's commands talk to this site.
        folder: Configuration, sockets, state.
        shared: A folder in which every user's job may write.
        first_job: The smallest id a job can have since the last `reset`.
        logs: slurmctld.log, slurmdbd.log, slurmd-dgx001.log..
    """

    __test__ = False  # pytest: not a test class

    def __init__(
        self,
        testbed: Testbed,
        orders: Mapping[str, Sequence[int]] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.testbed = testbed
        self.folder = slurm_files.folder(testbed.index)
        self.shared = self.folder / "shared"
        self.logs = testbed.root / "slurm"
        self.env = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        self._orders = dict(orders or {})
        self._settings = dict(settings or {})
        self.first_job = 1
        self._written = ("", "")
        self._own_settings: dict[str, str] = {}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._owner = 0

    # ---- life -----------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Start everything and wait until Slurm can use all nodes; first end what a killed run left of this index.

        Raises:
            RuntimeError: The machine has no Slurm, or a daemon ended; the message carries the end of its log.
            TimeoutError: Something did not come up in time.
        """
        if reason := slurm_files.why_unavailable():
            raise RuntimeError(reason)
        slurm_files.sweep(self.testbed.index)
        self._owner = os.getpid()
        atexit.register(self.down)
        try:
            self._write_files()
            self._spawn("munged", slurm_files.munged(self.folder, self.logs / "munged.log"))
            self._spawn("mariadbd", slurm_files.mariadbd(self.folder))
            wait_until(lambda: self._is_there("mysql", "mariadbd"), 60, "mariadbd", 0.01)
            wait_until(lambda: self._is_there("munge", "munged"), 60, "munged", 0.01)
            self.start_slurmdbd()
            self.start_slurmctld()
            self.start_nodes()
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """End all daemons and remove the folder; logs stay. Jobs on nodes end too. Idempotent."""
        if not self._owner or os.getpid() != self._owner:  # a forked child must not end its parent's site
            return
        atexit.unregister(self.down)
        self._owner = 0
        slurm_files.sweep(self.testbed.index)
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def detach(self) -> None:
        """Leave it running when this process ends; `cluster.sweep` ends it."""
        atexit.unregister(self.down)
        self._owner = 0

    def describe(self) -> dict[str, object]:
        """Paths, ready for JSON."""
        return {"slurm_conf": self.env["SLURM_CONF"], "slurm_shared": str(self.shared), "slurm_logs": str(self.logs)}

    def _write_files(self) -> None:
        cache = Path(os.environ.get("GPUSCHED_TESTBED_CACHE") or Path(__file__).parents[2] / "build" / "testbed")
        for folder in (self.folder, self.logs, self.folder / "state", self.shared):
            folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        self.shared.chmod(0o1777)
        (self.folder / "job_submit.lua").write_text(slurm_files.GUARD)
        key = self.folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        with tempfile.TemporaryDirectory(prefix="gstb-", dir="/tmp") as scratch:
            shutil.copy(key, scratch)
            tar = slurm_files.database(cache.absolute(), Path(scratch))
        subprocess.run(["tar", "-C", self.folder, "-xf", tar], check=True)
        index, address = self.testbed.index, f"10.{77 + self.testbed.index}.0.1"
        host = os.uname().nodename
        conf = self.folder / "slurmdbd.conf"
        conf.touch(0o600)
        conf.write_text(
            slurm_files.slurmdbd_conf(
                self.folder, host=host, address=address, port=17200 + index, log=self.logs / "slurmdbd.log"
            )
        )
        self._own_settings = {
            "SlurmctldHost": f"{host}({address})",
            "SlurmctldPort": str(17100 + index),
            "AccountingStorageHost": address,
            "AccountingStoragePort": str(17200 + index),
            "AccountingStoragePass": str(self.folder / "munge"),
            "AuthInfo": f"socket={self.folder / 'munge'}",
            "StateSaveLocation": str(self.folder / "state"),
            "SlurmdSpoolDir": str(self.folder / "spool-%n"),
            "SlurmctldPidFile": str(self.folder / "slurmctld.pid"),
            "SlurmctldLogFile": str(self.logs / "slurmctld.log"),
            "SlurmdLogFile": str(self.logs / "slurmd-%n.log"),
        }
        self._write_conf(self._orders, self._settings)

    def _write_conf(self, orders: Mapping[str, Sequence[int]], settings: Mapping[str, str]) -> bool:
        """Whether anything is another than before."""
        first = {"FirstJobId": str(self.first_job)}
        nodes = self.testbed.nodes
        texts = (
            slurm_files.slurm_conf({**slurm_files.SETTINGS, **self._own_settings, **first, **settings}, nodes),
            slurm_files.gres_conf(nodes, orders),
        )
        changed = texts != self._written
        for name, text in zip(("slurm.conf", "gres.conf"), texts, strict=True):
            part = self.folder / f".{name}.part"
            part.write_text(text)
            part.rename(self.folder / name)
        self._written = texts
        return changed

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        env = {
            **self.env,
            "PATH": PATH,
            "MYSQL_UNIX_PORT": str(self.folder / "mysql"),
            slurm_files.MARK: str(self.folder),
        }
        with (self.logs / f"{name}.out").open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True, cwd="/"
            )

    def _check(self, name: str) -> None:
        if self._running[name].poll() is not None:
            logs = [self.logs / f"{name}.out", self.logs / f"{name}.log"]
            said = "".join(log.read_text(errors="replace")[-2000:] for log in logs if log.exists())
            raise RuntimeError(f"{name} ended: {said.strip()}")

    def _is_there(self, file: str, name: str) -> bool:
        self._check(name)
        return (self.folder / file).exists()

    def _database_answers(self) -> bool:
        self._check("slurmdbd")
        return self.run(["sacctmgr", "-n", "show", "cluster"], check=False).returncode == 0

    # ---- slurmctld and slurmd -------------------------------------------------------------------------------

    @property
    def slurmctld(self) -> int:
        """slurmctld's process id; 0 while it does not run."""
        process = self._running.get("slurmctld")
        return process.pid if process is not None and process.poll() is None else 0

    def start_slurmctld(self) -> None:
        """Start slurmctld with the state it left, and wait until it answers."""
        if not self.slurmctld:
            self._spawn("slurmctld", [which("slurmctld") or "", "-D"])
        wait_until(self._answers, 60, "slurmctld", 0.02)

    def start_slurmdbd(self) -> None:
        """Start slurmdbd where it does not run, and wait until it answers."""
        process = self._running.get("slurmdbd")
        if process is None or process.poll() is not None:
            self._spawn("slurmdbd", [which("slurmdbd") or "", "-D"])
        wait_until(self._database_answers, 60, "slurmdbd", 0.05)

    def kill_slurmdbd(self) -> None:
        """SIGKILL: slurmctld keeps what it has to say until there is another one."""
        self._running["slurmdbd"].kill()
        self._running["slurmdbd"].wait(300)

    def _answers(self) -> bool:
        self._check("slurmctld")
        return self.run(["scontrol", "ping"], check=False).stdout.find(" is UP") > 0

    def kill_slurmctld(self) -> None:
        """SIGKILL: what it had not saved is lost; commands fail after some seconds."""
        self._end_slurmctld(signal.SIGKILL)

    def _end_slurmctld(self, how: signal.Signals) -> None:
        if pid := self.slurmctld:
            processes.send(pid, how)
            processes.send(pid, signal.SIGCONT)
            self._running["slurmctld"].wait(300)

    def freeze_slurmctld(self) -> None:
        """SIGSTOP: connections are taken and nothing is answered."""
        processes.send(self.slurmctld, signal.SIGSTOP)

    def thaw_slurmctld(self) -> None:
        """Let a frozen slurmctld go on."""
        processes.send(self.slurmctld, signal.SIGCONT)

    def slurmd(self, node: TestNode) -> int:
        """The machine's id of a node's slurmd; 0 where none runs."""
        return next(iter(node.slurmd_pids()), 0)

    def start_nodes(self) -> None:
        """Start slurmd on every node where it does not run, and wait until Slurm can use all nodes."""
        for node in self.testbed.nodes:
            if not self.slurmd(node):
                (self.folder / f"spool-{node.name}").mkdir(exist_ok=True)
                conf = f"SLURM_CONF={self.env['SLURM_CONF']}"
                node.run(["env", conf, which("slurmd") or "", "-N", node.name])
        bad = ("DOWN", "UNKNOWN", "NOT_RESPONDING")
        wait_until(lambda: not any(w in s for s in self.states().values() for w in bad), 60, "the nodes", 0.02)

    def kill_slurmd(self, node: TestNode) -> None:
        """SIGKILL a node's slurmd; its jobs go on."""
        if pid := self.slurmd(node):
            processes.send(pid, signal.SIGKILL)
            wait_until(lambda: not self.slurmd(node), what=f"the end of slurmd on {node.name}")

    def states(self) -> dict[str, str]:
        """Node -> its state, as `IDLE` or `MIXED+DRAIN`."""
        lines = self.run(["sinfo", "-N", "-h", "-O", "NodeHost:64,StateComplete:64"]).stdout.split("\n")
        return {words[0]: words[1].upper() for line in lines if (words := line.split())}

    def configure(self, orders: Mapping[str, Sequence[int]] | None = None, **settings: str) -> None:
        """Change gres.conf or slurm.conf and restart what reads them; `reset` takes it back.

        `JobSubmitPlugins="lua"` keeps users from naming the reservation of gpusched.
        """
        if self._write_conf(self._orders if orders is None else orders, {**self._settings, **settings}):
            self._restart()

    def _restart(self) -> None:
        self._end_slurmctld(signal.SIGTERM)
        for node in self.testbed.nodes:
            self.kill_slurmd(node)
        self.start_slurmctld()
        self.start_nodes()

    # ---- jobs -----------------------------------------------------------------------------------------------

    def run(
        self, argv: Sequence[str | os.PathLike[str]], user: str = "root", input: str = "", check: bool = True,
        timeout_s: float = 300,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command against this site, as this user, in the shared folder.

        Raises:
            subprocess.CalledProcessError: It failed, and `check` is true; the error's notes carry its stderr.
        """
        entry = pwd.getpwnam(user)
        ids = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []} if user != "root" else {}
        env = {**self.env, "USER": user, "HOME": entry.pw_dir}
        done: subprocess.CompletedProcess[str] = subprocess.run(
            argv, input=input, text=True, capture_output=True, env=env, cwd=self.shared, timeout=timeout_s, **ids
        )  # type: ignore[call-overload]
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, list(map(str, argv)), done.stdout, done.stderr)
            error.add_note(f"it said: {done.stderr.strip()}")
            raise error
        return done

    def sbatch(self, script: str, *options: str, user: str = "root") -> int:
        """Submit a script (lines for sh) and return its job id. Output is thrown away unless `options` keep it."""
        text = script if script.startswith("#!") else f"#!/bin/sh\n{script}\n"
        argv = ["sbatch", "--parsable", "--output=/dev/null", *options]
        return int(self.run(argv, user, input=text).stdout.split(";")[0])

    def state(self, job: int | str) -> str:
        """A job's state in Slurm's words, as `PENDING`; "" where Slurm does not know it."""
        done = self.run(["scontrol", "-o", "show", "job", str(job)], check=False)
        return next((w.partition("=")[2] for w in done.stdout.split() if w.startswith("JobState=")), "")

    def wait(self, job: int | str, *states: str, timeout_s: float = 30) -> str:
        """Wait until a job is in one of these states (default: COMPLETED), and return it.

        Raises:
            RuntimeError: It has ended otherwise.
        """
        wanted = states or ("COMPLETED",)

        def there() -> str:
            now = self.state(job)
            if now not in wanted and now in ("CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL", "TIMEOUT"):
                raise RuntimeError(f"job {job} is {now}, not {' or '.join(wanted)}")
            return now if now in wanted else ""

        return wait_until(there, timeout_s, f"job {job} to be {' or '.join(wanted)}", 0.02)

    def wait_saved(self, job: int | str) -> None:
        """Wait until slurmctld has written down what it now knows of a job; a SIGKILL loses the last seconds."""
        mark = uuid.uuid4().hex
        self.run(["scontrol", "update", f"JobId={job}", f"Comment={mark}"])
        state = self.folder / "state" / "job_state"
        wait_until(lambda: state.exists() and mark.encode() in state.read_bytes(), what=f"job {job} in {state}")

    # ---- between tests --------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Start what does not run: nodes that were rebooted lack their slurmd."""
        self.start_slurmctld()
        self.start_nodes()

    def reset(self) -> None:
        """Undo what a test did: jobs, reservations, states of nodes, settings, files in the shared folder.

        Slurm starts anew and remembers no job, only the database does. Ids of new jobs begin at the next hundred
        thousand and one.
        """
        self._end_slurmctld(signal.SIGKILL)
        for node in self.testbed.nodes:
            self._end_slurm_on(node)
        for path in (*(self.folder / "state").iterdir(), *self.folder.glob("spool-*"), *self.shared.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "clustername":
                path.unlink()
        self.first_job += 100_000
        self._write_conf(self._orders, self._settings)
        self.ready()

    def _end_slurm_on(self, node: TestNode) -> None:
        """SIGKILL slurmd and all that runs jobs, and the jobs with it."""
        stepd = [p for p in node.pids() if "slurmstepd" in "".join(processes.command_line(p)[:1])]
        pids = [*node.slurmd_pids(), *(p for step in stepd for p in processes.tree(step))]
        for pid in pids:
            processes.send(pid, signal.SIGKILL)
        wait_until(lambda: all(processes.state(p) in ("Z", "X", "") for p in pids), 30, f"jobs on {node.name}", 0.005)
