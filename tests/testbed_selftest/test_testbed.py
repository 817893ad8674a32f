"""The testbed keeps its promises; every test talks to the nodes as a user would, with the `ssh` binary."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pynvml
import pytest

from tests.testbed import Testbed, TestNode, processes, sshd, wait_until
from tests.testbed.docker import why_unavailable as why_no_docker
from tests.testbed.hardware import DGX1_LINKS

IMAGE = "localhost/gs/busybox:1"
ROOT = Path(__file__).parents[2]

Ssh = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ssh(testbed: Testbed) -> Ssh:
    config = testbed.write_ssh_config()

    def run(node: TestNode, command: str, *, timeout_s: float = 300, options: tuple[str, ...] = ()) -> object:
        argv = ["ssh", "-F", str(config), *options, node.name, command]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)

    return run  # type: ignore[return-value]


def read_gpus(node: TestNode, body: str) -> object:
    """Run unmodified nvidia-ml-py on the node, over standard input, and return what `body` left in `out`."""
    program = Path(pynvml.__file__).read_text() + "\nimport json\nnvmlInit()\n" + body + "\nprint(json.dumps(out))\n"
    return json.loads(node.run(["python3", "-I", "-S", "-"], input=program).stdout)


# ---- nodes are machines of their own ---------------------------------------------------------------------------


def test_ssh_reaches_every_node_by_name_and_by_address(testbed: Testbed, ssh: Ssh) -> None:
    for node in testbed.nodes:
        assert ssh(node, "hostname").stdout == f"{node.name}\n"
        assert ssh(node, "hostname", options=(f"-oHostName={node.address}",)).stdout == f"{node.name}\n"


def test_nodes_reach_each_other_by_name(testbed: Testbed) -> None:
    testbed.nodes[0].run(["/usr/bin/busybox", "nc", "-w", "2", "dgx004", "22"], input="\n")


def test_nodes_share_tmp_and_nothing_else(testbed: Testbed, ssh: Ssh, tmp_path: Path) -> None:
    a, b = testbed.nodes[:2]
    shared = tmp_path / "x" if tmp_path.is_relative_to("/tmp") else Path("/tmp") / f"gpusched-{os.getpid()}"
    assert ssh(a, f"touch {shared} ~/x /run/x /dev/shm/x /var/tmp/x /etc/x /usr/x").returncode == 0
    assert ssh(b, f"ls -d {shared} ~/x /run/x /dev/shm/x /var/tmp/x /etc/x /usr/x").stdout.split() == [str(shared)]
    assert not any(Path(p).exists() for p in ("/run/x", "/dev/shm/x", "/etc/x", "/usr/x"))
    shared.unlink()
    for path in ("/etc/x", "/usr/x", "/run/x", "/dev/shm/x", "/var/tmp/x"):
        a.run(["rm", path])


def test_run_reports_failure_with_what_the_node_said(testbed: Testbed) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        testbed.nodes[0].run(["sh", "-c", "echo no such thing >&2; exit 3"])
    assert caught.value.returncode == 3
    assert caught.value.__notes__ == ["dgx001 said: no such thing"]


def test_run_gives_up_after_its_timeout_and_leaves_nothing(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    with pytest.raises(subprocess.TimeoutExpired):
        node.run(["sleep", "1234"], timeout=0.2)
    wait_until(lambda: "sleep 1234" not in node.run(["ps", "ax"]).stdout, what="the end of sleep 1234")


# ---- NVML ------------------------------------------------------------------------------------------------------


def test_nvidia_ml_py_reads_eight_gpus(testbed: Testbed) -> None:
    body = """
out = []
for i in range(nvmlDeviceGetCount()):
    h = nvmlDeviceGetHandleByIndex(i)
    m = nvmlDeviceGetMemoryInfo(h, version=nvmlMemory_v2)
    out.append({
        "name": nvmlDeviceGetName(h), "uuid": nvmlDeviceGetUUID(h), "minor": nvmlDeviceGetMinorNumber(h),
        "memory": [m.total, m.used, m.reserved, m.free], "memory1": nvmlDeviceGetMemoryInfo(h).used,
        "util": [nvmlDeviceGetUtilizationRates(h).gpu, nvmlDeviceGetUtilizationRates(h).memory],
        "power": [nvmlDeviceGetPowerUsage(h), nvmlDeviceGetEnforcedPowerLimit(h)],
        "energy": nvmlDeviceGetTotalEnergyConsumption(h), "temp": nvmlDeviceGetTemperatureV(h, 0),
        "ecc": nvmlDeviceGetEccMode(h)[0], "mig": nvmlDeviceGetMigMode(h)[0],
        "ecc_errors": nvmlDeviceGetMemoryErrorCounter(h, 1, 1, NVML_MEMORY_LOCATION_DEVICE_MEMORY),
        "procs": [[p.pid, p.usedGpuMemory] for p in nvmlDeviceGetComputeRunningProcesses(h)],
        "graphics": len(nvmlDeviceGetGraphicsRunningProcesses(h)), "pci": nvmlDeviceGetPciInfo(h).busId,
        "links": [nvmlDeviceGetNvLinkState(h, k) for k in range(12)],
        "peer": nvmlDeviceGetNvLinkRemotePciInfo(h, 0).busId,
        "topology": [nvmlDeviceGetTopologyCommonAncestor(h, nvmlDeviceGetHandleByIndex(j)) for j in range(8)],
        "capability": nvmlDeviceGetCudaComputeCapability(h), "remapped": nvmlDeviceGetRemappedRows(h),
    })
"""
    node = testbed.nodes[0]
    node.nvml_set({"gpu2.procs": "17:1048576,99:5", "gpu2.util_gpu": 97, "gpu*.ecc.1.1": 3})
    gpus = read_gpus(node, body)
    assert isinstance(gpus, list)
    assert len({g["uuid"] for g in gpus}) == len({g["pci"] for g in gpus}) == 8
    gpu = gpus[2]
    assert gpu["name"] == "NVIDIA A100-SXM4-80GB"
    assert gpu["minor"] == 2
    assert gpu["memory"] == [80 << 30, 0, 600 << 20, (80 << 30) - (600 << 20)]
    assert gpu["memory1"] == 600 << 20
    assert gpu["util"] == [97, 0]
    assert gpu["power"] == [55_000, 400_000]
    assert (gpu["energy"], gpu["temp"], gpu["ecc"], gpu["mig"], gpu["ecc_errors"]) == (3_000_000, 33, 1, 0, 3)
    assert gpu["procs"] == [[17, 1 << 20], [99, 5]]
    assert gpu["graphics"] == 0
    assert gpu["links"] == [1] * 12
    assert gpu["peer"] == "00000000:C4:00.0"
    assert gpu["topology"] == [40, 40, 0, 10, 50, 50, 50, 50]
    assert gpu["capability"] == [8, 0]
    assert gpu["remapped"] == [0, 0, 0, 0]


def test_v100_nvlinks_are_the_dgx1_mesh(testbed: Testbed) -> None:
    body = """
h = [nvmlDeviceGetHandleByIndex(i) for i in range(8)]
index = {nvmlDeviceGetPciInfo(g).busId: i for i, g in enumerate(h)}
out = [[i, index[nvmlDeviceGetNvLinkRemotePciInfo(g, k).busId]] for i, g in enumerate(h) for k in range(6)]
"""
    found = read_gpus(testbed.nodes[1], body)
    assert isinstance(found, list)
    assert {(a, b): sum(x == [a, b] for x in found) for a, b in found if a < b} == DGX1_LINKS


def test_a_v100_has_no_mig_and_a_lost_gpu_reports_it(testbed: Testbed) -> None:
    body = """
out = []
for i in (0, 3):
    try:
        nvmlDeviceGetMigMode(nvmlDeviceGetHandleByIndex(i))
    except NVMLError as e:
        out.append(e.value)
"""
    testbed.nodes[1].nvml_set({"gpu3.error": 15})
    assert read_gpus(testbed.nodes[1], body) == [3, 15]


def test_nvml_can_be_slow_or_absent_or_without_driver(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    body = "import time\nt = time.monotonic(); nvmlDeviceGetHandleByIndex(1); out = time.monotonic() - t"
    node.nvml_set({"gpu1.delay_ms": 60})
    assert float(str(read_gpus(node, body))) >= 0.06
    node.nvml_set(init_error=9)
    with pytest.raises(subprocess.CalledProcessError, match="exit status") as caught:
        read_gpus(node, body)
    assert "DriverNotLoaded" in caught.value.stderr
    node.hide_nvml()
    with pytest.raises(subprocess.CalledProcessError) as caught:
        read_gpus(node, body)
    assert "LibraryNotFound" in caught.value.stderr
    node.nvml_reset()
    node.show_nvml()
    assert read_gpus(node, "out = nvmlDeviceGetCount()") == 8


# ---- containers ------------------------------------------------------------------------------------------------


def test_podman_gives_a_container_the_gpus_it_asked_for(testbed: Testbed, ssh: Ssh) -> None:
    devices = "--device nvidia.com/gpu=0 --device nvidia.com/gpu=3"
    done = ssh(testbed.nodes[0], f"podman run --init {devices} {IMAGE} sh -c 'env; ls /dev/nvidia*; exit 7'")
    assert done.stderr == ""
    assert done.returncode == 7
    assert {w for w in done.stdout.split() if w.startswith(("GPU_", "/dev"))} == {
        "GPU_0=present", "GPU_3=present", "/dev/nvidia0", "/dev/nvidia3",
    }  # fmt: skip
    assert ssh(testbed.nodes[0], f"podman run --device nvidia.com/gpu=8 {IMAGE} true").returncode == 126


def test_a_detached_container_survives_its_connection_and_not_the_reset(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[1]
    done = ssh(node, f"podman run -d --init --name gpusched-x --network host {IMAGE} sleep 1000")
    assert done.returncode == 0, done.stderr
    assert ssh(node, "podman ps --format '{{.Names}}'").stdout == "gpusched-x\n"
    node.reset()
    assert ssh(node, "podman ps -aq").stdout == ""
    assert "sleep 1000" not in ssh(node, "ps ax").stdout


def half_removed(node: TestNode, name: str) -> None:
    """A container as a `podman rm` leaves it that was killed when its storage was gone and its name was not."""
    node.run(["podman", "create", "--name", name, "--network", "host", IMAGE, "true"])
    store = next(node.disk.glob("containers/storage/*-containers/containers.json"))
    store.write_text("[]")
    known = node.run(["podman", "inspect", name], check=False)
    assert "container not known" in known.stderr
    assert name in node.run(["podman", "ps", "-a", "--format", "{{.Names}}"]).stdout.split()


def test_remains_of_a_killed_removal_do_not_survive_the_reset(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[1]
    half_removed(node, "gpusched-w")
    ssh(node, "setsid bash -c 'exec -a podman sleep 1004' >/dev/null 2>&1 </dev/null &")
    wait_until(lambda: "podman 1004" in node.run(["ps", "ax"]).stdout, what="a podman that hangs")
    node.reset()
    assert node.run(["podman", "ps", "-aq"]).stdout == ""
    half_removed(node, "gpusched-w")
    node.power_off()
    node.reset()
    assert node.run(["podman", "ps", "-aq"]).stdout == ""


@pytest.mark.skipif(why_no_docker() is not None, reason=str(why_no_docker()))
def test_docker_gives_a_container_the_gpus_it_asked_for(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    assert ssh(node, "docker version").returncode == 127
    node.start_docker()
    command = f"docker run --init --network host --gpus '\"device=0,3\"' {IMAGE} sh -c 'env; exit 7'"
    done = ssh(node, command)
    assert done.returncode == 7, done.stderr
    assert "NVIDIA_VISIBLE_DEVICES=0,3" in done.stdout.split()
    assert ssh(node, f"docker run -d --init --network host --name gpusched-y {IMAGE} sleep 1001").returncode == 0
    node.reset()
    assert ssh(node, "docker ps").returncode == 127
    assert "sleep 1001" not in ssh(node, "ps ax").stdout
    node.start_docker()
    assert ssh(node, "docker ps -aq").stdout == ""
    node.stop_docker()
    assert ssh(node, "docker ps").returncode == 1


# ---- faults ----------------------------------------------------------------------------------------------------


def test_a_frozen_node_takes_connections_and_says_nothing(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[2]
    node.freeze()
    done = ssh(node, "true", options=("-oConnectTimeout=1",))
    assert done.returncode == 255
    assert "banner exchange" in done.stderr
    node.thaw()
    assert ssh(node, "true").returncode == 0


def test_a_cut_node_is_unreachable_and_its_neighbours_are_not(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[2]
    node.cut()
    assert ssh(node, "true", options=("-oConnectTimeout=1",)).returncode == 255
    assert ssh(testbed.nodes[3], "true").returncode == 0
    assert node.run(["hostname"]).stdout == "dgx003\n"
    node.join()
    assert ssh(node, "true").returncode == 0


def test_without_sshd_connections_are_refused_and_open_ones_live(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    argv = ["ssh", "-F", str(testbed.write_ssh_config()), node.name, "echo ready; cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as open_connection:
        assert open_connection.stdin is not None
        assert open_connection.stdout is not None
        assert open_connection.stdout.readline() == "ready\n"
        node.stop_sshd()
        assert "Connection refused" in ssh(node, "true").stderr
        open_connection.stdin.write("still here\n")
        open_connection.stdin.close()
        assert open_connection.stdout.read() == "still here\n"
    node.start_sshd()
    assert ssh(node, "true").returncode == 0


def listener(node: TestNode) -> int:
    """The machine's id of the process that holds the node's port 22."""
    inodes = processes.listening(node.init_pid, node.port)
    return next(pid for pid in node.pids() if processes.holds(pid, inodes))


def test_reset_replaces_an_sshd_that_is_stuck(testbed: Testbed, ssh: Ssh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd, "PATIENCE_S", (0.5, 10.0, 10.0))
    node = testbed.nodes[0]
    stuck, up_since = listener(node), node.boot_id
    os.kill(stuck, signal.SIGSTOP)
    wait_until(lambda: processes.state(stuck) == "T", what="it to stop")
    testbed.reset()
    assert ssh(node, "true").returncode == 0
    assert listener(node) != stuck
    assert (node.boot_id, node.healed) == (up_since, [])


def test_sshd_ends_with_whatever_holds_its_port(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    node.stop_sshd()
    # A process that has the socket and another name than sshd's, as a child that the listener had just forked.
    holder = "import socket, time; s = socket.create_server(('', 22)); time.sleep(1005)"
    node.run(["sh", "-c", 'setsid python3 -c "$1" >/dev/null 2>&1 </dev/null &', "sh", holder])
    wait_until(lambda: processes.listening(node.init_pid, 22), what="the holder of the port")
    node.stop_sshd()
    assert "Connection refused" in ssh(node, "true").stderr
    node.start_sshd()
    assert ssh(node, "true").returncode == 0


def test_a_second_sshd_is_not_taken_for_the_node_s_own(testbed: Testbed, ssh: Ssh, tmp_path: Path) -> None:
    node = testbed.nodes[0]
    config = tmp_path / "config"
    config.write_text(f"Port 2222\nHostKey {node.disk}/ssh/hostkey\nPidFile none\n")
    node.run(["/usr/sbin/sshd", "-f", config, "-E", tmp_path / "log"])
    wait_until(lambda: processes.listening(node.init_pid, 2222), what="the second sshd")
    node.stop_sshd()
    node.start_sshd()
    assert ssh(node, "true").returncode == 0
    node.reset()
    assert not processes.listening(node.init_pid, 2222)
    assert ssh(node, "true").returncode == 0


def test_an_sshd_that_does_not_start_shows_its_log(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sshd, "PATIENCE_S", (0.2, 0.2))
    node = testbed.nodes[0]
    node.stop_sshd()
    config = node.disk / "ssh" / "sshd_config"
    right = config.read_text()
    config.write_text(right.replace("0.0.0.0:22", "0.0.0.0:23"))
    try:
        with pytest.raises(TimeoutError, match=r"(?s)held by nobody.* S sshd: .*Server listening on 0.0.0.0 port 23"):
            node.start_sshd()
    finally:
        config.write_text(right)


def test_a_node_that_cannot_be_reset_is_switched_off_and_on(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[1]
    before = node.boot_id
    os.kill(node.init_pid, signal.SIGKILL)  # a node without PID 1 cannot be entered any more
    testbed.reset()
    assert ssh(node, "true").returncode == 0
    assert node.boot_id != before
    assert "dgx002 was switched off and on" in node.healed.pop()


def test_a_new_host_key_is_refused_until_the_reset(testbed: Testbed, ssh: Ssh, tmp_path: Path) -> None:
    node = testbed.nodes[0]
    line = node.new_host_key()
    done = ssh(node, "true")
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
    accepted = tmp_path / "known_hosts"
    accepted.write_text(line)
    assert ssh(node, "true", options=(f"-oUserKnownHostsFile={accepted}",)).returncode == 0
    node.reset()
    assert ssh(node, "true").returncode == 0


def test_a_reboot_keeps_the_disk_and_kills_the_rest(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[1]
    read = "cat /proc/sys/kernel/random/boot_id"
    before = ssh(node, read).stdout.strip()
    assert before == node.boot_id
    command = f"touch ~/kept /run/lost; podman run -d --init --name gpusched-z --network host {IMAGE} sleep 1002"
    assert ssh(node, command).returncode == 0
    node.hide("tar")
    node.reboot()
    after = ssh(node, read).stdout.strip()
    assert after == node.boot_id != before
    assert ssh(node, "ls ~/kept /run/lost 2>/dev/null").stdout == "/root/kept\n"
    assert "sleep 1002" not in ssh(node, "ps ax").stdout
    assert ssh(node, "podman ps -a --format '{{.Names}} {{.State}}'").stdout.startswith("gpusched-z ")
    assert ssh(node, "command -v tar").returncode != 0


def test_power_off_is_silent_and_power_on_brings_it_back(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[3]
    node.power_off()
    assert ssh(node, "true", options=("-oConnectTimeout=1",)).returncode == 255
    assert node.pids() == []
    testbed.reset()
    assert ssh(node, "true").returncode == 0


def test_a_hanging_runtime_hangs_and_lets_go(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    node.hang_runtime("podman")
    argv = ["ssh", "-F", str(testbed.write_ssh_config()), node.name, "podman ps"]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as hung:
        wait_until(lambda: "/run/gpusched-testbed/hung infinity" in node.run(["ps", "ax"]).stdout, what="podman")
        assert hung.poll() is None
        node.unhang_runtime("podman")
        assert hung.wait(300) != 0
    assert ssh(node, "podman ps -q").returncode == 0
    wait_until(lambda: "hung infinity" not in node.run(["ps", "ax"]).stdout, what="the end of the hung podman")


def test_hidden_commands_are_not_found(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    assert ssh(node, "nvidia-smi").returncode == 127
    node.hide("python3")
    assert ssh(node, "python3 --version").returncode == 127
    assert ssh(testbed.nodes[1], "python3 --version").returncode == 0
    node.unhide("python3")
    assert ssh(node, "python3 --version").returncode == 0


def test_installed_scripts_are_found_on_one_node(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    node.install_script("nvidia-smi", "#!/bin/sh\necho fake $1\n")
    assert ssh(node, "nvidia-smi -L").stdout == "fake -L\n"
    assert ssh(testbed.nodes[1], "nvidia-smi -L").returncode == 127


def test_reset_ends_leftover_processes_and_keeps_connections_and_cache(testbed: Testbed, ssh: Ssh) -> None:
    node = testbed.nodes[0]
    ssh(node, "mkdir -p ~/.cache/gpusched ~/.local/state/gpusched; setsid sleep 1003 >/dev/null 2>&1 </dev/null &")
    argv = ["ssh", "-N", "-M", "-S", "none", "-F", str(testbed.write_ssh_config()), node.name]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as connection:
        try:
            wait_until(lambda: "sshd: root" in node.run(["ps", "ax"]).stdout, what="the connection")
            node.reset()
            assert "sleep 1003" not in node.run(["ps", "ax"]).stdout
            assert "sshd: root" in node.run(["ps", "ax"]).stdout
            assert connection.poll() is None
        finally:
            connection.kill()
    assert node.run(["ls", "-A", "/root"]).stdout == ".cache\n"


# ---- starting and ending ---------------------------------------------------------------------------------------

CRASH = """
import sys, time
from pathlib import Path
from tests.testbed import Testbed
testbed = Testbed(Path(sys.argv[1]), count=2)
testbed.up()
testbed.nodes[0].run(["podman", "run", "-d", "--network", "host", "localhost/gs/busybox:1", "sleep", "1004"])
print(testbed.index, flush=True)
time.sleep(600)
"""


def bridges() -> set[str]:
    return {name for name in os.listdir("/sys/class/net") if name.startswith("gstb")}


def test_a_killed_run_is_swept_by_the_next_one_with_its_index(testbed: Testbed, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CRASH, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as crashing:
        assert crashing.stdout is not None
        index = int(crashing.stdout.readline())
        assert index != testbed.index
        with pytest.raises(RuntimeError, match="in use"):
            Testbed(tmp_path / "other", index=index).up()
        crashing.send_signal(signal.SIGKILL)
    assert f"gstb{index}" in bridges()
    with Testbed(tmp_path, index=index, count=1) as again:
        assert again.nodes[0].run(["hostname"]).stdout == "dgx001\n"
    assert f"gstb{index}" not in bridges()
    assert not list(Path("/run/netns").glob(f"gstb{index}-*"))
    ps = subprocess.run(["ps", "ax"], capture_output=True, text=True, check=True).stdout
    assert "sleep 1004" not in ps


def test_down_twice_is_fine_and_touches_no_other_testbed(testbed: Testbed, ssh: Ssh, tmp_path: Path) -> None:
    other = Testbed(tmp_path, count=1)
    other.up()
    assert other.index != testbed.index
    other.down()
    other.down()
    assert ssh(testbed.nodes[0], "true").returncode == 0


def test_the_command_line_leaves_a_testbed_running_until_down(testbed: Testbed, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.testbed"]
    up = subprocess.run(
        [*command, "up", "2", "--root", tmp_path, "--gpus", "4"], check=True, capture_output=True, text=True, cwd=ROOT
    )
    described = json.loads(up.stdout)
    try:
        assert [n["gpus"] for n in described["nodes"]] == [4, 4]
        argv = ["ssh", "-F", described["ssh_config"], "dgx002", "hostname"]
        assert subprocess.run(argv, capture_output=True, text=True, check=True).stdout == "dgx002\n"
    finally:
        subprocess.run([*command, "down", "--root", tmp_path], check=True, cwd=ROOT)
    assert f"gstb{described['index']}" not in bridges()
    subprocess.run([*command, "down", "--root", tmp_path], check=True, cwd=ROOT)
