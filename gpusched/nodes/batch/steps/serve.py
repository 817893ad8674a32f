"""On every node of a job but the first: takes steps from its srun until the job ends."""

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import sys

sys.path.insert(0, os.path.abspath(__file__).rsplit("/gpusched/", 1)[0])

from gpusched.nodes.batch.steps import wire
from gpusched.nodes.batch.steps.tasks import StepTasks, own_folder

_GRACE_S = 5.0
_ENDING = ("TERM", "INT", "HUP", "QUIT")
_FORWARDED = ("USR1", "USR2", "ALRM", "TSTP", "CONT", "WINCH")
_KINDS = {"out": wire.OUT, "err": wire.ERR, "exit": wire.EXIT}


class StepServer:
    """The steps of this node."""

    def __init__(self) -> None:
        self.settings = wire.settings()
        self._steps = {}  # type: dict[int, StepTasks]

    async def serve(self) -> None:
        """Serve until a signal that ends it."""
        loop, ended = asyncio.get_event_loop(), asyncio.Event()
        for name in (*_ENDING, *_FORWARDED):
            number = getattr(signal, "SIG" + name)
            if name in _ENDING and name != self.settings["warning"]:
                loop.add_signal_handler(number, self._end, number, ended)
            else:
                loop.add_signal_handler(number, self._warn, name, number)
        await asyncio.wait([asyncio.ensure_future(self._listen()), asyncio.ensure_future(ended.wait())],
                           return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
        while any(
            True for tasks in self._steps.values() for _ in tasks.processes()
        ):  # they may save their work; then comes KILL
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)  # for the last output

    def _end(self, number: int, ended: asyncio.Event) -> None:
        self._signal_steps(number)
        ended.set()

    def _warn(self, name: str, number: int) -> None:
        if name != self.settings["warning"] or self.settings["warned"] == "steps":
            self._signal_steps(number)

    def _signal_steps(self, number: int) -> None:
        for tasks in self._steps.values():
            tasks.signal(number)

    async def _listen(self) -> None:
        last_error = None
        while True:
            for port in self.settings["ports"]:
                try:
                    tls = wire.context(True)
                    self._server = await asyncio.start_server(self._accept, self._address(), port, ssl=tls)
                except (OSError, ssl.SSLError) as error:
                    if str(error) != last_error:
                        last_error = str(error)
                        print(f"gpusched: cannot listen for steps: {error}", file=sys.stderr, flush=True)
                else:
                    await asyncio.Event().wait()  # it serves
            await asyncio.sleep(1)

    def _address(self) -> "str | None":
        """Return the address by which the others know this node, if it is one of this node's; else all addresses."""
        address = self.settings["nodes"][self.settings["rank"]]["address"]
        try:
            found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
            with socket.socket(found[0], found[1]) as probe:
                probe.bind((found[4][0], 0))
        except OSError:
            return None
        # A node may know its own name as a loopback address, where no other node reaches it.
        own = str(found[4][0])
        return None if (own.startswith("127.") or own == "::1") and own != address else own

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._step(reader, writer)
        except (OSError, EOFError, ssl.SSLError):
            pass
        finally:
            writer.close()

    async def _step(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = await wire.read_frame(reader)
        if first is None or first[0] != wire.REQUEST:
            return
        request = json.loads(first[2].decode())
        if (request["attempt"], request["rank"]) != (self.settings["attempt"], self.settings["rank"]):
            writer.write(wire.frame(wire.REFUSED, 1, b"another job"))
            return
        tasks = StepTasks(request["step"], request["changes"])
        next_frame = asyncio.ensure_future(wire.read_frame(reader))
        claims = asyncio.ensure_future(tasks.claim(lambda: writer.write(wire.frame(wire.WAITS))))
        try:
            await asyncio.wait([next_frame, claims], return_when=asyncio.FIRST_COMPLETED)
            if not claims.done():  # srun has gone
                return
            if claims.result():
                writer.write(wire.frame(wire.REFUSED, 0, claims.result().encode()))
                return
            writer.write(wire.frame(wire.ACCEPTED))
            frame = await next_frame
            if frame is None or frame[0] != wire.START:
                return
            await self._run(tasks, reader, writer, feed=bool(frame[1]))
        finally:
            claims.cancel()
            next_frame.cancel()
            tasks.release()

    async def _run(
        self, tasks: StepTasks, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, feed: bool
    ) -> None:
        step = tasks.step["id"]
        self._steps[step] = tasks
        listening, one = asyncio.ensure_future(self._handle_frames(tasks, reader)), asyncio.Lock()

        def emit(kind: str, number: int, data: bytes) -> None:
            writer.write(wire.frame(_KINDS[kind], number, data))

        async def drain() -> None:
            async with one:  # before Python 3.10 only one task may wait for a writer
                await writer.drain()

        try:
            await tasks.start(emit, drain, True, feed)
            await tasks.done()
            writer.write(wire.frame(wire.DONE))
            await writer.drain()
        finally:
            listening.cancel()
            del self._steps[step]

    async def _handle_frames(self, tasks: StepTasks, reader: asyncio.StreamReader) -> None:
        frame = await wire.read_frame(reader)
        while frame is not None:
            kind, number, data = frame
            if kind == wire.SIGNAL:
                tasks.signal(number)
            elif kind == wire.STDIN:
                await tasks.feed(data)
            frame = await wire.read_frame(reader)
        tasks.signal(signal.SIGTERM)  # srun is gone, and with it the step
        await asyncio.sleep(_GRACE_S)
        tasks.signal(signal.SIGKILL)


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(StepServer().serve())
    shutil.rmtree(own_folder(), ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)
