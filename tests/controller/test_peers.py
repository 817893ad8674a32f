"""Output that is forwarded to a client of the relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gpusched.controller import peers
from gpusched.controller.peers import forward_streams
from gpusched.model.relay import BEGAN, ERRORS, OUTPUT, Frames, exit_frame, frame
from gpusched.nodes.transport import TransportError

MARK = b"--mark--"


class Client:
    def __init__(self) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.listening: list[tuple[object, ...]] = []

    def send(self, data: bytes) -> None:
        self.frames += Frames().feed(data)

    def start_listening(self, *args: object) -> None:
        self.listening.append(args)

    def text(self, kind: int) -> bytes:
        return b"".join(payload for of, payload in self.frames if of == kind)


class Command:
    """A session whose command writes these chunks and ends with 3."""

    def __init__(self, *chunks: tuple[int, bytes], error: Exception | None = None) -> None:
        self._chunks, self._error = chunks, error
        self.closed = False

    def pump(self, take: Callable[[int, bytes], None]) -> int:
        for chunk in self._chunks:
            take(*chunk)
        if self._error is not None:
            raise self._error
        return 3

    def close(self) -> None:
        self.closed = True


def forwarded(chunks: Sequence[tuple[int, bytes]], **options: Any) -> Client:
    client, command = Client(), Command(*chunks)
    assert forward_streams(client, command, **options) == exit_frame(3)  # type: ignore[arg-type]
    assert command.closed
    return client


def cut(text: bytes, *, stream: int = 1, size: int) -> list[tuple[int, bytes]]:
    return [(stream, text[at : at + size]) for at in range(0, len(text), size)]


@pytest.mark.parametrize("size", range(1, 30))
def test_what_shell_start_up_files_print_before_the_mark_is_dropped(size: int) -> None:
    """However it is cut, and also on stderr."""
    welcome, rest = cut(b"-- welcome --" + MARK[:3], size=size), cut(MARK[3:] + b"out" + MARK, size=size)
    said = [(2, b"e"), *welcome, (2, b"e"), *rest, (2, b"f"), (1, b"put")]
    client = forwarded(said, mark=MARK)
    assert client.frames[0] == (BEGAN, b"")
    assert all(kind != BEGAN and payload for kind, payload in client.frames[1:])
    assert (client.text(OUTPUT), client.text(ERRORS)) == (b"out" + MARK + b"put", b"f")


def test_without_the_mark_nothing_has_begun() -> None:
    assert forwarded([*cut(b"-- welcome --", size=5), (2, b"e")], mark=MARK).frames == []


def test_of_much_that_precedes_the_mark_its_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_MAX_BEFORE_MARK", len(MARK))
    client = Client()
    take = peers._AfterMark(client, MARK, lambda _, chunk: client.send(frame(OUTPUT, chunk)))  # type: ignore[arg-type]
    for stream, chunk in cut(b"x" * 99 + MARK + b"out", size=3):
        take(stream, chunk)
        assert len(take._skipped) <= len(MARK)
    assert client.text(OUTPUT) == b"out"


@pytest.mark.parametrize("errors", [ERRORS, OUTPUT])
def test_without_a_mark_everything_is_forwarded_as_it_comes(errors: int) -> None:
    chunks = [(1, b"a"), (2, b"b"), (1, b"c")]
    assert forwarded(chunks, errors=errors).frames == [(OUTPUT, b"a"), (errors, b"b"), (OUTPUT, b"c")]


def test_the_clients_input_is_forwarded_only_where_that_was_asked_for() -> None:
    for options, heard in (({}, (False, None)), ({"with_input": True, "limit_s": 9.0}, (True, 9.0))):
        assert [args[1:] for args in forwarded([], **options).listening] == [heard]


def test_a_session_whose_connection_was_lost_is_closed_too() -> None:
    command = Command((1, b"a"), error=TransportError("timeout", "lost"))
    with pytest.raises(TransportError, match="lost"):
        forward_streams(Client(), command)  # type: ignore[arg-type]
    assert command.closed
