"""The tasks of one step on one node."""

import asyncio
import contextlib
import errno
import fcntl
import os
import signal

from gpusched.nodes.batch.steps.wire import HERE

MYPY = False
if MYPY:
    from collections.abc import Awaitable, Callable, Iterable
    from typing import Any

    Emit = Callable[[str, int, bytes], None]
    Drain = Callable[[], Awaitable[None]]

_NOT_STARTED = {errno.ENOENT: 2, errno.EACCES: 13}
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")


class StepTasks:
    """They are started with `start`; `done` waits for their end."""

    def __init__(self, step: "dict[str, Any]", changes: "dict[str, str | None]") -> None:
        """``step``: see `layout.request`; ``changes``: of the job's environment here, None where one is not to be."""
        self.step = step
        self.environment = dict(os.environ)
        for name, value in changes.items():
            if value is None:
                self.environment.pop(name, None)
            else:
                self.environment[name] = value
        self._gpus = None  # type: list[str] | None
        self._claims = []  # type: list[int]
        self._started = asyncio.Event()
        self._early = []  # type: list[int]
        self._processes = {}  # type: dict[int, asyncio.subprocess.Process]
        self._pumps = []  # type: list[asyncio.Future[None]]

    async def claim(self, waits: "Callable[[], None]") -> str:
        """Take as many GPUs as the step asks for from those that no other step has, once they are there.

        Returns:
            "", or why that can never be. Calls ``waits`` if it has to wait.
        """
        count = self.step["gpus"]
        if count is None:  # it did not say: it has all of them, as other steps may have
            return ""
        has = [gpu for gpu in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        if count > len(has):
            return "the step requests {} GPUs on {}, where the job has {}".format(count, self.step["node"], len(has))
        while True:
            self._gpus = []
            for gpu in has:
                claim = _claim("gpu-" + gpu) if len(self._gpus) < count else None
                if claim is not None:
                    self._claims.append(claim)
                    self._gpus.append(gpu)
            if len(self._gpus) == count:
                return ""
            self.release()
            waits()
            await asyncio.sleep(0.3)

    def release(self) -> None:
        """Give the GPUs back."""
        while self._claims:
            os.close(self._claims.pop())

    async def start(self, emit: "Emit", drain: "Drain", capture: bool, feed: bool) -> None:
        """Start them all.

        Args:
            emit: ``emit(kind, task, bytes)`` takes output (``out``, ``err``; b"": its end) and, as text, exit codes.
            drain: Waits until what was emitted is on its way, so that nothing piles up here.
            capture: Output goes there; else they have ours.
            feed: Their stdin comes by `feed`; else the only task of a step has ours, and several have none.
        """
        pipe, devnull = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        tasks = self.step["tasks"]
        stdin = pipe if feed else None if self.step["ntasks"] == 1 else devnull
        for local, number in enumerate(tasks):
            try:
                process = await asyncio.create_subprocess_exec(
                    *self.step["argv"],
                    env=self._environment(local, number),
                    cwd=self.step["cwd"],
                    stdin=stdin,
                    stdout=pipe if capture else None,
                    stderr=pipe if capture else None,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or str(error)
                what = getattr(error, "filename", None) or self.step["argv"][0]
                text = "slurmstepd: error: {}: {}: {}\n".format(self.step["node"], what, why)
                emit("err", number, text.encode(errors="replace"))
                emit("exit", number, b"%d" % _NOT_STARTED.get(getattr(error, "errno", 0) or 0, 1))
                continue
            self._processes[number] = process
            self._pumps.append(asyncio.ensure_future(self._watch(process, number, emit, drain)))
        self._started.set()
        for early in self._early:
            self.signal(early)

    async def _watch(self, process: "asyncio.subprocess.Process", number: int, emit: "Emit", drain: "Drain") -> None:
        streams = [("out", process.stdout), ("err", process.stderr)]
        pumps = [asyncio.ensure_future(_pump(kind, number, s, emit, drain)) for kind, s in streams if s is not None]
        code = await process.wait()
        # What it has written by now comes before the word that it has ended; a child of it may hold the pipe for ever.
        if pumps:
            await asyncio.wait(pumps, timeout=0.5)
        emit("exit", number, b"%d" % code)
        self._pumps += pumps

    async def done(self) -> None:
        """Wait until all tasks have ended. What they have left behind is then ended, too, as Slurm does."""
        watches = list(self._pumps)
        await asyncio.gather(*watches)
        self.signal(signal.SIGKILL)
        await asyncio.gather(*self._pumps[len(watches) :])

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the step on this node, once they are there."""
        if not self._started.is_set():
            self._early.append(number)
            return
        for pid in self.processes():
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def processes(self) -> "Iterable[int]":
        """Return the step's processes on this node, by their environment: also those that left their task's session.

        A process that is just becoming another program has none to be read for a moment; its session it has.
        """
        spool, mark = b"GPUSCHED_SPOOL=" + os.fsencode(HERE), b"SLURM_STEP_ID=%d" % self.step["id"]
        sessions = {process.pid for process in self._processes.values() if process.returncode is None}
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/environ", "rb") as file:
                    variables = file.read().split(b"\0")
                if os.getsid(pid) in sessions or (spool in variables and mark in variables and pid != os.getpid()):
                    yield pid

    async def feed(self, data: bytes) -> None:
        """Give all tasks some stdin; b"": its end."""
        await self._started.wait()
        for process in self._processes.values():
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    if data:
                        process.stdin.write(data)
                        await process.stdin.drain()
                    else:
                        process.stdin.close()

    def _environment(self, local: int, number: int) -> "dict[str, str]":
        step, env = self.step, dict(self.environment)
        env.update(step["env"])
        own = {
            "SLURM_PROCID": number,
            "SLURM_LOCALID": local,
            "SLURM_NODEID": step["nodeid"],
            "SLURMD_NODENAME": step["node"],
            "SLURM_GTIDS": ",".join(map(str, step["tasks"])),
        }
        env.update({name: str(value) for name, value in own.items()})
        # What the script has exported itself stays.
        for name, value in zip(LAUNCHERS, (number, local, step["ntasks"], step["nodeid"])):  # noqa: B905
            env.setdefault(name, str(value))
        if self._gpus is not None:
            each = step["gpus_per_task"]
            mine = self._gpus[local * each :][:each] if each else self._gpus
            env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
            env["SLURM_STEP_GPUS"] = ",".join(self._gpus)
        return env


async def _pump(kind: str, number: int, stream: asyncio.StreamReader, emit: "Emit", drain: "Drain") -> None:
    data = b"."
    while data:
        data = await stream.read(65536)
        emit(kind, number, data)
        with contextlib.suppress(OSError):
            await drain()


def own_folder() -> str:
    """Return the folder in which the steps of this attempt on this node leave files for each other."""
    folder = os.path.join(os.environ["GPUSCHED_JOB_DIR"], ".steps", os.environ["GPUSCHED_CONTAINER"])
    os.makedirs(folder, exist_ok=True)
    return folder


def _claim(name: str) -> "int | None":
    """Return a descriptor that keeps others from claiming the same; None if another process has it."""
    descriptor = os.open(os.path.join(own_folder(), name), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def new_step() -> int:
    """Return the next number that no step of this attempt has."""
    folder, number = own_folder(), 0
    while True:
        try:
            os.mkdir(os.path.join(folder, f"step-{number}"))
        except FileExistsError:
            number += 1
        else:
            return number
