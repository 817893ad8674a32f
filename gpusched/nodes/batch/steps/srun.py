"""srun inside a job: starts the tasks of a step on the job's nodes, and is there until they have ended."""

import asyncio
import contextlib
import json
import os
import signal
import ssl
import stat
import sys

sys.path.insert(0, os.path.abspath(__file__).rsplit("/gpusched/", 1)[0])

from gpusched.nodes.batch.steps import options, wire
from gpusched.nodes.batch.steps.output import Output
from gpusched.nodes.batch.steps.tasks import StepTasks, new_step

MYPY = False
if MYPY:
    from collections.abc import Callable
    from typing import Any

_KILL_AFTER_S = 30.0
_FORWARDED = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "CONT", "TSTP", "WINCH")
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


class LocalTasks:
    """The part of a step on srun's own node."""

    def __init__(self, step: "dict[str, Any]", changes: "dict[str, str | None]", emit: "Callable[..., None]") -> None:
        self.name, self._step, self._emit = step["node"], step, emit
        self._tasks = StepTasks(step, changes)

    async def prepare(self, on_wait: "Callable[[], None]") -> None:
        """Take what it needs; nothing is started."""
        why = await self._tasks.claim(on_wait)
        if why:
            raise options.StepOptionError(why)

    async def run(self, capture: bool, feed: bool) -> None:
        """Start its tasks, and wait for their end."""
        await self._tasks.start(self._emit, _no_wait, capture, feed)
        await self._tasks.done()

    async def feed(self, data: bytes) -> None:
        """Give its tasks stdin; b"": its end."""
        await self._tasks.feed(data)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        self._tasks.signal(number)


class RemoteTasks:
    """The part of a step on another node."""

    def __init__(
        self, settings: "dict[str, Any]", rank: int, step: "dict[str, Any]", changes: "dict[str, str | None]",
        emit: "Callable[..., None]",
    ) -> None:  # fmt: skip
        self.name, self._step, self._emit = step["node"], step, emit
        self._address, self._ports = settings["nodes"][rank]["address"], settings["ports"]
        self._patience_s = settings["connect_s"]
        self._running = False
        self._request = {"attempt": settings["attempt"], "rank": rank, "step": step, "changes": changes}

    async def prepare(self, on_wait: "Callable[[], None]") -> None:
        """Reach the node, which may be starting up itself, and have the step accepted."""
        loop = asyncio.get_event_loop()
        until = loop.time() + self._patience_s
        while True:
            for port in self._ports:
                why = await self._ask(port, on_wait)
                if why is None:
                    return
            if loop.time() >= until:
                raise options.StepOptionError(
                    f"node {self.name} cannot run steps ({self._address}, port {self._ports[0]}: {why}); no python3?"
                )
            await asyncio.sleep(0.3)

    async def _ask(self, port: int, on_wait: "Callable[[], None]") -> "str | None":
        try:
            made = asyncio.open_connection(self._address, port, ssl=wire.context(False), limit=1 << 20)
            self._reader, self._writer = await asyncio.wait_for(made, 10)
        except (TimeoutError, OSError, ssl.SSLError) as error:
            return str(error) or "no answer"
        self._writer.write(wire.frame(wire.REQUEST, 0, json.dumps(self._request).encode()))
        answer = await wire.read_frame(self._reader)
        while answer is not None and answer[0] == wire.WAITS:
            on_wait()
            answer = await wire.read_frame(self._reader)
        if answer is not None and answer[0] == wire.ACCEPTED:
            return None
        self._writer.close()
        if answer is not None and answer[0] == wire.REFUSED and answer[1] == 0:
            raise options.StepOptionError(answer[2].decode())
        return "another job's"

    async def run(self, capture: bool, feed: bool) -> None:
        """Start its tasks, and wait for their end."""
        self._writer.write(wire.frame(wire.START, int(feed)))
        self._running = True
        names = {wire.OUT: "out", wire.ERR: "err", wire.EXIT: "exit"}
        running = set(self._step["tasks"])
        while True:
            frame = await wire.read_frame(self._reader)
            if frame is None or frame[0] == wire.DONE:
                break
            if frame[0] in names:
                if frame[0] == wire.EXIT:
                    running.discard(frame[1])
                self._emit(names[frame[0]], frame[1], frame[2])
        self._running = False  # a closed transport of TLS may not be written to
        for number in sorted(running):
            self._emit("err", number, f"srun: error: node {self.name} was lost\n".encode())
            self._emit("exit", number, b"1")
        self._writer.close()

    async def feed(self, data: bytes) -> None:
        """Give its tasks stdin; b"": its end."""
        if self._running:
            with contextlib.suppress(OSError):
                self._writer.write(wire.frame(wire.STDIN, 0, data))
                await self._writer.drain()

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        if self._running:
            self._writer.write(wire.frame(wire.SIGNAL, number))


class SrunCall:
    """One call of srun."""

    def __init__(self, words: "list[str]") -> None:
        self._settings = settings = wire.settings()
        self._given, command = options.parse(words)
        names = [node["name"] for node in settings["nodes"]]
        self._layout = options.layout(self._given, names, settings["tasks_per_node"])
        self._limit_s = options.seconds(self._given, "time", 60)
        self._wait_s = options.seconds(self._given, "wait", 1)
        options.number(self._given, "cpus-per-task")
        changes = _changed_environment()
        self.highest, self._ending = 0, False
        self._nodes = {}  # type: dict[int, str]
        self.parts = []  # type: list[LocalTasks | RemoteTasks]
        common = self._common(command, names, options.exported(self._given))
        for position, (rank, tasks) in enumerate(self._layout):
            self._nodes.update({number: names[rank] for number in tasks})
            gpus, each = options.gpus(self._given, len(self._layout), len(tasks), settings["gpus_per_task"])
            step = dict(common, node=names[rank], nodeid=position, tasks=tasks, gpus=gpus, gpus_per_task=each)
            if rank == settings["rank"]:
                self.parts.append(LocalTasks(step, {}, self._emit))
            else:
                self.parts.append(RemoteTasks(settings, rank, step, changes, self._emit))
        self._output = Output(self._given, common["id"], self._layout, names)

    def _common(self, command: "list[str]", names: "list[str]", exported: "dict[str, str]") -> "dict[str, Any]":
        number, here = new_step(), [names[rank] for rank, _ in self._layout]
        count, per_node = sum(len(tasks) for _, tasks in self._layout), ",".join(_task_ranges(self._layout))
        env = {
            "SLURM_STEP_ID": number, "SLURM_STEPID": number, "SLURM_NTASKS": count, "SLURM_NPROCS": count,
            "SLURM_STEP_NUM_TASKS": count, "SLURM_STEP_NUM_NODES": len(here), "SLURM_STEP_NODELIST": ",".join(here),
            "SLURM_NODELIST": ",".join(here), "SLURM_NNODES": len(here), "SLURM_TASKS_PER_NODE": per_node,
            "SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_LAUNCH_NODE_IPADDR": self._settings["nodes"][0]["address"],
        }  # fmt: skip
        if "cpus-per-task" in self._given:
            env["SLURM_CPUS_PER_TASK"] = self._given["cpus-per-task"]
        env.update(exported)
        cwd = self._given.get("chdir", os.getcwd())
        return {
            "id": number, "argv": command, "cwd": cwd, "ntasks": count,
            "env": {name: str(value) for name, value in env.items()},
        }  # fmt: skip

    async def run(self) -> int:
        """Run until its end; return the exit code for srun."""
        loop = asyncio.get_event_loop()
        for name in _FORWARDED:
            number = getattr(signal, "SIG" + name)
            loop.add_signal_handler(number, self._handle_signal, number)
        has_printed = []  # type: list[bool]

        def on_wait() -> None:
            if not has_printed and "quiet" not in self._given:
                has_printed.append(True)
                print(
                    "srun: Job step creation temporarily disabled, retrying (Requested nodes are busy)", file=sys.stderr
                )

        for part in self.parts:  # one after the other, and all in the same order: two steps never wait for each other
            await part.prepare(on_wait)
        if self._limit_s is not None:
            loop.call_later(self._limit_s, self._end, "srun: error: the step exceeded its time limit")
        stdin = _stdin_for(self._given.get("input"), self._layout)
        runs = [asyncio.ensure_future(part.run(self._output.captures, stdin is not None)) for part in self.parts]
        feeding = asyncio.ensure_future(self._feed(stdin)) if stdin is not None else None
        await asyncio.gather(*runs)
        if feeding is not None:
            feeding.cancel()
        self._output.close()
        return self.highest

    async def _feed(self, stdin: int) -> None:
        loop, data = asyncio.get_event_loop(), b"."
        while data:
            data = await loop.run_in_executor(None, os.read, stdin, 65536)
            for part in self.parts:
                await part.feed(data)

    def _emit(self, kind: str, number: int, data: bytes) -> None:
        if kind != "exit":
            self._output.write(kind, number, data)
            return
        code = int(data)
        if self._wait_s is not None and not self._ending:
            asyncio.get_event_loop().call_later(self._wait_s, self._end, "")
        if code == 0:
            return
        self.highest = max(self.highest, code if code > 0 else 128 - code)
        how = f"Exited with exit code {code}" if code > 0 else _signal_name(-code)
        print(f"srun: error: {self._nodes[number]}: task {number}: {how}", file=sys.stderr, flush=True)
        if "kill-on-bad-exit" in self._given and "no-kill-on-bad-exit" not in self._given:
            self._end("srun: Terminating the step, as a task has failed")

    def _handle_signal(self, number: int) -> None:
        for part in self.parts:
            part.signal(number)
        if number in _ENDING and not self._ending:
            self._ending = True
            asyncio.get_event_loop().call_later(_KILL_AFTER_S, self._kill)

    def _end(self, why: str) -> None:
        if not self._ending:
            if why:
                print(why, file=sys.stderr, flush=True)
            self._handle_signal(signal.SIGTERM)

    def _kill(self) -> None:
        for part in self.parts:
            part.signal(signal.SIGKILL)


async def _no_wait() -> None:
    """Output on srun's own node is written when it is emitted."""


def _changed_environment() -> "dict[str, str | None]":
    """Return the variables that the script changed: only these go to other nodes, which have their own environment."""
    try:
        with open("/proc/" + os.environ.get("GPUSCHED_RUN_PID", "") + "/environ", "rb") as file:
            first = dict(os.fsdecode(v).split("=", 1) for v in file.read().split(b"\0") if b"=" in v)
    except OSError:
        first = {}
    first["PATH"] = "{}:{}".format(os.path.join(wire.HERE, "bin"), first.get("PATH", ""))
    now = {name: value for name, value in os.environ.items() if not name.startswith("GPUSCHED_")}
    changed = {n: v for n, v in now.items() if first.get(n) != v}  # type: dict[str, str | None]
    changed.update({name: None for name in first if name not in os.environ})
    for name in ("_", "SHLVL", "OLDPWD", "PWD"):
        changed.pop(name, None)
    return changed


def _stdin_for(asked: "str | None", layout: "list[tuple[int, list[int]]]") -> "int | None":
    """Return the descriptor that all tasks get the content of; None: there is none, or the only task has it itself."""
    if asked == "none":
        return os.open(os.devnull, os.O_RDONLY)
    if asked is not None and asked != "all" and not asked.isdigit():
        return os.open(asked, os.O_RDONLY)
    if layout == [(0, [0])]:
        return None
    try:
        kind = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(kind) or stat.S_ISREG(kind) or stat.S_ISSOCK(kind) else None


def _task_ranges(layout: "list[tuple[int, list[int]]]") -> "list[str]":
    """Return ``2(x3)`` for three nodes with two tasks, one after the other."""
    counts = [len(tasks) for _, tasks in layout]
    runs = []  # type: list[list[int]]
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    return [str(count) if times == 1 else f"{count}(x{times})" for count, times in runs]


def _signal_name(number: int) -> str:
    strsignal = getattr(signal, "strsignal", None)  # Python 3.8
    return (strsignal and strsignal(number)) or f"Signal {number}"


def main() -> None:
    """Exit with the highest exit code of the tasks; 2 where nothing was asked that can be done."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        step = SrunCall(sys.argv[1:])
    except options.StepOptionError as error:
        print(f"srun: error: {error}; nothing was started", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"srun: error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    try:
        code = loop.run_until_complete(step.run())
    except options.StepOptionError as error:
        print(f"srun: error: {error}; nothing was started", file=sys.stderr)
        code = 1
    except OSError as error:
        print(f"srun: error: {error.filename}: {error.strerror}", file=sys.stderr)
        code = 1
    sys.stderr.flush()
    os._exit(code)  # a thread may still wait for stdin


if __name__ == "__main__":
    main()
