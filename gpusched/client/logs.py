"""A job's output, wherever it is: on its node while it runs, in the state folder or the ``-o`` file afterwards."""

from __future__ import annotations

import gzip
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from gpusched.client import relay
from gpusched.client.context import Client
from gpusched.client.resolve import Resolver
from gpusched.client.wait import exit_code
from gpusched.config.paths import log_path
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.arrays import first_task_of
from gpusched.model.jobs import ACTIVE, ENDED, JobRecord, container_name
from gpusched.model.relay import KeptLog, NodeLog
from gpusched.model.units import count_of
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import AttemptRef, runtime_for
from gpusched.nodes.transport import TransportError

Sink = Callable[[int, bytes], None]
"""Takes output as it comes: (rank, bytes). May be called from several threads, of one rank from one."""

POLL_S = 0.5
RETRY_S = 2.0
_CHUNK = 1 << 16
_TAIL_BYTES = 4 << 20  # the last lines are looked for in that much of the end


class LogRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which output to show.

    Attributes:
        rank: One rank of a gang; None shows all of them.
        attempt: An earlier attempt; None is the current or last.
        tail: Only this many of the last lines; None is everything.
        own_files: Whether the ``-o`` file may be opened with this process's own rights. Callers that act for another
            user must not, since the path may be, or lead to, any file.
    """

    job: str
    rank: int | None = None
    attempt: int | None = None
    tail: int | None = None
    follow: bool = False
    own_files: bool = True


def show_log(client: Client, request: LogRequest, sink: Sink, note: Callable[[str], None]) -> int:
    """Write the output to ``sink``, with ``follow`` until the job has ended; return the command's exit code.

    ``note`` takes lines for people, such as why output is missing or delayed.

    Raises:
        UsageError: No such job, rank or attempt.
        GpuschedError: There is no output, or it cannot be read; the message says why.
    """
    job = _one_job(client, request.job)
    _check(job, request)
    is_earlier = request.attempt is not None and request.attempt < job.attempt
    if is_earlier or not request.follow:
        _Output(client, job, request, sink, note).write_once()
        return 0
    return _follow(client, job, request, sink, note)


def ranks_of(client: Client, request: LogRequest) -> int:
    """Return how many ranks are shown: 1, or all ranks of the job if none is chosen."""
    return 1 if request.rank is not None else len(_ranks_with_output(_one_job(client, request.job)))


def _ranks_with_output(job: JobRecord) -> Sequence[int]:
    """Return the ranks with output: all, or of a script the first, which gathers the output of its steps."""
    return job.ranks if job.spec.script is None else range(1)


def _one_job(client: Client, text: str) -> JobRecord:
    target = Resolver(client).target(text)
    if len(target.jobs) != 1 or target.jobs[0].tasks:
        raise UsageError(
            f"job {target.id} is an array of {count_of(sum(j.count for j in target.jobs), 'task')}",
            f"name one, such as {first_task_of(target.jobs[0]).id}",
        )
    return target.jobs[0]


def _check(job: JobRecord, request: LogRequest) -> None:
    if request.rank is not None and request.rank not in job.past_ranks:
        raise UsageError(f"job {job.id} has no rank {request.rank}", f"valid ranks: 0 to {job.past_ranks[-1]}")
    if request.attempt is not None and not 1 <= request.attempt <= job.attempt:
        what = "has not started yet" if not job.attempt else f"has attempts 1 to {job.attempt}"
        raise UsageError(f"job {job.id} {what}; there is no attempt {request.attempt}")


def _follow(client: Client, job: JobRecord, request: LogRequest, sink: Sink, note: Callable[[str], None]) -> int:
    """Follow each attempt in turn, until the job has ended."""
    shown, last_note = 0, ""
    while True:
        if request.attempt is not None and shown and job.attempt > shown:
            return 0  # requeued; a later attempt was not asked for
        if job.attempt > shown and (job.state in ACTIVE or job.state in ENDED):
            shown, last_note = job.attempt, ""
            _Output(client, job, request, sink, note).follow(shown)
        elif job.state in ENDED:
            if shown == 0:
                note(f"job {job.id} ended {job.state} before it started{_reason_text(job)}")
            return exit_code(job)
        else:
            line = f"job {job.id} is {job.state}{_reason_text(job)}; {client.controller_warning() or 'waiting'}"
            if line != last_note:
                note(line)
                last_note = line
        time.sleep(POLL_S)
        job = _refreshed(client, job)


def _refreshed(client: Client, job: JobRecord) -> JobRecord:
    client.reopen()
    return (client.reader.job(job.id) if client.reader else None) or job


def _reason_text(job: JobRecord) -> str:
    return f" ({job.reason}{': ' + job.message if job.message else ''})" if job.reason else ""


class _Output:
    """Show the output of one job, rank by rank."""

    def __init__(
        self, client: Client, job: JobRecord, request: LogRequest, sink: Sink, note: Callable[[str], None]
    ) -> None:
        self._client, self._job, self._request, self._sink, self._note = client, job, request, sink, note
        self._reached = False
        self._ranks = _ranks_with_output(job) if request.rank is None else range(request.rank, request.rank + 1)

    def write_once(self) -> None:
        attempt = self._request.attempt or self._job.attempt
        if attempt == 0:
            state = f"{self._job.state}{_reason_text(self._job)}"
            raise GpuschedError(f"job {self._job.id} has not started yet, so there is no output: {state}", "-f waits")
        errors = []
        for rank in self._ranks:
            try:
                for chunk in _last_lines(self._read_output(attempt, rank), self._request.tail):
                    self._sink(rank, chunk)
            except GpuschedError as error:
                errors.append(error)
        for other in errors[1:]:
            self._note(other.line())
        if errors:
            raise errors[0]

    def _read_output(self, attempt: int, rank: int) -> Iterator[bytes]:
        source = self._file(attempt, rank)
        if source is None:
            chunks = self._from_node(attempt, rank, False, None if self._request.tail is None else _TAIL_BYTES)
            trouble: GpuschedError | None = None
            try:
                first = next(chunks, b"")
            except GpuschedError as error:
                first, trouble = b"", error
            if first:
                yield first
                yield from chunks
                return
            source = self._file(attempt, rank)  # it may have been collected and removed in between
            if source is None:
                if trouble is not None:
                    raise trouble
                return
        with source:
            yield from iter(lambda: source.read(_CHUNK), b"")

    def _from_node(self, attempt: int, rank: int, follow: bool, tail_bytes: int | None) -> Iterator[bytes]:
        reader, records = self._client.reader, self._records(attempt, rank)
        if reader is None or not records:
            raise GpuschedError(self._missing(attempt, rank))
        if relay.is_needed(self._client):
            request = NodeLog(job=self._job.id, attempt=attempt, rank=rank, follow=follow, tail_bytes=tail_bytes)
            yield from relay.stream(self._client, request)
            return
        name, (node_name, runtime) = container_name(self._job.id, attempt, rank), records[0]
        node = self._client.inventory.node(node_name)
        if node is None:
            raise GpuschedError(f"the output of {name} is on node {node_name}, which is no longer in the inventory")
        ref = AttemptRef(reader.meta("cluster_id") or "", node.name, name)
        transport = open_transport(node, self._client.inventory.settings)
        try:
            yield from transport.stream(runtime_for(runtime).log(ref, follow, tail_bytes))
        finally:
            transport.close()

    def _file(self, attempt: int, rank: int) -> BinaryIO | None:
        """Return the collected output, or the ``-o`` file once the rank is done with it; None if still on the node."""
        path = log_path(self._client.state, self._job.id, attempt, rank)
        if path.exists() and not os.access(path, os.R_OK) and relay.is_needed(self._client):
            try:
                kept = tempfile.TemporaryFile()
                try:
                    kept.writelines(relay.stream(self._client, KeptLog(job=self._job.id, attempt=attempt, rank=rank)))
                    kept.seek(0)
                except BaseException:
                    kept.close()
                    raise
            except OSError as error:
                why = f"the output cannot be kept in a temporary file: {error.strerror or error}"
                raise GpuschedError(why, "set TMPDIR to a folder with more space") from None
            return kept
        found = open_log(path)
        if found is not None:
            return found
        if self._job.spec.output is not None and self._is_over(attempt) and self._request.own_files:
            return open_log(Path(self._output_path(attempt, rank) or ""))
        return None

    def _output_path(self, attempt: int, rank: int) -> str | None:
        from gpusched.model.outputs import expand_output

        node = self._node_of(attempt, rank)
        return expand_output(self._job, rank, node) if node else None

    def _is_over(self, attempt: int) -> bool:
        return attempt < self._job.attempt or self._job.state not in ACTIVE

    def _node_of(self, attempt: int, rank: int) -> str | None:
        if records := self._records(attempt, rank):
            return records[0][0]
        if self._job.allocation and attempt == self._job.attempt:
            return next((p.node for p in self._job.allocation.parts if p.rank == rank), None)
        return None

    def _records(self, attempt: int, rank: int) -> list[tuple[str, str]]:
        """Return (node, runtime) of what this rank still has on nodes."""
        ranks = self._client.reader.ranks(job_id=self._job.id) if self._client.reader else []
        return [(r.node, r.runtime) for r in ranks if (r.attempt, r.rank) == (attempt, rank)]

    def _missing(self, attempt: int, rank: int) -> str:
        what = f"job {self._job.id}, attempt {attempt}, rank {rank}:"
        path = self._output_path(attempt, rank)
        if path is not None:
            return f"{what} its output went to {path} on {self._node_of(attempt, rank)}, which cannot be read from here"
        return f"{what} no output (it never ran, or its log was rotated or removed)"

    # -- following -------------------------------------------------------------------------------------------------

    def follow(self, attempt: int) -> None:
        """Follow all chosen ranks until this attempt has ended and its last output is shown."""
        if len(self._ranks) == 1:
            self._follow_rank(attempt, self._ranks[0])
            return
        threads = [threading.Thread(target=self._follow_quietly, args=(attempt, r), daemon=True) for r in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _follow_quietly(self, attempt: int, rank: int) -> None:
        client = self._client.another()
        other = _Output(client, self._job, self._request, self._sink, self._note)
        try:
            other._follow_rank(attempt, rank)
        except GpuschedError as error:
            self._note(f"rank {rank}: {error.line()}")
        finally:
            client.reopen()

    def _follow_rank(self, attempt: int, rank: int) -> None:
        """Stream from the node, reconnecting as needed; at the end show the rest from the collected file."""
        written, tail_bytes, last_error = 0, self._tail_bytes(attempt, rank), ""
        skipping = tail_bytes is None
        while True:
            # Decided before streaming: output written up to the end is then read in one more round, from the file.
            is_over = self._is_over(attempt)
            if is_over and self._show_rest(attempt, rank, written, skipping):
                return
            if is_over and not self._records(attempt, rank):
                if not written:
                    self._note(self._missing(attempt, rank))
                return
            try:
                written += self._stream(attempt, rank, written if skipping else 0, tail_bytes)
                if is_over:
                    # The log may have been collected and removed in between; then the file has the rest.
                    self._show_rest(attempt, rank, written, skipping)
                    return
                tail_bytes = tail_bytes if tail_bytes is None else 0  # the last lines were shown: only new output
            except TransportError as error:
                self._reached = True
                if error.line() != last_error:
                    last_error = error.line()
                    self._note(f"{last_error}; retrying")
                tail_bytes = tail_bytes if tail_bytes is None or not written else 0
                time.sleep(RETRY_S)
            time.sleep(POLL_S)
            self._job = _refreshed(self._client, self._job)

    def _show_rest(self, attempt: int, rank: int, written: int, skipping: bool) -> bool:
        """Show the rest of the finished file; return False if there is no such file."""
        source = self._file(attempt, rank)
        if source is None:
            return False
        with source:
            if skipping or written == 0:
                content = iter(lambda: source.read(_CHUNK), b"")
                for chunk in content if written else _last_lines(content, self._request.tail):
                    unseen, written = chunk[written:], max(0, written - len(chunk))
                    if unseen:
                        self._sink(rank, unseen)
        return True

    def _stream(self, attempt: int, rank: int, skip: int, tail_bytes: int | None) -> int:
        """Follow the rank on its node until it ends; return the number of bytes shown beyond the first ``skip``."""
        if not self._records(attempt, rank):
            return 0
        shown = 0
        try:
            for chunk in self._from_node(attempt, rank, True, tail_bytes):
                self._reached = True
                unseen, skip = chunk[skip:], max(0, skip - len(chunk))
                if unseen:
                    self._sink(rank, unseen)
                    shown += len(unseen)
        except relay.NotListening as error:
            if not self._reached:
                raise
            raise TransportError("ssh", str(error), error.hint) from None  # the controller is started again
        return shown

    def _tail_bytes(self, attempt: int, rank: int) -> int | None:
        """Return the current size of the last lines in bytes; None if everything is requested."""
        if self._request.tail is None:
            return None
        try:
            return sum(len(c) for c in _last_lines(self._read_output(attempt, rank), self._request.tail))
        except GpuschedError:
            return 0


def open_log(path: Path) -> BinaryIO | None:
    """Open a collected file, compressed or not; return None if there is none.

    Raises:
        GpuschedError: It cannot be read.
    """
    compressed = path.with_name(path.name + ".gz")
    try:
        if compressed.exists():
            return gzip.open(compressed, "rb")  # type: ignore[return-value]
        return path.open("rb") if path.is_file() else None
    except FileNotFoundError:  # rotated away meanwhile
        return None
    except OSError as error:
        raise GpuschedError(f"{path} cannot be read: {error.strerror}") from None


def _last_lines(chunks: Iterator[bytes], count: int | None) -> Iterator[bytes]:
    """Yield the last ``count`` lines of a stream; all of it, as it arrives, if None."""
    if count is None:
        yield from chunks
        return
    if count == 0:
        deque(chunks, 0)
        return
    lines: deque[bytes] = deque(maxlen=count)
    partial = PartialLine()
    for chunk in chunks:
        lines.extend(line + b"\n" for line in partial.lines(chunk))
    if rest := partial.rest():
        lines.append(rest)
    yield from lines


class PartialLine:
    """Splits a stream into lines. A progress bar writes none for hours: its parts are joined once, at the end."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that this chunk completes, without their ends."""
        *complete, last = chunk.split(b"\n")
        if complete:
            self._parts.append(complete[0])
            complete[0] = self.rest()
        self._parts.append(last)
        return complete

    def rest(self) -> bytes:
        """Return what has come of the next line, and forget it."""
        rest = b"".join(self._parts)
        self._parts.clear()
        return rest


class PrefixedLines:
    """Sink for several ranks: complete lines, each prefixed with its rank."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write, self._lock = write, threading.Lock()
        self._partial: dict[int, PartialLine] = {}

    def __call__(self, rank: int, chunk: bytes) -> None:
        """Take output of a rank; write its complete lines."""
        lines = self._partial.setdefault(rank, PartialLine()).lines(chunk)
        with self._lock:
            for line in lines:
                self._write(b"[%d] %s\n" % (rank, line))

    def finish(self) -> None:
        """Write lines without a line end."""
        for rank, partial in sorted(self._partial.items()):
            if line := partial.rest():
                self._write(b"[%d] %s\n" % (rank, line))
        self._partial.clear()
