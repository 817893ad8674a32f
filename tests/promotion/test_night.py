"""The night: candidates trained anew, judged, and promoted only where inventory.yaml says so."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from gpusched.model.commands import Promote
from tests.cli.conftest import Result, Site
from tests.promotion import weights
from tests.promotion.conftest import record_days
from tests.promotion.lifecycle import cycle, done, edit
from tests.promotion.trained import row, trained

pytestmark = pytest.mark.usefixtures("compiled")


def night(site: Site, *words: str) -> Result:
    return done(site.call("replay", "--nightly", "--since", "1d", *words))


def candidate(site: Site, day: str, days_ago: float, seed: int = 0) -> Path:
    """A candidate of an earlier night."""
    trained(site, days_ago, seed)
    folder = site.state / "candidates" / day / "V100" / "gist"
    folder.parent.mkdir(parents=True)
    (site.folder / "policies/gist").rename(folder)
    shutil.copyfile(site.folder / "policies/gist.yaml", folder / "policy.yaml")
    return folder


def test_retraining_leaves_a_candidate_and_promotes_nothing(proved: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    record_days(proved.state, 1, until_days_ago=0.25, first=100)
    trained(proved, None)
    (proved.folder / "policies/gist.yaml").write_text(weights.YAML + weights.QUICK)
    cycle(proved)
    assert "no live or shadow agent, so nothing to train" in night(proved, "--auto-retrain").out
    done(proved.call("policy", "shadow", "gist", "-p", "V100"))
    cycle(proved)
    (refused,) = json.loads(night(proved, "--auto-retrain", "--json").out)["trained"]
    said = r"V100: gist not trained: too few jobs to train on \(V100: (\d+)\); at least 100 are needed"
    found = re.match(said, refused)  # how many of the 27 are before the days that judge goes by the hour of the day
    assert found is not None
    assert int(found[1]) in (21, 24)

    def fails(*_: object) -> None:
        raise ZeroDivisionError("another's component")

    with monkeypatch.context() as patched:
        patched.setattr("gpusched.agents.training.train.train", fails)
        report = json.loads(night(proved, "--auto-retrain", "--json").out)
    assert report["trained"] == ["V100: gist not trained: ZeroDivisionError: another's component"]
    monkeypatch.setattr("gpusched.agents.training.train.MIN_JOBS", 20)  # more days take longer, and prove nothing more
    report = json.loads(night(proved, "--auto-retrain", "--json").out)
    (trained_line,) = report["trained"]
    assert trained_line.startswith("V100: gist retrained, in ")
    (folder,) = (proved.state / "candidates").glob("*/V100/gist")
    assert {"V100.safetensors", "V100.card.yaml", "policy.yaml"} == {f.name for f in folder.iterdir()}
    gate = yaml.safe_load((folder / "V100.card.yaml").read_text())["gate"]  # the days that follow judge it
    assert (gate["outcome"], gate["kept_anyway"]) == ("not judged", False)
    shadow, found = report["judged"]
    assert (shadow["state"], found["state"], found["path"]) == ("shadow", "candidate", str(folder))
    assert "too few days for an interval" in found["line"]
    assert not found["passed"]
    assert not found["promoted"]
    assert proved.commands() == []
    listed = row(proved, state="candidate", partition="V100", path=str(folder))
    assert listed["verdict"] == found["line"]
    assert listed["trace_sha256"]
    assert done(proved.call("policy", "show", f"gist@{listed['version']}", "--json")).json["origin"] == "candidate"
    # the policy's own weights are as they were
    assert row(proved, state="shadow")["version"] != listed["version"]


def test_a_draft_of_a_policy_costs_no_report(proved: Site) -> None:
    record_days(proved.state, 1, until_days_ago=0.25, first=100)
    cycle(proved)
    (proved.folder / "policies").mkdir(exist_ok=True)
    (proved.folder / "policies/draft.yaml").write_text("order: sjff\n")
    found = night(proved)
    assert "draft.yaml:1: order" in found.err
    assert "it is left out" in found.err
    assert "mean JCT" in found.out


def test_a_candidate_that_proved_better_is_promoted_only_if_allowed(proved: Site) -> None:
    cycle(proved)
    good = candidate(proved, "2026-01-02", 30.0)
    candidate(proved, "2026-01-03", 1.5, seed=1)
    judged = json.loads(night(proved, "--json").out)["judged"]
    assert [(j["passed"], j["promoted"]) for j in judged] == [(True, False), (False, False)]
    assert proved.commands() == []
    edit(proved, "  V100:\n", "  V100:\n    auto_promote: true\n")
    out = night(proved).out
    assert "promotion requested" in out
    (command,) = proved.commands()
    assert isinstance(command, Promote)
    assert (command.path, command.forced) == (str(good), False)
    assert cycle(proved)["V100"] == "gist"
    last = proved.call("policy", "history", "--json").json[-1]
    assert (last["act"], last["reason"][:14]) == ("promote", "auto_promote: ")
    assert "no worse" in last["verdict"]
    # what is in charge is no candidate any more, and equals itself
    night(proved)
    assert proved.commands() == []
    edit(proved, "    auto_promote: true\n", "")


def test_the_setting_holds_for_all_partitions(proved: Site) -> None:
    cycle(proved)
    candidate(proved, "2026-01-02", 30.0)
    edit(proved, "defaults: {runtime: podman}\n", "settings: {auto_promote: true}\ndefaults: {runtime: podman}\n")
    night(proved)
    assert [type(c) for c in proved.commands()] == [Promote]
    for file in (proved.state / "inbox/new").iterdir():
        file.unlink()
    edit(proved, "  V100:\n", "  V100:\n    auto_promote: false\n")
    night(proved)
    assert proved.commands() == []


def test_auto_retrain_goes_with_the_night(site: Site) -> None:
    refused = site.call("replay", "--auto-retrain")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "--auto-retrain needs --nightly" in refused.err
