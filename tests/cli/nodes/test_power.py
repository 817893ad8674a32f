"""``gpusched power`` on two hours of usage."""

from __future__ import annotations

from datetime import datetime

import pytest

from gpusched.model.jobs import JobState
from tests.cli.nodes.conftest import JOB_A, JOB_B, Cluster

SHAPE = {"since", "until", "by", "currency", "price_per_kwh", "rows", "total", "held_idle"}


@pytest.mark.parametrize("by", ["partition", "node", "user", "job"])
def test_json_shape_and_sums(used: Cluster, by: str) -> None:
    report = used.json("power", "--by", by)
    assert report.keys() >= SHAPE
    assert (report["by"], report["currency"], report["price_per_kwh"]) == (by, "EUR", 0.25)
    assert datetime.fromisoformat(report["since"]) < datetime.fromisoformat(report["until"])
    for field in ("gpu_hours", "energy_kwh"):
        assert sum(r[field] or 0 for r in report["rows"]) == pytest.approx(report["total"][field])
    assert report["total"]["gpu_hours"] == pytest.approx(10, rel=0.05)
    assert report["total"]["utilization"] == pytest.approx(0.25, rel=0.05)


def test_partition_rows(used: Cluster) -> None:
    a100, local = used.json("power")["rows"]
    assert a100["utilization"] == pytest.approx(0.25, rel=0.05)
    assert a100["rated_kwh"] == pytest.approx(2 * 6.5 * 2, rel=0.05)
    assert a100["inefficient_kwh"] == pytest.approx(2 * 6.5 * 2 * 0.75, rel=0.05)
    assert a100["inefficient_cost"] == pytest.approx(2 * 6.5 * 2 * 0.75 * 0.25, rel=0.05)
    assert a100["measured_utilization"] == pytest.approx(0.2, rel=0.05)
    assert a100["energy_unknown_share"] == 0
    assert local["rated_kwh"] is None
    assert local["energy_unknown_share"] == pytest.approx(0.75, rel=0.1)


def test_jobs_are_charged_their_own_gpus(used: Cluster) -> None:
    report = used.json("power", "--by", "job")
    assert [r["name"] for r in report["rows"]] == [JOB_A, JOB_B]
    assert report["rows"][0]["energy_kwh"] == pytest.approx(4 * 350 * 2 / 1000, rel=0.1)
    assert report["unheld_kwh"] > 1


def test_held_but_idle_is_listed_with_its_owner(used: Cluster) -> None:
    (idle,) = used.json("power")["held_idle"]
    assert (idle["job"], idle["user"], idle["gpus"], idle["nodes"]) == (JOB_B, "bob", 1, ["here"])
    assert idle["idle_s"] > 7000
    shown = used.run("power").stdout
    assert "Allocated but idle: 1 GPU" in shown
    assert "bob" in shown


def test_one_partition(used: Cluster) -> None:
    report = used.json("power", "-p", "A100", "--by", "user")
    assert [r["name"] for r in report["rows"]] == ["ann"]
    assert report["held_idle"] == []


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("by", ["partition", "node", "user", "job"])
def test_table(used: Cluster, by: str, width: int) -> None:
    shown = used.screen("power", "--by", by, columns=width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert any(line.startswith("total ") for line in shown.splitlines())
    assert "SIMULATED" in shown
    assert ("≥" in shown) == (by in ("partition", "node"))


def test_since_narrows(used: Cluster) -> None:
    report = used.json("power", "--since", "1h")
    assert report["total"]["gpu_hours"] == pytest.approx(5, rel=0.05)


def test_bad_since(used: Cluster) -> None:
    done = used.run("power", "--since", "yesterday", code=2)
    assert done.stderr.startswith("gpusched: error: --since 'yesterday' is neither")
    assert used.run("power", "--by", "rack", code=2).stderr.count("\n") == 1


def test_ended_job_is_not_idle(used: Cluster) -> None:
    job = used.store.job(JOB_B)
    assert job is not None
    import msgspec

    used.store.put_jobs([msgspec.structs.replace(job, state=JobState.COMPLETED, allocation=None)])
    assert used.json("power")["held_idle"] == []


def test_gpus_held_idle_are_listed_by_duration(used: Cluster) -> None:
    report = used.json("power", "--idle")
    (held,) = report["jobs"]
    assert (held["job"], held["user"], held["running"]) == (JOB_B, "bob", True)
    assert held["idle_gpu_hours"] == pytest.approx(held["gpu_hours"], rel=0.1)
    assert held["energy_kwh"] == pytest.approx(60 * 2 / 1000, rel=0.1)
    assert (held["cost"], held["energy_unknown_share"]) == (pytest.approx(held["energy_kwh"] * 0.25), 0.0)
    assert [row["user"] for row in report["users"]] == ["bob"]
    assert report["total"]["idle_gpu_hours"] == pytest.approx(held["idle_gpu_hours"])
    shown = used.run("power", "--idle").stdout
    assert "bob" in shown
    assert f"{JOB_B} *" in shown
    assert used.json("power", "--idle", "--user", "ann")["jobs"] == []
    assert "No job held idle GPUs." in used.run("power", "--idle", "--user", "ann").stdout
    assert "--user needs --idle" in used.run("power", "--user", "ann", code=2).stderr
    assert "--by and --idle" in used.run("power", "--idle", "--by", "job", code=2).stderr
