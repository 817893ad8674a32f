"""``gpusched install --shared`` into an image of a system, by the command line."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from gpusched.model.commands import RecordAudit
from gpusched.model.jobs import JobState
from gpusched.queue.inbox import Inbox, ReceivedCommand
from gpusched.queue.store import DATABASE, NewerStore, Store
from tests import builders, commands

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("useradd") is None, reason="needs root and useradd (Debian: passwd)"
)
STATE, UNIT = Path("var/lib/gpusched"), Path("etc/systemd/system/gpusched.service")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group", "shadow", "gshadow"):
        (tmp_path / "etc" / name).write_text("root:x:0:0::/root:/bin/sh\n" if name == "passwd" else "")
    return tmp_path


def gpusched(image: Path, *words: str) -> tuple[int, str]:
    command, *rest = words
    done = commands.run(command, "--shared", "--prefix", str(image), *rest)
    return done.returncode, done.stdout + done.stderr


def everything(image: Path) -> dict[str, tuple[int, int, int, float]]:
    found = {str(p): p.lstat() for p in image.rglob("*")}
    return {name: (s.st_mode, s.st_uid, s.st_gid, s.st_mtime) for name, s in found.items()}


def add_job(image: Path, state: JobState) -> None:
    store = Store.create_or_open(image / STATE)
    with store.transaction():
        store.put_jobs([builders.job(state=state)])
    store.close()


def test_it_makes_an_inbox_that_users_write_and_cannot_read(image: Path) -> None:
    code, said = gpusched(image, "install")
    assert code == 0, said
    name, _, uid, gid, _, home, shell = next(
        line.split(":") for line in (image / "etc/passwd").read_text().splitlines() if line.startswith("gpusched:")
    )
    assert (name, home, shell) == ("gpusched", "/var/lib/gpusched", "/usr/sbin/nologin")
    for folder, mode in (("", 0o755), ("inbox/new", 0o3733), ("inbox/tmp", 0o3733), (".ssh", 0o700)):
        found = (image / STATE / folder).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, int(uid), int(gid)), folder
    nobody = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps", "-all")
    for folder in (p for p in (image, *image.parents) if not p.stat().st_mode & 1):
        folder.chmod(folder.stat().st_mode | 1)
    asked = subprocess.run(
        [*nobody, "sh", "-c", f"cd {image / STATE}/inbox/new && umask 077 && echo x >mine && ! ls . 2>&-"], check=False
    )
    assert asked.returncode == 0
    assert (image / STATE / "inbox/new/mine").stat().st_gid == int(gid)  # the controller reads it by its group


def test_a_second_run_and_a_dry_run_change_nothing(image: Path) -> None:
    before = everything(image)
    code, said = gpusched(image, "install", "--dry-run")
    assert (code, everything(image)) == (0, before)
    assert "would system user gpusched" in said
    gpusched(image, "install")
    before = everything(image)
    code, said = gpusched(image, "install")
    assert (code, everything(image)) == (0, before)
    assert all(line.startswith("      ") for line in said.splitlines()), said
    modes = {p: p.stat().st_ctime_ns for p in (image / STATE).rglob("*")}
    Inbox(image / STATE).create(shared=True)  # as the controller does, whose unit must not set setgid bits
    assert {p: p.stat().st_ctime_ns for p in (image / STATE).rglob("*")} == modes


def test_files_that_an_administrator_changed_are_kept(image: Path) -> None:
    gpusched(image, "install")
    unit = image / UNIT
    assert f"\nRestartPreventExitStatus={NewerStore.exit_code}\n" in unit.read_text()
    theirs = unit.read_text().replace("RestartSec=5", "RestartSec=9")
    unit.write_text(theirs)
    code, said = gpusched(image, "install")
    assert (code, unit.read_text()) == (0, theirs)
    assert "changed by hand" in said
    assert "RestartSec=5" in unit.with_name("gpusched.service.gpusched-new").read_text()
    older = "d /var/lib/gpusched 0755 gpusched gpusched -\n"
    stamp = hashlib.sha256(older.encode()).hexdigest()[:16]
    tmpfiles = image / "etc/tmpfiles.d/gpusched.conf"
    ours = tmpfiles.read_text()
    tmpfiles.write_text(f"# Written by 'gpusched install' ({stamp}); of an older version.\n{older}")
    code, said = gpusched(image, "install")
    assert (code, tmpfiles.read_text()) == (0, ours)
    assert "of another version: replaced" in said


def test_an_installation_is_not_moved_by_another_options(image: Path) -> None:
    gpusched(image, "install")
    for words in (("--user", "other"), ("--state", "/srv/queue")):
        before = everything(image)
        code, said = gpusched(image, "install", *words)
        assert (code, everything(image)) == (2, before)
        assert "an installation with the user gpusched and the state /var/lib/gpusched is there" in said
    gpusched(image, "uninstall")
    before = everything(image)
    code, said = gpusched(image, "install", "--state", "/srv/queue")
    assert (code, everything(image)) == (1, before)
    assert "cannot lead to /srv/queue" in said


def test_another_state_folder_is_found_by_all_commands(image: Path) -> None:
    code, said = gpusched(image, "install", "--state", "/srv/queue", "--user", "sched")
    assert code == 0, said
    assert os.readlink(image / STATE) == "/srv/queue"
    assert re.search(r"^ReadWritePaths=/srv/queue ", (image / UNIT).read_text(), re.MULTILINE)
    assert "User=sched\n" in (image / UNIT).read_text()
    code, said = gpusched(image, "uninstall", "--purge")
    assert code == 0, said
    assert not os.path.lexists(image / STATE)
    assert not (image / "srv/queue").exists()
    assert "sched:" not in (image / "etc/passwd").read_text()


def test_a_removal_that_failed_halfway_is_finished_by_another(image: Path) -> None:
    gpusched(image, "install", "--state", "/srv/queue", "--user", "sched")
    etc = image / "etc/gpusched"
    shutil.rmtree(etc)
    etc.write_text("not a folder")
    code, said = gpusched(image, "uninstall", "--purge")
    assert (code, "Not a directory" in said) == (1, True)
    etc.unlink()
    (image / "srv/queue").mkdir()
    code, said = gpusched(image, "uninstall", "--purge")
    assert code == 0, said
    assert not (image / "srv/queue").exists()
    assert "sched:" not in (image / "etc/passwd").read_text()
    assert not list((image / "etc/sysusers.d").iterdir())


def test_a_folder_with_other_data_is_refused(image: Path) -> None:
    """It became the controller's, and --purge removed all of it."""
    (image / "srv/projects").mkdir(parents=True)
    (image / "srv/.ssh").mkdir()
    before = everything(image)
    code, said = gpusched(image, "install", "--state", "/srv")
    assert (code, everything(image)) == (2, before)
    assert "--state /srv: projects is already there; use /srv/gpusched" in said
    (image / "srv/projects").rmdir()
    assert gpusched(image, "install", "--state", "/srv")[0] == 0
    assert gpusched(image, "install", "--state", "/srv")[0] == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze (Debian: systemd)")
def test_the_units_exposure_is_below_two(image: Path) -> None:
    gpusched(image, "install")
    words = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(image / UNIT)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    exposure = re.search(r"Overall exposure level for gpusched.service: ([0-9.]+)", done.stdout)
    assert exposure, done.stdout
    assert float(exposure[1]) < 2.0
    text = re.sub(r"(?m)^ExecStart=.*", "ExecStart=/bin/true", (image / UNIT).read_text())
    (image / UNIT).write_text(text.replace("=gpusched\n", "=root\n"))
    done = subprocess.run(["systemd-analyze", "verify", str(image / UNIT)], capture_output=True, text=True, check=False)
    assert (done.returncode, "Unknown" in done.stderr) == (0, False), done.stderr
    assert "PrivateUsers=" not in re.sub(r"(?m)^#.*", "", (image / UNIT).read_text())  # would hide who asked


def test_removal_keeps_the_data_and_refuses_while_jobs_run(image: Path) -> None:
    gpusched(image, "install")
    add_job(image, JobState.RUNNING)
    code, said = gpusched(image, "uninstall", "--purge")
    assert code == 1
    assert "1 job on nodes would run on without a controller" in said
    assert (image / UNIT).exists()
    add_job(image, JobState.COMPLETED)
    code, said = gpusched(image, "uninstall")
    assert code == 0, said
    assert not (image / UNIT).exists()
    assert (image / STATE / DATABASE).exists()
    add_job(image, JobState.RUNNING)
    code, said = gpusched(image, "uninstall", "--purge", "--force")
    assert code == 0, said
    assert not (image / STATE).exists()
    assert "gpusched" not in (image / "etc/passwd").read_text()


def test_changes_and_refusals_are_in_the_audit_log(image: Path) -> None:
    def recorded() -> list[tuple[str, str]]:
        found = [one.command for one in Inbox(image / "srv/queue").waiting() if isinstance(one, ReceivedCommand)]
        return [(one.action, one.refused) for one in found if isinstance(one, RecordAudit)]

    where = ("--state", "/srv/queue")
    gpusched(image, "install", *where)
    assert recorded() == [("install", "")]
    gpusched(image, "install", *where)  # which changes nothing
    gpusched(image, "install", *where, "--user", "root")
    gpusched(image, "uninstall", "--dry-run")
    store = Store.create_or_open(image / "srv/queue")
    store.put_jobs([builders.job(state=JobState.RUNNING)])
    store.close()
    gpusched(image, "uninstall")
    gpusched(image, "uninstall", "--force")
    (install, (refused, why), (uninstall, _)) = recorded()
    assert (install, refused, uninstall) == (("install", ""), "uninstall", "uninstall")
    assert "1 job on nodes" in why


def test_links_of_the_controllers_user_lead_root_nowhere(image: Path, tmp_path: Path) -> None:
    gpusched(image, "install")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (image / STATE / ".ssh").rmdir()
    (image / STATE / ".ssh").symlink_to(elsewhere)
    code, said = gpusched(image, "install")
    assert code == 1
    assert "is not a folder" in said
    assert elsewhere.stat().st_uid == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--user", "root"), "--user root: not the name of a system user"),
        (("--user", "a b"), "not the name"),
        (("--state", "here"), "not an absolute path"),
        (("--state", "/a b"), "not an absolute path without spaces"),
    ],
)
def test_bad_names_are_refused_before_anything_is_done(image: Path, words: tuple[str, ...], said: str) -> None:
    before = everything(image)
    code, text = gpusched(image, "install", *words)
    assert (code, everything(image)) == (2, before)
    assert said in text
    assert len(text.splitlines()) == 1
