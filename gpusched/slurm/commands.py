"""Runs Slurm's commands."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar

from gpusched.errors import GpuschedError
from gpusched.model.slurm import SlurmJob, SlurmNode, SlurmPartition, SlurmReservation
from gpusched.slurm import records
from gpusched.slurm.jobs import WAITING_FORMAT, JobReader

LIMIT_S = 10.0
"""A command that takes longer is taken for one that got no answer: slurmctld frozen, gone, or far too busy."""

ENDED_FIELDS = (
    "JobIDRaw,JobID,User,Partition,Submit,Eligible,Start,End,TimelimitRaw,AllocTRES,ReqTRES,State,NNodes,AllocCPUS,"
    "Suspended,NodeList"
)
"""What `Slurm.ended` asks sacct for: no field holds a text that a user wrote."""

_OWN = re.compile(r"S(LURM|QUEUE|INFO|ACCT|CONTROL|PRIO|DIAG)_")  # each user's wishes for these commands
_T = TypeVar("_T")
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
_SQUEUE = ("squeue", "--noheader", "--all", "--local", "--sort=i")
_PROMPT = re.compile(r"^(?:scontrol: )+", re.MULTILINE)
_COST = re.compile(r"^\s*([A-Z_]+)\s+\(\s*\d+\)\s+count:(\d+)\s+ave_time:\d+\s+total_time:(\d+)", re.MULTILINE)
_NOBODY = ("Unable to contact slurm controller", "Unexpected message received", "Socket timed out", "Zero Bytes were")
_DONE = ("Reservation created", "Reservation updated")


class NoAnswer(GpuschedError):
    """Slurm does not answer: nothing is known of it now, and nothing may be decided for it."""


class Slurm:
    """Slurm, as its commands on ``PATH`` tell of it, with the configuration that ``SLURM_CONF`` names.

    Every method runs one command or two, has a time limit, and raises `NoAnswer`.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._reader = JobReader()
        self._mark = secrets.token_urlsafe(9)  # what is printed of a user's texts must not be taken for it
        self._counts_memory: bool | None = None
        self._has_factors = False

    def jobs(self, site_factors: bool = False) -> list[SlurmJob]:
        """Jobs that wait and run, and those that ended and Slurm still remembers; each task of an array by itself.

        A job whose record is as it was at the last call is the same object as then.

        Args:
            site_factors: Ask for them too (another command); else they are 0.
        """
        if self._counts_memory is None:
            self.config()
        # --array: else waiting tasks are one line with their array, also those that have become jobs of their own
        text = self._run((*_SQUEUE, "--array", "--states=all", "--noconvert"), SQUEUE_FORMAT2=self._reader.format)
        waiting = self._run(
            (*_SQUEUE, "--states=pending", f"--format={WAITING_FORMAT}"), SQUEUE_ARRAY_UNIQUE="1", SLURM_BITSTR_LEN="0"
        )
        factors = self._site_factors() if site_factors and self._has_factors else {}
        try:
            return self._reader.read(text, waiting, factors, bool(self._counts_memory))
        except ValueError as error:
            raise _no_answer(f"squeue says what cannot be read of {error}") from None

    def nodes(self) -> list[SlurmNode]:
        """All nodes."""
        return self._parsed(records.nodes, ("scontrol", "--all", "--details", "--oneliner", "show", "node"))

    def partitions(self) -> list[SlurmPartition]:
        """All partitions."""
        return self._parsed(records.partitions, ("scontrol", "--all", "--oneliner", "show", "partition"))

    def reservations(self) -> list[SlurmReservation]:
        """All reservations that have not ended."""
        return self._parsed(records.reservations, ("scontrol", "--all", "--oneliner", "show", "reservation"))

    def gpu_positions(self, jobs: Iterable[SlurmJob]) -> dict[str, dict[str, tuple[int, ...]]]:
        """Job id -> node -> positions in gres.conf (IDX) of the GPUs that it has; they do not change while it runs.

        Args:
            jobs: That run; each costs slurmctld a small call of its own, so ask once for each.
        """
        asked = list(jobs)
        if not asked:
            return {}
        marks = [f"{self._mark}{at}" for at in range(len(asked))]
        lines = [f"show job {job.raw_id}\nshow hostnames {mark}\n" for job, mark in zip(asked, marks, strict=True)]
        limit_s = self._limit_s + 0.02 * len(asked)
        text = self._run(("scontrol", "--details", "--oneliner"), "".join(lines), limit_s, merged=True)
        text = "\n" + _PROMPT.sub("", text)
        found: dict[str, dict[str, tuple[int, ...]]] = {}
        for job, mark in zip(asked, marks, strict=True):
            record, _, text = text.partition(f"\n{mark}\n")
            if told := records.positions(record, job.name):
                found[job.id] = told
        return found

    def config(self) -> dict[str, str]:
        """Settings as slurmctld has them, by their names in slurm.conf."""
        found = records.config(self._run(("scontrol", "show", "config")))
        self._counts_memory = "MEMORY" in found.get("SelectTypeParameters", "").upper()
        self._has_factors = found.get("PriorityType") == "priority/multifactor"  # sprio knows no other
        return found

    @property
    def has_factors(self) -> bool:
        """Whether it orders jobs by several factors, as last read (priority/multifactor)."""
        return self._has_factors

    def costs(self) -> dict[str, tuple[int, float]]:
        """What slurmctld has done since it counts: message -> how many of it came, seconds that it took for them all.

        Waiting for its own locks is among them.
        """
        found = _COST.findall(self._run(("sdiag",)))
        return {message: (int(count), int(total_us) / 1e6) for message, count, total_us in found}

    def ended(self, since: float, until: float) -> str:
        """Jobs of the accounting database that were there between the two times (Unix seconds): text of sacct.

        Columns `ENDED_FIELDS` under a header, ``|`` between them, times in Unix seconds; a requeued job has a line for
        each time that it ran.
        """
        return self._run(
            ("sacct", "--allusers", "--allocations", "--duplicates", "--parsable2", f"--format={ENDED_FIELDS}",
             f"--starttime={_stamp(since)}", f"--endtime={_stamp(until)}"), limit_s=6 * self._limit_s,
        )  # fmt: skip

    def update(self, lines: Sequence[str]) -> dict[int, str]:
        """Gives scontrol these commands, one after the other; which of them failed, and why (index -> one line).

        Raises:
            NoAnswer: Some may have been carried out, some not: read again.
        """
        if not lines:
            return {}
        for line in lines:
            if not line.isprintable():
                raise ValueError(f"a command of scontrol is one line: {line!r}")
        commands = [f"{line}\nshow hostnames {self._mark}{at}\n" for at, line in enumerate(lines)]
        text = self._run(("scontrol",), "".join(commands), self._limit_s + 0.02 * len(lines), merged=True)
        errors = _errors(text, lines, self._mark)
        if any(words in error for error in errors.values() for words in _NOBODY):
            raise _no_answer("scontrol found no slurmctld to update")
        return errors

    def ask(self, *argv: str) -> str:
        """What another of Slurm's commands prints."""
        return self._run(argv)

    def version(self) -> tuple[int, int]:
        """Of the commands here: ``(22, 5)``."""
        text = self._run(("scontrol", "--version"))
        found = re.search(r"(\d+)\.(\d+)", text)
        if not found:
            raise _no_answer(f"scontrol --version says {text.strip()!r}, which is no version of Slurm")
        return int(found[1]), int(found[2])

    def _site_factors(self) -> dict[str, int]:
        """Of jobs that wait for nodes; held ones and those that wait for others have none said."""
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
        """What the command prints; with ``merged`` its errors too, and its exit status does not count."""
        limit_s = limit_s or self._limit_s
        own = {key: value for key, value in os.environ.items() if not _OWN.match(key) or key in _KEPT}
        own |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s", "COLUMNS": "1000000", **env}
        errors = subprocess.STDOUT if merged else subprocess.PIPE
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=own, start_new_session=True
            )
        except OSError as error:
            why = "is not on PATH" if isinstance(error, FileNotFoundError) else f"does not start ({error.strerror})"
            raise NoAnswer(f"{argv[0]} {why}", "run gpusched where Slurm's commands are installed") from None
        why = ""
        try:
            out, err = process.communicate(stdin.encode(), limit_s)
        except subprocess.TimeoutExpired:
            why = f"got no answer from Slurm in {limit_s:.3g} s"
        finally:
            if process.returncode is None:  # it runs, or it has ended while this process stood still
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                out, err = process.communicate()
        if process.returncode and not merged:
            why = why or f"failed (exit {process.returncode})"
        if why:
            told = [line.strip() for line in (err or b"").decode(errors="replace").splitlines() if line.strip()]
            raise _no_answer(": ".join([f"{argv[0]} {why}", *told[-1:]]))
        return out.decode(errors="replace")


def _no_answer(message: str) -> NoAnswer:
    return NoAnswer(message, "see scontrol ping and slurmctld's log")


def _stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%dT%H:%M:%S")


def _errors(text: str, lines: Sequence[str], mark: str) -> dict[int, str]:
    """What scontrol printed between the marks, less prompts and the commands themselves: each command's error."""
    found: dict[int, str] = {}
    at = 0
    for printed in text.splitlines():
        line = _PROMPT.sub("", printed).strip()
        if line == f"{mark}{at}":
            at += 1
        elif line and at < len(lines) and line != lines[at] and mark not in line and not line.startswith(_DONE):
            found.setdefault(at, line)
    return found
