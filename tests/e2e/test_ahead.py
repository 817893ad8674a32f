"""When a job starts: as predicted for its user, and as the nightly report judges it afterwards."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import pytest

from tests.e2e.conftest import WAIT, Cluster
from tests.testbed import wait_until

COMPILING_S = 240.0  # once on this machine, with other tests on its cores


def test_a_start_is_predicted_recorded_and_judged(house: Cluster, share: Path) -> None:
    mount = ("--mount", f"{share}:/share")
    first = house.sh(WAIT, "-p", "A100", "--gpus", "8", "-t", "1h", "--nodelist", "dgx001", *mount)
    second = house.sh(WAIT, "-p", "A100", "--gpus", "8", "-t", "2h", "--nodelist", "dgx003", *mount)
    began, _ = (house.wait_state(job, "RUNNING").start_time for job in (first, second))
    waits = house.submit("-p", "A100", "--gpus", "8", "-t", "30m")
    wait_until(lambda: (house.job(waits) or house.job(first)).reason == "Resources", what="it to wait")  # type: ignore[union-attr]
    answer = json.loads(house.cli("why", "--json", waits, timeout=COMPILING_S).stdout)
    expected = answer["expected_start"]
    assert expected["nodes"] == ["dgx001"], "the one whose limit is over first"
    assert began is not None
    assert datetime.fromisoformat(expected["by_limits"]).timestamp() - began == pytest.approx(3600, abs=60)
    assert {s["what"]: s["now"] for s in answer["sooner"]}["in V100"] is True
    dry = house.cli("submit", "--dry-run", "-p", "V100", "--gpus", "8", "--", "true").stdout
    assert "expected to start at once on dgx00" in dry

    def recorded() -> bool:
        with house.reader() as reader:
            assert reader is not None
            return waits in {f.prediction.job_id for f in reader.predicted_starts(0, time.time())}

    wait_until(recorded, COMPILING_S, "the controller to record what it predicts")
    (share / "go").touch()
    for job in (first, second, waits):
        house.wait_state(job, "COMPLETED")
    report = json.loads(house.cli("replay", "--nightly", "--since", "1d", "--json").stdout)
    (score,) = [s for s in report["predictions"] if s["partition"] == "A100"]
    assert (score["made"], score["started"]) == (1, 1)
    assert score["median_error_s"] < 0, "the jobs before it ended long before their limits"
    house.wait_clean()
