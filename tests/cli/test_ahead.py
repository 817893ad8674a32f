"""When a job is expected to start, and what would start it sooner: ``why`` and ``submit --dry-run``."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import pytest

from gpusched.config.users import user_name
from gpusched.model.plan import ReasonCode
from gpusched.queue.promotions import Fallback
from gpusched.queue.store import Store
from tests.cli.ahead import HOUR, INVENTORY, Cluster
from tests.cli.conftest import Site


@pytest.fixture
def cluster(site: Site) -> Cluster:
    return Cluster(site)


def hours_from_now(text: str) -> float:
    return (datetime.fromisoformat(text).timestamp() - time.time()) / HOUR


def test_without_a_history_everybody_uses_the_limit(cluster: Cluster) -> None:
    cluster.run("a1", 8, 1.0, "3h")
    first = cluster.run("a2", 8, 1.0, "2h")
    job = cluster.wait(8)
    expected = cluster.why(job)["expected_start"]
    assert [hours_from_now(expected[k]) for k in ("low", "median", "high", "by_limits")] == pytest.approx(
        [1.0] * 4, abs=0.2
    )
    assert (expected["nodes"], expected["nodes_share"], expected["never"]) == (["a2"], 1.0, None)
    assert expected["runs"] >= 8
    assert any("whole time limit" in a for a in expected["assumptions"])
    out = cluster.site.call("why", job).ok().out
    said = re.search(r"expected to start about (?:(\S+) )?(\d\d:\d\d) on a2", out)
    assert said is not None, out
    median = datetime.fromisoformat(expected["median"]).astimezone()
    day = said[1] or f"{median:%Y-%m-%d}"  # of another day the date is there
    shown = datetime.fromisoformat(f"{day} {said[2]}").astimezone()
    assert abs((shown - median).total_seconds()) <= 120
    assert f"sooner after job {first} of" in out


def test_where_an_agent_is_out_the_reason_is_its_fallback_s(cluster: Cluster) -> None:
    """Under the stages of its own file the small job would wait for the large one, whatever its limit."""
    policies = cluster.site.inventory.parent / "policies"
    policies.mkdir(exist_ok=True)
    (policies / "learned.yaml").write_text("agent: rltune\nfallback: easy\n")
    cluster.site.inventory.write_text(INVENTORY.replace("policy: easy", "policy: learned"))
    cluster.run("a1", 8, 1.0, "3h")
    cluster.wait(16)
    small = cluster.wait(4, "5h")
    assert cluster.why(small)["reason"] == ReasonCode.PRIORITY
    store = Store.create_or_open(cluster.site.state)
    with store.transaction():
        store.put_fallbacks(
            [Fallback(partition="A100", policy="learned", version="", fallback="easy", why="no weights", since=1.0)]
        )
    store.close()
    assert cluster.why(small)["reason"] == ReasonCode.BACKFILL


def test_with_a_history_runs_end_as_the_users_runs_did(cluster: Cluster) -> None:
    cluster.past([5.0, 5.0, 5.0, 5.0, 6.0])
    cluster.run("a1", 8, 0.1, "10h")
    cluster.run("a2", 8, 0.1, "10h")
    expected = cluster.why(cluster.wait(16))["expected_start"]
    assert hours_from_now(expected["by_limits"]) == pytest.approx(9.9, abs=0.2)
    low, median, high = (hours_from_now(expected[k]) for k in ("low", "median", "high"))
    assert 3.9 < low < 5.0 < median < 6.5 < high < 8.0, "both must end, and each had run for 0.1 h"
    assert any("(5 past runs known)" in a for a in expected["assumptions"])


def test_a_job_that_has_run_longer_than_most_is_not_expected_to_end_at_once(cluster: Cluster) -> None:
    cluster.past([1.0] * 30 + [8.0])
    cluster.run("a1", 8, 5.0, "10h")
    cluster.run("a2", 8, 5.0, "10h")
    expected = cluster.why(cluster.wait(16))["expected_start"]
    assert hours_from_now(expected["median"]) == pytest.approx(3.0, abs=1.0)
    assert hours_from_now(expected["low"]) > 1.0


def test_suggestions_for_a_sooner_start_are_checked(cluster: Cluster) -> None:
    cluster.run("a1", 4, 1.0, "5h")
    blocking = cluster.run("a2", 8, 1.0, "6h")
    head = cluster.wait(16, "1h")
    job = cluster.wait(8, "8h")
    answer = cluster.why(job)
    sooner = {s["what"]: s for s in answer["sooner"]}
    # 4 GPUs for 8 h would fit beside the head's wait in room only: they would delay it
    assert "with 4 GPUs" not in sooner
    there = sooner["in V100"]
    assert (there["now"], there["nodes"], there["how"]) == (True, ["v1"], "-p V100 --gpus 8")
    assert any("partition V100 could run it now" in s for s in answer["next_steps"]) or answer["reason"] == "Priority"
    assert not any(w.startswith("after job") for w in sooner), "whichever job ends, the head goes first"
    cluster.site.call("cancel", head).ok()
    cluster.site.apply_inbox()
    sooner = {s["what"]: s for s in cluster.why(job)["sooner"]}
    assert (sooner["with 4 GPUs"]["now"], sooner["with 4 GPUs"]["nodes"]) == (True, ["a1"])
    assert "with 2 GPUs" not in sooner, "the least that must be given up"
    assert any(w.startswith("after job") for w in sooner)
    assert blocking


def test_advice_that_running_ahead_refutes_is_not_given(cluster: Cluster) -> None:
    cluster.run("a1", 8, 1.0, "5h")
    cluster.run("a2", 8, 1.0, "5h")
    cluster.run("v1", 4, 1.0, "5h")
    cluster.wait(8, "1h", partition="V100")  # strict fifo: it blocks v1's four free GPUs
    answer = cluster.why(cluster.wait(4))
    assert not any("V100" in step for step in answer["next_steps"])
    assert not any(s["what"] == "in V100" and s["now"] for s in answer["sooner"])


def test_a_shorter_limit_lets_it_start_before_the_head(cluster: Cluster) -> None:
    cluster.run("a1", 4, 1.0, "3h")
    cluster.run("a2", 8, 1.0, "6h")
    cluster.wait(8, "1h")
    answer = cluster.why(cluster.wait(4, "8h"))
    assert answer["reason"] == "Backfill"
    (limit,) = [s for s in answer["sooner"] if s["what"].startswith("with a time limit of")]
    assert limit["now"]
    assert any("time limit of at most" in step and limit["how"] in step for step in answer["next_steps"])


def test_held_dependent_and_drained(cluster: Cluster) -> None:
    held = cluster.wait(8, "1h", "--hold")
    answer = cluster.why(held)
    assert answer["expected_start"]["never"] == "never while it is held"
    assert answer["expected_start"]["median"] is None
    first = answer["sooner"][0]
    assert (first["what"], first["how"]) == ("released", f"gpusched release {held}")
    assert (first["now"], first["nodes"]) == (True, ["a1"])
    running = cluster.run("a2", 8, 1.0, "3h")
    after = cluster.why(cluster.wait(8, "1h", "--dependency", f"afterok:{running}"))["expected_start"]
    assert hours_from_now(after["median"]) == pytest.approx(2.0, abs=0.2)
    assert f"not before job {running} ends (assumed successful)" in after["assumptions"]
    stuck = cluster.why(cluster.wait(8, "1h", "--dependency", f"afterok:{held}"))["expected_start"]
    assert stuck["never"] == f"never while job {held}, on which it depends, is held"
    cluster.well("a1")
    lost = cluster.wait(16)
    assert cluster.why(lost)["expected_start"]["never"] == "never unless nodes become available"
    assert cluster.site.call("why", lost).ok().out.count("a1 (DRAINED: fan)") == 1


def test_why_says_that_a_job_beyond_a_lowered_limit_never_starts(cluster: Cluster) -> None:
    job = cluster.wait(8)
    cluster.site.inventory.write_text(INVENTORY + "limits: {each_user: {gpus: 4}}\n")
    answer = cluster.why(job)
    said = f"limit of user {user_name(0)}: at most 4 GPUs at once; this job needs 8"
    assert (answer["reason"], answer["message"], answer["expected_start"]["never"]) == ("AssocGrpGRES", said, "never")
    advice = "cancel it and submit it with at most 4 GPUs (--gpus 4)"
    assert answer["next_steps"] == [advice, "check your limits: gpusched quota"]
    cluster.site.inventory.write_text(INVENTORY + "limits: {each_user: {gpus: 4, gpu_hours: 2}}\n")
    assert cluster.why(job)["next_steps"][0] == f"{advice} and a time limit of at most 0:30:00 (-t 0:30:00)"
    cluster.site.inventory.write_text(INVENTORY + "limits: {each_user: {gpus: 8, gpu_hours: 2}}\n")
    assert cluster.why(job)["expected_start"]["never"] == "never"
    assert cluster.why(job)["next_steps"][0].startswith("cancel it and submit it with a time limit of at most 0:15:00")
    assert "at the latest" not in cluster.site.call("why", job).ok().out


def test_array_bounds_and_begin_times_are_kept(cluster: Cluster) -> None:
    array = cluster.wait(8, "2h", "--array", "0-2%1")
    last = cluster.why(f"{array}_2")["expected_start"]
    assert hours_from_now(last["median"]) == pytest.approx(4.0, abs=0.2)
    later = cluster.why(cluster.wait(1, "1h", "--begin", "now+3h", partition="V100"))["expected_start"]
    assert hours_from_now(later["median"]) == pytest.approx(3.0, abs=0.2)
    assert any("not before its begin time" in a for a in later["assumptions"])


def test_a_dry_run_says_when_and_queues_nothing(cluster: Cluster) -> None:
    for node in ("a1", "a2"):
        cluster.run(node, 8, 1.0, "3h")
    words = ("submit", "--dry-run", "-p", "A100", "--gpus", "8", "-t", "1h", "--", "x")
    out = cluster.site.call(*words).ok().out
    assert "expected to start about" in out
    assert "sooner in V100: at once on v1 (-p V100 --gpus 8)" in out
    answer = cluster.site.call(words[0], "--json", *words[1:]).ok().json
    assert hours_from_now(answer["expected_start"]["median"]) == pytest.approx(2.0, abs=0.2)
    assert cluster.site.commands() == []
    free = cluster.site.call("submit", "--dry-run", "-p", "V100", "--gpus", "8", "--", "x").ok().out
    assert "expected to start at once on v1" in free


def test_a_job_that_does_not_wait_has_no_forecast(cluster: Cluster) -> None:
    answer = cluster.why(cluster.run("a1", 8, 1.0, "3h"))
    assert answer["expected_start"] is None
    assert answer["sooner"] == []


RACKS = """\
settings: {tick: 5s}
defaults: {runtime: process, gpus: 8, cores: 64, memory: 512G}
topology: {r1: {nodes: [a1, a2]}, r2: {nodes: [a3, a4]}}
partitions:
  A100: {policy: rack-wait, nodes: [a1, a2, a3, a4], flavors: {all: {gpus: 32, cores: 256, memory: 2048G, time: 72h}}}
"""


@pytest.fixture
def racks(cluster: Cluster) -> Cluster:
    cluster.site.inventory.write_text(RACKS)
    cluster.well()
    return cluster


def spreads_of(answer: dict[str, Any]) -> dict[str, float]:
    """Spread -> hours from now."""
    return {start["spread"]: round(hours_from_now(start["start"])) for start in answer["spreads"]}


def test_when_in_one_rack_and_when_further_apart(racks: Cluster) -> None:
    racks.run("a1", 8, 1.0, "3h")
    racks.run("a3", 8, 1.0, "6h")
    job = racks.wait(16, "1h", "--placement-wait", "3h")
    answer = racks.why(job)
    assert spreads_of(answer) == {"rack": 2.0, "any": 0.0}
    near, far = answer["spreads"]
    assert (near["nodes"], near["racks"], far["nodes"], far["racks"]) == (["a1", "a2"], 1, ["a2", "a4"], 2)
    expected = answer["expected_start"]
    assert (expected["nodes"], expected["median"]) == (["a1", "a2"], near["start"]), "two hours are within its wait"
    lines = racks.site.call("why", job).ok().out.splitlines()
    clock = datetime.fromisoformat(near["start"]).astimezone().strftime("%H:%M")
    assert any(re.fullmatch(rf"in one rack from (\S+ )?{clock} \(--max-spread rack\)", line) for line in lines), lines
    assert "on 2 racks at once (--max-spread any --placement-wait 0)" in lines
    shown = racks.site.call("show", job).ok().out
    assert [line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("placement:")] == [
        line for line in lines if "--max-spread" in line
    ]
    page = racks.site.call("show", "--json", job).ok().json["spreads"]
    assert [(s["spread"], s["nodes"], s["racks"]) for s in page] == [
        (s["spread"], s["nodes"], s["racks"]) for s in answer["spreads"]
    ]


def test_the_forecast_gives_up_waiting_when_the_job_does(racks: Cluster) -> None:
    racks.run("a1", 8, 1.0, "3h")
    racks.run("a3", 8, 1.0, "6h")
    expected = racks.why(racks.wait(16, "1h", "--placement-wait", "1h"))["expected_start"]
    assert (round(hours_from_now(expected["median"])), expected["nodes"]) == (1.0, ["a2", "a4"])
    assert not any("rack" in assumed for assumed in expected["assumptions"])


def test_why_of_a_job_that_may_be_spread_shows_one_server_too(racks: Cluster) -> None:
    for node, gpus, limit in (("a1", 8, "3h"), ("a2", 4, "9h"), ("a3", 4, "6h"), ("a4", 8, "6h")):
        racks.run(node, gpus, 1.0, limit)
    answer = racks.why(racks.wait(8, "1h", "--max-spread", "any", "--placement-wait", "0"))
    assert spreads_of(answer) == {"server": 2.0, "rack": 2.0, "any": 0.0}
    racks.run("a2", 4, 1.0, "4h")
    job = racks.wait(8, "1h", "--max-spread", "rack")
    assert spreads_of(racks.why(job)) == {"server": 3.0, "rack": 3.0, "any": 3.0}
    lines = [line for line in racks.site.call("why", job).ok().out.splitlines() if "--max-spread" in line]
    assert len(lines) == 1, "further apart only where that is sooner"
    assert lines[0].startswith("in one server from ")
    assert racks.why(racks.wait(8))["spreads"] == []
    held = racks.why(racks.wait(16, "1h", "--hold"))
    assert held["spreads"] == []


SHARED = """\
settings: {tick: 5s}
defaults: {runtime: process, gpus: 8, cores: 64, memory: 512G}
partitions:
  A100:
    policy: easy
    nodes: [{name: a1, sharing: {mode: time-slicing, slowdown: 2}}]
    flavors: {all: {gpus: 8, cores: 64, memory: 512G, time: 72h}}
"""


@pytest.mark.parametrize(("mib", "hours"), [("9G", 2.0), ("30G", 7.0)])
def test_a_job_that_shares_is_expected_beside_the_one_that_starts_before_it(
    cluster: Cluster, mib: str, hours: float
) -> None:
    """Where both fit into the memory of the GPUs; ``why`` and ``--dry-run`` say the same."""
    cluster.site.inventory.write_text(SHARED)
    cluster.well()
    cluster.run("a1", 8, 1.0, "3h")
    half = ("--cpus", "8", "--mem", "64G")
    cluster.wait(8, "5h", "--share", "pairs", "--gpu-mem", mib, *half)
    asked = ("-p", "A100", "--gpus", "8", "-t", "1h", "--share", "pairs", "--gpu-mem", mib, *half)
    dry = cluster.site.call("submit", "--dry-run", "--json", *asked, "--", "x").ok().json
    assert round(hours_from_now(dry["expected_start"]["median"])) == hours
    expected = cluster.why(cluster.wait(8, "1h", *asked[6:]))["expected_start"]
    assert round(hours_from_now(expected["median"])) == hours
