"""Shell completion candidates, computed fast; `gpusched.cli.complete` calls this and suppresses all errors.

Plain words only: zsh evaluates the descriptions that typer hands it, and job names are other users' text.
"""

from __future__ import annotations

import os
from itertools import islice

from gpusched.client.context import Client
from gpusched.config.users import user_name
from gpusched.model.arrays import tasks_of
from gpusched.model.jobs import ENDED, JobRecord, JobState

MAX_OFFERED = 200


def _jobs(client: Client) -> list[JobRecord]:
    from gpusched.client.inbox import inbox_jobs

    waiting = list(islice(tasks_of(inbox_jobs(client)), MAX_OFFERED))
    reader = client.reader
    stored = reader.active() + reader.jobs(states=[JobState.PENDING], limit=MAX_OFFERED) if reader else []
    known = {j.id for j in stored}
    return [*stored, *(j for j in waiting if j.id not in known)]


def _ids(jobs: list[JobRecord], incomplete: str) -> list[str]:
    return [j.id for j in reversed(jobs) if j.id.startswith(incomplete)]


def live_jobs(client: Client, incomplete: str) -> list[str]:
    """Return the ids of pending and running jobs, newest first."""
    return _ids(_jobs(client), incomplete)


def pending_jobs(client: Client, incomplete: str) -> list[str]:
    """Return the ids of pending jobs."""
    return _ids([j for j in _jobs(client) if j.state is JobState.PENDING], incomplete)


def all_jobs(client: Client, incomplete: str) -> list[str]:
    """Return the ids of pending and running jobs, and of those that ended most recently."""
    ended = client.reader.recently_ended(20) if client.reader else []
    return _ids([*(j for j in ended if j.state in ENDED), *_jobs(client)], incomplete)


def nodes(client: Client, incomplete: str) -> list[str]:
    """Return the names of nodes."""
    return [n.name for n in client.inventory.nodes if n.name.startswith(incomplete)]


def partitions(client: Client, incomplete: str) -> list[str]:
    """Return the names of partitions."""
    return [p.name for p in client.inventory.partitions if p.name.startswith(incomplete)]


def reservations(client: Client, incomplete: str) -> list[str]:
    """Return the names of current and future reservations."""
    from time import time

    names = [reservation.name for reservation in client.reader.reservations(time())] if client.reader else []
    return [name for name in names if name.startswith(incomplete)]


def flavors(client: Client, incomplete: str) -> list[str]:
    """Return the names of flavors."""
    names = dict.fromkeys(f.name for p in client.inventory.partitions for f in p.flavors)
    return [name for name in names if name.startswith(incomplete)]


def gpu_types(client: Client, incomplete: str) -> list[str]:
    """Return the GPU types of all nodes."""
    names = dict.fromkeys(n.gpu_type for n in client.inventory.nodes if n.gpu_type)
    return [name for name in names if name.startswith(incomplete)]


def groups(client: Client, incomplete: str) -> list[str]:
    """Return the groups that the caller is a member of."""
    return [name for name in client.inventory.groups.of(user_name(os.getuid())) if name.startswith(incomplete)]


def classes(client: Client, incomplete: str) -> list[str]:
    """Return the QoS classes that the caller may use."""
    user, inventory = user_name(os.getuid()), client.inventory
    usable = (qos.name for qos in inventory.quotas.qos if qos.may_use(user, inventory.groups))
    return [name for name in usable if name.startswith(incomplete)]


def policies(client: Client, incomplete: str) -> list[str]:
    """Return the names of policies."""
    from gpusched.config.policies import policy_names

    return [name for name in policy_names(client.inventory.path) if name.startswith(incomplete)]


def replays(_: Client, incomplete: str) -> list[str]:
    """Return the names of policies that replays accept."""
    from gpusched.sim.orders import folders_in_force, known_policies

    return [name for name in known_policies(folders_in_force()) if name.startswith(incomplete)]


def agents(client: Client, incomplete: str) -> list[str]:
    """Return the names of policies with a trainable agent."""
    from gpusched.config.policies import load_policy, policy_file, policy_folders

    folders = policy_folders(client.inventory.path)
    files = {name: policy_file(name, folders) for name in policies(client, incomplete)}
    return [name for name, file in files.items() if file is not None and load_policy(file, folders).agent is not None]


def states(_: Client, incomplete: str) -> list[str]:
    """Return the names of job states, in the case the user types."""
    found = [str(s) for s in JobState if s.startswith(incomplete.upper())]
    return [s.lower() if incomplete.islower() else s for s in found]
