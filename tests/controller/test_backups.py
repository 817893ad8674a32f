"""The controller's backups: when they are made, and what is reported of failed ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusched.client import backups as client_backups
from gpusched.client.backups import listed_backups
from gpusched.client.context import Client
from gpusched.client.metrics import collect
from gpusched.controller.backups import RETRY_S, BackupRunner
from gpusched.controller.notices.making import NoticeMaker
from gpusched.doctor.state import examine_state
from gpusched.model.backups import BACKUP_META, backup_result, backup_trouble
from gpusched.model.notices import Notices, Receiver
from gpusched.model.resources import BackupSettings
from gpusched.queue.backup import backups, check_backup
from gpusched.queue.store import Store

NOW, HOUR = 1_800_000_000.0, 3600.0


class Runner:
    def __init__(self, folder: Path) -> None:
        self.store, self.state, self.to = Store.create_or_open(folder / "state"), folder / "state", folder / "backups"
        self.runner = BackupRunner(self.store, self.state, folder / "inventory.yaml")
        self.settings = BackupSettings(to=str(self.to))

    def step(self, now: float, **other: str) -> int:
        """A cycle, and the end of its backup; return how many backups there are."""
        settings = BackupSettings(**other) if other else self.settings
        self.runner.step(settings, now)
        self.runner.finish(settings, now)
        return len(backups(self.to))

    def trouble(self, now: float) -> str:
        return backup_trouble(backup_result(self.store.meta(BACKUP_META)), now)

    def metric(self, name: str) -> float:
        return next(f.samples[0][1] for f in collect(self.store) if f.metric.name == f"gpusched_{name}")

    def restart(self) -> None:
        self.runner = BackupRunner(self.store, self.state, Path("inventory.yaml"))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Runner]:
    site = Runner(tmp_path)
    yield site
    site.runner.close()
    site.store.close()


def test_one_backup_per_interval_also_after_a_restart(site: Runner) -> None:
    assert site.step(NOW) == 1
    assert site.step(NOW + HOUR - 1) == 1
    site.restart()
    assert site.step(NOW + HOUR - 1) == 1
    assert site.step(NOW + HOUR) == 2
    assert site.metric("backup_last_success_timestamp_seconds") == NOW + HOUR
    assert site.trouble(NOW + HOUR) == ""
    assert "overdue" in site.trouble(NOW + 5 * HOUR)


def test_a_failure_is_reported_once_and_tried_again_soon(site: Runner) -> None:
    site.to.write_text("not a folder")
    assert site.step(NOW) == 0
    assert "last backup failed (there is none yet)" in site.trouble(NOW)
    assert site.metric("backup_failed") == 1
    site.step(NOW + RETRY_S)
    site.to.unlink()
    assert site.step(NOW + RETRY_S + 1) == 0, "not yet"
    assert site.step(NOW + 2 * RETRY_S) == 1
    assert site.trouble(NOW + 2 * RETRY_S) == ""
    assert site.metric("backup_failed") == 0
    found = site.store.events()
    assert [event.kind for event in found] == ["backup_failed", "backup_succeeded"]
    operator = Notices(to=(Receiver(webhook="http://a"), Receiver(webhook="http://b", users=("alice",))))
    notices = list(NoticeMaker(site.store, operator, "c", NOW).of_event(found[0]))
    assert [notice.body["text"].split(":")[0] for notice in notices] == ["backup failed"], "of users none"


def test_it_is_recorded_for_the_folder_that_it_was_made_in(site: Runner, tmp_path: Path) -> None:
    other = BackupSettings(to=str(tmp_path / "other"))
    site.runner.step(site.settings, NOW)  # and `to` is changed while it is made
    site.runner.finish(other, NOW + 1)
    kept = backup_result(site.store.meta(BACKUP_META))
    assert kept is not None
    assert kept.to == str(site.to)
    site.runner.finish(other, NOW + 2)  # the new folder's, which was due at once
    kept = backup_result(site.store.meta(BACKUP_META))
    assert kept is not None
    assert (kept.to, len(backups(Path(other.to)))) == (other.to, 1)


def test_check_reports_it(site: Runner) -> None:
    def findings() -> list[str]:
        return [f.status for f in examine_state(site.state, 5, NOW) if f.check == "backup"]

    assert findings() == []
    site.step(NOW)
    assert findings() == ["ok"]
    site.step(NOW + 1, to="/dev/null/x")
    assert findings() == ["warn"], "another folder is tried at once"
    site.step(NOW + HOUR, to="")
    assert findings() == []


def test_a_backup_rotated_away_during_its_check_is_not_bad(
    site: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.step(NOW)
    site.step(NOW + HOUR)
    first, second = backups(site.to)

    def check(path: Path) -> str:
        if path == first.path:
            shutil.rmtree(path)
        return check_backup(path)

    monkeypatch.setattr(client_backups, "check_backup", check)
    (site.to.parent / "inventory.yaml").write_text(
        "partitions: {p: {defaults: {gpus: 1, cores: 1, memory: 1G, runtime: process}, nodes: [n]}}"
    )
    monkeypatch.setenv("GPUSCHED_INVENTORY", str(site.to.parent))
    assert [(one.name, one.error) for one in listed_backups(Client(), site.to, check=True)] == [(second.name, "")]
