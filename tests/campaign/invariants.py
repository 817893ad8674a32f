"""Invariants at the end of a campaign: the jobs' ledger and the nodes against gpusched's records."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from gpusched.model.jobs import ENDED, JobRecord
from tests.campaign.ledger import Line
from tests.campaign.run import Campaign
from tests.campaign.schedule import Work, jobs_of
from tests.campaign.site import NODE_FAIL_AFTER_S, POWER_W, PROBE_TIMEOUT_S, Site
from tests.campaign.slurmsite import BesideSlurm
from tests.testbed import processes

READ_WITHIN_S = 6.0
"""How long after a node's last fault, or the controller's, it may not have been read again: time-out and tick."""
LONG_CYCLE_S = 10.0
DELAY_S = 30.0
"""How long a submission waits at most for the controller, besides faults of its own; then files are retried."""
OF_CONTROLLER = ("controller", "disk", "fuse", "store", "declared", "clock", "inbox")
"""Families of faults that may hold up the controller itself; those of nodes must not."""
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
    found += [*_cycles(campaign), *_delays(campaign, jobs), *_energy(campaign, by_job)]
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
        ids = jobs_of(job, work)
        said = [why for why in refused if job in why]
        if said and work.shape == "gang":
            continue  # its partition had lost a node before the controller read it
        yield from (f"lost: {one} (w{work.number}) {said}" for one in ids
                    if one not in jobs and one not in site.may_lose)  # fmt: skip
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
        own = own or (work is not None and work.shape == "image" and not last and job.reason == "LaunchFailed")
        if not (own or struck or (hit and job.message)):
            yield f"FAILED ({job.exit_code}, {job.reason}: {job.message}), but its ranks ended {ends}"
    elif job.state == "CANCELLED":
        if job.id not in site.ordered:
            yield f"CANCELLED without an order: {job.message}"
    elif job.state == "OUT_OF_MEMORY" and work and work.shape == "oom":
        pass
    elif job.state == "TIMEOUT":
        if work is None or work.shape not in ("limit", "cancelled"):
            yield f"TIMEOUT: {job.message}"
    elif not hit:
        yield f"{job.state} ({job.message}) without a reason"
    if job.attempt > 1 and not hit and not struck:
        yield f"was tried {job.attempt} times without a fault on its nodes: {[(i.node, i.attempt) for i in lines]}"
    true = job.state in ("COMPLETED", "CANCELLED") or struck or _hit(campaign, job, last, exit_codes=True)
    true = true or (job.state == "NODE_FAIL" and _was_given_up(campaign, last))
    if len(ends) == ranks and not any(ends.values()) and not true:
        yield f"{job.state} ({job.message}), but all its ranks ended with 0"


def _was_given_up(campaign: Campaign, lines: list[Line]) -> bool:
    """Whether one of its nodes was silent for `NODE_FAIL_AFTER_S` from before the controller could see its end.

    As the documentation says, such a job is given up; NODE_FAIL stays when the node returns.
    """
    for node in {line.node for line in lines}:
        end = max(line.time for line in lines if line.node == node)
        hidden = _merged(
            (t.begin, t.end)
            for t in campaign.troubles
            if (t.fault.ends_attempts and t.act.node == node) or t.act.kind.startswith(OF_CONTROLLER)
        )
        if any(begin <= end <= last and last - begin >= NODE_FAIL_AFTER_S - 1 for begin, last in hidden):
            return True
    return False


def _merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans with `READ_WITHIN_S` at both ends, those that overlap as one."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((begin - READ_WITHIN_S, end + READ_WITHIN_S) for begin, end in spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _cycles(campaign: Campaign) -> Iterator[str]:
    """A cycle waits for no node: only faults of the controller itself make one long."""
    with campaign.site.reader() as reader:
        totals = reader.metric_totals() if reader else None
    if totals is None:
        return
    cycles = totals.cycles
    long = sum(n for n, bound in zip(cycles.counts, (0.0, *cycles.bounds), strict=True) if bound >= LONG_CYCLE_S)
    own = sum(t.act.kind.startswith(OF_CONTROLLER) for t in campaign.troubles)
    if long > own:
        yield f"{long} of {sum(cycles.counts)} cycles took over {LONG_CYCLE_S:.0f} s; the controller had {own} faults"


def _delays(campaign: Campaign, jobs: dict[str, JobRecord]) -> Iterator[str]:
    """Nothing but the controller's own faults keeps it from reading a submission."""
    site = campaign.site
    assert isinstance(site, Site)
    with site.reader() as reader:
        read = {e.job_id: e.time for e in reader.events(limit=10**6) if e.kind == "submitted"} if reader else {}
    for job in jobs.keys() & read.keys() & site.accepted_at.keys():
        # The clock jumps by whole hours.
        delay = (read[job] - jobs[job].submit_time + 1800) % 3600 - 1800
        begin = site.accepted_at[job]
        held = sum(
            max(0.0, min(t.end + DELAY_S, begin + delay) - max(t.begin, begin))
            for t in campaign.troubles
            if t.act.kind.startswith(OF_CONTROLLER)
        )
        if delay > DELAY_S + held:
            yield f"{job} was read after {delay:.0f} s, of which faults of the controller explain {held:.0f} s"


def _energy(campaign: Campaign, by_job: dict[str, list[Line]]) -> Iterator[str]:
    """Energy is the counters' for the time a job had its GPUs; what was not measured is said to be unknown.

    A reading is dated when it has come, at most a probe's time-out after the counters were read. Of what a job held
    from one reading to another, and of parts of both, that is all by which energy and time may differ.

    Not of jobs that began before the state folder was lost: `recover` rebuilds the last attempt's, by its own clock.
    """
    recovered_at = max((t.end for t in campaign.troubles if t.act.kind == "store.lost"), default=0.0)
    with campaign.site.reader() as reader:
        if reader is None:
            return
        usage = {job: reader.usage_of_job(job) for job in by_job}
    for job, lines in by_job.items():
        if min(line.time for line in lines) < recovered_at:
            continue
        held_s = sum(row.gpu_s for row in usage[job])
        energy_j, unknown_s = (sum(getattr(row, n) for row in usage[job]) for n in ("energy_j", "energy_unknown_s"))
        ran_s, gpu_starts = 0.0, 1
        for line in lines:
            gpus = len(line.more.split(",")) if line.more else 0
            ends = [one.time for one in lines if one.what == "end" and one[1:5] == line[1:5]]
            if line.what == "start":
                gpu_starts += gpus
                ran_s += gpus * (ends[0] - line.time) if ends else 0.0  # killed with its node: nobody wrote the end
        slack_s = (PROBE_TIMEOUT_S + campaign.stalled_s) * gpu_starts
        least_j, most_j = (POWER_W * s for s in (0.95 * (held_s - unknown_s) - slack_s, 1.05 * held_s + slack_s))
        if not least_j <= energy_j <= most_j or held_s < ran_s - slack_s:
            yield f"{job}: {energy_j:.0f} J in {held_s:.1f} GPU s, {unknown_s:.1f} unknown; it ran {ran_s:.1f} GPU s"


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
