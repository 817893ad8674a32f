"""Agents in charge of a real controller's cycle: what goes wrong with them stops nothing, is seen, and heals."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.agents.common.vector import to_arrays
from gpusched.agents.gist import live as gist_live
from gpusched.agents.topology.network import SHAPES, untrained
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.weights import load_model, save_model
from gpusched.controller import deciding
from gpusched.controller.deciding import BACKOFF_S, Decider
from gpusched.model.commands import Rollback, ShadowOff, ShadowOn
from gpusched.model.interference import JobClassEstimate
from gpusched.model.jobs import JobSpec
from gpusched.model.plan import Resize
from gpusched.model.policy import AGENTS, AgentTraits
from gpusched.model.snapshot import NodeView, PendingView, Snapshot
from gpusched.queue.store import Store
from gpusched.sched.decide import decide
from tests.logged import messages
from tests.promotion import weights
from tests.promotion.place import EASY, Place
from tests.sched.sizes import runs, world
from tests.testbed import wait_until


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    weights.compile_passes(tmp_path_factory.mktemp("warm"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("GPUSCHED_POLICIES", raising=False)
    made = Place(tmp_path)
    yield made
    made.store.close()


def test_an_agent_decides_and_is_recorded(place: Place) -> None:
    job = place.submit()
    place.turn()
    assert (place.job(job).policy, place.job(job).policy_version) == ("gist", load_policy(place.policy).version)
    assert place.store.fallbacks() == {}
    assert place.kinds("agent_disabled", "agent_enabled") == []


@pytest.mark.parametrize("how", weights.WAYS)
def test_bad_weights_stop_nothing_are_seen_once_and_heal(
    place: Place, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert place.decided_by() == "gist"
    good = place.file.read_bytes()
    weights.break_file(place.file, how)
    fallback = load_policy(place.policy).fallback
    assert fallback is not None
    job = place.submit()
    place.turn()
    assert (place.job(job).policy, place.job(job).policy_version) == ("easy", fallback.version)
    for _ in range(3):
        assert place.decided_by() == "easy"
    out = place.store.fallbacks()["p"]
    assert (out.policy, out.fallback) == ("gist", "easy")
    assert out.line.startswith("p: gist cannot decide (")
    assert out.line.endswith("); falling back to easy")
    assert place.kinds("agent_disabled") == ["agent_disabled"]
    assert messages(caplog) == [out.line]
    place.file.write_bytes(good)
    assert place.decided_by() == "gist"
    assert place.store.fallbacks() == {}
    assert place.kinds("agent_disabled", "agent_enabled") == ["agent_disabled", "agent_enabled"]


def test_a_broken_file_is_reported_without_pending_jobs_and_across_restarts(place: Place) -> None:
    place.turn()
    good = place.file.read_bytes()
    weights.break_file(place.file, "truncated")
    place.turn(2)
    assert "cannot be read" in place.store.fallbacks()["p"].why
    place.open()
    place.turn(2)
    assert place.kinds("agent_disabled") == ["agent_disabled"]
    place.file.write_bytes(good)
    place.turn()
    assert place.store.fallbacks() == {}


def test_other_weights_are_taken_up(place: Place) -> None:
    assert place.decided_by() == "gist"
    weights.write(place.file, seed=1)
    place.cycle.policies = {"p": load_policy(place.policy)}  # as the service does
    job = place.submit()
    place.turn()
    assert place.job(job).policy_version == load_policy(place.policy).version
    changes = place.store.policy_changes("p")
    assert [c.act for c in changes] == ["inventory", "files"]


@pytest.mark.parametrize(("servers", "decides"), [(3, True), (2, False)])
def test_the_papers_own_network_is_promoted_and_decides_on_its_servers_only(
    place: Place, servers: int, decides: bool
) -> None:
    place.open(live=EASY)
    about = {"variant": "masked", "knows": "limit", "patience_s": "600"}
    save_model(place.file, "gist", weights.paper_network([(4, 16, 65536)] * servers, [(1, 1, 1024)]), about)
    assert place.promote() == []
    job = place.submit()
    place.turn(2)
    assert place.job(job).policy == ("gist" if decides else "easy")
    assert [part.node for part in place.job(job).allocation.parts] == ["n2" if decides else "n0"]
    assert ("p" in place.store.fallbacks()) == (not decides)
    if not decides:
        assert place.store.fallbacks()["p"].why == (
            "its weights are for 2 servers (4 GPUs, 16 cores, 65536 MiB), and this partition has "
            "3 servers (4 GPUs, 16 cores, 65536 MiB)"
        )


def test_an_agent_that_does_not_answer_is_left_behind(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    go, asked, real = threading.Event(), [], gist_live.decide_queue

    def slow(prepared: Any, context: Any) -> Any:
        asked.append(context)
        if len(asked) > 1:
            go.wait(300)
        return real(prepared, context)

    assert place.decided_by() == "gist"
    monkeypatch.setattr(gist_live, "decide_queue", slow)
    assert place.decided_by() == "gist"  # warm
    place.policy.write_text(weights.YAML.replace("60s", "20ms"))
    place.cycle.policies = {"p": load_policy(place.policy)}
    assert place.decided_by() == "easy"
    assert place.store.fallbacks()["p"].why == "no answer within its time budget of 20 ms"
    assert place.decided_by() == "easy"
    timings = place.cycle._timings.decisions
    assert [(partition, late) for partition, _, late in timings] == [("p", False), ("p", False), ("p", True)]
    assert timings[-1][1] >= 0.02, "of one that was given up the time until then counts"
    assert len(asked) == 2, "it is not asked again while it thinks"
    go.set()
    place.policy.write_text(weights.YAML)
    place.cycle.policies = {"p": load_policy(place.policy)}
    assert place.decided_by() == "easy", "nor while it rests"
    place.world.now += BACKOFF_S
    wait_until(lambda: place.decided_by() == "gist", what="the end of the late answer")
    starts = [e.job_id for e in place.store.events(limit=10_000) if e.kind == "starting"]
    assert len(starts) == len(set(starts)), "a late answer is thrown away"
    assert len(place.kinds("agent_disabled", "agent_enabled")) <= 4


def test_whatever_an_agent_raises_the_cycle_goes_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(prepared: Any, context: Any) -> Any:
        context.world.resources.gpus[:] = 99  # what it leaves behind must not be seen
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(gist_live, "decide_queue", wrong)
    assert place.decided_by() == "easy"
    assert "internal error: ZeroDivisionError('oh')" in place.store.fallbacks()["p"].why


def test_a_partition_s_agent_changes_nothing_for_the_others(place: Place, tmp_path: Path) -> None:
    gist = load_policy(place.policy)
    jobs = [PendingView(id=f"{p}{n}", user="u", submit_time=float(n),
                        spec=JobSpec(name="j", partition=p, gpus_per_node=1 + n % 3, cores_per_node=1,
                                     memory_mib_per_node=1, time_limit_s=600 * (1 + n % 4)))
            for p in ("a", "p", "b", "nowhere") for n in range(9)]  # fmt: skip
    nodes = tuple(NodeView(name=f"{p}{n}", partition=p, gpus=(0, 1, 2, 3), cores=8, memory_mib=64)
                  for p in ("a", "p", "b") for n in range(2))  # fmt: skip
    policies = {"a": EASY, "p": gist, "b": msgspec.structs.replace(EASY, order="sjf")}
    snapshot = Snapshot(now=1e9, nodes=nodes, running=(), pending=tuple(jobs), policies=policies, seed=7)
    found = Decider(place.store).decide(snapshot, {})
    plan = decide(snapshot, {"p": load_model(Path(gist.folder), "p", "gist")})
    assert {a.job_id: a for a in found.plan.actions} == {a.job_id: a for a in plan.actions}
    assert found.plan.reasons == plan.reasons
    assert found.deciders == policies


# -- promoted


def test_training_cannot_change_a_promoted_copy(place: Place) -> None:
    place.open(EASY)
    assert place.decided_by() == "easy"
    assert place.promote() == []
    job = place.submit()
    place.turn()
    version = place.job(job).policy_version
    weights.write(place.file, seed=5)  # trained again
    weights.write(place.file.with_name("q.safetensors"))
    job = place.submit()
    place.turn()
    assert (place.job(job).policy, place.job(job).policy_version) == ("gist", version)
    # the copy itself: nothing but what was promoted may decide
    (frozen,) = (place.state / "policies").glob("*/gist/p.safetensors")
    assert frozen.parent.parent.name == version
    weights.write(frozen, seed=6)
    assert place.decided_by() == "easy"
    assert "not the weights that were promoted" in place.store.fallbacks()["p"].why


def test_rollback_works_with_the_agent_s_files_gone(place: Place) -> None:
    place.open(EASY)
    place.turn()
    assert place.promote() == []
    assert place.decided_by() == "gist"
    shutil.rmtree(place.state / "policies")
    shutil.rmtree(place.file.parent)
    place.policy.unlink()
    assert place.decided_by() == "easy"
    assert place.store.fallbacks()["p"].policy == "gist"
    assert place.say(Rollback(time=0.0, partition="p", reason="gone")) == []
    job = place.submit()
    place.turn()
    assert (place.job(job).policy, place.job(job).policy_version) == ("easy", EASY.version)
    assert place.store.fallbacks() == {}
    assert [c.act for c in place.store.policy_changes("p")] == ["inventory", "promote", "rollback"]


@pytest.mark.parametrize("how", [w for w in weights.WAYS if w != "answers NaN"])
def test_weights_that_cannot_decide_are_not_promoted(place: Place, how: str) -> None:
    place.open(EASY)
    place.turn()
    weights.break_file(place.file, how)
    (why,) = place.promote()
    assert ".safetensors: " in why
    assert place.decided_by() == "easy"
    assert not list((place.state / "policies").glob("*/*"))


def test_a_copy_that_is_damaged_is_made_anew(place: Place) -> None:
    place.open(EASY)
    place.turn()
    assert place.promote() == []
    (frozen,) = (place.state / "policies").glob("*/gist/p.safetensors")
    weights.break_file(frozen, "truncated")
    place.turn()
    assert place.say(Rollback(time=0.0, partition="p", reason="x")) == []
    assert place.promote() == []
    assert place.decided_by() == "gist"
    assert [f.name for f in (place.state / "policies").iterdir()] == [frozen.parent.parent.name]


# -- in the shadow


def test_a_shadow_decides_beside_and_touches_nothing(place: Place) -> None:
    place.open(EASY)
    spec_ = load_policy(place.policy)
    on = ShadowOn(time=0.0, partition="p", path=str(place.policy), version=spec_.version)
    assert place.say(on) == []
    for n in range(6):
        for _ in range(3):
            place.submit(gpus_per_node=1 + n % 4, time_limit_s=600 * (n + 1))
        place.turn()
    jobs = place.store.jobs()
    assert {j.policy for j in jobs} <= {"easy", None}
    shadow = place.store.shadows()["p"]
    assert shadow.spec.version == spec_.version
    assert shadow.decisions == 6
    assert shadow.late == shadow.unusable == 0
    started = {j.id for j in jobs if j.policy}
    assert shadow.live_starts == len(started) > 0
    differences = place.store.differences("p", 100)
    assert len(differences) == shadow.decisions - shadow.same
    assert all(d.live != d.shadow and set(d.live) <= started for d in differences)
    (frozen,) = (place.state / "policies").glob("*/gist/p.safetensors")
    weights.break_file(frozen, "truncated")
    place.submit()
    place.turn()
    shadow = place.store.shadows()["p"]
    assert (shadow.decisions, shadow.unusable) == (6, 1)
    assert ".safetensors" in shadow.trouble
    assert place.store.fallbacks() == {}, "a shadow is in nobody's way"
    assert place.say(ShadowOff(time=0.0, partition="p")) == []
    place.submit()
    place.turn()
    assert place.store.shadows()["p"].unusable == 1
    assert place.say(ShadowOff(time=0.0, partition="p")) == ["no shadow policy in p"]


@pytest.mark.parametrize("name", ["rltune", "rltune-preempt"])
def test_weights_that_come_along_decide_on_the_first_day(place: Place, name: str) -> None:
    """Nothing was trained here, no job has ended: the included weights have an answer in every cycle."""
    place.open(EASY)
    file = place.folder / "policies" / f"{name}.yaml"  # with more time: its passes are compiled here
    file.write_text((BUILT_IN / f"{name}.yaml").read_text().replace("budget: 200ms", "budget: 10m"))
    shutil.copytree(BUILT_IN / name, file.with_suffix(""))
    on = ShadowOn(time=0.0, partition="p", path=str(file), version=load_policy(file).version)
    assert place.say(on) == []
    for n in range(4):
        for _ in range(3):
            place.submit(gpus_per_node=1 + n % 4, time_limit_s=600 * (n + 1))
        place.turn()
    shadow = place.store.shadows()["p"]
    assert (shadow.decisions, shadow.unusable, shadow.trouble) == (4, 0, "")
    assert shadow.shadow_starts > 0
    (frozen,) = (place.state / "policies").glob(f"*/{name}/default.safetensors")
    assert frozen.with_name("default.card.yaml").is_file()


def test_a_shadow_and_a_fallback_know_what_they_ask_for(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.policy.write_text(weights.YAML.replace("easy", "fairshare"))
    place.open()
    assert place.decided_by() == "gist"
    seen: list[Any] = []
    real = deciding.decide
    monkeypatch.setattr(deciding, "decide", lambda s, *models: seen.append(s) or real(s, *models))
    weights.break_file(place.file, "missing")
    assert place.decided_by() == "fairshare"
    assert [s.usage for s in seen if s.policies.get("p") and s.policies["p"].order == "fairshare"][-1]
    place.open(EASY)
    path = BUILT_IN / "fairshare.yaml"
    on = ShadowOn(time=0.0, partition="p", path=str(path), version=load_policy(path).version)
    assert place.say(on) == []
    assert place.decided_by() == "easy"
    assert seen[-1].policies["p"].name == "fairshare"
    assert seen[-1].usage


def test_differences_are_bounded(place: Place) -> None:
    from gpusched.queue.promotions import KEPT_DIFFERENCES, ShadowDifference

    with place.store.transaction():
        for n in range(KEPT_DIFFERENCES + 50):
            place.store.add_difference(ShadowDifference(partition="p", time=float(n), live={}, shadow={}))
            place.store.add_difference(ShadowDifference(partition="q", time=0.0, live={}, shadow={})) if n < 3 else None
    kept = place.store.differences("p", 10_000)
    assert len(kept) == KEPT_DIFFERENCES
    assert kept[0].time == 50.0
    assert len(place.store.differences("q", 10)) == 3


def test_an_agent_that_chooses_sizes_is_asked_also_without_pending_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = SimpleNamespace(prepare=lambda model: model.arrays["sizes"], choose_sizes=lambda weights, question: weights)
    monkeypatch.setitem(AGENTS, "chooses", AgentTraits(sizes=True))
    monkeypatch.setitem(REGISTRY, "chooses", AgentParts(sizes=lambda: live))
    (tmp_path / "mine").mkdir()
    (tmp_path / "state").mkdir()
    save_model(tmp_path / "mine" / "default.safetensors", "chooses", {"sizes": np.array([4])})
    (tmp_path / "mine.yaml").write_text("agent: chooses\nresize: {min_run: 0s}\nbudget: 10m\n")
    policy = load_policy(tmp_path / "mine.yaml")
    decider = Decider(Store.create_or_open(tmp_path / "state"))
    decider.warm_up({"p": policy}, {})
    alone = msgspec.structs.replace(world([], [runs("r", {"n0": (0, 1)}, 1, 2, 4, 8)]), policies={"p": policy})
    decided = decider.decide(alone, {})
    assert [(a.job_id, a.gpus) for a in decided.plan.actions if isinstance(a, Resize)] == [("r", 4)], "its rule: 8"
    assert decided.deciders["p"] is policy
    idle = msgspec.structs.replace(alone, running=())
    assert decider.decide(idle, {}).plan.actions == ()


def test_topology_agents_leave_it_to_contention_until_anything_was_learned(place: Place) -> None:
    """And then four of them decide on three nodes."""
    folder = place.folder / "policies"
    (folder / "racks.yaml").write_text("agent: topology\nschedulers: 4\nbudget: 10m\n")
    (folder / "racks").mkdir()
    save_model(folder / "racks/default.safetensors", "topology", to_arrays(untrained(0), SHAPES))
    place.open(load_policy(folder / "racks.yaml"))
    assert place.decided_by() == "contention"
    assert "no measured placement costs yet" in place.store.fallbacks()["p"].line
    with place.store.transaction():
        place.store.put_beliefs([JobClassEstimate(kind="u/j")])
    assert place.decided_by() == "racks"
    assert place.store.fallbacks() == {}
    (folder / "racks/default.safetensors").unlink()
    assert place.decided_by() == "contention"
    assert "no weights for p" in place.store.fallbacks()["p"].line


def test_weights_are_loaded_once_and_again_when_their_file_changes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    monkeypatch.setattr(deciding, "_load", lambda *_: loads.append(1) or f"load {len(loads)}")
    spec, kept = load_policy(place.policy), deciding.Weights()
    assert [kept.get("p", spec) for _ in range(3)] == ["load 1"] * 3
    os.utime(deciding.weights_file(Path(spec.folder), "p"), (1.0, 1.0))
    assert [kept.get("p", spec) for _ in range(2)] == ["load 2"] * 2
