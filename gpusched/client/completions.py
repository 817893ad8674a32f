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


def _ids(jobs: list[JobRecord]) -> list[str]:
    return [j.id for j in reversed(jobs)]


def live_jobs(client: Client) -> list[str]:
    """Return the ids of pending and running jobs, newest first."""
    return _ids(_jobs(client))


def pending_jobs(client: Client) -> list[str]:
    """Return the ids of pending jobs."""
    return _ids([j for j in _jobs(client) if j.state is JobState.PENDING])


def all_jobs(client: Client) -> list[str]:
    """Return the ids of pending and running jobs, and of those that ended most recently."""
    ended = client.reader.recently_ended(20) if client.reader else []
    return _ids([*(j for j in ended if j.state in ENDED), *_jobs(client)])


def nodes(client: Client) -> list[str]:
    """Return the names of nodes."""
    return [n.name for n in client.inventory.nodes]


def partitions(client: Client) -> list[str]:
    """Return the names of partitions."""
    return [p.name for p in client.inventory.partitions]


def reservations(client: Client) -> list[str]:
    """Return the names of current and future reservations."""
    from time import time

    return [reservation.name for reservation in client.reader.reservations(time())] if client.reader else []


def flavors(client: Client) -> list[str]:
    """Return the names of flavors."""
    return list(dict.fromkeys(f.name for p in client.inventory.partitions for f in p.flavors))


def gpu_types(client: Client) -> list[str]:
    """Return the GPU types of all nodes."""
    return list(dict.fromkeys(n.gpu_type for n in client.inventory.nodes if n.gpu_type))


def groups(client: Client) -> list[str]:
    """Return the groups that the caller is a member of."""
    return list(client.inventory.groups.of(user_name(os.getuid())))


def classes(client: Client) -> list[str]:
    """Return the QoS classes that the caller may use."""
    user, inventory = user_name(os.getuid()), client.inventory
    return [qos.name for qos in inventory.quotas.qos if qos.may_use(user, inventory.groups)]


def policies(client: Client) -> list[str]:
    """Return the names of policies."""
    from gpusched.config.policies import names_in, policy_folders

    return list(names_in(policy_folders(client.inventory.path)))


def replays(_: Client) -> list[str]:
    """Return the names of policies that replays accept."""
    from gpusched.sim.orders import folders_in_force, known_policies

    return list(known_policies(folders_in_force()))


def agents(client: Client) -> list[str]:
    """Return the names of policies with a trainable agent."""
    from gpusched.config.policies import load_policy, policy_file, policy_folders

    folders = policy_folders(client.inventory.path)
    files = {name: policy_file(name, folders) for name in policies(client)}
    return [name for name, file in files.items() if file is not None and load_policy(file, folders).agent is not None]
