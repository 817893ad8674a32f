"""MAIFS' setting of our own: measurements, known speeds, the joint step, and the value of the agents."""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.vector import to_arrays, to_vector, vector_size
from gpusched.agents.maifs import live, market, rules
from gpusched.agents.maifs.beliefs import new_beliefs, record_speeds, refresh
from gpusched.agents.maifs.engine import MaifsRun, apply, best_alone_jct, plan_of, serve, simulate, simulate_agent
from gpusched.agents.maifs.joint import GRAPH, MODES, ROUNDS, agree, fill, new_plan
from gpusched.agents.maifs.kinds import (
    CORES,
    MEMORY_GB,
    PROPORTIONAL,
    SERVER,
    SHAPES,
    MaifsJobClasses,
    maifs,
    read_kinds,
)
from gpusched.agents.maifs.learn import learn as learn_weights
from gpusched.agents.maifs.network import SHAPES as WEIGHTS
from gpusched.agents.maifs.network import agent_of, set_weights, untrained, with_power
from gpusched.agents.maifs.reproduce import QUICK, result_of, weights_of
from gpusched.agents.maifs.rules import decide
from gpusched.agents.maifs.train import WeightChoice
from gpusched.agents.maifs.workloads import WEEK_S, MaifsJobs, draw, drawn_arrivals, read_arrivals
from gpusched.agents.maifs.world import MaifsWorld, exact_estimates, new_run, problem_of, world_of
from gpusched.config.weights import TrainedModel, load_file
from gpusched.errors import UsageError
from gpusched.estimation.speeds import learn
from gpusched.sched.agent import Unusable
from gpusched.sched.sizing.question import PART, Question, SizingNodes, new_claims, question_of
from tests.agents import inside
from tests.traces.samples import real

PER = len(CORES) * len(MEMORY_GB)
"""Points of a shape."""
TRACES, LOADS, ABSENT = maifs().traces, maifs().loads, maifs().absent
FILES = {name: of.file for name, of in TRACES.items() if of.file}


def measured() -> MaifsJobClasses:
    return read_kinds()


def day(trace: str, seed: int, load: float = 0.9, purpose: str = "train", density: float = 0.2) -> MaifsWorld:
    kinds = measured()
    arrivals = read_arrivals(real(FILES[trace]).parent, trace)
    return world_of(
        draw(arrivals, trace, kinds, kinds.names, getattr(TRACES[trace], purpose)[-1], load, seed, density, 2.0), kinds
    )


def test_the_measurements_that_come_along_are_the_published_ones() -> None:
    ours, theirs = measured(), read_kinds(real("../profiles/synergy_sensitivity.json").parent)
    assert ours.names == theirs.names
    assert np.array_equal(ours.speed, theirs.speed)
    assert np.array_equal(ours.restart_s, theirs.restart_s)


def test_without_a_trace_jobs_are_drawn(tmp_path: Path) -> None:
    done = run("--quick", "--policy", "proportional", "--policy", "maifs", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {(row["trace"], row["load"], row["policy"]): row["mean_jct_s"] for row in json.loads(done.stdout)}
    assert found.keys() == {("drawn", load, policy) for load in LOADS for policy in ("proportional", "maifs")}
    assert all(found["drawn", load, "maifs"] < found["drawn", load, "proportional"] for load in LOADS)


def point(shape: int, cores: int, memory: int) -> int:
    return (shape * len(CORES) + cores) * len(MEMORY_GB) + memory


def tiny(*jobs: tuple[float, int, float], nodes: int = 2, groups: int = 1) -> MaifsWorld:
    """Jobs (arrival, shape asked for, seconds in proportion) of alexnet; a restart takes 80 s."""
    kinds = measured()
    speed = kinds.speed[kinds.names.index("alexnet")][None]
    asked = np.array([shape for _, shape, _ in jobs])
    gpus = np.array([SHAPES[shape][0] for shape in asked])
    work = MaifsJobs(
        np.array([at for at, _, _ in jobs]), np.zeros(len(jobs), np.int64),
        np.array([seconds for _, _, seconds in jobs]) * speed[0, asked * PER + PROPORTIONAL], asked,
        gpus, gpus, np.ones(len(jobs)), np.tile(np.array(SERVER, np.float64), (nodes, 1)),
        np.arange(groups + 1) * nodes // groups,
    )  # fmt: skip
    return world_of(work, MaifsJobClasses(("alexnet",), speed, np.array([80.0])))


def test_speeds_are_the_measured_ones_and_placeholders_are_none() -> None:
    kinds = measured()
    at = {
        name: row.reshape(len(SHAPES), len(CORES), len(MEMORY_GB))
        for name, row in zip(kinds.names, kinds.speed, strict=True)
    }
    alexnet, m5, bert = at["alexnet"], at["m5"], at["bert"]
    usual = alexnet[0, 2, 1]
    assert usual == pytest.approx(1 / 0.6)
    assert alexnet[0, 7, 2] / usual == pytest.approx(2.94)  # 12 cores and 125 GB
    assert alexnet[0, 7, 1] / usual == pytest.approx(2.0)
    assert not alexnet[:, :, 0].any()  # 0.1 with 20.83 GB: a placeholder
    # With 2 GPUs the table ends at 9 cores: 12 are no slower.
    assert alexnet[1, 7, 1] == alexnet[1, 6, 1] == pytest.approx(alexnet[1, 2, 1] * 2.33)
    assert [m5[0, 5, m] / m5[0, 2, 1] for m in (1, 2, 3)] == pytest.approx([1.5, 2.0, 2.5])
    assert bert[0, 0, 0] == bert[0, 7, 4] > 0
    assert bert[3, 2, 1] / bert[0, 2, 1] == pytest.approx(4.24, abs=0.01)
    # On a node of 8 GPUs, 24 cores, 500 GB there is no more for eight GPUs than their part.
    assert not bert[3, 3:].any()
    assert not bert[3, :, 2:].any()
    assert bert[5, 5, 2] > 0  # two by two nodes: 4 GPUs, 24 cores and 500 GB


@pytest.mark.parametrize("trace", FILES)
def test_workloads_have_their_load_and_keep_weeks_and_models_apart(trace: str) -> None:
    kinds, arrivals = measured(), read_arrivals(real(FILES[trace]).parent, trace)
    weeks = [*TRACES[trace].train, *TRACES[trace].choose, *TRACES[trace].test]
    assert len(set(weeks)) == len(weeks)
    known = tuple(name for name in kinds.names if name not in ABSENT)
    for load in LOADS:
        jobs = draw(arrivals, trace, kinds, known, TRACES[trace].test[0], load, 3)
        usual = kinds.speed[jobs.kind, jobs.requested * PER + PROPORTIONAL]
        gpus = np.array([g for g, _ in SHAPES])[jobs.requested]
        offered = (jobs.steps / usual * gpus).sum() / (len(jobs.node) * 8 * WEEK_S)
        assert offered == pytest.approx(load, rel=0.06)
        assert not {kinds.names[kind] for kind in jobs.kind} & set(ABSENT)
        assert (np.diff(jobs.arrival) >= 0).all()
        assert (jobs.least <= gpus).all()
        assert (gpus <= jobs.most).all()
    again, other = (draw(arrivals, trace, kinds, known, weeks[-1], 0.9, seed) for seed in (3, 4))
    assert not np.array_equal(again.kind[:100], other.kind[:100])
    first = draw(arrivals, trace, kinds, known, weeks[-1], 0.9, 3)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_a_draw_without_jobs_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"drawn: no job was drawn in 1 days of week 0 \(seed 3\)"):
        draw(drawn_arrivals(), "drawn", measured(), measured().names, 0, 0.9, 3, density=0.0, days=1.0)


def test_first_come_first_served_is_exact() -> None:
    # 8 GPUs each on two nodes, the third waits for the first that ends; decisions are a minute apart.
    played = simulate(
        w := tiny((0.0, 3, 1000.0), (10.0, 3, 500.0), (20.0, 3, 100.0)),
        exact_estimates(w.truth),
        rules.PROPORTIONAL_RULE,
    )
    assert played.jct == pytest.approx([1000.0, 550.0, 640.0])
    assert played.makespan == pytest.approx(1000.0)
    assert played.restarts == 0


@pytest.mark.parametrize("rule", [rules.PROPORTIONAL_RULE, rules.LAS])
def test_rules_fill_the_group_with_the_fewest_gpus_left(rule: int) -> None:
    # 4 GPUs and 1 on one of two nodes, each a group, so that 8 go on the other at once.
    world = tiny((0.0, 2, 1000.0), (10.0, 0, 1000.0), (20.0, 3, 100.0), groups=2)
    assert simulate(world, exact_estimates(world.truth), rule).jct == pytest.approx([1000.0, 1050.0, 140.0])


def test_a_job_that_is_moved_or_resized_pays_for_its_restart() -> None:
    world = tiny((0.0, 0, 1000.0))
    (run, course), known = new_run(world.jobs), exact_estimates(world.truth)
    progress = run.progress
    assert run.next_round()
    plan = decide(world, course, known, run.active, rules.PROPORTIONAL_RULE)
    apply(world, course, plan)
    assert course.since[0] == 0.0
    assert run.next_round()
    serve(world, course)
    apply(world, course, plan)  # nothing changed
    done, rate = progress.done[0], world.truth[0, course.point[0]]
    assert (done, progress.restarts[0]) == (300.0 * rate, 0)
    plan.node[0, 0] = 1 - plan.node[0, 0]
    apply(world, course, plan)
    assert course.since[0] == 380.0
    assert run.next_round()  # 300 s later, of which it starts for 80
    serve(world, course)
    assert progress.done[0] == pytest.approx(done + 220.0 * rate)
    assert (course.served[0], progress.restarts[0]) == (600.0, 1)


@pytest.mark.parametrize("name", ["las", "synergy", "greedy", *MODES])
def test_sizes_stay_within_capacity_and_the_job_s_bounds(name: str) -> None:
    world, full = day("philly", 1, 1.1), 0
    (run, course), known = new_run(world.jobs), exact_estimates(world.truth)
    agent = agent_of(untrained(0) + np.random.default_rng(0).normal(0, 0.1, vector_size(WEIGHTS)))
    beliefs = new_beliefs(world.truth, 0.0)
    mode = MODES.get(name)
    rule = {"las": rules.LAS, "synergy": rules.SYNERGY, "greedy": rules.GREEDY}.get(name, 0)
    while run.next_round():
        there = run.active
        serve(world, course)
        if mode is None:
            plan = decide(world, course, known, there, rule)
        else:
            plan = plan_of(beliefs, agent, MaifsRun(world, course, beliefs.known, 0, beliefs, agent, mode))
        used, placed = np.zeros_like(world.jobs.node), np.flatnonzero(plan.point >= 0)
        points, jobs = plan.point[placed], there[placed]
        row, place = np.nonzero(plan.node[placed] >= 0)
        nodes = plan.node[placed][row, place]
        assert (np.bincount(row, minlength=len(placed)) == world.spread[points]).all()
        assert len(set(zip(row.tolist(), nodes.tolist(), strict=True))) == len(row), "each on nodes that differ"
        groups = set(zip(row.tolist(), world.group_of[nodes].tolist(), strict=True))
        assert len(groups) == len(placed), "each within one group"
        np.add.at(used, nodes, world.need[points[row]])
        assert (world.truth[world.jobs.kind[jobs], points] > 0).all()
        assert (world.jobs.least[jobs] <= world.gpus[points]).all()
        assert (world.gpus[points] <= world.jobs.most[jobs]).all()
        assert (used <= world.jobs.node + 1e-6).all()
        assert plan.free == pytest.approx(world.jobs.node - used)
        full += bool(used[:, 0].sum() >= 0.9 * world.jobs.node[:, 0].sum())
        apply(world, course, plan)
    assert full > 50
    assert (run.end - world.jobs.arrival >= best_alone_jct(world) * (1 - 1e-6)).all()


def test_messages_find_the_best_joint_choice_of_two_agents_and_of_a_chain() -> None:
    rng = np.random.default_rng(0)
    better = 0
    for agents, _ in itertools.product((2, 3), range(200)):
        score = np.concatenate((np.sort(rng.uniform(1, 10, (agents, 3)))[:, ::-1], np.zeros((agents, 1))), 1)
        who = np.full((agents, 4), -1)
        for k in range(agents):  # neighbours share jobs: 0 and 1, 1 and 2
            who[k, :3] = rng.permutation([10 * k, 10 * k + 10, 10 * k + 5])
        chosen = np.zeros(agents, np.int64)
        agree(np.ascontiguousarray(score), who, chosen)
        assert worth(score, who, chosen) == pytest.approx(
            max(worth(score, who, c) for c in itertools.product(range(4), repeat=agents))
        )
        better += worth(score, who, chosen) > worth(score, who, [0] * agents) + 1e-9
    assert better > 40  # often, to take one's own best is not best for all


def test_agents_choose_as_by_each_message_computed_alone() -> None:
    rng = np.random.default_rng(1)
    for agents in rng.integers(1, 9, 100):
        score, who = np.zeros((agents, 4)), np.full((agents, 4), -1)
        for k in range(agents):
            count = rng.integers(0, 4)
            who[k, :count] = rng.permutation(5)[:count]
            score[k, :count] = rng.integers(1, 5, count) + rng.choice([0.0, 0.1])  # often equal
        chosen = np.zeros(agents, np.int64)
        agree(score, who, chosen)
        assert chosen.tolist() == plain_choice(score, who)


def plain_choice(score: Any, who: Any) -> list[int]:
    message = np.zeros((len(score), *score.shape))
    same = (who[:, None, :, None] == who[None, :, None, :]) & (who >= 0)[:, None, :, None]
    joined = same.any((2, 3)) & ~np.eye(len(score), dtype=bool)
    for _ in range(ROUNDS):
        for k in range(len(score)):
            for other in np.flatnonzero(joined[k]):
                known = sum(message[joined[k], k], score[k]) - message[other, k]
                either = known[:, None] - same[k, other] * np.minimum(score[k][:, None], score[other][None, :])
                message[k, other] = either.max(0) - sum(either.max(0) / 4)
    return [int(np.argmax(sum(message[joined[k], k], score[k]))) for k in range(len(score))]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_bids_that_are_kept_or_shared_by_groups_are_those_computed_anew(mode: int) -> None:
    world, kept = day("openb", 3, 1.1, density=0.5), 0
    (run, course), known = new_run(world.jobs), exact_estimates(world.truth)
    agent = agent_of(untrained(0) + np.random.default_rng(0).normal(0, 0.1, vector_size(WEIGHTS)))
    while run.next_round() and kept < 40:
        serve(world, course)
        problem, plans = problem_of(world, course, known, run.active), []
        # As many GPUs at a point as there never are: every bid is renewed. A mask: no groups are alike.
        anew = problem._replace(
            gpus=np.append(problem.gpus, 10**15), mask=np.zeros_like(problem.mask),
            may=np.ones((1, len(problem.node)), np.uint8),
        )  # fmt: skip
        for given in (problem, anew):
            plans.append(new_plan(given, run.active))
            set_weights(given, plans[-1], agent, True)
            fill(given, plans[-1], mode)
        assert all(np.array_equal(one, other) for one, other in zip(*plans, strict=True))
        kept += len(run.active) > 5
        apply(world, course, plans[0])
    assert kept == 40


def worth(score: Any, who: Any, chosen: Any) -> float:
    """What a joint choice brings: of bids for the same job the larger."""
    best: dict[int, float] = {}
    for k, c in enumerate(chosen):
        best[who[k, c]] = max(best.get(who[k, c], 0.0), float(score[k, c]))
    return sum(best.values())


def test_agents_do_not_take_running_jobs_from_each_other() -> None:
    """Every move costs a restart; one chooser keeps jobs where they are, and so do agents that act at once."""
    world, weights = day("openb", 11, density=0.3), with_power(untrained(0), 1.0)
    alone, *agents = (simulate_agent(world, weights, mode).restarts for mode in MODES.values())
    assert alone > 100
    assert max(agents) < 1.2 * alone


def test_when_queues_are_long_an_auction_is_better_than_agents_that_act_at_once() -> None:
    """A bid of one agent passes better ones of others, and takes their jobs' places."""
    world, kinds = day("openb", 1, 1.1, "test", 1.0), measured()
    jct = {
        name: float(result_of((maifs().policies | maifs().ablations)[name], world, kinds, weights_of()).jct.mean())
        for name in ("greedy-true", "maifs", "maifs-graph")
    }
    assert jct["maifs"] < 0.97 * jct["maifs-graph"]
    assert jct["maifs"] < 1.02 * jct["greedy-true"]


def test_beliefs_come_from_reports_of_jobs_only() -> None:
    truth = measured().speed
    beliefs = new_beliefs(truth, 0.0)
    other = new_beliefs(np.where(truth > 0, np.random.default_rng(0).uniform(1, 9, truth.shape), 0.0), 0.0)
    assert np.array_equal(beliefs.known.speed, other.known.speed)  # only possible sizes are known
    before = beliefs.known.speed.copy()
    row, here, more, far = truth[0], point(0, 2, 1), point(0, 3, 1), point(1, 2, 1)
    assert learn(beliefs.speeds, 0, here, float(np.log(row[here])), 0.0)
    refresh(beliefs, 0, 0.0)
    speed = beliefs.known.speed
    assert speed[0, here] == pytest.approx(row[here])
    assert speed[0, far] == pytest.approx(row[here] * 2**0.8, rel=0.05)  # by the prior, from what is known now
    assert np.array_equal(speed[1:], before[1:])  # other models do not change
    learn(beliefs.speeds, 0, more, float(np.log(row[more])), 0.0)
    refresh(beliefs, 0, 0.0)
    assert speed[0, more] == pytest.approx(row[more])
    # What was learned of cores on one GPU holds on two.
    assert speed[0, point(1, 3, 1)] / speed[0, far] == pytest.approx(row[more] / row[here], rel=0.1)
    assert beliefs.known.uncertainty[0] < beliefs.known.uncertainty[1]


def test_a_running_job_reports_its_speed_once_for_its_size() -> None:
    world = tiny((0.0, 0, 1000.0))
    (run, course), beliefs = new_run(world.jobs), new_beliefs(world.truth, 0.0)
    for times in (0, 1, 1):
        assert run.next_round()
        plan = decide(world, course, exact_estimates(world.truth), run.active, rules.PROPORTIONAL_RULE)
        apply(world, course, plan)
        record_speeds(world, course, beliefs, run.active, 0.0)
        assert beliefs.speeds.times.sum() == times
    assert beliefs.known.speed[0, plan.point[0]] == pytest.approx(world.truth[0, plan.point[0]])


def test_weights_are_kept_whole() -> None:
    numbers = weights_of()
    assert np.array_equal(to_vector(to_arrays(numbers, WEIGHTS), WEIGHTS), numbers)
    with pytest.raises(ValueError, match="attention is missing"):
        to_vector({k: v for k, v in to_arrays(numbers, WEIGHTS).items() if k != "attention"}, WEIGHTS)


def test_training_is_the_same_every_time_and_never_keeps_what_is_worse_than_the_start() -> None:
    kinds = measured()
    arrivals = {trace: read_arrivals(real(FILES[trace]).parent, trace) for trace in FILES}
    quick = replace(QUICK, days=0.5)
    one, two = (learn_weights(arrivals, kinds, quick, 3, threads, lambda done, total: None) for threads in (1, 2))
    assert np.array_equal(one.numbers, two.numbers)
    assert one.course == two.course
    assert min(cost for _, cost in one.course) <= one.course[0][1]


@pytest.mark.parametrize("trace", FILES)
def test_the_trained_agents_are_nearly_as_good_as_with_every_speed_known(trace: str) -> None:
    jct: dict[str, list[float]] = {}
    for seed in (901, 902, 903):
        world = day(trace, seed, purpose="test", density=0.3)
        kinds = MaifsJobClasses((), world.truth, world.restart_s)
        for name in ("proportional", "greedy-true", "maifs-untrained", "maifs"):
            jct.setdefault(name, []).append(
                float(result_of(maifs().policies[name], world, kinds, weights_of()).jct.mean())
            )
    mean = {name: float(np.mean(found)) for name, found in jct.items()}
    assert mean["maifs"] < mean["maifs-untrained"]
    assert mean["proportional"] - mean["maifs"] >= 0.9 * (mean["proportional"] - mean["greedy-true"])
    assert all(mine < base for mine, base in zip(jct["maifs"], jct["proportional"], strict=True))


def test_training_keeps_the_start_unless_others_are_better_on_average_and_nowhere_worse() -> None:
    start, other = np.zeros(2), np.ones(2)
    choice = WeightChoice(start, np.array([0.0, -0.1]), np.array([0.0, -0.1]))
    for costs, kept in (([-0.5, 0.0], start), ([0.1, -0.5], start), ([0.0, -0.2], other), ([-0.1, -0.1], other)):
        assert choice.better(other, np.array(costs)).numbers is kept
    better = choice.better(other, np.array([-0.1, -0.2]))
    assert better.better(start, np.array([-0.1, -0.1])) is better


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return inside.run("reproduce", "maifs", *words, cwd=cwd)


def test_the_table(tmp_path: Path) -> None:
    words = (
        "--quick",
        "--workloads",
        str(real(FILES["philly"]).parent),
        "--policy",
        "proportional",
        "--policy",
        "maifs",
    )
    done = run(*words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 2 * sum(len(TRACES[trace].test) for trace in FILES) * len(LOADS)
    for row in rows:
        assert row["bound_s"] < row["mean_jct_s"] < row["makespan_s"]
        assert row["makespan_s"] >= row["bound_makespan_s"] * (1 - 1e-6)
    shown = run(*words, cwd=tmp_path).stdout
    assert [line.split()[:3] for line in shown.splitlines()[1:3]] == [
        ["philly", "0.7", "proportional"],
        ["philly", "0.7", "maifs"],
    ]
    assert "no reproduction" in " ".join(shown.split())


def question(jobs: list[tuple[int, float, float]], capacity: int, allowed: list[list[int]] | None = None) -> Question:
    """Jobs (GPUs held, seconds left, exponent of the GPUs in the pace) of 1, 2, 4 or 8 GPUs, on two nodes of 8."""
    claims, most = new_claims(len(jobs), 4), np.array((1, 2, 4, 8))
    claims.sizes[:] = most
    claims.allowed[:] = 1 if allowed is None else np.array(allowed)
    claims.reported[:] = 1
    free, parts = np.tile(np.array([8, 64, 1 << 16]), (2, 1)), list[tuple[int, int, int, int]]()
    first, last = np.zeros((2, len(jobs)), np.int64)
    for j, (held, left_s, power) in enumerate(jobs):
        claims.jobs["held"][j], claims.jobs["left_s"][j], claims.jobs["share"][j] = held, left_s, 1 / 16
        claims.jobs["count"][j], claims.jobs["cost_s"][j] = 4, 30.0
        claims.pace[j] = most**power
        first[j] = len(parts)
        if held:
            node = int(free[0, 0] < held)
            free[node] -= held * np.array([1, 1, 1024])
            parts.append((node, held, held, 1024 * held))
        last[j] = len(parts)
    claims.number[:] = (len(jobs), capacity, capacity, 16, 0, *claims.number[5:])
    amounts = np.stack((most, 1024 * most), 1)
    nodes = SizingNodes(
        np.zeros(0, np.int64), np.tile(np.array([8, 64, 1 << 16]), (2, 1)), free,
        np.tile(np.column_stack((np.ones(4, np.int64), most, amounts)), (len(jobs), 1, 1)),
        np.tile(amounts, (len(jobs), 1, 1)), np.tile(np.array([1.0, 1024.0]), (len(jobs), 1)),
        np.full(len(jobs), -1), np.zeros((0, 2), np.uint8), first, last, np.array(parts, PART),
    )  # fmt: skip
    return question_of(claims, "A", 0.0, ("",) * len(jobs), lambda: nodes)


def shipped(**about: str) -> live.LiveAgents:
    return live.prepare(TrainedModel("maifs", to_arrays(weights_of(), WEIGHTS), about, "", ""))


def sizes(agent: live.LiveAgents, asked: Question) -> list[int]:
    return live.choose_sizes(agent, asked)[:, 0].tolist()  # type: ignore[no-any-return]


def test_beliefs_are_of_names_with_reports_and_take_no_more_memory_than_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(market, "_problem", lambda claims, nodes, speeds, levels: speeds)
    asked = question([(0, 600.0, 1.0)] * 12, 16)._replace(names=tuple("abcdefghijkl"))
    asked.claims.reported[:] = 0
    asked.claims.reported[2, 0] = 1
    assert market.problem_of(asked, 0.0).kind.tolist() == [0, 0, 1, *[0] * 9]  # type: ignore[attr-defined]
    many = asked._replace(claims=asked.claims._replace(sizes=np.tile(np.arange(1, 1001), (12, 1))))
    many.claims.reported[:] = 1
    with pytest.raises(Unusable, match="jobs of 12 names have 1000 sizes"):
        market.problem_of(many, 0.0)


@pytest.mark.parametrize("choose", MODES)
def test_live_sizes_are_allowed_within_capacity_and_given_to_jobs_that_gain(choose: str) -> None:
    agent = shipped(coordination=choose)
    assert sizes(agent, question([(0, 600.0, 1.0), (0, 600.0, 0.1)], 9)) == [8, 1]  # the second is not faster with more
    assert sizes(agent, question([(0, 600.0, 1.0)] * 3, 3)) == [1, 1, 1]
    braked = question([(2, 600.0, 1.0), (0, 600.0, 0.5)], 16, [[0, 1, 0, 0], [1, 1, 1, 1]])
    assert sizes(agent, braked) == [2, 8]
    rng = np.random.default_rng(0)
    for _ in range(50):
        jobs = [(int(rng.choice((0, 1, 2))), float(rng.uniform(60, 9000)), float(rng.uniform(0, 1))) for _ in range(6)]
        assert sum(sizes(agent, question(jobs, 16))) <= 16


def test_weights_say_how_agents_coordinate() -> None:
    files = (Path(live.__file__).parents[2] / "data/maifs.safetensors", "maifs")
    assert live.prepare(load_file(*files)).mode == GRAPH  # those of the setting decide live, too
    for about, why in (({"coordination": "loud"}, "expected one of alone"), ({"slot_s": "60"}, "train them again")):
        with pytest.raises(ValueError, match=why):
            shipped(**about)


def test_sizes_live_stay_where_a_restart_costs_more_than_it_brings() -> None:
    assert sizes(shipped(), question([(4, 20.0, 0.2)], 16)) == [4]
    assert sizes(shipped(), question([(4, 9000.0, 1.0)], 16)) == [8]


def test_a_job_gets_the_cores_that_make_it_faster_and_no_more() -> None:
    """Of two jobs of one name the first was seen with few cores and with many, at almost the same speed."""
    asked = question([(1, 900.0, 1.0), (1, 900.0, 1.0), (0, 900.0, 1.0)], 3, [[1, 0, 0, 0]] * 3)
    assert asked.nodes is not None
    asked.nodes.widest[:, :, 0] *= 4
    asked.nodes.parts["cores"][:2] = 1, 4
    asked.claims.reported[:] = 0
    asked.claims.reported[:2, 0] = 1
    for faster, expected in ((1.0, 1), (2.0, 4)):
        asked.claims.pace[:2, 0] = 1.0, faster
        found = live.choose_sizes(shipped(), asked._replace(names=("m", "m", "m")))
        assert found[2].tolist()[:2] == [1, expected]


def test_jobs_of_one_name_learn_from_each_other() -> None:
    """The one that reports shows that more GPUs do not help; the others of that name start small."""
    asked = question([(4, 9000.0, 0.0), (0, 9000.0, 1.0), (0, 9000.0, 1.0)], 16)
    asked.claims.reported[1:] = 0
    strangers = sizes(shipped(), asked._replace(names=("a", "b", "c")))
    namesakes = sizes(shipped(), asked._replace(names=("a", "a", "a")))
    assert max(namesakes[1:]) < max(strangers[1:])
