"""``gpusched predict`` and the estimator behind it: nothing known too early, calibrated, better than what is usual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields

from gpusched.agents.common.evaluate import final_table
from gpusched.agents.predictor.evaluate import evaluate
from gpusched.agents.predictor.request import predict_jobs
from gpusched.estimation import quantiles as q
from gpusched.estimation.estimators import Estimator, HistoryEstimator, LastTwo, ends_of, followed
from gpusched.estimation.groups import KINDS, groups_of
from gpusched.model import ids
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.model.policy import PolicySpec
from gpusched.nightly.proof import judge
from gpusched.queue.store import RunRecord, Store
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.engine.generic import new_queue, run_generic
from gpusched.sim.engine.state import OVER
from gpusched.sim.policies import policy_by_name, policy_of_spec
from gpusched.sim.pool import Pool
from gpusched.sim.power import power_model
from gpusched.sim.replay import replay
from gpusched.study.study import Scenario
from gpusched.traces import file as tracefile
from gpusched.traces.trace import Trace
from tests.agents.habits import DATA, EPOCH, FAST, Cli, cli, habits
from tests.sim.worlds import trace_of

__all__ = ["cli"]  # a fixture

WAITS = ids.mint(EPOCH + 20 * 86400)


def one_group(jobs: int, limit: float = np.inf, keeps: float = 0.995) -> q.RunTimes:
    """Jobs of which nothing is known but that they are jobs."""
    return q.new_run_times(np.zeros((jobs, 1), np.int64), np.array([keeps]), np.full(jobs, limit))


def above(known: q.RunTimes, job: int, seconds: float) -> float:
    q.fill_mass(known, job, 0.0)
    return float(known.mass[int(q.place_of(seconds)) :].sum())


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1199), st.integers(0, 2**32 - 1))
def test_nothing_is_known_before_it_has_happened(job: int, seed: int) -> None:
    """Whatever ends after a job's submission may change; what is said of that job at its submission does not."""
    trace = habits()
    duration = trace.duration.copy()
    later = ends_of(trace) > trace.submit[job]
    duration[later] = np.maximum(duration[later], trace.submit[job] - trace.submit[later] + 1.0) + 100.0
    duration[later] *= np.random.default_rng(seed).uniform(1.0, 5.0, int(later.sum()))
    before, after = (followed(one)[0] for one in (trace, replace(trace, duration=duration)))
    np.testing.assert_array_equal(after.seconds[job], before.seconds[job])
    assert after.expected[job] == before.expected[job]


def test_calibrated_and_better_than_the_usual_estimates() -> None:
    trace = habits()
    found = evaluate(followed(trace)[0], trace, np.arange(600, 1200))
    by_name = {row.estimate: row for row in found.rows}
    assert set(by_name) == {"history (median)", "mean of last two", "limit"}
    assert by_name["history (median)"].log_error < 0.4
    assert found.crps < 0.35
    assert all(row.log_error > 0.8 for name, row in by_name.items() if name != "history (median)")
    assert 0.85 < found.covered_90 < 0.97
    assert 0.4 < found.covered_50 < 0.65


def test_jobs_that_still_run_count_for_as_much_as_those_that_ended() -> None:
    """Every other job is short: what is expected must not become shorter because the long ones have not ended."""
    known = one_group(201)
    for job in range(200):
        q.note_age(known, job, 0.0)
        if job % 2:
            q.note_end(known, job, 20.0)
    for job in range(0, 200, 2):
        q.note_age(known, job, 5000.0)
    assert above(known, 200, 3000.0) == pytest.approx(0.5, abs=0.05)


def test_a_job_says_nothing_of_itself() -> None:
    known = one_group(12)
    for job in range(10):
        q.note_age(known, job, 0.0)
        q.note_end(known, job, 100.0)
    before = above(known, 11, 1000.0)
    q.note_age(known, 10, 0.0)
    q.note_age(known, 10, 50_000.0)
    assert above(known, 11, 1000.0) > before + 0.02
    q.fill_mass(known, 10, 0.0)
    assert float(known.mass[int(q.place_of(1000.0)) :].sum()) == pytest.approx(before, abs=1e-6)


def test_a_stopped_job_leaves_no_trace() -> None:
    known = one_group(3)
    q.note_age(known, 0, 0.0)
    q.note_end(known, 0, 300.0)
    q.note_age(known, 1, 0.0)
    q.note_age(known, 1, 7000.0)
    q.note_stop(known, 1)
    assert float(known.runs.sum()) == pytest.approx(0.0, abs=1e-6)
    assert known.at.tolist() == [-1, -1, -1]


@given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=30), st.floats(0.0, 2e6), st.floats(20.0, 1e6))
@settings(max_examples=50, deadline=None)
def test_quantiles_ascend_and_keep_to_age_and_limit(ran: list[float], had_s: float, limit: float) -> None:
    known = one_group(len(ran) + 1, limit)
    for job, seconds in enumerate(ran):
        q.note_age(known, job, 0.0)
        q.note_end(known, job, min(seconds, limit))
    had_s = min(had_s, 0.9 * limit)
    found = np.zeros(len(q.QUANTILES))
    q.fill_quantiles(known, len(ran), had_s, found)
    assert (np.diff(found) >= 0).all()
    assert found[0] >= 0.999 * had_s
    assert found[-1] <= limit
    assert had_s <= 1.001 * q.mean_s(known, len(ran), had_s) <= 1.002 * limit
    assert float(known.mass.sum()) == pytest.approx(1.0, abs=1e-5)


def test_groups_from_burst_to_all() -> None:
    trace = habits(4)
    trace = replace(
        trace, submit=np.array([0.0, 500.0, 1000.0, 5000.0]), user=np.array([0, 0, 1, 0]), gpus=np.array([1, 1, 1, 1]),
        command=np.array([7, 7, 7, 7]), image=np.array([0, 0, 1, -1]),
    )  # fmt: skip
    group = dict(zip(KINDS, groups_of(trace).T.tolist(), strict=True))
    assert group["burst"][0] == group["burst"][1]
    assert len(set(group["burst"])) == 3  # another user, and hours later
    assert group["user, command"] == [-1] * 4  # the same as the user
    assert group["user"][0] == group["user"][1] == group["user"][3] != group["user"][2]
    assert group["user, image"][0] == group["user, image"][1] != group["user, image"][2]
    assert group["user, image"][3] == -1
    assert len(set(group["all"])) == 1


def test_what_a_window_begins_with_ends_in_it() -> None:
    """One job runs when it begins, with 50 s left; one waits, whose estimate knows nothing of it yet."""
    trace = trace_of([-100, -30, 20, 60], [50, 70, 10, 10], [1, 1, 1, 1], limit=[900, 900, 900, 900], user=[0, 0, 0, 0])
    trace = replace(trace, arrival=np.array([0.0, 0.001, 20.0, 60.0]), wait=np.array([10.0, 80.0, 500.0, 0.0]))
    assert ends_of(trace).tolist() == [50.0, 120.0, 530.0, 70.0]
    assert LastTwo().expected(trace).tolist() == [900.0, 900.0, 900.0, 50.0]


@pytest.mark.parametrize("estimator", [HistoryEstimator(), LastTwo()])
def test_a_replay_estimates_as_the_live_controller_does(estimator: Estimator) -> None:
    """On so many GPUs that nobody waits, so that the same jobs have ended at each submission."""
    trace = habits(300, seed=2)
    policy = policy_by_name("sjf-estimate-skip")
    world = world_of(trace, Pool.uniform(200, 8), policy, ReplayOptions(estimator=estimator))
    assert run_generic(world.sim, log_of(world), world.passes, new_queue(world)) == OVER
    live = estimator.expected(trace)
    np.testing.assert_allclose(world.sim.jobs["expected"], live, rtol=1e-6)
    assert (live < 86400.0).mean() > 0.9, "few go by their limits"


def turned() -> tuple[Trace, np.ndarray, np.ndarray]:
    """A user's new burst is long, after short jobs; another user's jobs are as before: the trace, burst and others."""
    trace = habits(60)
    burst, others = np.arange(40, 50), np.arange(50, 60)
    submit = np.concatenate((np.arange(40) * 2000.0, 90_000.0 + np.arange(10), 90_020.0 + np.arange(10)))
    user, duration = np.arange(60) % 2, np.where(np.arange(60) % 2, 900.0, 300.0)
    user[burst], user[others] = 0, 1
    duration[burst], duration[others] = 20_000.0, 900.0
    trace = replace(trace, submit=submit, user=user, duration=duration, gpus=np.ones(60, np.int64))
    return trace, burst, others


def test_first_ends_of_a_burst_renew_the_estimates_of_its_waiting_jobs() -> None:
    """Once they say that it is long, another user's jobs pass it."""
    trace, burst, others = turned()
    starts = {name: replay(trace, Pool.uniform(1, 1), "sjf-estimate-skip", estimator=estimator).start
              for name, estimator in (("once", LastTwo()), ("renewed", HistoryEstimator()))}  # fmt: skip
    assert starts["once"][burst].max() < starts["once"][others].min()
    assert starts["renewed"][others].max() < np.sort(starts["renewed"][burst])[3]


def test_a_policy_is_proved_by_the_estimates_that_it_has_live(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, pool = turned()[0], Pool.uniform(1, 1)
    scenario = Scenario(trace, pool, power_model(pool))
    fifo, short = (PolicySpec(name=order, order=order, backfill="skip") for order in ("fifo", "sjf-estimate"))  # type: ignore[arg-type]
    live = replay(trace, pool, policy_of_spec(short), estimator=HistoryEstimator())
    mean_jct_s = pytest.approx((live.end - trace.submit).mean())
    assert judge(scenario, "p", fifo, short).candidate_mean_jct_s == mean_jct_s
    monkeypatch.setattr("gpusched.agents.common.evaluate.baselines", lambda agent: [])
    assert final_table(policy_of_spec(short), [scenario])[0].value == mean_jct_s, "so is a trained one's"


def test_a_policy_may_order_equal_jobs_last_submitted_first() -> None:
    trace = habits(6)
    trace = replace(trace, submit=np.arange(6.0), user=np.zeros(6, np.int64), gpus=np.ones(6, np.int64),
                    duration=np.full(6, 100.0), model=np.zeros(6, np.int64))  # fmt: skip

    def order(ties: str) -> list[int]:
        spec = PolicySpec(name="short", order="sjf-estimate", backfill="skip", place="best-fit", ties=ties)  # type: ignore[arg-type]
        result = replay(trace, Pool.uniform(1, 1), policy_of_spec(spec), estimator=HistoryEstimator())
        return [int(job) for job in np.argsort(result.start, kind="stable")]

    assert order("first") == [0, 1, 2, 3, 4, 5]
    assert order("last") == [0, 5, 4, 3, 2, 1]


def history(folder: Path, trace: Trace) -> None:
    """A state folder in which the trace's jobs have ended, and one waits."""
    store = Store.create_or_open(folder)
    with store.transaction():
        for i, job_id in enumerate(trace.ids):
            gpus, user = int(trace.gpus[i]), trace.users[trace.user[i]]
            begin = EPOCH + float(trace.submit[i])
            end = begin + float(trace.duration[i])
            spec = JobSpec(
                name=trace.models[trace.model[i]], partition="p", gpus_per_node=gpus, cores_per_node=1,
                memory_mib_per_node=1, time_limit_s=86400,
            )  # fmt: skip
            job = JobRecord(id=job_id, user=user, uid=0, spec=spec, state=JobState.COMPLETED, submit_time=begin,
                      start_time=begin, end_time=end, attempt=1)  # fmt: skip
            store.put_jobs([job])
            store.open_run(RunRecord(job_id=job_id, attempt=1, user=user, partition="p", flavor=None, share=0.1,
            gpus=gpus,
                               start_time=begin, end_time=None, outcome=None, nodes={"n": gpus}))  # fmt: skip
            store.close_run(job_id, 1, end, JobState.COMPLETED)
        store.put_jobs([JobRecord(id=WAITS, user="u5", uid=0, spec=spec, state=JobState.PENDING,
                            submit_time=EPOCH + 20 * 86400)])  # fmt: skip
    store.close()


def test_from_history_to_a_job(cli: Cli) -> None:
    history(cli.folder / "state", habits(300))
    (row,) = cli.predict(WAITS, **FAST)
    assert (row["id"], row["run_s"]) == (WAITS, None)
    names = ("p5_s", "p25_s", "p50_s", "p75_s", "p95_s")
    assert [row[name] for name in names] == sorted(row[name] for name in names)
    assert 0 < row["p5_s"] < row["p95_s"] <= 86400
    judged = cli.predict(str(cli.folder / "state"), **FAST)["evaluation"]  # its own history is a trace, too
    assert 100 < judged["jobs"] < 200
    assert judged["rows"][0]["log_error"] < judged["rows"][1]["log_error"]


def test_a_past_job_is_predicted_as_of_its_submission() -> None:
    spec = JobSpec(
        name="run-7", partition="p", gpus_per_node=1, cores_per_node=1, memory_mib_per_node=1, time_limit_s=9999
    )

    def ended(begin: float, ran_s: float) -> JobRecord:
        return JobRecord(
            id=ids.mint(EPOCH + begin), user="u", uid=0, spec=spec, state=JobState.COMPLETED, submit_time=EPOCH + begin,
            start_time=EPOCH + begin, end_time=EPOCH + begin + ran_s, attempt=1,
        )  # fmt: skip

    before, job, after = ended(0.0, 100.0), ended(1000.0, 50.0), ended(900.0, 5000.0)
    waits = replace_fields(job, state=JobState.PENDING, start_time=None, end_time=None)
    runs = replace_fields(after, state=JobState.RUNNING, end_time=None)
    (past,), (then,) = predict_jobs([before, job, after], [job]), predict_jobs([before, runs], [waits])
    assert (past.run_s, then.run_s) == (50.0, None)
    assert replace_fields(past, run_s=None) == then != replace_fields(predict_jobs([], [waits])[0], run_s=None)


def test_usage(cli: Cli) -> None:
    assert "no job or trace given" in cli.predict(code=2)["error"]
    assert "need a job name" in cli.predict("--gpus", "2", code=2)["error"]
    tracefile.write(cli.folder / "t.gpt", habits(20))
    refused = cli.predict(str(cli.folder / "t.gpt"), "--format", "gpusched", "--since", "2030-01-01", code=2)
    assert "no job was submitted since" in refused["error"]


def test_replay_believes_it(cli: Cli) -> None:
    """Shortest first by history is nearer to the oracle than by the user's last two; also where jobs are mapped."""
    trace = habits(300, seed=1)
    trace = replace(trace, submit=trace.submit / 4, limit=np.full(300, np.nan))
    tracefile.write(cli.folder / "t.gpt", trace)
    words = ("replay", str(cli.folder / "t.gpt"), "--format", "gpusched", "--nodes", "1", "--gpus-per-node", "8")
    ours, oracle = cli.run(*words, "-P", "sjf-estimate-skip", "-P", "sjf-oracle-skip", **FAST)
    usual = cli.run(*words, "-P", "sjf-estimate-skip", "--estimates", "last-two", **FAST)[0]
    assert oracle["mean_jct_s"] <= ours["mean_jct_s"] < usual["mean_jct_s"]
    assert {usual["knows"], ours["knows"]} == {"estimate"}
    assert "estimates by history" in ours["notes"]
    mapped = cli.run(*words, "-P", "sjf-estimate-skip", "--placement", "fastest", **FAST)
    assert mapped[0]["mean_jct_s"] == pytest.approx(ours["mean_jct_s"], rel=0.02)
    policy = cli.folder / "short.yaml"
    policy.write_text("order: sjf-estimate\nplace: best-fit\nbackfill: skip\n")
    (filed,) = cli.run(*words, "-P", str(policy), **FAST)
    assert (filed["knows"], filed["mean_jct_s"]) == ("estimate", ours["mean_jct_s"])
    refused = cli.run(*words, "-P", "fifo", "--estimates", "last-two", code=2)
    assert "no policy uses estimates" in refused["error"]
    assert "none of history, last-two" in cli.run(*words, "-P", "sjf-estimate", "--estimates", "x", code=2)["error"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize("cluster", ["11cb48", "b436b2"])
def test_on_public_traces_it_covers_what_it_says_and_beats_the_last_two(cli: Cli, cluster: str) -> None:
    """Two of Philly's virtual clusters, judged on what was submitted after 16 October."""
    words = (str(DATA / "philly_2017.csv.gz"), "--vc", cluster, "--format", "philly-csv", "--since", "2017-10-16")
    found = cli.predict(*words, **FAST)["evaluation"]
    ours, usual = (row["log_error"] for row in found["rows"])
    assert ours < 0.7 * usual
    assert 0.85 <= found["covered_90"] <= 0.95
    assert 0.4 <= found["covered_50"] <= 0.6
