"""srun over the nodes of a job: real processes of this machine, each node with its own folder and the job's key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusched.controller.stepkey import new_key
from gpusched.nodes.batch.spool import StepNode, StepSettings, spool_files
from gpusched.nodes.batch.steps import options, wire
from gpusched.nodes.batch.steps.tasks import StepTasks
from tests.testbed import wait_until

KEY = new_key().decode()


class Nodes:
    """A job on several nodes: `script` runs on the first, the others wait for steps."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.settings: dict[str, Any] = {"ports": tuple(_free_ports(3)), "connect_s": 20.0}
        self.env: dict[int, dict[str, str]] = {}
        self.servers: list[subprocess.Popen[str]] = []

    def spool(self, rank: int, script: str = "#!/bin/sh\n", key: str = KEY, attempt: str = "job-1") -> Path:
        """Write a node's folder; returns its run."""
        nodes = tuple(StepNode(f"n{i}", "127.0.0.1") for i in range(self.count))
        settings = StepSettings(attempt=attempt, rank=rank, nodes=nodes, **self.settings)
        spool = self.folder / f"{rank}-{attempt}-{len(list(self.folder.iterdir()))}"
        for name, text in spool_files(script, settings, key).items():
            path = spool / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        return spool / "run"

    def start(self, rank: int, program: Path) -> subprocess.Popen[str]:
        """Run a node's program."""
        job_dir = self.folder / f"dir-{rank}"
        job_dir.mkdir(exist_ok=True)
        env = {
            "PATH": os.environ["PATH"], "SLURMD_NODENAME": f"n{rank}", "CUDA_VISIBLE_DEVICES": f"{rank}0,{rank}1",
            "GPUSCHED_CONTAINER": f"gpusched-job-1-{rank}", "GPUSCHED_JOB_DIR": str(job_dir), "GPUSCHED_ATTEMPT": "1",
            "OWN": f"own-{rank}", **self.env.get(rank, {}),
        }  # fmt: skip
        process = subprocess.Popen(
            [program], env=env, cwd=self.folder, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.servers.append(process)
        return process

    def serve(self, **spool: str) -> None:
        """Start the other nodes."""
        for rank in range(1, self.count):
            self.start(rank, self.spool(rank, **spool))

    def script(self, text: str) -> subprocess.Popen[str]:
        """Start the script on the first node."""
        return self.start(0, self.spool(0, "#!/bin/sh\n" + text))

    def run(self, text: str, code: int = 0) -> list[str]:
        """The lines of its whole output."""
        process = self.script(text)
        output, _ = process.communicate(timeout=300)
        assert process.returncode == code, output
        return output.splitlines()

    def lines(self, name: str) -> list[str]:
        """Of a file in the folder."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        """Kill what is left of the job."""
        mark = f"GPUSCHED_JOB_DIR={self.folder}/".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
        for process in self.servers:
            process.communicate()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, 3)
    yield made
    made.close()


def test_tasks_their_numbers_and_their_environment(nodes: Nodes) -> None:
    nodes.settings["tasks_per_node"] = 2
    nodes.env = {1: {"SECRET": "of n1"}, 0: {"GONE": "x"}, 2: {"GONE": "x"}}
    nodes.serve()
    task = "echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NODEID $SLURMD_NODENAME $RANK/$WORLD_SIZE $CUDA_VISIBLE_DEVICES"
    script = (
        f"export MINE='a b'; unset GONE; srun -l sh -c '{task} $OWN $MINE $SECRET ${{GONE-gone}} $SLURM_TASKS_PER_NODE'"
    )
    assert sorted(nodes.run(script)) == [
        "0: 0 0 0 n0 0/6 00,01 own-0 a b gone 2(x3)",
        "1: 1 1 0 n0 1/6 00,01 own-0 a b gone 2(x3)",
        "2: 2 0 1 n1 2/6 10,11 own-1 a b of n1 gone 2(x3)",
        "3: 3 1 1 n1 3/6 10,11 own-1 a b of n1 gone 2(x3)",
        "4: 4 0 2 n2 4/6 20,21 own-2 a b gone 2(x3)",
        "5: 5 1 2 n2 5/6 20,21 own-2 a b gone 2(x3)",
    ]


def test_exports_of_the_script_override_ranks_of_srun(nodes: Nodes) -> None:
    nodes.serve()
    lines = nodes.run(
        "WORLD_SIZE=99 srun -w n2 --export=ALL,MORE=1 sh -c 'echo $SLURMD_NODENAME $WORLD_SIZE $RANK $MORE'"
    )
    assert lines == ["n2 99 0 1"]


def test_exit_codes(nodes: Nodes) -> None:
    nodes.serve()
    lines = nodes.run(
        "srun sh -c 'exit $((SLURM_PROCID * 3))'; echo $?\n"
        "srun -w n1 sh -c 'kill -9 $$'; echo $?\n"
        "srun -w n2 no-such-program; echo $?\n"
        "srun -w n1 -D /nowhere true; echo $?\nexit 5",
        code=5,
    )
    assert [line for line in lines if line.isdigit()] == ["6", "137", "2", "2"]
    assert {"srun: error: n2: task 2: Exited with exit code 6", "srun: error: n1: task 0: Killed"} <= set(lines)
    assert any("no-such-program: No such file" in line for line in lines)


def test_a_failed_task_ends_the_step_if_it_is_asked_to(nodes: Nodes) -> None:
    nodes.serve()
    began = time.monotonic()
    lines = nodes.run("srun -K sh -c '[ $SLURM_PROCID != 1 ] || exit 4; sleep 600'; echo $?")
    assert lines[-1] == "143"
    assert time.monotonic() - began < 500


def test_stdin_is_for_all_tasks(nodes: Nodes) -> None:
    nodes.serve()
    assert sorted(nodes.run("echo hello | srun -l cat; srun -N1 cat </dev/null; echo 1 | srun -N1 cat")) == [
        "0: hello", "1", "1: hello", "2: hello",
    ]  # fmt: skip


def test_output_files(nodes: Nodes) -> None:
    nodes.serve()
    script = (
        "SLURM_JOB_ID=j1 srun -o '%j-%s-%t-%N.out' -e err sh -c 'echo $SLURM_PROCID; echo e >&2'; srun -o none echo x"
    )
    assert nodes.run(script) == []
    assert [nodes.lines(f"j1-0-{t}-n{t}.out") for t in range(3)] == [["0"], ["1"], ["2"]]
    assert nodes.lines("err") == ["e"] * 3


def test_large_output_arrives_whole(nodes: Nodes) -> None:
    nodes.serve()
    assert nodes.run("srun head -c 3000000 /dev/zero | wc -c") == ["9000000"]


def test_gpus_are_given_to_tasks_and_steps(nodes: Nodes) -> None:
    nodes.serve()
    lines = nodes.run("srun -l -N2 -n4 --gpus-per-task=1 sh -c 'echo $CUDA_VISIBLE_DEVICES'")
    assert sorted(lines) == ["0: 00", "1: 01", "2: 10", "3: 11"]
    task = "echo began $CUDA_VISIBLE_DEVICES >>began; until [ -e go ]; do sleep 0.02; done; rm -f go"
    job = nodes.script(f"for i in 1 2 3; do srun -Q -N1 -n1 --gres=gpu:1 sh -c '{task}' & done; wait")
    wait_until(lambda: len(nodes.lines("began")) == 2)
    assert sorted(nodes.lines("began")) == ["began 00", "began 01"]
    (nodes.folder / "go").touch()
    wait_until(lambda: len(nodes.lines("began")) == 3)
    while job.poll() is None:
        (nodes.folder / "go").touch()
        time.sleep(0.02)
    assert nodes.run("srun --gpus-per-node=3 true", code=1) == [
        "srun: error: the step requests 3 GPUs on n0, where the job has 2; nothing was started"
    ]


def test_a_signal_reaches_the_tasks_of_all_nodes(nodes: Nodes) -> None:
    """Once each: srun forwards what it gets itself, each node what its runtime sends."""
    nodes.settings["warning"] = "USR1"
    nodes.serve()
    (nodes.folder / "task").write_text(
        """trap 'echo usr1 $SLURM_PROCID >>signals' USR1
        trap 'echo term $SLURM_PROCID >>signals; ending=1' TERM
        echo up >>signals
        until [ -n "$ending" ]; do sleep 0.05; done
        for i in 1 2 3 4 5 6 7 8; do sleep 0.05; done"""
    )
    job = nodes.script("srun sh task 2>/dev/null & echo $! >pid; wait; echo never")
    wait_until(lambda: nodes.lines("signals").count("up") == 3)
    os.kill(int(nodes.lines("pid")[0]), signal.SIGUSR1)
    wait_until(lambda: len(nodes.lines("signals")) == 6)
    for process in nodes.servers:  # as the controller does
        process.send_signal(signal.SIGUSR1)
    wait_until(lambda: len(nodes.lines("signals")) == 9)
    for process in nodes.servers:
        process.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=300)[0] == ""
    assert [p.wait(timeout=300) for p in nodes.servers] == [0, 0, 143]
    assert sorted(nodes.lines("signals")[3:]) == sorted(f"{s} {t}" for s in ("usr1", "usr1", "term") for t in range(3))


def test_a_warning_ends_no_node_even_by_a_signal_that_otherwise_does(nodes: Nodes) -> None:
    nodes.settings |= {"warning": "INT", "connect_s": 600.0}
    nodes.serve()
    script = """trap 'echo got >>signals' INT
        echo up >>signals
        until [ -e go ]; do sleep 0.05; done"""
    (nodes.folder / "task").write_text(script)
    job = nodes.script("srun -w n1 sh task; srun -w n1 echo second")
    wait_until(lambda: nodes.lines("signals") == ["up"])
    nodes.servers[0].send_signal(signal.SIGINT)
    wait_until(lambda: nodes.lines("signals") == ["up", "got"])
    (nodes.folder / "go").touch()
    assert job.communicate(timeout=600)[0] == "second\n"


def test_a_node_without_python_is_held_until_the_job_ends(nodes: Nodes) -> None:
    nodes.settings["warning"] = "INT"
    (nodes.folder / "bin").mkdir()
    (nodes.folder / "bin" / "sh").symlink_to("/bin/sh")
    sleep = f"#!/bin/sh\n: >{nodes.folder}/held\nexec {shutil.which('sleep')} 600\n"
    (nodes.folder / "bin" / "sleep").write_text(sleep)
    (nodes.folder / "bin" / "sleep").chmod(0o755)
    nodes.env[1] = {"PATH": str(nodes.folder / "bin")}
    holder = nodes.start(1, nodes.spool(1))
    wait_until((nodes.folder / "held").exists)
    status = Path(f"/proc/{holder.pid}/status").read_text()
    ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
    assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2))
    holder.send_signal(signal.SIGUSR1)
    holder.send_signal(signal.SIGTERM)
    assert holder.wait(timeout=600) == 0


async def _nothing() -> None:
    pass


def test_a_signal_before_the_tasks_are_there_reaches_them() -> None:
    step = {
        "id": 0, "argv": ["sleep", "600"], "cwd": "/", "ntasks": 2, "env": {}, "node": "n0", "nodeid": 0,
        "tasks": [0, 1], "gpus": None, "gpus_per_task": 0,
    }  # fmt: skip
    codes = []

    async def run() -> None:
        tasks = StepTasks(step, {})
        tasks.signal(signal.SIGTERM)
        await tasks.start(lambda kind, number, data: codes.append(int(data)), _nothing, False, False)
        await tasks.done()

    asyncio.run(asyncio.wait_for(run(), 300))
    assert codes == [-signal.SIGTERM] * 2


def test_a_step_ends_with_its_srun(nodes: Nodes) -> None:
    nodes.serve()
    task = 'trap "echo got >>signals" TERM; echo $$ >>pids; while :; do sleep 0.1; done'
    job = nodes.script(f"srun -w n1,n2 sh -c '{task}' & echo $! >srun; wait")
    wait_until(lambda: len(nodes.lines("pids")) == 2)
    os.kill(int(nodes.lines("srun")[0]), signal.SIGKILL)
    assert job.wait(timeout=300) == 0
    wait_until(lambda: nodes.lines("signals") == ["got"] * 2)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in nodes.lines("pids")))


def test_a_lost_node_fails_its_tasks(nodes: Nodes) -> None:
    nodes.serve()
    job = nodes.script("srun -w n1 sh -c 'echo up >>up; sleep 600'; echo $?")
    wait_until(lambda: nodes.lines("up") == ["up"])
    nodes.servers[0].kill()
    assert job.communicate(timeout=300)[0].splitlines()[-1] == "1"


@pytest.mark.parametrize("spool", [{"key": new_key().decode()}, {"attempt": "job-2"}])
def test_other_users_cannot_start_steps(nodes: Nodes, spool: dict[str, str]) -> None:
    nodes.settings["connect_s"] = 1.0
    nodes.serve(**spool)
    lines = nodes.run("srun touch started; echo $?")
    assert lines[-1] == "1"
    assert lines[0].startswith("srun: error: node n1 cannot run steps (127.0.0.1, port ")
    assert not (nodes.folder / "started").exists()


def test_a_connection_with_garbage_is_not_served(nodes: Nodes) -> None:
    nodes.serve()
    wait_until(lambda: nodes.run("srun true; echo $?")[-1] == "0")
    for port in nodes.settings["ports"][:2]:
        with socket.create_connection(("127.0.0.1", port), timeout=300) as stranger:
            stranger.sendall(b"\0" * 4096)
            stranger.settimeout(300)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert nodes.run("srun hostname | wc -l") == ["3"]


REFUSED = {
    "--container-image=x true": "see gpusched submit --image",
    "--multi-prog tasks": "--multi-prog not recognized",
    "--mpi=pmix true": "--mpi=pmix",
    "-n 0 true": "--ntasks=0",
    "-w n7 true": "n7 is not a node of this job",
    "-N 4 true": "--nodes=4",
    "-n 2": "no command",
    "-x n[0-2] true": "leave no node for the step",
    "--export=NONE true": "--export=NONE",
    "-t x true": "--time=x",
    "-n 7 --ntasks-per-node=2 true": "--ntasks=7",
    "--gres=gpu:many true": "--gres",
    "-c no true": "--cpus-per-task=no",
    "-m cyclic true": "--distribution=cyclic",
    "-G 4 true": "--gpus=4",
}


def test_a_refused_step_starts_nothing(nodes: Nodes) -> None:
    lines = nodes.run("".join(f"srun {words}; echo $?\n" for words in REFUSED))
    assert lines[1::2] == ["2"] * len(REFUSED)
    for line, error in zip(lines[::2], REFUSED.values(), strict=True):
        assert line.startswith("srun: error: ")
        assert error in line
        assert line.endswith("nothing was started")


@given(
    count=st.integers(1, 6), per_node=st.integers(1, 4), tasks=st.none() | st.integers(1, 40),
    each=st.none() | st.integers(1, 5), wanted=st.none() | st.integers(1, 6),
)  # fmt: skip
def test_every_task_is_on_one_node(
    count: int, per_node: int, tasks: int | None, each: int | None, wanted: int | None
) -> None:
    given_options = {"ntasks": tasks, "ntasks-per-node": each, "nodes": wanted}
    asked = {name: str(value) for name, value in given_options.items() if value is not None}
    try:
        layout = options.layout(asked, [f"n{i}" for i in range(count)], per_node)
    except options.StepOptionError:
        too_many = wanted is not None and wanted > count
        assert too_many or (tasks is not None and each is not None and tasks > each * (wanted or count))
        return
    placed = [number for _, numbers in layout for number in numbers]
    sizes = [len(numbers) for _, numbers in layout]
    assert placed == list(range(len(placed)))
    assert len(placed) == (tasks if tasks is not None else len(layout) * (each or per_node))
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (each or max(sizes))
    assert len(layout) <= (wanted or count)


def test_scontrol_and_srun_read_lists_alike(nodes: Nodes) -> None:
    lists = ["a", "a,b", "a[1-3,7]", "n[08-11]x,b", "r[1-2]n[1-2],c", "a[9-10]", "a[0-0]"]
    lines = nodes.run("".join(f"scontrol show hostnames '{names}'\n" for names in lists))
    assert lines == [name for names in lists for name in options.hostnames(names)]
    assert options.hostnames("r[1-2]n[08-10]") == [f"r{i}n{j}" for i in (1, 2) for j in ("08", "09", "10")]


def test_scontrol_says_what_it_cannot(nodes: Nodes) -> None:
    assert nodes.run("scontrol update JobId=7 TimeLimit=1", code=1)[0].startswith("scontrol: inside a job only")


@pytest.mark.parametrize("own_key", [False, True])
def test_a_request_without_the_key_of_the_job_starts_nothing(nodes: Nodes, own_key: bool, tmp_path: Path) -> None:
    """A whole request by TLS, from somebody with no key or one of his own, starts nothing."""
    nodes.serve()
    wait_until(lambda: nodes.run("srun true; echo $?")[-1] == "0")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if own_key:
        (tmp_path / "mine.pem").write_bytes(new_key())
        context.load_cert_chain(tmp_path / "mine.pem")
    step = {
        "id": 7, "argv": ["touch", str(tmp_path / "started")], "cwd": "/", "ntasks": 1, "env": {}, "node": "n1",
        "nodeid": 1, "tasks": [0], "gpus": None, "gpus_per_task": 0,
    }  # fmt: skip
    answers = []
    for rank, port in [(r, p) for r in (1, 2) for p in nodes.settings["ports"]]:
        request = json.dumps({"attempt": "job-1", "rank": rank, "step": step, "changes": {}}).encode()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=300) as plain:
            with context.wrap_socket(plain) as stranger:
                stranger.sendall(wire.frame(wire.REQUEST, 0, request) + wire.frame(wire.START, 0))
                answers.append(stranger.recv(4096))
    assert not any(answers)
    assert not (tmp_path / "started").exists()
