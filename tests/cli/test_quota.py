"""``gpusched quota``, ``--group`` and ``--qos``, as a user sees them."""

from __future__ import annotations

import os
import re
import time
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from gpusched.config.users import user_name
from gpusched.model.jobs import Allocation, JobState, NodeAllocation
from tests.cli.conftest import INVENTORY, Site

ME = user_name(os.getuid())
LIMITS = f"""\
groups:
  top: {{shares: 2}}
  mine: {{parent: top, members: [{ME}], limits: {{gpus: 4}}}}
  other: {{parent: top, members: [zoe]}}
limits:
  each_user: {{gpus: 6, queued: 2, gpu_hours: 100, time: 30m}}
qos:
  high: {{priority: 100, per_user: {{jobs: 1}}, preemptible: false}}
  theirs: {{users: [zoe]}}
"""


@pytest.fixture
def site(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Site:
    site = Site(tmp_path, capfd)
    site.inventory.write_text(INVENTORY + LIMITS)
    for name, value in site.env.items():
        monkeypatch.setenv(name, value)
    return site


def test_quota_shows_use_of_limits(site: Site) -> None:
    job = site.submit("--gpus", "2", "-p", "V100", "-q", "high", "--", "true")
    site.apply_inbox()
    part = NodeAllocation(rank=0, node="dgx-1v-1", gpus=(0, 1), cores=1, memory_mib=1)
    changed = site.change(job, state=JobState.RUNNING, start_time=time.time(), allocation=Allocation(job, (part,)))
    assert (changed.spec.group, changed.priority, changed.spec.time_limit_s) == ("mine", 100, 1800)
    report = site.call("quota", "--json").ok().json
    rows = {(row["subject"], row["resource"]): row for row in report["rows"]}
    assert {key: (row["used"], row["limit"], row["left"]) for key, row in rows.items()} == {
        (f"user {ME}", "gpus"): (2, 6, 4),
        (f"user {ME}", "queued"): (0, 2, 2),
        (f"user {ME}", "gpu_hours"): (pytest.approx(1, abs=0.1), 100, pytest.approx(99, abs=0.1)),
        (f"user {ME}", "time"): (None, 1800, None),
        ("group mine", "gpus"): (2, 4, 2),
        (f"user {ME} in class high", "jobs"): (1, 1, 0),
    }
    assert rows[f"user {ME} in class high", "jobs"]["frees"] is not None
    assert [one["name"] for one in report["classes"]] == ["high"]
    assert [(one["group"], one["user"], one["place"]) for one in report["shares"]] == [("mine", ME, 2)]
    screen = site.call("quota", "--all")
    assert screen.code == 0
    assert "user zoe" in screen.out
    (full,) = [line for line in screen.out.splitlines() if f"user {ME} in class high" in line]
    assert re.fullmatch(r".* 1 +1 +0 +0:[0-9:]+  QOSMaxJobsPerUserLimit *", full)
    assert "theirs" in screen.out


def run(site: Site, user: str, gpus: tuple[int, ...], profile: str = "", limit: int = 600) -> None:
    job = site.submit("--gpus", "1", "-p", "V100", "--", "true")
    site.apply_inbox()
    part = NodeAllocation(rank=0, node="dgx-1v-1", gpus=gpus, cores=1, memory_mib=1)
    holds = {"start_time": time.time(), "allocation": Allocation(job, (part,))}
    started = site.change(job, state=JobState.RUNNING, user=user, **holds)
    asked = {"profile": profile, "gpus_per_node": len(gpus), "group": "", "time_limit_s": limit}
    site.change(job, spec=msgspec.structs.replace(started.spec, **asked))


@pytest.mark.parametrize(
    ("own", "others"),
    [([((0, 1, 2), "1g.10gb")], (7,)), ([((0, 1, 2), ""), ((0, 1, 2), "")], (4, 5, 6, 7))],
    ids=["three sevenths of a GPU are less than one", "of GPUs that two share each has half"],
)
def test_ranks_count_parts_of_gpus_as_live(
    site: Site, own: list[tuple[tuple[int, ...], str]], others: tuple[int, ...]
) -> None:
    for gpus, profile in own:
        run(site, ME, gpus, profile)
    run(site, "zoe", others)
    report = site.call("quota", "--all", "--json").ok().json
    assert [(one["user"], one["place"]) for one in report["shares"]] == [(ME, 1), ("zoe", 2)]


def test_a_limit_frees_when_enough_slices_end(site: Site) -> None:
    site.inventory.write_text(INVENTORY + LIMITS.replace("{gpus: 6,", "{gpus: 1,"))
    for at, limit in enumerate((600, 1200)):
        run(site, ME, (3 * at, 3 * at + 1, 3 * at + 2), "1g.10gb", limit)
    rows = {(row["subject"], row["resource"]): row for row in site.call("quota", "--json").ok().json["rows"]}
    row = rows[f"user {ME}", "gpus"]
    assert row["used"] == pytest.approx(6 / 7)
    left_s = datetime.fromisoformat(row["frees"]).timestamp() - time.time()
    assert left_s > 600, "three slices of seven are not a GPU"


def test_a_job_that_could_never_run_or_wait_is_refused_before_it_is_queued(site: Site) -> None:
    asked = ("-p", "bare", "--gpus")
    for words, says in (
        ((*asked, "8"), "8 GPUs exceed the limit of"),
        ((*asked, "6"), "6 GPUs exceed the limit of group mine (4 at once) (AssocGrpGRES); 'gpusched quota' shows"),
        ((*asked, "1", "-t", "1h"), "exceeds the limit of"),
        ((*asked, "1", "-q", "theirs"), f"{ME} may not use it; {ME} may use: high"),
        ((*asked, "1", "-q", "hihg"), "did you mean 'high'"),
        ((*asked, "1", "-A", "other"), f"{ME} is not a member; {ME} is a member of: mine"),
    ):
        result = site.call("submit", *words, "--", "true")
        assert (result.code, result.err.count("\n")) == (2, 1), words
        assert says in result.err, result.err
    site.submit("-p", "V100", "--gpus", "1", "--array", "0-1", "--", "true")
    site.apply_inbox()
    result = site.call("submit", "-p", "V100", "--gpus", "1", "--", "true")
    assert f"limit of user {ME}: 2 of 2 pending jobs; 1 more" in result.err


def test_users_are_listed_only_in_classes_that_they_may_use(site: Site) -> None:
    text = LIMITS.replace("theirs: {users: [zoe]}", "theirs: {users: [zoe], limits: {gpus: 3}, per_user: {gpus: 1}}")
    site.inventory.write_text(INVENTORY + text)
    found = [row["subject"] for row in site.call("quota", "--all", "--json").ok().json["rows"]]
    assert {subject for subject in found if "class" in subject} == {
        f"user {ME} in class high", "user zoe in class high", "user zoe in class theirs", "class theirs",
    }  # fmt: skip
    # A user who may no longer use the class, but has a job in it, is bounded by it until the job has run.
    job = site.submit("--gpus", "1", "-p", "V100", "-q", "high", "--", "true")
    site.apply_inbox()
    site.start(job)
    site.inventory.write_text(INVENTORY + text.replace("high: {", "high: {users: [zoe], "))
    found = [row["subject"] for row in site.call("quota", "--all", "--json").ok().json["rows"]]
    assert f"user {ME} in class high" in found


def test_only_admins_see_others(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site.call("quota", "-u", "zoe", "--json").ok().json["users"] == ["zoe"]
    assert "there is no user 'nobody-here'" in site.call("quota", "-u", "nobody-here").err
    monkeypatch.setattr("os.getuid", lambda: 12301)
    assert "12301 is not an admin" in site.call("quota", "--all").err
    assert "12301 is not an admin" in site.call("quota", "--user", "zoe").err
    assert site.call("quota", "--json").ok().json["users"] == ["12301"]


def test_without_limits_there_is_nothing_to_tell(site: Site) -> None:
    site.inventory.write_text(INVENTORY)
    assert (
        site.call("quota").out
        == "warning: the controller has not run yet; start it with 'gpusched controller'\nno limits\n"
    )
    assert site.call("quota", "--json").ok().json["rows"] == []
