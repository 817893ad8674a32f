"""Arrays whose tasks share a row, chains and dependencies between tasks, as a user asks for them."""

from __future__ import annotations

import pytest

from gpusched.model.commands import Hold
from gpusched.model.jobs import Dependency, DependencyKind, JobState
from tests.cli.conftest import Site

ASKED = ("-F", "one", "--", "x")


def listed(site: Site, *words: str) -> dict[str, str]:
    """Return id -> state, or who holds it, of the jobs that ``status`` lists."""
    return {j["id"]: j["held_by"] or j["state"] for j in site.call("status", *words, "--json").ok().json}


def test_a_hundred_thousand_tasks_are_one_line(site: Site) -> None:
    array = site.submit("--array", "0-99999%8", *ASKED)
    for _ in range(2):  # in the inbox, then in the store
        head, *_, row = site.call("status").out.splitlines()
        assert head == "100000 PENDING"
        assert f"{array}_[0-99999]" in row
        assert "PENDING [0-99999] (100000)" in site.call("show", array).ok().out
        assert site.call("show", "--json", f"{array}_77777").ok().json["array_index"] == 77777
        site.apply_inbox()
    events = site.call("show", "--json", f"{array}_77777").json["events"]
    assert [event["kind"] for event in events] == ["submitted"]
    site.start(f"{array}_0")
    assert listed(site) == {f"{array}_0": "RUNNING", f"{array}_[1-99999]": "PENDING"}
    site.call("cancel", array).ok()
    site.apply_inbox()
    assert listed(site) == {f"{array}_0": "COMPLETING", f"{array}_[1-99999]": "CANCELLED"}
    assert "99999 CANCELLED" in site.call("status").out


def test_commands_take_some_of_the_tasks(site: Site) -> None:
    array = site.submit("--array", "0-99", *ASKED)
    site.apply_inbox()
    site.call("hold", f"{array[:9]}_[10-12,20]").ok()
    assert [c.job_ids for c in site.commands() if isinstance(c, Hold)] == [(f"{array}_[10-12,20]",)]
    site.apply_inbox()
    assert listed(site) == {f"{array}_[0-9,13-19,21-99]": "PENDING", f"{array}_[10-12,20]": "user"}
    assert listed(site, f"{array}_[9-10]") == {f"{array}_9": "PENDING", f"{array}_10": "user"}
    half = site.call("release", f"{array}_[5-11]").err
    assert "skipped 5 of 7 tasks" in half
    assert "is not held" in half
    site.call("priority", f"{array}_[90-99]", "-3").ok()
    site.call("cancel", f"{array}_[0-4]", f"{array}_50").ok()
    site.apply_inbox()
    assert listed(site) == {
        f"{array}_[0-4]": "CANCELLED",
        f"{array}_50": "CANCELLED",
        f"{array}_[5-9,13-19,21-49,51-89]": "PENDING",
        f"{array}_[10-11]": "PENDING",
        f"{array}_[12,20]": "user",
        f"{array}_[90-99]": "PENDING",
    }
    site.call("requeue", f"{array}_[3-4]").ok()
    site.apply_inbox()
    assert listed(site, f"{array}_[2-4]") == {f"{array}_2": "CANCELLED", f"{array}_[3-4]": "PENDING"}


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("_[3", "is not a job id"),
        ("_[]", "is not a job id"),
        ("_[9-3]", "is not a job id"),
        ("_[3-5", "is not a job id"),
        ("_[10-20]", "has no task 10-20"),
        ("_10", "has no task 10"),
    ],
)
def test_tasks_that_are_not_there(site: Site, task: str, said: str) -> None:
    array = site.submit("--array", "0-9", *ASKED)
    site.apply_inbox()
    for command in ("cancel", "show", "why", "hold"):
        done = site.call(command, array + task)
        assert (done.code, said in done.err) == (2, True), done.err
    assert site.commands() == []


def test_cancelling_all_of_a_user_counts_tasks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpusched.cli import output

    asked = []
    monkeypatch.setattr(output, "confirm", lambda text, yes: asked.append(text) or True)
    array = site.submit("--array", "0-999", *ASKED)
    site.apply_inbox()
    site.call("hold", f"{array}_[5-7]").ok()
    site.apply_inbox()
    site.call("cancel", "-s", "pending").ok()
    assert asked == ["cancel 1,000 jobs"]
    site.apply_inbox()
    assert site.call("status").out.splitlines()[0] == "1000 CANCELLED"


def test_dependencies_between_tasks_and_by_name(site: Site) -> None:
    array = site.submit("--array", "0-9", *ASKED)
    asked = f"aftercorr:{array},singleton,afterok:{array}_[1,3]:{array}_7"
    site.apply_inbox()
    site.submit("--array", "0-9", "--dependency", asked, *ASKED)
    kinds = DependencyKind
    assert site.only_submit().spec.dependencies == (
        Dependency(kinds.AFTERCORR, array),
        Dependency(kinds.SINGLETON),
        Dependency(kinds.AFTEROK, f"{array}_[1,3]"),
        Dependency(kinds.AFTEROK, f"{array}_7"),
    )
    site.apply_inbox()
    assert site.call("status").out.startswith("20 PENDING")


@pytest.mark.parametrize("text", ["chain", "chain:1", "singleton:1", "aftercorr", "Singleton,"])
def test_dependencies_that_cannot_be(site: Site, text: str) -> None:
    done = site.call("submit", "--dependency", text, *ASKED)
    assert done.code == 2
    assert done.err.count("\n") <= 2
    assert site.commands() == []


def test_a_chain_is_links_one_after_the_other(site: Site) -> None:
    chain = site.submit("--chain", "4", *ASKED)
    asked = site.only_submit()
    assert (asked.array, asked.max_running) == ((1, 2, 3, 4), 1)
    assert asked.spec.dependencies == (Dependency(DependencyKind.CHAIN),)
    site.apply_inbox()
    assert listed(site) == {f"{chain}_[1-4]": "PENDING"}
    site.start(f"{chain}_1")
    why = site.call("why", "--json", f"{chain}_2").ok().json
    assert (why["reason"], f"{chain}_1 (RUNNING)" in why["message"]) == ("Dependency", True)
    assert "link 1; the next starts when it ends or reaches its time limit" in site.call("show", f"{chain}_1").ok().out
    site.end(f"{chain}_1", JobState.TIMEOUT, None, "TimeLimit")
    assert site.call("why", "--json", f"{chain}_2").ok().json["reason"] != "Dependency"
    assert site.call("why", "--json", f"{chain}_3").ok().json["reason"] == "Dependency"
    site.change(f"{chain}_1", state=JobState.FAILED)
    assert site.call("why", "--json", chain).ok().json["reason"] == "DependencyNeverSatisfied"
    assert f"waits for job {chain}_3" in site.call("why", "--json", f"{chain}_4").ok().json["message"]
    assert "skipped 1 of 4 tasks" in site.call("cancel", chain).err
    site.apply_inbox()
    assert listed(site)[f"{chain}_[2-4]"] == "CANCELLED"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--chain", "1"), "--chain: 2 to 1000 jobs, found 1"),
        (("--chain", "1001"), "--chain: 2 to 1000 jobs, found 1001"),
        (("--chain", "3", "--array", "0-3"), "use one of them"),
    ],
)
def test_chains_that_cannot_be(site: Site, options: tuple[str, ...], said: str) -> None:
    done = site.call("submit", *options, *ASKED)
    assert (done.code, said in done.err) == (2, True), done.err
