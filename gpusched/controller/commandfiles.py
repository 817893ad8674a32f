"""Applies command files to the store: checks permissions, and changes jobs, nodes, policies and reservations."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from gpusched.config.accounts import priority_of, with_group_and_class
from gpusched.config.reservations import check_use
from gpusched.config.users import user_name
from gpusched.config.validate import (
    MAX_ARRAY_TASKS,
    MAX_PRIORITY,
    MAX_WAITING_DEPENDENCIES,
    check_slices_exist,
    check_text,
    validate_spec,
)
from gpusched.controller.auditing import HOST, AuditTrail, entry_of
from gpusched.controller.health import forgiven
from gpusched.controller.promoting import PolicyCommandHandler
from gpusched.controller.reserving import ReservationCommandHandler
from gpusched.controller.secretfiles import SecretFiles
from gpusched.errors import MAX_LINE, GpuschedError, UsageError, printable
from gpusched.model import commands, ids
from gpusched.model.arrays import event_log_id, jobs_named, restricted_row, split_task_ids, task_event_data
from gpusched.model.audit import audit_entry
from gpusched.model.events import Event
from gpusched.model.indices import count as count_indices
from gpusched.model.indices import spans_of
from gpusched.model.jobs import ENDED, Ending, JobRecord, JobSpec, JobState
from gpusched.model.readings import NodeState
from gpusched.model.resources import Inventory, Settings
from gpusched.model.units import count_of
from gpusched.queue.arrivals import MAX_WAITING
from gpusched.queue.damage import STORE_FAULTS, DatabaseDamaged
from gpusched.queue.inbox import POSTPONE_S, Inbox, MalformedCommand, ReceivedCommand
from gpusched.queue.lifecycle import transition_to
from gpusched.queue.quotas import PendingJobLimits
from gpusched.queue.store import NodeRecord, Store

MAX_ARRAY_INDEX = 9_999_999
REMEMBER_APPLIED_S = 86400.0
MAX_SUBMIT_DELAY_S = 60.0
MAX_FAILURES = 100  # per cycle: on a full disk all will fail
DEPENDENCY_DELAY_S = 2.0
MAX_HANDLED_JOBS = 10_000  # that a user's commands are about in a cycle; the last one begun is finished
MAX_CPU_S = 5.0  # that a user's commands take in a cycle, likewise
MAX_LOOKED_UP = 2 * MAX_ARRAY_TASKS  # tasks that one command may name: each id may be a whole array's
MAX_MALFORMED_EVENTS = 20  # events about malformed files per user and cycle
TASK_BYTES = 300  # approximate size of a pending job besides its spec
STORAGE_ERRORS = (sqlite3.OperationalError, OSError)  # transient, and not caused by a command

_VALUE_ERRORS = (sqlite3.IntegrityError, sqlite3.DataError)  # the store works, but cannot hold this command's values

_WITH_SLURM = (commands.Promote, commands.Rollback, commands.ShadowOn, commands.ShadowOff, commands.RecordAudit)
_log = logging.getLogger(__name__)


class CommandRefused(Exception):
    """A well-formed command that is not permitted or not possible; the text gives the reason in one line."""


class Caller(msgspec.Struct, frozen=True):
    """The user who sent a command, by the owner of its file."""

    uid: int
    name: str
    admin: bool


class CommandApplier:
    """Applies the command files in the inbox to the store."""

    def __init__(self, store: Store, inbox: Inbox, inventory: Inventory, secrets: SecretFiles) -> None:
        self._store, self._inbox, self._inventory, self._secrets = store, inbox, inventory, secrets
        self._programs = secrets.programs
        self._programs_size: dict[int, int] = {}  # per user, read on first use
        self._secrets_size: dict[str, int] = {}  # the same
        self._waiting: dict[str, tuple[int, int]] | None = None  # per user: jobs and bytes, read on first use
        self._queued_by_jobs: dict[str, int] = {}  # per user: pending jobs that were submitted by jobs
        self._dependencies: dict[str, int] = {}  # per user: of pending jobs, read on first use
        self._handled = Counter[int]()  # per user: jobs that this cycle's commands are about
        self._cpu_s = defaultdict[int, float](float)  # per user: that this cycle's commands took
        self._queued_by_class = PendingJobLimits(store, inventory.quotas)
        self._audit = AuditTrail(store)

    def apply_inbox(self, now: float) -> int:
        """Apply this cycle's command files, in order, in one transaction; return the number of files taken.

        Files are removed after the commit. After a crash in between, remaining files are recognised by name and change
        nothing. If the transaction fails, each file is applied in a transaction of its own: those that do not fit on
        the disk stay in the inbox and are retried later, and the others go ahead.
        """
        names = self._inbox.next_batch()
        applied: list[tuple[str, bool]] = []
        if names:
            try:
                with self._store.transaction():
                    malformed = Counter[int]()
                    applied = [self._apply_once(item, now, malformed) for item in self._items(names)]
                    self._refuse_further(malformed, now)
                    self._audit.finish(now)
                    self._secrets.sync()
            except STORAGE_ERRORS:
                applied = self._apply_singly(names, now)
        for file_name, well_formed in applied:
            (self._inbox.remove if well_formed else self._inbox.refuse)(file_name)
        if applied:
            self._store.forget_applied(now - REMEMBER_APPLIED_S)
        if not all(well_formed for _, well_formed in applied):
            self._inbox.tidy_refused()
        self._refuse_surplus(now)
        return len(applied)

    def _items(self, names: list[str]) -> Iterator[ReceivedCommand | MalformedCommand]:
        """Read the files; put off those that refer to a command not applied yet, or whose users had their part."""
        for item in self._inbox.read(names):
            if self._handled[item.uid] >= MAX_HANDLED_JOBS or self._cpu_s[item.uid] >= MAX_CPU_S:
                continue
            if isinstance(item, ReceivedCommand) and self._must_wait(item):
                self._inbox.postpone(item.file_name, DEPENDENCY_DELAY_S)
            else:
                began = time.thread_time()
                yield item  # it is applied meanwhile
                self._cpu_s[item.uid] += time.thread_time() - began

    def _must_wait(self, item: ReceivedCommand) -> bool:
        """Return whether it refers to a submission, or follows a put-off command of its user, still in the inbox."""
        command = item.command
        job_ids: Iterable[str] = ()
        if isinstance(command, commands.Submit):
            job_ids = (dependency.job_id for dependency in command.spec.dependencies)
        elif isinstance(command, commands.JobCommand):
            job_ids = command.job_ids
        earlier = [file for name in job_ids if self._inbox.is_listed(file := f"{name.partition('_')[0]}.submit")]
        if not isinstance(command, commands.Submit):
            earlier += self._inbox.postponed_of(item.uid)
        # Only older files count, so that two that name each other do not wait forever.
        owner = self._inbox.owner
        return any(file < item.file_name and not self._store.was_applied(_mark(file, owner(file))) for file in earlier)

    def _apply_once(
        self, item: ReceivedCommand | MalformedCommand, now: float, malformed: Counter[int]
    ) -> tuple[str, bool]:
        """Apply a file unless it was applied before; return its name, and whether it is well-formed."""
        mark = _mark(item.file_name, item.uid)
        well_formed = not isinstance(item, MalformedCommand)
        if not self._store.was_applied(mark):
            well_formed = self._apply_file(item, now, malformed)
        self._store.mark_applied(mark, now)  # again while the file exists: the mark must outlive it
        return item.file_name, well_formed

    def _apply_singly(self, names: list[str], now: float) -> list[tuple[str, bool]]:
        applied, errors = [], []
        self._forget_counts()  # they include what was rolled back
        for item in self._items(names):
            try:
                with self._store.transaction():
                    result = self._apply_once(item, now, Counter())
                    self._audit.finish(now)
                    self._secrets.sync()
                applied.append(result)  # after the commit, since its file is removed
            except STORAGE_ERRORS as error:
                self._forget_counts()
                self._inbox.postpone(item.file_name)
                errors.append(error)
                if len(errors) == MAX_FAILURES:  # put off the rest of this cycle as well
                    for name in names[names.index(item.file_name) :]:
                        self._inbox.postpone(name)
                    break
        if errors:
            _log.error(
                "%s in the inbox cannot be recorded: %s; retried every %g s, see 'gpusched check'",
                count_of(len(errors), "command"), errors[0], POSTPONE_S,
            )  # fmt: skip
        return applied

    def _refuse_surplus(self, now: float) -> None:
        """Discard the latest files of users who exceed the limit, unread, with one event per user."""
        surplus = self._inbox.surplus()
        if not surplus:
            return
        try:
            with self._store.transaction():
                for uid, names in surplus.items():
                    why = f"{user_name(uid)} has more than {MAX_WAITING} commands in the inbox"
                    data = {"file": f"{len(names)} files", "why": why, "surplus": len(names)}
                    self._audit_file(uid, f"{len(names)} files", why, now)
                    self._store.append([Event(time=now, kind="refused_command", user=user_name(uid), data=data)])
        except STORAGE_ERRORS:
            return  # the files stay until the event can be recorded
        for uid, names in surplus.items():
            self._inbox.discard(names)
            _log.warning(
                "refused %d commands of %s: more than %d in the inbox", len(names), user_name(uid), MAX_WAITING
            )

    def _refuse_further(self, malformed: Counter[int], now: float) -> None:
        """Record the number of malformed files beyond those recorded individually."""
        for uid, count in malformed.items():
            if count > MAX_MALFORMED_EVENTS:
                self._refuse(f"{count - MAX_MALFORMED_EVENTS} more files", user_name(uid), "not commands either", now)

    def _apply_file(self, item: ReceivedCommand | MalformedCommand, now: float, malformed: Counter[int]) -> bool:
        """Apply one file; return False if it is to be set aside for inspection."""
        if isinstance(item, MalformedCommand):
            self._audit_file(item.uid, item.file_name, item.why, now)
            malformed[item.uid] += 1
            if malformed[item.uid] <= MAX_MALFORMED_EVENTS:
                self._refuse(item.file_name, user_name(item.uid), item.why, now)
            return False
        caller = self._caller(item.uid)
        command = item.command
        if isinstance(command, commands.Submit) and not caller.admin:
            # An early date must not put a job at the head of the queue; clients write the file at once.
            command = msgspec.structs.replace(command, time=max(command.time, item.written - MAX_SUBMIT_DELAY_S))
        try:
            # An unforeseen error undoes this command's changes, not those of the other files in the transaction.
            with self._store.savepoint():
                refused = ""
                try:
                    if isinstance(command, commands.Submit) and ids.is_job_id(command.id):
                        if item.file_name != (name := f"{command.id}.submit"):  # else users take others' waiting ids
                            raise CommandRefused(f"the submission of job {command.id} is not in {name}")
                    self._apply(command, caller, now)
                except DatabaseDamaged:
                    raise
                except (CommandRefused, GpuschedError) as error:  # changes made before the error stay
                    refused = printable(str(error)) or "refused"
                    self._refuse(item.file_name, caller.name, refused, now)
                self._record(command, caller, refused, now)
        except Exception as error:  # an unforeseen error in one command must not block the inbox
            if isinstance(error, STORE_FAULTS) and not isinstance(error, _VALUE_ERRORS):
                raise  # the store's fault
            why = f"internal error: {error!r}"
            self._refuse(item.file_name, caller.name, why, now)
            self._record(command, caller, why, now)
            return False
        return True

    def _record(self, command: commands.AnyCommand, caller: Caller, refused: str, now: float) -> None:
        """Record a command in the audit log: one from inside a job as its user's."""
        match command:
            case commands.Submit(asked_by=job_id) | commands.RelayedCommand(job_id=job_id) if caller.uid == os.getuid():
                job = self._store.job(job_id) if job_id else None
            case _:  # others' claim to be a job is refused
                job = None
        inside = None if job is None else (job.uid, job.user)
        self._audit.add(entry_of(command, (caller.uid, caller.name), inside, refused, self._store, now))

    def _audit_file(self, uid: int, file_name: str, why: str, now: float) -> None:
        name = _as_text(file_name)
        self._audit.add(audit_entry(now, HOST, (uid, user_name(uid)), "malformed", (name,), refused=why))

    def _refuse(self, file_name: str, user: str, why: str, now: float) -> None:
        job_id = _as_text(file_name).partition(".")[0] if file_name.endswith(".submit") else None
        data = {"file": _as_text(file_name)[:MAX_LINE], "why": why[:MAX_LINE]}
        self._store.append([Event(time=now, kind="refused_command", job_id=job_id, user=user, data=data)])

    def _caller(self, uid: int) -> Caller:
        name = user_name(uid)
        return Caller(uid, name, uid in (0, os.getuid()) or name in self._inventory.settings.admins)

    def _apply(self, command: commands.AnyCommand, caller: Caller, now: float) -> None:
        if self._inventory.engine == "slurm" and not isinstance(command, _WITH_SLURM):
            raise CommandRefused("Slurm is the engine here: use its own commands")
        match command:
            case commands.Submit():
                if command.asked_by:
                    self._submit_from_inside(command, caller, now)
                else:
                    self._submit(command, caller, now)
            case commands.Cancel():
                self._for_each_job(command, caller, lambda job: self._cancel(job, caller, command.now, now), now)
            case commands.Hold():
                self._for_each_job(command, caller, lambda job: self._hold(job, caller, now), now)
            case commands.Release():
                self._for_each_job(command, caller, lambda job: self._release(job, caller, now), now)
            case commands.Requeue():
                self._for_each_job(command, caller, lambda job: self._requeue(job, caller, now), now)
            case commands.RelayedCommand():
                self._relayed(command, caller, now)
            case commands.SetPriority():
                self._for_each_job(command, caller, lambda job: self._priority(job, caller, command.priority, now), now)
            case commands.Drain():
                self._nodes(command.nodes, caller, now, drain=command.reason or "no reason given")
            case commands.Resume():
                self._nodes(command.nodes, caller, now, drain=None)
            case commands.Reserve():
                self._reservations(caller).reserve(command, caller.name, now)
            case commands.ChangeReservation():
                self._reservations(caller).change(command, caller.name, now)
            case commands.CancelReservation():
                self._reservations(caller).cancel(command, caller.name, now)
            case commands.Promote():
                self._policies(caller).promote(command, caller.name, now)
            case commands.Rollback():
                self._policies(caller).rollback(command, caller.name, now)
            case commands.ShadowOn():
                self._policies(caller).shadow_on(command, caller.name, now)
            case commands.ShadowOff():
                self._policies(caller).shadow_off(command, caller.name, now)

            case commands.RecordAudit():
                _check_audit(command, caller)

    # -- submissions ---------------------------------------------------------------------------------------------

    def _submit_from_inside(self, command: commands.Submit, caller: Caller, now: float) -> None:
        """Submit a job for the user of the requesting job, without admin privileges."""
        requester = self._requesting_job(command.asked_by, caller)
        if requester is None:
            raise CommandRefused(f"there is no job {command.asked_by[:40]}")
        if is_cancelled(requester):
            raise CommandRefused(f"job {requester.id} was cancelled")
        if command.spec.secret_names:  # the requesting job's own secrets
            kept = self._secrets.read(requester.id) or {}
            secrets = {name: kept[name] for name in command.spec.secret_names if name in kept}
            command = msgspec.structs.replace(command, secrets=secrets)
        self._submit(command, Caller(requester.uid, requester.user, admin=False), now, requester)

    def _submit(self, command: commands.Submit, caller: Caller, now: float, requester: JobRecord | None = None) -> None:
        if not ids.is_job_id(command.id):  # ids become part of paths and container names
            raise CommandRefused(f"{command.id[:40]!r} is not a job id")
        validate_spec(command.spec, self._inventory)
        command = msgspec.structs.replace(command, spec=self._with_group(command.spec, caller.name))
        self._check_mounts(command, caller, requester)
        if command.spec.reservation:
            check_use(command.spec, caller.name, self._store.reservations(now), self._inventory)
        if command.spec.profile:
            check_slices_exist(command.spec, self._inventory, self._store.node_readings())
        if missing := set(command.spec.secret_names) ^ set(command.secrets):
            raise CommandRefused(f"secrets named and secrets passed differ: {', '.join(sorted(missing))}")
        if self._store.rows_of(command.id):
            raise CommandRefused(f"job {command.id} already exists")
        _check_secrets(command)
        _check_program(command)
        job = self._job(_with_capped_session(command, self._inventory.settings), caller, now)
        program = len(command.program) + sum(map(len, command.task_programs))
        secrets = len(msgspec.json.encode(command.secrets)) if command.secrets else 0
        queued = self._check_limits(job, caller, program, secrets)
        if requester is not None:
            self._check_queued_by_jobs(job)
        self._queued_by_class.check(job.user, job.spec, job.count)
        if command.secrets:
            self._secrets.write(command.id, command.secrets)
            self._secrets_size[job.user] += secrets
        if program:
            texts = dict(zip(map(str, sorted(set(command.array or ()))), command.task_programs, strict=False))
            self._programs.of(caller.uid).write(command.id, {"": command.program, **texts})
            self._programs_size[caller.uid] += program
        self._store.put_jobs([job])
        data = {
            "name": command.spec.name,
            "partition": command.spec.partition,
            "asked_at": command.time,
        } | task_event_data(job)
        self._store.append([Event(time=now, kind="submitted", job_id=event_log_id(job), user=job.user, data=data)])
        if command.array is not None and command.max_running is not None:
            self._store.set_meta(f"array_limit:{command.id}", str(command.max_running))
        self._queued[caller.name] = queued
        self._add_dependencies(job)
        if requester is not None:
            self._queued_by_jobs[job.user] += job.count
        self._queued_by_class.add(job.user, job.spec, job.count)

    def _with_group(self, spec: JobSpec, user: str) -> JobSpec:
        """Return the spec with its group; refuse a group or class that the user may not use, or that can never run."""
        try:
            return with_group_and_class(spec, user, self._inventory)
        except UsageError as error:
            raise CommandRefused(error.line()) from None

    def _forget_counts(self) -> None:
        self._waiting = None
        self._audit.forget()
        self._handled.clear()
        self._programs_size.clear()
        self._secrets_size.clear()
        self._queued_by_jobs.clear()
        self._dependencies.clear()
        self._queued_by_class = PendingJobLimits(self._store, self._inventory.quotas)

    @property
    def _queued(self) -> dict[str, tuple[int, int]]:
        if self._waiting is None:
            self._waiting = self._store.waiting_of_users()
        return self._waiting

    def _check_limits(self, job: JobRecord, caller: Caller, program: int, secrets: int) -> tuple[int, int]:
        """Return number and bytes of the caller's pending jobs including this job or array; refuse beyond the limits.

        ``program``, ``secrets``: bytes of its program and secrets, which are stored in files.
        """
        settings = self._inventory.settings
        count, size = self._check_count(job)
        size += len(msgspec.json.encode(job.spec)) + TASK_BYTES + len(msgspec.json.encode(job.tasks))
        if program and caller.uid not in self._programs_size:
            self._programs_size[caller.uid] = self._programs.of(caller.uid).size()
        if secrets and job.user not in self._secrets_size:
            self._secrets_size[job.user] = self._secrets.size_of(self._store.submissions_with_secrets(job.user))
        total = size + program + self._programs_size.get(caller.uid, 0)
        total += secrets + self._secrets_size.get(job.user, 0)
        if total > settings.max_queued_mib_per_user << 20:
            raise CommandRefused(
                f"the pending jobs of {caller.name} would take {total >> 20} MiB, more than the allowed "
                f"{settings.max_queued_mib_per_user} MiB (settings.max_queued_size_per_user of inventory.yaml)"
            )
        return count, size

    def _check_count(self, job: JobRecord) -> tuple[int, int]:
        """Return number, with this job or array, and bytes, without it, of its user's pending jobs; refuse too many."""
        count, size = self._queued.get(job.user, (0, 0))
        limit = self._inventory.settings.max_queued_jobs_per_user
        if count + job.count > limit:
            raise CommandRefused(
                f"{job.user} has {count} of {count_of(limit, 'pending job')}; {job.count} more exceed the limit "
                "(settings.max_queued_jobs_per_user of inventory.yaml)"
            )
        if job.spec.dependencies:
            self._check_dependencies(job)
        return count + job.count, size

    def _check_dependencies(self, job: JobRecord) -> None:
        if job.user not in self._dependencies:
            self._dependencies[job.user] = self._store.waiting_dependencies(job.user)
        count, more = self._dependencies[job.user], _dependencies_of(job)
        if count + more > MAX_WAITING_DEPENDENCIES:
            raise CommandRefused(
                f"{job.user}'s pending jobs have {count} of {MAX_WAITING_DEPENDENCIES} dependencies; {more} more "
                "exceed the limit; depend on an array instead of each of its tasks"
            )

    def _add_dependencies(self, job: JobRecord) -> None:
        if job.spec.dependencies:
            self._dependencies[job.user] += _dependencies_of(job)

    def _check_queued_by_jobs(self, job: JobRecord) -> None:
        """Limit pending jobs submitted by jobs, so that a script that submits itself cannot fill the queue."""
        if job.user not in self._queued_by_jobs:
            self._queued_by_jobs[job.user] = self._store.waiting_by_jobs(job.user)
        count, limit = self._queued_by_jobs[job.user], self._inventory.settings.max_queued_jobs_by_jobs
        if count + job.count > limit:
            raise CommandRefused(
                f"{job.user} has {count} of {count_of(limit, 'pending job')} that jobs submit; {job.count} more exceed "
                "the limit (settings.max_queued_jobs_by_jobs of inventory.yaml)"
            )

    def _check_mounts(self, command: commands.Submit, caller: Caller, requester: JobRecord | None) -> None:
        if self._caller(caller.uid).admin:
            if requester is not None:
                _check_inherited_mounts(command.spec, requester)
            return
        allowed = [os.path.normpath(a) for a in self._inventory.settings.allowed_mounts]
        for mount in command.spec.mounts:
            source = os.path.normpath(mount.source)
            if not any(source == a or source.startswith(a.rstrip("/") + "/") for a in allowed):
                places = ", ".join(allowed) or "nothing"
                raise CommandRefused(
                    f"mount of {mount.source}: settings.allowed_mounts of inventory.yaml allows {places}"
                )

    def _job(self, command: commands.Submit, caller: Caller, now: float) -> JobRecord:
        """Return the job, or the row that all tasks of the array share."""
        spec = command.spec
        if (spec.priority > 0 or spec.nice < 0) and not caller.admin:
            raise CommandRefused("--priority above 0, or --nice below, needs an admin; --nice lowers your own")
        if command.array is not None and not 0 < len(set(command.array)) <= MAX_ARRAY_TASKS:
            raise CommandRefused(f"an array needs 1 to {MAX_ARRAY_TASKS} different indices")
        if command.array is not None and not all(0 <= index <= MAX_ARRAY_INDEX for index in command.array):
            raise CommandRefused(f"array indices must be from 0 to {MAX_ARRAY_INDEX}")
        if command.max_running is not None and not 0 < command.max_running <= MAX_ARRAY_TASKS:
            raise CommandRefused("at least one task of an array must be allowed to run at once")
        job = JobRecord(
            id=command.id,
            user=caller.name,
            uid=caller.uid,
            spec=spec,
            state=JobState.PENDING,
            priority=priority_of(spec, self._inventory),
            # A client's clock may be ahead of ours; earlier times are accepted, as files may wait in the inbox.
            submit_time=min(max(command.time, 0.0), now),
            eligible_time=spec.begin_time,
            held_by="user" if spec.hold else "",
            asked_by=command.asked_by,
        )
        if command.array is None:
            return job
        return restricted_row(msgspec.structs.replace(job, array_id=command.id), spans_of(command.array))

    # -- commands on jobs ----------------------------------------------------------------------------------------

    def _for_each_job(
        self,
        command: commands.JobCommand,
        caller: Caller,
        act: Callable[[JobRecord], tuple[JobRecord, Event] | None],
        now: float,
    ) -> None:
        """Apply ``act`` to each named job; a failure for one is recorded and does not affect the others.

        It is also recorded with the job, so that `gpusched show` explains why nothing happened.
        """
        if len(command.job_ids) > commands.MAX_JOB_IDS:
            count = len(command.job_ids)
            raise CommandRefused(f"a command names at most {commands.MAX_JOB_IDS} jobs, this one names {count}")
        problems, looked_up = [], 0
        command_name = type(command).__struct_config__.tag
        for job_id in dict.fromkeys(command.job_ids):
            if looked_up >= MAX_LOOKED_UP:
                problems.append(f"job {job_id[:60]}: not handled, as the command names too many tasks")
                break
            found = self._store.rows_of(job_id)
            cost = rows_looked_up(job_id, found)
            looked_up += cost
            self._handled[caller.uid] += cost
            if not found:
                problems.append(f"job {job_id}: no such job")
            changed, events = list[JobRecord](), list[Event]()
            for job in found:
                try:
                    if job.uid != caller.uid and not caller.admin:
                        problems.append(f"job {job.id} belongs to {job.user}")
                    elif change := act(job):
                        changed += [change[0]] if change[0] != job else []  # else array tasks stay in their shared row
                        events.append(change[1])
                except CommandRefused as error:
                    problems.append(str(error))
                    data: dict[str, object] = {"command": command_name, "why": str(error)}
                    events.append(self._event("refused", job, caller, now, data))
            self._store.put_jobs(changed)  # at once: an array may have 100,000 rows
            self._store.append(events)
        if problems:
            raise CommandRefused(
                "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            )

    def _cancel(self, job: JobRecord, caller: Caller, at_once: bool, now: float) -> tuple[JobRecord, Event] | None:
        if job.state in ENDED:
            return None
        message = f"cancelled by {caller.name}"
        if job.state is JobState.PENDING:
            changes = {"reason": "Cancelled", "message": message, "end_time": now}
            if job.attempt:
                changes["energy_j"] = self._store.job_energy(job.id)  # of attempts that were requeued
            return transition_to(job, JobState.CANCELLED, now, event="ended", data={"by": caller.name}, **changes)
        return self._end(job, JobState.CANCELLED, "Cancelled", message, caller, at_once, now)

    def _requeue(self, job: JobRecord, caller: Caller, now: float) -> tuple[JobRecord, Event] | None:
        message = f"requeued by {caller.name}"
        if job.state is JobState.PENDING:
            return None
        if job.state in ENDED:
            if job.spec.secret_names and not self._secrets.has(job.id):
                raise CommandRefused(f"job {job.id}: its secrets were deleted when it ended; submit it again")
            if job.spec.function and not self._programs.of(job.uid).has(job.id):
                raise CommandRefused(f"job {job.id}: its function was deleted when it ended; submit it again")
            in_group = job.spec.group in self._inventory.groups.of(job.user)  # otherwise use the user's present group
            spec = job.spec if in_group else msgspec.structs.replace(job.spec, group="")
            requeued = msgspec.structs.replace(job, spec=self._with_group(spec, job.user))
            try:
                queued = self._check_count(requeued)  # its bytes are in the store as they are
                self._queued_by_class.check(requeued.user, requeued.spec, requeued.count)
            except UsageError as error:
                raise CommandRefused(f"job {job.id}: {error.line()}") from None
            except CommandRefused as error:
                raise CommandRefused(f"job {job.id}: {error}") from None
            self._queued[requeued.user] = queued
            self._add_dependencies(requeued)
            self._queued_by_class.add(requeued.user, requeued.spec, requeued.count)
            # It starts from scratch.
            fields = requeue_fields(message) | {
                "retries": 0,
                "preemptions": None,
                "resizes": None,
                "unlaunched_on": (),
                "eligible_time": spec.begin_time,
            }
            return transition_to(requeued, JobState.PENDING, now, event="requeued", data={"by": caller.name}, **fields)
        return self._end(job, JobState.PENDING, "Requeued", message, caller, False, now)

    def _relayed(self, command: commands.RelayedCommand, caller: Caller, now: float) -> None:
        """Run a command that a job requested from inside, as its user and without admin privileges."""
        job = self._requesting_job(command.job_id, caller)
        if job is None or job.attempt != command.attempt:
            return
        inside = Caller(job.uid, job.user, admin=False)
        if command.act == "cancel":
            cancel = commands.Cancel(time=command.time, job_ids=command.job_ids)
            self._for_each_job(cancel, inside, lambda target: self._cancel(target, inside, False, now), now)
        else:
            requeue = commands.Requeue(time=command.time, job_ids=command.job_ids)
            self._for_each_job(requeue, inside, lambda target: self._requeue_from_inside(target, job, inside, now), now)

    def _requesting_job(self, job_id: str, caller: Caller) -> JobRecord | None:
        """Return the requesting job; only the controller may pass on such requests."""
        if caller.uid != os.getuid():
            raise CommandRefused("only the controller forwards requests of jobs")
        return self._store.job(job_id)

    def _requeue_from_inside(
        self, job: JobRecord, requester: JobRecord, inside: Caller, now: float
    ) -> tuple[JobRecord, Event] | None:
        """See `_requeue`; but a cancelled job may not requeue itself, such as in a signal trap."""
        if job.id == requester.id and is_cancelled(job):
            raise CommandRefused(f"job {job.id} was cancelled")
        return self._requeue(job, inside, now)

    def _end(
        self, job: JobRecord, outcome: JobState, reason: str, message: str, caller: Caller, at_once: bool, now: float
    ) -> tuple[JobRecord, Event] | None:
        """Start to end a job that holds resources, or change how it will end."""
        kill_at = now + (0 if at_once else self._inventory.settings.grace_s)
        why: dict[str, Any] = {"reason": reason, "message": message}
        data = {"by": caller.name, "outcome": outcome}
        if job.state is not JobState.COMPLETING:
            ending = Ending(outcome=outcome, kill_at=kill_at, **why)
            return transition_to(job, JobState.COMPLETING, now, event="ending", data=data, ending=ending, **why)
        assert job.ending is not None
        if at_once or outcome != job.ending.outcome:
            ending = Ending(outcome=outcome, kill_at=min(job.ending.kill_at, kill_at), **why)
            changed = msgspec.structs.replace(job, ending=ending, **why)
            return changed, Event(time=now, kind="ending", job_id=job.id, user=job.user, data=data)
        return None

    def _hold(self, job: JobRecord, caller: Caller, now: float) -> tuple[JobRecord, Event]:
        self._require_pending(job)
        if job.held_by == "admin" and not caller.admin:
            # A user's hold would replace the admin's, and the user could release that.
            raise CommandRefused(f"job {job.id} is already held by an admin")
        by = "admin" if caller.admin and caller.uid != job.uid else "user"
        return msgspec.structs.replace(job, held_by=by), self._event("held", job, caller, now)

    def _release(self, job: JobRecord, caller: Caller, now: float) -> tuple[JobRecord, Event]:
        self._require_pending(job)
        if job.held_by == "admin" and not caller.admin:
            raise CommandRefused(f"job {job.id} is held by an admin")
        return msgspec.structs.replace(job, held_by=""), self._event("released", job, caller, now)

    def _priority(self, job: JobRecord, caller: Caller, priority: int, now: float) -> tuple[JobRecord, Event]:
        self._require_pending(job)
        if abs(priority) > MAX_PRIORITY:
            raise CommandRefused(f"a priority is between -{MAX_PRIORITY} and {MAX_PRIORITY}")
        if priority > job.priority and not caller.admin:
            raise CommandRefused(f"job {job.id}: raising a priority (from {job.priority} to {priority}) needs an admin")
        event = self._event("priority", job, caller, now, {"from": job.priority, "to": priority})
        return msgspec.structs.replace(job, priority=priority), event

    @staticmethod
    def _require_pending(job: JobRecord) -> None:
        if job.state is not JobState.PENDING:
            raise CommandRefused(f"job {job.id} is {job.state}, not PENDING")

    @staticmethod
    def _event(kind: str, job: JobRecord, caller: Caller, now: float, data: dict[str, object] | None = None) -> Event:
        facts = {"by": caller.name} | (data or {}) | task_event_data(job)
        return Event(time=now, kind=kind, job_id=event_log_id(job), user=job.user, data=facts)

    # -- commands on policies ------------------------------------------------------------------------------------

    def _policies(self, caller: Caller) -> PolicyCommandHandler:
        if not caller.admin:
            raise CommandRefused(
                f"{caller.name} is not an admin; only admins may promote (settings.admins of inventory.yaml)"
            )
        return PolicyCommandHandler(self._store, self._inbox.tmp.parents[1], self._inventory)

    # -- commands on reservations --------------------------------------------------------------------------------

    def _reservations(self, caller: Caller) -> ReservationCommandHandler:
        if not caller.admin:
            raise CommandRefused(
                f"{caller.name} is not an admin; only admins may reserve (settings.admins of inventory.yaml)"
            )
        return ReservationCommandHandler(self._store, self._inventory)

    # -- commands on nodes ---------------------------------------------------------------------------------------

    def _nodes(self, names: tuple[str, ...], caller: Caller, now: float, *, drain: str | None) -> None:
        if not caller.admin:
            raise CommandRefused(
                f"{caller.name} is not an admin; only admins may drain and resume (settings.admins of inventory.yaml)"
            )
        records = self._store.node_records()
        unknown = [name for name in names if self._inventory.node(name) is None]
        resumed = drain is None
        by, kind = (None, "resumed") if resumed else (caller.name, "drained")
        for name in names:
            if name in unknown:
                continue
            record = records.get(name, NodeRecord(name=name))
            record = msgspec.structs.replace(record, drain_reason=drain, drained_by=by, failed_launches=())
            if resumed:
                record = msgspec.structs.replace(record, health=forgiven(record.health))
            if resumed and record.state in (NodeState.DRAINED, NodeState.DRAINING):
                record = msgspec.structs.replace(record, state=NodeState.UNKNOWN, reason="resumed, not probed since")
            self._store.put_nodes([record])
            data = {"reason": drain} if drain else {}
            self._store.append([Event(time=now, kind=kind, node=name, user=caller.name, data=data)])
        if unknown:
            raise CommandRefused(f"no such node: {', '.join(unknown)}")


def _check_audit(command: commands.RecordAudit, caller: Caller) -> None:
    """Refuse entries of users who could forge them; see `_record` for the entry."""
    if not caller.admin:
        raise CommandRefused("only admins, root and the controller's user add entries to the audit log")
    if (command.uid is not None or command.user) and caller.uid not in (0, os.getuid()):
        raise CommandRefused("only root and the controller's user add entries about others")


def is_cancelled(job: JobRecord) -> bool:
    """Return whether the job was cancelled, even if it has not ended yet."""
    return (job.ending.outcome if job.ending is not None else job.state) is JobState.CANCELLED


def _dependencies_of(job: JobRecord) -> int:
    return jobs_named(dependency.job_id for dependency in job.spec.dependencies)


def rows_looked_up(job_id: str, found: Sequence[JobRecord]) -> int:
    """Return how many rows it took at most to find these: tasks that are not there were looked for, too."""
    missing = max(0, count_indices(split_task_ids(job_id)[1]) - sum(job.count for job in found))
    return max(1, len(found) + missing)


def requeue_fields(message: str) -> dict[str, Any]:
    """Return the field values of a requeued job; its earlier ones remain in its events and runs."""
    cleared = ("allocation", "ending", "start_time", "end_time", "exit_code", "master_port", "policy", "policy_version",
               "idle")  # fmt: skip
    return {**dict.fromkeys(cleared), "reason": "", "message": message}


def _with_capped_session(command: commands.Submit, settings: Settings) -> commands.Submit:
    """Return the submission with its session time capped at the site's limit."""
    spec = command.spec
    if spec.session is None or spec.session <= settings.session_keep_s:
        return command
    return msgspec.structs.replace(command, spec=msgspec.structs.replace(spec, session=settings.session_keep_s))


def _check_inherited_mounts(spec: JobSpec, requester: JobRecord) -> None:
    """Refuse mounts that the requesting job does not have itself, although its user may mount anything.

    Only identical mounts are allowed: in a folder that the job can write to, it may have created a link to anywhere.
    """
    for mount in spec.mounts:
        if not any(mount.source == own.source and own.read_only <= mount.read_only for own in requester.spec.mounts):
            raise CommandRefused(f"mount of {mount.source}: a job can only pass on mounts of its own")


def _check_secrets(command: commands.Submit) -> None:
    """Refuse secrets that are no environment variables; what the refusal says of one is its name."""
    for name, value in command.secrets.items():
        check_text(f"secret {name}", value)


def _check_program(command: commands.Submit) -> None:
    """Refuse a function without its program, and the reverse."""
    if bool(command.spec.function) != bool(command.program) or (command.task_programs and not command.program):
        raise CommandRefused("a job with a function needs its program; other jobs must not have one")
    if command.task_programs and len(command.task_programs) != len(set(command.array or ())):
        raise CommandRefused(
            f"{len(command.task_programs)} programs for {len(set(command.array or ()))} tasks of an array"
        )


def _mark(file_name: str, uid: int | None) -> str:
    """Return the name under which a file counts as applied: a user's file must never count as another user's."""
    return _as_text(file_name) if uid == os.getuid() else f"{uid}:{_as_text(file_name)}"


def _as_text(file_name: str) -> str:
    """Return a file name as text: names of other users' files may not be UTF-8."""
    return file_name.encode(errors="backslashreplace").decode()
