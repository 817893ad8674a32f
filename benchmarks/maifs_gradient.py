"""Policy gradient in place of CMA-ES for the weights of MAIFS' agents, from as many simulated runs of the same draws.

    .venv/bin/python -m benchmarks.maifs_gradient TRACES [--seeds 0 1 2] [--rounds 24] [--test 10 20] [--out FOLDER]

Both methods change the same numbers (the linear rule over job and group inputs, and ``bold``) from the same start, and
validation chooses among their weights in the same way (`gpusched.agents.maifs.learn`). Each of CMA-ES' generations is
a round of the gradient: its candidates' runs of each draw are divided among the round's steps.

Exploration is Gaussian noise on what the logarithms of each job's weight and restart horizon and of each group's prices
are linear in, kept for the job's life, and once a run on ``bold``. The reward is minus the job-seconds between
decisions, beyond the mean of the other runs of the same draw (a baseline that depends on the arrivals: Mao et al.,
arXiv:1807.02264). The critic is linear in how far the state differs from theirs at that time; advantages by GAE
(Schulman et al., arXiv:1506.02438), whose trace fades with time, since decisions are not equally far apart; steps by
Adam.

``--test FIRST END``: then the test weeks, whole, with these seeds, as in docs/concepts/maifs.md: change in mean JCT
from ``greedy-true``, and its 95 % interval over seeds. TRACES: the folder of ``gpusched reproduce maifs``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evaluate import interval
from gpusched.agents.common.evolve import first_steps
from gpusched.agents.common.vector import to_arrays
from gpusched.agents.maifs.beliefs import Beliefs, new_beliefs, record_speeds
from gpusched.agents.maifs.engine import apply, simulate, simulate_agent
from gpusched.agents.maifs.joint import AUCTION, GRAPH, JointDecision, JointProblem, fill, new_plan
from gpusched.agents.maifs.kinds import MaifsJobClasses, maifs, read_kinds
from gpusched.agents.maifs.learn import FIRST_STEPS, MaifsSearchSettings, MaifsTrainingCase, evolve, learn
from gpusched.agents.maifs.network import (
    GROUP,
    HIDDEN,
    JOB,
    SHAPES,
    MaifsWeights,
    agent_of,
    group_inputs,
    job_inputs,
    job_values,
    restart_factor,
    set_weights,
    time_left,
    untrained,
)
from gpusched.agents.maifs.reproduce import QUICK, weights_of
from gpusched.agents.maifs.rules import GREEDY
from gpusched.agents.maifs.workloads import draw, read_arrivals
from gpusched.agents.maifs.world import JobStates, MaifsWorld, exact_estimates, new_run, problem_of, world_of
from gpusched.compiled import jit
from gpusched.config.weights import save_model
from gpusched.sched.state import Floats
from gpusched.sim.engine.loop import looped
from gpusched.sim.engine.state import DECIDE, OVER, EventLog, Passes, Sim
from gpusched.sim.rounds import DECISIONS, NOW, active_jobs, apply_rates, is_due
from gpusched.traces.trace import Trace

STATE = 4
SCORES = 2 * JOB + 3 * GROUP
_HOUR = 3600.0


class GradientSettings(NamedTuple):
    """Hyper-parameters.

    Attributes:
        steps: Per round. rate: Of Adam, in first steps of CMA-ES.
        fade_s: Time in which the trace of advantages falls to 1/e.
        noise: Standard deviations, in first steps of CMA-ES. held: Whether a job keeps its noise until it ends, and a
            group for ``fade_s``; else it is drawn anew at every decision.
    """

    steps: int = 2
    rate: float = 0.1
    fade_s: float = 14_400.0
    noise: float = 0.5
    held: bool = True


class Record(NamedTuple):
    """What a run did, decision by decision.

    Attributes:
        time: ``float64[decisions]``. state: ``float64[decisions, STATE]``: sums over the jobs present, for the critic.
        score: ``float64[decisions, SCORES]``: derivative of what was drawn's log density by job.skip, group.skip.
    """

    time: Floats
    state: Floats
    score: Floats


class Noise(NamedTuple):
    """Noise on the weights of each job and group.

    Attributes:
        scale: ``float64[2]``: standard deviations of job.skip and group.skip. held_s: ``float64[2]``: how long each is
            kept.
        job: ``float64[jobs, JOB, 2]``. group: ``float64[groups, GROUP, 3]``.
        drawn: ``float64[jobs + groups]``: when it was drawn.
    """

    scale: Floats
    held_s: Floats
    job: Floats
    group: Floats
    drawn: Floats


class Exploring(NamedTuple):
    """A run of the agents with noise."""

    world: MaifsWorld
    states: JobStates
    beliefs: Beliefs
    agent: MaifsWeights
    noise: Noise
    record: Record


class Explored(NamedTuple):
    """A run's record; ``bold``: its noise in standard deviations."""

    record: Record
    bold: float
    jct: Floats


@jit
def _renew(noise: Floats, scale: float, score: Floats) -> None:
    """Draw noise, ``float64[inputs, outputs]``, anew; add the derivative of its log density to ``score``."""
    for d in range(noise.shape[0]):
        for output in range(noise.shape[1]):
            drawn = np.random.normal()
            noise[d, output] = scale * drawn
            score[d * noise.shape[1] + output] += drawn / scale


@jit
def explore(
    problem: JointProblem, plan: JointDecision, agent: MaifsWeights, noise: Noise, now: float, score: Floats
) -> None:  # fmt: skip
    """Add noise to the weights, restart costs and prices of an empty decision; write the ``score`` of what is drawn."""
    inputs, hidden = job_inputs(problem, plan), np.zeros(HIDDEN)
    for i in range(len(plan.job)):
        job = plan.job[i]
        if now - noise.drawn[job] >= noise.held_s[0]:
            noise.drawn[job] = now
            _renew(noise.job[job], noise.scale[0], score[: 2 * JOB])
        weight, horizon = 0.0, job_values(agent, inputs[i], hidden)[1]
        for d in range(JOB):
            weight += inputs[i, d] * noise.job[job, d, 0]
            horizon += inputs[i, d] * noise.job[job, d, 1]
        plan.weight[i] *= np.exp(weight)
        plan.keep[i] = restart_factor(time_left(problem, plan, i), horizon, problem.cost_s[i])
    groups = group_inputs(problem, plan)
    for group in range(len(groups)):
        at = len(noise.job) + group
        if now - noise.drawn[at] >= noise.held_s[1]:
            noise.drawn[at] = now
            _renew(noise.group[group], noise.scale[1], score[2 * JOB :])
        for r in range(3):
            price = 0.0
            for d in range(GROUP):
                price += groups[group, d] * noise.group[group, d, r]
            plan.price[group, r] *= np.exp(price)


@jit
def summarize(problem: JointProblem, plan: JointDecision, state: Floats) -> None:
    """Write sums over the jobs present: count, waiting, hours left, and the logarithm of these."""
    for i in range(len(plan.job)):
        left = time_left(problem, plan, i) / _HOUR
        state[0] += 1.0
        state[1] += 1.0 if problem.point[i] < 0 else 0.0
        state[2] += left
        state[3] += np.log1p(6.0 * left)


@jit
def explore_round(sim: Sim, log: EventLog, passes: Passes, run: Exploring) -> int:
    """Decide as `engine.decide_round` does, with noise."""
    progress, at = run.states.progress, run.states.progress.counts[DECISIONS]
    if at == len(run.record.time):
        return OVER
    if is_due(sim, progress):
        active = active_jobs(progress)
        record_speeds(run.world, run.states, run.beliefs, active, run.agent.bold[0])
        problem = problem_of(run.world, run.states, run.beliefs.known, active)
        plan = new_plan(problem, active)
        set_weights(problem, plan, run.agent, True)
        run.record.time[at] = progress.time[NOW]
        summarize(problem, plan, run.record.state[at])
        explore(problem, plan, run.agent, run.noise, progress.time[NOW], run.record.score[at])
        fill(problem, plan, GRAPH)
        apply(run.world, run.states, plan)
        apply_rates(sim, log, progress)
    return DECIDE


_run = looped(explore_round)


@jit
def _set_seed(seed: int) -> None:
    np.random.seed(seed)


def run_noisy(world: MaifsWorld, numbers: Floats, settings: GradientSettings, seed: int, most: int) -> Explored:
    """Run all jobs to their end, or ``most`` decisions, with noise."""
    drawn = float(np.random.default_rng(seed).normal())
    (run, states), agent = new_run(world.jobs), agent_of(numbers)
    agent.bold[0] += settings.noise * FIRST_STEPS["bold"] * drawn
    beliefs = new_beliefs(world.truth, float(agent.bold[0]))
    record = Record(np.zeros(most), np.zeros((most, STATE)), np.zeros((most, SCORES)))
    jobs, groups = len(world.jobs.arrival), len(world.jobs.group) - 1
    noise = Noise(
        settings.noise * np.array([FIRST_STEPS["job.skip"], FIRST_STEPS["group.skip"]]),
        np.array([np.inf, settings.fade_s]) if settings.held else np.zeros(2), np.zeros((jobs, JOB, 2)),
        np.zeros((groups, GROUP, 3)), np.full(jobs + groups, -np.inf),
    )  # fmt: skip
    _set_seed(seed)
    run.to_end(_run, Exploring(world, states, beliefs, agent, noise, record))
    result = run.result
    return Explored(Record(*(part[: result.decisions] for part in record)), drawn, result.jct)


class Critic:
    """A value linear in how a state differs from those of other runs, by ridge regression on returns.

    Attributes:
        weights: ``float64[STATE]``: hours by each sum of the state.
    """

    def __init__(self) -> None:
        self._squares, self._products = 1e-3 * np.eye(STATE), np.zeros(STATE)
        self.weights = np.zeros(STATE)

    def learn(self, states: Floats, returns: Floats) -> None:
        """Fit the returns of a step; earlier steps fade."""
        self._squares = 0.8 * self._squares + states.T @ states / len(states) + 1e-3 * np.eye(STATE)
        self._products = 0.8 * self._products + states.T @ returns / len(states)
        self.weights = np.linalg.solve(self._squares, self._products)


def gradient(case: MaifsTrainingCase, runs: Sequence[Explored], critic: Critic, settings: GradientSettings) -> Floats:
    """Return an estimate of the rise of minus the mean JCT, relative to greedy-true's, by each weight.

    Args:
        case: The draw.
        runs: At least two, whose mean is each other's baseline.
        critic: Learns from these runs, once they have been judged.
        settings: Of the runs.
    """
    job: Floats = np.zeros(2 * JOB)
    group: Floats = np.zeros(3 * GROUP)
    bold = 0.0
    seen: list[Floats] = []
    returned: list[Floats] = []
    for mine in runs:
        others = [run for run in runs if run is not mine]
        times = mine.record.time
        ends = np.append(times[1:], np.inf)
        reward = -_extra(case, mine, others, ends) + _extra(case, mine, others, times)
        state = mine.record.state - np.mean([_state_at(run.record, times) for run in others], 0)
        value = np.append(state @ critic.weights, 0.0)
        fade = np.exp(-np.append(np.diff(times), 0.0) / settings.fade_s)
        gain = np.zeros(len(times) + 1)
        for t in range(len(times) - 1, -1, -1):
            gain[t] = reward[t] + value[t + 1] - value[t] + fade[t] * gain[t + 1]
        found = gain[:-1] @ mine.record.score
        job, group = job + found[: 2 * JOB], group + found[2 * JOB :]
        bold += reward.sum() * mine.bold / (settings.noise * FIRST_STEPS["bold"])
        seen.append(state)
        returned.append(gain[:-1] + value[:-1])
    critic.learn(np.concatenate(seen), np.concatenate(returned))
    parts = {"job.skip": job, "group.skip": group, "bold": np.array([bold])}
    hours = len(case.world.jobs.arrival) * case.greedy_s / _HOUR * len(runs)
    return np.concatenate([parts.get(name, np.zeros(int(np.prod(of)))) for name, of in SHAPES.items()]) / hours


def _extra(case: MaifsTrainingCase, mine: Explored, others: Sequence[Explored], until: Floats) -> Floats:
    """Return the job-hours of a run until each time, beyond the mean of the others."""
    mean: Floats = np.mean([area(case.world.jobs.arrival, run.jct, until) for run in others], 0)
    return (area(case.world.jobs.arrival, mine.jct, until) - mean) / _HOUR


def area(arrival: Floats, jct: Floats, until: Floats) -> Floats:
    """Return the job-seconds in the system until each time; unfinished jobs (JCT NaN) stay for a day."""
    end = arrival + np.where(np.isnan(jct), 86_400.0, jct)
    at = np.concatenate((arrival, end))
    order = np.argsort(at, kind="stable")
    at, count = at[order], np.cumsum(np.where(order < len(arrival), 1.0, -1.0))
    sums = np.append(0.0, np.cumsum(count[:-1] * np.diff(at)))
    found: Floats = np.interp(until, at, sums)
    return found


def _state_at(record: Record, times: Floats) -> Floats:
    """Return another run's state at its last decision by each time."""
    at = np.searchsorted(record.time, times, side="right") - 1
    return np.where(at[:, None] >= 0, record.state[at], 0.0)


def ascend(
    begin: Floats, generations: Iterable[Sequence[MaifsTrainingCase]], settings: MaifsSearchSettings, seed: int,
    pool: Executor, own: GradientSettings = GradientSettings(),
) -> Iterator[Floats]:  # fmt: skip
    """Search by policy gradient: yield the weights after each round's workloads."""
    numbers, critic, step, runs = begin.copy(), Critic(), 0, settings.population // own.steps
    first, second, units = np.zeros_like(begin), np.zeros_like(begin), first_steps(SHAPES, FIRST_STEPS)
    for cases in generations:
        for _ in range(own.steps):
            step += 1
            jobs = [
                pool.submit(run_noisy, case.world, numbers, own, hash((seed, step, n, r)) % 2**32, _most(case))
                for n, case in enumerate(cases)
                for r in range(runs)
            ]
            played = [job.result() for job in jobs]
            found = np.mean(
                [gradient(case, played[n * runs : (n + 1) * runs], critic, own) for n, case in enumerate(cases)], 0
            )
            first, second = 0.9 * first + 0.1 * found, 0.99 * second + 0.01 * found**2
            rise = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-12)
            numbers = numbers + own.rate * units * rise
        yield numbers


def _most(case: MaifsTrainingCase) -> int:
    return case.decisions * 5 // 4  # as the cost of training: its runs end there


def change(
    arrivals: dict[str, Trace], kinds: MaifsJobClasses, trained: dict[str, Floats], load: float,
    size: dict[str, float], seed: int
) -> dict[tuple[str, str], float]:  # fmt: skip
    """Return the log of the mean JCT relative to greedy-true's, of each trace and weights, over its test weeks."""
    found: dict[tuple[str, str], float] = {}
    for trace in arrivals:
        weeks = maifs().traces[trace].test
        for week in weeks:
            world = world_of(draw(arrivals[trace], trace, kinds, kinds.names, week, load, seed, **size), kinds)
            greedy_s = simulate(world, exact_estimates(kinds.speed), GREEDY).jct.mean()
            for name, numbers in trained.items():
                cost = float(np.log(simulate_agent(world, numbers, AUCTION).jct.mean() / greedy_s)) / len(weeks)
                found[trace, name] = found.get((trace, name), 0.0) + cost
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=MaifsSearchSettings.generations)
    parser.add_argument("--tries", type=int, default=MaifsSearchSettings.tries, help="workloads of a round")
    parser.add_argument("--days", type=float, default=MaifsSearchSettings.days, help="of a workload")
    parser.add_argument("--density", type=float, default=MaifsSearchSettings.density, help="fraction of jobs kept")
    parser.add_argument("--trace", nargs="+", default=["philly", "openb"])
    parser.add_argument("--every-decision", action="store_true", help="draw noise anew at every decision")
    parser.add_argument("--test", type=int, nargs=2, metavar=("FIRST", "END"))
    parser.add_argument("--test-loads", type=float, nargs="+", default=maifs().loads)
    parser.add_argument("--test-trace", nargs="+", help="those of --trace if not given")
    parser.add_argument("--quick", action="store_true", help="tiny workloads, to see that it runs")
    parser.add_argument("--jobs", type=int, default=2, help="threads")
    parser.add_argument("--out", type=Path, help="folder of weights files, read again where they are")
    args = parser.parse_args(arguments)
    settings = QUICK if args.quick else replace(
        MaifsSearchSettings(), generations=args.rounds, tries=args.tries, days=args.days, density=args.density
    )  # fmt: skip
    arrivals, kinds = {name: read_arrivals(args.traces, name) for name in args.trace}, read_kinds()
    gradient_search = partial(ascend, own=GradientSettings(held=not args.every_decision))
    trained = {"untrained": untrained(0), "included": weights_of(None)}
    for seed in args.seeds:
        for name, search in (("gradient", gradient_search), ("cma-es", evolve)):
            file = args.out / f"{name}_{seed}.safetensors" if args.out else None
            if file is not None and file.is_file():
                trained[f"{name} {seed}"] = weights_of(str(file))
                continue
            began = time.process_time()
            result = learn(arrivals, kinds, settings, seed, args.jobs, lambda done, total: None, search)
            trained[f"{name} {seed}"] = result.numbers
            course = " ".join(f"{generation}:{100 * np.expm1(cost):+.1f}" for generation, cost in result.course)
            print(f"{name} {seed}: validation, % of greedy-true: {course}; {time.process_time() - began:.0f} s CPU",
                  flush=True)  # fmt: skip
            if file is not None:
                save_model(file, "maifs", to_arrays(result.numbers, SHAPES), {"seed": str(seed)})
    if args.test:
        tested = {trace: arrivals[trace] for trace in args.test_trace or arrivals}
        size = {"density": 0.1, "days": 2.0} if args.quick else {}
        with ThreadPoolExecutor(args.jobs) as pool:
            for load in args.test_loads:
                one = partial(change, tested, kinds, trained, load, size)
                found = list(pool.map(one, range(*args.test)))
                for trace, name in found[0]:
                    values = [float(np.expm1(cost[trace, name])) for cost in found]
                    low, high = interval(values)
                    print(f"{trace} {load}: {name:12} {np.mean(values):+.1%} ({low:+.1%} to {high:+.1%})", flush=True)


if __name__ == "__main__":
    main()
