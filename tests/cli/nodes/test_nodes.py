"""``gpusched nodes`` and ``flavors`` on a store written as the controller would."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from gpusched.model.events import Event
from gpusched.model.health import Condition, NodeHealth
from gpusched.model.jobs import JobState
from gpusched.model.readings import NodeState
from gpusched.queue.store import NodeRecord
from tests.cli.nodes.conftest import JOB_A, JOB_B, Cluster, gpu, job, reading, spec

NODE_KEYS = {"name", "partition", "state", "reason", "gpus_total", "gpus_free", "power_w", "gpus"}
GPU_KEYS = {
    "index", "uuid", "name", "state", "memory_total_mib", "memory_used_mib", "utilization_pct", "power_w",
    "power_limit_w", "temperature_c", "processes",
}  # fmt: skip


def test_json_has_the_keys_others_rely_on(living: Cluster) -> None:
    nodes = {n["name"]: n for n in living.json("nodes")}
    assert list(nodes) == ["dgx1", "dgx2", "here", "gone"]
    for node in nodes.values():
        assert node.keys() >= NODE_KEYS
        for one in node["gpus"]:
            assert one.keys() >= GPU_KEYS
    dgx1 = nodes["dgx1"]
    assert (dgx1["gpus_total"], dgx1["gpus_free"], dgx1["state"]) == (8, 2, "MIXED")
    states = [g["state"] for g in dgx1["gpus"]]
    assert states == ["ALLOCATED"] * 4 + ["BUSY", "LOST", "FREE", "FREE"]
    assert {(g["job"], g["user"]) for g in dgx1["gpus"][:4]} == {(JOB_A, "ann")}
    assert dgx1["gpus"][4]["reason"] == "foreign: pid 4711 (alice) python x.py"
    assert dgx1["gpus"][4]["processes"][0]["pid"] == 4711
    assert dgx1["gpus"][5]["reason"] == "GPU is lost"
    assert (dgx1["cores_free"], dgx1["cores_total"], dgx1["source"]) == (192, 256, "nvml")
    assert dgx1["last_seen"].endswith("Z")
    assert dgx1["rated_power_w"] == 6500


def test_unknown_is_null_never_zero(living: Cluster) -> None:
    nodes = {n["name"]: n for n in living.json("nodes")}
    unread = nodes["dgx1"]["gpus"][7]
    assert (unread["utilization_pct"], unread["power_w"], unread["temperature_c"]) == (None, None, None)
    gone = nodes["gone"]
    assert (gone["power_w"], gone["gpus_free"]) == (None, 0)
    assert {g["state"] for g in gone["gpus"]} == {"UNKNOWN"}


def test_leftovers_of_an_ended_attempt_are_busy(living: Cluster) -> None:
    (dgx2,) = living.json("nodes", "dgx2")
    assert dgx2["gpus_free"] == 7
    assert "0cccccccccc" in dgx2["gpus"][7]["reason"]


def test_simulated_figures_are_marked(living: Cluster) -> None:
    (here,) = living.json("nodes", "here")
    assert here["source"] == "simulated"
    assert "simulated" in living.run("nodes", "here").stdout
    assert "simulated" in living.run("nodes", "here", "-g").stdout


@pytest.mark.parametrize("width", [60, 80, 100, 160])
@pytest.mark.parametrize("detail", [(), ("-g",)])
def test_the_table_never_breaks_a_line(living: Cluster, width: int, detail: tuple[str, ...]) -> None:
    lines = living.screen("nodes", *detail, columns=width).splitlines()
    assert all(len(line) <= width for line in lines)
    rows = [line for line in lines if re.match(r"(dgx1|dgx2|here|gone) ", line)]
    assert len(rows) >= (20 if detail else 4)


def test_table_says_what_is_wrong(living: Cluster) -> None:
    shown = living.run("nodes").stdout
    assert "■■■■!✗□□" in shown
    assert "GPU 5 LOST" in shown
    assert "foreign: pid 4711 (alice)" in shown
    assert "no answer since 5 min: timed out; last seen 5 min ago" in shown
    assert "7.2 s behind the controller" in shown
    assert "ann ×4" in shown
    assert "warning" not in shown


def test_conditions_are_shown_with_their_start_and_remedy(cluster: Cluster) -> None:
    now = time.time()
    seen = {"since": now - 60, "last_seen": now}
    conditions = (
        Condition(kind="xid-gpu", gpu="GPU-3", index=3, detail="Xid 79 (gone)", stays=True, **seen),
        Condition(kind="pcie-width", gpu="GPU-5", index=5, detail="8 of 16 lanes", **seen),
        Condition(kind="xid-program", gpu="GPU-6", index=6, detail="Xid 31", job=JOB_A, **seen),
    )
    cluster.beat()
    cluster.store.put_nodes([
        NodeRecord(name=name, state=NodeState.IDLE, last_seen=now, health=NodeHealth(conditions=found),
                   reading=reading(name, now, tuple(gpu(i) for i in range(8))))
        for name, found in (("dgx1", conditions), ("dgx2", ()))
    ])  # fmt: skip
    pending = job(JOB_B, JobState.PENDING, {}, start_time=None, spec=spec("big", 2, 8))
    cluster.store.put_jobs([pending])
    (dgx1,) = cluster.json("nodes", "dgx1")
    assert dgx1["gpus_free"] == 7
    assert [g["state"] for g in dgx1["gpus"]] == ["FREE"] * 3 + ["UNUSABLE"] + ["FREE"] * 4
    assert [(c["condition"], c["gpu"], c["action"], c["job"]) for c in dgx1["conditions"]] == [
        ("xid-gpu", 3, "no-new-jobs", None), ("pcie-width", 5, "warn", None), ("xid-program", 6, "warn", JOB_A),
    ]  # fmt: skip
    assert dgx1["conditions"][0]["since"].endswith("Z")
    shown = " ".join(cluster.screen("nodes", "dgx1", columns=200).split())
    assert "GPU 3 xid-gpu Xid 79 (gone); since 20" in shown
    assert ", no-new-jobs; drain the node, and reset the GPU" in shown
    assert f"Xid 31; job {JOB_A}; since" in shown
    assert shown.count("Xid 79") == 1
    why = cluster.json("why", JOB_B)
    assert "7 of 8 GPUs free, needs 8 (1 UNUSABLE: Xid 79 (gone))" in [n["message"] for n in why["nodes"]]
    assert any("repair GPU 3 of dgx1 (UNUSABLE: Xid 79 (gone))" in step for step in why["next_steps"])


def test_why_names_the_error_that_a_program_made_on_a_gpu(living: Cluster) -> None:
    data = {"condition": "xid-program", "gpu": 2, "detail": "Xid 31 (memory page fault)", "action": "warn"}
    events = [Event(time=time.time(), kind="condition", node="dgx1", job_id=JOB_A, data=data)] * 2
    living.store.append(events)
    living.store.put_jobs([job(JOB_A, JobState.FAILED, {"dgx1": (0, 1, 2, 3)}, exit_code=1, end_time=time.time())])
    message = living.json("why", JOB_A)["message"]
    assert message == "its command exited with code 1; GPU 2 of dgx1: Xid 31 (memory page fault)"
    assert "Xid 31" in living.run("show", JOB_A).stdout


def test_drained_node_has_nothing_free(cluster: Cluster) -> None:
    now = time.time()
    cluster.store.put_nodes([
        NodeRecord(name="dgx1", state=NodeState.DRAINED, reason="fan", drain_reason="fan", last_seen=now,
                   reading=reading("dgx1", now, tuple(gpu(i) for i in range(8)))),
    ])  # fmt: skip
    (dgx1,) = cluster.json("nodes", "dgx1")
    assert (dgx1["gpus_free"], dgx1["reason"]) == (0, "fan")
    assert (dgx1["cores_free"], dgx1["memory_free_mib"]) == (0, 0)


def test_before_anything_was_read(cluster: Cluster) -> None:
    nodes = cluster.json("nodes")
    assert {n["state"] for n in nodes} == {"UNKNOWN"}
    assert {n["gpus_free"] for n in nodes} == {0}
    cluster.age()
    shown = cluster.run("nodes").stdout
    assert "warning: the controller has not run yet" in shown


def test_without_any_state_folder(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    cluster.state = tmp_path_factory.mktemp("none") / "state"
    assert len(cluster.json("nodes")) == 4
    assert cluster.json("power")["rows"][0]["utilization"] is None
    assert not cluster.state.exists()


def test_old_figures_are_marked(cluster: Cluster) -> None:
    then = time.time() - 3600
    cluster.store.set_meta("heartbeat", str(then))
    cluster.store.put_nodes([
        NodeRecord(name="dgx2", state=NodeState.IDLE, last_seen=then,
                   reading=reading("dgx2", then, tuple(gpu(i) for i in range(8)))),
    ])  # fmt: skip
    cluster.age()
    shown = cluster.run("nodes", "dgx2").stdout
    assert "the controller is not running" in shown
    assert "last seen 1 h ago" in shown


@pytest.mark.parametrize(
    "argv", [("nodes", "dgx9"), ("nodes", "-p", "A10"), ("flavors", "-p", "x"), ("power", "-p", "x")]
)
def test_unknown_names_are_usage_errors(living: Cluster, argv: tuple[str, ...]) -> None:
    done = living.run(*argv, code=2)
    assert done.stdout == ""
    assert re.fullmatch(r"gpusched: error: there is no (node|partition) .*\n", done.stderr)
    assert "error" in living.json(*argv, code=2)


def test_hostile_text_does_not_reach_the_terminal(cluster: Cluster) -> None:
    now = time.time()
    cluster.store.put_nodes([
        NodeRecord(name="dgx1", state=NodeState.IDLE, last_seen=now, reason="\x1b[2J[red]x[/red]\nnew",
                   reading=reading("dgx1", now, (gpu(0, name="\x1b]0;x\x07", error="[bold]\x1b[31mlost"),))),
    ])  # fmt: skip
    for detail in ((), ("-g",)):
        shown = cluster.run("nodes", "dgx1", *detail).stdout
        assert "\x1b" not in shown
        assert r"\x1b[2J[red]x[/red]\nnew" in shown


def test_flavors(living: Cluster) -> None:
    rows = {r["flavor"]: r for r in living.json("flavors")}
    assert (rows["s-A100"]["share"], rows["s-A100"]["nodes"], rows["s-A100"]["free_now"]) == (0.125, 1, 4)
    assert (rows["f-A100"]["share"], rows["f-A100"]["nodes"], rows["f-A100"]["free_now"]) == (1.0, 2, 0)
    assert rows["one"]["free_now"] == 0
    assert "FREE NOW" in living.run("flavors", "-p", "A100").stdout


def test_nothing_heavy_is_imported(living: Cluster) -> None:
    code = (
        "import sys; from gpusched.cli.main import run; codes = [run(['nodes']), run(['power']), run(['flavors'])];"
        "heavy = {'paramiko', 'numpy', 'numba', 'pynvml'} & set(sys.modules); sys.exit(str(heavy or '') or sum(codes))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=living.env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
