"""``gpusched predict``: trees without scikit-learn, nothing known too early, better than what is usual."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields
from safetensors import safe_open

from gpusched.agents.predictor import train as predict
from gpusched.agents.predictor.request import predict_jobs
from gpusched.config.weights import ModelError, load_file, save_model
from gpusched.errors import GpuschedError
from gpusched.estimation.features import FEATURES, KEYS, OF_KEY, STATIC, keys_of
from gpusched.estimation.predictor import LastTwo, Predictor, ends_of, features_of
from gpusched.model import ids
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.queue.store import RunRecord, Store
from gpusched.sim.engine.build import ReplayOptions, log_of, world_of
from gpusched.sim.engine.generic import new_queue, run_generic
from gpusched.sim.engine.state import OVER
from gpusched.sim.policies import policy_by_name
from gpusched.sim.pool import Pool
from gpusched.traces import file as tracefile
from gpusched.traces.trace import Trace
from tests.agents.habits import DATA, EPOCH, FAST, Cli, cli, habits

__all__ = ["cli"]  # a fixture

SMALL = predict.BoostingSettings(trees=40, jobs_per_leaf=5)
WAITS = ids.mint(EPOCH + 20 * 86400)


@pytest.fixture(scope="module")
def trained() -> Predictor:
    trace = habits()
    return predict.train(trace, until=10 * 86400.0, settings=SMALL)


def test_the_same_answers_as_scikit_learn() -> None:
    from sklearn.ensemble import HistGradientBoostingRegressor
    from threadpoolctl import threadpool_limits

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(800, len(FEATURES)))
    rows[rng.random(rows.shape) < 0.2] = np.nan
    rows[:, 0] = rng.uniform(2, 9, 800)  # the anchor is always known
    target = np.nan_to_num(rows[:, 3]) * 2 + np.isnan(rows[:, 5])
    with threadpool_limits(1):
        models = [
            HistGradientBoostingRegressor(loss="quantile", quantile=q, max_iter=30).fit(rows, target)
            for q in predict.QUANTILES
        ]
    forest = predict.forest_of(models, np.arange(len(FEATURES)), 7.0)
    ours = Predictor(
        forest=forest, quantiles=predict.QUANTILES, shifts=(-0.5, 0.0, 0.25), learned_until=0.0, calendar=True, about={}
    )
    low, middle, high = (model.predict(rows) + rows[:, 0] for model in models)
    theirs = np.column_stack((np.minimum(low - 0.5, middle), middle, np.maximum(high + 0.25, middle)))
    np.testing.assert_allclose(ours.predict(rows), np.exp(np.maximum(theirs, 0.0)), rtol=1e-12)
    assert (low > middle).any()  # quantiles of trees do cross


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1199), st.integers(0, 2**32 - 1))
def test_nothing_is_known_before_it_has_happened(job: int, seed: int) -> None:
    """Whatever ends after a job's submission may change; what is known of that job at its submission does not."""
    trace = habits()
    before = features_of(trace, 7.0)[job]
    duration = trace.duration.copy()
    later = ends_of(trace) > trace.submit[job]
    duration[later] = np.maximum(duration[later], trace.submit[job] - trace.submit[later] + 1.0) + 100.0
    duration[later] *= np.random.default_rng(seed).uniform(1.0, 5.0, int(later.sum()))
    np.testing.assert_array_equal(features_of(replace(trace, duration=duration), 7.0)[job], before)


def test_training_sees_only_what_has_ended(trained: Predictor) -> None:
    trace = habits()
    duration = trace.duration.copy()
    open_ = ends_of(trace) > 10 * 86400.0
    duration[open_] = np.maximum(duration[open_], 10 * 86400.0 - trace.submit[open_] + 1.0) * 3.0
    again = predict.train(replace(trace, duration=duration), until=10 * 86400.0, settings=SMALL)
    for one, other in zip(trained.forest, again.forest, strict=True):
        np.testing.assert_array_equal(one, other)


def test_features_by_hand() -> None:
    """Three jobs of one user: the third knows the first two, the second knows none that still runs."""
    trace = habits(3)
    trace = replace(
        trace, submit=np.array([0.0, 10.0, 1000.0]), duration=np.array([100.0, 300.0, 1.0]), user=np.zeros(3, np.int64),
        gpus=np.array([1, 4, 1]),
    )  # fmt: skip
    place = {name: i for i, name in enumerate(FEATURES)}
    rows = features_of(trace, 7.0)
    assert np.isnan(rows[1, place["user: last"]])
    anchor = 0.7 * np.log(100.0) + 0.3 * np.log(300.0)  # of the user and run-#
    assert rows[:2, place["anchor"]].tolist() == [7.0, 7.0]
    assert rows[2, place["anchor"]] == pytest.approx(anchor)
    assert rows[2, place["limit"]] == pytest.approx(np.log(86400.0) - anchor)
    assert rows[2, place["user: last"]] == pytest.approx(np.log(300.0) - anchor)
    assert rows[2, place["user: mean of last two"]] == pytest.approx(np.log(200.0) - anchor)
    assert rows[2, place["user and GPUs: last"]] == pytest.approx(np.log(100.0) - anchor)
    assert rows[2, place["user: log seconds since"]] == pytest.approx(np.log(1.0 + 690.0))
    assert rows[2, place["weekday"]] == 6  # 2025-06-15, a Sunday
    assert len(FEATURES) == 1 + len(STATIC) + len(KEYS) * len(OF_KEY)
    assert len(set(keys_of(trace)[:, KEYS.index("name")].tolist())) == 1  # run-0, run-1, run-2


def test_better_than_the_usual_estimates_on_days_not_seen(trained: Predictor) -> None:
    trace = habits()
    later = np.flatnonzero(~trained.in_training_data(trace))
    found = predict.evaluate(trained, trace, later, predict.training_median(trace, 10 * 86400.0))
    by_name = {row.estimate: row for row in found.rows}
    assert set(by_name) == {"predicted (median)", "mean of last two", "limit", "median of all"}
    assert by_name["predicted (median)"].log_error < 0.45
    assert all(row.log_error > 0.8 for name, row in by_name.items() if name != "predicted (median)")
    assert found.covered is not None
    assert 0.65 < found.covered < 0.95


def test_the_file_is_safetensors_and_says_what_it_is_of(trained: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    trained.save(path)
    with safe_open(path, framework="numpy") as file:
        assert file.metadata()["agent"] == "predictor"
    loaded = Predictor.load(path)
    rows = features_of(habits(), 7.0)
    np.testing.assert_array_equal(loaded.predict(rows), trained.predict(rows))
    assert (loaded.learned_until, loaded.calendar) == (10 * 86400.0 + EPOCH, True)
    assert loaded.shifts == trained.shifts
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        Predictor.load(torn)
    loops = replace(trained, forest=trained.forest._replace(left=np.zeros_like(trained.forest.left)))
    loops.save(path)
    with pytest.raises(ModelError, match="trees lead nowhere"):
        Predictor.load(path)


def test_a_file_from_before_calibration_is_read(trained: Predictor, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    trained.save(path)
    model = load_file(path, "predictor")
    older = {name: text for name, text in model.about.items() if name not in ("agent", "shifts")}
    save_model(path, "predictor", model.arrays, older)
    assert Predictor.load(path).shifts == (0.0, 0.0, 0.0)
    save_model(path, "predictor", model.arrays, older | {"shifts": "[0.0, 1.0]"})
    with pytest.raises(ModelError, match="quantiles make no sense"):
        Predictor.load(path)


def test_too_little_to_learn_from() -> None:
    with pytest.raises(GpuschedError, match="at least 50 are needed"):
        predict.train(habits(40), until=1e9)


@pytest.mark.parametrize("learned", [False, True])
def test_a_replay_estimates_as_the_live_controller_does(trained: Predictor, learned: bool) -> None:
    """On so many GPUs that nobody waits, so that the same jobs have ended at each submission."""
    trace, predictor = habits(300, seed=2), trained if learned else None
    policy = policy_by_name("sjf-estimate-skip")
    world = world_of(trace, Pool.uniform(200, 8), policy, ReplayOptions(predictor=predictor))
    assert run_generic(world.sim, log_of(world), world.passes, new_queue(world)) == OVER
    live = (predictor or LastTwo()).medians(trace)
    np.testing.assert_allclose(world.sim.jobs["expected"], live, rtol=1e-12)
    assert (live < 86400.0).mean() > 0.9, "few go by their limits"


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
    cli.predict("x", code=1)
    history(cli.folder / "state", habits(400))
    made = cli.predict("--train", "--since", "all", "--hold-out", "0.3")
    assert made["jobs"] == 400
    assert made["path"] == str(cli.folder / "state" / "run-times.safetensors")
    assert {row["estimate"] for row in made["evaluation"]["rows"]} >= {"predicted (median)", "limit"}
    (told,) = cli.predict(WAITS)
    assert told["id"] == WAITS
    assert told["run_s"] is None
    assert 0 < told["p10_s"] <= told["p50_s"] <= told["p90_s"]


def test_a_job_of_the_past_is_told_as_of_its_submission(trained: Predictor) -> None:
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
    (told,), (then,) = predict_jobs(trained, [before, job, after], [job]), predict_jobs(trained, [before], [waits])
    assert (told.run_s, then.run_s) == (50.0, None)
    assert replace_fields(told, run_s=None) == then != replace_fields(predict_jobs(trained, [], [waits])[0], run_s=None)


def test_usage(cli: Cli) -> None:
    assert "no predictor" in cli.predict("nothing", code=1)["error"]
    assert "--train reads --trace" in cli.predict("x", "--train", code=2)["error"]
    assert "no job or trace given" in cli.predict(code=2)["error"]
    blocked = cli.folder / "blocked"
    (blocked / "sklearn").mkdir(parents=True)
    (blocked / "sklearn" / "__init__.py").write_text("raise ImportError('not here')\n")
    history(cli.folder / "state", habits(60))
    said = cli.predict("--train", "--since", "all", code=1, PYTHONPATH=str(blocked))["error"]
    assert "scikit-learn" in said or "sklearn" in said
    assert "pip install 'gpusched-cluster[learn]'" in said


def test_replay_believes_it(cli: Cli, trained: Predictor) -> None:
    """Shortest first by prediction is nearer to the oracle than by the user's last two; also where jobs are mapped."""
    trace = habits(300, seed=1)
    trace = replace(trace, submit=trace.submit / 4, limit=np.full(300, np.nan))
    tracefile.write(cli.folder / "t.gpt", trace)
    trained.save(cli.folder / "p.safetensors")
    words = ("replay", str(cli.folder / "t.gpt"), "--format", "gpusched", "--nodes", "1", "--gpus-per-node", "8")
    estimated, oracle = cli.run(*words, "-P", "sjf-estimate-skip", "-P", "sjf-oracle-skip")
    ours = cli.run(*words, "-P", "sjf-estimate-skip", "--estimates", str(cli.folder / "p.safetensors"))[0]
    assert oracle["mean_jct_s"] <= ours["mean_jct_s"] < estimated["mean_jct_s"]
    assert {estimated["knows"], ours["knows"]} == {"estimate"}
    assert any(note.startswith("estimates by predictor") for note in ours["notes"])
    ours_too = ("-P", "sjf-estimate-skip", "--estimates", str(cli.folder / "p.safetensors"))
    mapped = cli.run(*words, *ours_too, "--placement", "fastest")
    assert mapped[0]["mean_jct_s"] == pytest.approx(ours["mean_jct_s"], rel=0.02)
    policy = cli.folder / "short.yaml"
    policy.write_text("order: sjf-estimate\nplace: best-fit\nbackfill: skip\n")
    (filed,) = cli.run(*words, "-P", str(policy), "--estimates", str(cli.folder / "p.safetensors"))
    assert (filed["knows"], filed["mean_jct_s"]) == ("estimate", ours["mean_jct_s"])
    refused = cli.run(*words, "-P", "fifo", "--estimates", str(cli.folder / "p.safetensors"), code=2)
    assert "no policy uses estimates" in refused["error"]


@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_on_a_public_trace_it_beats_the_mean_of_the_last_two(cli: Cli) -> None:
    """One of Philly's virtual clusters, learned from until 10 October; judged on what was submitted after it."""
    out = str(cli.folder / "p.safetensors")
    words = (str(DATA / "philly_2017.csv.gz"), "--vc", "ed69ec", "--format", "philly-csv")
    made = cli.predict("--train", "--trace", *words, "--until", "2017-10-10", "--out", out, "--hold-out", "0", **FAST)
    assert made["evaluation"] is None
    told = cli.predict(*words, "--model", out, **FAST)
    rows = {row["estimate"]: row for row in told["evaluation"]["rows"]}
    assert rows["predicted (median)"]["log_error"] < rows["mean of last two"]["log_error"]
    assert any("older than the training data" in note for note in told["notes"])
    assert len(told["jobs"]) > told["evaluation"]["jobs"] > 900
