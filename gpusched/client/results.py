"""What the Python function of a job left behind, as bytes: nothing is unpickled here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gpusched.client import relay
from gpusched.client.context import Client
from gpusched.client.logs import opened
from gpusched.config.paths import result_path
from gpusched.errors import GpuschedError
from gpusched.job.call import MAGIC
from gpusched.model.jobs import JobRecord
from gpusched.model.relay import KeptLog


class StoredResult(msgspec.Struct, frozen=True):
    """One call's result: what it says of itself, and the pickle ("": there is none, or it is in a file)."""

    told: dict[str, Any]
    data: bytes

    def tasks(self) -> list[StoredResult]:
        """Return those of the node's tasks, in their order; itself, where it called the function once."""
        headers = self.told.get("tasks")
        if headers is None:
            return [self]
        found, at = [], 0
        for header in headers:
            found.append(StoredResult(header, self.data[at : at + header["size"]]))
            at += header["size"]
        return found


def open_large(client: Client, job: JobRecord, left: StoredResult) -> BinaryIO:
    """Open a result that was too large to travel, once its digest is found right; read in pieces.

    Raises:
        GpuschedError: It is not there, or another one.
    """
    path = large_path(client, job, left)
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except FileNotFoundError:
        raise GpuschedError(
            f"the result of job {job.id}, {left.told['bytes']} bytes, is no longer in {path}",
            "it is removed once it has been fetched",
        ) from None
    except OSError as error:
        raise GpuschedError(f"the result of job {job.id} is in {path}: {error.strerror}") from None
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if digest.hexdigest() != left.told["sha256"]:
        file.close()
        raise GpuschedError(f"the result of job {job.id} in {path} is not what the job wrote: its digest differs")
    file.seek(0)
    return file


def large_path(client: Client, job: JobRecord, left: StoredResult) -> Path:
    """Return where such a result lies: in the folder that its job was given for it, or its own on a shared disk."""
    folder, name = left.told.get("folder"), os.path.basename(str(left.told["file"]))
    if folder:
        return Path(folder, name)
    cluster_id = (client.reader.meta("cluster_id") if client.reader else None) or ""
    return Path(client.inventory.settings.job_dirs or "/nonexistent", cluster_id, job.id, name)


def awaited(client: Client, job: JobRecord) -> bool:
    """Whether something of the last attempt of a job that has ended is still to be brought from its nodes."""
    ranks = client.reader.ranks(job_id=job.id) if client.reader else []
    return any(r.attempt == job.attempt and not r.collected for r in ranks)


def read_result(client: Client, job: JobRecord, rank: int) -> StoredResult | None:
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
    raise GpuschedError(
        f"the result of job {job.id} has {found.told.get('size')} bytes, more than is collected "
        "(settings.logs.max_per_job)",
        "name a folder that the job and you both see: result_dir=...",
    )


def _content(client: Client, job: JobRecord, rank: int) -> bytes:
    path = result_path(client.state, job.id, job.attempt, rank)
    if path.exists() and not os.access(path, os.R_OK) and relay.is_needed(client):
        asked = KeptLog(job=job.id, attempt=job.attempt, rank=rank, result=True)
        return b"".join(relay.stream(client, asked))
    file = opened(path)
    if file is None:
        return b""
    with file:
        return file.read()


def _parsed(job: JobRecord, content: bytes) -> StoredResult:
    head, magic, rest = content.partition(MAGIC)
    line, _, data = rest.partition(b"\n")
    try:
        if head or not magic:
            raise ValueError
        return StoredResult(msgspec.json.decode(line, type=dict[str, Any]), data)
    except (ValueError, msgspec.MsgspecError):
        raise GpuschedError(f"job {job.id} left no valid function result") from None
