"""The real apptainer, without setuid, in a Debian system that has it: `make package-test`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.model.resources import RuntimeName
from gpusched.nodes.transport import CommandResult, RemoteScript
from tests.nodes.runtimes.world import ROOT, World
from tests.testbed import processes, systems, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not os.environ.get("GPUSCHED_PACKAGE"), reason="takes minutes: make package-test"),
]
USER = 1234
ENTER = """\
mount --make-rprivate /
mount -t overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" overlay "$2/root" && cd "$2/root"
mkdir -p old ".$3"
mount --rbind "$3" ".$3"
mount -t proc proc proc; mount -t sysfs sysfs sys; mount --rbind /dev dev; mount -t tmpfs -o mode=1777 tmpfs tmp
pivot_root . old && umount -l /old && exec sleep infinity
"""


IMAGE = f"""\
cd /srv/image && mkdir -p proc dev sys tmp etc root var/tmp && touch etc/passwd etc/group
chmod -R a+rX . && chmod a+x bin/*
for one in sh id grep sleep echo cat env; do ln -sf busybox /srv/image/bin/$one; done
useradd -m -u {USER} submitter
"""


class Inside:
    """A transport into the namespaces of a process."""

    def __init__(self, pid: int) -> None:
        self._enter = ["nsenter", "-t", str(pid), "-m", "-p", "-u", "-i", "-r"]

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        """Run a command as root."""
        env = {"HOME": "/root", "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        done = subprocess.run(
            [*self._enter, *script.argv], input=script.stdin, capture_output=True, timeout=timeout_s, check=False,
            env=env,
        )  # fmt: skip
        return CommandResult(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def apptainer(tmp_path: Path) -> Iterator[World]:
    lower, why = systems.debian("sid", ("python3", "apptainer", "util-linux"))
    if why:
        pytest.skip(why)
    for name in ("upper", "work", "root"):
        (tmp_path / name).mkdir(mode=0o755)
    words = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "sh", "-c", ENTER, "sh"]
    process = subprocess.Popen([*words, str(lower), str(tmp_path), str(ROOT)])
    try:
        wait_until(lambda: "sleep" in processes.command_line(processes.tree(process.pid)[-1])[:1], 30)
        world = World(RuntimeName.APPTAINER, Inside(processes.tree(process.pid)[1]), None, "here")  # type: ignore[arg-type]
        yield world
        world.clean()
    finally:
        processes.send(process.pid, signal.SIGKILL)
        process.wait()


def test_a_job_is_its_submitters_in_an_image_without_setuid(apptainer: World) -> None:
    busybox = shutil.which("busybox")
    assert busybox is not None
    copy = "mkdir -p /srv/image/bin && cat >/srv/image/bin/busybox"
    apptainer.do(RemoteScript(("sh", "-c", copy), Path(busybox).read_bytes()))
    apptainer.sh(IMAGE)
    script = (
        'id -u; echo "$GREETING $TOKEN"; grep -c CapEff:.0000000000000000 /proc/self/status; '
        "echo x >$GPUSCHED_JOB_DIR/kept"
    )
    ref = apptainer.launch(
        "sh", "-c", script, image="/srv/image", run_as=(USER, USER), allow_root=False, env={"GREETING": "$(id)"},
        secrets={"TOKEN": "t1"},
    )  # fmt: skip
    attempt = apptainer.await_phase(ref, "exited", "failed", "lost")
    assert apptainer.output(ref).splitlines() == [str(USER), "$(id) t1", "1"], attempt
    assert attempt["exit_code"] == 0
    kept = "/var/lib/gpusched-node/*/here/job1/kept"
    assert apptainer.sh(f"cat {kept}; stat -c %u {kept}") == f"x\n{USER}\n"

    ref = apptainer.launch("sleep", "600", job="job2", image="/srv/image", run_as=(USER, USER), allow_root=False)
    pid = apptainer.await_phase(ref, "running")["pid"]
    assert apptainer.sh(f"stat -c %u /proc/{pid}") == f"{USER}\n"
    apptainer.do(apptainer.runtime.signal(ref, "KILL"))
    assert apptainer.await_phase(ref, "exited")["exit_code"] == 137
