"""``place: milp`` and ``place: fastest`` in live decisions."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from gpusched.config.policies import load_policy
from gpusched.model.plan import ReasonCode
from gpusched.model.policy import MAPPING_PLACES, Mapping, PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, Snapshot
from gpusched.sched.alone import SingleJobView, in_order
from gpusched.sched.check import check
from gpusched.sched.decide import decide
from gpusched.sched.explain import explain
from gpusched.sched.mapping.greedy import greedy
from gpusched.sched.mapping.learned import speeds_by_name
from gpusched.sched.mapping.problem import Problem
from gpusched.sched.mapping.queue import unfit_of
from gpusched.sched.tally import barred
from tests.sched.worlds import NOW, after, node, pending, running, snapshot, snapshots, started

SPEEDS = {"cnn*": {"A100": 1.0, "V100": 0.9, "K80": 0.5}, "*": {"A100": 1.0, "V100": 0.5, "K80": 0.1}}
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
NODES = [node("a", gpus=2, gpu_type="A100"), node("v", gpus=2, gpu_type="V100"), node("k", gpus=2, gpu_type="K80")]


def mapped(snap: Snapshot, place: str = "milp", **more: object) -> Snapshot:
    mapping = Mapping(**{"speeds": SPEEDS, **more})  # type: ignore[arg-type]
    policies = {k: msgspec.structs.replace(p, place=place, mapping=mapping) for k, p in snap.policies.items()}
    return msgspec.structs.replace(snap, policies=policies)


@pytest.mark.parametrize("place", MAPPING_PLACES)
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
    queue = [j.id for j in in_order(snap, "p") if plan.reasons.get(j.id, None) is None or _could_run(plan, j.id)]
    starts = started(plan)
    if snap.policies["p"].backfill == "none":
        flags = [job in starts for job in queue]
        assert flags == sorted(flags, reverse=True)
    if snap.policies["p"].backfill == "easy":
        prefix = next((i for i, job in enumerate(queue) if job not in starts), len(queue))
        if prefix < len(queue):
            only = msgspec.structs.replace(plan, actions=tuple(a for a in plan.actions if a.job_id in queue[:prefix]))
            assert _best_end(after(snap, plan), queue[prefix]) <= _best_end(after(snap, only), queue[prefix]) + 1e-6


def _could_run(plan: object, job: str) -> bool:
    return plan.reasons[job].code != ReasonCode.BAD_CONSTRAINTS  # type: ignore[attr-defined]


def _best_end(snap: Snapshot, job_id: str) -> float:
    """When the job ends at the latest where it ends first, by limits and speeds; of one that mixes types: its start."""
    job = next(j for j in snap.pending if j.id == job_id)
    kinds = tuple({node.gpu_type for node in snap.nodes if not barred(job, node)})
    speed = dict(zip(kinds, speeds_by_name(SPEEDS, job.spec.name, kinds), strict=True))
    of = {kind: SingleJobView(msgspec.structs.replace(snap, nodes=_of_type(snap, kind))) for kind in kinds}
    has = {kind: speed[kind] for kind in kinds if of[kind].fits(job, "usable")}
    if not has:
        return _when(SingleJobView(snap), job)
    best = max(has.values())
    return min(_when(of[k], job) + job.spec.time_limit_s * best / s for k, s in has.items())


def _when(alone: SingleJobView, job: PendingView) -> float:
    found = alone.earliest(job)
    return found[0] if found is not None else NOW if alone.fits(job) else math.inf


def _of_type(snap: Snapshot, kind: str) -> tuple[NodeView, ...]:
    return tuple(node for node in snap.nodes if node.gpu_type == kind)


@QUICK
@given(snapshots())
def test_explain_agrees(snap: Snapshot) -> None:
    snap = mapped(snap, "fastest")
    plan = decide(snap)
    if plan.actions:
        return
    # under EASY it knows of the head's wait on any GPU type only, not of that for the type that the head waits for
    either = {ReasonCode.BACKFILL, ReasonCode.POLICY} if snap.policies["p"].backfill == "easy" else set()
    for job, reason in plan.reasons.items():
        code = explain(snap, job).reason.code
        assert code == reason.code or {code, reason.code} == either, job


def test_under_easy_the_head_waits_for_a_faster_type_where_it_ends_sooner() -> None:
    """A minute for the A100 against ten times the run time; who is behind it takes what it left."""
    jobs = [pending("j1", 2, name="llm"), pending("j2", 2, name="cnn", submit=2.0)]
    nodes = [NODES[0], node("k", gpus=4, gpu_type="K80")]
    snap = snapshot(nodes, jobs, [running("r", {"a": (0, 1)}, NOW + 60)], backfill="easy")
    plan = decide(mapped(snap))
    assert {j: w[0][0] for j, w in started(plan).items()} == {"j2": "k"}
    assert plan.reasons["j1"].code == ReasonCode.POLICY
    assert "faster GPU type" in plan.reasons["j1"].message
    busy = [running("r", {"a": (0, 1)}, NOW + 1e6)]
    long = started(decide(mapped(snapshot(nodes, jobs, busy, backfill="easy"))))
    assert {j: w[0][0] for j, w in long.items()} == {"j1": "k", "j2": "k"}


@pytest.mark.parametrize(("free_in", "waits"), [(899, True), (900, False)])
def test_the_head_takes_what_is_free_where_it_would_end_no_sooner_by_waiting(free_in: int, waits: bool) -> None:
    """100 s on the A100s, 1000 s on the K80s."""
    nodes = [NODES[0], node("k", gpus=4, gpu_type="K80")]
    busy = [running("r", {"a": (0, 1)}, NOW + free_in)]
    plan = decide(mapped(snapshot(nodes, [pending("j1", 2, name="llm", limit=100)], busy, backfill="easy")))
    assert ("j1" not in started(plan)) is waits


def test_nothing_behind_the_head_delays_what_it_waits_for() -> None:
    """Half of the A100 node is free; a job that would still be there when the other half is does not get it."""
    nodes = [node("a", gpus=4, gpu_type="A100"), NODES[2]]
    busy = [running("r", {"a": (0, 1)}, NOW + 60)]
    head = pending("j1", 4, name="llm", gpu_types=("A100",))
    for limit, where in ((50, "a"), (3600, "k")):
        behind = pending("j2", 2, name="cnn", submit=2.0, limit=limit)
        plan = decide(mapped(snapshot(nodes, [head, behind], busy, backfill="easy")))
        assert {j: w[0][0] for j, w in started(plan).items()} == {"j2": where}


@pytest.mark.parametrize(("limit", "where"), [(3600, {"j0": "v"}), (10**6, {"j0": "v", "j1": "k"})])
def test_the_wait_for_the_faster_type_counts_what_starts_ahead(limit: int, where: dict[str, str]) -> None:
    """The first takes the V100s; the second waits for their end, or takes the K80s where that would be too late."""
    jobs = [
        pending("j0", 2, name="llm", limit=limit),
        pending("j1", 2, name="llm", submit=1.0),
    ]
    plan = decide(mapped(snapshot(NODES[1:], jobs, backfill="easy")))
    assert {j: w[0][0] for j, w in started(plan).items()} == where


def test_the_job_that_loses_least_gets_the_slower_gpus() -> None:
    """The first in the queue would be taken by the A100 greedily; the second loses far more without it."""
    jobs = [pending("j1", 2, submit=1.0, name="cnn-1"), pending("j2", 2, submit=2.0, name="llm-1")]
    snap = snapshot(NODES[:2], jobs, backfill="skip")
    assert {j: w[0][0] for j, w in started(decide(mapped(snap, "fastest"))).items()} == {"j1": "a", "j2": "v"}
    plan = decide(mapped(snap))
    assert {j: w[0][0] for j, w in started(plan).items()} == {"j1": "v", "j2": "a"}
    assert plan.remarks["p"].startswith("2 of 2 jobs mapped, worth 0.8 GPUs more than greedily")


def test_a_job_waits_for_gpus_that_do_not_cripple_it_and_its_reason_says_so() -> None:
    jobs = [pending("j1", 2, name="llm"), pending("j2", 2, name="cnn", submit=2.0)]
    nodes = [*NODES[:2], node("k", gpus=4, gpu_type="K80")]
    snap = mapped(snapshot(nodes, jobs, [running("r", {"a": (0, 1), "v": (0, 1)}, NOW + 60)], backfill="skip"))
    plan = decide(snap)
    assert {j: w[0][0] for j, w in started(plan).items()} == {"j2": "k"}
    assert plan.reasons["j1"].code == ReasonCode.POLICY
    assert "faster GPU type" in plan.reasons["j1"].message
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
        snap = mapped(snap, place) if place in MAPPING_PLACES else snap
        plan = decide(snap)
        assert list(started(plan)) == ["j1"]
        assert started(plan)["j1"][0][0] in ("v", "k")
        assert plan.reasons["j2"].code == ReasonCode.BAD_CONSTRAINTS
        explanation = explain(snap, "j2")
        assert explanation.nodes[0].text == "has A100 GPUs, not P100"
        assert "accept other GPU types besides P100 (--gpu-type)" in explanation.next_steps


def test_a_users_share_binds_only_while_others_wait() -> None:
    mine = [pending(f"j{i}", 2, user="alice", submit=i, name="cnn") for i in range(3)]
    other = [pending("o", 2, user="bob", submit=9.0, name="cnn")]
    shared = mapped(snapshot(NODES, [*mine, *other], backfill="skip"), user_share=0.34)
    assert set(started(decide(shared))) == {"j0", "o"}
    alone = mapped(snapshot(NODES, mine, backfill="skip"), user_share=0.34)
    assert set(started(decide(alone))) == {"j0", "j1", "j2"}
    head = pending("o", 2, user="bob", submit=0.5, gpu_types=("A100",))
    behind = mapped(snapshot(NODES, [mine[0], head, *mine[1:]], backfill="easy"), user_share=0.34)
    assert set(started(decide(behind))) == {"j0"}, "what started before the head counts"


def test_the_mapping_chooses_among_those_that_may_all_start() -> None:
    """A task beyond its array's bound is not in the way of who comes after it."""
    tasks = [pending(f"t{i}", 2, submit=i, array_id="t", array_room=1) for i in range(2)]
    snap = mapped(snapshot(NODES[:2], [*tasks, pending("o", 2, submit=9.0)], backfill="skip"), "fastest")
    plan = decide(snap)
    assert set(started(plan)) == {"t0", "o"}
    assert plan.reasons["t1"].code == ReasonCode.ARRAY_TASK_LIMIT


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
    done = subprocess.run([*program, "--placement", "milp"], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == (
        "gpusched: error: place: milp needs HiGHS, which is not installed; pip install 'gpusched-cluster[milp]'\n"
    )
    program += ["--placement", "fastest", "--json"]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout)[0]["placement"] == "fastest"


def test_output_of_highs_does_not_reach_stdout(tmp_path: Path) -> None:
    """HiGHS 1.16.0 prints its name in C, whatever its options say; so does this one, of any version."""
    (tmp_path / "highspy.py").write_text(
        "import os, sys\n"
        "os.write(1, b'Running HiGHS\\n')\n"
        "sys.path.remove(os.path.dirname(__file__))\n"
        "del sys.modules['highspy']\n"
        "import highspy\n"
    )
    (tmp_path / "log.swf").write_text("1 0 -1 100 2 -1 -1 2 200 -1 1 1 1 -1 1 -1 -1 -1\n")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_DISABLE_JIT": "1", "XDG_CACHE_HOME": str(tmp_path / "c")}
    words = ["replay", str(tmp_path / "log.swf"), "--nodes", "1", "--policy", "fifo", "--placement", "milp", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "gpusched", *words], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.stderr.startswith("Running HiGHS")
    assert json.loads(done.stdout)[0]["placement"] == "milp"


def test_without_highs_live_decisions_are_greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    snap = mapped(snapshot(NODES, [pending("j1", 2, name="cnn-1")], backfill="skip"))
    plan = decide(snap)
    assert started(plan) == {"j1": [("a", (0, 1))]}
    assert plan.remarks["p"] == "place: milp needs HiGHS, which is not installed; placed greedily"


def test_default_settings_need_no_section() -> None:
    assert PolicySpec(name="x", place="milp").mapping.window == 256


def test_the_speed_of_a_job_without_measurements() -> None:
    assert speeds_by_name({}, "cnn", ("A100", "K80")) == [1.0, 1.0]
    assert speeds_by_name({"cnn": {}}, "cnn", ("A100",)) == [1.0]
    assert speeds_by_name(SPEEDS, "cnn-1", ("K80", "H100", "A100")) == [0.5, 0.5, 1.0], "as on the slowest named"


def problems_of(snap: Snapshot, monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """The problems that a decision is made of, as they are put."""
    asked: list[Problem] = []

    def recorded(problem: Problem, **more: Any) -> Any:
        asked.append(
            replace(problem, gain=problem.gain.copy(), must=problem.must.copy(), resources=problem.resources.copy())
        )
        return greedy(problem, **more)

    monkeypatch.setattr("gpusched.sched.mapping.queue.greedy", recorded)
    decide(snap)
    return asked


def test_the_problem_that_is_put_figure_by_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains are GPUs x (speed in parts of the best that the job may have - floor); bonuses fall with the place."""
    jobs = [
        pending("j0", 2, name="cnn"),
        pending("j1", 1, name="llm", submit=1.0, user="bob", gpu_types=("V100", "K80")),
        pending("j2", 0, name="x", submit=2.0, cores_per_node=3, memory_mib_per_node=77),
        pending("j3", 1, name="cnn", submit=3.0),  # beyond the window
    ]
    busy = [running("r", {"a": (0,)}, NOW + 60, user="alice")]
    snap = mapped(snapshot(NODES, jobs, busy, backfill="skip"), user_share=0.5, window=3)
    (put,) = problems_of(snap, monkeypatch)
    a, v, k = put.kind
    assert put.gain[0, [a, v, k]] == pytest.approx([2 * 0.7, 2 * 0.6, 2 * 0.2])
    assert put.gain[1, [a, v, k]] == pytest.approx([float("nan"), 0.7, 0.2 - 0.3], nan_ok=True)
    assert put.gain[2, [a, v, k]] == pytest.approx([0.07, 0.1 * 0.2, 0.1 * -0.2])
    assert put.bonus == pytest.approx([0.05, 0.05 * 2 / 3, 0.05 / 3])
    assert put.resources.tolist() == [[1, 79, 511 << 10], [2, 80, 512 << 10], [2, 80, 512 << 10]]
    assert put.need.tolist() == [[2, 2, 2048], [1, 1, 1024], [0, 3, 77]]
    assert (put.parts.tolist(), put.total.tolist()) == ([1, 1, 1], [2, 2, 2])
    assert put.cap[put.user].tolist() == [2.0, 3.0, 2.0], "half of 6 GPUs, less what alice holds"
    assert (put.open_cost, put.frag_cost) == (0.02, 0.02)
    assert not put.late.any()
    assert not put.must.any()


def test_a_blocking_queue_is_asked_without_a_floor_and_those_behind_with_what_the_head_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = [pending("j0", 2, name="llm", gpu_types=("A100",)), pending("j1", 1, name="cnn", submit=1.0, limit=50),
            pending("j2", 1, name="cnn", submit=2.0, limit=90)]  # fmt: skip
    busy = [running("r", {"a": (0,)}, NOW + 60)]
    asked = problems_of(mapped(snapshot(NODES, jobs, busy, backfill="easy")), monkeypatch)
    first, behind = asked[0], asked[-1]
    a, v, k = first.kind
    assert first.gain[1, [a, v, k]] == pytest.approx([1.0, 0.9, 0.5])
    assert behind.gain[0, [a, v, k]] == pytest.approx([0.7, 0.6, 0.2])
    assert behind.late.tolist() == [False, True]
    assert (behind.resources[0, 0], behind.late_resources[0, 0], behind.late_resources[1, 0]) == (1, 0, 2)
    assert behind.bonus == pytest.approx([0.05 * 2 / 3, 0.05 / 3])
    assert behind.cap.tolist() == [float("inf")]


def test_how_likely_a_job_needs_more_than_a_node_has_left() -> None:
    assert unfit_of(np.array([1, 2, 2, 4]), 5).tolist() == [1.0, 0.75, 0.25, 0.25, 0.0, 0.0]
    assert unfit_of(np.array([], np.int64), 2).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("limit", "where"), [(3600, {"j0": "v"}), (10**6, {"j0": "v", "j1": "k"})])
def test_it_counts_them_on_the_partitions_own_nodes_and_on_those_that_the_job_may_have(
    limit: int, where: dict[str, str]
) -> None:
    """As above, behind another partition's nodes; and the A100s that are free it does not ask for."""
    jobs = [
        pending("j0", 2, name="llm", limit=limit, gpu_types=("V100",)),
        pending("j1", 2, name="llm", submit=1.0, gpu_types=("V100", "K80")),
    ]
    others = [node(f"o{i}", partition="aa", gpus=2, gpu_type="V100") for i in range(3)]
    held = [running("r", {"a": (0, 1)}, NOW + 1e7)]
    snap = mapped(snapshot([*others, *NODES], jobs, held, backfill="easy"))
    assert {j: w[0][0] for j, w in started(decide(snap)).items()} == where
