"""A shadow that learns online: from the live policy's decisions of some days, judged by the days after them."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.dl2.decide import STEP_FEATURES, zero_actor
from gpusched.agents.dl2.online import OnlineRecipe, update_agent
from gpusched.agents.dl2.weights import actor_of, arrays_of
from gpusched.config.weights import load_model, save_model
from tests.agents.histories import lived
from tests.cli.conftest import Site
from tests.promotion.conftest import DAY_S
from tests.promotion.lifecycle import cycle, done, edit, live
from tests.promotion.trained import row

pytestmark = pytest.mark.usefixtures("compiled")


def night(site: Site, *words: str) -> tuple[list[str], list[dict[str, object]]]:
    """Return the trained policies and the evaluations."""
    report = json.loads(done(site.call("replay", "--nightly", "--since", "1d", "--json", *words)).out)
    return report["trained"], report["judged"]


def candidates(site: Site) -> list[Path]:
    return sorted((site.state / "candidates").glob("*/*/*/policy.yaml"))


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let it be noon: days end at midnight, and how many decisions are learned from goes by the hour."""
    clock = time.time
    ahead = (clock() // DAY_S + 0.5) * DAY_S - clock()
    monkeypatch.setattr(time, "time", lambda: clock() + ahead)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of few rounds: how good they get is another test's matter."""
    monkeypatch.setattr(update_agent, "__defaults__", (OnlineRecipe(rounds=5),))


@pytest.fixture
def beside(site: Site, noon: None) -> Site:
    """Two weeks under optimus, now easy; beside it dl2 as a shadow, which never gives more than the least size."""
    pytest.importorskip("torch")
    lived(site.state, "optimus", jobs=260, days=13.5, start=time.time() - 14 * DAY_S, partition="V100")
    site.apply_inbox()
    edit(site, "  V100:\n", "  V100:\n    policy: easy\n")
    folder = site.folder / "policies"
    (folder / "dl2").mkdir(parents=True)
    (folder / "dl2.yaml").write_text("agent: dl2\nfallback: elastic\n")
    actor = zero_actor(8)
    actor.linear[STEP_FEATURES.index("done")] = 1.0
    actor.own[:] = np.random.default_rng(0).normal(0, 0.2, actor.own.shape)  # what gradients need
    actor.out[:] = 0.05
    about = {"slot_s": "600", "restart_s": "20", "knows": "oracle", "sizes": "1-8"}
    save_model(folder / "dl2" / "V100.safetensors", "dl2", arrays_of({"trained": actor}), about)
    cycle(site)
    done(site.call("policy", "shadow", "dl2", "-p", "V100"))
    cycle(site)
    return site


def test_a_shadow_learns_from_live_decisions_and_is_proposed_when_later_days_prove_it(beside: Site) -> None:
    before = row(beside, state="shadow")["version"]
    trained, judged = night(beside)
    (line,) = trained
    found = re.match(r"V100: dl2 learned online, from (\d+) new decisions: .* ([0-9.]+) before, ([0-9.]+) after", line)
    assert found is not None, line
    assert int(found[1]) > 100
    assert float(found[3]) > float(found[2]) + 0.03
    (file,) = candidates(beside)
    weights = load_model(file.parent, "V100", "dl2")
    assert {name for name in weights.arrays if name.startswith("critic.")}
    start = load_model(beside.folder / "policies/dl2", "V100", "dl2")
    assert not np.array_equal(actor_of(weights).linear, actor_of(start).linear)
    # The five days that judge were not learned from.
    last = row(beside, state="candidate", path=str(file.parent))
    shown = done(beside.call("policy", "show", f"dl2@{last['version']}", "--json")).json
    until = shown["cards"]["V100"]["trace"]["last"]
    assert until[:10] == time.strftime("%Y-%m-%d", time.gmtime(time.time() // DAY_S * DAY_S - 5 * DAY_S - 1))
    (shadow,) = [j for j in judged if j["state"] == "shadow"]
    (candidate,) = [j for j in judged if j["state"] == "candidate"]
    assert (candidate["passed"], candidate["proposed"], candidate["promoted"]) == (True, True, False)
    assert not shadow["proposed"]
    command = f"gpusched policy promote dl2@{last['version']} --partition V100"
    assert last["verdict"] == f"{candidate['line']}; proposed for promotion: {command}"
    # Until an admin does it, everything decides as before.
    assert (live(beside)["V100"], row(beside, state="shadow")["version"]) == ("easy", before)
    assert beside.commands() == []
    # The same night again: nothing new.
    content = file.parent.joinpath("V100.safetensors").read_bytes()
    again = night(beside, "--auto-retrain")[0]  # which such a shadow is not
    assert again == ["V100: dl2 learned nothing online: 0 new decisions on sizes; 20 are needed"]
    assert file.parent.joinpath("V100.safetensors").read_bytes() == content
    done(beside.call(*command.split()[1:]))
    assert cycle(beside)["V100"] == "dl2"
    assert row(beside, state="live", partition="V100")["version"] == last["version"]


@pytest.mark.usefixtures("quick")
def test_it_goes_on_from_its_last_update_and_only_of_the_same_shadow(
    beside: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "time", lambda: now - 3 * DAY_S)
        first = night(beside)[0]
    second = night(beside)[0]
    counts = [int(m[1]) for m in (re.search(r"from (\d+) new", line) for line in (*first, *second)) if m]
    assert len(candidates(beside)) == 2, (first, second)
    assert counts[0] > counts[1] > 40, "the second one learned from three more days"
    cards = [json.dumps(load_model(file.parent, "V100", "dl2").about) for file in candidates(beside)]
    assert len(set(cards)) == 2
    other = load_model(beside.folder / "policies/dl2", "V100", "dl2")
    other.arrays["trained.out"] *= 2.0  # type: ignore[misc]
    save_model(beside.folder / "policies/dl2/V100.safetensors", "dl2", other.arrays, other.about)
    done(beside.call("policy", "shadow", "dl2", "-p", "V100"))
    cycle(beside)
    (again,) = night(beside)[0]
    found = re.search(r"from (\d+) new", again)
    assert found is not None, again
    assert abs(int(found[1]) - sum(counts)) < 5, "another shadow begins at the beginning"


@pytest.mark.usefixtures("quick")
def test_an_update_that_is_not_written_whole_is_none(beside: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpusched.agents.training.online.write_card", full)
    (line,), judged = night(beside)
    assert "learned nothing online" in line
    assert "cannot be written: No space left on device" in line
    assert candidates(beside) == []
    assert [j["state"] for j in judged] == ["shadow"]
    # What a kill leaves behind is not listed.
    day = next((beside.state / "candidates").iterdir())
    shutil.copytree(beside.folder / "policies/dl2", day / ".new-x/dl2")
    shutil.copyfile(beside.folder / "policies/dl2.yaml", day / ".new-x/dl2/policy.yaml")
    rows = beside.call("policy", "list", "--json").json
    assert not [r for r in rows if ".new-x" in str(r["path"])]
