"""An interactive job (`gpusched run`) without a container engine. Runs on the node: stdlib, Python 3.6+.

``hold`` runs the job on a terminal (or pipes) of its own, which outlives attached clients; ``attach`` is a client's
end. They communicate over a socket in the attempt's folder, which only the account may enter.
"""

import errno
import fcntl
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
import tty

MYPY = False  # as mypy knows it
if MYPY:
    from collections.abc import Iterator, Sequence

MARK = b"\036gpusched-attached\036"
"""Printed once the job's terminal or pipes are connected; earlier output is the node's, not the job's."""
SOCKET = "session.sock"
INPUT, INPUT_ENDED, RESIZED, OUTPUT, ERRORS, EXITED = b"i", b"e", b"w", b"o", b"r", b"x"
"""Kinds of frames: three from the client, three to it."""
_CHUNK = 1 << 16
_MAX_UNSENT = 1 << 20  # bytes to one client, above which the job's output is not read
_STALLED_S = 30.0  # a client that reads nothing for this long is detached
_HEADER = struct.Struct("!cI")  # kind and length of a frame


class SessionPeer:
    """The other end of a connection: frames in, bytes out."""

    def __init__(self, sock: "socket.socket") -> None:
        self.sock = sock
        self.unsent = b""
        self.stuck_since = None  # type: float | None
        self._held = b""
        sock.setblocking(False)

    def receive(self) -> "list[tuple[bytes, bytes]] | None":
        """Return the complete frames; None if the peer is gone."""
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._held += data
        return list(self._frames())

    def _frames(self) -> "Iterator[tuple[bytes, bytes]]":
        while len(self._held) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._held)
            end = _HEADER.size + length
            if len(self._held) < end:
                return
            payload, self._held = self._held[_HEADER.size : end], self._held[end:]
            yield kind, payload

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        """Queue a frame, and send what can be sent now."""
        self.unsent += _HEADER.pack(kind, len(payload)) + payload
        self.flush()

    def flush(self) -> None:
        """Send what is queued, as far as possible now. Ignores a closed connection, which `receive` reports."""
        try:
            sent = self.sock.send(self.unsent) if self.unsent else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(self.unsent)
        self.unsent = self.unsent[sent:]
        if sent or not self.unsent:
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = time.monotonic()


class AttachedJob:
    """The job and its attached clients."""

    def __init__(self, on_terminal: bool, owner: "int | None", argv: "Sequence[str]") -> None:
        self._on_terminal = on_terminal
        # A pipe that SIGCHLD writes to, so that the job's end wakes select() in `serve`.
        self._wake, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes)
        if on_terminal:
            self.stdin, job_side = os.openpty()
            if owner is not None:
                os.fchown(job_side, owner, -1)
            self._outputs = {self.stdin: OUTPUT}
            self._pid = self._start(argv, job_side, job_side, job_side)
        else:
            job_side, self.stdin = os.pipe()
            (out, job_stdout), (errors, job_stderr) = os.pipe(), os.pipe()
            self._outputs = {out: OUTPUT, errors: ERRORS}
            self._pid = self._start(argv, job_side, job_stdout, job_stderr)
        os.set_blocking(self.stdin, False)
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
        self._unwritten, self._input_ended = b"", False

    def _start(self, argv: "Sequence[str]", stdin: int, stdout: int, stderr: int) -> int:
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                if self._on_terminal:
                    fcntl.ioctl(stdin, termios.TIOCSCTTY, 0)
                for number, descriptor in enumerate((stdin, stdout, stderr)):
                    os.dup2(descriptor, number)
                for name in ("HUP", "INT", "QUIT", "PIPE", "CHLD"):
                    signal.signal(getattr(signal, "SIG" + name), signal.SIG_DFL)
                os.execvp(argv[0], list(argv))
            finally:
                os._exit(127)
        for descriptor in {stdin, stdout, stderr}:
            os.close(descriptor)
        return pid

    def serve(self, listener: "socket.socket", first: "socket.socket") -> int:
        """Serve until the job ends; return its exit code."""
        peers = [SessionPeer(first)]
        while True:
            ended, now = self._code(), time.monotonic()
            if ended is not None:
                while self._forward_output(peers, list(self._outputs)) and time.monotonic() < now + 1:
                    pass  # its last output, for one second only: processes left behind may write forever
                self._send_exit_code(peers, ended)
                return ended
            peers = [p for p in peers if p.stuck_since is None or now - p.stuck_since < _STALLED_S]
            # Backpressure: read the job's output only as fast as the slowest client does, and clients' input only as
            # fast as the job does.
            full = any(len(p.unsent) > _MAX_UNSENT for p in peers)
            reading = [listener, self._wake]  # type: list[int | socket.socket]
            reading += [p.sock for p in peers if len(self._unwritten) < _CHUNK]
            reading += [] if full else list(self._outputs)
            writing = [p.sock for p in peers if p.unsent]  # type: list[int | socket.socket]
            writing += [self.stdin] if self._unwritten else []
            ready = select.select(reading, writing, [], 5.0 if writing else None)[0]
            if self._wake in ready:
                os.read(self._wake, _CHUNK)
            if listener in ready:
                peers.append(SessionPeer(listener.accept()[0]))
            peers = [p for p in peers if p.sock not in ready or self._handle_messages(p)]
            self._write()
            self._forward_output(peers, [d for d in self._outputs if d in ready])
            for peer in peers:
                peer.flush()

    def _code(self) -> "int | None":
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid:
            return None
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _forward_output(self, peers: "list[SessionPeer]", descriptors: "list[int]") -> bool:
        """Send the job's output to all peers and to the log, which is our stdout; return whether there was any."""
        has_output = False
        for descriptor in descriptors:
            try:
                data = os.read(descriptor, _CHUNK)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno != errno.EIO:  # EIO: no process has the terminal open
                    raise
                data = b""
            if data:
                has_output = True
                try:
                    _write_all(1, data)
                except OSError:  # a full disk must not end the session
                    pass
                for peer in peers:
                    peer.send(self._outputs[descriptor], data)
            else:
                del self._outputs[descriptor]
        return has_output

    def _handle_messages(self, peer: SessionPeer) -> bool:
        """Handle what a peer has sent; return whether it is still attached."""
        frames = peer.receive()
        for kind, payload in frames or ():
            if kind == INPUT and not self._input_ended:
                self._unwritten += payload
            elif kind == INPUT_ENDED:
                self._input_ended = not self._on_terminal
            elif kind == RESIZED and self._on_terminal and len(payload) == 4:
                rows, columns = struct.unpack("!HH", payload)
                fcntl.ioctl(self.stdin, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        return frames is not None

    def _write(self) -> None:
        if self.stdin < 0:
            return
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self.stdin, self._unwritten[: select.PIPE_BUF]) :]
        except BlockingIOError:
            return
        except OSError:  # the job closed its stdin
            self._unwritten = b""
        if self._input_ended:
            os.close(self.stdin)
            self.stdin = -1

    @staticmethod
    def _send_exit_code(peers: "list[SessionPeer]", code: int) -> None:
        until = time.monotonic() + 5
        for peer in peers:
            peer.send(EXITED, bytes([code]))
        while any(p.unsent for p in peers) and time.monotonic() < until:
            select.select([], [p.sock for p in peers if p.unsent], [], 0.5)
            for peer in peers:
                peer.flush()


def hold(on_terminal: bool, owner: "int | None", argv: "Sequence[str]") -> int:
    """Wait for a client, start the job, and serve until it ends; return its exit code."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(SOCKET)  # relative to the attempt's folder, since a full path may be too long for a socket
    listener.listen(8)
    first, _ = listener.accept()
    open("go", "w").close()
    code = AttachedJob(on_terminal, owner, argv).serve(listener, first)
    os.unlink(SOCKET)
    return code


def attach() -> int:
    """Connect our stdin, stdout and stderr to the job; return its exit code, or 255 if it continues without us."""
    sock = _connected()
    if sock is None:
        return 255
    peer, sizes = SessionPeer(sock), os.pipe()
    on_terminal = os.isatty(0)
    if on_terminal:
        tty.setraw(0, termios.TCSANOW)
        os.set_blocking(sizes[1], False)
        signal.signal(signal.SIGWINCH, lambda *_: None)
        signal.set_wakeup_fd(sizes[1])
        peer.send(RESIZED, _size())
    os.write(1, MARK)
    listening = True
    while True:
        reading = [sock, sizes[0]]  # type: list[int | socket.socket]
        reading += [0] if listening and len(peer.unsent) < _CHUNK else []
        ready = select.select(reading, [sock] if peer.unsent else [], [])[0]
        peer.flush()
        if sizes[0] in ready:
            os.read(sizes[0], _CHUNK)
            peer.send(RESIZED, _size())
        if 0 in ready:
            data = os.read(0, _CHUNK)
            if data:
                peer.send(INPUT, data)
            elif on_terminal:
                return 255
            else:
                listening = False
                peer.send(INPUT_ENDED)
        if sock in ready:
            frames = peer.receive()
            for kind, payload in frames or ():
                if kind == EXITED:
                    return payload[0]
                _write_all(2 if kind == ERRORS else 1, payload)
            if frames is None:
                return 255


def _connected() -> "socket.socket | None":
    """Return a connection to the job, once it listens; None if it has ended or will not start."""
    while not (os.path.exists("exit") or os.path.exists("failed")):
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(SOCKET)
            return sock
        except OSError:
            sock.close()
        if os.getppid() == 1 or not os.path.exists("launcher.pid"):
            return None
        time.sleep(0.1)
    return None


def _size() -> bytes:
    rows, columns = struct.unpack("HHHH", fcntl.ioctl(0, termios.TIOCGWINSZ, bytes(8)))[:2]
    return struct.pack("!HH", rows or 24, columns or 80)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main(argv: "list[str]") -> int:
    """Run ``hold FOLDER terminal|pipes UID PROGRAM...`` (UID "": ours), or ``attach FOLDER``."""
    os.chdir(argv[1])
    if argv[0] == "attach":
        return attach()
    return hold(argv[2] == "terminal", int(argv[3]) if argv[3] else None, argv[4:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
