"""What must hold when everything is over: the jobs' ledger and the nodes against gpusched's records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from gpusched.model.jobs import ENDED, JobRecord
from tests.campaign.ledger import Line
from tests.campaign.run import Campaign
from tests.campaign.schedule import Work
from tests.campaign.site import NODE_FAIL_AFTER_S, Site
from tests.campaign.slurmsite import BesideSlurm
from tests.testbed import processes

SLACK_S = 3 * NODE_FAIL_AFTER_S
"""How long after its end a fault may still show its effects."""


def broken(campaign: Campaign) -> list[str]:
    """One line for each violation."""
    site = campaign.site
    if isinstance(site, BesideSlurm):
        return [*site.wrong, *site.violations()]
    site.ledger.read()
    by_job: dict[str, list[Line]] = defaultdict(list)
    for line in site.ledger.lines:
        by_job[line.job].append(line)
    jobs = {job.id: job for job in site.records()}
    found = [*site.wrong, *_submissions(site, jobs), *_once(site.ledger.lines), *_leaks(site), *site.violations()]
    for job in jobs.values():
        work = _work(site, job)
        found += [f"{job.id} {job.spec.name}: {said}" for said in _job(campaign, job, work, by_job[job.id])]
    return found


def _work(site: Site, job: JobRecord) -> Work | None:
    return site.accepted.get(job.array_id or job.id)


def _submissions(site: Site, jobs: dict[str, JobRecord]) -> Iterator[str]:
    """Every accepted submission exists once; what a client died over, once or not at all."""
    with site.reader() as reader:
        refused = [str(e.data) for e in reader.events(limit=10**6) if e.kind == "refused_command"] if reader else []
    names = Counter(job.spec.name for job in jobs.values())
    for job, work in site.accepted.items():
        ids = [job] if work.shape != "array" else [f"{job}_{task}" for task in range(3)]
        said = [why for why in refused if job in why]
        if said and work.shape == "gang":
            continue  # its partition had lost a node before the controller read it
        yield from (f"lost: {one} (w{work.number}) {said}" for one in ids if one not in jobs)
    for name in site.perhaps:
        if names[name] > (3 if name[0] == "w" else 1):
            yield f"doubled: {name} exists {names[name]} times"


def _once(lines: list[Line]) -> Iterator[str]:
    """No rank of an attempt begins twice, and no GPU is two jobs'."""
    starts = Counter((line.job, line.attempt, line.rank) for line in lines if line.what == "start")
    yield from (f"doubled: {key} began {count} times" for key, count in starts.items() if count > 1)
    yield from (f"GPU shared: {line}" for line in lines if line.what == "clash")


def _job(campaign: Campaign, job: JobRecord, work: Work | None, lines: list[Line]) -> Iterator[str]:
    """It ended in the state that is true."""
    if job.state not in ENDED:
        yield f"is {job.state}"
        return
    site = campaign.site
    assert isinstance(site, Site)
    last = [line for line in lines if line.attempt == job.attempt]
    ends = {line.rank: int(line.more) for line in last if line.what == "end"}
    ranks = len(job.allocation.parts) if job.allocation else (2 if work and work.shape == "gang" else 1)
    struck = job.id in site.struck
    hit = _hit(campaign, job, lines)
    code = work.code if work else 0
    if job.state == "COMPLETED":
        if len(ends) < ranks or any(ends.values()):
            yield f"COMPLETED, but its ranks ended {ends}"
    elif job.state == "FAILED":
        own = job.exit_code == code != 0 and code in ends.values()
        if not (own or struck or (hit and job.message)):
            yield f"FAILED ({job.exit_code}, {job.reason}: {job.message}), but its ranks ended {ends}"
    elif job.state == "CANCELLED":
        if job.id not in site.ordered:
            yield f"CANCELLED without an order: {job.message}"
    elif job.state == "TIMEOUT":
        if work is None or work.shape not in ("limit", "cancelled"):
            yield f"TIMEOUT: {job.message}"
    elif not hit:
        yield f"{job.state} ({job.message}) without a reason"
    if job.attempt > 1 and not hit and not struck:
        yield f"was tried {job.attempt} times without a fault on its nodes: {[(i.node, i.attempt) for i in lines]}"
    true = job.state in ("COMPLETED", "CANCELLED", "NODE_FAIL") or struck or _hit(campaign, job, last, exit_codes=True)
    if len(ends) == ranks and not any(ends.values()) and not true:
        yield f"{job.state} ({job.message}), but all its ranks ended with 0"


def _hit(campaign: Campaign, job: JobRecord, lines: list[Line], exit_codes: bool = False) -> bool:
    """Whether a fault was, or had just been, on one of its nodes while it ran, or on any while it tried to start."""
    begin = min((line.time for line in lines), default=0.0) - SLACK_S
    end = max((line.time for line in lines), default=float("inf")) + SLACK_S
    nodes = {line.node for line in lines}
    return any(
        (trouble.fault.costs_exit_codes if exit_codes else trouble.fault.ends_attempts)
        and (trouble.act.node in nodes or not nodes or job.attempt > len({line.attempt for line in lines}))
        and trouble.begin <= end
        and trouble.end + SLACK_S >= begin
        for trouble in campaign.troubles
    )


def _leaks(site: Site) -> Iterator[str]:
    """Nothing of ours is left that no live job owns."""
    yield from (f"left: container {name} on {node}" for node, name in site.containers(running=False))
    for node in site.testbed.nodes:
        for pid in node.pids():
            words = processes.command_line(pid)
            if any(word.endswith("/job.sh") for word in words):
                yield f"left: process {pid} {words} on {node.name}"
        home = node.disk / "home" / ".local" / "state" / "gpusched-node"
        yield from (f"left: {path.relative_to(home)} on {node.name}" for path in home.glob("*/gpusched-*"))
    for folder in ("inbox/new", "inbox/tmp", "secrets"):
        path = site.state / folder
        drafts = [p.name for p in path.iterdir()] if path.is_dir() else []
        killed = folder == "inbox/tmp"  # a dead client's draft is removed after a day
        yield from (f"left: {folder}/{name}" for name in drafts if not killed)
    if site.stranger.read_text() != "not gpusched's":
        yield "a file that a link in the inbox pointed to was changed"
    with site.reader() as reader:
        if reader is not None:
            yield from (f"left: a record of {rank.job_id} on {rank.node}" for rank in reader.ranks())
    if "Traceback" in site.controller_log:
        at = site.controller_log.index("Traceback")
        yield f"a traceback in the log: {site.controller_log[at:at + 1500]}"
