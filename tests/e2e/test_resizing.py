"""Jobs that grow and shrink on real nodes: they save, stop and go on where they were."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.e2e.conftest import Cluster
from tests.testbed import wait_until

pytestmark = pytest.mark.slow

# Steps in proportion to the GPUs; each attempt goes on where the one before saved, and says so.
TRAIN = r"""
cd "$GPUSCHED_JOB_DIR"
i=$(cat at 2>/dev/null || echo 0)
[ $RANK != 0 ] || echo "$GPUSCHED_ATTEMPT $GPUSCHED_GPUS_TOTAL $i" >>/share/story
save() { echo $i >at.part && mv at.part at; echo "{\"step\": $i}" >s && mv s saved.json; }
trap 'cp resize.json /share/resize.$GPUSCHED_ATTEMPT; save; exit 0' TERM
until [ -e /share/end ]; do
    i=$((i + GPUSCHED_GPUS_TOTAL)); echo "{\"step\": $i, \"of\": 1000000}" >p && mv p progress.json; sleep 0.3
done
"""


def story(share: Path) -> list[list[int]]:
    """Attempt, GPUs and the step it began at."""
    path = share / "story"
    return [[int(word) for word in line.split()] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def elastic(stopped: Cluster) -> Cluster:
    folder = stopped.folder / "policies"
    folder.mkdir()
    (folder / "quick.yaml").write_text(
        "order: fifo\nplace: best-fit\nbackfill: easy\nsizes: greedy-gain\n"
        "resize: {min_run: 0s, per_hour: 60, start_timeout: 20s}\n"
    )
    # /tmp is the nodes' shared disk. Most steps of a resize wait for the next tick.
    stopped.settings = {**stopped.settings, "job_dirs": str(stopped.folder / "jobs"), "tick": "500ms"}
    stopped.write_inventory({"grace": "10s"}, policies={"A100": "quick"})
    stopped.start_controller()
    return stopped


def resizable(cluster: Cluster, share: Path, *options: str, script: str = TRAIN) -> str:
    mount = ("--mount", f"{share}:/share")
    return cluster.sh(script, "--resizable", "--cooldown", "1s", *mount, *(options or ("--sizes", "1,2,4,8")))


def gpus(cluster: Cluster, job: str) -> int:
    found = cluster.job(job)
    return found.spec.gpus if found is not None and found.state == "RUNNING" else 0


@pytest.mark.one_partition
def test_it_starts_on_what_is_free_shrinks_for_others_and_grows_again(elastic: Cluster, share: Path) -> None:
    solid = elastic.sh("until [ -e /share/solid ]; do sleep 0.1; done", "--gpus", "4", "--mount", f"{share}:/share")
    elastic.wait_state(solid, "RUNNING")
    job = resizable(elastic, share, "--sizes", "1,2,4,8,16")
    wait_until(lambda: gpus(elastic, job) == 8, 30, "8 GPUs: what one node has")
    wait_until(lambda: (elastic.json("show", job)["progress"] or {}).get("steps_per_s"), 30, "its pace")
    other = elastic.submit("--gpus", "8", command=("sleep", "2"))
    elastic.wait_state(other, "RUNNING", "COMPLETED", timeout=60)
    wait_until(lambda: gpus(elastic, job) == 4, 60, "4 GPUs beside the others")
    wait_until(lambda: gpus(elastic, job) == 8, 60, "8 GPUs again")
    (share / "solid").write_text("")
    wait_until(lambda: gpus(elastic, job) == 16, 60, "all there is")
    told = story(share)
    assert [line[1] for line in told] == [8, 4, 8, 16], elastic.cli("show", job).stdout
    assert all(before[2] < after[2] for before, after in pairwise(told)), told
    asked = json.loads((share / "resize.1").read_text())
    assert (asked["from"], asked["to"]) == (8, 4)
    page = elastic.json("show", job)
    assert page["resizes"]["count"] == 3
    (share / "end").write_text("")
    elastic.wait_state(job, "COMPLETED")
    elastic.wait_clean()


def crowd(cluster: Cluster, share: Path) -> str:
    """A job that takes one of the two nodes, so that a resizable one that holds both has to shrink."""
    return cluster.sh("until [ -e /share/crowd ]; do sleep 0.1; done", "--gpus", "8", "--mount", f"{share}:/share")


def settled(cluster: Cluster, job: str, size: int) -> None:
    wait_until(lambda: gpus(cluster, job) == size, 60, f"{size} GPUs")
    wait_until(lambda: (cluster.json("show", job)["progress"] or {}).get("step"), 30, "a step")


@pytest.mark.one_partition
@pytest.mark.parametrize(
    ("trap", "within"),
    [("trap '' TERM", "ignores the signal"), ("trap 'echo 1 >at.part; exit 5' TERM", "dies while it saves")],
)
def test_who_does_not_save_loses_work_once(elastic: Cluster, share: Path, trap: str, within: str) -> None:
    elastic.write_inventory({"grace": "3s"}, policies={"A100": "quick"})
    script = TRAIN.replace("trap 'cp resize.json /share/resize.$GPUSCHED_ATTEMPT; save; exit 0' TERM", trap)
    job = resizable(elastic, share, "--sizes", "8,16", script=script)
    settled(elastic, job, 16)
    other = crowd(elastic, share)
    wait_until(lambda: gpus(elastic, job) == 8, 60, within)
    elastic.wait_state(other, "RUNNING")
    assert story(share) == [[1, 16, 0], [2, 8, 0]], "from the last save, which is none"
    found = elastic.json("show", job)["resizes"]
    assert found["frozen"] == "it did not save its work when it was asked to"
    assert found["lost_s"] > 0
    (share / "crowd").write_text("")
    elastic.wait_state(other, "COMPLETED")
    wait_until(lambda: len(elastic.events(other)) and elastic.nodes()["dgx001"]["gpus_free"] in (0, 8), 30, "room")
    assert gpus(elastic, job) == 8, "it stays as it is"


@pytest.mark.one_partition
def test_what_does_not_come_up_at_a_size_goes_back_and_never_there_again(elastic: Cluster, share: Path) -> None:
    job = resizable(elastic, share, "--sizes", "4,8,16", script='[ "$GPUSCHED_GPUS_TOTAL" != 8 ] || exit 3\n' + TRAIN)
    settled(elastic, job, 16)
    other = crowd(elastic, share)
    wait_until(lambda: elastic.json("show", job)["resizes"]["unusable"] == [8], 60, "8 GPUs to be unusable")
    wait_until(lambda: gpus(elastic, job) == 4, 60, "4 GPUs")
    elastic.wait_state(other, "RUNNING")
    told = story(share)
    assert [line[1] for line in told] == [16, 4]
    assert told[1][2] > 0, "nothing was lost"
    page = elastic.cli("show", job).stdout
    assert "it did not come up with 8 GPUs" in page


@pytest.mark.one_partition
def test_one_that_is_cancelled_in_the_middle_of_a_resize_is_over(elastic: Cluster, share: Path) -> None:
    script = TRAIN.replace("save; exit 0", "touch /share/asked; sleep 5; save; exit 0")
    job = resizable(elastic, share, "--sizes", "8,16", script=script)
    settled(elastic, job, 16)
    crowd(elastic, share)
    wait_until(lambda: (share / "asked").exists(), 60, "it to be asked")
    elastic.cli("cancel", job)
    assert elastic.wait_state(job).state == "CANCELLED"
    assert len(story(share)) == 1


@pytest.mark.one_partition
@pytest.mark.parametrize("moment", ["resizing", "signalled", "requeued", "starting", "launched"])
def test_a_controller_killed_at_any_step_of_a_resize(elastic: Cluster, share: Path, moment: str) -> None:
    job = resizable(elastic, share, "--sizes", "8,16")
    settled(elastic, job, 16)
    crowd(elastic, share)

    def reached() -> bool:
        kinds = [event.kind for event in elastic.events(job)]
        return "resizing" in kinds and moment in kinds[kinds.index("resizing") :]

    wait_until(reached, 60, moment)
    elastic.kill_controller()
    saved = [line[2] for line in story(share)]
    elastic.start_controller()
    settled(elastic, job, 8)
    told = story(share)
    assert [line[:2] for line in told] == [[1, 16], [2, 8]], "no two attempts, and none twice"
    assert told[1][2] > 0
    assert told[1][2] >= max(saved)
