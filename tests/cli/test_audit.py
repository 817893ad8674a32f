"""``gpusched audit``: actions, their users, and decisions of policies."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusched.config.policies import BUILT_IN, load_policy
from gpusched.model.commands import Cancel, Promote, RecordAudit
from gpusched.model.events import Event
from gpusched.model.jobs import JobState
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from tests.cli.conftest import Site
from tests.controller.rights import needs_root

OTHER = 64007


def lines(site: Site, *words: str) -> list[dict[str, Any]]:
    found = site.call("audit", "--json", *words).ok().json
    assert isinstance(found, list)
    return found


@needs_root
def test_it_shows_who_did_what_and_what_was_refused(site: Site) -> None:
    job = site.submit()
    site.apply_inbox()
    Inbox(site.state).deliver(Cancel(time=time.time(), origin="ssh 203.0.113.7", job_ids=(job,)))
    (file,) = Inbox(site.state).new.iterdir()
    os.chown(file, OTHER, -1)
    site.apply_inbox()
    assert [(e["command"], e["uid"], e["result"]) for e in lines(site)] == [
        ("submit", 0, "applied"), ("cancel", OTHER, "refused"),
    ]  # fmt: skip
    (refused,) = lines(site, "--refused")
    assert (refused["reason"], refused["subject"]) == (f"job {job} belongs to root", [job])
    assert lines(site, "--user", str(OTHER)) == lines(site, "--command", "cancel") == [refused]
    assert lines(site, "--until", "1h") == []
    shown = site.call("audit").ok().out
    assert "203.0.113.7" in shown
    assert f"refused: job {job}" in " ".join(shown.split())


def test_a_hostile_entry_is_escaped(site: Site) -> None:
    record = RecordAudit(time=time.time(), action="exec", subject=("\x1b[2Jx\u202e",), refused="a\nb")
    Inbox(site.state).deliver(record)
    site.apply_inbox()
    shown = site.call("audit").ok().out
    assert "\x1b[2J" not in shown
    assert "\u202e" not in shown
    assert "a\nb" not in shown


def test_recover_records_itself_in_the_folder_that_it_recovered(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a backup, which changes nothing, nor what only looks."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    site.inventory.write_text(
        "partitions:\n  p:\n    defaults: {transport: local, gpus: 0, cores: 1, memory: 1G, runtime: process}\n"
        "    nodes: [here]\n    flavors:\n      one: {gpus: 0, cores: 1, memory: 1G, time: 1h}\n"
    )
    site.apply_inbox()
    words = ("recover", "--inventory", str(site.inventory), "--from", str(tmp_path / "backups"), "-y")
    site.call("backup", "--to", str(tmp_path / "backups")).ok()
    assert site.call(*words).code == 1
    assert site.call(*words, "--dry-run").code == 1
    (refused,) = site.commands()
    assert isinstance(refused, RecordAudit)
    assert (refused.action, "nothing to recover" in refused.refused) == ("recover", True)
    shutil.rmtree(site.state)
    assert site.call(*words, "--dry-run").code == 0
    assert site.call(*words).code == 0
    assert [(one.action, one.refused) for one in site.commands()] == [("recover", "")]
    site.apply_inbox()
    assert [(e["command"], e["result"]) for e in lines(site)] == [("recover", "applied")]


@pytest.mark.parametrize(("words", "code", "says"), [
    (("--since", "soon"), 2, "neither a time nor a span"),
    (("--policy", "x", "--refused"), 2, "--policy goes with --since and --until only"),
    (("--policy", "x"), 1, "policy 'x' was never active here"),
])  # fmt: skip
def test_errors_of_the_audit_command(site: Site, words: tuple[str, ...], code: int, says: str) -> None:
    site.apply_inbox()
    done = site.call("audit", *words)
    assert done.code == code
    assert says in done.err
    assert done.err.count("\n") == 1


def test_a_promotion_names_its_policy_and_what_it_decided(site: Site) -> None:
    path = BUILT_IN / "sjf.yaml"
    version = load_policy(path).version
    job = site.submit()
    site.apply_inbox()
    promote = Promote(
        time=time.time(), partition="V100", path=str(path), version=version, reason="better", forced=True
    )
    Inbox(site.state).deliver(promote)
    site.apply_inbox()
    (entry,) = lines(site, "--command", "promote")
    assert (entry["data"]["policy"], entry["data"]["version"], entry["data"]["forced"]) == ("sjf", version, True)
    store, now = Store.create_or_open(site.state), time.time() + 1
    for name, at in (("sjf", now), ("fifo", now), ("sjf", now - 3600)):
        data = {"policy": name, "nodes": {"dgx-1v-1": [0]}}
        store.append([Event(time=at, kind="starting", job_id=job, data=data)])
    store.put_jobs([msgspec.structs.replace(store.jobs()[0], state=JobState.RUNNING)])
    store.close()
    (period,) = site.call("audit", "--json", "--policy", "sjf").ok().json
    assert (period["partition"], period["act"], period["until"], period["count"]) == ("V100", "promote", None, 1)
    assert (period["starts"][0]["job"], period["starts"][0]["nodes"]) == (job, ["dgx-1v-1"])
    assert job in site.call("audit", "--policy", version).ok().out
