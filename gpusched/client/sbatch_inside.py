"""`sbatch` from inside a job: its arguments and script become a submission.

Pure: the text of the script comes with the request, and the job must not read a file or variable of the controller's
machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import msgspec

from gpusched.client.script import layers, source
from gpusched.client.script.values import ScriptContext
from gpusched.client.submit import Submitter, build_submission
from gpusched.config.plugins import all_bare
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobRecord
from gpusched.model.readings import AskReading
from gpusched.model.resources import Inventory

MAX_OPTIONS, MAX_WORDS = 4096, 150  # characters and words of lines with options: all others wait while they are read
_MARKS = ("#SBATCH", "#GPUSCHED")


class Parsers(Protocol):
    """Parse arguments into options; implemented by `gpusched.cli.options`."""

    def parse(self, words: Sequence[str]) -> Mapping[str, Any]:
        """Parse the arguments of one line of a script."""

    def parse_sbatch(self, words: Sequence[str], site: ScriptContext) -> tuple[dict[str, Any], str | None]:
        """Parse a command line: the options and the command, and the value of ``--wrap``."""


def prepare(parsers: Parsers, inventory: Inventory, job: JobRecord, ask: AskReading) -> Submit | int:
    """Return the submission without its id, or the argument of sbatch that names the script to read (0: stdin).

    Raises:
        UsageError: The first thing wrong, in one line.
    """
    words, cwd = ask.words[1:], _folder(job, ask.cwd, inventory)
    site = ScriptContext(inventory, cwd, [])
    typed, wrap = parsers.parse_sbatch(words, site)
    rest = typed["command"]
    name = rest[0] if rest and rest[0] != "-" else ""
    if wrap is not None:
        if rest:
            raise UsageError("--wrap already gives the command", "use one of the two")
        script = source.wrapped(wrap)
    elif ask.script is None:
        return len(words) - len(rest) + 1 if name else 0
    else:
        script = source.from_text(ask.script, name or "stdin", os.path.basename(name) or "stdin")
    read = layers.read_options(_option_lines(script), parsers.parse, inventory, cwd, job.user)
    read = msgspec.structs.replace(read, slurm=True)  # even without #SBATCH lines
    try:
        given = layers.merge_typed(read, typed, site)
        secrets = _secrets(given.pop("secret", ()), job)
        request = layers.request_of(_with_job_defaults(given, job, inventory), script)
        submitter = Submitter(job.user, lambda: cwd, job.spec.env, ids.normalise)
        submission = build_submission(inventory, request, submitter)
    except UsageError as error:
        raise layers.with_origin(error, read, typed) from None
    return msgspec.structs.replace(submission, spec=msgspec.structs.replace(submission.spec, secret_names=secrets))


def _option_lines(script: source.JobScript) -> source.JobScript:
    """Return the lines that may hold options."""
    lines = script.text.split("\n")
    head = list(takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), lines))
    marked = [line for line in head if line.startswith(_MARKS)]
    if sum(map(len, marked)) > MAX_OPTIONS or sum(len(line.split()) for line in marked) > MAX_WORDS:
        raise UsageError(
            f"{script.where}: its lines with options have more than {MAX_OPTIONS} characters or {MAX_WORDS} words"
        )
    return msgspec.structs.replace(script, text="\n".join(head))


def _secrets(named: Sequence[str], job: JobRecord) -> tuple[str, ...]:
    """Return the named secrets that the job itself has; it can pass on no others."""
    for name in named:
        if name not in job.spec.secret_names:
            has = f"it has {', '.join(job.spec.secret_names)}" if job.spec.secret_names else "it has none"
            raise UsageError(f"--secret {name[:80]}: a job can only pass on secrets of its own, by name", has)
    return tuple(dict.fromkeys(named))


def _with_job_defaults(given: Mapping[str, Any], job: JobRecord, inventory: Inventory) -> dict[str, Any]:
    """Return the options with the submitting job's image and mounts as defaults.

    In Slurm all jobs have the same files. Its partition, too, where the inventory has no default.
    """
    options = dict(given)
    if not options.keys() & {"partition", "flavor", "nodelist"} and inventory.default_partition is None:
        options["partition"] = job.spec.partition
    if not _is_bare(options.get("partition") or inventory.default_partition or "", inventory):
        if job.spec.image is not None:
            options.setdefault("image", job.spec.image)
        mounts = (f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in job.spec.mounts)
        options.setdefault("mount", tuple(mounts))
    return options


def _folder(job: JobRecord, cwd: str, inventory: Inventory) -> str:
    """Return the folder that sbatch ran in, as a path outside the container; else the job's own submission folder."""
    cwd = os.path.normpath(cwd) if cwd.startswith("/") else ""
    for mount in sorted(job.spec.mounts, key=lambda mount: len(mount.target), reverse=True):
        target = mount.target.rstrip("/")
        if f"{cwd}/".startswith(f"{target}/"):
            return mount.source.rstrip("/") + cwd[len(target) :] or "/"
    return cwd if cwd and _is_bare(job.spec.partition, inventory) else job.spec.submit_dir or "/"


def _is_bare(partition: str, inventory: Inventory) -> bool:
    """Return whether jobs of this partition run without containers."""
    found = inventory.partition(partition)
    return found is not None and all_bare({node.runtime for node in found.nodes})
