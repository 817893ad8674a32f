"""Cutting GPUs on real nodes: the commands to nvidia-smi, and what is left when it refuses or is killed."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

import pytest

from gpusched.model.readings import Gpu
from gpusched.model.resources import MigSettings
from gpusched.model.slices import Cut
from gpusched.nodes.cutting import cut_script, permission_script, sudo_lines
from gpusched.nodes.probe import probe
from gpusched.nodes.transport import CommandResult, Transport
from tests.nodes.nodes import declare, opened, settings_for
from tests.testbed import Testbed, TestNode, processes, wait_until

SMI = MigSettings(
    command=("nvidia-smi",), cdi_command=("nvidia-ctk", "cdi", "generate", "--output=/var/run/cdi/nvidia.yaml")
)


class Cutter:
    """A node with nvidia-smi, over SSH."""

    def __init__(self, testbed: Testbed, node: TestNode, transport: Transport) -> None:
        self.testbed, self.node, self.transport = testbed, node, transport

    def cut(self, gpu: int, *slices: tuple[str, int], runtime: str = "process") -> CommandResult:
        return self.transport.run(cut_script(SMI, runtime, Cut(self.node.name, gpu, slices)), 60)

    def gpu(self, index: int) -> Gpu:
        declared = declare(self.testbed, self.node)
        return probe(self.transport, declared, "c1", settings_for(self.testbed), time.time).gpus[index]

    def slices(self, index: int) -> list[tuple[str, int, bool]]:
        return [(s.profile, s.start, s.usable) for s in self.gpu(index).slices]


@pytest.fixture
def cutter(testbed: Testbed) -> Iterator[Cutter]:
    node = testbed.nodes[0]
    node.install_nvidia_smi()
    with opened(declare(testbed, node), settings_for(testbed)) as transport:
        yield Cutter(testbed, node, transport)


def test_a_gpu_is_cut_cut_anew_and_whole_again(cutter: Cutter) -> None:
    first = [("1g.10gb", 0), ("1g.10gb", 1), ("2g.20gb", 2), ("3g.40gb", 4)]
    assert cutter.cut(2, *first).exit_code == 0
    assert cutter.slices(2) == [(*one, True) for one in first]
    assert cutter.cut(2, ("3g.40gb", 0), ("1g.10gb+me", 4)).exit_code == 0
    assert cutter.slices(2) == [("3g.40gb", 0, True), ("1g.10gb+me", 4, True)]
    for _ in range(2):
        assert cutter.cut(2).exit_code == 0
        assert (cutter.gpu(2).mig_mode, cutter.gpu(2).slices) == (False, ())
    assert not any(cutter.gpu(index).mig_mode for index in (0, 1, 3))


@pytest.mark.parametrize("was", [(), ("1g.10gb:0",)], ids=["whole", "cut"])
@pytest.mark.parametrize("slices", [(), (("3g.40gb", 4),)], ids=["merge", "cut"])
def test_nothing_is_done_while_a_process_is_on_the_gpu(
    cutter: Cutter, was: tuple[str, ...], slices: tuple[tuple[str, int], ...]
) -> None:
    if was:
        cutter.node.cut_gpu(2, *was)
    before = cutter.slices(2)
    cutter.node.nvml_set({"gpu2.procs": "4711:1000:7"})
    done = cutter.cut(2, *slices)
    assert (done.exit_code, done.complaint) == (1, "GPU 2 is in use by pid 4711")
    assert cutter.slices(2) == before
    assert cutter.gpu(2).mig_mode is bool(was)


def test_nvidia_smis_refusal_is_reported(cutter: Cutter) -> None:
    done = cutter.cut(0, ("3g.40gb", 0), ("4g.40gb", 0))
    assert (done.exit_code, done.complaint) == (1, "Failed to create GPU instances: Insufficient Resources")
    cutter.node.nvml_set(smi_denied=1)
    done = cutter.cut(1, ("3g.40gb", 0))
    assert done.exit_code == 1
    assert "MIG mode of GPU 1 stays as it was" in done.complaint
    assert "Insufficient Permissions" in done.complaint
    assert cutter.gpu(1).mig_mode is False


def test_a_cut_that_is_killed_half_way_is_made_good_by_the_next(cutter: Cutter) -> None:
    cutter.node.nvml_set({"gpu4.smi_delay_ms": 400})
    wanted = [("1g.10gb", start) for start in range(7)]
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cutter.cut, 4, *wanted)
        wait_until(lambda: cutter.slices(4), what="the first instance")
        for pid in cutter.node.pids():
            if "/usr/local/sbin/nvidia-smi" in processes.command_line(pid):
                processes.send(pid, signal.SIGKILL)
        assert first.result().exit_code == 1
    half = cutter.slices(4)
    assert half
    assert half != [(*one, True) for one in wanted], "seven instances, and seven compute instances, are not there yet"
    cutter.node.nvml_set({"gpu4.smi_delay_ms": 0})
    assert cutter.cut(4, *wanted).exit_code == 0
    assert cutter.slices(4) == [(*one, True) for one in wanted]


def test_podmans_devices_are_those_after_the_cut(cutter: Cutter) -> None:
    assert cutter.cut(0, ("1g.10gb", 6), runtime="podman").exit_code == 0
    written = cutter.node.run(["cat", "/var/run/cdi/nvidia.yaml"]).stdout
    cutter.node.run(["rm", "/var/run/cdi/nvidia.yaml"])
    assert '"0:0"' in written
    assert '"0"' not in written


def test_missing_permissions_are_named_without_changes(cutter: Cutter) -> None:
    assert cutter.transport.run(permission_script(SMI, "podman"), 30).exit_code == 0
    assert not cutter.gpu(0).mig_mode
    cutter.node.install_script(
        "sudo", '#!/bin/sh\n[ "$2" = -l ] || { shift; exec "$@"; }\ncase $* in *-mig*) exit 1 ;; esac\n'
    )
    sudo = MigSettings(command=("sudo", "-n", "/usr/local/sbin/nvidia-smi"))
    done = cutter.transport.run(permission_script(sudo, "process"), 30)
    assert (done.exit_code, done.complaint) == (2, "/usr/local/sbin/nvidia-smi -i 0 -mig 1")
    cutter.node.install_script("sudo", "#!/bin/sh\necho 'sudo: a password is required' >&2; exit 1\n")
    done = cutter.transport.run(permission_script(sudo, "process"), 30)
    assert (done.exit_code, done.complaint) == (1, "sudo: a password is required")


def test_the_line_for_sudoers() -> None:
    whom, line = sudo_lines(MigSettings(), "process", "gpusched").split(": ")
    assert whom == "gpusched ALL=(root) NOPASSWD"
    assert sudo_lines(MigSettings(), "podman", "gpusched") == (
        f"{whom}: {line}, /usr/bin/nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml"
    )

    def may(words: str) -> bool:  # as sudo matches words
        return any(fnmatchcase(f"/usr/bin/nvidia-smi {words}", command) for command in line.split(", "))

    assert all(map(may, ("-i 0 -mig 1", "-i 15 -mig 0", "mig -lgi", "mig -i 3 -cgi 1g.10gb:0,3g.40gb:4 -C")))
    assert not any(map(may, ("-i 0 -q -f /etc/cron.d/x -mig 1", "-i 0 -r -mig 1", "-i 0 -mig 1 -pl 100", "-q", "-r")))
