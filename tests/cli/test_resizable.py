"""`submit --resizable`: what is asked for, and what is refused in one line."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gpusched.agents.base import REGISTRY, AgentParts
from gpusched.config.inventory import load_inventory
from gpusched.config.weights import save_model
from gpusched.model.jobs import Allocation, Elastic, JobState, NodeAllocation, Resizes
from gpusched.model.policy import AGENTS, AgentTraits
from gpusched.queue.snapshots import snapshot_of_store
from gpusched.queue.store import Store
from tests.cli.ahead import Cluster
from tests.cli.conftest import Site

RANGE = ("--resizable", "--gpus", "1-8")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpus", "1-4"), Elastic(sizes=(1, 2, 3, 4), base_gpus=1, base_cores=32, base_memory_mib=128 << 10)),
        (
            ("--sizes", "8,2,4", "--base-gpus", "4", "--batch", "scale", "--cooldown", "20m"),
            Elastic(
                sizes=(2, 4, 8), base_gpus=4, base_cores=128, base_memory_mib=512 << 10, batch="scale", cooldown_s=1200
            ),
        ),
        (
            ("--sizes", "4,16", "--cpus", "10", "--mem", "5G"),
            Elastic(sizes=(4, 16), base_gpus=4, base_cores=10, base_memory_mib=5 << 10),
        ),
    ],
)
def test_options_of_a_resizable_job(site: Site, options: tuple[str, ...], expected: Elastic) -> None:
    site.submit("-p", "A100", "--image", "x", "--resizable", *options, "--", "run")
    spec = site.only_submit().spec
    assert spec.elastic == expected
    assert spec.gpus == expected.base_gpus


def test_cores_and_memory_go_with_the_gpus(site: Site) -> None:
    site.submit(
        "-p", "A100", "--image", "x", "--resizable", "--sizes", "4,16", "--cpus", "10", "--mem", "5G", "--", "r"
    )
    spec = site.only_submit().spec
    there_and_back = spec.at_size(16, 2).at_size(4, 1)
    shapes = [(s.nodes, s.gpus_per_node, s.cores_per_node, s.memory_mib_per_node) for s in (spec, spec.at_size(16, 2))]
    assert shapes == [(1, 4, 10, 5 << 10), (2, 8, 20, 10 << 10)]
    assert there_and_back == spec


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--gpus", "1-4"), "--gpus: several sizes are only for resizable jobs; add --resizable"),
        (("--resizable",), "--resizable: no sizes given; --gpus 1-8, or --sizes 1,2,4,8"),
        (
            ("--resizable", "--gpus", "4-1"),
            "--gpus: 4-1 is not a range of at most 1000 sizes; write",
        ),
        (("--resizable", "--gpus", "1-1000000"), "--gpus: 1-1000000 is not a range of at most 1000 sizes"),
        (("--resizable", "--gpus", "few"), "--gpus: found 'few', expected a number, or with --resizable 1-8"),
        (("--resizable", "--sizes", "1,x"), "--sizes: found '1,x', expected numbers such as 1,2,4,8"),
        (("--resizable", "--sizes", "1-4"), "--sizes: found '1-4', expected numbers such as 1,2,4,8"),
        (("--resizable", "--sizes", "1,2", "--gpus", "2"), "--sizes and --gpus cannot be combined"),
        (("--resizable", "--gpus", "1-4", "--base-gpus", "8"), "--base-gpus 8 is not one of its sizes"),
        (("--resizable", "--gpus", "1-4", "--batch", "big"), "--batch: found 'big', expected fixed or scale"),
        (("--resizable", "--gpus", "1-4", "--cooldown", "soon"), "--cooldown: found 'soon', expected a time"),
        (("--resizable", "--gpus", "1-17"), "--resizable: 9 GPUs cannot be split evenly across any number of nodes"),
        (
            ("--gpus", "4", "--cpus", "2-12"),
            "--cpus: a range is only for resizable jobs; add --resizable",
        ),
        (
            ("--gpus", "4", "--mem", "1G-2G"),
            "--mem: a range is only for resizable jobs; add --resizable",
        ),
        ((*RANGE, "--cpus", "12-2"), "--cpus: 12-2 is no range; write the smaller number first"),
        ((*RANGE, "--cpus", "few"), "--cpus: found 'few', expected a number of CPU cores, or with --resizable 2-12"),
        ((*RANGE, "--cpus", "2-x"), "--cpus: found 'x', expected a number of CPU cores"),
        ((*RANGE, "--cpus", "0-4"), "--cpus 0-4 is no range; write the smaller number first, at least 1"),
        ((*RANGE, "--mem", "1G-lots"), "--mem: found 'lots', expected"),
        ((*RANGE, "--cpus", "600-700"), "1 GPU, 600 cores, 128G of memory cannot be split evenly across any"),
        ((*RANGE, "--cpus", "2-600"), "--cpus 600 is more than the largest flavor of partition A100 has (f-A100: 512)"),
        ((*RANGE, "--mem", "1G-4T"), "--mem 4T is more than the largest flavor of partition A100 has (f-A100: 2048G)"),
        (
            (*RANGE, "--mem", "1G-2097153M"),
            "--mem 2097153 MiB is more than the largest flavor of partition A100 has (f-A100: 2097152 MiB)",
        ),
        (("--resizable", "--sizes", "0,1"), "--resizable takes 1 to 1000 sizes of at least one GPU, ascending"),
        (("--gpus", "-1"), "--gpus must not be negative, found -1"),
    ],
)
def test_wrong_options_of_a_resizable_job_are_refused(site: Site, options: tuple[str, ...], error: str) -> None:
    done = site.call("submit", "-p", "A100", "--image", "x", *options, "--", "run")
    assert done.code == 2
    assert error in done.err
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_submit_shows_where_its_job_folder_lies(site: Site) -> None:
    command = ("submit", "-p", "A100", "--image", "x", "--resizable", "--gpus", "1-4", "--", "run")
    assert "keep checkpoints where all nodes see them" in site.call(*command).err
    site.inventory.write_text("settings: {job_dirs: /shared/jobs}\n" + site.inventory.read_text())
    assert "checkpoints" not in site.call(*command).err


def test_why_and_show_and_dry_run_know_sizes(site: Site) -> None:
    options = ("-p", "A100", "--image", "x", "--resizable", "--sizes", "1,2,4,8", "--", "run")
    assert site.call("submit", "--json", "--dry-run", *options).json["spec"]["elastic"]["sizes"] == [1, 2, 4, 8]
    job = site.submit(*options)
    page = site.call("show", "--json", job).json
    assert page["resizes"] == {"count": 0, "why": None, "cost_s": None, "lost_s": 0.0, "unusable": [], "frozen": None}
    assert "sizes:        1-2,4,8 GPUs, now 1" in site.call("show", job).out


def test_cores_and_memory_have_ranges_of_their_own(site: Site) -> None:
    options = ("--sizes", "1,2,4,8,16", "--base-gpus", "2", "--cpus", "12-150", "--mem", "300G-900G")
    job = site.submit("-p", "A100", "--image", "x", "--resizable", *options, "--", "r")
    spec = site.only_submit().spec
    assert spec.elastic is not None
    assert (spec.elastic.cores, spec.elastic.memory_mib) == ((12, 150), (300 << 10, 900 << 10))
    # The partition has 32 cores and 128G for each GPU: 64 and 256G for the base, of which 300G are the least.
    assert (spec.cores_per_node, spec.memory_mib_per_node) == (64, 300 << 10)
    amounts = {gpus: spec.at_size(gpus, nodes).amounts for gpus, nodes in ((1, 1), (2, 1), (4, 1), (8, 1), (16, 2))}
    assert {gpus: cores for gpus, (cores, _) in amounts.items()} == {1: 32, 2: 64, 4: 128, 8: 150, 16: 150}
    assert {gpus: mib >> 10 for gpus, (_, mib) in amounts.items()} == {1: 300, 2: 300, 4: 600, 8: 900, 16: 900}
    # No more than the nodes have, and never less than the least.
    assert spec.at_size(4, 1, (100, 700 << 10)).amounts == (100, 600 << 10)
    assert spec.at_size(4, 1, (3, 1)).amounts == (12, 300 << 10)
    page = site.call("show", job).out
    assert "sizes:        1-2,4,8,16 GPUs, now 2; 12-150 CPU cores, now 64; 300G-900G of memory, now 300G" in page


def test_a_base_with_fewer_cores_than_go_with_its_gpus(site: Site) -> None:
    """On nodes of 80 cores the share of 8 GPUs is 80; the range allows no more than 12."""
    with_rules(site, "{}")
    site.submit("-p", "V100", "--resizable", "--gpus", "4-8", "--cpus", "2-12", "--", "r")
    spec = site.only_submit().spec
    assert (spec.gpus_per_node, spec.cores_per_node) == (4, 12)


def with_rules(site: Site, rules: str) -> None:
    """Of partition V100, which gets a flavor of all its GPUs."""
    flavors = "      s-V100:"
    text = site.inventory.read_text().replace("  V100:\n", f"  V100:\n    resizable: {rules}\n")
    flavor = "      all: {gpus: 16, cores: 160, memory: 1024G, time: 72h}\n"
    site.inventory.write_text(text.replace(flavors, flavor + flavors))


def test_a_partition_fills_in_what_is_left_out(site: Site) -> None:
    with_rules(site, "{min: 2, max: 6, cooldown: 20m, batch: scale}")
    site.submit("-p", "V100", "--resizable", "--", "r")
    spec = site.only_submit().spec
    assert spec.elastic is not None
    assert (spec.gpus, spec.elastic.sizes) == (2, (2, 3, 4, 5, 6))
    assert (spec.elastic.cooldown_s, spec.elastic.batch) == (1200, "scale")


def test_options_override_defaults_of_the_partition(site: Site) -> None:
    with_rules(site, "{min: 2, max: 6, cooldown: 20m, batch: scale, default: yes}")
    site.submit("-p", "V100", "--resizable", "--sizes", "2,4", "--cooldown", "1m", "--batch", "fixed", "--", "r")
    elastic = site.only_submit().spec.elastic
    assert elastic is not None
    assert (elastic.sizes, elastic.cooldown_s, elastic.batch) == ((2, 4), 60, "fixed")


@pytest.mark.parametrize(
    ("options", "sizes", "base"),
    [
        (("--gpus", "4"), (2, 3, 4, 5, 6), 4),
        (("--gpus", "2-4"), (2, 3, 4), 2),
        (("--gpus", "4", "--no-resizable"), None, 4),
        (("--gpus", "8"), None, 8),
        (("--gpus", "4", "-N", "2"), None, 4),
        (("-F", "s-V100"), None, 2),
        (("--cpus", "4"), None, 0),
    ],
)
def test_a_partition_may_make_jobs_resizable(
    site: Site, options: tuple[str, ...], sizes: tuple[int, ...] | None, base: int
) -> None:
    with_rules(site, "{min: 2, max: 6, default: yes}")
    site.submit("-p", "V100", *options, "--", "r")
    spec = site.only_submit().spec
    assert spec.gpus == base
    assert (spec.elastic and spec.elastic.sizes) == sizes


def test_sizes_that_a_partition_fills_in_are_those_its_nodes_can_give(site: Site) -> None:
    with_rules(site, "{max: 16}")
    site.submit("-p", "V100", "--resizable", "--", "r")
    elastic = site.only_submit().spec.elastic
    assert elastic is not None
    assert elastic.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


def test_a_partition_refuses_sizes_out_of_its_bounds(site: Site) -> None:
    with_rules(site, "{min: 2, max: 6}")
    for gpus, found in (("1-4", 1), ("2-8", 7)):
        done = site.call("submit", "-p", "V100", "--resizable", "--gpus", gpus, "--", "r")
        assert done.code == 2
        assert (
            f"--resizable: partition V100 resizes jobs to 2 to 6 GPUs, not to {found}; the limits are set in"
            in done.err
        )


def test_jobs_in_the_queue_keep_to_bounds_that_come_later(site: Site) -> None:
    with_rules(site, "{}")
    some = site.submit("-p", "V100", "--resizable", "--gpus", "1-8", "--", "r")
    none = site.submit("-p", "V100", "--resizable", "--gpus", "7-8", "--", "r")
    site.apply_inbox()
    site.inventory.write_text(site.inventory.read_text().replace("resizable: {}", "resizable: {min: 2, max: 6}"))
    inventory = load_inventory(site.inventory)
    store = Store.create_or_open(site.state)
    specs = {job.id: job.spec for job in snapshot_of_store(store, inventory, {}, 0.0).pending}
    kept = store.job(some)
    store.close()
    assert specs[some].elastic is not None
    assert specs[some].elastic.sizes == (2, 3, 4, 5, 6)
    assert (specs[none].elastic, specs[none].gpus) == (None, 7)
    assert kept is not None
    assert kept.spec.elastic is not None
    assert kept.spec.elastic.sizes == tuple(range(1, 9)), "other bounds may come"


class Elastics(Cluster):
    """Two nodes of eight GPUs whose policy chooses sizes; on them jobs that said that they may be resized."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        text = site.inventory.read_text().replace("tick: 5s", "tick: 5s, job_dirs: /shared/jobs")
        site.inventory.write_text(text.replace("policy: easy", "policy: elastic"))

    def asks(self, *sizes: int) -> tuple[str, ...]:
        menu = ",".join(map(str, sizes))
        return ("-p", "A100", "-t", "10h", "--resizable", "--sizes", menu, "--base-gpus", str(sizes[-1]), "--", "x")

    def queue(self, *sizes: int) -> str:
        job = self.site.submit(*self.asks(*sizes))
        self.site.apply_inbox()
        return job

    def runs(self, job: str, node: str, gpus: int, ran_s: float = 3600.0) -> None:
        spec = self.site.change(job).spec.at_size(gpus, 1)
        part = NodeAllocation(
            rank=0, node=node, gpus=tuple(range(gpus)), cores=spec.cores_per_node, memory_mib=spec.memory_mib_per_node
        )
        began, place = time.time() - ran_s, Allocation(job, (part,))
        self.site.change(job, state=JobState.RUNNING, spec=spec, start_time=began, attempt=1, allocation=place)


@pytest.fixture
def elastics(site: Site) -> Elastics:
    return Elastics(site)


def plain(text: str) -> str:
    return " ".join(text.split())


def test_why_of_a_pending_job_shows_the_size_its_policy_would_give(elastics: Elastics) -> None:
    site, job = elastics.site, elastics.queue(2, 4, 8, 16)
    says = "fits now on 2, 4, 8, 16 GPUs; elastic would start it with 16"
    assert f"sizes: {says}" in plain(site.call("why", job).ok().out)
    assert f"sizes: 2,4,8,16 GPUs; {says}" in plain(site.call("show", job).ok().out)
    assert site.call("show", "--json", job).ok().json["sizes_now"] == {
        "fits": [2, 4, 8, 16], "least": 2, "given": 16, "shrinks": [], "message": says,
    }  # fmt: skip
    again = site.call("submit", "--dry-run", *elastics.asks(2, 4)).ok().out
    assert "sizes: fits now on 2, 4 GPUs; elastic would start it with 4" in again, "they share"
    rigid = elastics.wait(1)
    assert site.call("why", "--json", rigid).ok().json["sizes_now"] is None


def test_why_shows_which_jobs_shrink_for_it(elastics: Elastics) -> None:
    site = elastics.site
    first, second = elastics.queue(6, 8), elastics.queue(4, 8)
    elastics.runs(first, "a1", 8)
    elastics.runs(second, "a2", 8)
    job = elastics.queue(4, 8)
    answer = site.call("why", "--json", job).ok().json
    says = f"fits now on none of 4, 8 GPUs; elastic would give it 4 GPUs, after these shrink: job {second} from 8 to 4"
    assert answer["sizes_now"] == {
        "fits": [], "least": 4, "given": 4, "shrinks": [{"id": second, "from": 8, "to": 4}], "message": says,
    }  # fmt: skip
    assert answer["message"].startswith("waits for 4 GPUs on one node"), "its least size, not its base"
    assert plain(f"sizes: {says}") in plain(site.call("why", job).ok().out)


def test_why_shows_what_it_waits_for_if_no_job_shrinks(elastics: Elastics) -> None:
    site = elastics.site
    first, second = elastics.queue(4, 8), elastics.queue(8)
    elastics.runs(second, "a2", 8)
    elastics.runs(first, "a1", 8, ran_s=10.0)  # less than the least time between two stops
    job = elastics.queue(4, 8)
    says = "fits now on none of 4, 8 GPUs; waits for 4 GPUs, its minimum; no job can shrink now"
    assert site.call("why", "--json", job).ok().json["sizes_now"]["message"] == says
    elastics.runs(first, "a1", 8, ran_s=36000.0 - 5.0)  # its limit is near, and it costs 30 s to stop it
    costs = Resizes(count=1, costs_s=30.0, measured=1)
    site.change(first, resizes=costs)
    assert site.call("why", "--json", job).ok().json["sizes_now"]["message"] == (
        "fits now on none of 4, 8 GPUs; waits for 4 GPUs, its minimum; jobs that could shrink "
        f"(job {first} from 8 to 4) are not stopped for it now"
    )


def test_why_shows_the_size_that_an_agent_would_give(
    elastics: Elastics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, job = elastics.site, elastics.queue(2, 4, 8, 16)
    live = SimpleNamespace(prepare=lambda model: model.arrays["sizes"], choose_sizes=lambda weights, question: weights)
    monkeypatch.setitem(AGENTS, "chooses", AgentTraits(sizes=True))
    monkeypatch.setitem(REGISTRY, "chooses", AgentParts(sizes=lambda: live))
    (tmp_path / "policies").mkdir(exist_ok=True)
    (tmp_path / "policies" / "mine.yaml").write_text("agent: chooses\nfallback: elastic\n")
    site.inventory.write_text(site.inventory.read_text().replace("policy: elastic", "policy: mine"))
    room = "fits now on 2, 4, 8, 16 GPUs;"

    def message() -> str:
        return str(site.call("why", "--json", job).ok().json["sizes_now"]["message"])

    assert message() == f"{room} elastic would start it with 16", "no weights"
    weights = tmp_path / "policies" / "mine" / "default.safetensors"
    weights.parent.mkdir()
    save_model(weights, "chooses", {"sizes": np.array([4])})
    assert message() == f"{room} mine would start it with 4"
    save_model(weights, "chooses", {"sizes": np.array([3])})
    assert message() == f"{room} elastic would start it with 16", "3 is none of its sizes"


@pytest.mark.parametrize("hot", [("--resizable", "hot"), ("--resizable", "--hot")])
@pytest.mark.parametrize(
    ("sizes", "expected", "nodes"),
    [
        (("--gpus", "8-16"), (8, 16), 1),
        (("--gpus", "4-9", "--gpus-per-node", "4"), (4, 8), 1),
        (("--sizes", "8,16", "--base-gpus", "16"), (8, 16), 2),
    ],
)
def test_a_hot_job_is_made_of_whole_ranks(
    site: Site, hot: tuple[str, ...], sizes: tuple[str, ...], expected: tuple[int, ...], nodes: int
) -> None:
    site.submit("-p", "A100", "--image", "x", *hot, *sizes, "--", "run", "--resizable", "hot")
    spec = site.only_submit().spec
    assert spec.elastic is not None
    assert (spec.elastic.sizes, spec.elastic.rank_gpus) == (expected, spec.gpus_per_node)
    assert (spec.nodes, spec.gpus) == (nodes, spec.elastic.base_gpus)
    assert spec.command == ("run", "--resizable", "hot"), "the program's own words stay"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--hot", "--gpus", "8"), "--hot: the job is not resizable; add --resizable"),
        (
            ("--resizable", "hot", "--sizes", "8,12", "--gpus-per-node", "8"),
            "--hot: 12 GPUs is not a multiple of 8, the GPUs of a rank; choose other sizes, or --gpus-per-node",
        ),
        (
            ("--resizable", "hot", "--gpus", "8-16", "--cpus", "2-12"),
            "--hot and a range of --cpus cannot be combined; resize it by restarts: omit --hot",
        ),
    ],
)
def test_invalid_options_of_a_hot_job_are_reported(site: Site, options: tuple[str, ...], error: str) -> None:
    done = site.call("submit", "-p", "A100", "--image", "x", *options, "--", "run")
    assert done.code == 2
    assert error in done.err


def test_a_script_cannot_be_hot(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n#GPUSCHED --resizable hot --gpus 8-16\ntrue\n")
    done = site.call("submit", "-p", "A100", "--image", "x", str(script))
    assert "--hot and a job script cannot be combined" in done.err
