"""Starts are predicted between cycles: once for each job, a little at a time, and held against the real start."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpusched import compiled
from gpusched.controller import compiling as by_another
from gpusched.controller import predicting
from gpusched.controller.predicting import PAUSE_S, StartPredictor, compile_for
from gpusched.forecast.queue import QueueForecast
from gpusched.forecast.run import run_forward
from gpusched.model.policy import PolicySpec
from gpusched.queue.predictions import PredictedStart
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.sched.warming import small_snapshot, with_sharing
from tests.builders import spec
from tests.controller.imagined import GPUS, inventory
from tests.controller.site import Site

LIMIT_S = 600.0


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    compile_for(small_snapshot(PolicySpec(name="warm-up")))


class Watch:
    """A clock that a step takes a second by."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.store.close()


def predicted_starts(site: Site) -> dict[str, PredictedStart]:
    return {f.prediction.job_id: f for f in site.store.predicted_starts(0, site.world.now + 1)}


def full(site: Site) -> list[str]:
    """Jobs that hold every node, then two that wait."""
    node = {"spec": spec(gpus_per_node=GPUS, time_limit_s=int(LIMIT_S))}
    jobs = [site.submit(**node) for _ in inventory().nodes]
    site.turn(3)
    return [
        *jobs,
        site.submit(**node),
        site.submit(spec=spec(gpus_per_node=GPUS, time_limit_s=int(LIMIT_S), hold=True)),
    ]


def test_waiting_jobs_are_predicted_once(site: Site) -> None:
    *_, waits, held = full(site)
    site.turn()
    predictor = StartPredictor(site.store)
    predictor.step(inventory(), site.world.now, budget_s=60.0)
    found = predicted_starts(site)
    assert list(found) == [waits], "not what runs, and not what is held"
    made = found[waits].prediction
    assert made.partition == "p"
    assert made.low <= made.median <= (made.high or 0) <= (made.by_limits or 0)
    assert made.by_limits == pytest.approx(site.world.now + LIMIT_S, abs=10)
    predictor.step(inventory(), site.world.now + 100, budget_s=60.0)
    assert predicted_starts(site)[waits].prediction == made
    assert site.store.job(held) is not None


def test_a_step_keeps_to_its_budget_and_the_next_one_goes_on(site: Site) -> None:
    *_, waits, _ = full(site)
    site.turn()
    watch = Watch()
    predictor = StartPredictor(site.store, watch)
    steps = 0
    while not predicted_starts(site):
        before = watch.now
        predictor.step(inventory(), site.world.now, budget_s=2.0)
        assert watch.now - before <= 5.0
        steps += 1
    assert steps > 5
    assert list(predicted_starts(site)) == [waits]
    later = site.submit(spec=spec(gpus_per_node=GPUS))
    site.turn()
    predictor.step(inventory(), site.world.now, budget_s=1e9)
    assert later not in predicted_starts(site), f"at most every {PAUSE_S} s"
    watch.now += 1e4
    predictor.step(inventory(), site.world.now, budget_s=1e9)
    assert later in predicted_starts(site)


def test_the_outcome_of_a_prediction_is_known_later(site: Site) -> None:
    *_, waits, _ = full(site)
    site.turn()
    StartPredictor(site.store).step(inventory(), site.world.now, budget_s=60.0)
    assert predicted_starts(site)[waits].waits
    for host in site.world.hosts.values():
        for box in host.boxes.values():
            box.phase, box.exit_code = "exited", 0
    site.turn(6)
    found = predicted_starts(site)[waits]
    assert not found.waits
    assert found.started is not None
    assert found.started >= found.prediction.made


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When a batch was begun."""
    begun: list[float] = []

    def seen(store: Any, declared: Any, policies: Any, now: float, **more: Any) -> Any:
        begun.append(now)
        return snapshot_of_store(store, declared, policies, now, **more)

    monkeypatch.setattr(predicting, "snapshot_of_store", seen)
    return begun


def test_of_what_nothing_can_be_predicted_it_is_asked_again_after_ten_minutes(site: Site, batches: list[float]) -> None:
    """It asks for a node more than there are."""
    site.submit(spec=spec(hold=True))
    site.turn()
    (job,) = site.store.pending()
    wants = msgspec.structs.replace(job, held_by="", spec=spec(nodes=4))
    site.store.put_jobs([wants])
    watch, now = Watch(), site.world.now
    predictor = StartPredictor(site.store, watch)
    for seconds in (0, 1, 599, 600, 1199, 1200):
        watch.now += 1e6
        predictor.step(inventory(), now + seconds, budget_s=1e9)
    assert predicted_starts(site) == {}
    assert batches == [now, now + 600, now + 1200]
    site.submit(spec=spec(hold=True))
    site.turn()
    watch.now += 1e6
    predictor.step(inventory(), now + 1201, budget_s=1e9)
    assert batches[3:] == [now + 1201], "another's turn comes at once"


def test_after_a_batch_it_rests_for_twenty_times_as_long_as_that_took(site: Site, batches: list[float]) -> None:
    full(site)
    watch = Watch()
    predictor = StartPredictor(site.store, watch)
    for budget_s in (1e9, 3.0):
        site.submit(spec=spec(gpus_per_node=GPUS))
        site.turn()
        spent, known = 0.0, len(predicted_starts(site))
        while len(predicted_starts(site)) == known:
            before = watch.now
            predictor.step(inventory(), site.world.now, budget_s)
            spent += watch.now - before - 1.0  # its first look at the clock begins the step
        over = watch.now + 20.0 * (spent - 1.0)  # the last look begins the rest
        assert over - watch.now > PAUSE_S
        made, later = len(batches), site.submit(spec=spec(gpus_per_node=GPUS))
        site.turn()
        for watch.now, begun in ((over - 2.0, 0), (over - 1.0, 1)):
            predictor.step(inventory(), site.world.now, budget_s=1e9)
            assert len(batches) - made == begun
        assert later in predicted_starts(site)
        watch.now += 1e4


@pytest.mark.parametrize(("most", "asked"), [(2, 0), (3, 1)])
def test_a_long_queue_is_left_alone(
    site: Site, batches: list[float], monkeypatch: pytest.MonkeyPatch, most: int, asked: int
) -> None:
    full(site)
    site.submit(spec=spec(gpus_per_node=GPUS))
    site.turn()
    assert len(site.store.pending()) == 3
    monkeypatch.setattr(predicting, "_MAX_JOBS", most)
    StartPredictor(site.store).step(inventory(), site.world.now, budget_s=60.0)
    assert len(batches) == asked


class Compiled(QueueForecast):
    """A forecast whose passes are there when a test says so."""

    there = False

    @property
    def is_compiled(self) -> bool:
        return self.there


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Forecasts that no pass is there for; what is started to compile them, which does nothing."""
    started: list[list[Any]] = []

    def start(command: list[str], stdin: Any, **_: object) -> subprocess.Popen[bytes]:
        started.append([command, pickle.load(stdin)])
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])

    monkeypatch.setattr(predicting, "QueueForecast", Compiled)
    monkeypatch.setattr(by_another, "subprocess", SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL))
    return started


def test_passes_are_compiled_by_another_process(site: Site, compiling: list[list[Any]]) -> None:
    """For the queue as it is. Once: then it goes on, whether that was of use or not."""
    waiting = full(site)[-2]
    site.turn()
    clock = Watch()
    predictor = StartPredictor(site.store, clock)
    for _ in range(3):
        predictor.step(inventory(), site.world.now, budget_s=60.0)
    assert len(compiling) == 1, "it has not ended"
    assert waiting in {job.id for job in compiling[0][1].pending}
    assert not predicted_starts(site)
    assert predictor._compiler is not None
    predictor._compiler.kill()
    predictor._compiler.wait()
    clock.now += PAUSE_S
    predictor.step(inventory(), site.world.now, budget_s=60.0)
    assert waiting in predicted_starts(site)
    assert len(compiling) == 1
    predictor.close()


def test_the_compiler_process_ends_with_the_predictor(site: Site, compiling: list[list[Any]]) -> None:
    full(site)
    site.turn()
    predictor = StartPredictor(site.store)
    predictor.step(inventory(), site.world.now)
    compiler = predictor._compiler
    assert compiler is not None
    assert compiler.returncode is None
    predictor.close()
    assert compiler.returncode is not None


def test_what_is_to_be_compiled_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For each kind of snapshot on its own, in this process or kept by another one."""
    small = small_snapshot(PolicySpec(name="p"))
    snapshots = small, with_sharing(small), small_snapshot(PolicySpec(name="p", backfill="conservative"))
    ahead, *others = (QueueForecast(snapshot, half_life_s=1.0, tick_s=1.0) for snapshot in snapshots)
    compile_for(small)
    monkeypatch.setattr(run_forward, "_ready", {})
    assert ahead.is_compiled, "it was kept"
    compile_for(small)
    monkeypatch.setattr(compiled, "cache_folder", lambda module: tmp_path)
    assert ahead.is_compiled, "it was loaded"
    assert not any(other.is_compiled for other in others), "each is another version"
    monkeypatch.setattr(run_forward, "_ready", {})
    assert not ahead.is_compiled
