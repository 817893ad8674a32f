"""Run a command inside a running job; the terminal goes through the ssh program.

In a shared installation users have no account on the nodes: their commands go through the controller.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence

from gpusched.client import relay
from gpusched.client.audit import record_command
from gpusched.client.context import Client
from gpusched.client.resolve import Resolver
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.arrays import first_task_of
from gpusched.model.jobs import JobRecord, JobState, container_name
from gpusched.model.relay import Exec
from gpusched.model.resources import Node, Settings
from gpusched.nodes.opening import open_transport
from gpusched.nodes.runtimes import AttemptRef, runtime_for
from gpusched.nodes.transport import RemoteScript

_WITHOUT_SSH_TIMEOUT_S = 600.0


def exec_in_job(
    client: Client, text: str, command: Sequence[str], *, rank: int = 0, tty: bool = False, interactive: bool = False
) -> int:
    """Run ``command`` (an argv, not a shell line) in a running job, with our stdout and stderr; return its exit code.

    ``tty`` gives it a terminal, ``interactive`` our stdin.

    Raises:
        UsageError: No such job or rank.
        GpuschedError: The job is not running, or its node cannot be reached.
    """
    job = _running_job(client, text)
    node, runtime = _node_and_runtime(client, job, rank)
    if tty and not sys.stdin.isatty():
        raise UsageError("-t needs a terminal as stdin", "omit -t, or run it in a terminal")
    if relay.is_needed(client):
        terminal = relay.terminal() if tty else None
        return relay.run(client, Exec(job=job.id, rank=rank, argv=tuple(command), stdin=interactive, terminal=terminal))
    record_command(client.state, "exec", (job.id,))
    assert client.reader is not None
    ref = AttemptRef(client.reader.meta("cluster_id") or "", node.name, container_name(job.id, job.attempt, rank))
    argv = runtime_for(runtime).exec_argv(ref, tuple(command), tty)
    sys.stdout.flush()
    if node.transport == "local":
        return _run(argv, tty or interactive)
    if shutil.which("ssh"):
        return _run(ssh_argv(node, client.inventory.settings, argv, tty), tty or interactive)
    return _over_transport(node, client.inventory.settings, argv, tty or interactive)


def _running_job(client: Client, text: str) -> JobRecord:
    target = Resolver(client).target(text)
    if len(target.jobs) != 1 or target.jobs[0].tasks:
        raise UsageError(f"job {target.id} is an array", f"name a task, such as {first_task_of(target.jobs[0]).id}")
    job = target.jobs[0]
    if job.state is not JobState.RUNNING:
        raise GpuschedError(f"job {job.id} is {job.state}; a command can only be run in a RUNNING job")
    return job


def _node_and_runtime(client: Client, job: JobRecord, rank: int) -> tuple[Node, str]:
    part = next((p for p in job.allocation.parts if p.rank == rank), None) if job.allocation else None
    if part is None:
        valid = ", ".join(map(str, job.ranks)) if job.spec.is_hot else f"0 to {job.spec.nodes - 1}"
        raise UsageError(f"job {job.id} has no rank {rank}", f"valid ranks: {valid}")
    node = client.inventory.node(part.node)
    if node is None:
        raise GpuschedError(f"job {job.id} runs on {part.node}, which is no longer in {client.inventory.path}")
    ranks = client.reader.ranks(job_id=job.id) if client.reader else []
    launched = (r.runtime for r in ranks if (r.attempt, r.rank) == (job.attempt, rank))
    return node, next(launched, node.runtime)


def ssh_argv(node: Node, settings: Settings, argv: Sequence[str], tty: bool) -> tuple[str, ...]:
    """Return the ssh command line that runs ``argv`` on a node; host keys are verified, and ssh never prompts."""
    options = ["-o", "StrictHostKeyChecking=yes", "-o", "LogLevel=ERROR"]
    options += ["-o", f"ConnectTimeout={max(1, round(settings.connect_timeout_s))}"]
    if settings.ssh_config:
        options += ["-F", os.path.expanduser(settings.ssh_config)]
    if settings.known_hosts:
        options += ["-o", f'UserKnownHostsFile="{os.path.expanduser(settings.known_hosts)}"']
    for option, value in (("-l", node.user), ("-p", node.port and str(node.port)), ("-i", node.key)):
        options += [option, os.path.expanduser(value) if option == "-i" else value] if value else []
    return ("ssh", *options, "-t" if tty else "-T", "--", node.address, shlex.join(argv))


def _run(argv: Sequence[str], stdin: bool) -> int:
    try:
        own = None if stdin else subprocess.DEVNULL
        code = subprocess.run(argv, stdin=own, stdout=sys.stdout, check=False).returncode  # our stdout is not 1
    except FileNotFoundError:
        raise GpuschedError(f"{argv[0]} is not installed on this machine") from None
    except OSError as error:
        raise GpuschedError(f"{argv[0]} cannot be run: {error.strerror}") from None
    return code if code >= 0 else 128 - code


def _over_transport(node: Node, settings: Settings, argv: tuple[str, ...], stdin: bool) -> int:
    """Run without an ssh program: send the whole input, then print the whole output."""
    transport = open_transport(node, settings)
    try:
        given = sys.stdin.buffer.read() if stdin else b""
        result = transport.run(RemoteScript(argv, given), _WITHOUT_SSH_TIMEOUT_S)
    finally:
        transport.close()
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(result.stderr)
    return result.exit_code
