"""Secrets and programs of jobs, and the keys of their steps: files that only the controller can read.

They are deleted with their job, and never stored in the database.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import msgspec

from gpusched.config.paths import sync_folder
from gpusched.model.jobs import JobRecord

_PR_SET_DUMPABLE = 4


def forbid_core_dumps() -> None:
    """Keep this process's memory, which holds secrets, from core dumps and from other processes of its user."""
    import ctypes

    # Not by RLIMIT_CORE: jobs of nodes with "transport: local" would inherit it, and a core_pattern that is a program
    # ignores it. What this process executes is dumpable again.
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


class SecretFiles:
    """One file per submission (an array's tasks share it), mode 0600 in a folder of mode 0700 in the state folder.

    Args:
        state: The state folder.
        folder: The folder in it.
        unsynced: Folders whose entries may not be on the disk yet, shared with others.
    """

    def __init__(self, state: Path, folder: str = "secrets", unsynced: set[Path] | None = None) -> None:
        self._state, self._folder = state, state / folder
        self._unsynced = set() if unsynced is None else unsynced

    @cached_property
    def programs(self) -> ProgramFiles:
        """The programs, in a folder beside the secrets."""
        return ProgramFiles(self._state, self._unsynced)

    def sync(self) -> None:
        """Flush all writes, including programs, to the disk; their command files are removed afterwards.

        Raises:
            OSError: It failed.
        """
        for folder in self._unsynced:
            sync_folder(folder)
        self._unsynced.clear()

    def write(self, job_id: str, values: dict[str, str]) -> None:
        """Store the values of a submission."""
        self._write(self._path(job_id), msgspec.json.encode(values))

    def steps_key(self, job_id: str) -> str:
        """Return the key by which a job's nodes authenticate each other; created once, the same for all launches."""
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
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)

    def read(self, job_id: str) -> dict[str, str] | None:
        """Return the values of a job, or of an array task; None if they were deleted.

        Raises:
            OSError: They cannot be read now.
        """
        try:
            return msgspec.json.decode(self._path(job_id).read_bytes(), type=dict[str, str])
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def has(self, job_id: str) -> bool:
        """Return whether the values exist."""
        return self._path(job_id).exists()

    def has_any(self, job_id: str) -> bool:
        """Return whether the values, or the key of its steps, exist."""
        return any(self._path(job_id).with_suffix(suffix).exists() for suffix in (".json", ".pem"))

    def size_of(self, job_ids: Iterable[str]) -> int:
        """Return the total size in bytes of the values of these submissions."""
        found = 0
        for job_id in job_ids:
            with contextlib.suppress(OSError):
                found += self._path(job_id).stat().st_size
        return found

    def job_ids(self) -> list[str]:
        """Return the ids of submissions whose values exist."""
        return [path.name.partition(".")[0] for path in self._folder.glob("*.*")]

    def delete(self, job_id: str) -> None:
        """Delete the values of a submission."""
        for suffix in (".json", ".pem", ".tmp"):
            self._path(job_id).with_suffix(suffix).unlink(missing_ok=True)

    def size(self) -> int:
        """Return the total size in bytes."""
        found = 0
        with contextlib.suppress(OSError), os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    found += entry.stat().st_size
        return found

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id.partition('_')[0]}.json"


class ProgramFiles:
    """The programs of jobs that run a Python function (`Submit.program`), in one folder per user."""

    def __init__(self, state: Path, unsynced: set[Path]) -> None:
        self._state, self._unsynced = state, unsynced
        self._last: tuple[str, dict[str, str] | None] = "", None  # cache: array tasks are launched in a row

    def of(self, uid: int) -> SecretFiles:
        """Return a user's files: ``""`` is the common beginning of all tasks, the rest is keyed by task index."""
        return SecretFiles(self._state, f"programs/{uid}", self._unsynced)

    def read(self, job: JobRecord) -> str | None:
        """Return the program of a job; None if it was deleted."""
        base = job.array_id or job.id
        if base != self._last[0] or self._last[1] is None:
            self._last = base, self.of(job.uid).read(base)
        texts = self._last[1]
        index = "" if job.array_index is None else str(job.array_index)
        return None if texts is None else texts[""] + (texts.get(index, "") if index else "")

    def delete_unless(self, is_kept: Callable[[str], bool]) -> None:
        """Delete the programs of submissions for whose id ``is_kept`` is false."""
        with contextlib.suppress(OSError):
            for folder in os.listdir(self._state / "programs"):
                files = SecretFiles(self._state, f"programs/{folder}")
                for job_id in files.job_ids():
                    if not is_kept(job_id):
                        files.delete(job_id)
