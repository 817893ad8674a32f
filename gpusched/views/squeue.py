"""Jobs in the format of Slurm's squeue and sacct, for scripts inside jobs. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from gpusched.model.jobs import ENDED, JobRecord, JobState
from gpusched.model.units import format_duration
from gpusched.views.common import compress_names

_SHORT_STATES = {
    JobState.PENDING: "PD", JobState.STARTING: "CF", JobState.RUNNING: "R", JobState.COMPLETING: "CG",
    JobState.COMPLETED: "CD", JobState.FAILED: "F", JobState.CANCELLED: "CA", JobState.TIMEOUT: "TO",
    JobState.OUT_OF_MEMORY: "OOM", JobState.NODE_FAIL: "NF", JobState.PREEMPTED: "PR",
}  # fmt: skip
_DEFAULT = "%.12i %.9P %.8j %.8u %.2t %.10M %.6D %R"
_PATTERN = re.compile(r"%(\.?)([0-9]*)([A-Za-z])")
_MAX_FORMAT, _MAX_DIGITS, _MAX_OUTPUT = 1000, 3, 1 << 20  # the controller makes the output


class UnsupportedOption(Exception):
    """An option that is not supported inside jobs; the message says which."""


def squeue(jobs: Sequence[JobRecord], words: Sequence[str], user: str, now: float) -> str:
    """Return what squeue prints of these jobs.

    Raises:
        UnsupportedOption: An option, or a field of the format, is not supported.
    """
    options = _options(words, {"-h": "", "--noheader": "", "-o": "format", "--format": "format", "-j": "jobs",
                               "--jobs": "jobs", "--me": "", "-u": "user", "--user": "user", "-t": "states",
                               "--states": "states", "-n": "name", "--name": "name"})  # fmt: skip
    line = options.get("format", _DEFAULT)
    fields = _squeue_fields(now)
    if len(line) > _MAX_FORMAT:
        raise UnsupportedOption(f"a format has at most {_MAX_FORMAT} characters")
    for _, width, letter in _PATTERN.findall(line):
        if len(width) > _MAX_DIGITS:
            raise UnsupportedOption(f"%{width[:20]}: a column is at most {'9' * _MAX_DIGITS} wide")
        if letter not in fields:
            known = " ".join(f"%{name}" for name in fields)
            raise UnsupportedOption(f"%{letter} is not filled in inside jobs; there are {known}")
    if options.get("user", user) != user:
        raise UnsupportedOption(f"inside a job only the jobs of {user} are shown")
    chosen = _chosen(jobs, options)
    if states := options.get("states"):
        selected = {state.strip().upper() for state in states.split(",")}
        if "ALL" not in selected:
            chosen = [job for job in chosen if selected & {str(job.state), _SHORT_STATES[job.state]}]
    if names := options.get("name"):
        wanted = set(names.split(","))
        chosen = [job for job in chosen if job.spec.name in wanted]
    rows = (
        [] if "-h" in options or "--noheader" in options else [{letter: title for letter, (title, _) in fields.items()}]
    )
    rows += [{letter: value(job) for letter, (_, value) in fields.items()} for job in chosen]
    found, size = list[str](), 0
    for row in rows:
        found.append(_filled(line, row) + "\n")
        if (size := size + len(found[-1])) > _MAX_OUTPUT:
            break
    return "".join(found)


def sacct(jobs: Sequence[JobRecord], words: Sequence[str], user: str, now: float) -> str:
    """Return what sacct prints of these jobs, which have no steps here.

    Raises:
        UnsupportedOption: An option, or a field, is not supported.
    """
    options = _options(words, {"-n": "", "--noheader": "", "-o": "format", "--format": "format", "-j": "jobs",
                               "--jobs": "jobs", "-P": "", "--parsable2": "", "-p": "", "--parsable": "", "-X": "",
                               "--allocations": "", "-u": "user", "--user": "user"})  # fmt: skip
    if options.get("user", user) != user:
        raise UnsupportedOption(f"inside a job only the jobs of {user} are shown")
    known = {name.lower(): name for name in _SACCT}
    names = []
    listed = options.get("format", "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode")
    if len(listed) > _MAX_FORMAT:
        raise UnsupportedOption(f"a format has at most {_MAX_FORMAT} characters")
    for text in listed.split(","):
        name = known.get(text.partition("%")[0].strip().lower())
        if name is None:
            raise UnsupportedOption(f"there is no field {text[:40]!r} inside jobs; there are {', '.join(_SACCT)}")
        names.append(name)
    rows = [] if "-n" in options or "--noheader" in options else [names]
    rows += [[_SACCT[name](job, now) for name in names] for job in _chosen(jobs, options)]
    if options.keys() & {"-P", "--parsable2", "-p", "--parsable"}:
        end = "" if options.keys() & {"-P", "--parsable2"} else "|"
        return "".join("|".join(row) + end + "\n" for row in rows)
    widths = [max([10, *(len(row[column]) for row in rows)]) for column in range(len(names))]
    return "".join(" ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "\n" for row in rows)


def _options(words: Sequence[str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the options given: flags by their own name, options with a value by their meaning."""
    found: dict[str, str] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        if name not in known or (known[name] == "" and word.startswith("--") and equals):
            raise UnsupportedOption(f"{word[:60]} is not understood inside jobs; there are {', '.join(known)}")
        if not known[name]:
            found[name] = ""
            if len(value) > _MAX_FORMAT:
                raise UnsupportedOption(f"{word[:60]}: too many options in one word")
            if equals:  # -hj 1
                rest.appendleft(f"-{value}")
            continue
        if not equals and not rest:
            raise UnsupportedOption(f"{word}: its value is missing")
        found[known[name]] = value if equals else rest.popleft()
    return found


def _chosen(jobs: Sequence[JobRecord], options: Mapping[str, str]) -> list[JobRecord]:
    selected = options.get("jobs")
    if selected is None:
        return list(jobs)
    ids = {job_id.partition(".")[0] for job_id in selected.split(",")}
    return [job for job in jobs if job.id in ids or job.array_id in ids]


def _squeue_fields(now: float) -> dict[str, tuple[str, Callable[[JobRecord], str]]]:
    def where(job: JobRecord) -> str:
        return _nodes(job) or f"({job.reason or 'None'})"

    return {
        "i": ("JOBID", lambda job: job.id),
        "A": ("JOBID", lambda job: job.id),
        "F": ("ARRAY_JOB_ID", lambda job: job.array_id or job.id),
        "K": ("ARRAY_TASK_ID", lambda job: "N/A" if job.array_index is None else str(job.array_index)),
        "P": ("PARTITION", lambda job: job.spec.partition),
        "j": ("NAME", lambda job: job.spec.name),
        "u": ("USER", lambda job: job.user),
        "a": ("ACCOUNT", lambda job: job.spec.group),
        "q": ("QOS", lambda job: job.spec.qos),
        "t": ("ST", lambda job: _SHORT_STATES[job.state]),
        "T": ("STATE", lambda job: str(job.state)),
        "M": ("TIME", lambda job: _elapsed(job, now)),
        "l": ("TIME_LIMIT", lambda job: format_duration(job.limit_s)),
        "L": ("TIME_LEFT", lambda job: _time_left(job, now)),
        "D": ("NODES", lambda job: str(job.spec.nodes)),
        "C": ("CPUS", lambda job: str(job.spec.amounts[0])),
        "N": ("NODELIST", _nodes),
        "R": ("NODELIST(REASON)", where),
        "r": ("REASON", lambda job: job.reason or "None"),
        "S": ("START_TIME", lambda job: _time(job.start_time, "N/A")),
        "e": ("END_TIME", lambda job: _time(None if job.start_time is None else job.start_time + job.limit_s, "N/A")),
        "V": ("SUBMIT_TIME", lambda job: _time(job.submit_time, "N/A")),
        "Z": ("WORK_DIR", lambda job: job.spec.workdir or ""),
    }


_SACCT: dict[str, Callable[[JobRecord, float], str]] = {
    "JobID": lambda job, now: job.id,
    "JobName": lambda job, now: job.spec.name,
    "User": lambda job, now: job.user,
    "Partition": lambda job, now: job.spec.partition,
    "Account": lambda job, now: job.spec.group,
    "QOS": lambda job, now: job.spec.qos,
    "AllocCPUS": lambda job, now: str(job.spec.amounts[0] if job.start_time is not None else 0),
    "NNodes": lambda job, now: str(job.spec.nodes),
    "NodeList": lambda job, now: _nodes(job) or "None assigned",
    "State": lambda job, now: str(job.state),
    "ExitCode": lambda job, now: _exit(job),
    "Submit": lambda job, now: _time(job.submit_time, "Unknown"),
    "Start": lambda job, now: _time(job.start_time, "Unknown"),
    "End": lambda job, now: _time(job.end_time, "Unknown"),
    "Elapsed": lambda job, now: _elapsed(job, now),
    "Timelimit": lambda job, now: format_duration(job.spec.time_limit_s),
    "Restarts": lambda job, now: str(max(0, job.attempt - 1)),
}


def _filled(line: str, row: Mapping[str, str]) -> str:
    return _PATTERN.sub(lambda match: _padded(row[match[3]], match[2], match[1]), line)


def _padded(text: str, width: str, right: str) -> str:
    if not width:
        return text
    cut = text[: int(width)]
    return cut.rjust(int(width)) if right else cut.ljust(int(width))


def _nodes(job: JobRecord) -> str:
    return compress_names(part.node for part in job.allocation.parts) if job.allocation is not None else ""


def _elapsed(job: JobRecord, now: float) -> str:
    end = job.end_time if job.state in ENDED else now
    return "0:00" if job.start_time is None else format_duration(max(0.0, (end or now) - job.start_time))


def _time_left(job: JobRecord, now: float) -> str:
    elapsed_s = 0.0 if job.start_time is None else now - job.start_time
    return format_duration(max(0.0, job.limit_s - elapsed_s))


def _time(time_s: float | None, unknown: str) -> str:
    return unknown if time_s is None else datetime.fromtimestamp(time_s).strftime("%Y-%m-%dT%H:%M:%S")


def _exit(job: JobRecord) -> str:
    """Return code:signal, as Slurm has it."""
    code = job.exit_code or 0
    return f"0:{code - 128}" if code > 128 else f"{code}:0"
