"""From attempts that end to beliefs in the store, and what ``predict``, ``nodes`` and ``check`` say of them."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpusched.config.users import user_name
from gpusched.controller.learning import MAX_PER_CYCLE, learn, shared_link
from gpusched.doctor.state import examine_state
from gpusched.errors import UsageError
from gpusched.model.interference import AttemptSpeed, ContentionEstimate, JobClassEstimate
from gpusched.model.jobs import Allocation, JobRecord, JobState, NodeAllocation
from gpusched.model.policy import PolicySpec
from gpusched.model.progress import JobProgress
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.model.topology import Switch, Topology
from gpusched.queue.beliefs import MAX_STORED_SPEEDS
from gpusched.queue.snapshots import job_class_estimates
from gpusched.queue.store import NodeRecord, RunRecord, Store
from gpusched.sched.interference.gpus import slow_gpus
from tests import commands
from tests.builders import spec
from tests.controller.imagined import GPUS, inventory
from tests.controller.site import Site
from tests.sched.interference.pairs import paces_on, shape
from tests.sched.worlds import snapshot

TOPOLOGY = Topology(switches=(Switch(name="r0", nodes=("n0", "n1")), Switch(name="r1", nodes=("n2", "n3"))))
DECLARED = msgspec.structs.replace(inventory(4), topology=TOPOLOGY)
ME = user_name(os.getuid())
SLOW = [pace for pace in paces_on(3, {("n3", 5): 0.5}, jobs=900) if len(pace.gpus) < 8]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.create_or_open(tmp_path)
    yield opened
    opened.close()


def ran(
    store: Store, job_id: str, name: str, nodes: tuple[str, ...], *, begin: float = 0.0, end: float | None = 1000.0,
    pace: float | None = None, samples: float | None = None, user: str = ME, gpus: int = 4,
) -> JobRecord:  # fmt: skip
    """A job in the store with its run; with a pace it reported that many steps a second from 100 to 700 s."""
    part = NodeAllocation(rank=0, node="", gpus=tuple(range(gpus)), cores=1, memory_mib=1)
    parts = tuple(msgspec.structs.replace(part, rank=rank, node=node) for rank, node in enumerate(nodes))
    job = JobRecord(
        id=job_id, user=user, uid=1, spec=spec(name=name, nodes=len(nodes), gpus_per_node=gpus),
        state=JobState.RUNNING, submit_time=0.0, start_time=begin, attempt=1, allocation=Allocation(job_id, parts),
    )  # fmt: skip
    run = RunRecord(
        job_id=job_id, attempt=1, user=user, partition="p", flavor=None, share=0.0, gpus=job.spec.gpus,
        start_time=begin, end_time=end, outcome=None, nodes=dict.fromkeys(nodes, gpus),
    )  # fmt: skip
    store.put_jobs([job])
    store.open_run(run)
    if end is not None:
        store.close_run(job_id, 1, end, JobState.COMPLETED)
    if pace is not None or samples is not None:
        progress = JobProgress(job_id=job_id, attempt=1, gpus=job.spec.gpus)
        for at in (100.0, 700.0):
            progress = progress.with_step((pace or 1.0) * at, None, samples, begin + at)
        store.put_progress([progress])
    return job


def test_an_attempt_teaches_about_its_class_and_its_neighbours(store: Store):
    job = ran(store, "a1", "train-17", ("n0", "n2"), pace=2.0)
    ran(store, "a2", "train-18", ("n0", "n1"), begin=400.0)  # shares n0's NIC for half of the time
    ran(store, "b", "other", ("n1", "n3"), user="bob")  # the uplinks of both racks
    ran(store, "c", "small", ("n2",), end=None)  # n2, and goes on
    ran(store, "d", "apart", ("n1",))
    ran(store, "e", "long ago", ("n0", "n2"), end=99.0)
    learn(store, DECLARED, [job])
    learn(store, DECLARED, [job])
    (kind,) = {kind for kind, belief in store.beliefs().items() if belief.shapes}
    assert kind == f"{ME}/train-#"
    (paces,) = store.belief(kind).shapes
    assert paces.shape == shape(2, 2, 8, unit="steps", gpu_type="")
    assert paces.count == 2
    assert paces.logs[0][1] < 0.5  # it was never alone: it weighs less
    seen = {(belief.kind, link.link): link.count for belief in store.beliefs().values() for link in belief.links}
    assert seen == {(kind, "nic"): 1, (kind, "uplink"): 1, (kind, "server"): 1, ("bob/other", "uplink"): 1,
                    (f"{ME}/small", "server"): 1}  # fmt: skip
    (first, _) = store.paces()
    assert first.gpus == tuple((node, index) for node in ("n0", "n2") for index in range(4))


@pytest.mark.parametrize(("place", "given"), [("milp", True), ("fastest", True), ("contention", True), ("rack", False)])
def test_a_snapshot_has_what_was_learned_where_a_policy_places_by_it(store: Store, place: str, given: bool):
    learn(store, DECLARED, [ran(store, "a1", "train-17", ("n0",), pace=2.0)])
    alone = PolicySpec(name="m", place=place)  # type: ignore[arg-type]
    for policy in (alone, PolicySpec(name="a", agent="rltune", fallback=alone)):
        found = job_class_estimates(store, {"p": policy}, snapshot([], []))
        assert found.keys() == ({f"{ME}/train-#"} if given else set())


def test_neighbours_count_for_the_time_that_they_were_there(store: Store, monkeypatch: pytest.MonkeyPatch):
    job = ran(store, "a", "a", ("n0", "n1"), pace=2.0)  # reported in [100, 700]
    ran(store, "b", "b", ("n0", "n2"), begin=400.0)
    ran(store, "c", "c", ("n1", "n2"), end=250.0)
    ran(store, "d", "d", ("n1",), begin=699.0)
    ran(store, "e", "e", ("n1",), begin=600.0, end=None)
    seen = []
    monkeypatch.setattr(
        "gpusched.controller.learning.learn_attempt", lambda known, one: (seen.append(one), ((), None))[1]
    )
    learn(store, DECLARED, [job])
    beside = {(n.kind.partition("/")[2], n.link, round(n.share, 3)) for n in seen[0].neighbours}
    assert beside == {("b", "nic", 0.5), ("c", "nic", 0.25), ("e", "server", 0.167)}
    assert seen[0].seconds == 600.0


def test_jobs_that_reported_nothing_or_nonsense_leave_no_trace(store: Store):
    jobs = [
        ran(store, "a", "silent", ("n0",)),
        ran(store, "b", "none", ("n0",), samples=0.0),
        ran(store, "c", "minus", ("n0",), samples=-3.0),
        ran(store, "d", "huge", ("n0",), samples=1e300),
        ran(store, "e", "no-gpu", ("n0",), pace=1.0, gpus=0),
        msgspec.structs.replace(ran(store, "f", "gone", ("n0",), pace=1.0), allocation=None),
        msgspec.structs.replace(ran(store, "g", "earlier", ("n0",), pace=1.0), attempt=2),
    ]
    learn(store, DECLARED, jobs)
    assert (store.beliefs(), store.paces()) == ({}, [])


def test_samples_go_before_steps_and_very_many_at_once_are_cut(store: Store):
    with store.transaction():
        jobs = [ran(store, f"j{i}", "j", ("n0",), pace=1.0, samples=640.0) for i in range(MAX_PER_CYCLE + 9)]
    learn(store, DECLARED, jobs[:1])
    (paces,) = store.belief(f"{ME}/j").shapes
    assert (paces.shape.unit, round(paces.best, 3)) == ("samples", 6.461)
    learn(store, DECLARED, jobs)
    assert store.belief(f"{ME}/j").shapes[0].count == 1 + MAX_PER_CYCLE


@pytest.mark.parametrize(
    ("mine", "its", "link"),
    [
        ("n0", "n0", "server"), ("n0 n1", "n0", "server"), ("n0 n1", "n1 n2", "nic"), ("n0", "n1", None),
        ("n0 n2", "n1 n3", "uplink"), ("n0 n1", "n2 n3", None), ("n0 n1", "n2", None), ("n0 n9", "n1 n8", None),
    ],
)  # fmt: skip
def test_the_link_that_two_jobs_share(mine: str, its: str, link: str | None):
    assert shared_link(set(mine.split()), set(its.split()), TOPOLOGY.racks()) == link


def test_only_the_latest_paces_are_kept(store: Store):
    (pace,) = paces_on(0, {}, jobs=1)
    with store.transaction():
        for number in range(MAX_STORED_SPEEDS + 3):
            store.add_pace(msgspec.structs.replace(pace, job_id=str(number)))
    kept = store.paces()
    assert (len(kept), kept[0].job_id, kept[-1].job_id) == (MAX_STORED_SPEEDS, "3", str(MAX_STORED_SPEEDS + 2))


def test_a_controller_that_is_killed_has_learned_once_or_not_at_all(tmp_path: Path):
    site = Site(tmp_path)
    job_id = site.submit(spec=spec(name="train-1", gpus_per_node=GPUS))
    site.turn(3)
    now = site.world.now
    progress = JobProgress(job_id=job_id, attempt=1, gpus=GPUS)
    site.store.put_progress([progress.with_step(0, None, 50.0, now - 100).with_step(10, None, 50.0, now)])
    site.turn(2)
    assert site.store.beliefs() == {}  # it goes on
    ((_, box),) = site.world.running()
    site.world.end(box, 0)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    site.cycle._ledger.charge = killed  # type: ignore[method-assign]
    for _ in range(2):  # what of it is collected and removed first
        with pytest.raises(KeyboardInterrupt):
            site.turn(1)
    assert site.store.beliefs() == {}
    site.restart()
    site.turn(4)
    assert site.state_of(job_id) == JobState.COMPLETED
    (belief,) = site.store.beliefs().values()
    assert [(p.shape.gpus, p.count) for p in belief.shapes] == [(GPUS, 1)]
    assert len(site.store.paces()) == 1
    site.store.close()


@pytest.fixture
def knowing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state that has seen a kind in one rack and over two, alone and beside another."""
    monkeypatch.setenv("GPUSCHED_STATE", str(tmp_path))
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(tmp_path / "inventory.yaml"))
    nodes = "".join(f"{{name: n{i}, address: 127.0.0.{i + 1}, port: 9}}, " for i in range(8))
    (tmp_path / "inventory.yaml").write_text(
        f"partitions: {{p: {{defaults: {{gpus: 8, cores: 8, memory: 8G, runtime: process}}, nodes: [{nodes}]}}}}\n"
    )
    jobs = []
    for i, by in enumerate((0.98, 0.99, 1.0, 1.01, 1.02)):
        jobs.append(ran(store, f"a{i}", f"gpt-{i}", ("n0", "n1"), begin=1e4 * i, end=1e4 * i + 800, pace=10 * by))
        jobs.append(ran(store, f"b{i}", f"gpt-{i}", ("n1", "n2"), begin=1e4 * i + 900, end=1e4 * i + 1800, pace=8 * by))
    with store.transaction():
        for job in jobs:
            learn(store, DECLARED, [job])
        for pace in SLOW:
            store.add_pace(pace)
        reading = NodeReading(node="n3", time=1e9, source="nvml", gpus=tuple(Gpu(index=i) for i in range(8)))
        store.put_nodes([NodeRecord(name="n3", state=NodeState.IDLE, last_seen=1e9, reading=reading)])
    return tmp_path


def run(*argv: str, code: int = 0) -> str:
    done = commands.run(*argv)
    assert done.returncode == code, done
    return done.stdout + done.stderr


def test_predict_says_what_racks_and_neighbours_cost(knowing: Path):
    from gpusched.client.predict import describe_class, is_job_class

    described = describe_class("gpt-7", None, 2, 2, ["gpt-1"])
    assert described.kind == f"{ME}/gpt-#"
    assert (described.costs[0].source, described.costs[0].measurements) == ("measured", 10)
    assert described.costs[0].slower == pytest.approx(0.25, abs=0.01)
    assert described.lines[0].startswith("on 2 racks about 25 % slower than in one (")
    assert described.lines[0].endswith(" %, 10 measurements)")
    assert described.costs[0].low < 0.25 < described.costs[0].high
    assert "sharing NICs with it" in described.lines[1]
    assert describe_class("gpt-7", None, 4, 4, []).lines == ("on 4 racks no measured speed",)
    assert is_job_class("gpt-99")
    assert not is_job_class("nothing")
    text = run("predict", "gpt-7", "--nodes", "2", "--racks", "2", "--beside", "gpt-1")
    assert "on 2 racks about 25 % slower than in one (" in text
    assert json.loads(run("predict", "gpt-7", "--json"))["paces"][0]["measurements"] == 5


def test_where_gpus_are_shared_predict_says_what_that_costs(knowing: Path):
    from gpusched.client.predict import describe_class

    assert len(describe_class("gpt-7", None, 1, None, ["gpt-1"]).lines) == 1
    declared = knowing / "inventory.yaml"
    declared.write_text(declared.read_text().replace("gpus: 8,", "gpus: 8, sharing: {mode: time-slicing},"))
    described = describe_class("gpt-7", None, 1, None, ["gpt-1"])
    assert described.lines[1].startswith(f"beside {ME}/gpt-# (on the same GPUs) about 61 % slower than alone (")
    assert len(described.costs) == len(described.lines) == 2


def test_predict_says_what_is_wrong_with_a_question(knowing: Path):
    from gpusched.client.predict import describe_class

    for argv, says in (
        (("gtp-7", None, None, None, []), "no data on jobs named gtp-7"),
        (("gpt-7", None, None, None, ["alice/x"]), "no data on jobs named alice/x"),
        (("gpt-7", None, 1, 2, []), "--racks 2 exceeds --nodes 1"),
        (("gpt-7", 7, 2, None, []), "7 GPUs cannot be split evenly across 2 nodes"),
    ):
        with pytest.raises(UsageError, match=says):
            describe_class(*argv)  # type: ignore[arg-type]
    assert "need a job name" in run("predict", "--racks", "2", code=2)


def test_slow_gpus_are_shown_by_nodes_and_check(knowing: Path):
    rows = {row["name"]: row["gpus"] for row in json.loads(run("nodes", "--json"))}
    assert "slower than similar GPUs (" in rows["n3"][5]["reason"]
    assert not any(
        "slower" in gpu["reason"] for name in rows for gpu in rows[name] if (name, gpu["index"]) != ("n3", 5)
    )
    (found,) = [f for f in examine_state(knowing, 5.0, 0.0) if f.subject == "n3"]
    assert (found.check, found.status) == ("GPU 5", "warn")
    assert "nvidia-smi" in found.hint
    assert [(gpu.node, gpu.index) for gpu in slow_gpus(SLOW)] == [("n3", 5)]


def test_a_store_of_before_has_no_beliefs(tmp_path: Path, store: Store):
    store._db.executescript("DROP TABLE beliefs; DROP TABLE paces")
    assert (store.beliefs(), store.belief("x"), store.paces()) == ({}, None, [])
    assert msgspec.json.decode(msgspec.json.encode(paces_on(0, {}, jobs=1)[0]), type=AttemptSpeed)


def in_racks(knowing: Path, policy: str) -> None:
    declared = knowing / "inventory.yaml"
    declared.write_text(
        "topology: {r0: {nodes: 'n[0-1]'}, r1: {nodes: 'n[2-3]'}}\n"
        + declared.read_text().replace("partitions: {p: {", f"partitions: {{p: {{policy: {policy}, ")
    )


def one_node_free_in_each_rack(store: Store) -> None:
    reading = NodeReading(node="", time=time.time(), source="nvml", gpus=tuple(Gpu(index=i) for i in range(8)))
    with store.transaction():
        store.put_jobs([msgspec.structs.replace(job, state=JobState.COMPLETED) for job in store.active()])
        store.put_nodes(
            NodeRecord(name=name, state=NodeState.IDLE, last_seen=time.time(), reading=reading)
            for name in ("n0", "n1", "n2", "n3")
        )
        for name in ("n0", "n2"):
            ran(store, f"x{name}", "other", (name,), begin=time.time(), end=None, gpus=8)


def test_why_says_what_it_would_cost_not_to_wait_for_one_rack(knowing: Path, store: Store):
    in_racks(knowing, "rack-wait")
    one_node_free_in_each_rack(store)

    def dry_run(name: str) -> str:
        wanted = ("-N", "2", "--gpus", "8", "-t", "1h", "--job-name", name)
        return " ".join(run("submit", "--dry-run", *wanted, "--", "true").split())

    said = dry_run("gpt-9")
    assert "waits for one rack until" in said
    assert "it could start now on 2 racks" in said
    assert "; on 2 racks about 25 % slower than in one (" in said
    near, far = re.findall(r"in one rack from \S+|on 2 racks at once, about 25 % slower than in one \([^)]*\)", said)
    assert near.startswith("in one rack from ")
    assert far.endswith(" %, 10 measurements)")
    spreads = json.loads(
        run("submit", "--dry-run", "--json", "-N", "2", "--gpus", "8", "-t", "1h", "--job-name", "gpt-9", "--", "true")
    )["spreads"]
    assert [(s["spread"], s["racks"], len(s["nodes"])) for s in spreads] == [("rack", 1, 2), ("any", 2, 2)]
    assert (spreads[0]["cost"], spreads[0]["message"]) == (None, None)
    assert spreads[1]["cost"]["slower"] == pytest.approx(0.25, abs=0.01)
    assert far == f"on 2 racks at once, {spreads[1]['message'].removeprefix('on 2 racks ')}"
    assert "slower than in one" not in dry_run("never-seen")


def test_show_and_status_say_what_a_place_costs(knowing: Path, store: Store):
    in_racks(knowing, "contention")
    with store.transaction():
        store.put_jobs([msgspec.structs.replace(job, state=JobState.COMPLETED) for job in store.active()])
        ran(store, "g1", "gpt-9", ("n1", "n2"), begin=time.time(), end=None)
    row = json.loads(run("status", "--json"))[0]
    assert (row["id"], row["slower"]) == ("g1", pytest.approx(0.25, abs=0.01))
    assert "SLOWER" in run("status")
    page = " ".join(run("show", "g1").split())
    assert "place: on 2 racks about 25 % slower than in one (" in page
    assert "10 measurements)" in page
    (cost,) = json.loads(run("show", "g1", "--json"))["place_costs"]
    assert (cost["source"], cost["measurements"]) == ("measured", 10)
    with store.transaction():
        ran(store, "g2", "loader", ("n2", "n3"), begin=time.time(), end=None)
    assert "beside loader" not in run("show", "g1"), "of neither anything was measured beside others"
    with store.transaction():
        loud = ContentionEstimate(link="nic", sensitivity=-3.0, pressure=-1.0, cov=(0.1, 0.1, 0.0), count=4)
        store.put_beliefs([JobClassEstimate(kind=f"{ME}/loader", links=(loud,))])
    page = " ".join(run("show", "g1").split())
    assert "; beside loader (g2) about " in page
    rows = {row["id"]: row["slower"] for row in json.loads(run("status", "--json"))}
    assert rows["g1"] > 1.25 * 1.1 - 1
    assert 0 < rows["g2"] < 0.1, "it minds less than it presses"
    with store.transaction():
        store.put_jobs([msgspec.structs.replace(job, state=JobState.COMPLETED) for job in store.active()])
        ran(store, "h1", "never-seen", ("n0", "n3"), begin=time.time(), end=None)
    row = next(row for row in json.loads(run("status", "--json")) if row["id"] == "h1")
    assert row["slower"] is None
    assert "SLOWER" not in run("status")


def test_why_shows_the_better_place_that_a_job_waits_for(knowing: Path, store: Store):
    in_racks(knowing, "contention")
    one_node_free_in_each_rack(store)

    wanted = ("-N", "2", "--gpus", "8", "-t", "1h", "--job-name")

    def dry_run(*more: str) -> str:
        return " ".join(run("submit", "--dry-run", *wanted, *more, "--", "true").split())

    said = dry_run("gpt-9")
    assert "at the latest; started now, it would run 25 % slower" in said
    assert "; on 2 racks about 25 % slower than in one (" in said
    assert "accept what is free (--placement-wait 0) now" in said
    answer = json.loads(run("submit", "--dry-run", "--json", *wanted, "gpt-9", "--", "true"))
    assert "jobs are placed, and wait for better places, by placement costs" in str(
        answer["expected_start"]["assumptions"]
    )
    assert answer["expected_start"]["nodes"] == ["n0", "n1"], "when the first job ends, not when its patience does"
    assert "waits for a better place until" not in dry_run("never-seen")
    assert "waits for a better place until" not in dry_run("gpt-9", "--placement-wait", "0")
