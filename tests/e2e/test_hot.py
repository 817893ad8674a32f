"""Hot resizing on real nodes: ranks join and leave, and rank 0's process lives on."""

from __future__ import annotations

import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from gpusched.model.jobs import ENDED
from tests.e2e.conftest import Cluster
from tests.e2e.site_packages import python_for_nodes
from tests.testbed import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.one_partition, pytest.mark.processes]

# Stands in for torchrun: a rank says who it is, and rank 0 reports how many ranks there are, as their group would.
RANKS = r"""
echo "$NODE_RANK $$ $GPUSCHED_NODE $WORLD_SIZE $PET_NNODES $PET_RDZV_ENDPOINT ${PET_RDZV_CONF%%,*}" >>/share/story
trap 'rm -f /share/here.$NODE_RANK; echo "$NODE_RANK leaves" >>/share/story; exit 1' TERM
until [ -e /share/end ]; do
    touch /share/here.$NODE_RANK
    if [ $NODE_RANK = 0 ]; then
        n=$(find /share -name 'here.*' -newermt '5 seconds ago' | wc -l); i=$((i + n))
        echo "{\"step\": $i, \"of\": 1000000, \"nodes\": $n}" >$GPUSCHED_JOB_DIR/p
        mv $GPUSCHED_JOB_DIR/p $GPUSCHED_JOB_DIR/progress.json
    fi
    sleep 0.2 & wait $!
done
"""
CROWD = "until [ -e /share/FILE ]; do sleep 0.1; done"


@pytest.fixture
def hot(stopped: Cluster) -> Cluster:
    folder = stopped.folder / "policies"
    folder.mkdir()
    (folder / "quick.yaml").write_text(
        "order: fifo\nplace: best-fit\nbackfill: easy\nsizes: greedy-gain\n"
        "resize: {min_run: 0s, per_hour: 60, start_timeout: 5m}\n"
    )
    stopped.settings = {**stopped.settings, "job_dirs": str(stopped.folder / "jobs"), "tick": "1s", "grace": "2m"}
    stopped.write_inventory(policies={"A100": "quick"})
    stopped.start_controller()
    return stopped


def submit(cluster: Cluster, share: Path, *options: str, script: str = RANKS) -> str:
    sizes = ("--resizable", "hot", "--gpus", "8-16", "--gpus-per-node", "8", "--cooldown", "1s")
    return cluster.shared(script, share, *sizes, *options)


def crowd(cluster: Cluster, share: Path, file: str) -> str:
    """A job that takes one of the two nodes until the file is there."""
    return cluster.shared(CROWD.replace("FILE", file), share, "--gpus", "8")


def ranks_of(cluster: Cluster, job: str) -> list[int]:
    """The ranks that hold GPUs, once no change is under way."""
    found = cluster.job(job)
    if found is None or found.state != "RUNNING" or found.allocation is None:
        return []
    settled = found.resizes is None or found.resizes.before is None
    return [part.rank for part in found.allocation.parts] if settled else []


def wait_ranks(cluster: Cluster, job: str, *ranks: int) -> None:
    try:
        wait_until(lambda: ranks_of(cluster, job) == [*ranks], 60, f"ranks {ranks}")
    except TimeoutError as error:
        error.add_note(f"{cluster.job(job)}\n{cluster.events(job)}\n{cluster.controller_log}")
        raise


def story(share: Path) -> list[list[str]]:
    path = share / "story"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_it_grows_shrinks_and_survives_the_loss_of_a_rank(hot: Cluster, share: Path) -> None:
    first = crowd(hot, share, "first")
    hot.wait_state(first, "RUNNING")
    job = submit(hot, share)
    hot.wait_state(job, "RUNNING")
    (share / "first").write_text("")
    wait_ranks(hot, job, 0, 1)
    assert [line[0] for line in story(share)] == ["0", "1"]
    other = crowd(hot, share, "other")
    hot.wait_state(other, "RUNNING", timeout=60)
    wait_ranks(hot, job, 0)
    assert story(share)[2:] == [["1", "leaves"]]
    (share / "other").write_text("")
    wait_ranks(hot, job, 0, 2)
    pid = story(share)[-1][1]
    node = hot.node(story(share)[-1][2])
    node.run(["kill", "-KILL", pid])
    wait_until(lambda: "rank_left" in [e.kind for e in hot.events(job)][-9:], 30, "the loss")
    wait_ranks(hot, job, 0, 3)
    starts = story(share)
    assert [line[0] for line in starts if "leaves" not in line] == ["0", "1", "2", "3"], "rank 0 began once"
    page = hot.json("show", job)
    assert page["attempt"] == 1
    assert page["gpus"] == 16
    (share / "end").write_text("")
    hot.wait_state(job, "COMPLETED")
    hot.wait_clean()
    with hot.reader() as reader:
        assert reader is not None
        runs = [run for run in reader.runs(0, 1e12) if run.job_id == job]
    assert [run.gpus for run in runs] == [8, 16, 8, 16, 8, 16], "what it held, and when"
    assert all(a.end_time == b.start_time for a, b in pairwise(runs))
    assert ENDED >= {hot.state_of(first), hot.state_of(other)}


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_a_controller_killed_right_after_the_intent(hot: Cluster, share: Path, change: str) -> None:
    first = crowd(hot, share, "first")
    hot.wait_state(first, "RUNNING")
    job = submit(hot, share)
    hot.wait_state(job, "RUNNING")
    (share / "first").write_text("")
    other = ""
    if change == "shrinks":
        wait_ranks(hot, job, 0, 1)
        other = crowd(hot, share, "other")
    intents = 1 if change == "grows" else 2
    wait_until(lambda: [e.kind for e in hot.events(job)].count("resizing") == intents, 30, "the intent", 0.01)
    hot.kill_controller()
    hot.start_controller()
    if other:
        hot.wait_state(other, "RUNNING", timeout=60)
    wait_ranks(hot, job, *([0] if other else [0, 1]))
    assert [line[0] for line in story(share) if "leaves" not in line] == ["0", "1"], "each began once"
    assert hot.json("show", job)["attempt"] == 1


def kept(cluster: Cluster, job: str, name: str) -> dict[str, float]:
    """Return what the job wrote last into saved.json or progress.json; the file is always whole."""
    paths = list(cluster.folder.glob(f"jobs/*/{job}/{name}.json"))
    return dict(json.loads(paths[0].read_text())) if paths else {}


# So that it gains by growing: with more processes the pause of each step is shorter.
FASTER = """
import os, runpy, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(seconds / int(os.environ["WORLD_SIZE"]))
runpy.run_path("{}", run_name="__main__")
"""


def torchrun_options(folder: Path) -> tuple[list[str], str]:
    """Return the options and the command of the example's training under torchrun on the nodes."""
    root = Path(__file__).parents[2]
    paths = {Path(str(find_spec(name).origin)).parents[1] for name in ("torch", "msgspec")}  # type: ignore[union-attr]
    python_path = ":".join(map(str, (root, *paths)))
    env = (f"PYTHONPATH={python_path}", "GLOO_SOCKET_IFNAME=eth0", "OMP_NUM_THREADS=1")
    (folder / "train.py").write_text(FASTER.format(root / "docs/examples/elastic_train.py"))
    train = f"{folder}/train.py --steps 100000 --save-every 5 --pause 0.4"
    run = f"{python_for_nodes(folder)} -m torch.distributed.run --nproc-per-node 1 {train}"
    return [word for pair in env for word in ("--env", pair)], run


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_a_real_torchrun_forms_its_group_again(hot: Cluster, share: Path) -> None:
    """Gloo on two nodes: it grows, loses a rank by SIGKILL, grows again and shrinks; nothing saved is done again."""
    first = crowd(hot, share, "first")
    hot.wait_state(first, "RUNNING")
    options, run = torchrun_options(hot.folder)
    script = f'echo "$NODE_RANK $$ $GPUSCHED_NODE" >>/share/story; exec {run}'
    job = submit(hot, share, *options, "--output", f"{share}/out.%n", script=script)

    def formed(nodes: int, *ranks: int) -> float:
        """Wait for a group of so many nodes; return the step up to where its work is saved."""
        group = f"a group of {nodes}: {ranks}"
        wait_until(lambda: kept(hot, job, "saved").get("gpus") == nodes, 300, group)
        assert kept(hot, job, "progress")["step"] >= before["step"], "what was saved is not done again"
        if ranks:
            wait_ranks(hot, job, *ranks)
        before.update(kept(hot, job, "saved"))
        return before["step"]

    before: dict[str, float] = {"step": 0}
    formed(1, 0)
    (share / "first").write_text("")
    formed(2, 0, 1)
    wait_until(lambda: kept(hot, job, "saved")["step"] >= before["step"] + 20, 60, "its speed with two nodes")
    _, pid, node = story(share)[1]
    hot.node(node).run(["kill", "-KILL", pid])
    formed(1)  # and it may grow at once
    formed(2, 0, 2)
    other = crowd(hot, share, "other")
    hot.wait_state(other, "RUNNING", timeout=60)
    formed(1, 0)
    assert [line[0] for line in story(share)] == ["0", "1", "2"], "rank 0 is the process that it was"
    page = hot.json("show", job)
    assert (page["attempt"], page["state"]) == (1, "RUNNING")
    assert page["resizes"]["cost_s"] > 0, "seconds without a step, as the program measured them"
    hot.cli("cancel", job)
    hot.wait_state(job, "CANCELLED")
