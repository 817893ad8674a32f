"""GPUs that are taken, lost or used; energy charged to who used it; jobs on several nodes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.conftest import WAIT, Cluster
from tests.testbed import wait_until

pytestmark = pytest.mark.slow

T = TypeVar("T")


@pytest.fixture
def figures(house: Cluster) -> Iterator[Cluster]:
    """The house; what NVML said is undone afterwards."""
    yield house
    for node in house.testbed.nodes:
        node.nvml_reset()
    wait_until(lambda: all(n["gpus_free"] == 8 for n in house.nodes().values()), 20, "all GPUs to be free")


def gpu(cluster: Cluster, node: str, index: int) -> dict[str, Any]:
    return dict(cluster.nodes()[node]["gpus"][index])


def wait_for_reading(cluster: Cluster, node: str, look: Callable[[], T], what: str) -> T:
    """Wait for something that only a reading of the node can bring; a command line for each reading is enough."""
    read: list[float | None] = []

    def looked() -> T | None:
        with cluster.reader() as reader:
            assert reader is not None
            last = reader.node_records()[node].last_seen
        if read[-1:] == [last]:
            return None
        read.append(last)
        return look()

    found = wait_until(looked, 20, what)
    assert found is not None
    return found


def wait_gpu(cluster: Cluster, node: str, index: int, state: str) -> dict[str, Any]:
    def there() -> dict[str, Any] | None:
        found = gpu(cluster, node, index)
        return found if found["state"] == state else None

    found = wait_for_reading(cluster, node, there, f"GPU {index} to be {state}")
    assert found is not None
    return found


def test_a_strangers_gpu_is_busy_and_a_lost_one_lost_while_the_others_work(figures: Cluster, share: Path) -> None:
    a, b = figures.node("dgx001"), figures.node("dgx003")
    pid = int(a.run(["sh", "-c", "setsid sleep 300 </dev/null >/dev/null 2>&1 & echo $!"]).stdout)
    a.nvml_set({"gpu0.procs": f"{pid}:{3 << 30}"})
    b.nvml_set({"gpu3.error": 15})
    busy, lost = wait_gpu(figures, "dgx001", 0, "BUSY"), wait_gpu(figures, "dgx003", 3, "LOST")
    assert str(pid) in busy["reason"]
    assert "root" in busy["reason"]
    assert "sleep 300" in busy["reason"]
    assert [(p["pid"], p["user"]) for p in busy["processes"]] == [(pid, "root")]
    assert "lost" in lost["reason"].lower()
    assert (lost["utilization_pct"], lost["power_w"], lost["memory_used_mib"]) == (None, None, None)
    nodes = figures.nodes()
    assert [(nodes[n]["state"], nodes[n]["gpus_free"]) for n in ("dgx001", "dgx003")] == [("IDLE", 7), ("IDLE", 7)]
    assert "GPU 3 LOST" in nodes["dgx003"]["reason"]
    assert nodes["dgx003"]["power_w"] == 7 * 55

    seven = [
        figures.sh(WAIT, "--gpus", "7", "--nodelist", n, "--mount", f"{share}:/share") for n in ("dgx001", "dgx003")
    ]
    gpus = [figures.wait_state(j, "RUNNING").allocation.parts[0].gpus for j in seven]  # type: ignore[union-attr]
    assert gpus == [(1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 4, 5, 6, 7)]
    eight = [figures.submit("--gpus", "8", "--nodelist", n) for n in ("dgx001", "dgx003")]
    wait_until(lambda: all((j := figures.job(i)) and j.reason == "ReqNodeNotAvail" for i in eight), what="reasons")
    why = json.dumps([figures.json("why", j) for j in eight])
    for said in (f"pid {pid} (root)", "GPU 3 of dgx003", "end the foreign process on GPU 0 of dgx001"):
        assert said in why
    a.nvml_reset()
    b.nvml_reset()
    (share / "go").touch()
    for job in (*seven, *eight):
        figures.wait_state(job, "COMPLETED")
    with figures.reader() as reader:
        assert reader is not None
        assert [e.kind for e in reader.events(node="dgx003") if e.kind.startswith("gpu_")] == ["gpu_lost", "gpu_back"]


def test_a_job_is_charged_its_own_gpus_energy_and_no_others(cluster: Cluster, share: Path) -> None:
    node = cluster.node("dgx001")
    job = cluster.sh(WAIT, "--gpus", "1", "--nodelist", "dgx001", "--mount", f"{share}:/share", "-J", "burn")
    part = cluster.wait_state(job, "RUNNING").allocation.parts[0]  # type: ignore[union-attr]
    (own,) = part.gpus
    form = ["/usr/bin/podman", "inspect", "--format", "{{.State.Pid}}", f"gpusched-{job}-1-0"]
    pid = int(node.run(form).stdout)
    node.nvml_set({f"gpu{own}.procs": f"{pid}:{1 << 30}", f"gpu{own}.util_gpu": 80})
    for step in (1, 2):
        more = {g: 2_500_000 * step if g == own else 3_500_000 * step for g in range(8)}
        node.nvml_set({f"gpu{g}.energy_mj": 1_000_000 * (g + 1) + mj for g, mj in more.items()})
        if step == 2:  # one reading without figures loses no joules: the counter went on
            node.nvml_set({f"gpu{own}.error": 999})
            wait_gpu(cluster, "dgx001", own, "LOST")
            node.nvml_set({f"gpu{own}.error": 0})
        joules = 1000.0 * (own + 1) + 2500 * step
        wait_for_reading(
            cluster, "dgx001", lambda joules=joules: gpu(cluster, "dgx001", own)["energy_j"] == joules, "the counter"
        )
    mine = gpu(cluster, "dgx001", own)
    assert (mine["state"], mine["reason"], mine["job"], mine["user"]) == ("ALLOCATED", "", job, "root")
    assert [p["container"] for p in mine["processes"]] == [f"gpusched-{job}-1-0"]
    assert cluster.json("status", job)[0]["energy_j"] == pytest.approx(5000)
    (share / "go").touch()
    cluster.wait_state(job, "COMPLETED")
    assert cluster.json("show", job)["energy_j"] == pytest.approx(5000)
    cluster.wait_clean()
    rows = {by: {r["name"]: r for r in cluster.json("power", "--since", "1h", "--by", by)["rows"]} for by in
            ("job", "user", "node", "partition")}  # fmt: skip
    kwh = 5000 / 3.6e6
    everything = kwh + 7 * 7000 / 3.6e6
    assert rows["job"][job]["energy_kwh"] == pytest.approx(kwh)
    assert rows["user"]["root"]["energy_kwh"] == pytest.approx(kwh)
    assert rows["node"]["dgx001"]["energy_kwh"] == pytest.approx(everything)
    assert rows["partition"]["A100"]["energy_kwh"] == pytest.approx(everything)
    assert rows["partition"]["V100"]["energy_kwh"] == pytest.approx(0)
    assert rows["job"][job]["cost"] == pytest.approx(kwh * 0.30)
    assert 0 < rows["job"][job]["measured_utilization"] <= 0.8
    report = cluster.json("power", "--since", "1h")
    assert report["unheld_kwh"] == pytest.approx(7 * 7000 / 3.6e6)
    assert (report["currency"], report["price_per_kwh"]) == ("EUR", 0.30)
    assert "burn" not in cluster.cli("power", "--by", "node").stdout
    assert job in cluster.cli("power", "--by", "job").stdout


@pytest.mark.one_partition
def test_two_jobs_share_gpus_and_the_end_of_one_leaves_the_other_alone(stopped: Cluster, share: Path) -> None:
    pipe = share / "mps"
    sharing = {"mode": "mps", "slowdown": 0.9, "pipe": str(pipe)}
    stopped.write_inventory(nodes={"dgx001": {"sharing": sharing}})
    pipe.mkdir()
    stopped.start_controller()
    node = stopped.node("dgx001")
    asked = ("--nodelist", "dgx001", "--cpus", "2", "--mem", "256M", "--share", "pairs", "--gpu-mem", "20G",
             "--mount", f"{share}:/share")  # fmt: skip
    first = stopped.sh(f"trap 'exit 3' TERM; {WAIT}", *asked, "--gpus", "8", "-J", "first")
    held = stopped.wait_state(first, "RUNNING").allocation
    second = stopped.sh(f"env >/share/e && mv /share/e /share/env; {WAIT}", *asked, "--gpus", "2", "-J", "second")
    alone = stopped.sh(WAIT, "--gpus", "1", "--nodelist", "dgx001", "--mount", f"{share}:/share")
    beside = stopped.wait_state(second, "RUNNING").allocation
    assert held is not None
    assert beside is not None
    assert (held.parts[0].gpus, beside.parts[0].gpus) == (tuple(range(8)), (0, 1))
    text = wait_until(lambda: (p := share / "env").exists() and p, 20, "its environment").read_text()
    env = dict(line.split("=", 1) for line in text.splitlines())
    assert env["CUDA_MPS_PIPE_DIRECTORY"] == str(pipe)
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M,1=20480M"
    assert stopped.wait_state(alone, "PENDING").allocation is None

    form = ["/usr/bin/podman", "inspect", "--format", "{{.State.Pid}}"]
    pids = [int(node.run([*form, f"gpusched-{job}-1-0"]).stdout) for job in (first, second)]
    node.nvml_set({"gpu1.procs": ",".join(f"{pid}:{1 << 30}" for pid in pids)})
    wait_for_reading(stopped, "dgx001", lambda: len(gpu(stopped, "dgx001", 1)["processes"]) == 2, "both processes")
    both = gpu(stopped, "dgx001", 1)
    assert (both["state"], both["reason"], {both["job"], both["shared_with"]}) == ("ALLOCATED", "", {first, second})
    assert gpu(stopped, "dgx001", 2)["shared_with"] is None
    assert stopped.json("status", first)[0]["shared_with"] == second
    assert f"GPUs 0-1 of dgx001 with job {first} (first of root)" in stopped.cli("show", second).stdout
    stopped.kill_controller()
    stopped.start_controller()
    assert [stopped.state_of(job) for job in (first, second, alone)] == ["RUNNING", "RUNNING", "PENDING"]
    before = gpu(stopped, "dgx001", 1)["energy_j"]
    node.nvml_set({"gpu1.energy_mj": int(1000 * before) + 8_000_000})
    wait_for_reading(stopped, "dgx001", lambda: gpu(stopped, "dgx001", 1)["energy_j"] == before + 8000, "the counter")

    node.run(["/usr/bin/podman", "kill", f"gpusched-{second}-1-0"])
    stopped.wait_state(second, "FAILED")
    assert stopped.state_of(first) == "RUNNING"
    assert gpu(stopped, "dgx001", 1)["shared_with"] is None
    energies = [stopped.json("show", job)["energy_j"] for job in (first, second)]
    assert energies[1] == pytest.approx(4000)
    assert sum(energies) == pytest.approx(8000)
    (share / "go").touch()
    for job in (first, alone):
        stopped.wait_state(job, "COMPLETED")


def test_a_gang_starts_together_meets_and_ends_together(house: Cluster, share: Path) -> None:
    gate = share / "gate"
    slow = f'if [ "$1" = create ]; then until [ -e {gate} ]; do sleep 0.05; done; fi'
    wrapper = f'#!/bin/sh\n{slow}\nexec /usr/bin/podman "$@"\n'
    house.node("dgx003").install_script("podman", wrapper)
    script = f"""trap 'echo >/share/asked$RANK; exit 0' TERM
cat /proc/$$/environ >/share/env$RANK; cat "$GPUSCHED_HOSTFILE" >/share/hosts$RANK; echo "I am $RANK"
if [ $RANK = 0 ]; then (while :; do echo "from 0" | nc -l -p $MASTER_PORT; done) &
else
    until got=$(nc $MASTER_ADDR $MASTER_PORT 2>/dev/null) && [ -n "$got" ]; do sleep 0.1; done
    echo "$got" >/share/met
fi
if [ $RANK = 1 ]; then {WAIT}; exit 6; fi
while :; do sleep 0.1; done"""
    gang = house.sh(script, "-F", "f-A100", "--mount", f"{share}:/share", "-J", "gang")
    lonely = house.submit("-p", "V100", "--gpus", "1")  # not delayed by the slow one
    house.wait_state(lonely, "COMPLETED")
    first = f"gpusched-{gang}-1-0"
    wait_until(lambda: any(name == first for _, name in house.containers(running=False)), 20, "rank 0's container")
    assert house.state_of(gang) == "STARTING"
    assert list(share.glob("env*")) == []  # rank 0 is ready, and waits for rank 1
    gate.touch()
    running = house.wait_state(gang, "RUNNING")
    wait_until((share / "met").exists, 20, "the ranks to meet")
    assert (share / "met").read_text() == "from 0\n"
    assert running.allocation is not None
    names = [p.node for p in running.allocation.parts]
    assert sorted(names) == ["dgx001", "dgx003"]
    addresses = [house.node(n).address for n in names]
    hosts = "".join(f"{a} slots=8\n" for a in addresses)
    for rank in (0, 1):
        env = dict(i.split("=", 1) for i in (share / f"env{rank}").read_text().split("\0")[:-1])
        expected = {
            "RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2",
            "MASTER_ADDR": addresses[0],
            "GPUSCHED_NODELIST": ",".join(names), "SLURM_NNODES": "2", "SLURM_NODEID": str(rank),
            "SLURMD_NODENAME": names[rank],
            "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "MASTER_PORT": str(running.master_port),
        }  # fmt: skip
        assert {k: env.get(k) for k in expected} == expected
        assert (share / f"hosts{rank}").read_text() == hosts
    assert sorted(house.logs(gang).splitlines()) == ["[0] I am 0", "[1] I am 1"]
    assert house.logs(gang, "--rank", "1") == "I am 1\n"
    done = house.cli("exec", "--rank", "1", gang, "--", "sh", "-c", "echo $RANK")
    assert done.stdout == "1\n"
    (share / "go").touch()
    failed = house.wait_state(gang, "FAILED")
    assert (failed.exit_code, failed.reason) == (6, "NonZeroExitCode")
    assert "rank 1" in failed.message
    assert (share / "asked0").exists()  # the other was asked to end, and did
    house.wait_clean()
    assert sorted(house.logs(gang).splitlines()) == ["[0] I am 0", "[1] I am 1"]
    assert house.json("show", gang)["nodes"] == names


def listeners(cluster: Cluster, name: str) -> list[int]:
    """The machine's ids of the processes on a node that wait for NVML's events."""
    found = []
    for pid in cluster.node(name).pids():
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/comm").read_text() == "gpusched-xids\n":
                found.append(pid)
    return found


def test_an_xid_that_no_log_has_is_shown_and_a_drained_node_can_reset_its_gpus(figures: Cluster) -> None:
    node = figures.node("dgx002")
    (files,) = wait_until(lambda: list((node.disk / "home").rglob("xid-listener")), 30, "the listener's lock")
    wait_until(lambda: files.read_text(), 30, "a listener")
    node.nvml_set({"gpu5.xid": "1:48"})
    found = wait_gpu(figures, "dgx002", 5, "UNUSABLE")
    assert found["reason"] == "Xid 48 (uncorrectable memory error)"
    assert len(listeners(figures, "dgx002")) == 1
    figures.cli("drain", "dgx002", "--reason", "reset GPU 5")
    wait_until(lambda: not listeners(figures, "dgx002"), 30, "nothing to have the GPUs open")
    figures.cli("resume", "dgx002")
    wait_gpu(figures, "dgx002", 5, "FREE")
    wait_until(lambda: listeners(figures, "dgx002"), 30, "a listener again")
