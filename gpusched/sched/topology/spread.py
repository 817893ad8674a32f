"""The requests that a job accepts, best first: on how many nodes, and in one rack or anywhere.

Fewer nodes come first, and one rack before several. These two, and waiting for them, bring most of placement's gain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import msgspec

from gpusched.model.jobs import JobSpec
from gpusched.model.policy import MAPPING_PLACES, PolicySpec
from gpusched.model.snapshot import PendingView
from gpusched.model.units import count_of, local_clock


class SpreadRequest(NamedTuple):
    """A number of nodes with GPUs, cores and MiB on each; ``one_rack``: all in one."""

    parts: int
    gpus: int
    cores: int
    memory_mib: int
    one_rack: bool = False

    @property
    def needs(self) -> tuple[int, int, int]:
        """Return GPUs, cores and MiB of each node."""
        return self.gpus, self.cores, self.memory_mib


def split_requests(spec: JobSpec) -> tuple[SpreadRequest, ...]:
    """Return the job's request split over each permitted number of nodes, fewest first; cores and memory rounded up."""
    if spec.max_nodes is None:
        return (SpreadRequest(spec.nodes, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node),)
    cores, memory = spec.amounts
    counts = _divisors(spec.gpus, spec.max_nodes)
    return tuple(SpreadRequest(n, spec.gpus // n, -(-cores // n), -(-memory // n)) for n in counts)


@cache
def _divisors(gpus: int, most: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, most + 1) if gpus % n == 0)


def supports_racks(policy: PolicySpec) -> bool:
    """Return whether the policy can keep a job in one rack: all placements but mapping can, and few agents."""
    traits = policy.traits
    return policy.place not in MAPPING_PLACES and (policy.agent is None or traits.sizes or traits.places)


def rack_wait_until(job: PendingView, policy: PolicySpec) -> float:
    """Return when the job stops waiting for the fewest nodes in one rack (Unix seconds).

    The wait is counted from submission, or from the time since when the job is eligible if that is later.
    """
    wait = job.spec.placement_wait_s
    if wait is None:
        wait = policy.placement_wait_s if policy.place == "rack-wait" else 0.0
    return max(job.submit_time, job.eligible_time or 0.0) + wait


def current_requests(
    job: PendingView, policy: PolicySpec, now: float, racked: bool, possible: Callable[[SpreadRequest], bool]
) -> tuple[SpreadRequest, ...]:
    """Return what the job requests now, first choice first.

    Args:
        job: An eligible job.
        policy: The policy of its partition.
        now: Unix seconds.
        racked: Whether the cluster has a topology.
        possible: Whether the healthy nodes could satisfy a request if no jobs ran on them.
    """
    spec = job.spec
    if not supports_racks(policy):
        return split_requests(msgspec.structs.replace(spec, max_nodes=None))
    found = split_requests(spec)
    if len(found) == 1 and not (racked and spec.nodes > 1):
        return found
    # Both chains have the same numbers of nodes. A job with ``--max-spread rack`` never leaves the first.
    inside = tuple(ask._replace(one_rack=racked and ask.parts > 1) for ask in found)
    chain = inside if spec.max_spread == "rack" else found
    if now < rack_wait_until(job, policy):
        # While it waits, the job requests only the first possible number of nodes, if that fits in one rack at all.
        at = next((i for i, ask in enumerate(chain) if possible(ask)), None)
        if at is not None and possible(inside[at]):
            return (inside[at],)
    if len(chain) == 1:
        return chain
    # If none is possible now, the job stays pending for those of at least its usual number of nodes.
    return tuple(filter(possible, chain)) or tuple(ask for ask in chain if ask.parts >= spec.nodes)


def wait_ends_at(
    job: PendingView, policy: PolicySpec, asked_at: Callable[[float], tuple[SpreadRequest, ...]], now: float
) -> float | None:
    """Return when a job that waits for better nodes accepts others (Unix seconds); None: it does not wait.

    ``asked_at`` returns its requests at a time (`current_requests`). If they do not change later, the wait is not why
    the job is pending.
    """
    until = rack_wait_until(job, policy)
    waits = supports_racks(policy) and now < until
    return until if waits and asked_at(now) != asked_at(until) else None


def rack_wait_text(until: float, now: float, policy: PolicySpec, job: PendingView, on: int | None) -> str:
    """Format as ``waits for one rack until 14:20 at the latest (rack-wait); it could start now on 2 racks``."""
    option = "--placement-wait" if job.spec.placement_wait_s is not None else policy.name
    wish = "one rack" if job.spec.max_nodes is None else "fewer nodes in one rack"
    text = f"waits for {wish} until {local_clock(until, now)} at the latest ({option})"
    return f"{text}; it could start now on {count_of(on, 'rack')}" if on is not None else text


def better_place_text(own: float, harm: float, until: float, now: float) -> str:
    """Format as ``waits for a better place until 14:20 at the latest; started now, it would run 18 % slower``.

    Args:
        own: Slowdown of the job, as a fraction of its step time.
        harm: Slowdown of its neighbours, weighted by their GPUs.
        until: Unix seconds.
        now: Unix seconds.
    """
    would = [f"run {100 * own:.0f} % slower"] if own >= 0.005 else []
    would += ["slow down its neighbours"] if harm >= 0.005 or not would else []
    effects = " and ".join(would)
    return f"waits for a better place until {local_clock(until, now)} at the latest; started now, it would {effects}"
