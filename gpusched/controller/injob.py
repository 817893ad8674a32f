"""Slurm's commands inside running jobs, answered for the job's own user. See docs/decisions/0058.

A request is a file in the job's folder. Every reading of its node shows it until it is answered, so each cycle handles
it from scratch. Its changes go through the inbox under a name derived from the request, and are therefore applied once.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gpusched.cluster.base import NodeObservation, Operation
from gpusched.controller.commandfiles import MAX_LOOKED_UP, is_cancelled, rows_looked_up
from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import RelayedCommand, Submit
from gpusched.model.jobs import ENDED, JobRecord, JobState, parse_container_name
from gpusched.model.readings import AskReading
from gpusched.model.resources import Inventory
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from gpusched.views.squeue import UnsupportedOption, sacct, squeue

MAX_ANSWER = 256 * 1024
MAX_JOBS = 1000
MAX_SCRIPTS_READ = 4  # scripts read per user and cycle
MAX_LISTS = 8  # answers to squeue and sacct per user and cycle
SACCT_S = 86400.0  # age of the ended jobs that sacct lists by default
STALE_S = 3600.0  # older requests are ignored; shorter than `REMEMBER_APPLIED_S`, so that none is applied twice
_ID = re.compile(r"[0-9]{1,20}-([0-9]{1,20})")
_log = logging.getLogger(__name__)

Reads = Counter[tuple[int, str]]
Prepare = Callable[[Inventory, JobRecord, AskReading], Submit | int]
"""Parses sbatch inside a job: the submission, or the index of the word that names the script to fetch (0: stdin)."""


class InJobCommandHandler:
    """Answers the requests of running jobs; stateless.

    Args:
        store: The jobs.
        inbox: Receives changes.
        prepare: Parses sbatch; None: sbatch is not supported.
    """

    def __init__(self, store: Store, inbox: Inbox, prepare: Prepare | None = None) -> None:
        self._store, self._inbox, self._prepare = store, inbox, prepare

    def answers(self, observations: Mapping[str, NodeObservation], inventory: Inventory, now: float) -> list[Operation]:
        """Return the answers to the requests on these nodes; a request whose command is not applied yet has none."""
        reads: Reads = Counter()
        requests = [
            (name, reading.node, container.ask)
            for observation in observations.values()
            if (reading := observation.complete_reading) is not None
            for container in reading.containers or ()
            if container.ask is not None and (name := parse_container_name(container.name)) is not None
        ]
        operations = []
        for (job_id, attempt, rank), node, ask in sorted(requests, key=lambda request: -request[2].age_s):
            job = self._store.job(job_id)
            record = next((r for r in self._store.ranks(job_id=job_id) if (r.attempt, r.rank) == (attempt, rank)), None)
            current = rank == 0 and job is not None and job.attempt == attempt == ask.attempt
            if not current or record is None or record.node != node or not _ID.fullmatch(ask.id) or ask.age_s > STALE_S:
                continue
            assert job is not None
            if (answer := self._answer(job, ask, inventory, reads, now)) is not None:
                code, text = answer
                note = f"{ask.id} {code}\n{text}"[:MAX_ANSWER].replace("\0", "")
                operations.append(Operation(verb="answer", node=node, rank=record, note=note))
        return operations

    def _answer(
        self, job: JobRecord, ask: AskReading, inventory: Inventory, reads: Reads, now: float
    ) -> tuple[int, str] | None:
        """Return exit code and output; None: not done yet."""
        program, words = ask.words[0], ask.words[1:]
        try:
            match program:
                case "squeue" | "sacct" if reads[job.uid, "list"] >= MAX_LISTS:
                    return None
                case "squeue":
                    reads[job.uid, "list"] += 1
                    return 0, squeue(self._own_jobs(job, now, ended=False), words, job.user, now)
                case "sacct":
                    reads[job.uid, "list"] += 1
                    return 0, sacct(self._own_jobs(job, now, ended=True), words, job.user, now)
                case "scancel":
                    return self._relay(
                        "cancel", [word for word in words if word not in ("-Q", "--quiet")], job, ask, now
                    )
                case "scontrol" if words[:1] == ("requeue",):
                    return self._relay("requeue", words[1:], job, ask, now)
                case "sbatch" if self._prepare is not None:
                    return self._submit(self._prepare, job, ask, inventory, reads, now)
            raise UnsupportedOption("not supported inside a job")
        except UnsupportedOption as error:
            return 1, f"{program}: error: {error}\n"
        except (GpuschedError, sqlite3.Error, OSError):
            raise
        except Exception:  # the words are a user's: what they break must not end the controller (decision 0023)
            _log.exception("the request of job %s failed: %s", job.id, shlex.join(ask.words)[:200])
            return 1, f"{program}: error: internal error; the controller's log has it\n"

    def _submit(
        self, prepare: Prepare, job: JobRecord, ask: AskReading, inventory: Inventory, reads: Reads, now: float
    ) -> tuple[int, str] | None:
        """Submit sbatch's job. Its id is derived from the request's name, which shows whether that was done before."""
        match = _ID.fullmatch(ask.id)
        assert match is not None
        new = ids.of_request(f"{job.id}-{job.attempt}-{ask.id}", int(match[1]))
        if any(row.asked_by == job.id for row in self._store.rows_of(new)):
            options = ask.words[1 : ask.script_word or len(ask.words)]
            parsable = any(word.startswith("--pars") for word in options)  # options may be abbreviated
            return 0, f"{new}\n" if parsable else f"Submitted batch job {new}\n"
        if self._store.was_applied(f"{new}.submit"):
            reasons = [e.data["why"] for e in self._store.events(job_id=new) if e.kind == "refused_command"]
            raise UnsupportedOption(str(reasons[-1]) if reasons else "the job was not queued")
        if is_cancelled(job):
            raise UnsupportedOption(f"job {job.id} was cancelled")
        if self._inbox.has_submission(new) or reads[job.uid, "script"] >= MAX_SCRIPTS_READ:
            return None
        reads[job.uid, "script"] += 1
        try:
            found = prepare(inventory, job, ask)
        except GpuschedError as error:
            raise UnsupportedOption(error.line()) from None
        except Exception as error:  # an unforeseen error in one script must not fail the cycle
            raise UnsupportedOption(f"internal error: {type(error).__name__}") from None
        if isinstance(found, int):
            return 3, f"{found}\n"
        for other in {dependency.job_id for dependency in found.spec.dependencies if dependency.job_id}:
            rows = self._store.rows_of(other)
            if not rows or rows[0].uid != job.uid:
                raise UnsupportedOption(f"--dependency: {job.user} has no job {other}")
        with contextlib.suppress(FileExistsError):
            self._inbox.deliver(
                msgspec.structs.replace(found, id=new, time=now, asked_by=job.id, origin=f"job {job.id}")
            )
        return None

    def _own_jobs(self, job: JobRecord, now: float, ended: bool) -> list[JobRecord]:
        """Return the latest jobs of the job's user, including itself."""
        states = None if ended else frozenset(JobState) - ENDED
        found = self._store.jobs(states=states, user=job.user, since=now - SACCT_S if ended else None, limit=MAX_JOBS)
        return [job_found for job_found in found if job_found.uid == job.uid]

    def _relay(
        self, action: Literal["cancel", "requeue"], words: Sequence[str], job: JobRecord, ask: AskReading, now: float
    ) -> tuple[int, str] | None:
        name = f"{job.id}-{job.attempt}-{ask.id}"
        if self._store.was_applied(f"{name}.asked"):
            return 0, ""
        names = tuple(dict.fromkeys(job_id for word in words for job_id in word.split(",") if job_id))
        if len(names) > MAX_JOBS:  # each is looked up in every cycle until the request is answered
            raise UnsupportedOption(f"at most {MAX_JOBS} jobs at once, found {len(names)}")
        if not names or any(job_id.startswith("-") for job_id in names):
            raise UnsupportedOption(f"expected ids of jobs, found {' '.join(words)[:80]!r}")
        looked_up = 0
        for job_id in names:
            rows = self._store.rows_of(job_id)
            looked_up += rows_looked_up(job_id, rows)
            if looked_up >= MAX_LOOKED_UP:
                raise UnsupportedOption(f"at most {MAX_LOOKED_UP} tasks at once")
            if not rows:
                raise UnsupportedOption(f"there is no job {job_id[:60]}")
            if any(row.uid != job.uid for row in rows):
                raise UnsupportedOption(f"job {job_id} belongs to {rows[0].user}")
        if action == "requeue" and job.id in names and is_cancelled(job):
            raise UnsupportedOption(f"job {job.id} was cancelled")
        with contextlib.suppress(FileExistsError):  # already in the inbox
            self._inbox.deliver(
                RelayedCommand(
                    time=now, origin=f"job {job.id}", job_id=job.id, attempt=job.attempt, act=action, job_ids=names
                ),
                name=name,
            )  # fmt: skip
        return None
