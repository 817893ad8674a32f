"""Jobs that grow and shrink on real nodes: they save, stop and go on where they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusched.agents.common.recorded import by_policy, recorded_decisions
from gpusched.agents.dl2.decide import STEP_FEATURES, zero_actor
from gpusched.agents.dl2.weights import arrays_of
from gpusched.config.weights import save_model
from gpusched.model.jobs import ENDED
from gpusched.model.policy import Resizing
from gpusched.traces.readers.history import trace_of
from gpusched.traces.trace import Trace
from tests.e2e.conftest import Cluster
from tests.e2e.decisions import RECORDER, agreement
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


CONTAINERS_AT = ("signalled", "launched")
"""When there is a container that ends, or one that has begun: at other moments containers are as processes are."""


def moments(*names: str) -> list[Any]:
    return [name if name in CONTAINERS_AT else pytest.param(name, marks=pytest.mark.processes) for name in names]


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
        "resize: {min_run: 0s, per_hour: 60, start_timeout: 5m}\n"
    )
    # /tmp is the nodes' shared disk. Most steps of a resize wait for the next tick.
    stopped.settings = {**stopped.settings, "job_dirs": str(stopped.folder / "jobs"), "tick": "1s", "grace": "2m"}
    stopped.write_inventory(policies={"A100": "quick"})
    stopped.start_controller()
    return stopped


def resizable(cluster: Cluster, share: Path, *options: str, script: str = TRAIN) -> str:
    return cluster.shared(script, share, "--resizable", "--cooldown", "1s", *options)


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
    wait_until(lambda: [line[1] for line in story(share)] == [8, 4, 8], 60, "4 GPUs beside the others, and 8 again")
    settled(elastic, job, 8)
    (share / "solid").write_text("")
    settled(elastic, job, 16)
    starts = story(share)
    assert [line[1] for line in starts] == [8, 4, 8, 16], elastic.cli("show", job).stdout
    assert all(before[2] < after[2] for before, after in pairwise(starts)), starts
    asked = json.loads((share / "resize.1").read_text())
    assert (asked["from"], asked["to"]) == (8, 4)
    page = elastic.json("show", job)
    assert page["resizes"]["count"] == 3
    (share / "end").write_text("")
    elastic.wait_state(job, "COMPLETED")
    elastic.wait_clean()


@pytest.mark.one_partition
@pytest.mark.processes
def test_a_trained_agent_chooses_on_real_nodes(elastic: Cluster, share: Path) -> None:
    """DL2's, with weights by which everybody takes what it gains by; without weights its fallback's rule chooses."""
    folder = elastic.folder / "policies"
    (folder / "learned.yaml").write_text("agent: dl2\nfallback: quick\n")
    elastic.write_inventory(policies={"A100": "learned"})
    job = resizable(elastic, share, "--sizes", "1,4,8")
    wait_until(lambda: gpus(elastic, job) == 8, 30, "8 GPUs, by the fallback's rule")
    assert "no weights" in elastic.cli("status").stdout
    actor = zero_actor()
    actor.linear[STEP_FEATURES.index("gain per slot, over all larger sizes")] = 1.0
    actor.linear[STEP_FEATURES.index("done")] = -30.0
    (folder / "learned").mkdir()
    save_model(folder / "learned" / "default.safetensors", "dl2", arrays_of({"trained": actor}), {"slot_s": "60"})
    wait_until(lambda: "no weights" not in elastic.cli("status").stdout, 30, "the agent in charge")
    first = crowd(elastic, share)
    elastic.wait_state(first, "RUNNING")
    other = resizable(elastic, share, "--sizes", "1,4", script="sleep 600")
    elastic.wait_state(other, "RUNNING", timeout=60)
    wait_until(lambda: gpus(elastic, job) == 4, 60, "it shrinks for another resizable one")
    assert "fallback" not in elastic.cli("status").stdout
    elastic.cli("cancel", other)
    wait_until(lambda: gpus(elastic, job) == 8, 60, "8 GPUs again")
    (share / "end").write_text("")
    (share / "crowd").write_text("")
    elastic.wait_state(job, "COMPLETED")


def crowd(cluster: Cluster, share: Path) -> str:
    """A job that takes one of the two nodes, so that a resizable one that holds both has to shrink."""
    return cluster.shared("until [ -e /share/crowd ]; do sleep 0.1; done", share, "--gpus", "8")


@pytest.mark.one_partition
@pytest.mark.processes
def test_it_takes_the_cores_that_are_there_within_its_range(elastic: Cluster, share: Path) -> None:
    solid = elastic.shared("until [ -e /share/solid ]; do sleep 0.1; done", share, "--gpus", "4", "--cpus", "6")
    elastic.wait_state(solid, "RUNNING")
    elastic.wait_state(crowd(elastic, share), "RUNNING")
    script = TRAIN.replace("$GPUSCHED_GPUS_TOTAL $i", "$GPUSCHED_GPUS_TOTAL $SLURM_CPUS_ON_NODE")
    job = resizable(elastic, share, "--sizes", "1,4,8", "--cpus", "2-4", script=script)
    settled(elastic, job, 4)
    (share / "solid").write_text("")
    settled(elastic, job, 8)
    assert story(share) == [[1, 4, 2], [2, 8, 4]], "of 8 cores 6 were another's; then the most that it may have"
    assert "2-4 CPU cores, now 4" in elastic.cli("show", job).stdout
    (share / "end").write_text("")
    elastic.wait_state(job, "COMPLETED")


def settled(cluster: Cluster, job: str, size: int, who: str = "it") -> None:
    """Running with so many GPUs, and past its first step: what it says when it begins has been said."""
    wait_until(lambda: gpus(cluster, job) == size, 60, f"{size} GPUs: {who}")

    def steps() -> bool:  # of its present attempt
        now = cluster.job(job)
        with cluster.reader() as reader:
            reported = reader.progress_of_job(job) if reader is not None else []
        return bool(now is not None and reported and reported[-1].attempt == now.attempt and reported[-1].step)

    wait_until(steps, 30, "a step")


@pytest.mark.one_partition
@pytest.mark.parametrize(
    ("trap", "within"),
    [
        ("trap '' TERM", "ignores the signal"),
        pytest.param("trap 'echo 1 >at.part; exit 5' TERM", "dies while it saves", marks=pytest.mark.processes),
    ],
)
def test_a_job_that_does_not_save_loses_work_once(elastic: Cluster, share: Path, trap: str, within: str) -> None:
    elastic.write_inventory({"grace": "3s"}, policies={"A100": "quick"})
    script = TRAIN.replace("trap 'cp resize.json /share/resize.$GPUSCHED_ATTEMPT; save; exit 0' TERM", trap)
    job = resizable(elastic, share, "--sizes", "8,16", script=script)
    settled(elastic, job, 16)
    other = crowd(elastic, share)
    settled(elastic, job, 8, within)
    elastic.wait_state(other, "RUNNING")
    assert story(share) == [[1, 16, 0], [2, 8, 0]], "from the last save, which is none"
    found = elastic.json("show", job)["resizes"]
    assert found["frozen"] == "it did not save its work when asked"
    assert found["lost_s"] > 0
    (share / "crowd").write_text("")
    elastic.wait_state(other, "COMPLETED")
    wait_until(lambda: len(elastic.events(other)) and elastic.nodes()["dgx001"]["gpus_free"] in (0, 8), 30, "room")
    assert gpus(elastic, job) == 8, "it stays as it is"


@pytest.mark.one_partition
@pytest.mark.processes
def test_a_job_that_does_not_start_at_a_size_goes_back_and_never_tries_it_again(elastic: Cluster, share: Path) -> None:
    job = resizable(elastic, share, "--sizes", "4,8,16", script='[ "$GPUSCHED_GPUS_TOTAL" != 8 ] || exit 3\n' + TRAIN)
    settled(elastic, job, 16)
    other = crowd(elastic, share)
    settled(elastic, job, 4)
    assert elastic.json("show", job)["resizes"]["unusable"] == [8]
    elastic.wait_state(other, "RUNNING")
    starts = story(share)
    assert [line[1] for line in starts] == [16, 4]
    assert starts[1][2] > 0, "nothing was lost"
    page = elastic.cli("show", job).stdout
    assert "failed to start with 8 GPUs" in page


@pytest.mark.one_partition
@pytest.mark.processes
def test_a_job_cancelled_during_a_resize_ends(elastic: Cluster, share: Path) -> None:
    script = TRAIN.replace("save; exit 0", "touch /share/asked; sleep 5; save; exit 0")
    job = resizable(elastic, share, "--sizes", "8,16", script=script)
    settled(elastic, job, 16)
    crowd(elastic, share)
    wait_until(lambda: (share / "asked").exists(), 60, "it to be asked")
    elastic.cli("cancel", job)
    assert elastic.wait_state(job).state == "CANCELLED"
    assert len(story(share)) == 1


@pytest.mark.one_partition
@pytest.mark.parametrize("moment", moments("resizing", "signalled", "requeued", "starting", "launched"))
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
    starts = story(share)
    assert [line[:2] for line in starts] == [[1, 16], [2, 8]], "no two attempts, and none twice"
    assert starts[1][2] > 0
    assert starts[1][2] >= max(saved)


def kinds(cluster: Cluster, job: str) -> list[str]:
    """Of the job's events since it was asked to change size."""
    found = [event.kind for event in cluster.events(job)]
    return found[found.index("resizing") :] if "resizing" in found else []


@pytest.mark.one_partition
@pytest.mark.impatient
@pytest.mark.parametrize("moment", moments("resizing", "signalled", "requeued", "starting", "launched", "resized"))
def test_a_node_killed_at_any_step_of_a_resize(elastic: Cluster, share: Path, moment: str) -> None:
    job = resizable(elastic, share, "--sizes", "8,16")
    settled(elastic, job, 16)
    crowd(elastic, share)
    wait_until(lambda: moment in kinds(elastic, job), 60, moment)
    found = elastic.job(job)
    parts = found.allocation.parts if found is not None and found.allocation is not None else ()
    dead = elastic.node(parts[-1].node if parts else "dgx003")
    dead.power_off()
    saved = max((int(kept.read_text()) for kept in elastic.folder.glob(f"jobs/*/{job}/at")), default=0)
    (share / "crowd").write_text("")
    elastic.wait_node(dead.name, "DOWN")
    alive = {"dgx001", "dgx003"} - {dead.name}

    def nodes() -> set[str]:
        now = elastic.job(job)
        return set() if now is None or now.allocation is None else {part.node for part in now.allocation.parts}

    # Where it had come down to the dead node, it has its 8 GPUs there until that one is given up.
    wait_until(lambda: nodes() == alive, 60, f"it to be on {alive}")
    settled(elastic, job, 8)
    starts = story(share)
    attempts = [line[0] for line in starts]
    assert attempts == sorted(set(attempts)), "no attempt began twice"
    steps = [line[2] for line in starts]
    assert steps == sorted(steps), "what was saved is not done again"
    assert steps[-1] >= saved
    assert nodes() == alive
    assert elastic.json("show", job)["resizes"]["frozen"] is None, "the node is to blame"
    dead.power_on()
    elastic.wait_node(dead.name, "IDLE", "MIXED", "ALLOCATED")
    (share / "end").write_text("")
    ended = elastic.wait_state(job)
    assert ended.state == "COMPLETED"
    attempts = [line[0] for line in story(share)]
    assert attempts == sorted(set(attempts))
    elastic.wait_clean()


@pytest.mark.one_partition
@pytest.mark.processes
@pytest.mark.parametrize("write", ["echo '{\"step\": 7, ' >p", "dd if=/dev/null of=p bs=1 seek=1073741824 2>/dev/null"])
def test_garbage_or_a_gigabyte_in_progress_json_prevents_no_resize(
    elastic: Cluster, share: Path, write: str
) -> None:
    begin, end = TRAIN.index('echo "{\\"step\\": $i, \\"of'), TRAIN.index(" && mv p progress.json")
    job = resizable(elastic, share, "--sizes", "8,16", script=TRAIN[:begin] + write + TRAIN[end:])
    wait_until(lambda: gpus(elastic, job) == 16, 60, "16 GPUs")
    wait_until(lambda: "progress.json" in str((elastic.json("show", job)["progress"] or {}).get("error")), 30, "error")
    other = crowd(elastic, share)
    wait_until(lambda: gpus(elastic, job) == 8, 60, "8 GPUs")
    elastic.wait_state(other, "RUNNING")
    starts = wait_until(lambda: len(now := story(share)) > 1 and now, what="its second attempt to begin")
    assert [line[:2] for line in starts] == [[1, 16], [2, 8]]
    assert starts[1][2] > 0, "it saved, and went on from there"
    assert elastic.json("show", job)["resizes"]["frozen"] is None


@pytest.mark.one_partition
@pytest.mark.processes
@pytest.mark.parametrize("drained", [("dgx003",), ("dgx001", "dgx003")])
def test_a_size_that_fits_nowhere_any_more_is_given_up_for_one_that_does(
    elastic: Cluster, share: Path, drained: tuple[str, ...]
) -> None:
    wait = "until [ -e /share/held ]; do sleep 0.1; done"
    held = elastic.shared(wait, share, "--gpus", "8", "--nodelist", "dgx003")
    elastic.wait_state(held, "RUNNING")
    script = TRAIN.replace(
        "save; exit 0", "touch /share/asked; until [ -e /share/saves ]; do sleep 0.1; done; save; exit 0"
    )
    job = resizable(elastic, share, "--sizes", "8,16", script=script)
    settled(elastic, job, 8)
    (share / "held").write_text("")
    wait_until(lambda: (share / "asked").exists(), 60, "it to be asked to grow")
    elastic.cli("drain", *drained, "--reason", "fans")
    for node in drained:
        elastic.wait_node(node, "DRAINED", "DRAINING")
    (share / "saves").write_text("")
    if len(drained) == 2:
        wait_until(lambda: "requeued" in kinds(elastic, job), 30, "its end")
        waits = elastic.wait_state(job, "PENDING")
        wait_until(
            lambda: (found := elastic.job(job)) is not None and found.reason == "ReqNodeNotAvail", 30, waits.reason
        )
        elastic.cli("resume", "dgx001")
    settled(elastic, job, 8)
    starts = story(share)
    assert [line[:2] for line in starts] == [[1, 8], [2, 8]]
    assert starts[1][2] > 0


# GPUs that it may have, its steps at two a second with one, and seconds until the next one comes.
CROWD = (
    ("1,2,4,8", 24, 1),
    ("2", 12, 1),
    ("1,2,4,8", 24, 1),
    ("4,8,16", 300, 1),
    ("1,2", 6, 1),
    ("8", 16, 0),
)
# Two ranks on two nodes write into one folder: each its own file before the rename.
STEPS = """
cd "$GPUSCHED_JOB_DIR"
i=$(cat at 2>/dev/null || echo 0)
save() { echo $i >at.part && mv at.part at; echo "{\\"step\\": $i}" >s && mv s saved.json; }
trap 'save; exit 0' TERM
while [ $i -lt WORK ]; do
    sleep 0.5 & wait $!
    i=$((i + GPUSCHED_GPUS_TOTAL)); echo "{\\"step\\": $i, \\"of\\": WORK}" >p.$$ && mv p.$$ progress.json
done
"""


@pytest.mark.interpreted
@pytest.mark.one_partition
@pytest.mark.processes
def test_a_replay_decides_as_the_controller_did_each_time(
    elastic: Cluster, share: Path, record_property: Callable[[str, object], None]
) -> None:
    noted = share / "decisions"
    assert elastic.stop_controller() == 0
    elastic.write_inventory({"tick": "500ms"}, policies={"A100": "quick"})  # what a replay has decisions of
    elastic.start_controller(program=("-c", RECORDER), DECISIONS=str(noted))
    jobs: list[str] = []

    def decided() -> list[bytes]:
        return noted.read_bytes().splitlines() if noted.exists() else []

    def over() -> bool:
        return all(elastic.state_of(job) in ENDED for job in jobs)

    for sizes, work, pause in CROWD:
        size = ("--resizable", "--cooldown", "1s", "--sizes", sizes) if "," in sizes else ("--gpus", sizes)
        jobs.append(elastic.sh(STEPS.replace("WORK", str(work)), "-t", "30m", *size))
        begun = len(decided())
        wait_until(lambda n=begun + 2 * pause: len(decided()) > n or over(), 60, "more decisions")  # type: ignore[misc]
    for job in jobs:
        elastic.wait_state(job, timeout=120)
    ended = [elastic.job(job) for job in jobs]
    assert all(job is not None and job.state == "COMPLETED" for job in ended), ended
    assert any(job is not None and job.resizes is not None for job in ended), "nobody was resized"
    found = agreement(noted)
    record_property("figure", f"resizable jobs: {found}")
    assert found.again == found.decisions, found.others
    assert found.replayed + found.overdue == found.decisions, found.others
    assert found.replayed > len(jobs) // 2, found.others
    history_is_what_was_lived(elastic)


def stretched(trace: Trace, factor: float) -> Trace:
    """Return the trace with all times longer: what is two seconds apart is read as one decision, as jobs last hours."""
    assert trace.progress is not None
    times = replace(
        trace.progress, run_after_s=trace.progress.run_after_s * factor, run_s=trace.progress.run_s * factor,
        cost_s=trace.progress.cost_s * factor, steps_per_s=trace.progress.steps_per_s / factor,
    )  # fmt: skip
    return replace(
        trace, submit=trace.submit * factor, duration=trace.duration * factor, limit=trace.limit * factor,
        progress=times,
    )  # fmt: skip


def history_is_what_was_lived(cluster: Cluster) -> None:
    """Of resized jobs: their work at the sizes that they had, and what changing took, are the time that passed."""
    with cluster.reader() as reader:
        assert reader is not None
        trace, jobs = trace_of(reader, name="own"), {job.id: job for job in reader.jobs()}
    progress, checked = trace.progress, 0
    assert progress is not None
    assert np.isfinite(progress.steps).all(), "each reported its progress"
    for row, job in enumerate(jobs[name] for name in trace.ids):
        own = progress.run_job == row
        if job.resizes is not None:
            assert job.spec.elastic is not None
            assert (trace.gpus[row], tuple(progress.sizes(row))) == (job.spec.elastic.base_gpus, job.spec.elastic.sizes)
            passed = (job.end_time or 0.0) - job.submit_time - float(progress.run_after_s[own][0])
            lived = float(progress.run_s[own].sum())
            if job.resizes.measured == job.resizes.count:
                assert lived + progress.cost_s[row] * job.resizes.count == pytest.approx(passed, abs=1e-3)
            else:  # on a busy machine it may end before it reports a step at some size: that cost is unknown
                assert 0.0 < lived <= passed + 1e-3
            checked += 1
        else:
            assert progress.run_s[own].sum() == pytest.approx((job.end_time or 0.0) - (job.start_time or 0.0), abs=1e-3)
    assert checked
    found = recorded_decisions(stretched(trace, 30.0), 16, Resizing(min_run_s=0.0, per_hour=60))
    assert {name for name, _ in by_policy(found, trace)} == {"quick"}
    starts = sum(int((one.claims.jobs["held"] == 0).sum()) for one in found)
    resizes = sum(int(((one.claims.jobs["held"] != one.chosen) & (one.claims.jobs["held"] > 0)).sum()) for one in found)
    assert starts > 0
    assert resizes > 0
    rows = json.loads(cluster.cli("replay", "--since", "1h", "-P", "easy", "-P", "quick", "--json", timeout=300).stdout)
    assert [row["jobs"] for row in rows] == [len(trace)] * 2
    fixed, sized = (row["mean_jct_s"] for row in rows)
    assert sized < fixed, "own sizes are used"
