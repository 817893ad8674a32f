"""The relay's process is kept running, and nobody waits for it. A script stands in for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpusched
from gpusched.controller import service as module
from gpusched.controller.service import RELAY_RESTART_S, RelayProcess
from gpusched.model.relay import SOCKET
from gpusched.queue.lease import Superseded
from tests.logged import messages
from tests.testbed.waiting import wait_until

SCRIPT = '#!/bin/sh\necho "$PYTHONPATH" "$@" > {args}.part\nmv {args}.part {args}\nexec cat > /dev/null\n'


class Place:
    def __init__(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self.state, self.args, self.script = folder, folder / "args", folder / "python"
        self.script.write_text(SCRIPT.format(args=self.args))
        self.script.chmod(0o755)
        self.now = 5.0
        self.relaying = RelayProcess(folder, folder / "inventory.yaml", self._check)
        self.superseded = False
        self._caplog = caplog

    @property
    def said(self) -> list[str]:
        return messages(self._caplog)

    def _check(self) -> None:
        if self.superseded:
            raise Superseded("another controller took over")

    def pid(self) -> int | None:
        return self.relaying._process.pid if self.relaying._process else None


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Place]:
    place = Place(tmp_path, caplog)
    monkeypatch.setattr(module.sys, "executable", str(place.script))
    monkeypatch.setattr(module.time, "monotonic", lambda: place.now)
    yield place
    place.relaying.close()


def test_it_is_started_once_with_code_of_this_installation(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/more")
    place.relaying.watch()
    monkeypatch.undo()  # waiting needs the clock
    wait_until(place.args.exists, 60, "its start")
    here = Path(gpusched.__file__).parents[1]
    assert place.args.read_text().split() == [
        f"{here}{os.pathsep}/more", "-P", "-m", "gpusched.controller.relay", str(place.state),
        str(place.state / "inventory.yaml"), "0", "text",
    ]  # fmt: skip
    pid = place.pid()
    assert pid is not None
    assert os.getsid(pid) == pid, "Ctrl-C in the controller's terminal is not for it"
    place.relaying.watch()
    assert place.pid() == pid


def test_a_relay_that_ended_is_logged_and_restarted_after_a_while(place: Place) -> None:
    place.relaying.watch()
    process = place.relaying._process
    assert process is not None
    process.kill()
    process.wait()
    for place.now, there in ((5.0 + RELAY_RESTART_S - 0.1, False), (5.0 + RELAY_RESTART_S, True)):
        place.relaying.watch()
        assert (place.pid() is not None) is there
    assert place.said == ["the relay to running jobs ended (exit code -9); restarting it"]
    assert process.stdin is not None
    assert process.stdin.closed


def test_a_relay_that_cannot_be_started_is_tried_again_later(place: Place) -> None:
    place.script.rename(place.script.with_name("away"))
    for place.now in (5.0, 6.0, 5.0 + RELAY_RESTART_S):
        place.relaying.watch()
    assert len(place.said) == 2
    assert place.said[0].startswith("the relay to running jobs cannot be started: ")
    place.relaying.close()


def test_the_end_of_the_relay_removes_the_socket(place: Place) -> None:
    for _ in range(2):
        place.relaying.watch()
        process = place.relaying._process
        assert process is not None
        (place.state / SOCKET).touch()
        place.relaying.close()
        assert not (place.state / SOCKET).exists()
        assert (process.returncode, place.pid()) == (-9, None)
        place.now += RELAY_RESTART_S
    place.relaying.close()


def test_a_superseded_controllers_end_leaves_the_socket_which_is_the_other_ones(place: Place) -> None:
    """However it ends: it may be stopped before it has noticed."""
    place.relaying.watch()
    (place.state / SOCKET).touch()
    place.superseded = True
    place.relaying.close()
    assert (place.state / SOCKET).exists()
    assert place.pid() is None
