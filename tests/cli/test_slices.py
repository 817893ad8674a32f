"""MIG slices from the command line: what is asked for, what is refused, and what the screens say of it."""

from __future__ import annotations

import time

import pytest

from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from gpusched.model.readings import Gpu, NodeReading, NodeState
from gpusched.model.slices import MigSlice
from gpusched.queue.store import NodeRecord, Store
from tests.cli.conftest import Site

NODES = ("pc1", "pc2", "pc3")
GEOMETRY = {"pc1": {3: {"1g.10gb": range(7)}}, "pc2": {2: {"1g.10gb": (0, 1), "2g.20gb": (2,), "3g.40gb": (4,)}}}


@pytest.fixture
def sliced(site: Site) -> Site:
    """The nodes of the partition ``bare`` have been read, and two of their GPUs are cut."""
    site.apply_inbox()
    read(site, *NODES)
    return site


def read(site: Site, *names: str) -> None:
    store = Store.create_or_open(site.state)
    for name in names:
        reading = NodeReading(
            node=name, time=time.time(), source="nvml", containers=(), gpus=tuple(gpu(name, i) for i in range(4))
        )
        store.put_nodes([NodeRecord(name=name, state=NodeState.IDLE, last_seen=1.0, reading=reading)])
    store.close()


def gpu(node: str, index: int) -> Gpu:
    profiles = GEOMETRY.get(node, {}).get(index, {})
    slices = tuple(
        MigSlice(gpu=index, start=start, profile=name, uuid=f"MIG-{node}-{index}-{start}", gi=start, ci=0)
        for name, starts in profiles.items()
        for start in starts
    )
    return Gpu(index=index, uuid=f"{node}-{index}", memory_total_mib=81559, mig_mode=bool(slices), slices=slices)


def test_a_job_asks_for_slices_and_gets_their_share_of_cores_and_memory(sliced: Site) -> None:
    sliced.call("submit", "-p", "bare", "--gpus", "1g.10gb:2", "--json", "--", "x").ok()
    spec = sliced.only_submit().spec
    assert (spec.profile, spec.nodes, spec.gpus_per_node) == ("1g.10gb", 1, 2)
    assert (spec.cores_per_node, spec.memory_mib_per_node) == (1, 2 * 16 * 1024 // 7)


@pytest.mark.parametrize(
    ("gres", "asked"),
    [
        ("gpu:1g.10gb:2", (2, "1g.10gb", ())),
        ("gpu:3g.40gb", (1, "3g.40gb", ())),
        ("gpu:a100_3g.40gb:1", (1, "3g.40gb", ("A100",))),
    ],
)
def test_slurms_words_mean_the_same(site: Site, gres: str, asked: tuple[int, str, tuple[str, ...]]) -> None:
    site.inventory.write_text(site.inventory.read_text().replace("gpus: 4,", "gpus: 4, gpu_type: A100,"))
    site.call("submit", "-p", "bare", f"--gres={gres}", "--json", "--", "x").ok()
    spec = site.only_submit().spec
    assert (spec.gpus_per_node, spec.profile, spec.gpu_types) == asked


@pytest.mark.parametrize(
    ("words", "why", "hint"),
    [
        (("--gpus", "1g.12gb"), "partition bare has no MIG slices of 1g.12gb", "1g.10gb, 2g.20gb, 3g.40gb"),
        (("--gpus", "1g.10gb:8"), "partition bare has no 1 node with 8 slices of 1g.10gb", "at most 7 on one node"),
        (("--gpus", "3g.40gb:2", "-N", "2"), "partition bare has no 2 nodes with 1 slice of 3g.40gb", "at most 1"),
        (("--gpus", "1g.10gb", "--nodelist", "pc3"), "the allowed nodes have no MIG slices of 1g.10gb", "no GPU there"),
        (("--gpus", "1g.10gb", "--resizable", "--sizes", "1,2"), "--sizes and --gpus cannot be combined", ""),
        (("--gpus", "1g.10gb", "--exclusive"), "--exclusive and --mig cannot be combined", "omit one"),
        (("--gpus", "1g.10gb", "--share", "pairs", "--gpu-mem", "1G"), "--share and --mig cannot be combined", ""),
        (("--cpus", "1", "--mig", "1g.10gb"), "--mig 1g.10gb: the job requests no slice", "--gpus 1g.10gb:1"),
        (("-F", "one", "--mig", "1g.10gb"), "--flavor one and --mig cannot be combined", ""),
    ],
)
def test_slices_that_can_never_fit_are_refused(sliced: Site, words: tuple[str, ...], why: str, hint: str) -> None:
    refused = sliced.call("submit", "-p", "bare", *words, "--", "x")
    assert refused.code != 0
    assert why in refused.err
    assert hint in refused.err
    assert sliced.commands() == []


def test_of_nodes_that_were_not_read_nothing_is_known(site: Site) -> None:
    site.apply_inbox()
    read(site, "pc1", "pc2")
    site.call("submit", "-p", "bare", "--gpus", "1g.12gb", "--json", "--", "x").ok()


def test_the_controller_refuses_what_a_client_could_not_know(site: Site) -> None:
    site.apply_inbox()
    job = site.call("submit", "-p", "bare", "--gpus", "1g.12gb", "--json", "--", "x").ok().json["id"]
    read(site, *NODES)
    site.apply_inbox()
    store = Store.create_or_open(site.state)
    assert store.job(job) is None
    refused = [event.data for event in store.events() if event.kind == "refused_command"]
    store.close()
    assert ["partition bare has no MIG slices of 1g.12gb" in str(data) for data in refused] == [True]


def test_the_screens_say_which_slices_are_free_and_whose_the_others_are(sliced: Site) -> None:
    job = sliced.call("submit", "-p", "bare", "--gpus", "1g.10gb:2", "--json", "--", "x").ok().json["id"]
    sliced.apply_inbox()
    waiting = sliced.call("status", "--json").ok().json
    assert [(row["gpus"], row["profile"]) for row in waiting] == [(2, "1g.10gb")]
    part = NodeAllocation(rank=0, node="pc2", gpus=(3000, 3001), cores=1, memory_mib=4681)
    sliced.change(job, state=JobState.RUNNING, attempt=1, start_time=time.time(), allocation=Allocation(job, (part,)))
    rows = {row["name"]: row for row in sliced.call("nodes", "--json").ok().json}
    assert rows["pc1"]["slices"] == {"1g.10gb": [7, 7]}
    assert rows["pc2"]["slices"] == {"1g.10gb": [0, 2], "2g.20gb": [1, 1], "3g.40gb": [1, 1]}
    assert (rows["pc2"]["gpus_free"], rows["pc2"]["gpus"][2]["state"]) == (3, "SLICED")
    first = rows["pc2"]["gpus"][2]["slices"][0]
    assert (first["label"], first["state"], first["job"]) == ("2:1g.10gb@0", "ALLOCATED", job)
    assert "7/7 1g.10gb" in sliced.call("nodes").ok().out
    assert "2:3g.40gb@4" in sliced.call("nodes", "--gpus").ok().out
    assert "1g.10gb:2" in sliced.call("status").ok().out
    assert "pc2: slices 2:1g.10gb@0, 2:1g.10gb@1, 1 core" in sliced.call("show", job).ok().out
    assert sliced.call("show", job, "--json").ok().json["allocation"][0]["slices"] == ["2:1g.10gb@0", "2:1g.10gb@1"]


def test_why_a_job_for_slices_waits_and_when_it_is_expected_to_start(sliced: Site) -> None:
    jobs = []
    for profile, gpus in (("1g.10gb:6", (4000, 4001, 4002, 4003, 4004, 4005)), ("3g.40gb", (3004,))):
        job = sliced.call("submit", "-p", "bare", "--gpus", profile, "-t", "1h", "--json", "--", "x").ok().json["id"]
        sliced.apply_inbox()
        node = "pc1" if len(gpus) > 1 else "pc2"
        part = NodeAllocation(rank=0, node=node, gpus=gpus, cores=1, memory_mib=1024)
        place = Allocation(job, (part,))
        sliced.change(job, state=JobState.RUNNING, attempt=1, start_time=time.time(), allocation=place)
    for profile in ("1g.10gb:3", "3g.40gb", "2g.20gb"):
        words = ("submit", "-p", "bare", "--gpus", profile, "-t", "1h", "--json", "--", "x")
        jobs += [sliced.call(*words).ok().json["id"]]
    sliced.apply_inbox()
    few, half, free = (sliced.call("why", job, "--json").ok().json for job in jobs)
    assert few["reason"] == half["reason"] == "Resources"
    assert few["message"].startswith("waits for 3 slices of 1g.10gb on one node; most free on one node: 2 (pc2)")
    nodes = {node["name"]: node["message"] for node in few["nodes"]}
    assert nodes == {
        "pc1": "1 of 7 slices of 1g.10gb free, needs 3 (6 held by jobs)",
        "pc2": "2 of 2 slices of 1g.10gb free, needs 3",
    }
    assert [node["name"] for node in half["nodes"]] == ["pc2"]
    assert half["expected_start"]["nodes"] == ["pc2"]
    assert "fits now" in free["message"]
    dry = sliced.call("submit", "-p", "bare", "--gpus", "1g.10gb", "--dry-run", "--json", "--", "x").ok().json
    assert dry["expected_start"]["nodes"]
