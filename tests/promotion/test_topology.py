"""The topology agent as an ordinary policy, by the commands: trained on own jobs, replayed, shadowed, promoted."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from gpusched.agents.common.vector import to_arrays
from gpusched.agents.topology.network import SHAPES, start
from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.config.weights import save_model
from gpusched.model.commands import Promote, ShadowOn
from gpusched.model.interference import job_class_of
from gpusched.queue.store import Store
from tests.cli.conftest import Site
from tests.promotion.conftest import record_days
from tests.promotion.lifecycle import cycle, done, live
from tests.sched.contention import beliefs

QUICK = "train: {generations: 1, population: 4, tries: 1, watch: 1, every: 1, window: 30}\n"
RACKS = "topology: {r1: {nodes: [dgx-1v-1], uplink: 100G}, r2: {nodes: [dgx-1v-2], uplink: 100G}}\n"


def learn(site: Site, spread: float) -> None:
    """Write what controllers learn of jobs: those called a and b are so many times as long over two racks."""
    known = beliefs(0.5, 0.5, spread)
    names = {job_class_of("ann", name): known["alice/calm"] for name in ("a000", "b000")}
    store = Store.create_or_open(site.state)
    with store.transaction():
        store.put_beliefs(replace(of, kind=kind) for kind, of in names.items())
    store.close()


@pytest.fixture
def racks(site: Site) -> Site:
    """A site with two racks, a fast recipe, and history: eight days to train on, and eight days after those."""
    site.inventory.write_text(RACKS + site.inventory.read_text())
    (site.folder / "policies").mkdir()
    (site.folder / "policies/topology.yaml").write_text((BUILT_IN / "topology.yaml").read_text() + QUICK)
    record_days(site.state, 8)
    record_days(site.state, 8, until_days_ago=20.0, first=100)
    learn(site, 1.5)
    site.apply_inbox()
    return site


def until(days: int) -> str:
    """The time so many days ago."""
    return time.strftime("%Y-%m-%dT%H:%M", time.localtime(time.time() - 86400.0 * days))


def rows(site: Site, name: str) -> list[dict[str, Any]]:
    return [r for r in site.call("policy", "list", "--json").json if r["name"] == name]


def replayed_at_night(site: Site) -> list[str]:
    """The policies that the nightly replays compare in V100, the live one first."""
    (night,) = done(site.call("replay", "--nightly", "--since", "12d", "--json")).json["partitions"]
    assert night["partition"] == "V100"
    return [run["policy"] for run in night["runs"]]


def test_trained_on_own_jobs_replayed_shadowed_promoted(racks: Site) -> None:
    cycle(racks)
    assert [(r["agent"], r["note"]) for r in rows(racks, "topology")] == [("topology", "untrained: gpusched train")]
    untrained = racks.call("replay", "-P", "topology")
    assert untrained.code == 1
    assert "topology is not trained yet" in untrained.err

    words = ("train", "topology", "-p", "V100", "--until", until(15), "--force", "--keep-anyway", "--json")
    (made,) = done(racks.call(*words)).json
    assert made["weights"] == str(racks.folder / "policies/topology/V100.safetensors")
    table = {row["policy"]: row for row in made["card"]["metrics"]}
    assert list(table)[:2] == ["topology", "untrained start"]
    assert {"contention", "rack-wait", "rack", "best-fit", "lower bound"} < set(table)
    assert "as learned of 2 job classes" in made["card"]["notes"][0]
    assert [r["partition"] for r in rows(racks, "topology")] == ["V100"]
    shown = done(racks.call("policy", "show", "topology")).out
    assert "chosen by agent topology, within 0.2 s, else contention" in shown

    words = ("replay", "--vc", "V100", "--since", "12d", "-P", "topology", "-P", "rack-wait", "--json")
    agent, rule = done(racks.call(*words)).json
    assert (agent["policy"], agent["jobs"]) == ("topology", rule["jobs"])
    assert "16 of 24 jobs are of these" in " ".join(agent["notes"])

    (found,) = done(racks.call("policy", "compare", "rack-wait", "topology", "-p", "V100", "--json")).json
    assert (found["candidate"], found["incumbent"]) == ("topology", "rack-wait")

    assert "topology" not in replayed_at_night(racks), "while the live policy goes by no costs"
    done(racks.call("policy", "shadow", "topology", "-p", "V100"))
    assert [type(c) for c in racks.commands()] == [ShadowOn]
    cycle(racks)
    assert {r["state"] for r in rows(racks, "topology")} >= {"shadow"}

    asked = done(racks.call("policy", "promote", "topology", "-p", "V100", "--json")).json
    (verdict,) = asked["verdicts"]
    assert verdict["passed"], verdict["line"]
    assert verdict["incumbent"] == "fifo"
    assert verdict["jobs"] >= 24, "days after those of the training"
    assert [type(c) for c in racks.commands()] == [Promote]
    assert cycle(racks)["V100"] == "topology"
    assert live(racks)["V100"] == "topology"
    compared = replayed_at_night(racks)
    assert compared[0] == "topology"
    assert {"fifo", "easy", "rack-wait", "contention", "spread", "fairshare"} < set(compared)


def test_nothing_learned_and_no_switches_are_reported(site: Site) -> None:
    record_days(site.state, 3)
    site.apply_inbox()
    refused = site.call("train", "topology", "-p", "V100", "--force")
    assert (refused.code, refused.err.count("\n")) == (2, 2), refused.err
    assert "nothing was learned of it, and no switches are known" in refused.err


def test_no_proof_before_anything_was_learned(site: Site) -> None:
    """Public measurements would say what it gains on other jobs, while live its fallback decides."""
    (site.folder / "policies/topology").mkdir(parents=True)
    site.inventory.write_text(RACKS + site.inventory.read_text())
    (site.folder / "policies/topology.yaml").write_text((BUILT_IN / "topology.yaml").read_text())
    save_model(site.folder / "policies/topology/default.safetensors", "topology", to_arrays(start(0), SHAPES))
    record_days(site.state, 8)
    site.apply_inbox()
    refused = site.call("policy", "promote", "topology", "-p", "V100")
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "no placement costs have been learned yet, so its fallback would decide" in refused.err
    done(site.call("policy", "promote", "topology", "-p", "V100", "--force", "try"))


def test_the_built_in_policy_falls_back_to_contention() -> None:
    spec = load_policy(BUILT_IN / "topology.yaml")
    assert spec.fallback is not None
    assert (spec.agent, spec.fallback.name, spec.backfill) == ("topology", "contention", "easy")
    assert (spec.order, spec.placement_wait_s) == ("fifo", spec.fallback.placement_wait_s)
