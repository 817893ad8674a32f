"""What the Python function of a job left behind, as bytes: nothing is unpickled here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from gpusched.client import relay
from gpusched.client.context import Client
from gpusched.client.logs import opened
from gpusched.config.paths import result_path
from gpusched.errors import GpuschedError
from gpusched.job.call import MAGIC
from gpusched.model.jobs import Job
from gpusched.model.relay import KeptLog


class Left(msgspec.Struct, frozen=True):
    """One rank's result: what it says of itself, and the pickle ("": there is none)."""

    told: dict[str, Any]
    data: bytes


def awaited(client: Client, job: Job) -> bool:
    """Whether something of the last attempt of a job that has ended is still to be brought from its nodes."""
    ranks = client.reader.ranks(job_id=job.id) if client.reader else []
    return any(r.attempt == job.attempt and not r.collected for r in ranks)


def read_result(client: Client, job: Job, rank: int) -> Left | None:
    """The result of one rank of a job's last attempt; None: it left none.

    Raises:
        GpuschedError: There is one that cannot be had.
    """
    content = _content(client, job, rank)
    if not content:
        return None
    found = _parsed(job, content)
    if len(found.data) == found.told.get("size"):
        return found
    return _from_job_dir(client, job, rank, found.told)


def _content(client: Client, job: Job, rank: int) -> bytes:
    path = result_path(client.state, job.id, job.attempt, rank)
    if path.exists() and not os.access(path, os.R_OK) and relay.is_needed(client):
        asked = KeptLog(job=job.id, attempt=job.attempt, rank=rank, result=True)
        return b"".join(relay.stream(client, asked))
    file = opened(path)
    if file is None:
        return b""
    with file:
        return file.read()


def _parsed(job: Job, content: bytes) -> Left:
    head, magic, rest = content.partition(MAGIC)
    line, _, data = rest.partition(b"\n")
    try:
        if head or not magic:
            raise ValueError
        return Left(msgspec.json.decode(line, type=dict[str, Any]), data)
    except (ValueError, msgspec.MsgspecError):
        raise GpuschedError(f"what job {job.id} left is no result of a function") from None


def _from_job_dir(client: Client, job: Job, rank: int, told: dict[str, Any]) -> Left:
    """One that is larger than what is collected stays in the job's folder, which may be on a disk that is here, too."""
    name = f"result.{job.attempt}.{rank}"
    size, folder = told.get("size"), client.inventory.settings.job_dirs
    reader = client.reader
    if folder is not None and reader is not None:
        path = Path(folder, reader.meta("cluster_id") or "", job.id, name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                found = _parsed(job, file.read())
        except OSError as error:
            raise GpuschedError(f"the result of job {job.id}, {size} bytes, is in {path}: {error.strerror}") from None
        if len(found.data) == found.told.get("size"):
            return found
    raise GpuschedError(
        f"the result of job {job.id} has {size} bytes, more than is brought back (settings.logs.max_per_job)",
        "let it write a file, and return its path",
    )
