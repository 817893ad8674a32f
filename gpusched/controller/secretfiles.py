"""Values of jobs' secrets, and the keys of jobs' steps: files that only the controller can read.

They are gone when their job is, and never in the database.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class SecretFiles:
    """One file per submission (an array's tasks share it) in ``<state>/secrets``, mode 0600 in a folder of 0700."""

    def __init__(self, state: Path) -> None:
        self._folder = state / "secrets"

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
        self._folder.mkdir(mode=0o700, exist_ok=True)
        draft = path.with_suffix(".tmp")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(draft, path)

    def read(self, job_id: str) -> dict[str, str] | None:
        """The values for a job or a task of an array; None where they are gone."""
        try:
            return msgspec.json.decode(self._path(job_id).read_bytes(), type=dict[str, str])
        except (OSError, msgspec.MsgspecError):
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

    def _path(self, job_id: str) -> Path:
        return self._folder / f"{job_id.partition('_')[0]}.json"
