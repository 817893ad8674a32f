"""All policies: a site's own, included ones, promoted copies, nightly candidates."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gpusched.config.policies import BUILT_IN, POLICY, WEIGHTS, load_policy, policy_folders
from gpusched.config.weights import CARD, weights_file
from gpusched.config.yamlfile import parse_plain
from gpusched.errors import FileError, GpuschedError, UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.suggest import did_you_mean
from gpusched.promotion.freeze import FOLDER

CANDIDATES = "candidates"
REPORTS = "reports"
Origin = Literal["site", "built-in", "frozen", "candidate"]


class RegisteredPolicy(NamedTuple):
    """A policy, its file or folder, and its origin."""

    spec: PolicySpec
    path: Path
    origin: Origin


class Training(NamedTuple):
    """The content of a training card.

    Attributes:
        trained_at: Time, as on the card.
        trace: Name of the workload; trace_sha256: its digest.
        last: Submission of the last job learned from, Unix seconds; None: the workload has no calendar.
        card: All of it.
    """

    trained_at: str
    trace: str
    trace_sha256: str
    last: float | None
    card: dict[str, Any]


class ShadowComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A policy compared with the active one.

    Attributes:
        partition: Its name. state: ``shadow`` or ``candidate``.
        name, version: Of the policy. path: Where it lies.
        line: The verdict as a sentence. passed: It proved no worse.
        promoted: The command to promote it was sent (``auto_promote``).
        proposed: Of those that proved better it gained most, and waits for an admin to promote it.
        verdict: All of it (`gpusched.nightly.proof.Verdict`), or None where there was no replay.
    """

    partition: str
    state: str
    name: str
    version: str
    path: str
    line: str
    passed: bool = False
    promoted: bool = False
    proposed: bool = False
    verdict: dict[str, Any] | None = None

    @property
    def proposal(self) -> str:
        """The command that promotes it, if it is proposed; else ""."""
        if not self.proposed:
            return ""
        command = f"gpusched policy promote {self.name}@{self.version} --partition {self.partition}"
        return f"; proposed for promotion: {command}"


class _Page(msgspec.Struct):
    judged: tuple[ShadowComparison, ...] = ()


def known_policies(inventory_path: Path | str, state: Path) -> list[RegisteredPolicy]:
    """Return every readable policy, except those hidden by another of the same name."""
    found: list[RegisteredPolicy] = []
    names: set[str] = set()
    folders = policy_folders(inventory_path)
    for folder in folders:
        origin: Origin = "built-in" if folder == BUILT_IN else "site"
        for path in _in_folder(folder):
            name = path.stem if path.is_file() else path.name
            if name not in names and (spec := _readable(path, (folder, *folders))) is not None:
                names.add(name)
                found.append(RegisteredPolicy(spec, path, origin))
    for path in _below(state / FOLDER, f"*/*/{POLICY}"):
        if (spec := _readable(path, ())) is not None:
            found.append(RegisteredPolicy(spec, path, "frozen"))
    for path in _below(state / CANDIDATES, f"*/*/*/{POLICY}"):
        if (spec := _readable(path, folders)) is not None:
            found.append(RegisteredPolicy(spec, path, "candidate"))
    return found


def unreadable_policies(inventory_path: Path | str) -> list[str]:
    """Return a line for each file of the site's policies that cannot be read."""
    lines = []
    for path in _in_folder(policy_folders(inventory_path)[0]):
        try:
            load_policy(path, policy_folders(inventory_path))
        except GpuschedError as error:
            lines.append(error.line())
    return lines


def find_policy(text: str, inventory_path: Path | str, state: Path) -> RegisteredPolicy:
    """Return the policy called ``text``: a name, NAME@VERSION (or its first digits), a file or a folder.

    Raises:
        UsageError: There is none.
        FileError: Its file is wrong.
    """
    name, at, version = text.partition("@")
    path = Path(text)
    if not at and (path.suffix in (".yaml", ".yml") or (path / POLICY).is_file()):
        return RegisteredPolicy(load_policy(path.absolute(), policy_folders(inventory_path)), path.absolute(), "site")
    known = known_policies(inventory_path, state)
    named = [k for k in known if k.spec.name == name]
    if at:
        found = [k for k in named if version and k.spec.version.startswith(version)]
    else:
        found = [k for k in named if k.origin in ("site", "built-in")]
    if not found:
        for folder in policy_folders(inventory_path):  # it is there, and wrong: say what
            if (folder / f"{text}.yaml").is_file():
                load_policy(folder / f"{text}.yaml", policy_folders(inventory_path))
        names = [f"{k.spec.name}@{k.spec.version}" if at else k.spec.name for k in known]
        raise UsageError(f"no policy named '{text}'{did_you_mean(text, dict.fromkeys(names))}")
    return found[0]


def training_of(spec: PolicySpec, partition: str) -> Training | None:
    """Return the training card of an agent's weights for a partition; None without a readable one."""
    if spec.agent is None:
        return None
    file = weights_file(Path(spec.folder), partition)
    try:
        card = parse_plain(file.with_name(file.name.removesuffix(WEIGHTS) + CARD))
        trace = card["trace"]
        last = trace.get("last")
        moment = None if last is None else datetime.fromisoformat(last).astimezone(UTC).timestamp()
        return Training(str(card["trained_at"]), str(trace["name"]), str(trace["sha256"]), moment, card)
    except (FileError, ValueError, KeyError, TypeError, AttributeError):
        return None


def trained_for(spec: PolicySpec) -> list[str]:
    """Return the partitions that an agent has weights for; ``default`` serves any."""
    return sorted(f.name.removesuffix(WEIGHTS) for f in Path(spec.folder).glob(f"*{WEIGHTS}"))


def last_verdicts(state: Path) -> dict[tuple[str, str, str], str]:
    """Return (partition, policy, version) -> verdict, from the latest readable report."""
    for file in sorted((state / REPORTS).glob("????-??-??.json"), reverse=True):
        try:
            found = msgspec.json.decode(file.read_bytes(), type=_Page)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        return {(j.partition, j.name, j.version): j.line + j.proposal for j in found.judged}
    return {}


def _in_folder(folder: Path) -> Iterator[Path]:
    files = sorted(folder.glob("*.yaml"))
    yield from files
    named = {f.stem for f in files}
    yield from (f.parent for f in sorted(folder.glob(f"*/{POLICY}")) if f.parent.name not in named)


def _below(root: Path, pattern: str) -> list[Path]:
    return sorted(f.parent for f in root.glob(pattern) if not f.parent.parent.name.startswith("."))


def _readable(path: Path, folders: tuple[Path, ...]) -> PolicySpec | None:
    try:
        return load_policy(path, folders)
    except (GpuschedError, OSError):
        return None
