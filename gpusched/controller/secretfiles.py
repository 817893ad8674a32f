"""Secrets and programs of jobs, and the keys of their steps: files that only the controller can read.

They are gone when their job is, and never in the database.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import msgspec

from gpusched.config.paths import sync_folder
from gpusched.model.jobs import JobRecord


class SecretFiles:
    """One file per submission (an array's tasks share it) in a folder of the state folder, mode 0600 in one of 0700.

    Args:
        state: The state folder.
        folder: The folder in it.
        unsynced: Folders whose names may not be on the disk yet, shared with others.
    """

    def __init__(self, state: Path, folder: str = "secrets", unsynced: set[Path] | None = None) -> None:
        self._state, self._folder = state, state / folder
        self._unsynced = set() if unsynced is None else unsynced

    @cached_property
    def programs(self) -> ProgramFiles:
        """Those beside them."""
        return ProgramFiles(self._state, self._unsynced)

    def sync(self) -> None:
        """Have all that was written on the disk, programs too: the commands that brought it are removed next.

        Raises:
            OSError: It cannot be done.
        """
        for folder in self._unsynced:
            sync_folder(folder)
        self._unsynced.clear()

    def write(self, job_id: str, values: dict[str, str]) -> None:
        """Keep the values of a submission."""
        self._write(self._path(job_id), msgspec.json.encode(values))

    def steps_key(self, job_id: str) -> str:
        """The key by which a job's nodes know each other, made where there is none: all its launches have the same."""
        path = self._path(job_id).with_suffix(".pem")
        try:
            return path.read_text()
        except FileNotFoundError:
            from gpusched.controller.stepkey import new_key

            self._write(path, new_key())
            return path.read_text()

    def _write(self, path: Path, content: bytes) -> None:
        if not self._folder.is_dir():
            self._folder.mkdir(mode=0o700, exist_ok=True, parents=True)
            self._unsynced |= {*self._folder.parents} - {*self._state.parents}
        self._unsynced.add(self._folder)
        draft = path.with_suffix(".tmp")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)

    def read(self, job_id: str) -> dict[str, str] | None:
        """The values for a job or a task of an array; None where they are gone.

        Raises:
            OSError: They cannot be read now.
        """
        try:
            return msgspec.json.decode(self._path(job_id).read_bytes(), type=dict[str, str])
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def has(self, job_id: str) -> bool:
        """Whether the values are still there."""
        return self._path(job_id).exists()

    def kept(self) -> list[str]:
        """Ids of the submissions whose values are there."""
        return [path.name.partition(".")[0] for path in self._folder.glob("*.*")]

    def forget(self, job_id: str) -> None:
        """Remove the values of a submission, of which nothing is left that may need them."""
        for suffix in (".json", ".pem", ".tmp"):
            self._path(job_id).with_suffix(suffix).unlink(missing_ok=True)

    def size(self) -> int:
        """Bytes of all of it."""
        found = 0
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found += entry.stat().st_size
        return found

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id.partition('_')[0]}.json"


class ProgramFiles:
    """The programs of jobs that run a Python function (`Submit.program`); each user's in a folder of their own."""

    def __init__(self, state: Path, unsynced: set[Path]) -> None:
        self._state, self._unsynced = state, unsynced
        self._last: tuple[str, dict[str, str] | None] = "", None  # tasks of an array are launched one after the other

    def of(self, uid: int) -> SecretFiles:
        """A user's. Of each submission ``""`` is what all tasks begin with, the others are by their indices."""
        return SecretFiles(self._state, f"programs/{uid}", self._unsynced)

    def read(self, job: JobRecord) -> str | None:
        """The program of a job; None where it is gone."""
        base = job.array_id or job.id
        if base != self._last[0] or self._last[1] is None:
            self._last = base, self.of(job.uid).read(base)
        texts = self._last[1]
        index = "" if job.array_index is None else str(job.array_index)
        return None if texts is None else texts[""] + (texts.get(index, "") if index else "")

    def forget_unless(self, is_kept: Callable[[str], bool]) -> None:
        """Remove those of submissions, by their ids, of which nothing is left that may need them."""
        with contextlib.suppress(OSError):
            for folder in os.listdir(self._state / "programs"):
                files = SecretFiles(self._state, f"programs/{folder}")
                for job_id in files.kept():
                    if not is_kept(job_id):
                        files.forget(job_id)
