"""The findings of the examination on a node's answers, without a node."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from gpusched.doctor.findings import Finding
from gpusched.doctor.judge import judge_gpus, judge_health, judge_host, judge_runtime
from gpusched.model.health import Condition, HealthAction
from gpusched.model.readings import Gpu, GpuHealth, GpuProcess, KernelLog, NodeReading
from gpusched.model.resources import Node, RuntimeName, SharingSettings
from gpusched.nodes.inspection import Inspection, RuntimeFacts, inspection_script, parse_inspection

NODE = Node(name="n", partition="p", address="n", gpus=2, cores=8, memory_mib=8192, runtime=RuntimeName.PODMAN)
PODMAN = RuntimeFacts(name="podman", version="4.3.1", disk_free_mib=90000, cdi=True)
SEEN = Inspection(user="u", uid=1000, home="/home/u", home_free_mib=90000, python3="3.11.2", runtimes=(PODMAN,))
GPUS = tuple(Gpu(index=i, name="NVIDIA A100-SXM4-80GB", ecc_errors=0, mig_mode=False) for i in range(2))
READING = NodeReading(
    node="n", time=0.0, source="nvml", gpus=GPUS, cores=8, memory_total_mib=8192, clock_skew_s=0.1, driver_version="535"
)


def node(**changes: object) -> Node:
    return msgspec.structs.replace(NODE, **changes)


def seen(**changes: object) -> Inspection:
    return msgspec.structs.replace(SEEN, **changes)


def reading(**changes: object) -> NodeReading:
    return msgspec.structs.replace(READING, **changes)


def with_gpu(**changes: object) -> NodeReading:
    return reading(gpus=(GPUS[0], msgspec.structs.replace(GPUS[1], **changes)))


def podman(**changes: object) -> Inspection:
    return seen(runtimes=(msgspec.structs.replace(PODMAN, **changes),))


def judge(n: Node = NODE, s: Inspection = SEEN, r: NodeReading = READING) -> list[Finding]:
    return [*judge_host(n, s), *judge_gpus(n, r, s), *judge_runtime(n, s, r)]


def test_all_is_well() -> None:
    assert {f.check: f.status for f in judge()} == dict.fromkeys(("disk", "nvml", "gpus", "clock", "runtime"), "ok")


FAKE = {"python3": None}
SERVER = "nvidia-cuda-mps-server"
DOCKER = RuntimeFacts(name="docker", version="20.10.24", toolkit=False)
CASES = [
    (NODE, seen(noise="hi"), READING, "shell", "warn", "hi"),
    (NODE, seen(**FAKE), READING, "python3", "warn", "nvidia-smi"),
    (
        node(sharing=SharingSettings(mode="mps", pipe="/run/mps")),
        SEEN,
        READING,
        "mps",
        "fail",
        "no control daemon's pipe in /run/mps",
    ),
    (NODE, seen(home_error="Read-only file system"), READING, "home", "fail", "Read-only"),
    (NODE, seen(home_free_mib=4000), READING, "disk", "warn", "4000M"),
    (NODE, seen(home_free_mib=10), READING, "disk", "fail", "10M"),
    (NODE, seen(linger=False), READING, "logout", "warn", "rootless"),
    (
        node(runtime=RuntimeName.PROCESS),
        seen(linger=False, kill_user_processes=True),
        READING,
        "logout",
        "fail",
        "logind",
    ),
    (NODE, SEEN, reading(clock_skew_s=-3.0), "clock", "warn", "3.0 s behind"),
    (NODE, SEEN, reading(clock_skew_s=31.0), "clock", "fail", "31.0 s ahead"),
    (NODE, SEEN, reading(cores=4), "cores", "fail", "4 found"),
    (NODE, SEEN, reading(memory_total_mib=8000), "memory", "warn", "8G of memory declared"),
    (NODE, SEEN, reading(memory_total_mib=4096), "memory", "fail", "4G found"),
    (NODE, SEEN, reading(source="none", gpus=(), gpu_error=None), "nvml", "fail", "nvidia-smi found"),
    (NODE, SEEN, reading(source="nvidia-smi"), "nvml", "warn", "parsing"),
    (NODE, SEEN, reading(source="simulated"), "nvml", "warn", "simulated"),
    (NODE, SEEN, reading(gpus=GPUS[:1]), "gpus", "fail", "GPU 1 is declared but missing (1 found)"),
    (node(gpus=1), SEEN, READING, "gpus", "warn", "1 declared, 2 found"),
    (NODE, SEEN, with_gpu(error="GPU is lost"), "gpus", "fail", "GPU 1 is lost: GPU is lost"),
    (NODE, SEEN, with_gpu(ecc_errors=3), "ecc", "fail", "3 uncorrected"),
    (NODE, SEEN, with_gpu(processes=(GpuProcess(pid=7, user="eve"),)), "foreign", "warn", "pid 7 of eve"),
    (node(gpu_type="H100"), SEEN, READING, "gpu type", "warn", "A100-SXM4"),
    (NODE, seen(runtimes=()), READING, "runtime", "fail", "not installed"),
    (NODE, podman(error="boom"), READING, "runtime", "fail", "boom"),
    (NODE, podman(version="3.4.4"), READING, "runtime", "fail", "3.4.4"),
    (NODE, podman(cdi=False), READING, "cdi", "fail", "CDI"),
    (NODE, podman(disk_free_mib=100), READING, "images", "fail", "100M"),
    (NODE, podman(controllers=("memory", "pids")), READING, "limits", "fail", "limit cpu here"),
    (NODE, SEEN, reading(runtime_error="podman ps: hung"), "runtime", "fail", "hung"),
    (node(runtime=RuntimeName.DOCKER), seen(runtimes=(DOCKER,)), READING, "toolkit", "fail", "docker cannot give GPUs"),
]


@pytest.mark.parametrize(("n", "s", "r", "check", "status", "words"), CASES)
def test_one_thing_is_wrong(n: Node, s: Inspection, r: NodeReading, check: str, status: str, words: str) -> None:
    bad = [f for f in judge(n, s, r) if f.status != "ok"]
    assert [(f.check, f.status) for f in bad] == [(check, status)]
    assert words in bad[0].message
    assert bad[0].hint
    assert bad[0].subject == "n"


@pytest.mark.parametrize(
    ("n", "r"),
    [
        (node(gpus=0), reading(source="none", gpus=())),
        (node(gpus=1, gpu_indices=(1,)), reading(gpus=(msgspec.structs.replace(GPUS[0], error="lost"), GPUS[1]))),
        (node(gpu_type="A100-80GB"), READING),
        (NODE, with_gpu(processes=(GpuProcess(pid=7, container="gpusched-0-1-0"),))),
        (node(sharing=SharingSettings(mode="mps")), with_gpu(processes=(GpuProcess(pid=7, command=SERVER),))),
        (node(sharing=SharingSettings(mode="time-slicing")), READING),
    ],
)
def test_nothing_is_wrong(n: Node, r: NodeReading) -> None:
    assert [f for f in judge(n, seen(mps=n.sharing is not None), r) if f.status != "ok"] == []


@pytest.mark.parametrize("there", [True, False])
def test_the_pipe_of_mps_is_looked_for(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "control").touch()
    asked = inspection_script((), str(tmp_path))
    done = subprocess.run(asked.argv, input=asked.stdin, capture_output=True, check=True)
    found = parse_inspection(done.stdout)
    assert found is not None
    assert found.mps is there


def test_flock_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = inspection_script(())
    monkeypatch.setenv("HOME", str(tmp_path))
    script = asked.stdin.replace(b"has flock", b"has no-such-flock")
    for text, there in ((asked.stdin, True), (script, False)):
        found = parse_inspection(subprocess.run(asked.argv, input=text, capture_output=True, check=True).stdout)
        assert found is not None
        assert found.flock is there
    (finding,) = (f for f in judge_host(NODE, seen(flock=False)) if f.check == "flock")
    assert (finding.status, finding.hint) == ("fail", "install util-linux on the node")


def test_inspection_is_parsed() -> None:
    assert inspection_script(("podman",)).argv == ("sh", "-s", "--", "podman")
    output = (
        b"Welcome!\ngpusched-inspection-begin\nuser=u\nuid=1000\nhome=/home/u\nhome_free_kib=2048\npython3=3.11.2\n"
        b"product=DGXA100 920\ncdi=yes\nlinger=no\nkill_user_processes=true\npodman.version=4.3.1\n"
        b"podman.free_kib=1024\npodman.controllers=[cpu memory]\ndocker.error=a = b\n"
        b"runtimes= podman docker\ngpusched-inspection-end\n"
    )
    assert parse_inspection(output) == Inspection(
        noise="Welcome!",
        user="u",
        uid=1000,
        home="/home/u",
        home_free_mib=2,
        python3="3.11.2",
        product="DGXA100 920",
        kill_user_processes=True,
        linger=False,
        runtimes=(
            RuntimeFacts(name="podman", version="4.3.1", disk_free_mib=1, cdi=True, controllers=("cpu", "memory")),
            RuntimeFacts(name="docker", error="a = b", cdi=True),
        ),
    )
    for broken in (b"", b"This account is disabled\n", output[:60], b"\xff\xfe"):
        assert parse_inspection(broken) is None


def test_conditions_and_a_log_that_cannot_be_read() -> None:
    since = 1_800_000_000.0
    conditions = (
        Condition(kind="xid-gpu", gpu="u3", index=3, since=since, last_seen=since, detail="Xid 48 (x)", stays=True),
        Condition(kind="pcie-width", gpu="u1", index=1, since=since, last_seen=since, detail="PCIe with 8 of 16 lanes"),
        Condition(kind="nvswitch", since=since, last_seen=since, detail="SXid 20034"),
    )
    found = judge_health(node(health={"nvswitch": HealthAction.WARN}), conditions, reading(kernel=KernelLog()))
    assert [(f.check, f.status) for f in found] == [
        ("health", "fail"), ("health", "warn"), ("health", "warn"), ("kernel log", "warn"),
    ]  # fmt: skip
    assert found[0].message.startswith("GPU 3: Xid 48 (x) since 20")
    assert found[0].message.endswith("(xid-gpu: no-new-jobs)")
    assert found[2].message.startswith("SXid 20034 since ")
    assert all(f.hint for f in found)
    assert judge_health(NODE, (), reading(kernel=KernelLog(source="kernel"))) == []


def test_check_finds_what_one_reading_proves_without_a_controller() -> None:
    health = GpuHealth(remap_failed=True, pcie_width=8, pcie_width_max=16)
    sick = with_gpu(health=health, ecc_errors=1)
    assert [(f.check, f.status) for f in judge_health(NODE, (), sick)] == [("health", "fail")]  # lanes may waver
    (gpu,) = (gpu for gpu in sick.gpus if gpu.health is not None)
    known = Condition(kind="remap-failed", gpu=gpu.uuid, index=gpu.index, since=1e9, last_seen=1e9, detail="known")
    (found,) = judge_health(NODE, (known,), sick)
    assert "known since" in found.message
