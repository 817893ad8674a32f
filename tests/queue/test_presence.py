"""Whether a controller that said that it is there is there still."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from gpusched.queue.clock import boot_id
from gpusched.queue.presence import FILE, announce, controller_of, controller_presence


def test_a_controller_is_present_while_it_holds_the_file(tmp_path: Path) -> None:
    assert controller_of(tmp_path) is None
    with controller_presence(tmp_path):
        found = controller_of(tmp_path)
        assert found is not None
        assert (found.pid, found.boot_id, (tmp_path / FILE).stat().st_mode & 0o777) == (os.getpid(), boot_id(), 0o644)
        assert found.line("runs").startswith(f"the controller (pid {os.getpid()}) ")
        announce(tmp_path)
        again = controller_of(tmp_path)
        assert again is not None
        assert again.line("runs") == f"the controller (pid {os.getpid()}) runs"
    assert controller_of(tmp_path) is None


def test_an_ended_or_reused_pid_is_no_controller(tmp_path: Path) -> None:
    with controller_presence(tmp_path):
        own = controller_of(tmp_path)
    assert own is not None
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = msgspec.structs.replace(own, pid=child.pid)
    another = msgspec.structs.replace(own, started="1")
    before_a_reboot = msgspec.structs.replace(own, boot_id="x")
    gone = msgspec.structs.replace(own, pid=2**22 + 7)  # beyond what the kernel gives out
    for said, there in ((own, True), (zombie, False), (another, False), (before_a_reboot, False), (gone, False)):
        (tmp_path / FILE).write_bytes(msgspec.json.encode(said))
        assert (controller_of(tmp_path) is not None) is there, said
    (tmp_path / FILE).write_text("{")
    assert controller_of(tmp_path) is None
    child.wait()
