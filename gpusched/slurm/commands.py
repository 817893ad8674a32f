"""Runs Slurm's commands and parses what they print."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from gpusched.errors import GpuschedError
from gpusched.model.slurm import SlurmJob, SlurmNode, SlurmPartition, SlurmReservation
from gpusched.slurm import records
from gpusched.slurm.jobs import PENDING_FORMAT, JobReader

LIMIT_S = 10.0
"""Time limit of a command. Past it, slurmctld counts as not responding: frozen, gone, or overloaded."""

ENDED_FIELDS = (
    "JobIDRaw,JobID,User,Partition,Submit,Eligible,Start,End,TimelimitRaw,AllocTRES,ReqTRES,State,NNodes,AllocCPUS,"
    "Suspended,NodeList"
)
"""Fields that `Slurm.ended` requests from sacct; none holds user-supplied text."""

_USER_DEFAULTS = re.compile(r"S(LURM|QUEUE|INFO|ACCT|CONTROL|PRIO|DIAG)_")  # user defaults that change the output
_T = TypeVar("_T")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_SQUEUE = ("squeue", "--noheader", "--all", "--local", "--sort=i")
_PROMPT = re.compile(r"^(?:scontrol: )+", re.MULTILINE)
_RPC_STATS = re.compile(r"^\s*([A-Z_]+)\s+\(\s*\d+\)\s+count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", re.MULTILINE)
_NO_CTLD = ("Unable to contact slurm controller", "Unexpected message received", "Socket timed out", "Zero Bytes were")
_DONE = ("Reservation created", "Reservation updated")


class NoAnswer(GpuschedError):
    """Slurm does not respond: its state is unknown, so nothing may be decided for it."""


class Slurm:
    """Slurm's commands on ``PATH``, with the configuration that ``SLURM_CONF`` names.

    Every method runs one or two commands under a time limit and raises `NoAnswer`. ``before_update`` may raise to
    prevent a change.
    """

    def __init__(self, limit_s: float = LIMIT_S, before_update: Callable[[], None] = lambda: None) -> None:
        self._limit_s, self._before_update = limit_s, before_update
        self._reader = JobReader()
        self._mark = secrets.token_urlsafe(9)  # secret, so that no text of a user can imitate it
        self._schedules_memory: bool | None = None
        self._has_factors = False

    def jobs(self, site_factors: bool = False) -> list[SlurmJob]:
        """Return pending, running and recently ended jobs; each array task is a job of its own.

        A job whose record is unchanged since the last call is returned as the same object.

        Args:
            site_factors: Also read SiteFactor, by another command; otherwise it is 0.
        """
        if self._schedules_memory is None:
            self.config()
        # --array: otherwise pending tasks share one line per array, even those that have become separate jobs
        text = self._run((*_SQUEUE, "--array", "--states=all", "--noconvert"), SQUEUE_FORMAT2=self._reader.format)
        waiting = self._run(
            (*_SQUEUE, "--states=pending", f"--format={PENDING_FORMAT}"), SQUEUE_ARRAY_UNIQUE="1", SLURM_BITSTR_LEN="0"
        )
        factors = self._site_factors() if site_factors and self._has_factors else {}
        try:
            return self._reader.read(text, waiting, factors, bool(self._schedules_memory))
        except ValueError as error:
            raise _no_answer(f"squeue says what cannot be read of {error}") from None

    def nodes(self) -> list[SlurmNode]:
        """Return all nodes."""
        return self._parsed(records.nodes, ("scontrol", "--all", "--details", "--oneliner", "show", "node"))

    def partitions(self) -> list[SlurmPartition]:
        """Return all partitions."""
        return self._parsed(records.partitions, ("scontrol", "--all", "--oneliner", "show", "partition"))

    def reservations(self) -> list[SlurmReservation]:
        """Return all reservations that have not ended."""
        return self._parsed(records.reservations, ("scontrol", "--all", "--oneliner", "show", "reservation"))

    def gpu_positions(self, jobs: Iterable[SlurmJob]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return job id -> node -> gres.conf positions (IDX) of the job's GPUs; constant while the job runs.

        Args:
            jobs: Running jobs. Each costs slurmctld a small RPC, so ask once per job.
        """
        job_list = list(jobs)
        if not job_list:
            return {}
        marks = [f"{self._mark}{index}" for index in range(len(job_list))]
        lines = [f"show job {job.raw_id}\nshow hostnames {mark}\n" for job, mark in zip(job_list, marks, strict=True)]
        limit_s = self._limit_s + 0.02 * len(job_list)
        # One scontrol for all jobs; `show hostnames` echoes a mark after each record, which nothing else can print.
        text = self._run(("scontrol", "--details", "--oneliner"), "".join(lines), limit_s, merged=True)
        text = "\n" + _PROMPT.sub("", text)
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for job, mark in zip(job_list, marks, strict=True):
            record, _, text = text.partition(f"\n{mark}\n")
            if positions := records.positions(record, job.name):
                found[job.id] = positions
        return found

    def config(self) -> dict[str, str]:
        """Return slurmctld's settings by their slurm.conf names."""
        found = records.config(self._run(("scontrol", "show", "config")))
        self._schedules_memory = "MEMORY" in found.get("SelectTypeParameters", "").upper()
        self._has_factors = found.get("PriorityType") == "priority/multifactor"  # sprio knows no other
        return found

    @property
    def has_factors(self) -> bool:
        """Whether jobs are ordered by priority/multifactor, as of the last `config`."""
        return self._has_factors

    def rpc_costs(self) -> dict[str, tuple[int, float]]:
        """Return message type -> RPCs that slurmctld has served, and the seconds spent on them (sdiag).

        The seconds include waiting for slurmctld's locks.
        """
        found = _RPC_STATS.findall(self._run(("sdiag",)))
        return {message: (int(count), int(total_us) / 1e6) for message, count, total_us in found}

    def ended(self, since: float, until: float, jobs: Sequence[str] = ()) -> str:
        """Return sacct's text about jobs that existed between the two times (Unix seconds, at least a million).

        It has the columns `ENDED_FIELDS` under a header, separated by ``|``, with times in Unix seconds. A requeued job
        has one line per run. ``jobs``: of these ids alone, which slurmdbd finds at once, however long the time is.
        """
        of_jobs = (f"--jobs={','.join(jobs)}",) if jobs else ()
        return self._run(
            ("sacct", "--allusers", "--allocations", "--duplicates", "--parsable2", f"--format={ENDED_FIELDS}",
             f"--starttime=uts{int(since)}", f"--endtime=uts{int(until)}", *of_jobs),
            limit_s=self._limit_s if jobs else 6 * self._limit_s,
        )  # fmt: skip

    def update(self, lines: Sequence[str]) -> dict[int, str]:
        """Run these scontrol commands in order, and return the error of each that failed (index -> one line).

        Raises:
            NoAnswer: Some updates may have been applied, others not: read Slurm's state again.
        """
        if not lines:
            return {}
        for line in lines:
            if not line.isprintable():
                raise ValueError(f"a command of scontrol is one line: {line!r}")
        self._before_update()
        commands = [f"{line}\nshow hostnames {self._mark}{index}\n" for index, line in enumerate(lines)]
        text = self._run(("scontrol",), "".join(commands), self._limit_s + 0.02 * len(lines), merged=True)
        if f"{self._mark}{len(lines) - 1}" not in text:
            raise _no_answer("scontrol ended before its last command")
        errors = _errors(text, lines, self._mark)
        if any(words in error for error in errors.values() for words in _NO_CTLD):
            raise _no_answer("scontrol found no slurmctld to update")
        return errors

    def run_command(self, *argv: str) -> str:
        """Run another of Slurm's commands and return its output."""
        return self._run(argv)

    def version(self) -> tuple[int, int]:
        """Return the version of the commands on this machine, such as ``(22, 5)``."""
        text = self._run(("scontrol", "--version"))
        found = re.search(r"(\d+)\.(\d+)", text)
        if not found:
            raise _no_answer(f"scontrol --version says {text.strip()!r}, which is no version of Slurm")
        return int(found[1]), int(found[2])

    def _site_factors(self) -> dict[str, int]:
        """Return SiteFactor of jobs that wait for resources; sprio omits held jobs and those with dependencies."""
        text = self._run(("sprio", "--noheader", "--format=%i %S"))
        pairs = (line.split() for line in text.splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and re.fullmatch(r"-?\d+", pair[1])}

    def _parsed(self, parse: Callable[[str], _T], argv: Sequence[str]) -> _T:
        text = self._run(argv)
        try:
            return parse(text)
        except (ValueError, KeyError) as error:
            raise _no_answer(f"{' '.join(argv)} says what cannot be read: {error}") from None

    def _run(
        self, argv: Sequence[str], stdin: str = "", limit_s: float | None = None, *, merged: bool = False, **env: str
    ) -> str:
        """Run a command and return its output; ``merged``: include stderr and ignore the exit status."""
        limit_s = limit_s or self._limit_s
        environ = {key: value for key, value in os.environ.items() if not _USER_DEFAULTS.match(key) or key in _KEPT}
        environ |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "COLUMNS": "1000000", **env}
        stderr = subprocess.STDOUT if merged else subprocess.PIPE
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environ, start_new_session=True
            )
        except OSError as error:
            trouble = "is not on PATH" if isinstance(error, FileNotFoundError) else f"does not start ({error.strerror})"
            raise NoAnswer(f"{argv[0]} {trouble}", "run gpusched where Slurm's commands are installed") from None
        trouble = ""
        try:
            out, err = process.communicate(stdin.encode(), limit_s)
        except subprocess.TimeoutExpired:
            trouble = f"got no answer from Slurm in {limit_s:.3g} s"
        finally:
            if process.returncode is None:  # it still runs, or it ended while this process was stopped
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
        if process.returncode and not merged:
            trouble = trouble or f"failed (exit {process.returncode})"
        if trouble:
            messages = [line.strip() for line in (err or b"").decode(errors="replace").splitlines() if line.strip()]
            raise _no_answer(": ".join([f"{argv[0]} {trouble}", *messages[-1:]]))
        return out.decode(errors="replace")


def _no_answer(message: str) -> NoAnswer:
    return NoAnswer(message, "see scontrol ping and slurmctld's log")


def _errors(text: str, lines: Sequence[str], mark: str) -> dict[int, str]:
    """Return each command's error: what scontrol printed between the marks, without prompts and echoed commands."""
    errors: dict[int, str] = {}
    index = 0
    for printed in text.splitlines():
        line = _PROMPT.sub("", printed).strip()
        if line == f"{mark}{index}":
            index += 1
        elif line and index < len(lines) and line != lines[index] and mark not in line and not line.startswith(_DONE):
            errors.setdefault(index, line)
    return errors
