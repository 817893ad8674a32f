"""The JSON keys of ``replay``, ``trace``, ``predict`` and ``reproduce``, and their meaning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gpusched.agents.dl2.reproduce import Dl2Row as Dl2Row
from gpusched.agents.maifs.reproduce import MaifsRow as MaifsRow
from gpusched.agents.predictor.evaluate import EstimateEvaluation, EstimateScore
from gpusched.agents.predictor.request import PredictedJob, TracePredictions
from gpusched.agents.rltune.reproduce import ComparisonLine
from gpusched.agents.topology.reproduce import TopologyRow as TopologyRow
from gpusched.nightly.replays import NightlyReport, NightlyVerdict
from gpusched.nightly.scoring import Score
from gpusched.promotion.registry import ShadowComparison as JudgedPolicy
from gpusched.sim.pool import Pool
from gpusched.study.bounds import Bounds
from gpusched.study.compare import MeanDifference
from gpusched.study.metrics import Holder, Metrics
from gpusched.study.study import StudyOutcome, row_of
from gpusched.traces.readers.draft import assemble
from gpusched.traces.statistics import trace_stats


def json_keys() -> dict[str, list[str]]:
    """The keys, by what they describe."""
    report = NightlyReport(time="", since="", file="", partitions=())
    return {
        "replay": list(_row()),
        "replay-change": list(MeanDifference.__struct_fields__),
        "replay-holder": list(Holder.__struct_fields__),
        "nightly": list(report.as_json()),
        "nightly-partition": list(NightlyVerdict.__struct_fields__),
        "nightly-judged": list(JudgedPolicy.__struct_fields__),
        "nightly-predictions": list(Score.__struct_fields__),
        "trace-stats": list(trace_stats(_trace())),
        "predict": list(PredictedJob.__struct_fields__),
        "predict-trace": list(TracePredictions.__struct_fields__),
        "predict-evaluation": list(EstimateEvaluation.__struct_fields__),
        "predict-estimate": list(EstimateScore.__struct_fields__),
        "reproduce-rltune": list(ComparisonLine.__struct_fields__),
        "reproduce-dl2": list(Dl2Row.__struct_fields__),
        "reproduce-maifs": list(MaifsRow.__struct_fields__),
        "reproduce-topology": list(TopologyRow.__struct_fields__),
    }


def _trace() -> Any:
    return assemble(
        name="", epoch=0.0, ids=("j",), submit=np.zeros(1), duration=np.ones(1), gpus=np.ones(1, np.int64), names={},
        columns={},
    )  # fmt: skip


def _row() -> dict[str, Any]:
    result = SimpleNamespace(
        policy="", knows="", placement="", shared="no", trace=_trace(), seed=0, pool=Pool.uniform(1, 8),
        sim_seconds=0.0, jobs_per_s=0.0, decisions=0, source="", notes=(), infeasible=(),
    )  # fmt: skip
    metrics = Metrics(jobs=1, infeasible=0, unfinished=0, killed=0, restarts=0)
    scenario = SimpleNamespace(notes=(), published={})
    return row_of(StudyOutcome(result, metrics, Bounds(), scenario))  # type: ignore[arg-type]


def _four(what: str, meaning: str) -> dict[str, str]:
    return {f"{figure}_{what}": meaning for figure in ("mean", "median", "p95", "p99")}


JSON: dict[str, dict[str, str]] = {
    "replay": {
        "policy": "",
        "knows": "Of run times: `nothing`, `limit`, `estimate`, `oracle`.",
        "placement": "",
        "share": "`no`, `fractions`, `pairs`.",
        "trace": "",
        "seed": "",
        "nodes": "",
        "gpus": "",
        "jobs": "That ended; all figures cover these.",
        "infeasible": "Can never run on these nodes.",
        "unfinished": "Could run and never ended.",
        "killed": "Ended by their limit.",
        "restarts": "",
        **_four("jct_s", "?From submission to end."),
        **_four("wait_s", "?Of the JCT, not running."),
        **_four("bounded_slowdown", "?max(1, JCT / max(run time, 10 s))."),
        "recorded_mean_wait_s": "?Mean wait in the source, where recorded.",
        "wait_error": "?Their mean wait in the replay over that, less 1.",
        "makespan_s": "?Last end less first submission.",
        "utilization": "?Eq. 4, 0 to 1.",
        "gpu_hours_utilization": "?GPU time held over that available; until the last submission.",
        "arrival_utilization": "?GPU time held over that available; until the last submission.",
        "fragmentation": "?Share of free GPU time unusable for a typical job.",
        "gpu_hours": "",
        "energy_kwh": "?All nodes, by the power model.",
        "inefficient_energy_kwh": "?Rated kW × hours × (1 - utilization).",
        "jain": "?Jain's index of users' mean bounded slowdowns.",
        "lower_bound_mean_jct_s": "?No schedule can beat these.",
        "lower_bound_makespan_s": "?No schedule can beat these.",
        "gap_to_bound": "?Mean JCT over its bound, less 1.",
        "sim_seconds": "",
        "jobs_per_s": "",
        "decisions": "",
        "source": "Of the policy, or its agent's weights.",
        "notes": "Caveats, as sentences.",
        "published": "Figures of this policy in the scenario's source.",
        "change": "Against the first policy. {replay-change}",
        "users": "Groups: partitions or virtual clusters. {replay-holder}",
        "groups": "Groups: partitions or virtual clusters. {replay-holder}",
    },
    "replay-change": {
        "figure": "`jct_s`, `wait_s` or `bounded_slowdown`.",
        "base": "Means under the first policy, this one.",
        "other": "Means under the first policy, this one.",
        "relative": "?other / base - 1; null if base is 0.",
        "low": "?",
        "high": "?",
        "difference": "",
        "difference_low": "?",
        "difference_high": "?",
        "days": "",
    },
    "replay-holder": {
        "name": "",
        "jobs": "",
        "gpu_hours": "",
        "mean_jct_s": "",
        "mean_wait_s": "",
        "mean_bounded_slowdown": "",
    },
    "nightly": {
        "verdict": "",
        "worst_loss": "The largest `loss`.",
        "time": "",
        "since": "",
        "file": "",
        "partitions": "{nightly-partition}",
        "judged": "Shadows and candidates. {nightly-judged}",
        "trained": "Sentences on retrained agents (`--auto-retrain`) and shadows that learn online.",
        "predictions": "Of starts. {nightly-predictions}",
        "failed": "Policies whose replay raised an error.",
    },
    "nightly-partition": {
        "partition": "",
        "live": "",
        "best": "The policy with the lowest mean JCT.",
        "loss": "Mean JCT of live over best, less 1.",
        "line": "",
        "page": "",
        "real_mean_wait_s": "?Actual, and replayed under the live policy.",
        "replayed_mean_wait_s": "?Actual, and replayed under the live policy.",
        "runs": "As above, the live policy first.",
    },
    "nightly-judged": {
        "partition": "",
        "state": "`shadow` or `candidate`.",
        "name": "",
        "version": "",
        "path": "",
        "line": "",
        "passed": "Proven no worse than the live policy.",
        "promoted": "",
        "proposed": "Gained most of those proved better, and was not promoted.",
        "verdict": "?As in [`policy compare`](#policy).",
    },
    "nightly-predictions": {
        "partition": "",
        "made": "",
        "started": "Started; pending beyond their range, within it; ended without a start.",
        "overdue": "Started; pending beyond their range, within it; ended without a start.",
        "open": "Started; pending beyond their range, within it; ended without a start.",
        "gone": "Started; pending beyond their range, within it; ended without a start.",
        "median_abs_error_s": "?",
        "median_error_s": "?Above 0: later than predicted.",
        "within_range": "?Share that started in the predicted range.",
        "median_wait_s": "?From prediction to start.",
    },
    "trace-stats": {
        "name": "",
        "jobs": "",
        "rejected": "Rejected rows, and their number by reason.",
        "rejected_why": "Rejected rows, and their number by reason.",
        "notes": "",
        "first_submit": "?",
        "last_submit": "?",
        "span_s": "",
        "jobs_per_hour": "?",
        "gap_cv": "?Coefficient of variation of interarrival times.",
        "gpu_hours": "",
        "load_gpus": "Mean busy GPUs needed; over those available: offered load.",
        "run_time_s": "?min, p25, median, p75, p95, p99, max, mean; waits as recorded.",
        "wait_s": "?min, p25, median, p75, p95, p99, max, mean; waits as recorded.",
        "limit_over_run_time": "?min, p25, median, p75, p95, p99, max, mean; waits as recorded.",
        "gpus": "Share of jobs, GPU hours, by GPUs per job.",
        "gpu_hours_by_gpus": "Share of jobs, GPU hours, by GPUs per job.",
        "shared_gpu_jobs": "",
        "with_predecessor": "",
        "users": "",
        **dict.fromkeys(
            ("by_group", "by_status", "by_model", "by_gpu_type", "by_profile"),
            "Jobs, by virtual cluster (or queue), final status, workload, requested GPU type, MIG profile.",
        ),
    },
    "predict": {
        "id": "",
        "p5_s": "Quantiles of the run time.",
        "p25_s": "Quantiles of the run time.",
        "p50_s": "Quantiles of the run time.",
        "p75_s": "Quantiles of the run time.",
        "p95_s": "Quantiles of the run time.",
        "limit_s": "?",
        "run_s": "?",
    },
    "predict-trace": {
        "jobs": "As above.",
        "evaluation": "{predict-evaluation}",
        "notes": "",
    },
    "predict-evaluation": {
        "jobs": "Jobs judged; their days of submission.",
        "days": "Jobs judged; their days of submission.",
        "covered_50": "Shares of run times from `p25_s` to `p75_s` (target 0.5), `p5_s` to `p95_s` (0.9).",
        "covered_90": "Shares of run times from `p25_s` to `p75_s` (target 0.5), `p5_s` to `p95_s` (0.9).",
        "crps": "Continuous ranked probability score of the logarithm.",
        "rows": "{predict-estimate}",
    },
    "predict-estimate": {
        "estimate": "",
        "jobs": "",
        "log_error": "Mean of abs(ln(estimate / run time)): 0.69 is a factor of two.",
        "low": "?",
        "high": "?",
        "bias": "Mean of ln(estimate / run time); above 0: too long.",
        "under": "Shares estimated too short; over twice too long; within a factor of two.",
        "over": "Shares estimated too short; over twice too long; within a factor of two.",
        "within_2": "Shares estimated too short; over twice too long; within a factor of two.",
        "wait_s": "?With `--waits`: mean, under `sjf-estimate`.",
    },
    "reproduce-rltune": {
        "trace": "",
        "base": "",
        "trained": "The base in training.",
        "knows": "",
        "jobs": "",
        "utilization_base": "?0 to 1, under the base, the agent.",
        "utilization": "?0 to 1, under the base, the agent.",
        "wait_base_s": "?Means under both; wait_s / wait_base_s - 1.",
        "wait_s": "?Means under both; wait_s / wait_base_s - 1.",
        "wait_change": "?Means under both; wait_s / wait_base_s - 1.",
        "jct_base_s": "?Likewise.",
        "jct_s": "?Likewise.",
        "jct_change": "?Likewise.",
        "slowdown_base": "?Mean bounded slowdowns.",
        "slowdown": "?Mean bounded slowdowns.",
        "notes": "What training chose.",
    },
    "reproduce-dl2": {
        "setting": "",
        "nodes": "",
        "seed": "",
        "policy": "",
        "mean_jct_slots": "",
        "makespan_slots": "",
        "bound_slots": "Mean JCT of each job alone on all nodes, at its best size.",
    },
    "reproduce-maifs": {
        "trace": "",
        "week": "",
        "load": "",
        "seed": "",
        "nodes": "",
        "groups": "Node groups, one agent each.",
        "jobs": "",
        "policy": "",
        "mean_jct_s": "",
        "makespan_s": "",
        "restarts": "",
        "bound_s": "Mean JCT, makespan: each job alone on all nodes, at its best allowed size.",
        "bound_makespan_s": "Mean JCT, makespan: each job alone on all nodes, at its best allowed size.",
    },
    "reproduce-topology": {
        "topology": "",
        "load": "Offered, each job alone where it is fastest.",
        "seed": "",
        "policy": "",
        "mean_jct_h": "",
        "p99_jct_h": "",
        "mean_slowdown": "Run time over that alone where fastest.",
        "combine": "`formula`; with `--table` how pairs combine: `product` or `sum`.",
        "mix": "Of sizes: `philly-like`, `large`, `philly`, `table`.",
        "jobs": "",
        "knows": "Of slowdowns: `nothing` or `the true model`.",
    },
}
