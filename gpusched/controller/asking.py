"""What running jobs ask: Slurm's commands inside them, answered for their own user's jobs. docs/decisions/0058.

A request is a file in the job's folder, seen with each reading of its node until the job has its answer. Here it is
looked at each time as if it were the first: what it changes goes through the inbox under a name of its own, which is
folded once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from gpusched.cluster.base import Observation, Operation
from gpusched.model.commands import Asked
from gpusched.model.jobs import ENDED, Job, JobState, parse_container_name
from gpusched.model.readings import AskReading
from gpusched.queue.inbox import Inbox
from gpusched.queue.store import Store
from gpusched.views.squeue import NotAnswered, sacct, squeue

MAX_ANSWER = 256 * 1024
MAX_JOBS = 1000
SINCE_S = 86400.0  # of ended jobs, where sacct is not told which
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class Asking:
    """Answers; it keeps nothing of its own."""

    def __init__(self, store: Store, inbox: Inbox) -> None:
        self._store, self._inbox = store, inbox

    def answers(self, observations: Mapping[str, Observation], now: float) -> list[Operation]:
        """Return the answers to what is asked on these nodes; what must be folded first has to wait for its."""
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
            if not current or record is None or record.node != node or not _ID.fullmatch(ask.id):
                continue
            assert job is not None
            if (answer := self._answer(job, ask, now)) is not None:
                code, text = answer
                note = f"{ask.id} {code}\n{text}"[:MAX_ANSWER].replace("\0", "")
                operations.append(Operation(verb="answer", node=node, rank=record, note=note))
        return operations

    def _answer(self, job: Job, ask: AskReading, now: float) -> tuple[int, str] | None:
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
            raise NotAnswered("inside a job this is not answered")
        except NotAnswered as error:
            return 1, f"{program}: error: {error}\n"

    def _own(self, job: Job, now: float, ended: bool) -> list[Job]:
        """Return the jobs of its user: the latest ones, and itself."""
        states = None if ended else frozenset(JobState) - ENDED
        found = self._store.jobs(states=states, user=job.user, since=now - SINCE_S if ended else None, limit=MAX_JOBS)
        return [one for one in found if one.uid == job.uid]

    def _done(
        self, act: Literal["cancel", "requeue"], words: Sequence[str], job: Job, ask: AskReading, now: float
    ) -> tuple[int, str] | None:
        file = f"{job.id}-{job.attempt}-{ask.id}"
        if self._store.was_folded(f"{file}.asked"):
            return 0, ""
        ids = tuple(one for word in words for one in word.split(",") if one)
        if not ids or any(one.startswith("-") for one in ids):
            raise NotAnswered(f"expected ids of jobs, found {' '.join(words)[:80]!r}")
        for one in ids:
            rows = self._store.rows_of(one)
            if not rows:
                raise NotAnswered(f"there is no job {one[:60]}")
            if any(row.uid != job.uid for row in rows):
                raise NotAnswered(f"job {one} belongs to {rows[0].user}")
        ending = job.ending.outcome if job.ending is not None else job.state
        if act == "requeue" and job.id in ids and ending is JobState.CANCELLED:
            raise NotAnswered(f"job {job.id} was cancelled")
        with contextlib.suppress(FileExistsError):  # it lies there already
            self._inbox.deliver(Asked(time=now, job_id=job.id, attempt=job.attempt, act=act, job_ids=ids), name=file)
        return None
