"""The node is told that a client is attached, also where connections to it are lost."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from gpusched.controller.attaching import _attended
from gpusched.nodes.runtimes import AttemptRef, sessions
from gpusched.nodes.transport import RemoteScript, TransportError

REF = AttemptRef("c", "n", "x")


class Connection:
    """One that is lost after so many reports."""

    def __init__(self, lasts: int = 1_000_000) -> None:
        self.lasts, self.reports = lasts, list[RemoteScript]()
        self.told, self.closed = threading.Event(), threading.Event()

    def run(self, script: RemoteScript, timeout_s: float) -> SimpleNamespace:
        if len(self.reports) == self.lasts:
            raise TransportError("ssh", "lost")
        self.reports.append(script)
        self.told.set()
        return SimpleNamespace(stdout=b"")

    def close(self) -> None:
        self.closed.set()


def test_attendance_goes_on_by_another_connection_where_one_is_lost() -> None:
    first, second, third = Connection(1), Connection(2), Connection()
    others = iter((second, third))
    with _attended(first, lambda: next(others), REF, 0.0):  # type: ignore[arg-type]
        assert third.told.wait(20)
        assert second.closed.is_set()
        assert not third.closed.is_set()
    assert third.closed.wait(20), "nothing is left open"
    assert not first.closed.is_set(), "the session's own"
    assert [*first.reports, *second.reports] == [sessions.note_attached(REF)] * 3


def test_a_connection_that_lasts_is_the_only_one() -> None:
    first = Connection()
    with _attended(first, lambda: Connection(), REF, 0.0):  # type: ignore[arg-type]
        assert first.told.wait(20)
    assert not first.closed.is_set()
