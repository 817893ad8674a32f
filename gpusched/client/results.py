"""Read the result of a job's Python function as bytes; nothing is unpickled here."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gpusched.client import relay
from gpusched.client.context import Client
from gpusched.client.logs import open_log
from gpusched.config.paths import result_path
from gpusched.errors import GpuschedError
from gpusched.job.call import MAGIC
from gpusched.model.jobs import JobRecord
from gpusched.model.relay import KeptLog


class StoredResult(msgspec.Struct, frozen=True):
    """One call's result: its header and the pickle (empty if there is none or it is in a file)."""

    header: dict[str, Any]
    data: bytes

    def tasks(self) -> list[StoredResult]:
        """Return the results of the node's tasks, in order; itself if the function was called once."""
        headers = self.header.get("tasks")
        if headers is None:
            return [self]
        found, offset = [], 0
        for header in headers:
            found.append(StoredResult(header, self.data[offset : offset + header["size"]]))
            offset += header["size"]
        return found


def open_large(client: Client, job: JobRecord, result: StoredResult) -> BinaryIO:
    """Open a result that was too large to collect, after checking its digest; read in chunks.

    Raises:
        GpuschedError: The file is missing or is not what the job wrote.
    """
    path = large_path(client, job, result)
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except FileNotFoundError:
        raise GpuschedError(
            f"the result of job {job.id}, {result.header['bytes']} bytes, is no longer in {path}",
            "it is removed once it has been fetched",
        ) from None
    except OSError as error:
        raise GpuschedError(f"cannot read the result of job {job.id} in {path}: {error.strerror}") from None
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if digest.hexdigest() != result.header["sha256"]:
        file.close()
        raise GpuschedError(f"the result of job {job.id} in {path} is not what the job wrote: its digest differs")
    file.seek(0)
    return file


def large_path(client: Client, job: JobRecord, result: StoredResult) -> Path:
    """Return the path of such a result: in the folder given to the job, or its own folder on a shared disk."""
    folder, name = result.header.get("folder"), os.path.basename(str(result.header["file"]))
    if folder:
        return Path(folder, name)
    cluster_id = (client.reader.meta("cluster_id") if client.reader else None) or ""
    return Path(client.inventory.settings.job_dirs or "/nonexistent", cluster_id, job.id, name)


def is_uncollected(client: Client, job: JobRecord) -> bool:
    """Return whether results of an ended job's last attempt are still to be collected from its nodes."""
    ranks = client.reader.ranks(job_id=job.id) if client.reader else []
    return any(r.attempt == job.attempt and not r.collected for r in ranks)


def read_result(client: Client, job: JobRecord, rank: int) -> StoredResult | None:
    """Return the result of one rank of a job's last attempt; None if it left none.

    Raises:
        GpuschedError: The result cannot be read.
    """
    content = _content(client, job, rank)
    if not content:
        return None
    result = _parse(job, content)
    if len(result.data) == result.header.get("size"):
        return result
    raise GpuschedError(
        f"the result of job {job.id} has {result.header.get('size')} bytes, more than is collected "
        "(settings.logs.max_per_job)",
        "name a folder that the job and you both see: result_dir=...",
    )


def _content(client: Client, job: JobRecord, rank: int) -> bytes:
    path = result_path(client.state, job.id, job.attempt, rank)
    if path.exists() and not os.access(path, os.R_OK) and relay.is_needed(client):
        request = KeptLog(job=job.id, attempt=job.attempt, rank=rank, result=True)
        return b"".join(relay.stream(client, request))
    file = open_log(path)
    if file is None:
        return b""
    with file:
        return file.read()


def _parse(job: JobRecord, content: bytes) -> StoredResult:
    before, magic, rest = content.partition(MAGIC)
    line, _, data = rest.partition(b"\n")
    try:
        if before or not magic:
            raise ValueError
        return StoredResult(msgspec.json.decode(line, type=dict[str, Any]), data)
    except (ValueError, msgspec.MsgspecError):
        raise GpuschedError(f"job {job.id} left no valid function result") from None
