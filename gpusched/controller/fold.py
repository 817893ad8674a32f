"""Folding command files into the store: who may do what, and what it does to the jobs."""

from __future__ import annotations

import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from gpusched.config.accounts import priority_of, with_group_and_class
from gpusched.config.reservations import check_use
from gpusched.config.users import user_name
from gpusched.config.validate import MAX_ARRAY_TASKS, MAX_PRIORITY, validate_spec
from gpusched.controller.promoting import PolicyCommandHandler
from gpusched.controller.reserving import ReservationCommandHandler
from gpusched.controller.secretfiles import SecretFiles
from gpusched.errors import GpuschedError, UsageError
from gpusched.model import commands, ids
from gpusched.model.arrays import event_log_id, restricted_row, task_event_data
from gpusched.model.events import Event
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
REMEMBER_FOLDED_S = 86400.0
MAX_SUBMIT_DELAY_S = 60.0
MAX_FAILURES = 100  # of one round: on a full disk all will fail
EARLY_S = 2.0
MOST_TOLD = 20  # files of one user and cycle that were no commands, one by one
TASK_BYTES = 300  # about what a waiting job takes besides its spec
STORAGE_ERRORS = (sqlite3.OperationalError, OSError)  # what passes, and no command is to blame for

_OF_VALUES = (sqlite3.IntegrityError, sqlite3.DataError)  # the store is well, and cannot take what was asked for

_OF_POLICIES = (commands.Promote, commands.Rollback, commands.ShadowOn, commands.ShadowOff)


class CommandRefused(Exception):
    """A command that is well formed but may not, or cannot, be done; the text says why in one line."""


class Caller(msgspec.Struct, frozen=True):
    """Who asked, by the owner of the command file."""

    uid: int
    name: str
    admin: bool


class CommandApplier:
    """Folds what lies in the inbox into the store."""

    def __init__(
        self,
        store: Store,
        inbox: Inbox,
        inventory: Inventory,
        secrets: SecretFiles,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._store, self._inbox, self._inventory, self._secrets = store, inbox, inventory, secrets
        self._programs, self._say = secrets.programs, say
        self._programs_size: dict[int, int] = {}  # of each user; read when first asked for
        self._waiting: dict[str, tuple[int, int]] | None = None  # of each user: jobs, bytes; read when first asked for
        self._by_jobs: dict[str, int] = {}  # of each user, jobs that wait and that jobs queued
        self._by_class = PendingJobLimits(store, inventory.quotas)

    def fold(self, now: float) -> int:
        """Fold what this cycle takes of the inbox, in order, in one transaction; returns how many files were taken.

        The files are removed after the commit. A crash in between leaves files that were folded; they are recognised
        by name and change nothing the second time. Where all together cannot be written, each is tried for itself:
        what does not fit on the disk stays in the inbox and is tried again later, and what is behind it goes on.
        """
        names = self._inbox.next_batch()
        taken: list[tuple[str, bool]] = []
        if names:
            try:
                with self._store.transaction():
                    told = Counter[int]()
                    taken = [self._take(item, now, told) for item in self._items(names)]
                    self._refuse_many(told, now)
                    self._secrets.sync()
            except STORAGE_ERRORS:
                taken = self._one_by_one(names, now)
        for file_name, good in taken:
            (self._inbox.remove if good else self._inbox.refuse)(file_name)
        if taken:
            self._store.forget_applied(now - REMEMBER_FOLDED_S)
        if not all(good for _, good in taken):
            self._inbox.tidy_refused()
        self._refuse_surplus(now)
        return len(taken)

    def _items(self, names: list[str]) -> Iterator[ReceivedCommand | MalformedCommand]:
        """Read the files; one that is about another which has not been folded yet waits for that."""
        for item in self._inbox.read(names):
            if isinstance(item, ReceivedCommand) and self._is_early(item):
                self._inbox.postpone(item.file_name, EARLY_S)
            else:
                yield item

    def _is_early(self, item: ReceivedCommand) -> bool:
        """Whether it names a submission that still lies in the inbox, or its user's orders before it do."""
        command = item.command
        named: Iterable[str] = ()
        if isinstance(command, commands.Submit):
            named = (one.job_id for one in command.spec.dependencies)
        elif isinstance(command, commands.JobCommand):
            named = command.job_ids
        before = [file for name in named if self._inbox.is_listed(file := f"{name.partition('_')[0]}.submit")]
        if not isinstance(command, commands.Submit):
            before += self._inbox.postponed_of(item.uid)
        # Only what is older: two that name each other must not wait for ever.
        return any(file < item.file_name and not self._store.was_applied(_storable(file)) for file in before)

    def _take(self, item: ReceivedCommand | MalformedCommand, now: float, told: Counter[int]) -> tuple[str, bool]:
        """Fold one file unless it was before; its name, and whether it is good."""
        known = _storable(item.file_name)
        good = not isinstance(item, MalformedCommand)
        if not self._store.was_applied(known):
            good = self._fold_one(item, now, told)
        self._store.mark_applied(known, now)  # anew where its file is still there: it must not be forgotten before that
        return item.file_name, good

    def _one_by_one(self, names: list[str], now: float) -> list[tuple[str, bool]]:
        taken, left = [], []
        self._forget_counts()  # what was rolled back counts no more
        for item in self._items(names):
            try:
                with self._store.transaction():
                    done = self._take(item, now, Counter())
                    self._secrets.sync()
                taken.append(done)  # not before the commit: its file is removed
            except STORAGE_ERRORS as error:
                self._forget_counts()
                self._inbox.postpone(item.file_name)
                left.append(error)
                if len(left) == MAX_FAILURES:  # the others of this cycle wait, too
                    for name in names[names.index(item.file_name) :]:
                        self._inbox.postpone(name)
                    break
        if left:
            self._say(
                f"{count_of(len(left), 'command')} in the inbox cannot be recorded: {left[0]}; retried every "
                f"{POSTPONE_S:g} s, see 'gpusched check'"
            )
        return taken

    def _refuse_surplus(self, now: float) -> None:
        """Refuse the latest files of whoever has too many there, by their number; nothing of them is read."""
        surplus = self._inbox.surplus()
        if not surplus:
            return
        try:
            with self._store.transaction():
                for uid, names in surplus.items():
                    why = f"{user_name(uid)} has more than {MAX_WAITING} commands in the inbox"
                    data = {"file": f"{len(names)} files", "why": why, "surplus": len(names)}
                    self._store.append([Event(time=now, kind="refused_command", user=user_name(uid), data=data)])
        except STORAGE_ERRORS:
            return  # they stay until it can be recorded
        for uid, names in surplus.items():
            self._inbox.discard(names)
            self._say(f"refused {len(names)} commands of {user_name(uid)}: more than {MAX_WAITING} in the inbox")

    def _refuse_many(self, told: Counter[int], now: float) -> None:
        """Record how many more files of a user were no commands than were recorded one by one."""
        for uid, count in told.items():
            if count > MOST_TOLD:
                self._refuse(f"{count - MOST_TOLD} more files", user_name(uid), "not commands either", now)

    def _fold_one(self, item: ReceivedCommand | MalformedCommand, now: float, told: Counter[int]) -> bool:
        """Fold one file; False where it is to be set aside for a person to look at."""
        if isinstance(item, MalformedCommand):
            told[item.uid] += 1
            if told[item.uid] <= MOST_TOLD:
                self._refuse(item.file_name, user_name(item.uid), item.why, now)
            return False
        caller = self._caller(item.uid)
        command = item.command
        if isinstance(command, commands.Submit) and not caller.admin:
            # Nobody gets to the head of the queue by an early date. The client writes the file at once.
            command = msgspec.structs.replace(command, time=max(command.time, item.written - MAX_SUBMIT_DELAY_S))
        try:
            with self._store.savepoint():
                try:
                    self._apply(command, caller, now)
                except DatabaseDamaged:
                    raise
                except (CommandRefused, GpuschedError) as error:  # what was done before it counts
                    self._refuse(item.file_name, caller.name, str(error), now)
        except Exception as error:  # one command that nobody thought of must not stop all others for ever
            if isinstance(error, STORE_FAULTS) and not isinstance(error, _OF_VALUES):
                raise  # not the command
            self._refuse(item.file_name, caller.name, f"internal error: {error!r}", now)
            return False
        return True

    def _refuse(self, file_name: str, user: str, why: str, now: float) -> None:
        job_id = _storable(file_name).partition(".")[0] if file_name.endswith(".submit") else None
        data = {"file": _storable(file_name), "why": why}
        self._store.append([Event(time=now, kind="refused_command", job_id=job_id, user=user, data=data)])

    def _caller(self, uid: int) -> Caller:
        name = user_name(uid)
        return Caller(uid, name, uid in (0, os.getuid()) or name in self._inventory.settings.admins)

    def _apply(self, command: commands.AnyCommand, caller: Caller, now: float) -> None:
        if self._inventory.engine == "slurm" and not isinstance(command, _OF_POLICIES):
            raise CommandRefused("Slurm is the engine here: use its own commands")
        match command:
            case commands.Submit():
                if command.asked_by:
                    self._submit_from_inside(command, caller, now)
                else:
                    self._submit(command, caller, now)
            case commands.Cancel():
                self._each(command, caller, lambda job: self._cancel(job, caller, command.now, now), now)
            case commands.Hold():
                self._each(command, caller, lambda job: self._hold(job, caller, now), now)
            case commands.Release():
                self._each(command, caller, lambda job: self._release(job, caller, now), now)
            case commands.Requeue():
                self._each(command, caller, lambda job: self._requeue(job, caller, now), now)
            case commands.RelayedCommand():
                self._asked(command, caller, now)
            case commands.SetPriority():
                self._each(command, caller, lambda job: self._priority(job, caller, command.priority, now), now)
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

    # -- submissions ---------------------------------------------------------------------------------------------

    def _submit_from_inside(self, command: commands.Submit, caller: Caller, now: float) -> None:
        """Queue a job for the user of the one that asks for it, who has no more powers there than others have."""
        asking = self._asking(command.asked_by, caller)
        if asking is None:
            raise CommandRefused(f"there is no job {command.asked_by[:40]}")
        if is_cancelled(asking):
            raise CommandRefused(f"job {asking.id} was cancelled")
        if command.spec.secret_names:  # it knows its own
            kept = self._secrets.read(asking.id) or {}
            secrets = {name: kept[name] for name in command.spec.secret_names if name in kept}
            command = msgspec.structs.replace(command, secrets=secrets)
        self._submit(command, Caller(asking.uid, asking.user, admin=False), now, asking)

    def _submit(self, command: commands.Submit, caller: Caller, now: float, asking: JobRecord | None = None) -> None:
        if not ids.is_job_id(command.id):  # it becomes part of paths and of containers' names
            raise CommandRefused(f"{command.id[:40]!r} is not a job id")
        validate_spec(command.spec, self._inventory)
        command = msgspec.structs.replace(command, spec=self._accounted(command.spec, caller.name))
        self._check_mounts(command, caller, asking)
        if command.spec.reservation:
            check_use(command.spec, caller.name, self._store.reservations(now), self._inventory)
        if missing := set(command.spec.secret_names) ^ set(command.secrets):
            raise CommandRefused(f"secrets named and secrets passed differ: {', '.join(sorted(missing))}")
        if self._store.rows_of(command.id):
            raise CommandRefused(f"job {command.id} already exists")
        _check_program(command)
        job = self._job(_within(command, self._inventory.settings), caller, now)
        program = len(command.program) + sum(map(len, command.task_programs))
        queued = self._room_for(job, caller, program)
        if asking is not None:
            self._check_by_jobs(job)
        self._by_class.check(job.user, job.spec, job.count)
        if command.secrets:
            self._secrets.write(command.id, command.secrets)
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
        if asking is not None:
            self._by_jobs[job.user] += job.count
        self._by_class.add(job.user, job.spec, job.count)

    def _accounted(self, spec: JobSpec, user: str) -> JobSpec:
        """With the group that it counts for; refused where it may not be in that group or class, or never run there."""
        try:
            return with_group_and_class(spec, user, self._inventory)
        except UsageError as error:
            raise CommandRefused(error.line()) from None

    def _forget_counts(self) -> None:
        self._waiting = None
        self._programs_size.clear()
        self._by_jobs.clear()
        self._by_class = PendingJobLimits(self._store, self._inventory.quotas)

    @property
    def _queued(self) -> dict[str, tuple[int, int]]:
        if self._waiting is None:
            self._waiting = self._store.waiting_of_users()
        return self._waiting

    def _room_for(self, job: JobRecord, caller: Caller, program: int) -> tuple[int, int]:
        """How many jobs and bytes of the caller's wait with this one, or with all tasks of this array.

        ``program``: so many bytes of it are in a file.
        """
        settings = self._inventory.settings
        count, size = self._queued.get(caller.name, (0, 0))
        most = settings.max_queued_jobs_per_user
        if count + job.count > most:
            raise CommandRefused(
                f"{caller.name} has {count} of {count_of(most, 'pending job')}; {job.count} more exceed the limit "
                "(settings.max_queued_jobs_per_user of inventory.yaml)"
            )
        size += len(msgspec.json.encode(job.spec)) + TASK_BYTES + len(msgspec.json.encode(job.tasks))
        if program and caller.uid not in self._programs_size:
            self._programs_size[caller.uid] = self._programs.of(caller.uid).size()
        whole = size + program + self._programs_size.get(caller.uid, 0)
        if whole > settings.max_queued_mib_per_user << 20:
            raise CommandRefused(
                f"the pending jobs of {caller.name} would take {whole >> 20} MiB, more than the allowed "
                f"{settings.max_queued_mib_per_user} MiB (settings.max_queued_size_per_user of inventory.yaml)"
            )
        return count + job.count, size

    def _check_by_jobs(self, job: JobRecord) -> None:
        """That its user's jobs may queue so many more: a script that queues itself twice must not fill the queue."""
        if job.user not in self._by_jobs:
            self._by_jobs[job.user] = self._store.waiting_by_jobs(job.user)
        count, most = self._by_jobs[job.user], self._inventory.settings.max_queued_jobs_by_jobs
        if count + job.count > most:
            raise CommandRefused(
                f"{job.user} has {count} of {count_of(most, 'pending job')} that jobs submit; {job.count} more exceed "
                "the limit (settings.max_queued_jobs_by_jobs of inventory.yaml)"
            )

    def _check_mounts(self, command: commands.Submit, caller: Caller, asking: JobRecord | None) -> None:
        if self._caller(caller.uid).admin:
            if asking is not None:
                _check_mounts_again(command.spec, asking)
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
        """The job, or the row that all tasks of the array share."""
        spec = command.spec
        if (spec.priority > 0 or spec.nice < 0) and not caller.admin:
            raise CommandRefused("--priority above 0, or --nice below, needs an admin; --nice lowers your own")
        if command.array is not None and not 0 < len(set(command.array)) <= MAX_ARRAY_TASKS:
            raise CommandRefused(f"an array needs 1 to {MAX_ARRAY_TASKS} different indices")
        if command.array is not None and not all(0 <= index <= MAX_ARRAY_INDEX for index in command.array):
            raise CommandRefused(f"indices of an array go from 0 to {MAX_ARRAY_INDEX}")
        if command.max_running is not None and not 0 < command.max_running <= MAX_ARRAY_TASKS:
            raise CommandRefused("at least one task of an array must be allowed to run at once")
        job = JobRecord(
            id=command.id,
            user=caller.name,
            uid=caller.uid,
            spec=spec,
            state=JobState.PENDING,
            priority=priority_of(spec, self._inventory),
            # A client's clock may be ahead of ours; an earlier submission is believed for as long as files can wait.
            submit_time=min(max(command.time, 0.0), now),
            eligible_time=spec.begin_time,
            held_by="user" if spec.hold else "",
            asked_by=command.asked_by,
        )
        if command.array is None:
            return job
        return restricted_row(msgspec.structs.replace(job, array_id=command.id), spans_of(command.array))

    # -- commands on jobs ----------------------------------------------------------------------------------------

    def _each(
        self,
        command: commands.JobCommand,
        caller: Caller,
        act: Callable[[JobRecord], tuple[JobRecord, Event] | None],
        now: float,
    ) -> None:
        """Act on each named job; what cannot be done for one is recorded and does not keep the others from it.

        It is recorded with the job, too, so that `gpusched show` tells its owner why nothing followed.
        """
        problems = []
        what = type(command).__struct_config__.tag
        for job_id in command.job_ids:
            found = self._store.rows_of(job_id)
            if not found:
                problems.append(f"job {job_id}: no such job")
            for job in found:
                try:
                    if job.uid != caller.uid and not caller.admin:
                        problems.append(f"job {job.id} belongs to {job.user}")
                    elif changed := act(job):
                        if changed[0] != job:  # tasks that differ in nothing stay together
                            self._store.put_jobs([changed[0]])
                        self._store.append([changed[1]])
                except CommandRefused as refused:
                    problems.append(str(refused))
                    data: dict[str, object] = {"command": what, "why": str(refused)}
                    self._store.append([self._event("refused", job, caller, now, data)])
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
            own = job.spec.group in self._inventory.groups.of(job.user)  # else it counts for whom its user is with now
            spec = job.spec if own else msgspec.structs.replace(job.spec, group="")
            again = msgspec.structs.replace(job, spec=self._accounted(spec, job.user))
            try:
                self._by_class.check(again.user, again.spec, again.count)
            except UsageError as error:
                raise CommandRefused(f"job {job.id}: {error.line()}") from None
            self._by_class.add(again.user, again.spec, again.count)
            fields = back_in_queue(message) | {
                "retries": 0,
                "preemptions": None,
                "resizes": None,
            }  # it begins from the beginning
            return transition_to(again, JobState.PENDING, now, event="requeued", data={"by": caller.name}, **fields)
        return self._end(job, JobState.PENDING, "Requeued", message, caller, False, now)

    def _asked(self, command: commands.RelayedCommand, caller: Caller, now: float) -> None:
        """Do what a job asked for from inside: as its user, whose powers over others' jobs it does not have."""
        job = self._asking(command.job_id, caller)
        if job is None or job.attempt != command.attempt:
            return
        inside = Caller(job.uid, job.user, admin=False)
        if command.act == "cancel":
            cancel = commands.Cancel(time=command.time, job_ids=command.job_ids)
            self._each(cancel, inside, lambda one: self._cancel(one, inside, False, now), now)
        else:
            requeue = commands.Requeue(time=command.time, job_ids=command.job_ids)
            self._each(requeue, inside, lambda one: self._requeue_from_inside(one, job, inside, now), now)

    def _asking(self, job_id: str, caller: Caller) -> JobRecord | None:
        """The job that asks, by the controller's word."""
        if caller.uid != os.getuid():
            raise CommandRefused("only the controller passes on what jobs ask for")
        return self._store.job(job_id)

    def _requeue_from_inside(
        self, job: JobRecord, asking: JobRecord, inside: Caller, now: float
    ) -> tuple[JobRecord, Event] | None:
        """As `_requeue`, but a job that somebody cancelled does not bring itself back, in the trap of its signal."""
        if job.id == asking.id and is_cancelled(job):
            raise CommandRefused(f"job {job.id} was cancelled")
        return self._requeue(job, inside, now)

    def _end(
        self, job: JobRecord, outcome: JobState, reason: str, message: str, caller: Caller, at_once: bool, now: float
    ) -> tuple[JobRecord, Event] | None:
        """Begin to end a job that holds resources, or change how it will end."""
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
        self._must_be_pending(job)
        if job.held_by == "admin" and not caller.admin:
            # A hold of one's own would make it one to release.
            raise CommandRefused(f"job {job.id} is already held by an admin")
        by = "admin" if caller.admin and caller.uid != job.uid else "user"
        return msgspec.structs.replace(job, held_by=by), self._event("held", job, caller, now)

    def _release(self, job: JobRecord, caller: Caller, now: float) -> tuple[JobRecord, Event]:
        self._must_be_pending(job)
        if job.held_by == "admin" and not caller.admin:
            raise CommandRefused(f"job {job.id} is held by an admin")
        return msgspec.structs.replace(job, held_by=""), self._event("released", job, caller, now)

    def _priority(self, job: JobRecord, caller: Caller, priority: int, now: float) -> tuple[JobRecord, Event]:
        self._must_be_pending(job)
        if abs(priority) > MAX_PRIORITY:
            raise CommandRefused(f"a priority is between -{MAX_PRIORITY} and {MAX_PRIORITY}")
        if priority > job.priority and not caller.admin:
            raise CommandRefused(f"job {job.id}: raising a priority (from {job.priority} to {priority}) needs an admin")
        event = self._event("priority", job, caller, now, {"from": job.priority, "to": priority})
        return msgspec.structs.replace(job, priority=priority), event

    @staticmethod
    def _must_be_pending(job: JobRecord) -> None:
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
            if resumed and record.state in (NodeState.DRAINED, NodeState.DRAINING):
                record = msgspec.structs.replace(record, state=NodeState.UNKNOWN, reason="resumed, not probed since")
            self._store.put_nodes([record])
            data = {"reason": drain} if drain else {}
            self._store.append([Event(time=now, kind=kind, node=name, user=caller.name, data=data)])
        if unknown:
            raise CommandRefused(f"no such node: {', '.join(unknown)}")


def is_cancelled(job: JobRecord) -> bool:
    """Whether somebody cancelled it, even if it has not ended yet."""
    return (job.ending.outcome if job.ending is not None else job.state) is JobState.CANCELLED


def back_in_queue(message: str) -> dict[str, Any]:
    """The fields of a job that goes back to the queue; what it was before is in its events and runs."""
    gone = ("allocation", "ending", "start_time", "end_time", "exit_code", "master_port", "policy", "policy_version")
    return {**dict.fromkeys(gone), "reason": "", "message": message}


def _within(command: commands.Submit, settings: Settings) -> commands.Submit:
    """The submission with what its user may not raise as it is declared."""
    spec = command.spec
    if spec.session is None or spec.session <= settings.session_keep_s:
        return command
    return msgspec.structs.replace(command, spec=msgspec.structs.replace(spec, session=settings.session_keep_s))


def _check_mounts_again(spec: JobSpec, asking: JobRecord) -> None:
    """That a user who may mount anything has no more mounted by the job inside than that job has itself.

    Of its very mounts only: in a folder that it can write to, it may have put a link to anywhere.
    """
    for mount in spec.mounts:
        if not any(mount.source == own.source and own.read_only <= mount.read_only for own in asking.spec.mounts):
            raise CommandRefused(f"mount of {mount.source}: a job can only pass on mounts of its own")


def _check_program(command: commands.Submit) -> None:
    """That a function and its program come together."""
    if bool(command.spec.function) != bool(command.program) or (command.task_programs and not command.program):
        raise CommandRefused("a job with a function needs its program; other jobs must not have one")
    if command.task_programs and len(command.task_programs) != len(set(command.array or ())):
        raise CommandRefused(
            f"{len(command.task_programs)} programs for {len(set(command.array or ()))} tasks of an array"
        )


def _storable(file_name: str) -> str:
    """A file's name as text: other users may give names that are not UTF-8."""
    return file_name.encode(errors="backslashreplace").decode()
