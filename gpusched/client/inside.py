"""What `sbatch` inside a job asks for: its words and its script -> a submission.

Pure: the text of the script comes with the request, and of the controller's machine nothing is read in its name, no
file and no variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import msgspec

from gpusched.client.script import layers, source
from gpusched.client.script.values import ScriptContext
from gpusched.client.submit import SubmitRequest, Submitter, assembled
from gpusched.errors import UsageError
from gpusched.model import ids
from gpusched.model.commands import Submit
from gpusched.model.jobs import JobRecord
from gpusched.model.readings import AskReading
from gpusched.model.resources import Inventory, RuntimeName

MAX_OPTIONS, MAX_WORDS = 4096, 150  # characters and words of lines with options: all others wait while they are read
_MARKS = ("#SBATCH", "#GPUSCHED")


class Parsers(Protocol):
    """How words are read as options: `gpusched.cli.options`."""

    def parse(self, words: Sequence[str]) -> Mapping[str, Any]:
        """Read the words of one line of a script."""

    def parse_sbatch(
        self, words: Sequence[str], site: ScriptContext
    ) -> tuple[dict[str, Any], tuple[str, ...], str | None]:
        """Read a command line: the options, the words behind them, what ``--wrap`` says."""

    def request_of(self, given: Mapping[str, Any]) -> SubmitRequest:
        """Return the request of such options."""


def prepare(parsers: Parsers, inventory: Inventory, job: JobRecord, ask: AskReading) -> Submit | int:
    """Return the submission, but for its id, or which word of sbatch names the script (0: stdin), to be asked for.

    Raises:
        UsageError: The first thing wrong, in one line.
    """
    words, cwd = ask.words[1:], _folder(job, ask.cwd, inventory)
    typed, rest, wrap = parsers.parse_sbatch(words, ScriptContext(inventory, cwd, []))
    name = rest[0] if rest and rest[0] != "-" else ""
    if wrap is not None:
        if rest:
            raise UsageError("--wrap already gives the command", "use one of the two")
        script = source.wrapped(wrap)
    elif ask.script is None:
        return len(words) - len(rest) + 1 if name else 0
    else:
        script = source.received(ask.script, name or "stdin", os.path.basename(name) or "stdin")
    read = layers.read(_head(script), parsers.parse, inventory, cwd, job.user)
    read = msgspec.structs.replace(read, slurm=True)  # it is sbatch, whatever its script says
    try:
        given = layers.complete(read, typed)
        secrets = _secrets(given.pop("secret", ()), job)
        request = parsers.request_of(_at_home(given, job, inventory))
        named = request.name if request.name is not None else script.name
        request = msgspec.structs.replace(request, command=rest[1:], name=named, script=script.text)
        who = Submitter(job.user, lambda: cwd, job.spec.env, ids.normalise)
        found = assembled(inventory, request, who)
    except UsageError as error:
        raise layers.blamed(error, read, typed) from None
    return msgspec.structs.replace(found, spec=msgspec.structs.replace(found.spec, secret_names=secrets))


def _head(script: source.JobScript) -> source.JobScript:
    """The lines that may hold options."""
    lines = script.text.split("\n")
    head = list(takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), lines))
    marked = [line for line in head if line.startswith(_MARKS)]
    if sum(map(len, marked)) > MAX_OPTIONS or sum(len(line.split()) for line in marked) > MAX_WORDS:
        raise UsageError(
            f"{script.where}: its lines with options have more than {MAX_OPTIONS} characters or {MAX_WORDS} words"
        )
    return msgspec.structs.replace(script, text="\n".join(head))


def _secrets(named: Sequence[str], job: JobRecord) -> tuple[str, ...]:
    """Return the secrets that are passed on: by name, and only those that the job has itself."""
    for name in named:
        if name not in job.spec.secret_names:
            has = f"it has {', '.join(job.spec.secret_names)}" if job.spec.secret_names else "it has none"
            raise UsageError(f"--secret {name[:80]}: a job can only pass on secrets of its own, by name", has)
    return tuple(dict.fromkeys(named))


def _at_home(given: Mapping[str, Any], job: JobRecord, inventory: Inventory) -> dict[str, Any]:
    """Return the options with what the job that submits runs in, where they do not say: its image and its mounts.

    In Slurm all jobs have the same files. Its partition, too, where the inventory has no default.
    """
    found = dict(given)
    if not found.keys() & {"partition", "flavor", "nodelist"} and inventory.default_partition is None:
        found["partition"] = job.spec.partition
    if not _is_bare(found.get("partition") or inventory.default_partition or "", inventory):
        if job.spec.image is not None:
            found.setdefault("image", job.spec.image)
        found.setdefault("mount", [f"{m.source}:{m.target}:{'ro' if m.read_only else 'rw'}" for m in job.spec.mounts])
    return found


def _folder(job: JobRecord, cwd: str, inventory: Inventory) -> str:
    """Return the folder that sbatch ran in, as it is outside of the container; else that of the job's submission."""
    cwd = os.path.normpath(cwd) if cwd.startswith("/") else ""
    for mount in sorted(job.spec.mounts, key=lambda mount: len(mount.target), reverse=True):
        target = mount.target.rstrip("/")
        if f"{cwd}/".startswith(f"{target}/"):
            return mount.source.rstrip("/") + cwd[len(target) :] or "/"
    return cwd if cwd and _is_bare(job.spec.partition, inventory) else job.spec.submit_dir or "/"


def _is_bare(partition: str, inventory: Inventory) -> bool:
    """Whether jobs there run without containers."""
    found = inventory.partition(partition)
    return found is not None and {node.runtime for node in found.nodes} == {RuntimeName.PROCESS}
