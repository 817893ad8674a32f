"""A cluster as its users have it: the command line, a real controller process, real nodes behind SSH."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpusched.model.events import Event
from gpusched.model.jobs import ENDED, JobRecord
from gpusched.queue.store import Reader
from tests import commands
from tests.testbed import Testbed, TestNode, wait_until

IMAGE = "localhost/gs/busybox:1"
GPUSCHED = (sys.executable, "-m", "gpusched")
WAIT = "until [ -e /share/go ]; do sleep 0.1; done"
"""sh: wait for the test to make go in its folder `share`, mounted at /share."""

SETTINGS: dict[str, object] = {
    "tick": "5s", "probe_timeout": "60s", "connect_timeout": "30s", "down_after": "60s", "node_fail_after": "90s",
    "grace": "10s", "max_retries": 3, "power_price": "0.30 EUR/kWh", "admins": [], "allowed_mounts": ["/tmp/share"],
}  # fmt: skip
"""No node is taken for lost, and no job killed before it has heard its signal, however busy the machine is."""
IMPATIENT = {
    "tick": "1s", "probe_timeout": "8s", "connect_timeout": "8s", "down_after": "4s", "node_fail_after": "4s"
}  # fmt: skip
"""With the mark ``impatient``: for tests of nodes that are lost, which each takes several probes to see."""
_NODES = os.path.realpath("/usr/bin/python3").rpartition("python")[2]
functions = pytest.mark.skipif(
    _NODES != f"{sys.version_info.major}.{sys.version_info.minor}",
    reason=f"a function needs the Python that it was sent from, and the nodes have the machine's, {_NODES}",
)
"""For tests whose jobs are functions."""
FLAVORS = {
    "A100": {
        "s-A100": {"gpus": 2, "cores": 2, "memory": "512M", "time": "1h"},
        "m-A100": {"gpus": 4, "cores": 4, "memory": "1G", "time": "2h"},
        "l-A100": {"gpus": 8, "cores": 8, "memory": "4G", "time": "4h"},
        "f-A100": {"gpus": 16, "cores": 16, "memory": "8G", "time": "8h"},
    },
    "V100": {
        "s-V100": {"gpus": 2, "cores": 2, "memory": "512M", "time": "1h"},
        "l-V100": {"gpus": 8, "cores": 8, "memory": "4G", "time": "4h"},
        "f-V100": {"gpus": 16, "cores": 16, "memory": "8G", "time": "8h"},
    },
}
RATED_POWER = {"A100": "6.5kW", "V100": "3.5kW"}


class Cluster:
    """One installation: inventory.yaml, state folder, controller, and the testbed's nodes.

    Attributes:
        testbed: The nodes; `testbed.node("dgx001")`.
        folder: Holds all of it; below /tmp, which the nodes share.
        state: GPUSCHED_STATE.
        inventory: GPUSCHED_INVENTORY. Partition A100: dgx001, dgx003; V100: dgx002, dgx004; 8 GPUs, 8 cores, 4G each.
        partitions: Those that are declared.
        runtime: What their nodes run jobs with.
        settings: Of inventory.yaml.
    """

    runtime = "podman"
    settings: Mapping[str, object] = SETTINGS

    def __init__(self, testbed: Testbed, folder: Path, partitions: Sequence[str] = ("A100", "V100")) -> None:
        self.testbed, self.folder, self.partitions = testbed, folder, partitions
        self.state = folder / "state"
        self.inventory = folder / "inventory.yaml"
        self.controller: subprocess.Popen[bytes] | commands.Process | None = None
        self._log = folder / "controller.log"
        self._started: list[commands.Piped] = []

    # ---- the inventory --------------------------------------------------------------------------------------

    def write_inventory(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        policies: Mapping[str, str] | None = None,
        nodes: Mapping[str, Mapping[str, object]] | None = None,
        leave_out: Iterable[str] = (),
    ) -> None:
        """Write inventory.yaml (at once, by rename).

        Args:
            settings: Over `settings`.
            policies: Partition -> policy, where not easy.
            nodes: Name -> keys of that node's entry that differ (``{"dgx002": {"runtime": "docker"}}``).
            leave_out: Nodes that are not declared.
        """
        common = {"known_hosts": str(self.testbed.known_hosts), "ssh_config": "/dev/null"}
        partitions = {}
        for number, name in enumerate(self.partitions):
            members = [n for i, n in enumerate(self.testbed.nodes) if i % 2 == number and n.name not in leave_out]
            partitions[name] = {
                "policy": (policies or {}).get(name, "easy"),
                "image": IMAGE,
                "defaults": {
                    "user": "root", "key": str(self.testbed.identity), "gpus": 8, "cores": 8, "memory": "4G",
                    "gpu_type": name, "rated_power": RATED_POWER[name], "runtime": self.runtime,
                },
                "nodes": [{"name": n.name, "address": n.address} | dict((nodes or {}).get(n.name,
                {})) for n in members],
                "flavors": {k: v for k, v in FLAVORS[name].items() if len(members) > 1 or not k.startswith("f-")},
            }  # fmt: skip
        text = json.dumps(
            {"settings": {**self.settings, **common, **(settings or {})}, "partitions": partitions}, indent=1
        )
        part = self.inventory.with_suffix(".part")
        part.write_text(text)  # JSON is YAML
        part.rename(self.inventory)

    # ---- the controller -------------------------------------------------------------------------------------

    def start_controller(self, *, nodes: bool = True, program: Sequence[str] = GPUSCHED[1:], **env: str) -> None:
        """Start ``gpusched controller``, and wait until it has read every node (or, without ``nodes``, has begun).

        Args:
            nodes: Wait for every node.
            program: What Python runs; it is given the word ``controller``.
            env: More variables.
        """
        assert self.controller is None or self.controller.poll() is not None, "one is running"
        began = time.time()
        with self._log.open("ab") as log, open(os.devnull) as nothing:
            if program == GPUSCHED[1:]:
                files = (nothing.fileno(), log.fileno(), log.fileno())
                self.controller = commands.start(["controller"], self.env(**env), "/", files, session=True)
            else:
                self.controller = subprocess.Popen(
                    [sys.executable, *program, "controller"], env=self.env(**env), cwd="/", stdin=nothing,
                    stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
        wait_until(lambda: self._has_begun(began, nodes), 60, "the controller's first cycle")

    def _has_begun(self, began: float, nodes: bool) -> bool:
        assert self.controller is not None
        assert self.controller.poll() is None, self.controller_log
        with self.reader() as reader:
            beat = float((reader and reader.meta("heartbeat")) or 0)
            if reader is None or beat < began:
                return False
            records = reader.node_records().values()
            return not nodes or all((r.last_seen or 0) > began for r in records)

    def kill_controller(self) -> None:
        """``kill -9``."""
        assert self.controller is not None
        self.controller.kill()
        self.controller.wait()

    def stop_controller(self) -> int:
        """``kill``; returns the exit code."""
        assert self.controller is not None
        self.controller.send_signal(signal.SIGCONT)  # a test that failed may have stopped it
        self.controller.send_signal(signal.SIGTERM)
        return self.controller.wait(timeout=300)

    @property
    def controller_log(self) -> str:
        """Return the log of all controllers of this cluster."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    # ---- the command line -----------------------------------------------------------------------------------

    def env(self, **more: str) -> dict[str, str]:
        """The environment of every command and of the controller."""
        own = {"GPUSCHED_STATE": str(self.state), "GPUSCHED_INVENTORY": str(self.inventory)}
        return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **own, **more}

    def cli(
        self, *args: str, check: bool = True, env: Mapping[str, str] | None = None, input: str | None = None,
        timeout: float = 300, prefix: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run ``gpusched ARGS``; with ``check`` it must exit 0.

        Args:
            args: Command line.
            check: Fail unless it exits with 0.
            env: More variables.
            input: Its stdin.
            timeout: Seconds.
            prefix: Words before it, as ``setpriv --reuid 1234``.
        """
        environment = self.env(**(env or {}))
        done = commands.run(*args, env=environment, input=input or "", timeout=timeout, prefix=prefix)
        assert not check or done.returncode == 0, done
        return done

    def popen(self, *args: str) -> commands.Piped:
        """Start ``gpusched ARGS``, with its output in pipes; killed at the end of the cluster, if need be."""
        self._started.append(commands.popen(args, self.env()))
        return self._started[-1]

    def finish(self, process: commands.Piped, timeout: float = 300) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of what `popen` started, once it has ended."""
        out, err = process.communicate(timeout=timeout)
        return process.wait(), out, err

    def json(self, *args: str, check: bool = True) -> Any:
        """The one JSON value that ``gpusched ARGS --json`` prints."""
        words = list(args)
        words.insert(words.index("--") if "--" in words else len(words), "--json")
        return json.loads(self.cli(*words, check=check).stdout)

    def submit(self, *options: str, command: Sequence[str] = ("true",), **more: Any) -> str:
        """``gpusched submit OPTIONS -- COMMAND``; returns the id. Partition A100 unless the options say otherwise."""
        words = ["submit", "--json", *options]
        if not {"-p", "--partition", "-F", "--flavor"} & set(options):
            words += ["-p", "A100"]
        return str(json.loads(self.cli(*words, "--", *command, **more).stdout)["id"])

    def sh(self, script: str, *options: str, **more: Any) -> str:
        """`submit` of ``sh -c SCRIPT``."""
        return self.submit(*options, command=("sh", "-c", script), **more)

    def shared(self, script: str, folder: Path, *options: str, **more: Any) -> str:
        """`sh` of a script that knows the folder as /share; plain processes see it where it is."""
        if self.runtime == "process":
            return self.sh(script.replace("/share", str(folder)), *options, **more)
        return self.sh(script, "--mount", f"{folder}:/share", *options, **more)

    # ---- what became of it ----------------------------------------------------------------------------------

    def reader(self) -> _Reading:
        """The store, to look into: ``with cluster.reader() as reader``. Cheaper than a command line per look."""
        return _Reading(self.state)

    def job(self, job: str) -> JobRecord | None:
        """The job as the store has it now; None before the controller took it up."""
        with self.reader() as reader:
            return reader.job(job) if reader else None

    def state_of(self, job: str) -> str:
        """PENDING, ...; "" before the controller took it up."""
        found = self.job(job)
        return str(found.state) if found else ""

    def wait_state(self, job: str, *states: str, timeout: float = 30) -> JobRecord:
        """Wait until the job is in one of the states (none given: until it has ended), and return it.

        A job that ended in another state than those waited for fails at once.
        """

        def arrived() -> JobRecord | None:
            found = self.job(job)
            if found is not None and (found.state in states if states else found.state in ENDED):
                return found
            assert not states or found is None or found.state not in ENDED, f"{found}\n{self.controller_log}"
            return None

        try:
            found = wait_until(arrived, timeout, f"job {job} to be {' or '.join(states) or 'ended'}")
            assert found is not None
            return found
        except TimeoutError as error:
            error.add_note(f"{self.job(job)}\n{self.controller_log}")
            raise

    def wait_node(self, name: str, *states: str, timeout: float = 30) -> None:
        """Wait until a node is in one of the states."""

        def arrived() -> bool:
            with self.reader() as reader:
                record = reader.node_records().get(name) if reader else None
            return record is not None and record.state in states

        wait_until(arrived, timeout, f"{name} to be {' or '.join(states)}")

    def events(self, job: str) -> list[Event]:
        """The job's story."""
        with self.reader() as reader:
            assert reader is not None
            return reader.events(job_id=job)

    def nodes(self) -> dict[str, Any]:
        """``nodes --json`` by name."""
        return {n["name"]: n for n in self.json("nodes")}

    def logs(self, job: str, *options: str) -> str:
        """``gpusched logs JOB``."""
        return self.cli("logs", job, *options).stdout

    def node(self, name: str) -> TestNode:
        """A node of the testbed."""
        return self.testbed.node(name)

    def containers(self, *, running: bool = True) -> list[tuple[str, str]]:
        """(node, name) of gpusched's podman containers on all nodes of its partitions, asked without SSH."""
        found = []
        for node in (node for place, node in enumerate(self.testbed.nodes) if place % 2 < len(self.partitions)):
            everything = [] if running else ["--all"]
            out = node.run(["/usr/bin/podman", "ps", *everything, "--format", "{{.Names}}"]).stdout
            found += [(node.name, name) for name in out.split() if name.startswith("gpusched-")]
        return found

    def wait_clean(self, timeout: float = 20) -> None:
        """Wait until nothing of any job is left on the nodes; a record goes only after its container."""
        wait_until(lambda: not self._ranks(), timeout, "the nodes to be tidied up")
        left = self.containers(running=False) if self.runtime != "process" else []
        states = [
            self.node(node).run(["/usr/bin/podman", "inspect", "--format", "{{json .State}}", name], check=False)
            for node, name in left
        ]
        assert left == [], f"{states}\n{self.controller_log}"

    def clear(self) -> None:
        """Cancel whatever a test left in the queue, and wait until it is gone."""
        with self.reader() as reader:
            left = [job.id for job in (*reader.active(), *reader.pending())] if reader else []
        if left:
            self.cli("cancel", *left, "--now", check=False)
            for job in left:
                self.wait_state(job)
        self.wait_clean()

    def _ranks(self) -> list[Any]:
        with self.reader() as reader:
            return reader.ranks() if reader else []

    def close(self) -> None:
        """Stop the controller; it must not have shown anybody a traceback."""
        for process in self._started:
            process.close()
        if self.controller is not None and self.controller.poll() is None:
            assert self.stop_controller() == 0, self.controller_log
        assert "Traceback" not in self.controller_log, self.controller_log


class _Reading:
    """A `Reader` for the length of a ``with``; None where there is no store yet."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def __enter__(self) -> Reader | None:
        self._reader = Reader.open(self._state)
        return self._reader

    def __exit__(self, *error: object) -> None:
        if self._reader is not None:
            self._reader.close()


@pytest.fixture
def stopped(testbed: Testbed, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of its own whose controller (and inventory, with `write_inventory`) the test starts itself.

    Of one partition only with the mark ``one_partition``: each probe of a node that no job needs costs time. With the
    mark ``processes`` jobs are plain processes, for tests of what is the same with containers and costs more there.
    """
    cluster = Cluster(testbed, tmp_path)
    if request.node.get_closest_marker("one_partition"):
        cluster.partitions = ("A100",)
    if request.node.get_closest_marker("processes"):
        cluster.runtime = "process"
    if request.node.get_closest_marker("impatient"):
        cluster.settings = SETTINGS | IMPATIENT
    cluster.write_inventory()
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(stopped: Cluster) -> Cluster:
    """A cluster of its own, running; nodes, state folder and controller are new for every test."""
    stopped.start_controller()
    return stopped


@pytest.fixture(scope="module")
def house_of_module(
    testbed_session: Testbed, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Cluster]:
    """See `house`."""
    cluster = Cluster(testbed_session, tmp_path_factory.mktemp("house"))
    if request.node.get_closest_marker("one_partition"):
        cluster.partitions = ("A100",)
    if request.node.get_closest_marker("processes"):
        cluster.runtime = "process"
    cluster.write_inventory()
    cluster.start_controller()
    yield cluster
    cluster.close()
    testbed_session.reset()


@pytest.fixture
def house(house_of_module: Cluster) -> Iterator[Cluster]:
    """One running cluster for all tests of a file (the file's marks count, see `stopped`), empty before each."""
    yield house_of_module
    for node in house_of_module.testbed.nodes:
        for script in (node.disk / "bin").iterdir():
            script.unlink()
    house_of_module.clear()


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """A folder for jobs to mount at /share."""
    folder = tmp_path / "share"
    folder.mkdir()
    return folder
