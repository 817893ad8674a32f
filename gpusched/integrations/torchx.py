"""TorchX's scheduler: ``torchx run -s gpusched -cfg partition=A100 dist.ddp -j 2x8 --script main.py``.

TorchX finds it by the entry point ``torchx.schedulers``. An app is a job script with one `srun`, whose tasks are the
replicas of all roles, in order. A job has equal parts, so that each replica gets the most that any role asks for.
"""

from __future__ import annotations

import getpass
import logging
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, filter_regex
from torchx.specs import AppDef, AppDryRunInfo, AppState, BindMount, ReplicaStatus, Role, RoleStatus, macros, runopts

from gpusched.errors import GpuschedError

if TYPE_CHECKING:
    from gpusched.api import Cluster

_TEXTS = typing.List[str]  # noqa: UP006 -- TorchX compares with this one, and `list[str]` is another
_CFG: dict[str, tuple[Any, str]] = {
    "partition": (str, "Partition to run in."),
    "flavor": (str, "A declared bundle of resources, in place of the roles'."),
    "nodes": (int, "Number of nodes; default: the fewest that hold all replicas."),
    "time": (str, "Time limit: 2h, 1-12:00:00, or minutes."),
    "image": (str, "Container image in place of the roles'; none: for partitions without containers."),
    "workdir": (str, "Working directory; default: the current one, if nodes or mounts have it."),
    "mount": (_TEXTS, "More mounts: SRC:DST[:ro]."),
    "gpu_type": (_TEXTS, "Only on GPUs of these types."),
    "nodelist": (_TEXTS, "Only on these nodes."),
    "exclude": (_TEXTS, "Not on these nodes."),
    "group": (str, "The group of yours that is charged."),
    "qos": (str, "Its class of service."),
    "reservation": (str, "Run only in this reservation."),
    "preemptible": (bool, "It saves its work when signalled, and may be preempted."),
    "comment": (str, "A comment, shown to others."),
}
"""``-cfg``: options of ``gpusched submit`` under the same names."""
_ROLES = "TORCHX_ROLES"
"""Variable of a job: its roles and their replicas, ``trainer=2 reader=4``, for `describe`."""
_STATES = {
    "PENDING": AppState.PENDING, "STARTING": AppState.PENDING, "RUNNING": AppState.RUNNING,
    "COMPLETING": AppState.RUNNING, "COMPLETED": AppState.SUCCEEDED, "CANCELLED": AppState.CANCELLED,
}  # fmt: skip
_SIZES = ("cpus_per_task", "gpus_per_task", "mem")
_KNOWN_IN_JOB = {macros.app_id: '"$GPUSCHED_JOB_ID"', macros.replica_id: '"$TORCHX_REPLICA_ID"'}
_log = logging.getLogger("gpusched")


@lru_cache
def _cluster() -> Cluster:
    from gpusched.api import Cluster

    return Cluster()


def create_scheduler(session_name: str, **kwargs: object) -> TorchxScheduler:
    """Return the scheduler, for TorchX."""
    return TorchxScheduler("gpusched", session_name)


class TorchxScheduler(Scheduler[Mapping[str, Any]]):
    """Queues apps here; the id of an app is that of its job."""

    def _run_opts(self) -> runopts:
        options = runopts()
        for name, (kind, text) in _CFG.items():
            options.add(name, type_=kind, help=text, default=None)
        return options

    def _validate(self, app: AppDef, scheduler: str) -> None:
        """Accept roles that name no resources; gpusched says what is missing."""

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[dict[str, Any]]:
        request, given = app_options(app), {name: cfg[name] for name in _CFG if cfg.get(name) is not None}
        if "flavor" in given:
            request = {name: value for name, value in request.items() if name not in _SIZES}
        mounts = [*request.get("mount", ()), *given.get("mount", ())]
        request |= given | ({"mount": mounts} if mounts else {})
        if request.get("image") == "none":
            del request["image"]
        return AppDryRunInfo(request, _shown)

    def schedule(self, dryrun_info: AppDryRunInfo[dict[str, Any]]) -> str:
        """Queue the job; return its id."""
        return _cluster().submit("", **dryrun_info.request).id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the app's state and its roles; None if there is no such job."""
        try:
            job = _cluster().show(app_id)
        except GpuschedError:
            return None
        state, spec = _state(job["state"]), job["spec"]
        hosts = [part["node"] for part in job["allocation"] for _ in range(spec["tasks_per_node"])]
        message = ": ".join(text for text in (job["state"], job["reason"], job["message"]) if text)
        app = DescribeAppResponse(app_id, state, num_restarts=max(0, job["attempt"] - 1), msg=message)
        for name, first, count in _roles_of(job):
            app.roles.append(Role(name, image=spec["image"] or "", num_replicas=count))
            nodes = hosts[first : first + count] or [""] * count
            replicas = [ReplicaStatus(number, state, name, node) for number, node in enumerate(nodes)]
            app.roles_statuses.append(RoleStatus(name, replicas))
        return app

    def list(self) -> Sequence[ListAppResponse]:
        """Return your jobs."""
        jobs = _cluster().jobs(user=getpass.getuser(), ended=-1)
        return [ListAppResponse(job["id"], _state(job["state"])) for job in jobs]

    def _cancel_existing(self, app_id: str) -> None:
        try:
            _cluster().cancel([app_id])
        except GpuschedError as error:  # it has just ended
            _log.info(error.line())

    def log_iter(
        self, app_id: str, role_name: str, k: int = 0, regex: str | None = None, since: datetime | None = None,
        until: datetime | None = None, should_tail: bool = False, streams: Stream | None = None,
    ) -> Iterable[str]:  # fmt: skip
        """Return the lines of a replica; its stderr is among them.

        Raises:
            ValueError: One stream is asked for, or a role that the app does not have.
        """
        if streams not in (None, Stream.COMBINED):
            raise ValueError("gpusched keeps stdout and stderr together: use combined")
        if since or until:
            _log.warning("since and until are ignored: lines have no times")
        firsts = {name: first for name, first, _ in _roles_of(_cluster().show(app_id))}
        if role_name not in firsts:
            raise ValueError(f"app {app_id} has no role {role_name!r}: {', '.join(firsts)}")
        lines = _lines(app_id, firsts[role_name] + k, should_tail)
        return filter_regex(regex, lines) if regex else lines


def app_options(app: AppDef) -> dict[str, Any]:
    """Return the options of the app's job.

    Raises:
        ValueError: Its roles have different images, or mounts that are no folders.
    """
    images = sorted({role.image for role in app.roles if role.image})
    if len(images) > 1:
        raise ValueError(f"a job has one image, these roles have {len(images)}: {', '.join(images)}")
    count = sum(role.num_replicas for role in app.roles)
    layout = shlex.join(f"{role.name}={role.num_replicas}" for role in app.roles)
    options = {"name": app.name, "script": app_script(app), "ntasks": count, "env": {_ROLES: layout}}
    cpus, gpus, memory_mib = (max(getattr(r.resource, name) for r in app.roles) for name in ("cpu", "gpu", "memMB"))
    sizes = {"cpus_per_task": cpus, "gpus_per_task": gpus, "mem": memory_mib * count}
    options |= {name: value for name, value in sizes.items() if value > 0}
    options |= {"image": images[0]} if images else {}
    mounts = [_mount(mount) for role in app.roles for mount in role.mounts]
    return options | ({"mount": list(dict.fromkeys(mounts))} if mounts else {})


def app_script(app: AppDef) -> str:
    """Return the job script: a step of all replicas, and another start of the job when it fails, if it has one left."""
    first, branches = 0, ""
    for role in app.roles:
        found = macros.Values(img_root="", app_id=macros.app_id, replica_id=macros.replica_id, rank0_env="MASTER_ADDR")
        role = found.apply(role)
        words = [*(f"{name}={value}" for name, value in role.env.items()), role.entrypoint, *role.args]
        branches += f"""if [ "$SLURM_PROCID" -lt {first + role.num_replicas} ]; then
export TORCHX_REPLICA_ID=$((SLURM_PROCID - {first}))
exec env {" ".join(map(_quoted, words))}
fi
"""
        first += role.num_replicas
    retries = min(role.max_retries for role in app.roles)
    return f"""#!/bin/sh
srun --label --kill-on-bad-exit sh -c {shlex.quote(branches)}
code=$?
if [ $code -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {retries} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def _quoted(text: str) -> str:
    """Return a word for the shell, in which macros are variables that are known only there."""
    known = "|".join(map(re.escape, _KNOWN_IN_JOB))
    parts = [_KNOWN_IN_JOB.get(part) or shlex.quote(part) for part in re.split(f"({known})", text) if part]
    return "".join(parts) or "''"


def _mount(mount: Any) -> str:
    if not isinstance(mount, BindMount):
        raise ValueError(f"only folders can be mounted (type=bind), found {mount}")
    return f"{mount.src_path}:{mount.dst_path}{':ro' if mount.read_only else ''}"


def _state(state: str) -> AppState:
    return _STATES.get(state, AppState.FAILED)


def _roles_of(job: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield name, first task and number of replicas of each role; a job of another origin is one role."""
    spec = job["spec"]
    layout = dict(spec["env"]).get(_ROLES)
    parts = shlex.split(layout) if layout else [f"{spec['name']}={spec['nodes'] * spec['tasks_per_node']}"]
    first = 0
    for part in parts:
        name, _, count = part.rpartition("=")
        yield name, first, int(count)
        first += int(count)


def _lines(app_id: str, task: int, should_tail: bool) -> Iterator[str]:
    """Yield the lines of a task, which `srun` labels."""
    words = [sys.executable, "-P", "-m", "gpusched", "logs", "--rank", "0", *(["--follow"] * should_tail), app_id]
    label = re.compile(rf" *{task}: ")
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace") as logs:
        assert logs.stdout is not None
        try:
            for line in logs.stdout:
                if found := label.match(line):
                    yield line[found.end() :]
        finally:
            logs.terminate()


def _shown(request: Mapping[str, Any]) -> str:
    options = (f"{name}: {value}" for name, value in request.items() if name != "script")
    return "\n".join([*options, "", request["script"]])
