"""DL2's agent: what it sees, what it may do, how it learns, and what it reaches in the public setting."""

from __future__ import annotations

import gzip
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.agents.common.checkpoint import Checkpoint
from gpusched.agents.describe import describe_weights
from gpusched.agents.dl2 import learn as learning
from gpusched.agents.dl2.agent import Player, prepare
from gpusched.agents.dl2.decide import CLUSTER_FEATURES, INPUTS, SHARED, STEP_FEATURES, Actor, zero_actor
from gpusched.agents.dl2.learn import Dl2Recipe, PublicSetting
from gpusched.agents.dl2.live import choose_sizes
from gpusched.agents.dl2.live import prepare as prepare_live
from gpusched.agents.dl2.observed import fully_observed, new_observed
from gpusched.agents.dl2.slots import SpeedChange, fastest_alone, simulate
from gpusched.agents.dl2.train import PartitionWorld, ResizableWorkload, WorkloadLog, by_rule, run
from gpusched.agents.dl2.weights import SHIPPED, arrays_of, read_actors
from gpusched.agents.dl2.workloads import draw
from gpusched.config.weights import TrainedModel, load_file
from gpusched.estimation.speeds import SpeedLearner
from gpusched.sched.agent import Unusable
from gpusched.sched.sizing.question import question_of
from gpusched.sim.profiles.dl2 import read_speeds
from tests.agents.dl2_worlds import assert_within, rule, workload
from tests.agents.dl2_worlds import run as reproduce
from tests.sched.sizing import One, cases, claims_of, power
from tests.sim.worlds import trace_of
from tests.strategies import examples
from tests.traces.samples import real


def ranked(**weights: float) -> Actor:
    """A linear score by the names of its inputs, spaces as underlines."""
    actor = zero_actor()
    for name, weight in weights.items():
        actor.linear[STEP_FEATURES.index(name.replace("_", " "))] = weight
    return actor


GREEDY = ranked(time_left=-0.25, no_larger_size_is_faster=-100.0, done=-30.0)
GREEDY.linear[0] = 1.0


def all_known() -> SpeedLearner:
    speeds = read_speeds(None, 16)
    return fully_observed(list(speeds), np.array(list(speeds.values())))


# What it may do


@pytest.mark.parametrize("actor", [GREEDY, read_actors(None)["trained"], read_actors(None)["untrained"]])
def test_no_slot_gives_more_than_there_is(actor: Actor) -> None:
    one = prepare(draw("12 nodes", 1), read_speeds(None, 16))
    assert_within(one.jobs, Player(actor, all_known(), one))


def test_where_all_fit_at_their_best_sizes_they_get_these() -> None:
    one = prepare(draw("500 nodes", 1), read_speeds(None, 16))
    jct = simulate(one.jobs, Player(read_actors(None)["untrained"], all_known(), one, best_sizes=True)).jct
    np.testing.assert_allclose(jct, fastest_alone(one.jobs), rtol=1e-9)
    scarce = prepare(draw("12 nodes", 1), read_speeds(None, 16))
    assert_within(scarce.jobs, Player(read_actors(None)["untrained"], all_known(), scarce, best_sizes=True))


def test_it_knows_only_speeds_that_a_job_reported() -> None:
    one = prepare(draw("24 nodes", 1), read_speeds(None, 16))
    observed = new_observed(16)
    simulate(one.jobs, Player(read_actors(None)["warm"], observed, one))
    truth = {name: one.jobs.rate[k] * one.scale[k] for k, name in enumerate(one.names)}
    for row, name in enumerate(observed.names):
        reported = observed.speeds.times[row].reshape(16, 16) > 0
        assert 0 < reported.sum() < 128  # by far not all of them: 256
        trained = reported & (truth[name][1:, 1:] > 0)
        np.testing.assert_allclose(observed.expected(row)[trained], truth[name][1:, 1:][trained], rtol=1e-9)


def test_unreported_speeds_are_estimated_by_reported_ones_and_by_other_kinds() -> None:
    other = np.sqrt(np.arange(1, 17))[:, None] * np.ones(16)
    observed = new_observed(16)
    for at, speed in np.ndenumerate(other):
        observed.add_report(observed.row("a"), at, float(speed))
    assert observed.expected(0) == pytest.approx(other)
    # As the other one, relative to its best.
    assert observed.expected(observed.row("b")) == pytest.approx(other / 4.0, rel=0.02)
    observed.add_report(1, (0, 0), 6.0)
    assert observed.expected(1)[0, 0] == pytest.approx(6.0)
    assert observed.expected(1)[3, 8] == pytest.approx(12.0, rel=0.05)  # like the other, at its own reported level
    observed.add_report(1, (3, 8), 3.0)
    assert observed.expected(1)[3, 8] == pytest.approx(3.0)
    assert 3.0 < observed.expected(1)[1, 2] < 6.0 * math.sqrt(2)  # between the two


def test_a_learner_takes_over_reports_of_another_where_it_has_none() -> None:
    one, other = new_observed(4), new_observed(4)
    one.add_report(one.row("a"), (0, 0), 2.0)
    other.add_report(other.row("b"), (1, 1), 5.0)
    for at, speed in (((0, 0), 1.9), ((3, 3), 8.0)):
        other.add_report(other.row("a"), at, speed)
    copy = one.copy()
    one.join(other)
    assert (one.names, copy.names) == (["a", "b"], ["a"])
    assert [one.expected(0)[at] for at in ((0, 0), (3, 3))] == pytest.approx([2.0, 8.0])
    assert one.expected(1)[1, 1] == pytest.approx(5.0)
    assert copy.speeds.times.sum() == 1


def test_a_kind_that_goes_at_half_its_speed_does_so_at_every_size_at_once() -> None:
    observed = all_known()
    row = observed.names.index("vgg-16")
    before = observed.expected(row).copy()
    assert observed.add_report(row, (13, 0), before[13, 0] / 2)
    np.testing.assert_allclose(observed.expected(row), before / 2, rtol=1e-12)
    assert observed.add_report(row, (13, 0), before[13, 0] / 2 * 1.1)  # a little: only this size, and by half
    assert observed.expected(row)[13, 0] == pytest.approx(before[13, 0] / 2 * math.sqrt(1.1))
    assert observed.add_report(row, (13, 0), before[13, 0] / 2)  # the latest report counts for half, however many
    assert observed.expected(row)[13, 0] == pytest.approx(before[13, 0] / 2 * 1.1**0.25)
    assert observed.expected(row)[4, 0] == pytest.approx(before[4, 0] / 2, rel=1e-12)
    assert not observed.add_report(row, (4, 0), before[4, 0] / 2)


def test_a_size_at_which_nothing_is_trained_is_known_as_such() -> None:
    observed = new_observed(16)
    row = observed.row("a")
    observed.add_report(row, (15, 15), 0.0)
    observed.add_report(row, (0, 0), 2.0)
    assert observed.expected(row)[15, 15] < 1e-6
    assert observed.expected(row)[14, 15] == pytest.approx(2.0, rel=0.05)  # and says nothing of others
    assert observed.add_report(row, (15, 15), 1.0)
    assert observed.expected(row)[15, 15] == pytest.approx(1.0)
    assert observed.expected(row)[0, 0] == pytest.approx(2.0)


# The setting, with restarts and changes


def test_a_restart_costs_part_of_a_slot_of_resized_jobs_only() -> None:
    jobs = prepare(*workload((0, 5.0), nodes=2)).jobs

    def sizes(*workers: int) -> Any:
        left = list(workers)

        def policy(jobs: Any, course: Any, there: Any) -> None:
            course.sizes[there] = (1, left.pop(0) if len(left) > 1 else left[0])

        return policy

    assert simulate(jobs, sizes(1), 0.1).jct.tolist() == [5.0]
    assert simulate(jobs, sizes(1, 2), 0.1).jct.tolist() == [1 + 0.1 + 4 / 2]  # 1, then 1.8, then 2 and what is left
    assert simulate(jobs, sizes(1, 2, 1, 1), 0.0).jct.tolist() == [4.0]


def test_a_change_of_speed_is_for_one_kind_from_its_slot_on() -> None:
    jobs = prepare(*workload((0, 5.0), nodes=1)).jobs
    drf = rule("drf", jobs)
    assert simulate(jobs, drf).jct.tolist() == [2.5]
    assert simulate(jobs, drf, changes=[SpeedChange(1, 0, 0.5)]).jct.tolist() == [4.0]
    assert simulate(jobs, drf).jct.tolist() == [2.5]  # the workload is as it was


# What it reaches


def test_the_public_setting_s_targets(tmp_path: Path) -> None:
    """On workloads of the independent implementation, with the weights that come along; none was learned from.

    Two of each setting; of 500 nodes one. On all of them: ``gpusched reproduce dl2``.
    """
    drawn = json.loads(gzip.decompress(real("dl2_workloads.json.gz").read_bytes()))
    drawn = [w for w in drawn if w["seed"] < 1000 + examples(1 if w["nodes"] == 500 else 2)]
    file = tmp_path / "drawn.json"
    file.write_text(json.dumps(drawn))
    policies = [f"--policy={name}" for name in ("dl2", "drf", "optimus", "greedy-gain")]
    done = reproduce("--workloads", str(file), *policies, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)

    def jct(setting: str, policy: str, what: str = "mean_jct_slots") -> float:
        mine = [row[what] for row in rows if (row["setting"], row["policy"]) == (f"{setting} nodes", policy)]
        return sum(mine) / len(mine)

    for setting, below_drf in (("96", 0.44), ("500", 0.44), ("24", 0.37), ("12", 0.35)):
        assert jct(setting, "dl2") <= (1 - below_drf) * jct(setting, "drf"), setting
        assert jct(setting, "dl2") <= 1.02 * jct(setting, "greedy-gain"), setting  # which knows all speeds
    for setting in ("96", "500"):
        assert jct(setting, "dl2") <= (1 - 0.175) * jct(setting, "optimus")
        assert jct(setting, "dl2") <= 1.05 * jct(setting, "dl2", "bound_slots")
    actor, speeds = read_actors(None)["trained"], read_speeds(None, 16)
    one = prepare(draw("24 nodes", 0), speeds)
    plain, restarts = (simulate(one.jobs, Player(actor, all_known(), one), slots).jct.mean() for slots in (0.0, 0.1))
    assert plain < restarts <= 1.02 * plain
    again = reproduce("--workloads", str(file), "--policy=drf", "--restart=120s", "--json", cwd=tmp_path)
    rows += [row | {"policy": "restarts"} for row in json.loads(again.stdout)]
    assert jct("24", "drf") < jct("24", "restarts")


def test_before_it_learns_it_is_worse_and_imitation_makes_it_the_rule() -> None:
    actors, speeds = read_actors(None), read_speeds(None, 16)
    for setting in ("12 nodes", "24 nodes", "96 nodes"):
        one = prepare(draw(setting, 0), speeds)
        jct = {stage: simulate(one.jobs, Player(actors[stage], all_known(), one)).jct.mean() for stage in actors}
        assert jct["warm"] == pytest.approx(simulate(one.jobs, rule("drf", one.jobs)).jct.mean(), rel=0.12), setting
        assert jct["untrained"] > 1.5 * jct["trained"], setting


@pytest.mark.parametrize("seed", range(3))
def test_it_recovers_when_a_model_s_speed_is_halved(seed: int) -> None:
    """From ten slots after it on, it gives what one would give that knows all present speeds."""
    one = prepare(draw("24 nodes", seed), read_speeds(None, 16))
    halved, truth, calls = one.names.index("resnet-50"), all_known(), 0
    actor = read_actors(None)["trained"]
    learns, oracle = Player(actor, all_known(), one), Player(actor, truth, one)

    def policy(jobs: Any, course: Any, there: Any) -> None:
        nonlocal calls
        unknown = np.full(len(course.speed), np.nan)
        if calls == 20:
            truth.speeds.total[truth.names.index("resnet-50")] += math.log(0.5)
            oracle._kinds = None
        oracle(jobs, course._replace(speed=unknown), there)
        known = course.sizes.copy()
        course.sizes[:] = 0
        learns(jobs, course, there)
        if calls < 20 or calls >= 30:
            assert np.array_equal(course.sizes, known), calls
        calls += 1

    simulate(one.jobs, policy, changes=[SpeedChange(20, halved, 0.5)])
    assert calls > 60


# How it learns


def test_recorded_choices_have_torch_s_probabilities() -> None:
    torch = pytest.importorskip("torch")
    recipe = Dl2Recipe(nodes=(12,), kept=64)
    school = learning.Dl2Trainer(recipe, PublicSetting(recipe, read_speeds(None, 16)), 3, 1, torch.device("cpu"))
    taken = school._simulate(2, 0.1)
    batch = learning._batch_of(taken, [np.zeros(0, np.float32)] * 2)
    assert len(batch.chosen) > 60
    assert batch.valid.sum(1).max() > 10
    scores = school._scores(batch, np.arange(len(batch.chosen))).log_softmax(-1)
    torchs = scores[torch.arange(len(batch.chosen)), torch.as_tensor(batch.chosen)].detach().numpy()
    np.testing.assert_allclose(batch.log_prob, torchs, atol=2e-5)
    assert batch.log_prob.std() > 0.1


def test_an_advantage_is_what_the_rest_of_the_slot_brought() -> None:
    rng = np.random.default_rng(0)
    reward, value = rng.random(9).astype(np.float32), rng.random(9).astype(np.float32)
    slots, within = np.array([0, 4, 4, 5]), 0.7  # the second slot has no step
    found = np.zeros(9, np.float32)
    learning._advantages(reward, value, slots, within, found)
    for first, last in ((0, 4), (4, 5), (5, 9)):
        for step in range(first, last):
            ahead = 0.0
            for k in range(step, last):
                after = value[k + 1] if k + 1 < last else 0.0
                ahead += within ** (k - step) * (reward[k] + after - value[k])
            assert found[step] == pytest.approx(ahead, abs=1e-6)


def test_a_step_s_reward_is_what_it_adds_to_the_slot() -> None:
    recipe = Dl2Recipe(nodes=(16,), kept=16)
    world = PublicSetting(recipe, read_speeds(None, 16))
    one = world.draw(np.random.default_rng(1))
    tape = learning.new_tape(20_000, 16, 2_000)
    learning.seed_draws(1)
    observed = all_known()
    player, brought, sizes = Player(zero_actor(), observed, one, tape), [], []

    def policy(jobs: Any, course: Any, there: Any) -> None:
        player(jobs, course, there)
        best = jobs.rate.max((1, 2))[jobs.kind[there]]
        left = np.maximum((jobs.epochs[there] - course.progress.done[there]) / best, 0.5)
        rate = jobs.rate[jobs.kind[there], course.sizes[there, 0], course.sizes[there, 1]]
        brought.append(float((rate / best * left**-0.25).sum()))
        sizes.append(course.sizes.sum())

    simulate(one.jobs, policy)
    ends = [*player.slots[1:], int(tape.number[0])]
    for first, last, whole in zip(player.slots, ends, brought, strict=True):
        assert tape.reward[first:last].sum() == pytest.approx(whole, abs=1e-4)
    assert max(sizes) > 20


class FewValidations(PublicSetting):
    def validation_workloads(self) -> list[Any]:
        return super().validation_workloads()[4:6]


class Reversed(FewValidations):
    """A world in which of workloads drawn together the last one ends first; as many threads as these are needed."""

    def __init__(self, recipe: Dl2Recipe, speeds: Any) -> None:
        super().__init__(recipe, speeds)
        self._left: list[Any] = []
        self._ended = threading.Condition()

    def draw(self, rng: np.random.Generator) -> Any:
        self._left.append(super().draw(rng))
        return self._left[-1]

    def record(self, actor: Actor, one: Any, *how: Any) -> Any:
        with self._ended:
            self._ended.wait_for(lambda: self._left[-1] is one)
            slots = super().record(actor, one, *how)
            self._left.pop()
            self._ended.notify_all()
        return slots


def test_the_same_seed_learns_the_same_whichever_thread_ends_first() -> None:
    pytest.importorskip("torch")
    recipe = Dl2Recipe(nodes=(8, 12), imitated=4, imitation_steps=20, rounds=2, batch=3, kept=64)
    speeds = read_speeds(None, 16)
    worlds = FewValidations(recipe, speeds), Reversed(recipe, speeds)
    first, again = (learning.learn(recipe, world, 5, workers=n) for world, n in zip(worlds, (1, 4), strict=True))
    known, other = (world._observed for world in worlds)
    assert known.names == other.names
    assert all(np.array_equal(*both) for both in zip(known.speeds, other.speeds, strict=True)), "to the last bit"
    for stage in ("untrained", "warm", "best"):
        for one, other in zip(getattr(first, stage), getattr(again, stage), strict=True):
            assert np.array_equal(one, other), stage


def test_imitation_comes_near_what_it_imitates() -> None:
    torch = pytest.importorskip("torch")
    recipe, speeds = Dl2Recipe(nodes=(12, 24), imitated=6, imitation_steps=300, kept=64), read_speeds(None, 16)
    trainer = learning.Dl2Trainer(recipe, PublicSetting(recipe, speeds), 5, 1, torch.device("cpu"))
    untrained = trainer.networks.weights()
    trainer.imitate()
    one = prepare(draw("24 nodes", 900), speeds)
    jct = [
        simulate(one.jobs, Player(actor, all_known(), one)).jct.mean()
        for actor in (untrained, trainer.networks.weights())
    ]
    drf = simulate(one.jobs, rule("drf", one.jobs)).jct.mean()
    assert jct[1] == pytest.approx(drf, rel=0.12)
    assert jct[0] > 1.5 * drf


# In clusters of our own


class Killed(Exception):
    pass


class Dying(PartitionWorld):
    """A world in which a training dies at its n-th workload."""

    def __init__(self, log: WorkloadLog, workloads: int) -> None:
        super().__init__(log)
        self.left, self.draw = workloads, self._draw

    def _draw(self, rng: np.random.Generator) -> ResizableWorkload:
        self.left -= 1
        if self.left < 0:
            raise Killed
        return self._log.draw(rng)


def test_after_a_kill_it_goes_on_and_ends_where_it_would_have_ended(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    trace = trace_of(np.cumsum(rng.exponential(300, 80)).tolist(), rng.lognormal(7, 1, 80).tolist(), [1, 2, 4, 8] * 20)
    log = WorkloadLog(trace, 16, np.array([1, 2, 4, 8]), 300.0, 30.0)
    recipe = Dl2Recipe(hidden=4, imitated=2, imitation_steps=20, rounds=4, batch=2, kept=32)

    def learned(workloads: int, checkpoint: Checkpoint | None) -> tuple[learning.Dl2Result, Dying]:
        world = Dying(log, workloads)
        return learning.learn(recipe, world, 5, workers=1, checkpoint=checkpoint), world

    whole, _ = learned(99, None)
    checkpoint = Checkpoint(tmp_path / "checkpoint", "key", every_s=0.0)
    with pytest.raises(Killed):
        learned(2 + 3 * 2, checkpoint)
    resumed, world = learned(99, checkpoint)
    assert world.left == 99 - 2, "one round was left"
    for stage in ("untrained", "warm", "best"):
        for one, other in zip(getattr(whole, stage), getattr(resumed, stage), strict=True):
            assert np.array_equal(one, other), stage
    assert resumed.score == whole.score


def model(actor: Actor, slot_s: str | None = "300") -> TrainedModel:
    about = {} if slot_s is None else {"slot_s": slot_s}
    return TrainedModel("dl2", arrays_of({"trained": actor}), about, "", "<test>")


@given(cases(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_its_sizes_are_sound(case: tuple[list[One], int], seed: int) -> None:
    ones, capacity = case
    rng = np.random.default_rng(seed)
    drawn = Actor(*(part + rng.normal(size=part.shape).astype(np.float32) for part in zero_actor(4)))
    claims = claims_of(ones, capacity)
    question = question_of(claims, "p", 0.0, ("",) * len(ones))
    found = choose_sizes(prepare_live(model(drawn)), question).tolist()
    assert sum(found) <= capacity
    for one, gpus in zip(ones, found, strict=True):
        assert gpus in one.may, (one, gpus)
    assert choose_sizes(prepare_live(model(drawn)), question).tolist() == found


def test_gpus_go_to_the_faster_and_shorter_and_stop_where_they_gain_nothing() -> None:
    def sizes(*ones: One, capacity: int = 8) -> list[int]:
        question = question_of(claims_of(list(ones), capacity), "p", 0.0, ("",) * len(ones))
        return choose_sizes(prepare_live(model(GREEDY)), question).tolist()  # type: ignore[no-any-return]

    flat, steep = power(1, 2, 4, 8, by=0.1), power(1, 2, 4, 8, by=1.0)
    assert sizes(One(steep), One(steep, left_s=1e5), capacity=9) == [8, 1]
    assert sizes(One(flat, left_s=1e5), One(steep), capacity=6)[1] == 4
    # What is left counts at the size that a job has: 400 steps against 100.
    assert sizes(One(steep, held=4), One(steep), capacity=9) == [1, 8]
    done = ranked(done=5.0)
    question = question_of(claims_of([One(steep), One(flat)], 16), "p", 0.0, ("", ""))
    assert choose_sizes(prepare_live(model(done)), question).tolist() == [1, 1]


def test_weights_that_cannot_decide() -> None:
    question = question_of(claims_of([One(power(1, 2))], 2), "p", 0.0, ("",))
    spoilt = ranked(speed=float("nan"))
    with pytest.raises(Unusable, match="returned NaN"):
        choose_sizes(prepare_live(model(spoilt)), question)
    with pytest.raises(ValueError, match="DL2's own setting; train some"):
        prepare_live(model(GREEDY, None))
    wrong = model(GREEDY)
    del wrong.arrays["trained.out"]
    with pytest.raises(ValueError, match=r"trained\.out is missing"):
        prepare_live(wrong)


def test_a_partition_s_workloads_end_as_their_speeds_say() -> None:
    world = WorkloadLog(drawn_trace(), 8, np.array([1, 2, 4, 8]), 100.0, 30.0)
    one = world.draw(np.random.default_rng(3))
    assert (np.diff(one.submit) >= 0).all()
    alone = one._replace(submit=one.submit[:1], work=one.work[:1], base=one.base[:1], speed=one.speed[:1])
    for at, gpus in enumerate(one.sizes.tolist()):
        end = run(alone, lambda claims, coming, gpus=gpus: np.array([gpus]), 0.3)
        assert end[0] == pytest.approx(math.ceil(one.submit[0]) + one.work[0] / one.speed[0, at], abs=1e-9)
    turns: list[int] = []

    def to_and_fro(claims: Any, coming: int) -> Any:
        turns.append(len(turns))
        return np.array([1 + len(turns) % 2])

    long = alone._replace(work=np.array([9.0]), speed=np.ones_like(alone.speed))
    assert run(long, to_and_fro, 0.0)[0] == math.ceil(one.submit[0]) + 9
    assert run(long, to_and_fro, 0.5)[0] == math.ceil(one.submit[0]) + 17  # 1, then half a step each
    most = [0]

    def policy(claims: Any, coming: int) -> Any:
        chosen = by_rule("drf", claims)
        most[0] = max(most[0], int(chosen.sum()))
        return chosen

    assert np.isfinite(run(one, policy, 0.3)).all()
    assert most[0] == 8


def drawn_trace() -> Any:
    from types import SimpleNamespace

    rng = np.random.default_rng(0)
    return SimpleNamespace(
        submit=np.cumsum(rng.exponential(100, 200)), gpus=rng.choice([1, 2, 4, 8, 16], 200),
        duration=rng.lognormal(6, 1, 200),
    )  # fmt: skip


def test_describe_weights_names_what_decides() -> None:
    assert (
        describe_weights(load_file(SHIPPED, "dl2")) == "a linear score of 20 inputs, and a network of 27-32-1 beside it"
    )
    assert describe_weights(model(GREEDY)) == "a linear score of 20 inputs, no neural network"
    assert (len(STEP_FEATURES), len(CLUSTER_FEATURES)) == (INPUTS, SHARED) == (20, 7)
