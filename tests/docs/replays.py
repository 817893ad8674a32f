"""What ``replay``, ``trace``, ``predict`` and ``reproduce`` print as JSON: the keys, and what they mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gpusched.agents.dl2.reproduce import Dl2Row as Dl2Row
from gpusched.agents.maifs.reproduce import MaifsRow as MaifsRow
from gpusched.agents.predictor.request import PredictedJob, TracePredictions
from gpusched.agents.predictor.train import EstimateEvaluation, EstimateScore, TrainedPredictor
from gpusched.agents.rltune.reproduce import ComparisonLine
from gpusched.agents.topology.reproduce import TopologyRow as TopologyRow
from gpusched.nightly.replays import NightlyReport, NightlyVerdict
from gpusched.nightly.scoring import Score
from gpusched.promotion.registry import ShadowComparison as JudgedPolicy
from gpusched.sim.pool import Pool
from gpusched.study.bounds import Bounds
from gpusched.study.compare import MeanDifference
from gpusched.study.metrics import Holder, Metrics
from gpusched.study.study import row_of
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
        "predict-train": list(TrainedPredictor.__struct_fields__),
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
    return row_of(SimpleNamespace(result=result, metrics=metrics, bounds=Bounds(), scenario=scenario))  # type: ignore[arg-type]


def _four(what: str, first: str) -> dict[str, str]:
    return {
        f"mean_{what}": first,
        f"median_{what}": "Half of the jobs have at most that.",
        f"p95_{what}": "19 of 20.",
        f"p99_{what}": "99 of 100.",
    }


JSON: dict[str, dict[str, str]] = {
    "replay": {
        "policy": "As it was named.",
        "knows": "Of run times: `nothing`, `limit`, `estimate` or `oracle`, as it was in this replay.",
        "placement": "How nodes were chosen.",
        "share": "How GPUs were shared: `no`, `fractions`, `pairs`.",
        "trace": "The trace's name.",
        "seed": "Number.",
        "nodes": "How many.",
        "gpus": "Of all nodes.",
        "jobs": "Jobs that ended; all figures are of them.",
        "infeasible": "Jobs that can never run on these nodes.",
        "unfinished": "Jobs that could run and never ended.",
        "killed": "Jobs that their limit ended (`--limits`).",
        "restarts": "Runs that were cut.",
        **_four("jct_s", "Seconds from submission to end, mean; here and below null where no job ended."),
        **_four("wait_s", "Seconds of it in which the job did not run, mean."),
        **_four("bounded_slowdown", "max(1, JCT / max(run time, 10 s)), mean."),
        "recorded_mean_wait_s": "Mean wait in the source of those of the jobs whose wait it tells; null: of none.",
        "wait_error": "Their mean wait in the replay over that, less 1; null where that is 0 or not known.",
        "makespan_s": "Last end less first submission.",
        "utilization": "Eq. 4, 0 to 1.",
        "gpu_hours_utilization": "GPU time held over all there was.",
        "arrival_utilization": "The same until the last submission.",
        "fragmentation": "Of the free GPU time, the part that a typical job could not have used.",
        "gpu_hours": "Held.",
        "energy_kwh": "All nodes, by the power model.",
        "inefficient_energy_kwh": "Rated kW x hours x (1 - utilization).",
        "jain": "Jain's index of users' mean bounded slowdowns.",
        "lower_bound_mean_jct_s": "No schedule has a shorter mean JCT; null where it was not computed.",
        "lower_bound_makespan_s": "Likewise.",
        "gap_to_bound": "Mean JCT over its bound, less 1.",
        "sim_seconds": "The simulator's own time.",
        "jobs_per_s": "Jobs replayed in a second of it.",
        "decisions": "How often the policy was asked.",
        "source": "Where the policy is from; of an agent its weights.",
        "notes": "What a reader of the figures must know, as sentences.",
        "published": "Figures of this policy that the scenario's source has (`--scenario`), by their keys here.",
        "change": "Against the first policy, one object per figure; see below. Empty for the first.",
        "users": "One object per user; see below.",
        "groups": "Likewise per partition, virtual cluster or queue.",
    },
    "replay-change": {
        "figure": "`jct_s`, `wait_s` or `bounded_slowdown`.",
        "base": "Mean under the first policy.",
        "other": "Mean under this one.",
        "relative": "other / base - 1; null where base is 0.",
        "low": "Lower end of its 95 % interval; null with fewer than five days.",
        "high": "Upper end.",
        "difference": "other - base.",
        "difference_low": "Lower end of its 95 % interval, or null.",
        "difference_high": "Upper end.",
        "days": "Days that were drawn from.",
    },
    "replay-holder": {
        "name": "Of the user or group.",
        "jobs": "That ended.",
        "gpu_hours": "Held.",
        "mean_jct_s": "Seconds.",
        "mean_wait_s": "Seconds.",
        "mean_bounded_slowdown": "Mean.",
    },
    "nightly": {
        "verdict": "All partitions in one line.",
        "worst_loss": "The largest `loss` of a partition.",
        "time": "Time.",
        "since": "As asked for: `1d`.",
        "file": "The report, in the state folder.",
        "partitions": "One object per partition with jobs; see below.",
        "judged": "One object per shadow and candidate; see below.",
        "trained": "With `--auto-retrain`: a sentence for every agent, and for the run times.",
        "predictions": "How good the forecasts of starts were; see below.",
    },
    "nightly-partition": {
        "partition": "Where.",
        "live": "The policy in charge.",
        "best": "The one with the least mean JCT.",
        "loss": "Mean JCT of live over best, less 1.",
        "line": "The same as a sentence.",
        "page": "The page with plots.",
        "real_mean_wait_s": "What jobs really waited, or null.",
        "replayed_mean_wait_s": "Under the live policy, replayed.",
        "runs": "The objects of `gpusched replay --json`, the live policy first.",
    },
    "nightly-judged": {
        "partition": "Where.",
        "state": "`shadow` or `candidate`.",
        "name": "The policy.",
        "version": "Its version.",
        "path": "Where it is.",
        "line": "The verdict as a sentence.",
        "passed": "Whether it proved no worse than the live policy.",
        "promoted": "Whether it was asked to be put in charge for that.",
        "verdict": "As in `policy compare`, or null.",
    },
    "nightly-predictions": {
        "partition": "Where.",
        "made": "Jobs whose start was predicted.",
        "started": "Of these, started since.",
        "overdue": "Still waiting after the end of their range.",
        "open": "Waiting within it.",
        "gone": "Ended without a start.",
        "median_abs_error_s": "Half were predicted nearer than that, or null.",
        "median_error_s": "With its sign: above 0 they started later.",
        "within_range": "Part that started in the range predicted, or null.",
        "median_wait_s": "From forecast to start.",
    },
    "trace-stats": {
        "name": "The trace's.",
        "jobs": "How many.",
        "rejected": "Rows kept out.",
        "rejected_why": "Why: how many.",
        "notes": "How it came to be, as sentences.",
        "first_submit": "Time, or null without a calendar.",
        "last_submit": "Likewise.",
        "span_s": "Seconds between them.",
        "jobs_per_hour": "Or null.",
        "gap_cv": "Coefficient of variation of the times between submissions, or null.",
        "gpu_hours": "Of all jobs.",
        "load_gpus": "GPUs that would be busy all the time; offered load is this over the GPUs there are.",
        "run_time_s": "min, p25, median, p75, p95, p99, max and mean; null where nothing is known.",
        "wait_s": "Likewise: as it was in the source.",
        "limit_over_run_time": "Likewise.",
        "gpus": "GPUs of a job: part of the jobs.",
        "gpu_hours_by_gpus": "GPUs of a job: GPU hours.",
        "shared_gpu_jobs": "Jobs that ask for a part of a GPU.",
        "with_predecessor": "Jobs that wait for another.",
        "users": "How many.",
        "by_group": "Virtual cluster, partition or queue: jobs.",
        "by_status": "How they ended: jobs.",
        "by_model": "Workload: jobs.",
        "by_gpu_type": "GPU type asked for: jobs.",
    },
    "predict": {
        "id": "The job's.",
        "p10_s": "One in ten such jobs runs at most that long, seconds.",
        "p50_s": "Half of them; what policies go by.",
        "p90_s": "Nine in ten.",
        "limit_s": "Its time limit, or null.",
        "run_s": "How long it ran, or null.",
    },
    "predict-trace": {
        "model": "Digest of the predictor's file.",
        "jobs": "One object per job, as above.",
        "evaluation": "How good that was on jobs later than what was learned; see below. Null: there are none.",
        "notes": "As sentences.",
    },
    "predict-train": {
        "path": "The predictor's file.",
        "jobs": "It has learned from so many.",
        "seconds": "That took.",
        "evaluation": "How good one is that has not seen the held-out jobs, or null.",
        "notes": "As sentences.",
    },
    "predict-evaluation": {
        "jobs": "Held-out jobs.",
        "days": "With so many days of submission.",
        "covered": "Part of the run times between `p10_s` and `p90_s`; 0.8 is meant.",
        "uncalibrated_covered": "The same without calibration.",
        "rows": "One object per way to estimate; see below.",
    },
    "predict-estimate": {
        "estimate": "Its name.",
        "jobs": "On so many.",
        "log_error": "Mean of abs(ln(estimate / run time)): 0.69 is off by a factor of two.",
        "low": "Lower end of its 95 % interval over days; null with fewer than five.",
        "high": "Upper end.",
        "bias": "Mean of ln(estimate / run time); above 0: too long.",
        "under": "Part of the jobs estimated too short.",
        "over": "More than twice too long.",
        "within_2": "Within a factor of two.",
    },
    "reproduce-rltune": {
        "trace": "Its name, or the virtual cluster's.",
        "base": "The base policy.",
        "trained": "The base that the agent's training measures rewards against.",
        "knows": "What the base goes by, of run times.",
        "jobs": "Replayed, all later than those learned from.",
        "utilization_base": "Under the base, 0 to 1.",
        "utilization": "Under the agent.",
        "wait_base_s": "Mean wait.",
        "wait_s": "Likewise.",
        "wait_change": "wait_s / wait_base_s - 1, or null.",
        "jct_base_s": "Mean JCT.",
        "jct_s": "Likewise.",
        "jct_change": "Likewise.",
        "slowdown_base": "Mean bounded slowdown.",
        "slowdown": "Likewise.",
        "notes": "What the training chose.",
    },
    "reproduce-dl2": {
        "setting": "Its name, such as `96 nodes`.",
        "nodes": "How many.",
        "seed": "What the workload was drawn with.",
        "policy": "Who decided.",
        "mean_jct_slots": "Mean JCT in slots of 20 minutes, from the beginning of the slot of arrival.",
        "makespan_slots": "Until the last job ended.",
        "bound_slots": "Mean JCT of jobs that are each alone on all nodes, at their best size.",
    },
    "reproduce-maifs": {
        "trace": "Whose arrivals, durations and GPUs.",
        "week": "Of the trace, counted from its first job.",
        "load": "Offered: GPU-seconds as asked for, by those that there are in the week.",
        "seed": "What the week was drawn with.",
        "nodes": "How many.",
        "groups": "Of nodes, that is agents.",
        "jobs": "How many.",
        "policy": "Who decided.",
        "mean_jct_s": "Mean JCT in seconds.",
        "makespan_s": "From the first arrival until the last job ended.",
        "restarts": "How often a job that had run began again, elsewhere or at another size.",
        "bound_s": "Mean JCT of jobs that are each alone on all nodes, at their best size within their bounds.",
        "bound_makespan_s": "Until the last of these would have ended.",
    },
    "reproduce-topology": {
        "topology": "The cluster: one of ours, or the name of the file.",
        "load": "Offered: GPU-seconds of jobs alone where they are fastest, by those that there are while they come.",
        "seed": "What the jobs were drawn with.",
        "policy": "Who decided.",
        "mean_jct_h": "Mean JCT in hours.",
        "p99_jct_h": "The JCT that one job in a hundred exceeds.",
        "mean_slowdown": "How many times longer jobs ran than alone where they are fastest; the mean over jobs.",
        "combine": "`formula`; with `--table` how pairs combine: `product` or `sum`.",
        "mix": "Of sizes: `philly-like`, `large`, `philly`; `table`: those of the table.",
        "jobs": "How many.",
        "knows": "What the policy is told of slowdown: `nothing`, or `the true model`.",
    },
}
