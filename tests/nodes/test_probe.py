"""The probe on real nodes: what it reads, and what it still reads when something is broken."""

import contextlib
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.model.readings import NodeReading
from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.probe import _request, probe
from gpusched.nodes.transport import CommandResult, RemoteScript, Transport, TransportError
from tests.nodes.nodes import declare, opened, settings_for, sh
from tests.testbed import Testbed, TestNode

SMI = r"""#!/bin/sh
case "$1" in
  *mig.mode.current*) echo 'Field "mig.mode.current" is not a valid field to query.'; exit 2;;
  --query-gpu=*)
    echo '0, GPU-1, Tesla V100-SXM2-32GB, 32510, 31000, 100, 287.33, 300.00, 71'
    echo '1, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost], [N/A], [N/A]';;
  --query-compute-apps=*) echo 'GPU-1, 1, 30990';;
esac
"""


class Counting:
    """A transport that counts the execs."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.runs = 0

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        self.runs += 1
        return self.inner.run(script, timeout_s)

    def stream(self, script: RemoteScript) -> Any:
        return self.inner.stream(script)

    def close(self) -> None:
        self.inner.close()


def read(testbed: Testbed, node: TestNode, times: int = 1, want_links: bool = False, **changes: Any) -> NodeReading:
    """A reading; the last of ``times``, which must take one exec."""
    declared = declare(testbed, node, **{k: v for k, v in changes.items() if k in Node.__struct_fields__})
    settings = settings_for(testbed, **{k: v for k, v in changes.items() if k in Settings.__struct_fields__})
    with opened(declared, settings) as inner:
        transport = Counting(inner)
        for _ in range(times):
            before = transport.runs
            reading = probe(transport, declared, "c1", settings, time.time, want_links)
        if times > 1:
            assert transport.runs == before + 1
    return reading


def test_an_idle_node_in_full(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    reading = read(testbed, node, times=2)
    assert (reading.node, reading.hostname, reading.source) == ("dgx001", "dgx001", "nvml")
    assert reading.gpu_error is None
    assert reading.driver_version == "535.129.03"
    assert reading.boot_id is not None
    assert reading.clock_skew_s == pytest.approx(0, abs=1)
    assert reading.containers == ()
    assert reading.runtime_error is None
    assert reading.cores
    assert reading.memory_total_mib
    assert reading.memory_available_mib
    assert reading.disk_free_mib
    assert [g.index for g in reading.gpus] == list(range(8))
    gpu = reading.gpus[3]
    assert (gpu.name, gpu.memory_total_mib, gpu.memory_used_mib) == ("NVIDIA A100-SXM4-80GB", 81920, 0)
    assert (gpu.utilization_pct, gpu.power_w, gpu.power_limit_w, gpu.temperature_c) == (0.0, 55.0, 400.0, 33)
    assert (gpu.energy_j, gpu.ecc_errors, gpu.mig_mode, gpu.error) == (4000.0, 0, False, None)
    assert gpu.links == {}


def test_units_and_faults_of_single_figures(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    node.nvml_set({"gpu1.power_mw": 312500, "gpu1.energy_mj": 7_654_321, "gpu1.mem_used": 5 << 30,
                   "gpu1.ecc.1.0": 2, "gpu1.util_gpu": 97})  # fmt: skip
    gpu = read(testbed, node).gpus[1]
    assert (gpu.power_w, gpu.energy_j, gpu.memory_used_mib) == (312.5, 7654.321, 5120)
    assert (gpu.mig_mode, gpu.ecc_errors, gpu.utilization_pct) == (False, 2, 97.0)
    assert read(testbed, testbed.nodes[1]).gpus[0].mig_mode is None  # a V100 knows no MIG


@pytest.mark.parametrize("code", [15, 16, 999])
def test_a_lost_gpu_does_not_hide_the_others(testbed: Testbed, code: int) -> None:
    testbed.nodes[0].nvml_set({"gpu3.error": code})
    reading = read(testbed, testbed.nodes[0], want_links=True)
    assert [g.index for g in reading.gpus if g.error] == [3]
    assert "NVML" in str(reading.gpus[3].error)
    assert [g.power_w for g in reading.gpus] == [55.0] * 3 + [None] + [55.0] * 4


def test_a_slow_gpu_does_not_hide_the_others(testbed: Testbed) -> None:
    testbed.nodes[0].nvml_set({"gpu2.delay_ms": 600_000})
    began = time.monotonic()
    reading = read(testbed, testbed.nodes[0])
    assert time.monotonic() - began < 500  # the call takes ten minutes
    assert [g.index for g in reading.gpus if g.error] == [2]
    assert reading.gpus[2].error == "NVML did not answer in 4 s"


def test_all_gpus_slow_keep_within_the_timeout(testbed: Testbed) -> None:
    testbed.nodes[0].nvml_set({f"gpu{i}.delay_ms": 600_000 for i in range(8)})
    began = time.monotonic()
    reading = read(testbed, testbed.nodes[0], probe_timeout_s=8.0)
    assert time.monotonic() - began < 500
    assert all(g.error for g in reading.gpus)
    assert len(reading.gpus) == 8


def test_processes_with_owner_and_command(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    settings = settings_for(testbed)
    declared = declare(testbed, node)
    with opened(declared, settings) as transport:
        pid = int(transport.run(sh("setsid sleep 300 </dev/null >/dev/null 2>&1 & echo $!"), 10).stdout)
        node.nvml_set({"gpu4.procs": f"{pid}:{3 << 30}", "gpu4.graphics_procs": f"{pid}:{1 << 20},999999:0"})
        reading = probe(transport, declared, "c1", settings, time.time)
    known, unknown = reading.gpus[4].processes
    assert (known.pid, known.user, known.command) == (pid, "root", "sleep 300")
    assert (known.memory_used_mib, known.container) == (3072, None)
    assert (unknown.pid, unknown.user, unknown.command) == (999999, None, None)


def test_the_parts_of_processes_that_share_a_gpu(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    two = "11:1024,12:1024"
    node.nvml_set({
        "gpu0.procs": two, "gpu0.proc_util": "11:70", "gpu1.procs": two, "gpu2.procs": two, "gpu2.proc_util": "",
        "gpu3.procs": "11:1024", "gpu3.proc_util": "11:70",
    })  # fmt: skip
    gpus = read(testbed, node).gpus
    parts = [[process.utilization_pct for process in gpu.processes] for gpu in gpus[:4]]
    assert parts[0] == [70.0, 0.0], "a process that did nothing is left out by NVML"
    assert parts[1] == [None, None], "not supported"
    assert parts[2] == [None, None], "nothing was found"
    assert parts[3] == [None], "of one process it is the GPU's"


def test_links_rank_nvlink_above_pcie(testbed: Testbed) -> None:
    v100 = read(testbed, testbed.nodes[1], want_links=True).gpus[0].links
    assert v100[3] > v100[1] > v100[2] > v100[5]  # two links; one, same switch; one; none
    a100 = read(testbed, testbed.nodes[0], want_links=True).gpus[0].links
    assert set(a100) == set(range(1, 8))
    assert min(a100.values()) > max(v100.values())  # all through NVSwitch


def test_wiring_is_read_with_the_links(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    node.nvml_set({"gpu2.fabric": f"{'0a' * 16},4,3", "gpu3.fabric": f"{'0a' * 16},4,2"})
    node.install_script("lldpctl", "#!/bin/sh\necho lldp.eth0.chassis.name=leaf1; echo '\\0=='")
    wiring = read(testbed, node, want_links=True).wiring
    assert wiring is not None
    assert [gpu.domain for gpu in wiring.gpus][1:4] == [None, "0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a.4", None]
    assert [gpu.index for gpu in wiring.gpus] == list(range(8))
    assert read(testbed, node).wiring is None


def test_without_nvml_nvidia_smi_is_asked(testbed: Testbed) -> None:
    node = testbed.nodes[1]
    node.hide_nvml()
    node.install_script("nvidia-smi", SMI)
    reading = read(testbed, node)
    assert reading.source == "nvidia-smi"
    assert (reading.gpus[0].power_w, reading.gpus[1].error) == (287.33, "nvidia-smi: GPU is lost")
    assert reading.gpus[0].processes[0].user == "root"


def test_without_nvml_and_nvidia_smi(testbed: Testbed) -> None:
    testbed.nodes[1].hide_nvml()
    reading = read(testbed, testbed.nodes[1])
    assert (reading.source, reading.gpus, reading.containers) == ("none", (), ())
    assert "there is no nvidia-smi" in str(reading.gpu_error)


def test_driver_not_loaded(testbed: Testbed) -> None:
    testbed.nodes[1].nvml_set({"init_error": 9})
    assert "Driver Not Loaded" in str(read(testbed, testbed.nodes[1]).gpu_error)


def test_no_python_on_the_node(testbed: Testbed) -> None:
    node = testbed.nodes[2]
    node.hide("python3")
    node.install_script("nvidia-smi", SMI)
    reading = read(testbed, node, times=2)
    assert reading.source == "nvidia-smi"
    assert reading.hostname == "dgx003"
    assert (reading.gpus[0].power_w, reading.gpus[0].processes[0].user) == (287.33, "root")
    assert reading.memory_total_mib
    assert (reading.containers, reading.runtime_error) == ((), None)


def test_python_that_comes_back_is_used(testbed: Testbed) -> None:
    node = testbed.nodes[2]
    declared, settings = declare(testbed, node), settings_for(testbed)
    with opened(declared, settings) as transport:
        node.hide("python3")
        assert probe(transport, declared, "c1", settings, time.time).source == "none"
        node.unhide("python3")
        probe(transport, declared, "c1", settings, time.time)
        assert probe(transport, declared, "c1", settings, time.time).source == "nvml"


def test_noisy_start_up_file(testbed: Testbed) -> None:
    node = testbed.nodes[3]
    (node.disk / "home" / ".bashrc").write_text("echo welcome; printf 'no newline'; echo oops >&2\n")
    assert read(testbed, node, times=2).source == "nvml"


def test_home_that_cannot_be_written(testbed: Testbed) -> None:
    node = testbed.nodes[3]
    node.run(["sh", "-c", "rm -rf /root/.cache && : >/root/.cache"])
    try:
        reading = read(testbed, node, times=2)
        assert (reading.source, reading.gpu_error) == ("nvml", None)
    finally:
        node.run(["rm", "-f", "/root/.cache"])


def test_cache_is_private_and_holds_compiled_files(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    node.run(["rm", "-rf", "/root/.cache/gpusched"])
    read(testbed, node, times=3)
    folders = list((node.disk / "home/.cache/gpusched").iterdir())
    assert len(folders) == 1
    assert folders[0].stat().st_mode & 0o777 == 0o700
    assert list((folders[0] / "__pycache__").glob("pynvml*.pyc"))


SPOILT = {
    "emptied": ": >main.py",
    "all emptied": "for f in *.py $top/pynvml.py; do : >$f; done",
    "one byte": "sed -i '1s/^./#/' nvml.py",
    "the library emptied": ": >$top/pynvml.py",
    "removed": "rm attempts.py engines.py",
    "a folder": "rm gpus.py; mkdir gpus.py",
    "half of ok": "sed -i 3,99d $top/ok",
    "nothing in ok": ": >$top/ok",
    "no ok": "rm $top/ok",
    "compiled ones cut off": "for f in __pycache__/*.pyc; do truncate -s 40 $f; done",
    "a compiled library cut off": "truncate -s 40 $top/__pycache__/pynvml*.pyc",
    "compiled ones of zeros": "for f in __pycache__/*.pyc; do truncate -s 16 $f; truncate -s 900 $f; done",
    "all at once": ": >main.py; rm $top/pynvml.py facts.py; for f in __pycache__/*; do truncate -s 20 $f; done",
    "cannot be written": ": >gpus.py; mount --bind $top/.. $top/..; mount -o remount,ro,bind $top/..",
}  # fmt: skip
"""Damage by a disk, or a power cut, to the cached payload."""


@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_cache_is_sent_again(testbed: Testbed, how: str) -> None:
    node = testbed.nodes[0]
    place = "top=$(echo /root/.cache/gpusched/probe-*); cd $top/gpusched/nodes/payload && "
    assert read(testbed, node, times=2, runtime=RuntimeName.PODMAN).source == "nvml"
    node.run(["sh", "-c", place + SPOILT[how]])
    try:
        reading = read(testbed, node, runtime=RuntimeName.PODMAN)
        assert (reading.source, reading.gpu_error, reading.runtime_error) == ("nvml", None, None)
        assert (len(reading.gpus), reading.containers) == (8, ())
        again = read(testbed, node, times=2, runtime=RuntimeName.PODMAN)
        assert (again.source, again.runtime_error) == ("nvml", None)
    finally:
        node.run(["sh", "-c", "umount /root/.cache/gpusched 2>/dev/null; :"])
    assert len(list((node.disk / "home/.cache/gpusched").iterdir())) == 1, "nothing is left behind"


def test_a_cache_that_goes_away_as_often_as_it_likes_costs_no_gpus(testbed: Testbed) -> None:
    node = testbed.nodes[1]
    declared, settings = declare(testbed, node), settings_for(testbed)
    place = "top=$(echo /root/.cache/gpusched/probe-*); cd $top/gpusched/nodes/payload && "
    with opened(declared, settings) as transport:
        for how in ("removed", "all emptied", "removed", "no ok"):
            assert probe(transport, declared, "c1", settings, time.time).source == "nvml"
            node.run(["sh", "-c", place + SPOILT[how]])
            assert probe(transport, declared, "c1", settings, time.time).source == "nvml"


def test_nodes_that_share_a_home_do_not_take_the_cache_from_each_other(testbed: Testbed, tmp_path: Path) -> None:
    shared = Path("/tmp") / f"gpusched-home-{tmp_path.name}-{time.monotonic_ns()}"
    shared.mkdir()
    nodes = testbed.nodes
    pairs = [(declare(testbed, node), settings_for(testbed)) for node in nodes]
    try:
        for node in nodes:
            node.run(["sh", "-c", f"mkdir -p /root/.cache && mount --bind {shared} /root/.cache"])
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(nodes)) as pool:
            for _ in range(3):
                transports = [stack.enter_context(opened(*pair)) for pair in pairs]  # each begins from nothing
                asked = [
                    pool.submit(probe, transport, declared, "c1", settings, time.time)
                    for transport, (declared, settings) in zip(transports, pairs, strict=True)
                ]
                readings = [future.result() for future in asked]
                assert [(r.source, r.gpu_error, r.runtime_error) for r in readings] == [("nvml", None, None)] * 4
                assert len(list((shared / "gpusched").iterdir())) == 1
                for file in shared.rglob("nvml.py"):
                    file.unlink()
    finally:
        for node in nodes:
            node.run(["sh", "-c", "umount /root/.cache 2>/dev/null; :"])
        shutil.rmtree(shared)


def test_a_payload_that_stays_spoilt_is_not_sent_with_every_probe(testbed: Testbed) -> None:
    """A library that Python cannot load whatever is done: nvidia-smi is asked, with one exec a probe."""
    node = testbed.nodes[1]
    declared, settings = declare(testbed, node), settings_for(testbed)
    forbid = "import sys; sys.modules['pynvml'] = None"
    wrapper = f'#!/bin/sh\ncode=$4; shift 4; exec /usr/bin/python3 -I -S -c "{forbid}; $code" "$@"\n'
    node.install_script("python3", wrapper)
    with opened(declared, settings) as inner:
        transport = Counting(inner)
        runs = []
        for _ in range(4):
            before = transport.runs
            reading = probe(transport, declared, "c1", settings, time.time)
            runs.append(transport.runs - before)
    assert reading.source == "none"
    assert runs[2:] == [1, 1]


def test_hanging_runtime_costs_only_the_containers(testbed: Testbed) -> None:
    node = testbed.nodes[0]
    node.hang_runtime("podman")
    began = time.monotonic()
    reading = read(testbed, node, runtime=RuntimeName.PODMAN)
    assert time.monotonic() - began < 500
    assert reading.containers is None
    assert reading.runtime_error
    assert len([g for g in reading.gpus if g.error is None]) == 8


def test_an_engine_that_takes_all_the_time_for_gpus_costs_none(testbed: Testbed) -> None:
    """They were read meanwhile, by a process of its own."""
    node, limit_s = testbed.nodes[0], 6.0
    request = _request(declare(testbed, node), "c1", settings_for(testbed, probe_timeout_s=limit_s), False)
    node.install_script("podman", f'#!/bin/sh\nsleep {request.deadline_s + 0.3}; exec /usr/bin/podman "$@"\n')
    reading = read(testbed, node, runtime=RuntimeName.PODMAN, probe_timeout_s=limit_s)
    assert (reading.source, reading.gpu_error) == ("nvml", None)
    assert [g.error for g in reading.gpus] == [None] * 8


@pytest.mark.parametrize("python", [True, False])
def test_attempts_and_their_processes(testbed: Testbed, python: bool) -> None:
    node = testbed.nodes[0]
    name = "gpusched-0abc-1-0"
    if not python:
        node.hide("python3")
        node.install_script("nvidia-smi", SMI.replace("'GPU-1, 1, 30990'", '"GPU-1, $(cat /root/job-pid), 30990"'))
    declared, settings = declare(testbed, node), settings_for(testbed)
    with opened(declared, settings) as transport:
        start = f"""export GPUSCHED_CONTAINER={name}
            setsid sleep 300 </dev/null >/dev/null 2>&1 & p=$!
            cd ~/.local/state/gpusched-node/c1/dgx001/{name}
            read -r a </proc/$p/stat; set -- $a; shift 21
            echo "$p $1" >pid; echo 1000 >started; echo $p >/root/job-pid; echo $p
            echo "boot=$(cat /proc/sys/kernel/random/boot_id)" >>meta; echo runtime=process >>meta"""
        transport.run(sh(f"mkdir -p ~/.local/state/gpusched-node/c1/dgx001/{name}"), 10)
        pid = int(transport.run(sh(start), 10).stdout)
        node.nvml_set({"gpu0.procs": f"{pid}:{1 << 30}"})
        reading = probe(transport, declared, "c1", settings, time.time)
    assert reading.containers is not None
    assert [(c.name, c.phase, c.started_at, c.pid) for c in reading.containers] == [(name, "running", 1000, pid)]
    process = reading.gpus[0].processes[0]
    assert (process.pid, process.user, process.container, process.command) == (pid, "root", name, "sleep 300")


def test_no_answer_from_a_shell_that_ends_the_session(testbed: Testbed) -> None:
    (testbed.nodes[3].disk / "home" / ".bashrc").write_text("echo 'account locked' >&2; exit 0\n")
    with pytest.raises(TransportError) as caught:
        read(testbed, testbed.nodes[3])
    assert caught.value.kind == "protocol"
    assert "account locked" in caught.value.reason


def test_frozen_node(testbed: Testbed) -> None:
    testbed.nodes[2].freeze()
    with pytest.raises(TransportError) as caught:
        read(testbed, testbed.nodes[2], probe_timeout_s=1.0)
    assert caught.value.kind == "timeout"


def test_simulated_gpus_are_busy_where_a_job_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    node = Node(name="sim", partition="p", address="x", transport="local", gpus=4, cores=1, memory_mib=1,
                runtime=RuntimeName.PROCESS, simulated_gpus=True)  # fmt: skip
    transport, settings = open_transport(node, Settings()), Settings()
    first = probe(transport, node, "c1", settings, time.time)
    assert (first.source, [g.name for g in first.gpus]) == ("simulated", ["Simulated A100-like"] * 4)
    assert [g.utilization_pct for g in first.gpus] == [0.0] * 4
    job = transport.run(sh("setsid sleep 300 </dev/null >/dev/null 2>&1 & p=$!; read -r a </proc/$p/stat; set -- $a; "
                           "shift 21; echo $p $1"), 10).stdout.decode().split()  # fmt: skip
    try:
        folder = tmp_path / "gpusched-node/c1/sim/gpusched-0abc-1-0"
        folder.mkdir(parents=True)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        (folder / "meta").write_text(f"runtime=process\ngpus=1,3\nhold=0\nboot={boot}\n")
        (folder / "pid").write_text(" ".join(job))
        (folder / "started").write_text("1000")
        second = probe(transport, node, "c1", settings, time.time)
    finally:
        transport.run(sh(f"kill {job[0]}"), 10)
    assert [bool(g.utilization_pct) for g in second.gpus] == [False, True, False, True]
    assert [round(g.power_w or 0) > 300 for g in second.gpus] == [False, True, False, True]
    assert second.gpus[1].processes[0].container == "gpusched-0abc-1-0"
    assert all((b.energy_j or 0) > (a.energy_j or 0) for a, b in zip(first.gpus, second.gpus, strict=True))


class Flooding(Counting):
    """A node whose account prints without end before, or instead of, what it is asked."""

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        return super().run(msgspec.structs.replace(script, argv=("cat", "/dev/zero"), stdin=b""), timeout_s)


def test_a_node_that_never_stops_talking_is_one_line() -> None:
    node = Node(
        name="here", partition="p", address="localhost", transport="local", gpus=0, cores=1, memory_mib=1,
        runtime=RuntimeName.PROCESS,
    )  # fmt: skip
    flooding = Flooding(open_transport(node, Settings()))
    with pytest.raises(TransportError, match="answered more than 16 MiB") as caught:
        probe(flooding, node, "c1", Settings(probe_timeout_s=60), time.time)
    assert caught.value.kind == "protocol"
    assert flooding.runs == 1
