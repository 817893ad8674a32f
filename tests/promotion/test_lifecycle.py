"""Listed, compared, promoted, rolled back, through the command line; heuristics, so that nothing is trained here."""

from __future__ import annotations

import os
import shutil

import pytest

from gpusched.agents.common.vector import to_arrays
from gpusched.agents.topology.network import SHAPES, untrained
from gpusched.config.inventory import load_inventory
from gpusched.config.policies import BUILT_IN
from gpusched.config.weights import load_model, save_model
from gpusched.doctor.files import examine_policies
from gpusched.model.commands import Promote
from gpusched.queue.store import Store
from tests.cli.conftest import Site
from tests.promotion.conftest import record_days
from tests.promotion.lifecycle import cycle, done, edit, live

pytestmark = pytest.mark.usefixtures("compiled")


def test_a_better_policy_is_promoted_and_taken_back(proved: Site) -> None:
    cycle(proved)
    asked = done(proved.call("policy", "promote", "easy", "-p", "V100", "--json")).json
    (verdict,) = asked["verdicts"]
    assert verdict["passed"]
    assert verdict["days"] == 8
    assert 0 < verdict["low"] <= verdict["gain"] <= verdict["high"]
    assert cycle(proved) == {"A100": "fifo", "V100": "easy", "bare": "fifo"}
    assert live(proved)["V100"] == "easy"
    (row,) = [r for r in proved.call("policy", "list", "--json").json if r["state"] == "live" and r["name"] == "easy"]
    assert row["note"] == "overrides fifo of inventory.yaml"
    assert "no worse" in row["verdict"]
    assert "overrides fifo of inventory.yaml" in proved.call("policy", "list").ok().out
    done(proved.call("policy", "rollback", "too slow for us"))
    assert cycle(proved)["V100"] == "fifo"
    changes = proved.call("policy", "history", "-p", "V100", "--json").json
    assert [(c["act"], c["from_name"], c["name"], c["reason"]) for c in changes][0::2] == [
        ("inventory", None, "fifo", "inventory.yaml names fifo"),
        ("rollback", "easy", "fifo", "too slow for us"),
    ]
    promoted = changes[1]
    assert (promoted["act"], promoted["from_name"], promoted["name"], promoted["forced"]) == (
        "promote", "fifo", "easy", False,
    )  # fmt: skip
    assert promoted["user"] == changes[2]["user"] is not None
    assert promoted["reason"] == promoted["verdict"] == verdict["line"]
    states = {(r["name"], r["partition"]): r["state"] for r in proved.call("policy", "list", "--json").json}
    assert states["easy", "V100"] == "retired"
    store = Store.create_or_open(proved.state)
    events = [e for e in store.events() if e.kind == "policy_changed"]
    store.close()
    assert [(e.data["from"], e.data["to"], e.data["act"]) for e in events] == [
        ("fifo", "easy", "promote"), ("easy", "fifo", "rollback"),
    ]  # fmt: skip
    assert all(e.user for e in events)
    refused = proved.call("policy", "rollback", "-p", "V100")
    assert refused.code == 1
    assert "there is no earlier policy" in refused.err


def test_a_worse_policy_needs_a_reason(proved: Site) -> None:
    edit(proved, "  V100:\n", "  V100:\n    policy: easy\n")
    cycle(proved)
    refused = proved.call("policy", "promote", "fifo", "-p", "V100")
    assert refused.code == 1
    assert "not promoted: V100: fifo against easy on 24 jobs of 8 days: mean JCT +" in refused.err
    assert "not shown to be no worse" in refused.err
    assert cycle(proved)["V100"] == "easy"
    done(proved.call("policy", "promote", "fifo", "-p", "V100", "--force", "strict order is asked for"))
    assert cycle(proved)["V100"] == "fifo"
    last = proved.call("policy", "history", "--json").json[-1]
    assert (last["forced"], last["reason"]) == (True, "strict order is asked for")
    assert "forced: strict order" in proved.call("policy", "history").out
    # the same again is no change
    again = proved.call("policy", "promote", "fifo", "-p", "V100", "--force", "again")
    assert "is already live in V100" in again.err


def test_equal_policies_are_no_worse(proved: Site) -> None:
    (proved.folder / "policies").mkdir()
    (proved.folder / "policies/mine.yaml").write_text("order: fifo\nplace: first-fit\nbackfill: none\n")
    asked = done(proved.call("policy", "promote", "mine", "-p", "V100"))
    assert "mean JCT 0.0% (95 % interval 0.0% to 0.0%): no worse" in asked.out
    assert cycle(proved)["V100"] == "mine"
    # what is in charge is a copy: the file may change or go
    (proved.folder / "policies/mine.yaml").write_text("order: sjf\n")
    assert cycle(proved)["V100"] == "mine"
    shutil.rmtree(proved.folder / "policies")
    assert cycle(proved)["V100"] == "mine"
    frozen = list((proved.state / "policies").glob("*/mine/policy.yaml"))
    assert [f.read_text() for f in frozen] == ["order: fifo\nplace: first-fit\nbackfill: none\n"]


def test_too_few_days_prove_nothing(site: Site) -> None:
    record_days(site.state, 3)
    cycle(site)
    refused = site.call("policy", "promote", "easy", "-p", "V100")
    assert refused.code == 1
    assert "9 jobs of 3 days: mean JCT -" in refused.err
    assert "too few days for an interval (5 are needed)" in refused.err
    assert "--force" in refused.err
    quiet = site.call("policy", "promote", "easy", "-p", "A100")
    assert "A100: no job submitted since" in quiet.err
    done(site.call("policy", "promote", "easy", "-p", "A100", "--force", "new cluster"))
    assert cycle(site) == {"A100": "easy", "V100": "fifo", "bare": "fifo"}


def test_rollbacks_go_back_step_by_step(site: Site) -> None:
    cycle(site)
    for name in ("easy", "sjf", "spread"):
        done(site.call("policy", "promote", name, "-p", "bare", "--force", "try"))
        assert cycle(site)["bare"] == name
    for name in ("sjf", "easy", "fifo"):
        done(site.call("policy", "rollback", "-p", "bare"))
        assert cycle(site)["bare"] == name
    reasons = [c["reason"] for c in site.call("policy", "history", "-p", "bare", "--json").json]
    assert reasons[-3:] == ["back from spread", "back from sjf", "back from easy"]


def test_the_last_word_counts_promotion_or_inventory(site: Site) -> None:
    cycle(site)
    done(site.call("policy", "promote", "easy", "-p", "V100", "--force", "try"))
    assert cycle(site)["V100"] == "easy"
    edit(site, "    image: docker.io", "    max_time: 90d\n    image: docker.io")  # says nothing of policies
    assert cycle(site)["V100"] == "easy"
    edit(site, "  V100:\n", "  V100:\n    policy: sjf\n")
    (row,) = [
        r for r in site.call("policy", "list", "--json").json if r["partition"] == "V100" and r["state"] == "live"
    ]
    assert row["name"] == "sjf"
    assert row["note"] == "inventory.yaml was edited after the promotion of easy and overrides it"
    found = examine_policies(load_inventory(site.inventory), site.state)
    assert [f.status for f in found if "edited after the promotion of easy" in f.message] == ["warn"]
    assert cycle(site)["V100"] == "sjf"
    last = site.call("policy", "history", "--json").json[-1]
    assert (last["act"], last["user"], last["from_name"], last["name"]) == ("inventory", None, "easy", "sjf")
    # back to what the file said before: the promotion is over all the same
    edit(site, "    policy: sjf\n", "")
    assert cycle(site)["V100"] == "fifo"


def test_a_changed_policy_file_is_a_change(site: Site) -> None:
    (site.folder / "policies").mkdir()
    (site.folder / "policies/mine.yaml").write_text("order: fifo\n")
    edit(site, "  V100:\n", "  V100:\n    policy: mine\n")
    cycle(site)
    (site.folder / "policies/mine.yaml").write_text("order: sjf\n")
    cycle(site)
    last = site.call("policy", "history", "-p", "V100", "--json").json[-1]
    assert (last["act"], last["reason"], last["from_name"]) == ("files", "the files of mine changed", "mine")
    assert last["from_version"] != last["version"]


def test_policies_are_compared_on_history_and_on_a_trace(proved: Site) -> None:
    found = proved.call("policy", "compare", "fifo", "easy", "--since", "30d", "--json").json
    (verdict,) = found
    assert (verdict["partition"], verdict["incumbent"], verdict["candidate"]) == ("V100", "fifo", "easy")
    assert verdict["candidate_mean_jct_s"] < verdict["incumbent_mean_jct_s"]
    said = proved.call("policy", "compare", "fifo", "easy", "-p", "V100").ok().out
    assert "V100: easy against fifo on 24 jobs of 8 days: mean JCT -" in said
    lines = [f"{i} {i * 100} -1 {1000 if i % 2 else 50} 4 -1 -1 4 2000 -1 1 1 1 1 1 1 -1 -1" for i in range(40)]
    (proved.folder / "log.swf").write_text("\n".join(lines) + "\n")
    (other,) = proved.call("policy", "compare", "fifo", "sjf", "--trace", "log.swf", "--json").json
    assert (other["partition"], other["jobs"], other["since"]) == ("default", 40, None)
    assert proved.call("policy", "compare", "fifo", "easy", "--trace", "log.swf", "--since", "3d").code == 2
    assert proved.call("policy", "compare", "fifo", "easy", "-p", "A100").code == 1


def test_only_admins_change_the_active_policy(site: Site) -> None:
    cycle(site)
    command = Promote(
        time=0.0, partition="V100", path=str(site.folder / "p.yaml"), version="x", reason="me", forced=True
    )  # fmt: skip
    (site.folder / "p.yaml").write_text("order: sjf\n")
    before = set((site.state / "inbox/new").iterdir())
    from gpusched.queue.inbox import Inbox

    Inbox(site.state).deliver(command)
    (path,) = set((site.state / "inbox/new").iterdir()) - before
    if os.getuid() == 0:
        os.chown(path, 65534, -1)
        assert cycle(site)["V100"] == "fifo"
        assert "only admins may promote (settings.admins" in _refusals(site)
        Inbox(site.state).deliver(command)
    assert cycle(site)["V100"] == "fifo"
    assert "was x: it has changed" in _refusals(site)


def _refusals(site: Site) -> str:
    store = Store.create_or_open(site.state)
    found = " ".join(str(e.data["why"]) for e in store.events() if e.kind == "refused_command")
    store.close()
    return found


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "esay"), 2, "no policy named 'esay'; did you mean 'easy'?"),
        (("promote", "easy", "-p", "V10"), 2, "there is no partition 'V10'; did you mean 'V100'?"),
        (("promote", "easy", "--force", "  "), 2, "--force must be one line of text"),
        (("promote", "gist"), 1, "gist has no weights for any partition; train it"),
        (("promote", "gist", "-p", "V100", "--force", "x"), 1, "no weights for V100"),
        (("rollback",), 1, "no policy was promoted"),
        (("shadow",), 2, "no policy given"),
        (("shadow", "--off"), 1, "no shadow policy"),
        (("history", "-p", "nowhere"), 2, "there is no partition 'nowhere'"),
        (("compare", "fifo", "easy"), 1, "no history yet"),
    ],
)
def test_wrong_requests_are_one_line(site: Site, words: tuple[str, ...], code: int, said: str) -> None:
    result = site.call("policy", *words)
    assert (result.code, result.err.count("\n")) == (code, 1)
    assert said in result.err
    assert said in site.call("policy", *words, "--json").json["error"]
    assert site.commands() == []


def test_list_and_show_without_a_store(site: Site) -> None:
    found = site.call("policy", "list", "--json").json
    keys = {"name", "partition", "state", "agent", "trained_at", "trace_sha256", "verdict"}
    assert all(keys <= set(row) for row in found)
    assert {(r["name"], r["state"]) for r in found if r["partition"]} == {("fifo", "live")}
    gist = next(r for r in found if r["name"] == "gist")
    assert (gist["state"], gist["agent"], gist["note"]) == ("candidate", "gist", "untrained: gpusched train")
    assert "untrained: no weights, so its fallback decides" in site.call("policy", "show", "gist").ok().out
    page = site.call("policy", "show", "easy", "--json").json
    assert (page["backfill"], page["live"], page["cards"]) == ("easy", [], {})
    assert "decides by: order fifo, place best-fit, backfill easy" in site.call("policy", "show", "easy").ok().out
    assert "live in: A100, V100, bare" in site.call("policy", "show", "fifo").ok().out


def test_weights_that_come_along_are_there_on_the_first_day_and_give_way_to_own_ones(site: Site) -> None:
    """A fresh installation: no state, no policies of its own, nothing trained."""
    note = "trained on public traces (8 clusters of philly_2017.csv.gz), not on this cluster's jobs"

    def row(name: str) -> dict[str, str | None]:
        (found,) = [r for r in site.call("policy", "list", "--json").json if r["name"] == name]
        return found

    included = row("rltune")
    assert (included["state"], included["partition"], included["note"]) == ("candidate", None, f"built-in; {note}")
    assert row("rltune-limit")["note"] == "untrained: gpusched train"
    assert "public traces, not this cluster's jobs" in done(site.call("policy", "show", "rltune")).out
    asked = done(site.call("policy", "shadow", "rltune", "--json")).json
    assert (asked["partitions"], asked["version"]) == (["A100", "V100", "bare"], included["version"])
    cycle(site)
    shadows = [r for r in site.call("policy", "list", "--json").json if r["state"] == "shadow"]
    assert {r["partition"] for r in shadows} == {"A100", "V100", "bare"}
    assert all(r["note"].endswith(note) and r["fallback"] is None for r in shadows)
    own = site.inventory.parent / "policies/rltune"
    own.mkdir(parents=True)
    shutil.copyfile(BUILT_IN / "rltune.yaml", own / "policy.yaml")
    model = load_model(BUILT_IN / "rltune", "V100", "rltune")
    save_model(own / "V100.safetensors", "rltune", model.arrays, {"knows": "estimate"})
    (ours,) = [
        r for r in site.call("policy", "list", "--json").json if (r["name"], r["state"]) == ("rltune", "candidate")
    ]
    assert (ours["partition"], ours["note"], ours["path"]) == ("V100", "site", str(own))
    assert ours["version"] != included["version"]



def test_an_agent_that_chooses_nodes_is_shown(site: Site) -> None:
    folder = site.inventory.parent / "policies"
    (folder / "racks").mkdir(parents=True)
    (folder / "racks.yaml").write_text("agent: topology\nschedulers: 4\n")
    row = next(r for r in site.call("policy", "list", "--json").json if r["name"] == "racks")
    assert (row["agent"], row["note"]) == ("topology", "untrained: gpusched train")
    said = site.call("policy", "show", "racks").ok().out
    assert "nodes of 4 schedulers chosen by agent topology, within 0.2 s, else contention" in said
    assert site.call("policy", "show", "racks", "--json").json["schedulers"] == 4
    save_model(folder / "racks/default.safetensors", "topology", to_arrays(untrained(0), SHAPES))
    assert "untrained: the rule of contention" in site.call("policy", "show", "racks").ok().out
    edit(site, "  V100:\n", "  V100:\n    policy: racks\n")
    words = ("submit", "--dry-run", "--flavor", "s-V100", "--", "x")
    assert "would wait: ReqNodeNotAvail: " in done(site.call(*words)).out, "no controller has seen the nodes"


def test_a_mode_is_for_slurm(proved: Site) -> None:
    refused = proved.call("policy", "promote", "easy", "-p", "V100", "--mode", "decide", "--force", "try")
    assert refused.code == 2
    assert "--mode needs engine: slurm in inventory.yaml; omit it" in refused.err
    row = next(r for r in proved.call("policy", "list", "--json").json if r["state"] == "live")
    assert "mode" not in row


def test_slurm_is_advised_and_decided_for_by_proof_only(proved: Site) -> None:
    """A mode is compared with Slurm itself while Slurm decides; `easy` stands for it."""
    proved.inventory.write_text("engine: slurm\n" + proved.inventory.read_text())
    cycle(proved)
    refused = proved.call("policy", "promote", "fifo", "-p", "V100", "--mode", "decide")
    assert "not promoted: V100: fifo against easy on 24 jobs of 8 days: mean JCT +" in refused.err
    asked = done(proved.call("policy", "promote", "easy", "-p", "V100", "--mode", "advise"))
    assert "mean JCT 0.0% (95 % interval 0.0% to 0.0%): no worse" in asked.out
    assert "promote requested: easy in V100, mode advise" in asked.out
    assert cycle(proved)["V100"] == "easy"
    more = done(proved.call("policy", "promote", "easy", "-p", "V100", "--mode", "decide", "--json")).json
    assert (more["mode"], len(more["verdicts"])) == ("decide", 1), "to do more needs proof again"
    cycle(proved)
    again = proved.call("policy", "promote", "easy", "-p", "V100", "--mode", "decide")
    assert "is already live in V100" in again.err
    (row,) = [
        r for r in proved.call("policy", "list", "--json").json if (r["state"], r["partition"]) == ("live", "V100")
    ]
    assert row["mode"] == "decide"
    assert "live, decide" in proved.call("policy", "list").out
    assert "live in: V100 (decide)" in proved.call("policy", "show", "easy").out
    assert proved.call("policy", "show", "easy", "--json").json["modes"] == {"V100": "decide"}
    less = done(proved.call("policy", "promote", "easy", "-p", "V100", "--mode", "observe"))
    assert "%" not in less.out, "to do less needs none"
    cycle(proved)
    done(proved.call("policy", "rollback", "-p", "V100"))
    cycle(proved)
    back = proved.call("policy", "rollback", "-p", "V100", "--json").json
    assert "scontrol update ReservationName=gpusched EndTime=now+1" in back["hint"]
    changes = proved.call("policy", "history", "-p", "V100", "--json").json
    assert [c["mode"] for c in changes] == ["observe", "advise", "decide", "observe", "decide"]
    assert changes[3]["reason"] == "observe instead of decide"
    assert f"easy {changes[-1]['version']}, decide" in proved.call("policy", "history").out
