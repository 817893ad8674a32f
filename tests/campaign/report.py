"""The table at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.campaign.run import Campaign


def table(campaign: Campaign, violations: Sequence[str], seed: int, seconds: float) -> str:
    """Faults by kind, jobs by end, violations."""
    site = campaign.site
    kinds = Counter(trouble.act.kind for trouble in campaign.troubles)
    jobs = site.records()
    states = Counter(str(job.state) for job in jobs)
    effect = sum(trouble.fault.had_effect for trouble in campaign.troubles)
    lines = [f"seed {seed}: {sum(kinds.values())} faults, {effect} with an effect, {len(jobs)} jobs, {seconds:.0f} s"]
    lines += ["faults: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))]
    lines += ["jobs: " + ", ".join(f"{state} {count}" for state, count in sorted(states.items()))]
    retried = sum(job.attempt > 1 for job in jobs)
    lines += [
        f"of them tried again: {retried}; controllers: {site.starts_of_controller}; "
        f"lines in the ledger: {len(site.ledger.lines)}"
    ]
    lines += [f"what a person put right: nodes resumed after failed launches, Slurm reconfigured: {len(site.resumed)}"]
    lost = site.may_lose - {job.id for job in jobs}
    lines += [f"accepted after the last backup, not started, and lost with the state folder: {len(lost)}"]
    lines += [f"violations: {len(violations)}", *violations]
    return "\n".join(lines)
