"""A job's requests from preferred to acceptable: over how many nodes, in one rack or anywhere.

Fewest nodes first, those in one rack before others: most of what placement gains is had by that, and by waiting for it.
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


def splits(spec: JobSpec) -> tuple[SpreadRequest, ...]:
    """Yield over how many nodes the job may be spread, the fewest first; cores and memory rounded up."""
    if spec.max_nodes is None:
        return (SpreadRequest(spec.nodes, spec.gpus_per_node, spec.cores_per_node, spec.memory_mib_per_node),)
    cores, memory = spec.amounts
    counts = _divisors(spec.gpus, spec.max_nodes)
    return tuple(SpreadRequest(n, spec.gpus // n, -(-cores // n), -(-memory // n)) for n in counts)


@cache
def _divisors(gpus: int, most: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, most + 1) if gpus % n == 0)


def knows_racks(policy: PolicySpec) -> bool:
    """Return whether the policy can keep a job in one rack: all stages but mapping can, and few agents."""
    traits = policy.traits
    return policy.place not in MAPPING_PLACES and (policy.agent is None or traits.sizes or traits.places)


def waits_until(job: PendingView, policy: PolicySpec) -> float:
    """Return until when it waits for the fewest nodes in one rack (Unix seconds), from submission or begin time."""
    wait = job.spec.placement_wait_s
    if wait is None:
        wait = policy.placement_wait_s if policy.place == "rack-wait" else 0.0
    return max(job.submit_time, job.eligible_time or 0.0) + wait


def asks(
    job: PendingView, policy: PolicySpec, now: float, racked: bool, possible: Callable[[SpreadRequest], bool]
) -> tuple[SpreadRequest, ...]:
    """Return what the job requests now, first choice first.

    Args:
        job: It may start.
        policy: Its partition's.
        now: Unix seconds.
        racked: Whether there is a topology.
        possible: Whether the nodes that are well could give it, were they empty of jobs.
    """
    spec = job.spec
    if not knows_racks(policy):
        return splits(msgspec.structs.replace(spec, max_nodes=None))
    found = splits(spec)
    if len(found) == 1 and not (racked and spec.nodes > 1):
        return found
    inside = tuple(ask._replace(one_rack=racked and ask.parts > 1) for ask in found)
    chain = inside if spec.max_spread == "rack" else found
    if now < waits_until(job, policy):
        at = next((i for i, ask in enumerate(chain) if possible(ask)), None)
        if at is not None and possible(inside[at]):
            return (inside[at],)
    if len(chain) == 1:
        return chain
    return tuple(filter(possible, chain)) or tuple(ask for ask in chain if ask.parts >= spec.nodes)


def gives_up(
    job: PendingView, policy: PolicySpec, asked_at: Callable[[float], tuple[SpreadRequest, ...]], now: float
) -> float | None:
    """Return when a job waiting for better nodes takes what is free (Unix seconds); None: it does not wait.

    ``asked_at``: what it asks for at a time, see `asks`. Where that is the same later, waiting is not what holds it.
    """
    until = waits_until(job, policy)
    waits = knows_racks(policy) and now < until
    return until if waits and asked_at(now) != asked_at(until) else None


def waits_text(until: float, now: float, policy: PolicySpec, job: PendingView, on: int | None) -> str:
    """Format as ``waits for one rack until 14:20 at the latest (rack-wait); it could start now on 2 racks``."""
    option = "--placement-wait" if job.spec.placement_wait_s is not None else policy.name
    wish = "one rack" if job.spec.max_nodes is None else "fewer nodes in one rack"
    text = f"waits for {wish} until {local_clock(until, now)} at most ({option})"
    return f"{text}; it could start now on {count_of(on, 'rack')}" if on is not None else text


def better_text(own: float, harm: float, until: float, now: float) -> str:
    """Format as ``waits for a better place: there now it would run 18 % slower; at most until 14:20``.

    Args:
        own: By which part its steps would be longer.
        harm: The same of its neighbours', weighed by their GPUs.
        until: Unix seconds.
        now: Unix seconds.
    """
    would = [f"run {100 * own:.0f} % slower"] if own >= 0.005 else []
    would += ["slow down its neighbours"] if harm >= 0.005 or not would else []
    effects = " and ".join(would)
    return f"waits for a better place until {local_clock(until, now)} at most: started now it would {effects}"
