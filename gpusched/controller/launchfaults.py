"""Whose fault it is that a launch failed: the job's, its node's, or a registry's. Pure.

The engine's words tell little: a driver's file that is missing on the node and a folder that the job mistyped are both
"no such file or directory". So words decide only where they allow no doubt, and otherwise what else happened: a job
that fails on several nodes is at fault itself, a node that fails jobs of several users or images is too, and a job
that failed here and ran elsewhere has proved it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gpusched.cluster.base import REFUSED
from gpusched.model.events import Event
from gpusched.model.jobs import JobRecord, JobSpec
from gpusched.model.resources import Inventory
from gpusched.model.units import count_of
from gpusched.queue.store import SUSPENDED_BY, FailedLaunch, NodeRecord

Failures = Mapping[str, tuple[FailedLaunch, ...]]
"""Node -> launches that failed there, none of the like having worked since."""

FAILURES_TO_SUSPEND = 3
OWN_FAILURES = 2
"""So often may a launch fail over what the job itself names (a mount, its output file) before it is the job's fault."""
NODES_TO_FAIL_ON = 3
"""On so many nodes may a launch fail for any reason before it is the job's fault."""


class Fault(StrEnum):
    """What an error says by itself."""

    JOB = "job"  # no node would answer otherwise
    OWN = "own"  # about something that the job named; it may be missing on this node only
    REGISTRY = "registry"  # neither the job nor the node: to be tried again
    NODE = "node"  # by all signs the node


_OWN = "\0"
"""Stands in an error for a path that the job named: nothing that a user wrote is to be taken for the engine's word."""
_INIT = r"(?!/dev/init|/run/podman-init|/sbin/docker-init)"  # the engine's own program, before the job's
_WORDS: tuple[tuple[Fault, str], ...] = (
    (Fault.JOB, rf"^{REFUSED}:"),
    (
        Fault.OWN,
        r"cannot write the output file|cannot write the file of --error|cannot enter the workdir|"
        r"destination can't be|memory limit|range of cpus is from",
    ),
    # Of a file of the job's it says nothing about the node: anybody can have a file system that is full, or broken.
    (Fault.NODE, rf'(?<!{_OWN}: )(?<!{_OWN}": )(no space left|input/output error|cannot allocate memory)'),
    (Fault.NODE, rf"\A[^{_OWN}]*read-only file system[^{_OWN}]*\Z"),
    (
        Fault.JOB,
        r"manifest unknown|manifest for \S+ not found|no such image|image not known|repository does not exist|"
        r"repository name must be lowercase|name unknown|invalid reference format|short-name .* did not resolve|"
        r"pinging container registry localhost:",  # podman's way to say that a localhost/... image is not there
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
        r"no image found in (manifest list|image index) for architecture",  # an image of other machines
    ),
    (Fault.REGISTRY, r"registry|initializing source|dial tcp|copying blob|TLS handshake|toomanyrequests"),
    (Fault.OWN, _OWN),
)
_TABLE = tuple((fault, re.compile(words, re.IGNORECASE | re.MULTILINE)) for fault, words in _WORDS)


def fault_of(error: str, spec: JobSpec) -> Fault:
    """What an error of the engine or the launcher says; the job's own paths in it are the job's."""
    for path in sorted(_own_paths(spec), key=len, reverse=True):
        # Exactly this path, not one that begins or ends with it.
        error = re.sub(rf"(?<![\w./-]){re.escape(path.rstrip('/'))}/?(?![\w/-]|\.\w)", _OWN, error)
    return next((fault for fault, words in _TABLE if words.search(error)), Fault.NODE)


def _own_paths(spec: JobSpec) -> list[str]:
    paths = [p for mount in spec.mounts for p in (mount.source, mount.target)]
    paths += [p for p in (spec.workdir, spec.image, spec.output, spec.error, *spec.command[:1]) if p is not None]
    return [path for path in paths if path.startswith("/") and path.rstrip("/")]


def image_of(job: JobRecord) -> str:
    """By which images are told apart; "" is the partition's own."""
    return job.spec.image or ""


def is_jobs_fault(fault: Fault, job: JobRecord, node: str, failures: Failures) -> bool:
    """Whether a launch that failed on ``node`` is the job's fault, so that no other node need be tried.

    Where others failed, too, by all nodes' ``failures``, it may be the node.
    """
    nodes = [n for n in (*job.unlaunched_on, node) if not _others_failed(failures.get(n, ()), job)]
    if fault is Fault.OWN:
        return len(nodes) >= OWN_FAILURES or not job.spec.requeue
    return fault is Fault.JOB or (fault is Fault.NODE and len(set(nodes)) >= NODES_TO_FAIL_ON)


def _others_failed(failures: tuple[FailedLaunch, ...], job: JobRecord) -> bool:
    mine = (job.user, image_of(job))
    return any(f.verdict != "job" and (f.user, f.image) != mine for f in failures)


# -- nodes -------------------------------------------------------------------------------------------------------------


def with_failure(failures: Failures, node: str, failure: FailedLaunch) -> dict[str, tuple[FailedLaunch, ...]]:
    """After one more failed launch. What fails on several nodes alike is the job's fault, unless it has run since."""

    def judged(f: FailedLaunch) -> FailedLaunch:
        return msgspec.structs.replace(f, verdict=f.verdict or "job") if _alike(f, failure) else f

    after = {**failures, node: (*failures.get(node, ()), failure)}
    if any(_alike(f, failure) for other, known in failures.items() if other != node for f in known):
        return {n: tuple(map(judged, known)) for n, known in after.items()}
    return after


def with_success(failures: Failures, node: str, ran: FailedLaunch) -> dict[str, tuple[FailedLaunch, ...]]:
    """After a launch that worked.

    It clears its node, of what needed no more than it did: a job without GPUs says nothing about those with. Where the
    same job had failed, the node was at fault; and what is like it is not the jobs' fault.
    """

    def judged(f: FailedLaunch) -> FailedLaunch:
        if f.job == ran.job:
            return msgspec.structs.replace(f, verdict="node")
        return msgspec.structs.replace(f, verdict="") if _alike(f, ran) and f.verdict == "job" else f

    after = {n: tuple(map(judged, known)) for n, known in failures.items()}
    after[node] = tuple(f for f in after.get(node, ()) if f.gpus and not ran.gpus)
    return after


def _alike(one: FailedLaunch, other: FailedLaunch) -> bool:
    return one.job == other.job or (one.user, one.image, one.own) == (other.user, other.image, other.own)


def is_suspicious(failures: tuple[FailedLaunch, ...], spare: bool) -> bool:
    """Whether these failed launches of one node, none of the like having worked since, are the node's fault.

    What failed over something that the job itself names (``own``) is not: it may lie on one node only, as its user
    likes. Nor are one user's failures, until one of these jobs ran elsewhere.

    ``spare``: its partition has another node in service, or never had one. One user's jobs alone do not take away the
    last node.
    """
    open_ones = [f for f in failures if f.verdict != "job" and not f.own]
    proved = {f.job for f in open_ones if f.verdict == "node"}
    if len(proved) >= 2:
        return True
    if len(open_ones) < FAILURES_TO_SUSPEND or len({f.job for f in open_ones}) < 2:
        return False
    several = len({f.user for f in open_ones}) > 1
    return several or (spare and bool(proved))


def judge_nodes(
    inventory: Inventory, records: Mapping[str, NodeRecord], failures: Failures, now: float, why: str
) -> tuple[dict[str, NodeRecord], list[Event]]:
    """Suspend nodes that are at fault, and put back those that turned out not to be.

    ``records`` hold the failures that were known before, ``failures`` those known now; ``why``: what was last heard.
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
            after = msgspec.structs.replace(after, drain_reason=reason, drained_by=SUSPENDED_BY)
            events.append(Event(time=now, kind="drained", node=name, user=SUSPENDED_BY, data={"reason": reason}))
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
