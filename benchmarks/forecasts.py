"""Judge predicted starts: a workload is replayed, and when jobs that then wait are submitted, the queue is simulated.

python -m benchmarks.forecasts --generate 6
python -m benchmarks.forecasts philly_2017.csv.gz --format philly-csv

Jobs of one user (or cluster) with one name, numbers aside, have one time limit out of a menu: long enough for nine of
ten, times a factor. Printed by policy, load, and what run times are drawn from: jobs judged, how
many started within the predicted 80 % (as the nightly report counts), the range's median width, the median's median
error, and the continuous ranked probability score of the wait and of its logarithm. ``limit use``, for comparison: the
ratio of run time to limit of a past job of the user, of all users' past jobs if there are fewer than five.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.run_times import GPUS, history
from gpusched.forecast.queue import QueueForecast
from gpusched.forecast.run_times import RunTimeSampler
from gpusched.forecast.start_times import draws_of, quantiles
from gpusched.model.interference import name_pattern
from gpusched.model.jobs import Allocation, JobRecord, JobSpec, JobState, NodeAllocation
from gpusched.model.policy import PolicySpec
from gpusched.model.snapshot import NodeView, PendingView, RunningView, Snapshot
from gpusched.sched.state import Floats
from gpusched.sim.policies import policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.sim.replay import replay
from gpusched.traces.load import load
from gpusched.traces.slicing import nodes_for_load, slice_trace
from gpusched.traces.trace import Trace

MENU_S = np.array([1.0, 4.0, 12.0, 24.0, 72.0, 168.0, 720.0]) * 3600
DRAWS, SPANS, PAST, MIN_JOBS, ENOUGH = 40, 12, 2000, 700, 5
GRACE_S = 60.0
POLICIES = {name: PolicySpec(name=name, order="fifo", place="best-fit", backfill=backfill)
            for name, backfill in (("fifo", "none"), ("easy", "easy"))}  # fmt: skip


class LimitUse(RunTimeSampler):
    """Draws by the use of limits."""

    def draw(self, rng: np.random.Generator, snapshot: Snapshot, views: Sequence[PendingView], count: int) -> Floats:
        """Draw how long jobs run from now on; a running job uses more of its limit than it has."""
        of: dict[str, list[float]] = {}
        for job in self._past:
            assert job.start_time is not None
            assert job.end_time is not None
            of.setdefault(job.user, []).append(min((job.end_time - job.start_time) / job.spec.time_limit_s, 1.0))
        everyone = np.sort(np.concatenate([[], *of.values()]))
        jobs: list[tuple[str, float, float]] = [(view.user, view.limit_s, 0.0) for view in views]
        jobs += [(r.user, r.expected_end - r.start_time, snapshot.now - r.start_time) for r in snapshot.running]
        found = np.empty((count, len(jobs)))
        for i, (user, limit, had) in enumerate(jobs):
            own = np.sort(of.get(user, []))
            for ratios in (own if len(own) >= ENOUGH else everyone, everyone, np.ones(1)):
                left = ratios[ratios > had / limit]
                if len(left):
                    break
            found[:, i] = np.maximum((rng.choice(left, count) if len(left) else 1.0) * limit - had, 1.0)
        return found


def samplers(past: Sequence[JobRecord]) -> dict[str, RunTimeSampler]:
    """Return what run times are drawn from, by name."""
    return {"limit use": LimitUse(past), "history": RunTimeSampler(past),
            "history, independent": RunTimeSampler(past, shared=0.0)}  # fmt: skip


def with_limits(trace: Trace, seed: int) -> Trace:
    """Return the trace with time limits; run times end there."""
    rng, limit = np.random.default_rng(seed), np.empty(len(trace))
    users, rows = (trace.user >= 0).any(), dict[tuple[int, str], list[int]]()
    for job in range(len(trace)):
        owner = int(trace.user[job] if users else trace.group[job])
        name = trace.models[trace.model[job]] if trace.model[job] >= 0 else str(trace.gpus[job])
        rows.setdefault((owner, name_pattern(name)), []).append(job)
    for jobs in rows.values():
        asked = float(np.quantile(trace.duration[jobs], 0.9)) * max(1.0, rng.lognormal(0.5, 0.8))
        limit[jobs] = MENU_S[min(int(np.searchsorted(MENU_S, asked)), len(MENU_S) - 1)]
    return replace(trace, limit=limit, duration=np.minimum(trace.duration, limit))


class ReplayedQueue:
    """One replay, and the queue at any instant of it as it would be live."""

    def __init__(self, trace: Trace, policy: PolicySpec, load_: float) -> None:
        self.trace, self.policy = trace, policy
        self.pool = Pool.uniform(nodes_for_load(trace, GPUS, load_), GPUS)
        self.played = replay(trace, self.pool, policy_of_spec(policy))
        self._parts = [self.played.part_nodes[slice(*self.played.part_offsets[job : job + 2])].tolist()
                       for job in range(len(trace))]  # fmt: skip
        self._specs = [self._spec(job) for job in range(len(trace))]
        self._users = [trace.users[user] if user >= 0 else "" for user in trace.user.tolist()]

    def _spec(self, job: int) -> JobSpec:
        gpus, model = max(int(self.played.part_gpus[job]), 1), self.trace.model[job]
        return JobSpec(
            name=self.trace.models[model] if model >= 0 else "", partition="p", nodes=max(len(self._parts[job]), 1),
            gpus_per_node=gpus, cores_per_node=gpus, memory_mib_per_node=gpus, time_limit_s=int(self.trace.limit[job]),
        )  # fmt: skip

    def judged(self) -> list[int]:
        """Return, of the later half of the jobs, the first one that waited in each of so many spans of time."""
        half = len(self.trace) // 2
        waited = half + np.flatnonzero((self.played.start - self.trace.submit)[half:] > GRACE_S)
        spans = np.linspace(self.trace.submit[half], self.trace.submit[-1], SPANS + 1)
        _, first = np.unique(np.searchsorted(spans, self.trace.submit[waited]), return_index=True)
        return [int(job) for job in waited[first]]

    def past(self, now: float) -> list[JobRecord]:
        """Return the last ended jobs."""
        ended = np.flatnonzero(self.played.end <= now)
        return [
            JobRecord(
                id=self.trace.ids[job], user=self._users[job], uid=1, spec=self._specs[job], state=JobState.COMPLETED,
                submit_time=self.trace.submit[job], start_time=self.played.start[job], end_time=self.played.end[job],
            )
            for job in ended[np.argsort(self.played.end[ended], kind="stable")][-PAST:].tolist()
        ]  # fmt: skip

    def snapshot(self, now: float) -> Snapshot:
        """Return the snapshot at the time."""
        begun, here = (self.played.start <= now) & (self.trace.submit < now), self.trace.submit <= now
        free = {row: list(range(GPUS)) for row in range(len(self.pool))}
        running = [self._running(job, free) for job in np.flatnonzero(begun & (self.played.end > now)).tolist()]
        nodes = [NodeView(name=f"n{row}", partition="p", gpus=tuple(range(GPUS)), cores=GPUS, memory_mib=GPUS)
                 for row in range(len(self.pool))]  # fmt: skip
        pending = [
            PendingView(id=self.trace.ids[job], user=self._users[job], spec=self._specs[job],
                        submit_time=self.trace.submit[job])
            for job in np.flatnonzero(here & ~begun & ~np.isnan(self.played.start)).tolist()
        ]  # fmt: skip
        return Snapshot(now=now, nodes=tuple(nodes), running=tuple(running), pending=tuple(pending),
                        policies={"p": self.policy})  # fmt: skip

    def _running(self, job: int, free: dict[int, list[int]]) -> RunningView:
        """Return a job that runs, on GPUs taken from the ``free`` ones."""
        name, gpus, start = self.trace.ids[job], int(self.played.part_gpus[job]), float(self.played.start[job])
        parts = tuple(
            NodeAllocation(rank=rank, node=f"n{row}", gpus=tuple(free[row].pop() for _ in range(gpus)), cores=gpus,
                           memory_mib=gpus)
            for rank, row in enumerate(self._parts[job])
        )  # fmt: skip
        return RunningView(
            id=name, user=self._users[job], allocation=Allocation(name, parts), start_time=start,
            expected_end=start + self.trace.limit[job], submit_time=self.trace.submit[job], spec=self._specs[job],
        )  # fmt: skip


def crps(drawn: Floats, real: float) -> float:
    """Return the continuous ranked probability score of equally probable values."""
    return float(np.abs(drawn - real).mean() - 0.5 * np.abs(drawn[:, None] - drawn[None, :]).mean())


def score(queue: ReplayedQueue, job: int) -> dict[str, list[float]]:
    """Return by sampler: within the range or not, its width, the error, both scores, and the real wait."""
    now, found = float(queue.trace.submit[job]), {}
    ahead = QueueForecast(queue.snapshot(now), half_life_s=6e5, tick_s=5.0)
    target, real = ahead.index[queue.trace.ids[job]], float(queue.played.start[job]) - now
    for name, sampler in samplers(queue.past(now)).items():
        draws = draws_of(ahead, sampler, DRAWS)
        waits = np.array([ahead.run(d, target=target, seed=i).start[target] for i, d in enumerate(draws)]) - now
        low, median, high = quantiles(waits)
        assert low is not None
        assert median is not None
        assert high is not None
        logs = crps(np.log(np.maximum(waits, GRACE_S)), float(np.log(real)))
        within = low - GRACE_S <= real <= high + GRACE_S
        found[name] = [within, high - low, abs(median - real), crps(waits, real), logs, real]
    return found


def judge(title: str, traces: Sequence[Trace], policy: PolicySpec, load_: float) -> None:
    """Print the scores on traces under a policy."""
    rows: dict[str, list[list[float]]] = {}
    for queue in (ReplayedQueue(trace, policy, load_) for trace in traces):
        for job in queue.judged():
            for name, row in score(queue, job).items():
                rows.setdefault(name, []).append(row)
    for name, found in rows.items():
        within, width, error, waits, logs, real = np.array(found).T
        print(
            f"{title} {policy.name} {load_} {name}: {len(found)} jobs, median wait {np.median(real) / 3600:.1f} h, "
            f"{within.mean():.0%} within {np.median(width) / 3600:.1f} h, error {np.median(error) / 3600:.1f} h, "
            f"CRPS {waits.mean() / 3600:.2f} h, {logs.mean():.3f}", flush=True,
        )  # fmt: skip


def main() -> None:
    """Judge what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?")
    parser.add_argument("--format")
    parser.add_argument("--generate", type=int, default=0, metavar="SEEDS")
    args = parser.parse_args()
    if args.generate:
        made = [history(seed, jobs=6000, users=60, days=30) for seed in range(args.generate)]
    else:
        whole = load(args.trace, args.format)
        made = [one for group in whole.groups if len(one := slice_trace(whole, vc=group)) >= MIN_JOBS]
    traces = [with_limits(trace, seed) for seed, trace in enumerate(made)]
    for policy in POLICIES.values():
        for load_ in (0.8, 0.95):
            judge("generated" if args.generate else whole.name, traces, policy, load_)


if __name__ == "__main__":
    main()
