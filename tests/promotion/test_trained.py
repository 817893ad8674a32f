"""Trained policies through the command line: cards, held-out days, shadows, copies, the night."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from gpusched.config.weightfiles import KEPT_ANYWAY
from gpusched.config.weights import load_file, save_model
from gpusched.queue.store import Store
from tests.cli.conftest import Site
from tests.promotion import weights
from tests.promotion.lifecycle import cycle, done, edit, live
from tests.promotion.trained import row, trained

pytestmark = pytest.mark.usefixtures("compiled")


def test_an_agent_is_judged_by_days_it_has_not_seen(proved: Site) -> None:
    cycle(proved)
    trained(proved, 3.5)
    assert row(proved, name="gist")["state"] == "candidate"
    refused = proved.call("policy", "promote", "gist")
    assert refused.code == 1
    assert "of 3 days" in refused.err or "of 2 days" in refused.err
    trained(proved, 0.0)
    refused = proved.call("policy", "promote", "gist", "-p", "V100")
    assert "no held-out day yet" in refused.err
    trained(proved, 30.0)
    asked = proved.call("policy", "promote", "gist", "--json")
    assert asked.code == 0, asked
    assert asked.json["partitions"] == ["V100"]
    assert asked.json["verdicts"][0]["days"] == 8
    assert cycle(proved) == {"A100": "fifo", "V100": "gist", "bare": "fifo"}
    found = row(proved, name="gist")
    assert (found["state"], found["agent"], found["trace_sha256"]) == ("live", "gist", "ab" * 32)
    assert found["trained_at"] == "2026-11-20T10:00:00+00:00"
    assert "no worse" in found["verdict"]
    (proved.folder / "policies/gist/V100.card.yaml").unlink()
    weights.write(proved.folder / "policies/gist/V100.safetensors", 3)
    refused = proved.call("policy", "promote", "gist", "-p", "V100")
    assert "gist has no training card for V100" in refused.err


def test_show_has_the_card_and_the_shadow(proved: Site) -> None:
    cycle(proved)
    trained(proved, None)
    done(proved.call("policy", "shadow", "gist", "-p", "V100"))
    proved.apply_inbox()
    page = proved.call("policy", "show", "gist", "--json").json
    assert page["cards"]["V100"]["trace"]["sha256"] == "ab" * 32
    assert (page["agent"], page["fallback"], page["budget_s"], page["live"]) == ("gist", "easy", 60.0, [])
    (shadow,) = page["shadows"]
    assert (shadow["partition"], shadow["decisions"], shadow["until"], shadow["verdict"]) == ("V100", 0, None, None)
    said = proved.call("policy", "show", "gist").ok().out
    assert "decides by: agent gist, within 60 s, else easy" in said
    assert "gist: mean_jct_s 12.5 (11 to 14)" in said
    assert "in V100: a linear rule of " in said
    assert "and a neural network of width 8" in said
    assert "and a neural network of width 8" in page["weights"]["V100"]
    assert "0 decisions: " in said
    assert row(proved, name="gist", state="shadow")["partition"] == "V100"
    night = proved.call("replay", "--nightly", "--since", "30d")
    assert night.code == 0, night
    assert "V100: shadow: gist against fifo on 24 jobs of 8 days: mean JCT -" in night.out
    assert "gist against fifo" in row(proved, name="gist", state="shadow")["verdict"]
    assert "verdict: gist against fifo" in proved.call("policy", "show", "gist").ok().out
    done(proved.call("policy", "shadow", "--off"))
    proved.apply_inbox()
    assert row(proved, name="gist")["state"] == "candidate"
    assert proved.call("policy", "show", "gist", "--json").json["shadows"][0]["until"] is not None


def test_versions_can_be_named_and_what_was_is_kept(proved: Site) -> None:
    cycle(proved)
    first = trained(proved, None)
    done(proved.call("policy", "promote", "gist", "--force", "first"))
    assert cycle(proved)["V100"] == "gist"
    old = row(proved, name="gist")["version"]
    content = first.read_bytes()
    trained(proved, None, seed=7)
    done(proved.call("policy", "promote", "gist", "--force", "second"))
    cycle(proved)
    new = row(proved, name="gist", state="live")["version"]
    assert new != old
    assert row(proved, name="gist", state="retired")["version"] == old
    assert proved.call("policy", "show", f"gist@{old[:6]}", "--json").json["version"] == old
    done(proved.call("policy", "promote", f"gist@{old}", "--force", "the first was better"))
    cycle(proved)
    assert row(proved, name="gist", state="live")["version"] == old
    (frozen,) = (proved.state / "policies" / old).glob("gist/V100.safetensors")
    assert frozen.read_bytes() == content
    for version in (new, old):
        done(proved.call("policy", "rollback"))
        cycle(proved)
        assert row(proved, name="gist", state="live")["version"] == version
    done(proved.call("policy", "rollback"))
    assert cycle(proved)["V100"] == "fifo"


def test_a_folder_elsewhere_is_a_policy(proved: Site, tmp_path: Path) -> None:
    cycle(proved)
    trained(proved, None)
    (proved.folder / "policies/gist.yaml").rename(proved.folder / "policies/gist/policy.yaml")
    (proved.folder / "policies/gist").rename(tmp_path / "moved")
    done(proved.call("policy", "promote", str(tmp_path / "moved"), "--force", "mine"))
    assert cycle(proved)["V100"] == "moved"
    found = row(proved, name="moved", state="live")
    assert str(proved.state) in found["path"]


def test_status_and_why_say_that_the_fallback_decides(proved: Site) -> None:
    from gpusched.config.inventory import load_inventory
    from gpusched.config.policies import load_policies
    from gpusched.controller.deciding import Decider

    file = trained(proved, None)
    edit(proved, "  V100:\n", "  V100:\n    policy: gist\n")
    cycle(proved)
    job, other = proved.submit(), proved.submit("-F", "s-A100", "--image", "i", "--", "true")
    proved.apply_inbox()
    weights.break_file(file, "truncated")
    policies = load_policies(load_inventory(proved.inventory))
    store = Store.create_or_open(proved.state)
    Decider(store).refresh(policies, {}, time.time())
    store.close()
    line = f"V100: gist cannot decide ({file}: these weights cannot be read: "
    status = proved.call("status").ok().out
    assert line in status
    assert "; falling back to easy" in status
    jobs = {j["id"]: j["fallback"] for j in proved.call("status", "--json").json}
    assert jobs[job].startswith(line)
    assert jobs[other] is None
    assert line in proved.call("why", job).ok().out
    assert proved.call("why", job, "--json").json["fallback"].startswith(line)
    assert proved.call("why", other, "--json").json["fallback"] is None
    assert row(proved, partition="V100", state="live")["fallback"].startswith(line)
    assert live(proved)["V100"] == "gist"


def test_weights_kept_anyway_are_marked_wherever_they_are_used(proved: Site) -> None:
    line = "worse: mean JCT +25.0% (+12.0% to +38.0%) against its untrained start"
    file = trained(proved, None)
    found = load_file(file, "gist")
    save_model(file, "gist", found.arrays, {**found.about, KEPT_ANYWAY: line})
    card = file.with_name("V100.card.yaml")
    gate = {"outcome": "worse", "line": line.removeprefix("worse: "), "kept_anyway": True}
    card.write_text(card.read_text() + yaml.safe_dump({"gate": gate}))
    cycle(proved)
    said = "gist has weights that were kept anyway, " + line
    assert "kept anyway" not in proved.call("status").ok().out
    assert row(proved, name="gist")["kept_anyway"] == line
    assert f"gate: worse, kept anyway: {gate['line']}" in done(proved.call("policy", "show", "gist")).out
    done(proved.call("policy", "shadow", "gist", "-p", "V100"))
    cycle(proved)
    assert f"warning: V100: shadow {said}" in " ".join(proved.call("status").ok().out.split())
    assert row(proved, state="shadow")["kept_anyway"] == line
    done(proved.call("policy", "shadow", "--off", "-p", "V100"))
    done(proved.call("policy", "promote", "gist", "-p", "V100", "--force", "to see it"))
    cycle(proved)
    status = " ".join(proved.call("status").ok().out.split())
    assert f"warning: V100: {said}" in status
    assert "shadow gist" not in status
    assert row(proved, state="live", partition="V100")["kept_anyway"] == line
    assert "kept anyway" in proved.call("policy", "list").ok().out
    assert row(proved, state="live", partition="A100")["kept_anyway"] is None


@pytest.mark.skipif(os.getuid() != 0, reason="another user's command needs root")
def test_others_may_look_but_not_touch(proved: Site) -> None:
    from gpusched.model.commands import Rollback
    from gpusched.queue.inbox import Inbox

    cycle(proved)
    done(proved.call("policy", "promote", "easy", "-p", "V100", "--force", "x"))
    cycle(proved)
    Inbox(proved.state).deliver(Rollback(time=0.0, partition="V100", reason="not mine"))
    (file,) = (proved.state / "inbox/new").iterdir()
    os.chown(file, 65534, -1)
    assert cycle(proved)["V100"] == "easy"


@pytest.mark.parametrize(
    "hostile",
    [
        "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)) + "{}",
        "notes: &n [a]\nmetrics: *n\n{}",
        "{}hyper_parameters: " + "[" * 5000 + "]" * 5000,
        "{}hyper_parameters: {{seed: 1" + "0" * 5000 + "}}",
        "{}hyper_parameters: 2026-99-99",
    ],
    ids=["laughs", "alias", "deep", "digits", "date"],
)
def test_a_card_that_is_none_is_passed_over_at_once(proved: Site, hostile: str) -> None:
    trained(proved, 30.0)
    card = proved.folder / "policies/gist/V100.card.yaml"
    rest = yaml.safe_load(card.read_text())
    for key in ("hyper_parameters", "notes", "metrics"):
        if f"{key}:" in hostile:
            del rest[key]
    card.write_text(hostile.replace("{}", yaml.safe_dump(rest)))
    page = proved.call("policy", "show", "gist", "--json").ok().json
    assert page["cards"] == {}
    assert "training card" not in proved.call("policy", "show", "gist").ok().out
