"""``place: milp`` and ``place: fastest`` in live decisions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from gpusched.model.plan import ReasonCode
from gpusched.model.policy import MAPPED, Mapping, PolicySpec
from gpusched.model.snapshot import Snapshot
from gpusched.policies import load_policy
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.tally import plain_order
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, snapshots, started

SPEEDS = {"cnn*": {"A100": 1.0, "V100": 0.9, "K80": 0.5}, "*": {"A100": 1.0, "V100": 0.5, "K80": 0.1}}
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def mapped(snap: Snapshot, place: str = "milp", **more: object) -> Snapshot:
    mapping = Mapping(**{"speeds": SPEEDS, **more})  # type: ignore[arg-type]
    policies = {k: msgspec.structs.replace(p, place=place, mapping=mapping) for k, p in snap.policies.items()}
    return msgspec.structs.replace(snap, policies=policies)


@pytest.mark.parametrize("place", MAPPED)
@QUICK
@given(snapshots())
def test_plans_are_sound(place: str, snap: Snapshot) -> None:
    snap = mapped(snap, place)
    plan = decide(snap)
    _, rejections = check(plan, snap)
    assert rejections == ()
    assert {*started(plan), *plan.reasons} == {job.id for job in snap.pending}


@QUICK
@given(snapshots(simple=True))
def test_nobody_overtakes_whom_the_order_protects(snap: Snapshot) -> None:
    """Without backfill: a prefix of the queue. With EASY: the head's start is no later than its reservation."""
    snap = mapped(snap)
    plan = decide(snap)
    queue = [j.id for j in plain_order(snap, "p") if plan.reasons.get(j.id, None) is None or _could_run(plan, j.id)]
    starts = started(plan)
    if snap.policies["p"].backfill == "none":
        flags = [job in starts for job in queue]
        assert flags == sorted(flags, reverse=True)
    if snap.policies["p"].backfill == "easy":
        prefix = next((i for i, job in enumerate(queue) if job not in starts), len(queue))
        if prefix < len(queue):
            only = msgspec.structs.replace(plan, actions=tuple(a for a in plan.actions if a.job_id in queue[:prefix]))
            assert _earliest(after(snap, plan), queue[prefix]) <= _earliest(after(snap, only), queue[prefix]) + 1e-6


def _could_run(plan: object, job: str) -> bool:
    return plan.reasons[job].code != ReasonCode.BAD_CONSTRAINTS  # type: ignore[attr-defined]


def _earliest(snap: Snapshot, job_id: str) -> float:
    """When the job fits at the latest, by the limits; 0: now."""
    from gpusched.sched.tally import counts_of, earliest

    job = next(j for j in snap.pending if j.id == job_id)
    found = earliest(snap, job, counts_of(snap))
    return found[0] if found else 0.0


@QUICK
@given(snapshots())
def test_explain_agrees(snap: Snapshot) -> None:
    snap = mapped(snap, "fastest")
    plan = decide(snap)
    if plan.actions:
        return
    for job, reason in plan.reasons.items():
        assert explain(snap, job).reason.code == reason.code, job


NODES = [node("a", gpus=2, gpu_type="A100"), node("v", gpus=2, gpu_type="V100"), node("k", gpus=2, gpu_type="K80")]


def test_who_loses_least_goes_to_the_slower_gpus() -> None:
    """The first in the queue would be taken by the A100 greedily; the second loses far more without it."""
    jobs = [pending("j1", 2, submit=1.0, name="cnn-1"), pending("j2", 2, submit=2.0, name="llm-1")]
    snap = snapshot(NODES[:2], jobs, backfill="skip")
    assert {j: w[0][0] for j, w in started(decide(mapped(snap, "fastest"))).items()} == {"j1": "a", "j2": "v"}
    plan = decide(mapped(snap))
    assert {j: w[0][0] for j, w in started(plan).items()} == {"j1": "v", "j2": "a"}
    assert plan.remarks["p"].startswith("2 of 2 jobs mapped, worth 0.8 GPUs more than greedily")


def test_a_job_waits_for_gpus_it_is_not_crippled_on_and_says_so() -> None:
    jobs = [pending("j1", 2, name="llm"), pending("j2", 2, name="cnn", submit=2.0)]
    nodes = [*NODES[:2], node("k", gpus=4, gpu_type="K80")]
    snap = mapped(snapshot(nodes, jobs, [running("r", {"a": (0, 1), "v": (0, 1)}, NOW + 60)], backfill="skip"))
    plan = decide(snap)
    assert {j: w[0][0] for j, w in started(plan).items()} == {"j2": "k"}
    assert plan.reasons["j1"].code == ReasonCode.POLICY
    assert "runs faster" in plan.reasons["j1"].message
    assert explain(snap, "j1").reason.message == plan.reasons["j1"].message
    lower = mapped(snap, floor=0.05)
    assert {j: w[0][0] for j, w in started(decide(lower)).items()} == {"j1": "k", "j2": "k"}


def test_where_the_head_blocks_it_takes_what_there_is() -> None:
    jobs = [pending("j1", 2, name="llm"), pending("j2", 2, name="cnn", submit=2.0)]
    snap = snapshot(NODES, jobs, [running("r", {"a": (0, 1), "v": (0, 1)}, NOW + 60)], backfill="none")
    assert started(decide(mapped(snap))) == {"j1": [("k", (0, 1))]}


def test_gpu_types_that_a_job_names_bind_it() -> None:
    jobs = [pending("j1", 1, name="llm", gpu_types=("V100", "K80")), pending("j2", 1, gpu_types=("P100",))]
    for place in ("best-fit", "fastest", "milp"):
        snap = snapshot(NODES, jobs, place=place, backfill="skip")
        snap = mapped(snap, place) if place in MAPPED else snap
        plan = decide(snap)
        assert list(started(plan)) == ["j1"]
        assert started(plan)["j1"][0][0] in ("v", "k")
        assert plan.reasons["j2"].code == ReasonCode.BAD_CONSTRAINTS
        told = explain(snap, "j2")
        assert told.nodes[0].text == "has A100 GPUs, not P100"
        assert "accept other GPU types besides P100 (--gpu-type)" in told.next_steps


def test_a_users_share_binds_only_while_others_wait() -> None:
    mine = [pending(f"j{i}", 2, user="alice", submit=i, name="cnn") for i in range(3)]
    other = [pending("o", 2, user="bob", submit=9.0, name="cnn")]
    shared = mapped(snapshot(NODES, [*mine, *other], backfill="skip"), user_share=0.34)
    assert set(started(decide(shared))) == {"j0", "o"}
    alone = mapped(snapshot(NODES, mine, backfill="skip"), user_share=0.34)
    assert set(started(decide(alone))) == {"j0", "j1", "j2"}


def test_explicit_priority_is_not_traded_away() -> None:
    first = pending("p", 2, name="cnn", priority=5, gpu_types=("A100",))
    worth_more = [pending(f"j{i}", 1, name="llm", submit=1.0) for i in range(2)]
    plan = decide(mapped(snapshot(NODES[:1], [first, *worth_more], backfill="skip")))
    assert set(started(plan)) == {"p"}


def test_gangs_stay_on_one_type_where_that_is_possible() -> None:
    nodes = [node(f"a{i}", gpus=2, gpu_type="A100") for i in range(2)] + [node("k", gpus=2, gpu_type="K80")]
    snap = mapped(snapshot(nodes, [pending("g", 2, nodes=2, name="llm")], backfill="skip"))
    assert sorted(n for n, _ in started(decide(snap))["g"]) == ["a0", "a1"]
    mixed = mapped(snapshot(nodes[1:], [pending("g", 2, nodes=2, name="llm")], backfill="skip"))
    assert sorted(n for n, _ in started(decide(mixed))["g"]) == ["a1", "k"]


POLICY = """\
order: fifo
place: milp
backfill: skip
mapping:
  window: 64
  budget: 150ms
  floor: 0.25
  user_share: 0.5
  speeds:
    resnet*: {V100: 1, K80: 0.15}
"""


def test_the_policy_file(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    file.write_text(POLICY)
    spec = load_policy(file)
    assert spec.mapping == Mapping(
        window=64, budget_s=0.15, floor=0.25, user_share=0.5, speeds={"resnet*": {"V100": 1.0, "K80": 0.15}}
    )
    file.write_text(POLICY.replace("0.25", "0.2"))
    assert load_policy(file).version != spec.version
    file.write_text("order: fifo\nplace: best-fit\nmapping: {window: 3}\n")
    with pytest.raises(Exception, match="this only with place: fastest or milp"):
        load_policy(file)


def test_without_highs_there_is_one_line(tmp_path: Path) -> None:
    """An installation without the extra: the import of highspy fails."""
    (tmp_path / "highspy.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "log.swf").write_text("1 0 -1 100 2 -1 -1 2 200 -1 1 1 1 -1 1 -1 -1 -1\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1", "XDG_CACHE_HOME": str(tmp_path / "c")}
    words = ["replay", str(tmp_path / "log.swf"), "--nodes", "1", "--policy", "fifo"]
    program = [sys.executable, "-m", "gpusched", *words]
    done = subprocess.run([*program, "--placement", "milp"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr == (
        "gpusched: error: place: milp needs HiGHS, which is not installed; pip install 'gpusched-cluster[milp]'\n"
    )
    program += ["--placement", "fastest", "--json"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)[0]["placement"] == "fastest"


def test_without_highs_live_decisions_are_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    snap = mapped(snapshot(NODES, [pending("j1", 2, name="cnn-1")], backfill="skip"))
    plan = decide(snap)
    assert started(plan) == {"j1": [("a", (0, 1))]}
    assert plan.remarks["p"] == "place: milp needs HiGHS, which is not installed: placed greedily"


def test_default_settings_need_no_section() -> None:
    assert PolicySpec(name="x", place="milp").mapping.window == 256
