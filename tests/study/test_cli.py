"""``gpusched replay`` as a process of its own, with the compiler switched off: small workloads, no waiting."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Mapping

import msgspec
import pytest

from gpusched.cli import main as cli
from gpusched.config.policies import BUILT_IN, load_policy, names_in
from gpusched.config.weights import load_model
from gpusched.model.jobs import JobRecord, JobSpec, JobState
from gpusched.queue.store import RunRecord, Store
from gpusched.study.options import ReplayRequest
from gpusched.study.request import resolve
from tests.promotion import weights
from tests.study.place import INVENTORY, ONE, Place, place

__all__ = ["place"]  # a fixture

KEYS = {
    "policy", "knows", "jobs", "mean_jct_s", "median_jct_s", "p95_jct_s", "mean_wait_s", "p95_wait_s",
    "mean_bounded_slowdown", "makespan_s", "utilization", "energy_kwh", "inefficient_energy_kwh",
    "lower_bound_mean_jct_s", "sim_seconds", "jobs_per_s",
}  # fmt: skip


def test_json_is_one_list_with_the_keys_others_rely_on(place: Place) -> None:
    fifo, easy = place.rows(*ONE, "-P", "fifo", "-P", "fifo+easy")
    assert set(fifo) >= KEYS
    assert (fifo["policy"], fifo["knows"], fifo["jobs"]) == ("fifo", "nothing", 4)
    assert (easy["policy"], easy["knows"]) == ("fifo+easy", "limit")
    # by hand: 1 at 0-100, 2 at 10-60, 3 at 100-600, 4 behind it at 600-620
    assert fifo["mean_jct_s"] == (100 + 50 + 580 + 590) / 4
    assert fifo["mean_wait_s"] == (0 + 0 + 80 + 570) / 4
    assert fifo["makespan_s"] == 620
    assert fifo["utilization"] == pytest.approx((200 + 200 + 4000 + 40) / (8 * 620))
    assert easy["mean_jct_s"] == (100 + 50 + 580 + 20) / 4
    assert [c["figure"] for c in easy["change"]] == ["jct_s", "wait_s", "bounded_slowdown"]
    assert fifo["change"] == []


def test_a_policy_may_be_a_file(place: Place) -> None:
    (place.folder / "mine.yaml").write_text("order: fifo\nplace: best-fit\nbackfill: easy\n")
    named, filed = place.rows(*ONE, "-P", "fifo+easy", "-P", "mine.yaml")
    assert filed["mean_jct_s"] == named["mean_jct_s"]


def test_names_of_policy_files_are_those_files(place: Place) -> None:
    staged = sorted(name for name in names_in((BUILT_IN,)) if load_policy(BUILT_IN / f"{name}.yaml").agent is None)
    named = place.rows(*ONE, *(word for name in staged for word in ("-P", name)))
    filed = place.rows(*ONE, *(word for name in staged for word in ("-P", str(BUILT_IN / f"{name}.yaml"))))
    figures = ("knows", "placement", "mean_jct_s", "mean_wait_s")
    assert {"easy", "naive", "spread", "sjf", "ljf", "fairshare"} <= {row["policy"] for row in named}
    assert [[row[f] for f in figures] for row in named] == [[row[f] for f in figures] for row in filed]
    assert any("sjf-oracle" in note for note in named[0]["notes"])  # what sjf was called in replays before
    (place.folder / "policies").mkdir()
    (place.folder / "policies/sjf.yaml").write_text("order: fifo\nplace: spread\n")  # the site's own goes first
    (own,) = place.rows(*ONE, "-P", "sjf")
    assert (own["knows"], own["placement"]) == ("nothing", "spread")
    assert not any("sjf-oracle" in note for note in own["notes"])
    for name in ("gist", "rltune-limit"):
        _, err = place.run(*ONE, "-P", name, code=1)
        assert err.startswith(f"gpusched: error: {name} is not trained yet: ")
        assert err.endswith(f"train it: gpusched train {name}\n")


def test_drf_sizes_jobs_and_says_what_it_is_called_between_users(place: Place) -> None:
    (idle,) = json.loads(place.run(*ONE, "-P", "drf", "--json")[0])
    assert any(note.endswith("of which there are none; between users: drf-users") for note in idle["notes"])
    (order,) = json.loads(place.run(*ONE, "-P", "drf-users", "--json")[0])
    (rule,) = json.loads(place.run(*ONE, "-P", "drf", "--resizable", "1-8", "--json")[0])
    assert not any("drf-users" in note for note in rule["notes"] + order["notes"])
    assert rule["mean_jct_s"] < order["mean_jct_s"]


def test_a_trained_agent_decides_in_replays_with_the_weights_of_the_partition(place: Place) -> None:
    _record(place, BLOCKED)
    _record(place, [("d", 5000.0, 5000.0, 4000.0, 4)], "B")
    for partition, seed in (("A", 1), ("B", 2)):
        weights.write(place.folder / f"policies/gist/{partition}.safetensors", seed)
    (place.folder / "policies/gist/policy.yaml").write_text(weights.YAML)
    for partition in ("A", "B"):
        digest = load_model(place.folder / "policies/gist", partition, "gist").digest
        (row,) = place.rows("--since", "30d", "--vc", partition, "-P", "gist")
        assert (row["knows"], row["source"]) == ("limit", f"gist agent, weights {digest}")
    _, err = place.run("--since", "30d", "-P", "gist", code=2)
    assert "gist has weights of its own for each of A, B" in err
    place.run("--since", "1d", "--nightly")
    (report,) = (place.folder / "state/reports").glob("*.json")
    first, second = json.loads(report.read_text())["partitions"]
    assert "gist" in {r["policy"] for r in first["runs"]} & {r["policy"] for r in second["runs"]}


def test_one_node_of_128_gpus_is_a_pool(place: Place) -> None:
    (row,) = place.rows("log.swf", "--nodes", "1", "--gpus-per-node", "128", "-P", "fifo")
    assert (row["nodes"], row["gpus"], row["mean_wait_s"]) == (1, 128, 0)


def test_schedules_are_written_for_each_policy(place: Place) -> None:
    place.run(*ONE, "-P", "fifo", "--schedule-out", "s.csv")
    with (place.folder / "s.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["job", "start", "end", "nodes"],
        ["1", "0.0", "100.0", "n0000"],
        ["2", "10.0", "60.0", "n0000"],
        ["3", "100.0", "600.0", "n0000"],
        ["4", "600.0", "620.0", "n0000"],
    ]
    _, err = place.run(*ONE, "-P", "fifo", "-P", "sjf", "--schedule-out", "t.csv")
    assert (place.folder / "t.fifo.csv").read_text() == (place.folder / "s.csv").read_text()
    assert "t.sjf.csv" in err


def test_a_job_that_never_runs_has_an_empty_line_and_a_reason(place: Place) -> None:
    (row,) = place.rows("log.swf", "--nodes", "1", "--gpus-per-node", "4", "-P", "fifo", "--schedule-out", "s.csv")
    assert (row["jobs"], row["infeasible"]) == (3, 1)
    assert any("can never run" in note for note in row["notes"])
    assert "3,,,\n" in (place.folder / "s.csv").read_text()


def test_load_chooses_the_nodes_with_a_note(place: Place) -> None:
    (light,) = place.rows("log.swf", "--load", "5", "--gpus-per-node", "8", "-P", "fifo")
    (heavy,) = place.rows("log.swf", "--load", "10", "--gpus-per-node", "8", "-P", "fifo")
    assert light["nodes"] == round(4440 / (5 * 8 * 30))
    assert light["nodes"] > heavy["nodes"]
    assert any("chosen for an offered load of 5" in note for note in light["notes"])
    (paced,) = place.rows("log.swf", "--load", "0.5", "--nodes", "1", "-P", "fifo")
    assert paced["nodes"] == 1
    assert any("offered load of 0.5" in note for note in paced["notes"])


def test_the_inventory_gives_nodes_and_power(place: Place) -> None:
    (place.folder / "one.yaml").write_text(INVENTORY.partition("  B:")[0])
    (row,) = place.rows("log.swf", "--inventory", "one.yaml", "-P", "fifo")
    assert (row["nodes"], row["gpus"]) == (1, 8)
    assert row["inefficient_energy_kwh"] == pytest.approx(6.5 * 620 / 3600 * (1 - row["utilization"]))


def test_seeds_are_runs_and_equal_seeds_are_equal(place: Place) -> None:
    words = ("log.swf", "--nodes", "3", "-P", "fifo", "--placement", "random")
    runs = place.rows(*words, "--seed", "1", "--seed", "2")
    assert [r["seed"] for r in runs] == [1, 2]
    for run, again in zip(runs, place.rows(*words, "--seed", "1", "--seed", "2"), strict=True):
        timing = {"sim_seconds", "jobs_per_s"}
        assert {k: v for k, v in run.items() if k not in timing} == {k: v for k, v in again.items() if k not in timing}


def test_processes_change_nothing(place: Place) -> None:
    words = (*ONE, "-P", "fifo", "-P", "sjf-oracle", "--html", "p.html")
    alone = place.rows(*words, "-j", "1")
    page = (place.folder / "p.html").read_text()
    together = place.rows(*words, "-j", "2")
    timing = {"sim_seconds", "jobs_per_s"}
    assert [{k: v for k, v in r.items() if k not in timing} for r in alone] == [
        {k: v for k, v in r.items() if k not in timing} for r in together
    ]
    assert (place.folder / "p.html").read_text() == page


def test_the_table_says_what_policies_know_and_what_changed(place: Place) -> None:
    out, _ = place.run(*ONE, "-P", "fifo", "-P", "sjf-oracle", "--by", "user")
    assert "sjf-oracle uses the real run times (not known in practice)." in out
    assert "These policies use different information; compare with care." in out
    assert "Under sjf-oracle, jobs took" in out
    assert "USER" in out
    assert "energy is assumed" in out.lower()


SACCT = """JobID|Partition|Submit|Eligible|Start|End|TimelimitRaw|AllocTRES|State
1|a|1000|1000|1000|1100|2|gres/gpu=4|COMPLETED
2|a|1000|1001|1100|1120|1|gres/gpu=8|COMPLETED
3|a|1002|1002|1030|1040|1|gres/gpu=4|COMPLETED
"""


def test_recorded_figures_of_slurm_are_shown_beside_a_replay(place: Place) -> None:
    log = place.folder / "jobs.txt"
    log.write_text(SACCT)
    words = [str(log), "-N", "1", "-P", "easy", "-P", "fifo+none"]
    assert "As recorded, jobs waited 42.3 s on average: easy 33.0 s (-22.0%); fifo+none 1.21 min (+70.9%)." in " ".join(
        place.run(*words)[0].split()
    )
    easy, _ = place.rows(*words, "--backfill-every", "30s")
    assert (easy["recorded_mean_wait_s"], easy["wait_error"]) == (pytest.approx(127 / 3), pytest.approx(0, abs=0.01))
    _, errors = place.run(str(log), "-P", "fifo+none", "--backfill-every", "30s", code=2)
    assert "--backfill-every has no effect" in errors


def test_nodes_fail_and_drain_as_listed(place: Place) -> None:
    (place.folder / "o.csv").write_text("node,start,end,drain\nn0000,50,80,no\nn0000,150,700,yes\n")
    place.run(*ONE, "-P", "fifo", "--outages", "o.csv", "--schedule-out", "s.csv")
    # 1 and 2 are cut at 50 and start anew at 80; 3 runs at 180 at the earliest: after the drain
    rows = (place.folder / "s.csv").read_text().splitlines()
    assert rows[1:3] == ["1,0.0,180.0,n0000", "2,10.0,130.0,n0000"]
    assert rows[3:] == ["3,700.0,1200.0,n0000", "4,1200.0,1220.0,n0000"]
    (place.folder / "o.csv").write_text("node,start,end\nn0000,50,80\nn1,5,6\n")
    _, err = place.run(*ONE, "-P", "fifo", "--outages", "o.csv", code=2)
    assert "o.csv:3: node: found 'n1'" in err


def test_a_restart_costs_the_given_time(place: Place) -> None:
    free, dear = (place.rows(*ONE, "-P", "srtf", "--restart", cost)[0] for cost in ("0s", "100s"))
    if free["restarts"]:
        assert dear["mean_jct_s"] > free["mean_jct_s"]
    _, err = place.run(*ONE, "-P", "srtf", "--restart", "soon", code=2)
    assert "--restart 'soon' is not a time" in err


def test_a_restart_that_costs_nothing_may_be_asked_of_any_policy(place: Place) -> None:
    asked = ReplayRequest(traces=(str(place.trace),), policies=("rltune-preempt",), nodes=1)
    requests = [msgspec.structs.replace(asked, restart_s=seconds) for seconds in (None, 0.0, 5.0)]
    assert [resolve(request)[0].options.restart_s for request in requests] == [30.0, 0.0, 5.0]


def test_jobs_are_resized_by_policies_that_choose_sizes_and_by_no_others(place: Place) -> None:
    rigid, easy, sized = place.rows(*ONE, "-P", "elastic", "-P", "easy") + place.rows(
        *ONE, "-P", "elastic", "--resizable", "1-8"
    )
    assert rigid["mean_jct_s"] == easy["mean_jct_s"]
    # The first has all eight GPUs, and is through its 200 GPU seconds after 25 of them.
    assert sized["mean_jct_s"] < easy["mean_jct_s"]
    assert sized["lower_bound_mean_jct_s"] is None, "what holds for fixed sizes is no bound here"
    fixed = place.rows(*ONE, "-P", "easy", "--resizable", "1-8")[0]
    assert fixed["mean_jct_s"] == easy["mean_jct_s"]
    out, _ = place.run(*ONE, "-P", "elastic", "--resizable", "1-8")
    assert "for policies that choose sizes: speeds in proportion to the GPUs" in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*ONE,), "no policy given"),
        ((*ONE, "-P", "fiffo"), "no policy named 'fiffo'"),
        (("log.swf", "--inventory", "inventory.yaml", "--nodes", "2", "-P", "fifo"), "cannot be combined"),
        ((*ONE, "-P", "fifo", "--load", "0"), "load of 0"),
        ((*ONE, "-P", "fifo", "--fail-if-worse", "3"), "--nightly"),
        ((*ONE, "--nightly"), "--nightly"),
        ((*ONE, "-P", "fifo", "--backend", "spark"), "neither dask nor ray"),
        ((*ONE, "-P", "fifo", "--placement", "tight"), "no placement named 'tight'"),
        ((*ONE, "-P", "fifo", "--vc", "nobody"), "nobody"),
        (
            (*ONE, "-P", "elastic", "--resizable", "many"),
            "--resizable: found 'many', expected a range of GPUs such as 1-8",
        ),
        ((*ONE, "-P", "elastic", "--resizable", "8-1"), "--resizable: found '8-1'"),
    ],
)
def test_wrong_requests_are_one_line(
    place: Place, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process: they are refused before anything is replayed."""
    monkeypatch.chdir(place.folder)
    for name in ("GPUSCHED_STATE", "GPUSCHED_INVENTORY"):
        monkeypatch.setenv(name, place.env[name])
    assert cli.run(["replay", *words]) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert cli.run(["replay", *words, "--json"]) == 2
    assert said in json.loads(capfd.readouterr().out)["error"]


# -- the own history


def _record(
    place: Place, jobs: list[tuple[str, float, float, float, int]], partition: str = "A", limit: int = 0,
    users: Mapping[str, str] = {},
) -> None:
    """Jobs (id, submitted, started, ended: seconds before now; GPUs) into the store, as the controller leaves them."""
    now = time.time()
    store = Store.create_or_open(place.folder / "state")
    with store.transaction():
        for name, submit, start, end, gpus in jobs:
            spec = JobSpec(
                name=name, partition=partition, nodes=1, gpus_per_node=gpus, cores_per_node=gpus, memory_mib_per_node=1,
                time_limit_s=limit or int(start - end) + 60,
            )  # fmt: skip
            store.put_jobs([
                JobRecord(id=name, user=users.get(name, "ann"), uid=0, spec=spec, state=JobState.COMPLETED,
                    submit_time=now - submit, start_time=now - start, end_time=now - end, attempt=1)
            ])  # fmt: skip
            store.open_run(
                RunRecord(job_id=name, attempt=1, user=users.get(name, "ann"), partition=partition, flavor=None,
                    share=gpus / 8, gpus=gpus,
                    start_time=now - start, end_time=None, outcome=None, nodes={"n1": gpus})
            )  # fmt: skip
            store.close_run(name, 1, now - end, JobState.COMPLETED)
    store.close()


BLOCKED = [("a", 9000.0, 9000.0, 8000.0, 6), ("b", 8990.0, 8000.0, 7000.0, 8), ("c", 8980.0, 7000.0, 6900.0, 2)]
"""Under fifo c (100 s, 2 GPUs) waits behind b; with EASY backfill it runs beside a."""


def test_without_a_trace_the_own_history_on_the_own_nodes(place: Place) -> None:
    _record(place, BLOCKED)
    easy, fifo = place.rows("--since", "30d", "--vc", "A", "-P", "fifo+easy", "-P", "fifo")
    assert (fifo["jobs"], fifo["gpus"]) == (3, 16)
    assert fifo["mean_jct_s"] == pytest.approx((1000 + 1990 + 2080) / 3, abs=0.1)
    assert easy["mean_jct_s"] == pytest.approx((1000 + 1990 + 100) / 3, abs=0.1)
    assert any("starts with empty nodes" in note for note in fifo["notes"])
    place.run("--since", "1h", "-P", "fifo", code=1)


def test_fair_shares_go_by_the_inventory_s_groups(place: Place) -> None:
    """Zoe's group has used more than bob's when ann's job ends; by users alone her job goes first, submitted first."""
    jobs = [("a", 9000.0, 9000.0, 8000.0, 8), ("b", 8990.0, 8000.0, 7000.0, 8), ("c", 8980.0, 7000.0, 6900.0, 8)]
    _record(place, jobs, users={"b": "zoe", "c": "bob"})
    words = ("--since", "30d", "--vc", "A", "-P", "fairshare")
    (alone,) = place.rows(*words)
    assert alone["mean_jct_s"] == pytest.approx((1000 + 1990 + 2080) / 3, abs=0.1)
    inventory = place.folder / "inventory.yaml"
    groups = "{physics: {members: {ann: 1, zoe: 1}}, chemistry: {members: {bob: 1}}}"
    inventory.write_text(f"{inventory.read_text()}\ngroups: {groups}\n")
    (grouped,) = place.rows(*words)
    assert grouped["mean_jct_s"] == pytest.approx((1000 + 2090 + 1080) / 3, abs=0.1)


@pytest.mark.parametrize("groups", [None, "{physics: {members: {cat: 1, zoe: 1}}, chemistry: {members: {bob: 1}}}"])
def test_usage_before_the_replay_counts_for_fair_shares(place: Place, groups: str | None) -> None:
    """Zoe, or cat of her group, had GPUs before the window: bob's job goes first when ann's ends, as it would live."""
    jobs = [("a", 9000.0, 9000.0, 8000.0, 8), ("b", 8990.0, 8000.0, 7000.0, 8), ("c", 8980.0, 7000.0, 6900.0, 8)]
    before = ("z", 60_000.0, 60_000.0, 50_000.0, 8)
    _record(place, [before, *jobs], users={"b": "zoe", "c": "bob", "z": "cat" if groups else "zoe"})
    if groups:
        inventory = place.folder / "inventory.yaml"
        inventory.write_text(f"{inventory.read_text()}\ngroups: {groups}\n")
    (row,) = place.rows("--since", "5h", "--vc", "A", "-P", "fairshare")
    assert row["jobs"] == 3
    assert row["mean_jct_s"] == pytest.approx((1000 + 2090 + 1080) / 3, abs=0.1)


def _limit(place: Place, text: str) -> None:
    inventory = place.folder / "inventory.yaml"
    inventory.write_text(inventory.read_text() + f"\nlimits: {text}\n")


def test_the_own_history_is_replayed_under_the_inventory_s_limits(place: Place) -> None:
    _record(place, [("a", 9000.0, 9000.0, 8000.0, 4), ("b", 8990.0, 8990.0, 7990.0, 4)])
    applied, without = "applies the inventory's limits", "this replay applies none"
    (row,) = place.rows("--since", "30d", "-P", "fifo")
    assert not any(applied in note or without in note for note in row["notes"])
    _limit(place, "{each_user: {gpus: 4}}")
    (row,) = place.rows("--since", "30d", "-P", "fifo")
    assert (row["mean_jct_s"], row["jobs"]) == (pytest.approx((1000 + 1990) / 2, abs=0.1), 2)
    assert any(applied in note for note in row["notes"])
    (row,) = place.rows("--since", "30d", "-P", "fifo", "--no-quotas")
    assert row["mean_jct_s"] == pytest.approx(1000, abs=0.1)
    assert any(without in note for note in row["notes"])


def test_nightly_replays_are_under_the_limits_too(place: Place) -> None:
    _record(place, [("a", 9000.0, 9000.0, 8000.0, 4), ("b", 8990.0, 8990.0, 7990.0, 4)])
    _limit(place, "{each_user: {gpus: 4}}")
    out, _ = place.run("--since", "1d", "--nightly", "--json")
    (partition,) = json.loads(out)["partitions"]
    assert partition["replayed_mean_wait_s"] == pytest.approx(495, abs=0.1)
    assert {row["jobs"] for row in partition["runs"]} == {2}
    assert all(any("applies the inventory's limits" in note for note in row["notes"]) for row in partition["runs"])
    assert all(row["mean_wait_s"] >= 490 for row in partition["runs"] if not row["policy"].startswith("srtf"))


def test_hours_used_before_the_history_begins_count(place: Place) -> None:
    """All 2 GPU hours were used an hour before it: nothing starts for a week, less the hour, to the full hour."""
    _record(place, [("a", 11000.0, 11000.0, 7400.0, 2), ("b", 3600.0, 3600.0, 3500.0, 1)])
    _limit(place, "{each_user: {gpu_hours: 2}}")
    (row,) = place.rows("--since", "2h", "-P", "fifo")
    assert (row["jobs"], row["mean_wait_s"]) == (1, pytest.approx(7 * 86400 - 5600, abs=3700))
    (row,) = place.rows("--since", "2h", "-P", "fifo", "--no-quotas")
    assert row["mean_wait_s"] == 0


def test_a_trace_is_replayed_under_limits_where_that_is_asked_for(place: Place) -> None:
    words = (*ONE, "-P", "fifo")
    (before,) = place.rows(*words)
    _, err = place.run(*words, "--quotas", code=2)
    assert "--quotas: the inventory has no limits" in err
    assert err.count("\n") == 1
    _limit(place, "{each_user: {gpus: 4}}")
    assert place.rows(*words)[0]["mean_jct_s"] == before["mean_jct_s"]
    (row,) = place.rows(*words, "--quotas")
    assert (row["jobs"], row["infeasible"]) == (3, 1)
    assert any("limit of user" in note and "at most 4 GPUs at once; this job needs 8" in note for note in row["notes"])


def test_no_history_is_an_error(place: Place) -> None:
    _, err = place.run("--since", "30d", "-P", "fifo", code=1)
    assert "no history yet" in err


def test_nightly_says_in_one_line_what_the_live_policy_lost(place: Place) -> None:
    _record(place, BLOCKED)
    _record(place, [("d", 5000.0, 5000.0, 4000.0, 4)], "B")
    out, _ = place.run("--since", "1d", "--nightly")
    assert out.count("\n") == 1
    assert "A: mean JCT" in out
    assert "under fifo (live)" in out
    assert "B: mean JCT 16.7 min of 1 jobs under easy (live); no other policy is better" in out
    reports = sorted(p.name for p in (place.folder / "state/reports").iterdir())
    day = reports[0][:10]
    assert reports == [f"{day}-A.html", f"{day}-B.html", f"{day}.json"]
    report = json.loads((place.folder / f"state/reports/{day}.json").read_text())
    part = report["partitions"][0]
    assert part["live"] == part["runs"][0]["policy"] == "fifo"
    assert {"easy", "sjf", "ljf", "naive", "spread", "fairshare", "fifo-skip"} <= {r["policy"] for r in part["runs"]}
    assert part["loss"] == pytest.approx((1000 + 1990 + 2080) / (1000 + 1990 + 100) - 1, abs=0.01)
    assert part["real_mean_wait_s"] == pytest.approx((0 + 990 + 1980) / 3, abs=0.1)
    assert part["replayed_mean_wait_s"] == pytest.approx(part["real_mean_wait_s"], abs=0.1)


def test_nightly_fails_only_beyond_the_percentage(place: Place) -> None:
    _record(place, BLOCKED)
    place.run("--nightly", "--fail-if-worse", "10", code=1)
    place.run("--nightly", "--fail-if-worse", "90")
    out, _ = place.run("--nightly", "--fail-if-worse", "10", "--json", code=1)
    assert json.loads(out)["worst_loss"] == pytest.approx(0.64, abs=0.01)


def test_a_quiet_night_is_no_failure(place: Place) -> None:
    _record(place, BLOCKED)
    out, _ = place.run("--since", "1h", "--nightly", "--fail-if-worse", "0")
    assert out == "no job submitted in 1h has run and ended\n"
