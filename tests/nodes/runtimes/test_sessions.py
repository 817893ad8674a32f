"""Jobs that people work in, on every runtime: joining, leaving, who is there, how they ended."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from gpusched.model.relay import Terminal
from gpusched.nodes.runtimes import AttemptRef, sessions
from gpusched.nodes.transport import TransportError
from tests.nodes.runtimes.world import World
from tests.testbed import wait_until


class Joined:
    """Somebody attached; what is said after the mark is ``heard`` (1: stdout, 2: stderr)."""

    def __init__(self, world: World, ref: AttemptRef, terminal: Terminal | None = None) -> None:
        self.session = world.transport.session(sessions.attach_argv(ref), terminal)
        self.heard = {1: b"", 2: b""}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        wait_until(lambda: sessions.MARK in self.heard[1], 60, "the mark")

    def _listen(self) -> None:
        def take(stream: int, chunk: bytes) -> None:
            self.heard[stream] += chunk

        with contextlib.suppress(TransportError):  # who leaves hears no exit code
            self.session.pump(take)

    @property
    def said(self) -> bytes:
        return self.heard[1].partition(sessions.MARK)[2]

    def type(self, text: bytes) -> None:
        while text:
            text = text[self.session.write(text) :]

    def says(self, text: bytes) -> None:
        wait_until(lambda: text in self.said, 60, f"{text!r} in what it says")

    def end(self) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()

    def leave(self) -> None:
        self.session.close()
        self.end()


def made(world: World, *command: str, **changes: Any) -> AttemptRef:
    ref = world.launch(*command, hold=True, **changes)
    attempt = world.await_phase(ref, "ready")
    assert (attempt["attached_s"], world.listed_sh()[0][ref.name]["attached_s"]) == (None, None)
    return ref


def test_the_first_client_starts_the_session_and_gets_all_output(world: World) -> None:
    ref = made(world, "sh", "-c", "echo first; echo other >&2; cat; exit 3", session="pipes")
    assert world.do(sessions.ended(ref)) == ""
    world.do(sessions.note_attached(ref))
    ages = [listed[ref.name]["attached_s"] for listed in (world.listed()[0], world.listed_sh()[0])]
    assert all(0 <= age <= 30 for age in ages), ages
    joined = Joined(world, ref)
    joined.says(b"first\n")
    joined.type(b"\x00\x1e\x04 given")
    joined.session.end_input()
    joined.end()
    assert (joined.said, b"other\n" in joined.heard[2]) == (b"first\n\x00\x1e\x04 given", True)
    assert world.do(sessions.ended(ref)) == "3\n"
    assert world.await_phase(ref, "exited")["exit_code"] == 3
    assert "first\n" in world.output(ref)
    assert world.do(sessions.address(ref)) == "127.0.0.1\n"


def test_a_detached_terminal_can_be_attached_again(world: World) -> None:
    ref = made(world, "sh", session="terminal")
    size = b"until stty size | grep %s; do sleep 0.1; done; echo seen-$((1 + 1))\n"
    first = Joined(world, ref, Terminal(rows=31, columns=97))
    first.type(b"x=kept; " + size % b"97")
    first.says(b"seen-2")
    first.session.resize(40, 111)
    first.type(size % b"111")
    first.says(b"40 111")
    first.leave()
    assert world.await_phase(ref, "running")["exit_code"] is None
    again, both = Joined(world, ref, Terminal(rows=30, columns=90)), Joined(world, ref, Terminal(rows=30, columns=90))
    for one in (again, both):  # the mark comes a moment before an engine has connected it
        one.type(b"echo here-$((1 + 1))\n")
        one.says(b"here-2")
    again.type(b"echo it-is-$x; exit 5\n")
    for one in (again, both):
        one.says(b"it-is-kept")
        one.end()
    assert world.do(sessions.ended(ref)) == "5\n"


def test_a_note_for_what_is_not_there_makes_nothing(world: World) -> None:
    ref = world.request("true").ref
    world.do(sessions.note_attached(ref))
    assert world.do(sessions.ended(ref)) == ""
    assert ref.name not in world.listed()[0]


def test_the_terminal_is_its_users(process: World) -> None:
    ref = made(process, "sh", "-c", "id -u; stat -c %u $(tty); : >$(tty) && echo opened", session="terminal",
               run_as=(65534, 65534))  # fmt: skip
    joined = Joined(process, ref, Terminal())
    joined.end()
    assert joined.said.split() == [b"65534", b"65534", b"opened"]


def test_processes_left_behind_do_not_keep_a_session(process: World) -> None:
    ref = made(
        process, "sh", "-c", "setsid sh -c 'while :; do echo noise; done' & sleep 0.2; exit 4", session="terminal"
    )
    joined = Joined(process, ref, Terminal())
    joined.end()
    assert process.do(sessions.ended(ref)) == "4\n"
    assert process.await_phase(ref, "exited")["exit_code"] == 4
