"""An agent that stops running jobs, in charge of a real controller's cycle, in the shadow, and judged by replays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gpusched.config.policies import load_policy
from gpusched.model.commands import Promote, ShadowOn
from gpusched.model.policy import PreemptionSettings
from gpusched.model.resources import Node, RuntimeName
from gpusched.nightly.proof import judge, scenario_for
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.replay import replay
from gpusched.study.study import PlannedReplay
from tests.controller.imagined import GPUS, inventory
from tests.promotion import stopping
from tests.promotion.place import EASY, Place
from tests.sim.worlds import trace_of


@pytest.fixture(scope="module", autouse=True)
def _compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    stopping.compile_passes(tmp_path_factory.mktemp("warm"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.delenv("GPUSCHED_POLICIES", raising=False)
    made = Place(tmp_path)
    made.policy = made.folder / "policies/stopper.yaml"
    made.policy.write_text(stopping.YAML)
    stopping.write(made.folder / "policies/stopper/p.safetensors")
    yield made
    made.store.close()


def filled(place: Place) -> list[str]:
    """Three jobs that fill the cluster and have had their part of it."""
    jobs = [place.submit(gpus_per_node=GPUS, preemptible=True) for _ in range(3)]
    place.turn(12)
    assert [place.job(j).state for j in jobs] == ["RUNNING"] * 3
    return jobs


def test_promoted_it_stops_the_last_of_those_that_have_had_their_part(place: Place) -> None:
    place.open(EASY)
    version = load_policy(place.policy).version
    path = str(place.policy)
    assert place.say(Promote(time=0.0, partition="p", path=path, version=version, reason="try", forced=True)) == []
    jobs = filled(place)
    new = place.submit(gpus_per_node=1)
    place.turn()
    (stopped,) = (j for j in jobs if place.job(j).state == "COMPLETING")
    assert stopped == jobs[-1]
    assert place.job(stopped).message == f"preempted by stopper for job {new}"
    assert f"waits for job {stopped} to leave" in place.job(new).message
    place.turn(4)
    assert place.job(new).state == "RUNNING"
    waiting = place.job(stopped)
    assert waiting.state == "PENDING"
    assert waiting.preemptions is not None
    assert waiting.preemptions.policy_version == version
    assert [place.job(j).attempt for j in jobs] == [1, 1, 1], "nobody else is stopped for it, nor it for others"
    place.turn(30)
    assert [place.job(j).attempt for j in jobs] == [1, 1, 1]
    assert place.store.fallbacks() == {}


def test_a_shadow_stops_no_jobs_and_records_what_it_would_have_stopped(place: Place) -> None:
    place.open(EASY)
    version = load_policy(place.policy).version
    assert place.say(ShadowOn(time=0.0, partition="p", path=str(place.policy), version=version)) == []
    jobs = filled(place)
    place.submit(gpus_per_node=1)
    place.turn(3)
    assert [place.job(j).state for j in jobs] == ["RUNNING"] * 3
    shadow = place.store.shadows()["p"]
    assert (shadow.late, shadow.unusable, shadow.trouble) == (0, 0, "")
    last = place.store.differences("p", 1)[-1]
    assert (last.live, last.shadow) == ({}, {jobs[-1]: ()})
    assert shadow.shadow_starts == shadow.live_starts, "what it stops is no start"


def test_without_its_weights_the_fallback_preempts_no_job(place: Place) -> None:
    place.open(load_policy(place.policy))
    jobs = filled(place)
    (place.folder / "policies/stopper/p.safetensors").unlink()
    place.submit(gpus_per_node=1)
    place.turn(5)
    assert [place.job(j).state for j in jobs] == ["RUNNING"] * 3
    assert place.store.fallbacks() != {}


def test_a_verdict_counts_what_restarts_cost_and_leaves_alone_what_must_be(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_policy(place.policy)
    assert spec.preempt == PreemptionSettings(min_run_s=3.0, per_hour=2, restart_s=1.0)
    rng = np.random.default_rng(0)
    submit = np.sort(rng.uniform(0.0, 6 * 86400.0, 400))
    trace = trace_of(submit, rng.exponential(9000.0, 400), rng.choice([1, 2, 4], 400))
    node = Node(name="n", partition="p", address="n", gpus=8, cores=64, memory_mib=1 << 20, runtime=RuntimeName.PODMAN)
    site = inventory()
    partition = msgspec.structs.replace(site.partitions[0], nodes=(node,))
    seen: list[PlannedReplay] = []
    from gpusched.nightly import proof as evaluate

    real = evaluate.run_all
    monkeypatch.setattr(evaluate, "run_all", lambda runs, **_: real(seen.extend(runs) or runs))
    verdict = judge(scenario_for(trace, site, partition), "p", EASY, spec)
    assert [run.options.restart_s for run in seen] == [0.0, 1.0]
    assert verdict.gain is not None
    scenario = seen[1].scenario
    played = replay(scenario.trace, scenario.pool, policy_of_spec(spec, None, "p"), restart_s=1.0)
    assert len(played.cut.job) > 0
    assert (played.cut.end - played.cut.start >= 3.0).all()
    held = msgspec.structs.replace(spec, preempt=PreemptionSettings(min_run_s=1e9))
    assert len(replay(scenario.trace, scenario.pool, policy_of_spec(held, None, "p")).cut.job) == 0
