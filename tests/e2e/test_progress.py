"""Jobs that report progress: status, show and why use it, and the job folder survives attempts."""

from __future__ import annotations

import re

import pytest

from gpusched.model.progress import JobProgress
from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = pytest.mark.one_partition
STEPS = (
    'cd "$GPUSCHED_JOB_DIR"; i=$(cat at 2>/dev/null || echo 0);'
    ' while [ $i -lt 100000 ]; do i=$((i + 1)); echo $i >a && mv a at;'
    ' echo "{\\"step\\": $i, \\"of\\": 100000, \\"samples_per_s\\": 12.5}" >p && mv p progress.json;'
    ' echo "{\\"step\\": $((i / 10 * 10)), \\"gpus\\": 8}" >s && mv s saved.json; sleep 0.1; done'
)  # fmt: skip


def progress_of(cluster: Cluster, job: str) -> list[JobProgress]:
    """Return the reported progress of its attempts from the store."""
    with cluster.reader() as reader:
        assert reader is not None
        return reader.progress_of_job(job)


def test_progress_is_shown_and_forecasts_go_by_it(house: Cluster) -> None:
    jobs = [house.sh(STEPS, "--gpus", "8", "-t", "2h", "-N", "1") for _ in range(2)]
    for job in jobs:
        house.wait_state(job, "RUNNING")
        wait_until(lambda job=job: (house.json("show", job)["progress"] or {}).get("steps_per_s"), 30, "its pace")  # type: ignore[misc]
    listed = {j["id"]: j["progress"] for j in house.json("status")}
    assert {p["of"] for p in listed.values()} == {100000}
    screen = house.cli("status", env={"COLUMNS": "140"}).stdout
    assert "PROGRESS" in screen
    assert len(re.findall(r"0% (?:\d-)?\d+:\d\d:\d\d left", screen)) == 2, screen
    page = house.cli("show", jobs[0]).stdout
    assert re.search(r"progress: +step [\d,]+ of 100,000 \(0%\), [\d.]+ steps/s, 12.5 samples/s, about ", page), page
    assert re.search(r"saved: +up to step [\d,]*0, 2", page), page

    waiting = house.submit("--gpus", "8", "-N", "1")
    why = house.json("why", waiting)
    assert "2 running jobs end at their reported pace" in why["expected_start"]["assumptions"]


def test_the_folder_survives_attempts_and_goes_with_the_job(house: Cluster) -> None:
    job = house.sh(STEPS, "--gpus", "1", "--nodelist", "dgx001")
    before = wait_until(lambda: (house.json("show", job)["progress"] or {}).get("saved_step"), 30, "saved work")
    house.cli("requeue", job)
    second = wait_until(
        lambda: next((p for p in progress_of(house, job) if p.attempt == 2 and p.first_step), None), 60, "more"
    )
    assert second.first_step is not None
    assert second.first_step >= before
    folders = f"find /root/.local/state/gpusched-node -path '*/jobs/{job}*'"
    assert house.node("dgx001").run(["/bin/sh", "-c", folders]).stdout.count("progress.json") == 1
    house.cli("cancel", job, "--now")
    house.wait_clean()
    wait_until(lambda: not house.node("dgx001").run(["/bin/sh", "-c", folders]).stdout, 30, "the folder to be removed")


def test_a_gigabyte_in_progress_json_is_reported_and_harms_nothing(house: Cluster) -> None:
    job = house.sh(
        "cd $GPUSCHED_JOB_DIR; truncate -s 1G p 2>/dev/null || dd if=/dev/null of=p bs=1 seek=1073741824;"
        " mv p progress.json; sleep 5000",
        "--gpus", "1",
    )  # fmt: skip
    error = "progress.json: it is larger than 4096 bytes"
    wait_until(lambda: (house.json("show", job)["progress"] or {}).get("error") == error, 30, "the error")
    assert f"job file:     {error}" in house.cli("show", job).stdout
    house.wait_state(job, "RUNNING")  # STARTING where its start takes long
