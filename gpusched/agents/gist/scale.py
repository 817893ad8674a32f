"""The agent at scale: partitions of any size, jobs that arrive over time, run times other than the limits.

Training starts from the best of a few heuristics and minimizes the mean JCT of whole replays by evolution, with all
candidates of a generation on the same workloads (common random numbers). The weights with the best result on separate
validation workloads (of a log, on other windows, which may overlap) are kept, the start included, so the result is
never worse there than the start.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import numpy as np

from gpusched.agents.common.evolve import Evolution
from gpusched.agents.common.request import TrainerResult, TrainingReport, TrainJob, settings_of
from gpusched.agents.common.vector import Shapes, to_arrays, to_vector
from gpusched.agents.gist.networks import PATIENCE_S, QUESTIONS, STARTS, start
from gpusched.config.weights import Arrays, TrainedModel
from gpusched.errors import UsageError
from gpusched.model.slicetables import GPU_PARTS
from gpusched.model.units import count_of
from gpusched.sim.policies import ReplayPolicy
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.replay import replay
from gpusched.sim.slicing import parts_by_job
from gpusched.traces.generate import generate
from gpusched.traces.slicing import select
from gpusched.traces.trace import Trace

_FIRST_VALIDATION = 500_009  # seeds of generated workloads: training counts up from 1, validation from here
REFERENCE = "wfp3+easy"
STEPS = {
    "job": dict.fromkeys(("log_age", "log_limit", "log_gpus", "share", "share_of_node", "fits_now"), 0.25),
    "hold": dict.fromkeys(
        ("one", "late_in_the_way", "in_the_way", "over_shadow", "log_limit", "share", "head_log_age"), 0.15
    ),
    "server": dict.fromkeys(("empty", "filled", "drains_in", "outlasts", "outlasted"), 0.05),
}
"""Initial step sizes of the linear parts; inputs without one keep the start's weight."""
_STEP_OF_NETS = 0.1


@dataclass(frozen=True, kw_only=True)
class ScaleSettings:
    """Hyper-parameters of the agent at scale: the ``train`` section of its policy file.

    Attributes:
        variant: ``scale``; other variants are the paper's own setting (`gpusched.agents.gist.train`).
        generations, population: Of the search.
        jobs: Per training workload. traces: Workloads per candidate.
        servers: Further cluster sizes to train on, as numbers of servers like the partition's first: ``8 32``. Only
            with generated workloads.
        width: Of the networks' hidden layers; 0: only the linear parts are learned.
        validation: Validation workloads of each size. validate_every: Generations between validations.
        validation_jobs: Jobs of each. give_up: Validations without improvement until the search stops.
        use_weight: Weight of the log of utilization lost against `REFERENCE`, relative to the log of mean JCT.
        patience_days: A job that has waited longer is held only if EASY would hold it.
    """

    variant: str = "scale"
    generations: int = 40
    population: int = 12
    jobs: int = 8000
    traces: int = 2
    servers: str = ""
    width: int = 0
    validation: int = 8
    validate_every: int = 2
    validation_jobs: int = 10_000
    give_up: int = 6
    use_weight: float = 10.0
    patience_days: float = PATIENCE_S / 86400


class ReferenceWorkload(NamedTuple):
    """A trace on its nodes, with the results of `REFERENCE`: mean JCT (seconds) and utilization."""

    trace: Trace
    pool: Pool
    mean_jct_s: float
    utilization: float


class ReplayFigures(NamedTuple):
    """Results of a replay: mean JCT in seconds; GPU time used over available, from first start to last end."""

    mean_jct_s: float
    utilization: float


def policy_of(arrays: Arrays, name: str = "agent", patience_s: float = PATIENCE_S) -> ReplayPolicy:
    """Return a replay policy of weights in memory."""
    model = TrainedModel("gist", arrays, {"patience_s": str(patience_s)}, "", f"(weights in memory: {name})")
    return ReplayPolicy(name=name, order="gist", knows="limit", source="in training", backfill="easy", model=model)


def figures(policy: ReplayPolicy | str, trace: Trace, pool: Pool, placement: str | None = None) -> ReplayFigures:
    """Return the results of a replay."""
    done = replay(trace, pool, policy, placement=placement)
    ran = done.ran
    used = float(np.sum((trace.gpus * (parts_by_job(trace) / GPU_PARTS) * trace.duration)[ran]))
    available = pool.total_gpus * float(done.end[ran].max() - done.start[ran].min())
    return ReplayFigures(float(np.mean(done.end[ran] - trace.submit[ran])), used / available if available > 0 else 0.0)


class ScaleTraining:
    """A training: its state and results.

    Raises:
        UsageError: A hyper-parameter is invalid, or the workload has too few jobs.
    """

    def __init__(self, job: TrainJob, report: TrainingReport) -> None:
        settings = settings_of(ScaleSettings(), job.spec.settings)
        self._job, self._settings, self._report = job, settings, report
        self._patience_s = settings.patience_days * 86400
        self._pools = _pools(job, settings)
        if len(job.scenario.trace) < 2:
            raise UsageError(
                f"{job.scenario.trace.name}: {count_of(len(job.scenario.trace), 'job')}: too few to train on"
            )
        self._validation = [
            _workload(self._trace(_FIRST_VALIDATION + i, k, settings.validation_jobs), pool)
            for i in range(self._distinct(settings.validation, settings.validation_jobs))
            for k, pool in enumerate(self._pools)
        ]

    def run(self) -> TrainerResult:
        """Run the search from its start, or from its checkpoint, to its end."""
        settings = self._settings
        name, first, cost = self._best_start()
        shapes = {name: array.shape for name, array in first.items()}
        begin, steps = to_vector(first, shapes), to_vector(_first_steps(first, settings.width), shapes)
        search = Evolution(begin, steps, settings.population, self._job.seed)
        initial_cost, best, since = cost, begin, 0
        if (saved := self._job.checkpoint.load()) is not None:
            arrays, state = saved
            search.restore(arrays)
            best, cost, since = np.asarray(arrays["best"], np.float64), state["cost"], state["since"]
        while search.generation < settings.generations and since < settings.give_up:
            median_cost = self._generation(search, shapes)
            if search.generation % settings.validate_every == 0:
                now = self._cost(to_arrays(search.mean, shapes), self._validation)
                best, cost, since = (search.mean, now, 0) if now < cost else (best, cost, since + 1)
            if self._job.checkpoint.due():
                self._job.checkpoint.save({**search.state(), "best": best}, {"cost": cost, "since": since})
            self._report.step(search.generation, settings.generations, -median_cost)
        note = (
            f"began as {name}, at {-initial_cost:.4f}; after {search.generation} generations it is at {-cost:.4f} on "
            f"{count_of(len(self._validation), 'validation workload')} (the logarithm of {REFERENCE}'s mean JCT over "
            "the agent's, less lost utilization)"
        )
        about = {"knows": "limit", "backfill": "easy", "patience_s": str(self._patience_s), "variant": "scale"}
        return TrainerResult(
            arrays=to_arrays(best, shapes), about=about, score=-cost, hyper_parameters=asdict(settings), notes=(note,),
            untrained=first,
        )  # fmt: skip

    def _generation(self, search: Evolution, shapes: Shapes) -> float:
        """Run one generation; return the median cost of its candidates."""
        count = self._settings.traces
        draws = self._distinct(count, self._settings.jobs)
        seeds = [self._job.seed * 10_007 + search.generation * count + i + 1 for i in range(draws)]
        workloads = [
            _workload(self._trace(seed, k, self._settings.jobs), pool)
            for seed in seeds
            for k, pool in enumerate(self._pools)
        ]
        costs = np.array([self._cost(to_arrays(x, shapes), workloads) for x in search.ask()])
        search.tell(costs)
        return float(np.median(costs))

    def _cost(self, arrays: Arrays, workloads: list[ReferenceWorkload]) -> float:
        """Return the mean over workloads of log(mean JCT / the reference's) plus the weighted loss of utilization."""
        policy, total = policy_of(arrays, patience_s=self._patience_s), 0.0
        for trace, pool, jct, use in workloads:
            result = figures(policy, trace, pool)
            lost = np.log(max(use, 1e-9) / max(result.utilization, 1e-9))
            total += np.log(result.mean_jct_s / jct) + self._settings.use_weight * max(0.0, lost)
        return total / len(workloads)

    def _best_start(self) -> tuple[str, Arrays, float]:
        """Return the start with the least cost on the validation workloads: its name, weights and cost."""
        starts = []
        for name in STARTS:
            arrays = start(name, self._settings.width, self._job.seed)
            starts.append((self._cost(arrays, self._validation), name, arrays))
        cost, name, best = min(starts, key=lambda f: f[0])
        return name, best, cost

    def _distinct(self, count: int, jobs: int) -> int:
        """Return how many of so many draws differ: one, where each is the whole log."""
        return count if self._job.workload is not None or len(self._job.scenario.trace) > jobs else min(count, 1)

    def _trace(self, seed: int, pool: int, jobs: int) -> Trace:
        """Return a workload for one of the pools: a draw from the description, or a random part of the trace."""
        job = self._job
        if job.workload is not None:
            workload = job.workload
            if workload.load is not None:
                workload = replace(workload, load_gpus=self._pools[pool].total_gpus)
            return generate(replace(workload, jobs=jobs), seed)
        trace, rng = job.scenario.trace, np.random.default_rng(seed)
        if len(trace) <= jobs:
            return trace
        first = int(rng.integers(len(trace) - jobs + 1))
        return select(trace, np.arange(first, first + jobs))


def _workload(trace: Trace, pool: Pool) -> ReferenceWorkload:
    """Return the workload with the reference's results."""
    return ReferenceWorkload(trace, pool, *figures(REFERENCE, trace, pool))


def _pools(job: TrainJob, settings: ScaleSettings) -> list[Pool]:
    """Return the partition's own nodes, and those of the other requested sizes."""
    own = job.scenario.pool
    try:
        sizes = [int(word) for word in settings.servers.split()]
    except ValueError:
        raise UsageError(f"train: servers is {settings.servers!r}, expected numbers such as '8 32'") from None
    if sizes and (job.workload is None or job.workload.load is None):
        raise UsageError("train: servers needs a workload generated for a load", "use --generate, or omit it")
    like = NodeSpec(
        int(own.gpus[0]), int(own.cores[0]), int(own.memory_mib[0]), own.gpu_types[int(own.gpu_type[0])],
        slices=next((slices for slices in own.slices if slices), ()),
    )  # fmt: skip
    return [own, *(Pool.of([like] * size) for size in sizes if size != len(own))]


def _first_steps(arrays: Arrays, width: int) -> Arrays:
    """Return the initial step of every weight; 0: it is not learned. With a width all of the networks are."""
    steps: Arrays = {}
    for name, array in arrays.items():
        question, _, part = name.partition(".")
        if part == "base":
            steps[name] = np.array([STEPS[question].get(x, 0.0) for x in QUESTIONS[question]])
        else:
            steps[name] = np.full(array.shape, _STEP_OF_NETS if width > 0 else 0.0)
    return steps
