"""Attributes a failed launch to the job, its node, or a registry. Pure.

Error messages are ambiguous: a missing driver file on the node and a mistyped folder of the job both read "no such file
or directory". So messages decide only where they are unambiguous. Otherwise other launches decide: a job that fails on
several nodes is at fault, so is a node that fails jobs of several users or images, and a job that failed on one node
and ran on another shows that the node was at fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpusched.cluster.base import REFUSED
from gpusched.controller.nodestate import with_drain
from gpusched.model.events import Event
from gpusched.model.jobs import JobRecord, JobSpec
from gpusched.model.resources import Inventory
from gpusched.model.units import count_of
from gpusched.queue.store import SUSPENDED_BY, FailedLaunch, NodeRecord

Failures = Mapping[str, tuple[FailedLaunch, ...]]
"""Node -> launches that failed there since a similar one succeeded."""

FAILURES_TO_SUSPEND = 3
OWN_FAILURES = 2
"""Failures over something that the job names (a mount, its output file) after which the job is at fault."""
NODES_TO_FAIL_ON = 3
"""Nodes on which a launch may fail for any reason before the job is at fault."""


class Fault(StrEnum):
    """The cause that an error message suggests by itself."""

    JOB = "job"  # it would fail on every node
    OWN = "own"  # over something that the job names, which may be missing on this node only
    REGISTRY = "registry"  # neither the job nor the node: retry
    NODE = "node"  # most likely the node


_OWN = "\0"
"""Replaces paths that the job names in an error, so that user-supplied text is not matched as the engine's."""
_INIT = r"(?!/dev/init|/run/podman-init|/sbin/docker-init)"  # the engine's own program, before the job's
_PATTERNS: tuple[tuple[Fault, str], ...] = (
    (Fault.JOB, rf"^{REFUSED}:"),
    (
        Fault.OWN,
        r"cannot write the output file|cannot write the file of --error|cannot enter the workdir|"
        r"destination can't be|memory limit|range of cpus is from",
    ),
    # Not for a file of the job: its file system may be full or broken through no fault of the node.
    (Fault.NODE, rf'(?<!{_OWN}: )(?<!{_OWN}": )(no space left|input/output error|cannot allocate memory)'),
    (Fault.NODE, rf"\A[^{_OWN}]*read-only file system[^{_OWN}]*\Z"),
    (
        Fault.JOB,
        r"manifest unknown|manifest for \S+ not found|no such image|image not known|repository does not exist|"
        r"repository name must be lowercase|name unknown|invalid reference format|short-name .* did not resolve|"
        r"pinging container registry localhost:",  # podman's message for a missing localhost/... image
    ),
    (
        Fault.JOB,
        rf'exec: "{_INIT}[^"]*": executable file not found in \$PATH|'
        rf"executable file `{_INIT}[^`]*` not found in \$PATH|"
        r'workdir ".*" does not exist on container',
    ),
    (
        Fault.OWN,
        r"unauthorized|authentication required|access denied|access to the resource is denied|unable to find user|"
        r"exec container process .*: exec format error|image operating system .* cannot be used on this platform|"
        r"no image found in (manifest list|image index) for architecture",  # an image for another architecture
    ),
    (Fault.REGISTRY, r"registry|initializing source|dial tcp|copying blob|TLS handshake|toomanyrequests"),
    (Fault.OWN, _OWN),
)
_FLAGS = re.IGNORECASE | re.MULTILINE


def fault_of(error: str, spec: JobSpec) -> Fault:
    """Return the cause that an error of the engine or launcher suggests; paths named by the job point to the job."""
    for path in sorted(_own_paths(spec), key=len, reverse=True):
        # Match exactly this path, not longer ones.
        error = re.sub(rf"(?<![\w./-]){re.escape(path.rstrip('/'))}/?(?![\w/-]|\.\w)", _OWN, error)
    return next((fault for fault, words in _PATTERNS if re.search(words, error, _FLAGS)), Fault.NODE)


def _own_paths(spec: JobSpec) -> list[str]:
    paths = [p for mount in spec.mounts for p in (mount.source, mount.target)]
    paths += [p for p in (spec.workdir, spec.image, spec.output, spec.error, *spec.command[:1]) if p is not None]
    return [path for path in paths if path.startswith("/") and path.rstrip("/")]


def image_of(job: JobRecord) -> str:
    """Return the job's image; "": its partition's default."""
    return job.spec.image or ""


def is_jobs_fault(fault: Fault, job: JobRecord, node: str, failures: Failures) -> bool:
    """Return whether a launch that failed on ``node`` is the job's fault, so that no other node need be tried.

    If other jobs failed there too (``failures``: of all nodes), the node may be at fault.
    """
    nodes = [n for n in (*job.unlaunched_on, node) if not _others_failed(failures.get(n, ()), job)]
    if fault is Fault.OWN:
        return len(nodes) >= OWN_FAILURES or not job.spec.requeue
    return fault is Fault.JOB or (fault is Fault.NODE and len(set(nodes)) >= NODES_TO_FAIL_ON)


def _others_failed(failures: tuple[FailedLaunch, ...], job: JobRecord) -> bool:
    own = (job.user, image_of(job))
    return any(f.verdict != "job" and (f.user, f.image) != own for f in failures)


# -- nodes -------------------------------------------------------------------------------------------------------------


def with_failure(failures: Failures, node: str, failure: FailedLaunch) -> dict[str, tuple[FailedLaunch, ...]]:
    """Add a failed launch. If it fails alike on several nodes it is the job's fault, unless it has run since."""

    def judged(f: FailedLaunch) -> FailedLaunch:
        return msgspec.structs.replace(f, verdict=f.verdict or "job") if _is_similar(f, failure) else f

    after = {**failures, node: (*failures.get(node, ()), failure)}
    if any(_is_similar(f, failure) for other, known in failures.items() if other != node for f in known):
        return {n: tuple(map(judged, known)) for n, known in after.items()}
    return after


def with_success(failures: Failures, node: str, ran: FailedLaunch) -> dict[str, tuple[FailedLaunch, ...]]:
    """Update the failures after a successful launch.

    It clears its node of failures that needed no more than it did: a job without GPUs proves nothing for those with
    GPUs. If the same job had failed elsewhere, that node was at fault, and similar failures are not the jobs' fault.
    """

    def judged(f: FailedLaunch) -> FailedLaunch:
        if f.job == ran.job:
            return msgspec.structs.replace(f, verdict="node")
        return msgspec.structs.replace(f, verdict="") if _is_similar(f, ran) and f.verdict == "job" else f

    after = {n: tuple(map(judged, known)) for n, known in failures.items()}
    after[node] = tuple(f for f in after.get(node, ()) if f.gpus and not ran.gpus)
    return after


def _is_similar(a: FailedLaunch, b: FailedLaunch) -> bool:
    return a.job == b.job or (a.user, a.image, a.own) == (b.user, b.image, b.own)


def is_suspicious(failures: tuple[FailedLaunch, ...], spare: bool) -> bool:
    """Return whether one node's failed launches, since similar ones succeeded, are the node's fault.

    Failures over something that the job names (``own``) do not count, as it may exist on some nodes only. Nor do one
    user's failures, until one of these jobs ran elsewhere.

    ``spare``: the partition has another node in service, or no other node at all. One user's jobs alone do not take the
    last node out of service.
    """
    unexplained = [f for f in failures if f.verdict != "job" and not f.own]
    proved = {f.job for f in unexplained if f.verdict == "node"}
    # Two jobs that failed here and ran elsewhere are proof, even if both are one user's.
    if len(proved) >= 2:
        return True
    if len(unexplained) < FAILURES_TO_SUSPEND or len({f.job for f in unexplained}) < 2:
        return False
    several_users = len({f.user for f in unexplained}) > 1
    return several_users or (spare and bool(proved))


def judge_nodes(
    inventory: Inventory, records: Mapping[str, NodeRecord], failures: Failures, now: float, why: str
) -> tuple[dict[str, NodeRecord], list[Event]]:
    """Drain nodes that are at fault, and resume those that turned out not to be.

    ``records`` hold the failures known before, ``failures`` those known now; ``why``: the latest error.
    """
    changed: dict[str, NodeRecord] = {}
    events: list[Event] = []
    for name, record in records.items():
        found = failures.get(name, ())
        if found == record.failed_launches:
            continue
        after = msgspec.structs.replace(record, failed_launches=found)
        suspicious = is_suspicious(found, _has_spare(inventory, {**records, **changed}, name))
        if suspicious and record.drain_reason is None:
            reason = _reason(name, found, why)
            after, event = with_drain(after, reason, SUSPENDED_BY, now)
            events.append(event)
        elif record.drained_by == SUSPENDED_BY and record.failed_launches and not suspicious:
            after = msgspec.structs.replace(after, drain_reason=None, drained_by=None)
            data = {"reason": "its failed launches were not its fault"}
            events.append(Event(time=now, kind="resumed", node=name, user=SUSPENDED_BY, data=data))
        changed[name] = after
    return changed, events


def _has_spare(inventory: Inventory, records: Mapping[str, NodeRecord], name: str) -> bool:
    node = inventory.node(name)
    partition = inventory.partition(node.partition) if node is not None else None
    others = [n.name for n in partition.nodes if n.name != name] if partition is not None else []
    return not others or any(n in records and records[n].drain_reason is None for n in others)


def _reason(name: str, failures: tuple[FailedLaunch, ...], why: str) -> str:
    failures = tuple(f for f in failures if not f.own)
    users, jobs = len({f.user for f in failures}), len({f.job for f in failures})
    of = f"{count_of(jobs, 'job')} of {users} users" if users > 1 else count_of(jobs, "job")
    because = f"; {why[:300]}" if why else ""
    return (
        f"suspended: {count_of(len(failures), 'launch', 'launches')} of {of} failed here{because}; "
        f"fix it ('gpusched check {name}' tries a container), then 'gpusched resume {name}'"
    )
