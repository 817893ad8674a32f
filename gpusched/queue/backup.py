"""Backups of the state folder: made beside its writer, checked by opening them, rotated.

Each is a folder ``<UTC time>`` with the database, ``manifest.json``, and copies of what else cannot be made anew; equal
files of two backups are one file with two names. Collected output, which never changes, is kept once for all: ``logs``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from gpusched import __version__
from gpusched.config.paths import sync_folder, write_atomic
from gpusched.errors import GpuschedError
from gpusched.model.backups import Backup, BackupManifest
from gpusched.model.resources import BackupSettings
from gpusched.queue.audit import FOLDER as AUDIT
from gpusched.queue.audit import old_files
from gpusched.queue.damage import disk_error
from gpusched.queue.inbox import MAX_COMMAND_BYTES
from gpusched.queue.private import create_private
from gpusched.queue.reading import DATABASE, connect
from gpusched.queue.schema import SCHEMA_VERSION

MANIFEST = "manifest.json"
INVENTORY = "inventory.yaml"
INBOX = "inbox/new"
TREES = (INBOX, "policies", "candidates", "reports", "secrets", "programs")
LOGS = "logs"
PAGES_PER_STEP = 256
PAUSE_S = 0.001  # between two steps: readers and the writer of the disk get their turn
DAY_S = 86400.0
NAME = re.compile(r"\d{8}T\d{6}Z")
_OTHER_FOLDER = "choose another folder: --to, or settings.backup.to"
_PART = re.compile(r"\.\d{8}T\d{6}Z\.part")


class BackupStopped(Exception):
    """The backup was abandoned, because its process is to end."""


def make_backup(
    state: Path, settings: BackupSettings, now: float, inventory: Path | None = None, stop: Callable[[], bool] = bool
) -> Backup:
    """Make a backup, check it, and remove those that are no longer kept.

    Args:
        state: The state folder; a controller may be working on it.
        settings: Where it goes, and how many are kept.
        now: Unix seconds.
        inventory: inventory.yaml, to be copied, too.
        stop: Returns whether to abandon it.

    Raises:
        GpuschedError: It could not be made, or is not sound; earlier ones are left as they are.
        BackupStopped: It was abandoned.
    """
    refuse_as_root(state)
    target = Path(settings.to)
    try:
        target.mkdir(parents=True, exist_ok=True, mode=0o700)
        if target.stat().st_mode & stat.S_IWOTH:
            raise GpuschedError(f"all users can write to {target}, and so plant backups", f"chmod o-w {target}")
        with _lock(target):
            _remove_parts(target)
            earlier = backups(target)
            before = earlier[-1].path if earlier else None
            name = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
            part = target / f".{name}.part"
            if (target / name).exists():
                raise GpuschedError(f"{target / name} exists", "two backups within a second, or the clock was set back")
            try:
                part.mkdir(mode=0o700)
                # Before the database: a submission that is applied meanwhile is in one of the two, or in both.
                _copy_trees(state, part, TREES[:1], before, stop)
                manifest = _copy_database(state / DATABASE, part / DATABASE, now, stop)
                _refuse_mixture(earlier, manifest.cluster_id, target)
                _copy_trees(state, part, TREES[1:], before, stop)
                _copy_audit(state, part, before, stop)
                if inventory is not None:
                    with contextlib.suppress(FileNotFoundError):
                        shutil.copyfile(inventory, part / INVENTORY)
                write_atomic(part / MANIFEST, msgspec.json.encode(manifest))
                _sync_tree(part)
                if error := check_backup(part):
                    raise GpuschedError(f"the new backup is not sound: {error}", "check the disk of the backups")
                if stop():
                    raise BackupStopped
                part.rename(target / name)
                sync_folder(target)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            _copy_logs(state / LOGS, target / LOGS, stop)
            _rotate(target, settings, now, stop)
            _remove_old_logs(state / LOGS, target / LOGS, now - settings.keep_days * DAY_S)
            return Backup(path=target / name, manifest=manifest)
    except FileExistsError as error:
        raise GpuschedError(f"no backup in {target}: Not a directory", _OTHER_FOLDER) from error
    except RecursionError as error:  # pathlib makes each parent in a call of its own
        raise GpuschedError(f"no backup in {target}: File name too long", _OTHER_FOLDER) from error
    except OSError as error:
        raise GpuschedError(f"no backup in {target}: {error.strerror or error}", _hint(error)) from error
    except sqlite3.Error as error:
        why = disk_error(state / DATABASE, error) or error
        raise GpuschedError(f"no backup in {target}: {why}", "see 'gpusched check'") from error


def refuse_as_root(state: Path) -> None:
    """Raise if root works on another user's state folder: its controller could not use the files."""
    if os.geteuid() == 0 and state.exists() and (owner := state.stat().st_uid):
        raise GpuschedError(f"{state} belongs to user {owner}, not to root", "run this as that user: sudo -u USER ...")


def _hint(error: OSError) -> str:
    return "earlier backups are kept; free some space" if error.errno in (28, 122) else _OTHER_FOLDER


def backups(folder: Path) -> list[Backup]:
    """Return the finished backups in a folder, oldest first, without opening their databases."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = [_read(folder / name) for name in os.listdir(folder) if NAME.fullmatch(name)]
        return sorted(found, key=lambda one: one.order)
    return []


def _read(path: Path) -> Backup:
    try:
        return parse_backup(path, (path / MANIFEST).read_bytes())
    except OSError as error:
        return Backup(path=path, manifest=None, error=f"{MANIFEST}: {error}")


def parse_backup(path: Path, manifest: bytes | str) -> Backup:
    """Return the backup that has this manifest."""
    try:
        return Backup(path=path, manifest=msgspec.json.decode(manifest, type=BackupManifest))
    except msgspec.MsgspecError as error:
        return Backup(path=path, manifest=None, error=f"{MANIFEST}: {error}")


def find_backup(source: Path) -> Backup:
    """Return the newest sound backup of a folder, or this one, if ``source`` is a backup itself.

    Raises:
        GpuschedError: There is none.
    """
    found = [_read(source)] if (source / MANIFEST).exists() else backups(source)
    why = "there are none"
    for backup in reversed(found):
        why = f"{backup.name}: {error}" if (error := check_backup(backup.path)) else ""
        if not why:
            return backup
    raise GpuschedError(f"no usable backup in {source} ({why})", "name another one with --from")


def check_backup(path: Path) -> str:
    """Open a backup and read all of its database; return the first thing wrong with it, or ""."""
    found = _read(path)
    if found.manifest is None:
        return found.error
    if found.manifest.schema > SCHEMA_VERSION:
        return f"it is of a newer gpusched ({found.manifest.version})"
    try:
        uri = f"{(path / DATABASE).absolute().as_uri()}?mode=ro&immutable=1"
        with contextlib.closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as db:
            (problem,) = next(db.execute("PRAGMA integrity_check(1)"))
            if problem != "ok":
                return f"{DATABASE}: {problem}"
            (schema,) = db.execute("PRAGMA user_version").fetchone()
            if schema != found.manifest.schema:
                return f"{DATABASE} has schema {schema} instead of {found.manifest.schema}"
            rows = _rows(db)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        return f"{DATABASE}: {error}"
    wrong = [name for name, count in found.manifest.rows.items() if rows.get(name) != count]
    return f"table {wrong[0]} has {rows.get(wrong[0], 0)} rows of {found.manifest.rows[wrong[0]]}" if wrong else ""


def _rows(db: sqlite3.Connection) -> dict[str, int]:
    names = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
    return {name: db.execute(f'SELECT count(*) FROM "{name}"').fetchone()[0] for name in names}


def _copy_database(source: Path, copy: Path, now: float, stop: Callable[[], bool]) -> BackupManifest:
    """Copy the database in small steps, all of one moment; without WAL, where a reader blocks the writer, in one."""

    def step(*_: int) -> None:
        if stop():
            raise BackupStopped
        time.sleep(PAUSE_S)

    create_private(copy)
    with (
        contextlib.closing(connect(source)) as db,
        contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as part,
    ):
        part.executescript("PRAGMA synchronous=OFF; PRAGMA journal_mode=OFF;")  # it is synced as a whole
        # Without a transaction each commit of the writer would make it begin anew. A reader of WAL blocks no writer.
        db.execute("BEGIN")
        rows = _rows(db)
        (journal,) = db.execute("PRAGMA journal_mode").fetchone()
        db.backup(part, pages=PAGES_PER_STEP if journal == "wal" else -1, progress=step)
        cluster = db.execute("SELECT value FROM meta WHERE key = 'cluster_id'").fetchone()
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        (latest,) = db.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        db.execute("ROLLBACK")
        part.execute("PRAGMA journal_mode=DELETE")  # no WAL, which needs more files
    return BackupManifest(
        made=now, cluster_id=cluster[0] if cluster else "", schema=schema, rows=rows,
        size_bytes=copy.stat().st_size, version=__version__, host=socket.gethostname(),
        latest_event=latest,
    )  # fmt: skip


def copy_before_migration(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Copy the database to ``gpusched.db.vVERSION``, for a return to the gpusched before; older copies are removed.

    Raises:
        OSError, sqlite3.Error: The disk is full, say; nothing has been changed.
    """
    copy = path.with_name(f"{path.name}.v{version}")
    part = copy.with_name(f"{copy.name}.part")
    part.unlink(missing_ok=True)
    try:
        create_private(part)
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as target:
            db.backup(target)
            target.execute("PRAGMA journal_mode=DELETE")
        part.replace(copy)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    for old in path.parent.glob(f"{path.name}.v*"):
        if old != copy:
            old.unlink()


def _refuse_mixture(earlier: list[Backup], cluster_id: str, target: Path) -> None:
    """Raise if another installation's backups lie there: rotation would remove them."""
    others = {b.manifest.cluster_id for b in earlier if b.manifest is not None} - {cluster_id}
    if others:
        raise GpuschedError(f"{target} has backups of another installation", "name another folder in settings.backup")


def copy_tree(source: Path, target: Path, tree: str) -> None:
    """Copy the files of a tree that the target lacks."""
    for file in _files(source / tree):
        name = file.relative_to(source)
        if not (target / name).exists():
            _copy_file(source, target, name)


def _copy_trees(
    state: Path, part: Path, trees: Iterable[str], before: Path | None, stop: Callable[[], bool]
) -> None:
    for tree in trees:
        for file in _submissions(state / tree) if tree == INBOX else _files(state / tree):
            if stop():
                raise BackupStopped
            _copy_file(state, part, file.relative_to(state), before)


def _copy_audit(state: Path, part: Path, before: Path | None, stop: Callable[[], bool]) -> None:
    """Copy the audit log; anew if its latest file was renamed meanwhile: its entries may be in no copy, or in two."""
    while True:
        full = old_files(state)
        _copy_trees(state, part, (AUDIT,), before, stop)
        if old_files(state) == full:
            return
        shutil.rmtree(part / AUDIT, ignore_errors=True)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # the controller has removed it meanwhile
                if stat.S_ISREG(os.lstat(path := Path(place, name)).st_mode):
                    yield path


def _submissions(inbox: Path) -> Iterator[Path]:
    """Yield the commands that can be applied again: they name their job. All users can put other files there."""
    with contextlib.suppress(FileNotFoundError), os.scandir(inbox) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                is_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
                if is_file and status.st_size <= MAX_COMMAND_BYTES and entry.name.endswith(".submit"):
                    yield Path(entry.path)


def _make_folders(source: Path, target: Path, name: Path) -> None:
    """Make a folder and those above it, each with its original's mode and owner."""
    for above in (*reversed(name.parents), name):
        if not (target / above).exists():
            status = (source / above).lstat()
            (target / above).mkdir(mode=0o700)
            _take_rights(status, target / above)


def _copy_file(source: Path, target: Path, name: Path, before: Path | None = None, again: bool = True) -> None:
    """Copy a file below a folder, with its mode, owner and time; where ``before`` has an equal copy, link to that.

    The owner of a command file is the proof of who sent it: without root, one of another user is left out, and so is
    one that vanishes meanwhile. One of ours that is replaced meanwhile is tried ``again``.
    """
    file, copy = source / name, target / name
    part = copy.with_name(copy.name + ".part")
    try:
        _make_folders(source, target, name.parent)
        status = file.lstat()
        if status.st_uid != os.geteuid() != 0:
            return
        if before is not None:
            with contextlib.suppress(OSError):
                if _stamp((before / name).lstat()) == _stamp(status):
                    os.link(before / name, copy)
                    return
        _copy_content(file, part, status)
    except FileNotFoundError:  # its job has ended, or its command was applied
        part.unlink(missing_ok=True)
        if again and not name.is_relative_to(INBOX) and os.path.lexists(file):
            _copy_file(source, target, name, before, again=False)
        return
    os.utime(part, ns=(status.st_atime_ns, status.st_mtime_ns))
    _take_rights(status, part)
    part.replace(copy)


def _copy_content(file: Path, part: Path, status: os.stat_result) -> None:
    """Copy the file that was seen; in the inbox its owner may have put a link or a pipe there meanwhile."""
    try:
        source = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EWOULDBLOCK):  # a link, a socket, leased (fcntl)
            raise FileNotFoundError from None
        raise
    with open(source, "rb") as original:
        found = os.fstat(source)  # of another file that has got the same number, the kind may differ
        if not (stat.S_ISREG(found.st_mode) and os.path.samestat(found, status)):
            raise FileNotFoundError
        target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(target, "wb") as copy:
            shutil.copyfileobj(original, copy)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, stat.S_IMODE(status.st_mode), status.st_uid


def _take_rights(status: os.stat_result, copy: Path) -> None:
    if os.geteuid() == 0:
        os.chown(copy, status.st_uid, status.st_gid)
    copy.chmod(stat.S_IMODE(status.st_mode))


def _copy_logs(logs: Path, copies: Path, stop: Callable[[], bool]) -> None:
    """Copy new output; it is written once, and its folder then stays as it is."""
    if not logs.is_dir():
        return
    copies.mkdir(exist_ok=True, mode=0o700)
    with os.scandir(logs) as entries:
        for entry in entries:
            copy = copies / entry.name
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue  # drafts are half written
            with contextlib.suppress(FileNotFoundError):
                changed = entry.stat().st_mtime_ns  # before: output that is added meanwhile is copied next time
                if copy.exists() and copy.stat().st_mtime_ns == changed:
                    continue
                for file in _files(Path(entry.path)):
                    if stop():
                        raise BackupStopped
                    if not (copies / (name := file.relative_to(logs))).exists():
                        _copy_file(logs, copies, name)
                if copy.exists():
                    os.utime(copy, ns=(0, changed))  # last: what is unfinished is done again


def _sync_tree(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(place, name), os.O_RDONLY | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(place))


def _rotate(target: Path, settings: BackupSettings, now: float, stop: Callable[[], bool]) -> None:
    """Keep the latest, and of each day the last one for some days."""
    found = backups(target)
    daily = {b.name[:8]: b for b in found}
    kept = {b.name for b in found[-settings.keep :]}
    since = time.strftime("%Y%m%d", time.gmtime(now - settings.keep_days * DAY_S))
    kept |= {b.name for day, b in daily.items() if day > since}
    for backup in found:
        if stop():
            raise BackupStopped
        if backup.name not in kept:
            part = target / f".{backup.name}.part"
            backup.path.rename(part)  # first, so that half a backup never looks like one
            shutil.rmtree(part, ignore_errors=True)


def _remove_old_logs(logs: Path, copies: Path, before: float) -> None:
    """Remove old output that the state folder has no more."""
    for name in os.listdir(copies) if copies.is_dir() else ():
        if not (logs / name).exists() and (copies / name).stat().st_mtime < before:
            shutil.rmtree(copies / name, ignore_errors=True)


def _remove_parts(target: Path) -> None:
    for name in os.listdir(target):
        if _PART.fullmatch(name):
            shutil.rmtree(target / name, ignore_errors=True)


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    descriptor = os.open(target / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise GpuschedError(f"another backup to {target} is being made", "try again later") from None
        yield
    finally:
        os.close(descriptor)
