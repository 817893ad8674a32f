"""What running jobs ask: Slurm's commands inside them, answered for their own user's jobs. docs/decisions/0058.

A request is a file in the job's folder, seen with each reading of its node until the job has its answer. Here it is
looked at each time as if it were the first: what it changes goes through the inbox under a name of its own, which is
folded once.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from gpusched.cluster.base import NodeObservation, Operation
from gpusched.controller.fold import is_cancelled
from gpusched.errors import GpuschedError
from gpusched.model import ids
from gpusched.model.commands import RelayedCommand, Submit
from gpusched.model.jobs import ENDED, JobRecord, JobState, parse_container_name
from gpusched.model.readings import AskReading
from gpusched.model.resources import Inventory
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from gpusched.views.squeue import NotAnswered, sacct, squeue

MAX_ANSWER = 256 * 1024
MAX_JOBS = 1000
MAX_READ = 4  # scripts of one user and cycle
SINCE_S = 86400.0  # of ended jobs, where sacct is not told which
STALE_S = 3600.0  # nobody waits for the answer; it must be less than what is folded is remembered for
_ID = re.compile(r"[0-9]{1,20}-([0-9]{1,20})")

Prepare = Callable[[Inventory, JobRecord, AskReading], Submit | int]
"""What sbatch inside a job asks for: the submission, or which word (0: stdin) names the script, to be asked for."""


class Asking:
    """Answers; it keeps nothing of its own.

    Args:
        store: The jobs.
        inbox: Where changes go.
        prepare: Reads what sbatch asks for; None: nobody here can.
    """

    def __init__(self, store: Store, inbox: Inbox, prepare: Prepare | None = None) -> None:
        self._store, self._inbox, self._prepare = store, inbox, prepare

    def answers(self, observations: Mapping[str, NodeObservation], inventory: Inventory, now: float) -> list[Operation]:
        """Return the answers to what is asked on these nodes; what must be folded first has to wait for its."""
        read = Counter[int]()
        asks = [
            (name, reading.node, container.ask)
            for observation in observations.values()
            if (reading := observation.whole) is not None
            for container in reading.containers or ()
            if container.ask is not None and (name := parse_container_name(container.name)) is not None
        ]
        operations = []
        for (job_id, attempt, rank), node, ask in asks:
            job = self._store.job(job_id)
            record = next((r for r in self._store.ranks(job_id=job_id) if (r.attempt, r.rank) == (attempt, rank)), None)
            current = rank == 0 and job is not None and job.attempt == attempt == ask.attempt
            if not current or record is None or record.node != node or not _ID.fullmatch(ask.id) or ask.age_s > STALE_S:
                continue
            assert job is not None
            if (answer := self._answer(job, ask, inventory, read, now)) is not None:
                code, text = answer
                note = f"{ask.id} {code}\n{text}"[:MAX_ANSWER].replace("\0", "")
                operations.append(Operation(verb="answer", node=node, rank=record, note=note))
        return operations

    def _answer(
        self, job: JobRecord, ask: AskReading, inventory: Inventory, read: Counter[int], now: float
    ) -> tuple[int, str] | None:
        """Return exit code and text; None: it is not done yet."""
        program, words = ask.words[0], ask.words[1:]
        try:
            match program:
                case "squeue":
                    return 0, squeue(self._own(job, now, ended=False), words, job.user, now)
                case "sacct":
                    return 0, sacct(self._own(job, now, ended=True), words, job.user, now)
                case "scancel":
                    return self._done(
                        "cancel", [word for word in words if word not in ("-Q", "--quiet")], job, ask, now
                    )
                case "scontrol" if words[:1] == ("requeue",):
                    return self._done("requeue", words[1:], job, ask, now)
                case "sbatch" if self._prepare is not None:
                    return self._submitted(self._prepare, job, ask, inventory, read, now)
            raise NotAnswered("not supported inside a job")
        except NotAnswered as error:
            return 1, f"{program}: error: {error}\n"

    def _submitted(
        self, prepare: Prepare, job: JobRecord, ask: AskReading, inventory: Inventory, read: Counter[int], now: float
    ) -> tuple[int, str] | None:
        """Queue the job that sbatch asks for; its id, made of the request's name, says whether that was done."""
        match = _ID.fullmatch(ask.id)
        assert match is not None
        new = ids.of_request(f"{job.id}-{job.attempt}-{ask.id}", int(match[1]))
        if any(row.asked_by == job.id for row in self._store.rows_of(new)):
            options = ask.words[1 : ask.script_word or len(ask.words)]
            alone = any(word.startswith("--pars") for word in options)  # it may be cut short
            return 0, f"{new}\n" if alone else f"Submitted batch job {new}\n"
        if self._store.was_applied(f"{new}.submit"):
            whys = [e.data["why"] for e in self._store.events(job_id=new) if e.kind == "refused_command"]
            raise NotAnswered(str(whys[-1]) if whys else "the job was not queued")
        if is_cancelled(job):
            raise NotAnswered(f"job {job.id} was cancelled")
        if self._inbox.has_submission(new) or read[job.uid] >= MAX_READ:
            return None
        read[job.uid] += 1
        try:
            found = prepare(inventory, job, ask)
        except GpuschedError as error:
            raise NotAnswered(error.line()) from None
        except Exception as error:  # what nobody thought of in one script must not stop the cycle
            raise NotAnswered(f"internal error: {type(error).__name__}") from None
        if isinstance(found, int):
            return 3, f"{found}\n"
        for other in {one.job_id for one in found.spec.dependencies if one.job_id}:
            rows = self._store.rows_of(other)
            if not rows or rows[0].uid != job.uid:
                raise NotAnswered(f"--dependency: {job.user} has no job {other}")
        with contextlib.suppress(FileExistsError):
            self._inbox.deliver(msgspec.structs.replace(found, id=new, time=now, asked_by=job.id))
        return None

    def _own(self, job: JobRecord, now: float, ended: bool) -> list[JobRecord]:
        """Return the jobs of its user: the latest ones, and itself."""
        states = None if ended else frozenset(JobState) - ENDED
        found = self._store.jobs(states=states, user=job.user, since=now - SINCE_S if ended else None, limit=MAX_JOBS)
        return [one for one in found if one.uid == job.uid]

    def _done(
        self, act: Literal["cancel", "requeue"], words: Sequence[str], job: JobRecord, ask: AskReading, now: float
    ) -> tuple[int, str] | None:
        file = f"{job.id}-{job.attempt}-{ask.id}"
        if self._store.was_applied(f"{file}.asked"):
            return 0, ""
        names = tuple(one for word in words for one in word.split(",") if one)
        if not names or any(one.startswith("-") for one in names):
            raise NotAnswered(f"expected ids of jobs, found {' '.join(words)[:80]!r}")
        for one in names:
            rows = self._store.rows_of(one)
            if not rows:
                raise NotAnswered(f"there is no job {one[:60]}")
            if any(row.uid != job.uid for row in rows):
                raise NotAnswered(f"job {one} belongs to {rows[0].user}")
        if act == "requeue" and job.id in names and is_cancelled(job):
            raise NotAnswered(f"job {job.id} was cancelled")
        with contextlib.suppress(FileExistsError):  # it lies there already
            self._inbox.deliver(
                RelayedCommand(time=now, job_id=job.id, attempt=job.attempt, act=act, job_ids=names), name=file
            )
        return None
