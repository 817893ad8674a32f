"""The examination of Slurm, where it is the engine. What only another mode needs is said, and is no fault."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from gpusched.config.users import user_name
from gpusched.controller.slurm.devices import indices_by_position, minors_of, read_gres_conf
from gpusched.doctor.findings import Finding, Status, failed
from gpusched.errors import GpuschedError
from gpusched.model.readings import Wiring
from gpusched.model.resources import Inventory
from gpusched.model.slurm import LEASE, SlurmMode, SlurmNode, SlurmPartition, Trouble
from gpusched.model.units import amounts_of, count_of
from gpusched.slurm import records
from gpusched.slurm.accounts import admin_levels, has_account, may_manage
from gpusched.slurm.commands import Slurm
from gpusched.slurm.lease import enforces_associations
from gpusched.views.common import compress_names

_SUBJECT = "slurm"
_TRIED = (22, 5)
_OLDEST = (20, 11)  # NO_HOLD_JOBS_AFTER_END
_TUNED = {"batch_sched_delay": 0, "sched_interval": 5, "bf_interval": 5}
_UNTUNED = {"batch_sched_delay": 3, "sched_interval": 60, "bf_interval": 30}  # as Slurm has them, in seconds
_SKEW_WARN_S, _SKEW_FAIL_S = 3.0, 30.0  # Slurm reports its time in whole seconds
_ORDER = list(SlurmMode)


class SlurmFindings(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of Slurm.

    Attributes:
        config: As slurmctld has it. skew_s: Its clock minus ours.
        levels: User -> admin level; None: slurmdbd did not answer, for the reason in ``silence``.
        has_root: There is an account root. has_own: There is an account called as the lease, of which no jobs are.
        script, gres_conf: Texts of job_submit.lua and gres.conf; None: not to be read here, or not there.
    """

    config: Mapping[str, str]
    nodes: Sequence[SlurmNode]
    partitions: Sequence[SlurmPartition]
    skew_s: float
    levels: Mapping[str, str] | None = None
    silence: str = ""
    has_root: bool = False
    has_own: bool = False
    script: str | None = None
    gres_conf: str | None = None


def examine_slurm(
    inventory: Inventory, state: Path, modes: Mapping[str, SlurmMode], trouble: Trouble | None, now: float
) -> tuple[list[Finding], SlurmFindings | None]:
    """Everything about Slurm, and what it says; None: it does not answer. Changes nothing there.

    Args:
        inventory: Its engine is Slurm.
        state: The state folder; its owner runs the controller.
        modes: Partition -> what gpusched does there.
        trouble: Why the controller cannot read Slurm.
        now: Unix seconds.
    """
    slurm, found = Slurm(), list[Finding]()
    try:
        seen = _ask(slurm, now)
    except GpuschedError as error:
        return [failed(_SUBJECT, "answer", error)], None
    if trouble is not None:
        hint = "Slurm responds here: does the controller run with the same PATH and SLURM_CONF?"
        found = [_finding("controller", "warn", trouble.line(now), hint)]
    uid = state.stat().st_uid if state.exists() else os.getuid()
    mode = max(modes.values(), key=_ORDER.index)
    found += [
        *_version(seen, slurm.version()),
        _finding("mode", "ok", ", ".join(f"{name}: {mode}" for name, mode in modes.items())),
        _clock(seen),
        *judge_inventory(inventory, seen),
        *_unread(inventory),
        *_accounting(seen),
        *_rights(seen, uid, mode),
        *_priority(seen, mode),
        *_lease(seen, mode),
        *_guard(seen, uid, mode),
    ]
    return found, seen


def _ask(slurm: Slurm, now: float) -> SlurmFindings:
    answer = slurm.run_command("scontrol", "show", "config")
    clock = re.search(r"^Configuration data as of (\d+)", answer)
    config = records.config(answer)
    named = [os.environ.get("SLURM_CONF", ""), config.get("SLURM_CONF", "")]
    seen = SlurmFindings(
        config=config,
        nodes=slurm.nodes(),
        partitions=slurm.partitions(),
        skew_s=float(clock[1]) - now if clock else 0.0,
        script=_script(named),
        gres_conf=read_gres_conf(named),
    )
    try:
        known = {"has_root": has_account(slurm, "root"), "has_own": has_account(slurm, LEASE)}
        return msgspec.structs.replace(seen, levels=admin_levels(slurm), **known)
    except GpuschedError as error:
        return msgspec.structs.replace(seen, silence=error.message)


def _script(named: Iterable[str]) -> str | None:
    """Return the text of job_submit.lua beside slurm.conf, where it can be read on this machine."""
    for conf in (*filter(None, named), "/etc/slurm/slurm.conf"):
        try:
            return (Path(conf).parent / "job_submit.lua").read_text(errors="replace")
        except OSError:
            continue
    return None


def judge_positions(inventory: Inventory, seen: SlurmFindings, wirings: Mapping[str, Wiring]) -> Iterator[Finding]:
    """Check that it is known which GPUs Slurm gives to jobs: it counts them by gres.conf, NVML by bus address.

    ``wirings``: node -> as read.
    """
    readable = [n for n in inventory.nodes if n.gpus and n.transport != "none"]
    if readable and seen.gres_conf is None:
        message = "gres.conf cannot be read here: assuming that Slurm counts GPUs as NVML does"
        hint = "copy gres.conf next to slurm.conf on this machine; otherwise energy may be charged to the wrong job"
        yield _finding("gres.conf", "warn", message, hint)
        return
    types = {node.name: tuple(node.gpus) for node in seen.nodes}
    own: list[str] = []
    for node in readable:
        minors = minors_of(seen.gres_conf or "", node.name, types.get(node.name, ()))
        known = {gpu.minor for gpu in (wirings[node.name].gpus if node.name in wirings else ())} - {None}
        if minors is None:
            message = "gres.conf names no device files: assuming that Slurm counts GPUs as NVML does"
            yield Finding(node.name, "gres.conf", "warn", message, "add File= or AutoDetect=nvml to its lines")
        elif minors and len(minors) != node.gpus:
            message = f"gres.conf names {count_of(len(minors), 'device file')}, Slurm has {count_of(node.gpus, 'GPU')}"
            yield Finding(node.name, "gres.conf", "warn", message, "fix File= in gres.conf")
        elif known and (strange := [minor for minor in minors if minor not in known]):
            message = f"gres.conf names /dev/nvidia{strange[0]}, which is not one of its GPUs"
            yield Finding(node.name, "gres.conf", "warn", message, "fix File= in gres.conf")
        elif minors and indices_by_position(minors, wirings.get(node.name)) != tuple(range(len(minors))):
            own.append(node.name)
    if readable:
        where = f"; {compress_names(own)} in a different order" if own else ""
        message = f"Slurm's GPU positions are mapped to NVML's{where}"
        bound = "task/cgroup" in seen.config.get("TaskPlugin", "") and seen.config.get("ConstrainDevices") == "yes"
        if own and not bound:  # seen with 22.05: CUDA_VISIBLE_DEVICES is the positions, whatever the files are
            hint = "without ConstrainDevices=yes in cgroup.conf a job uses these positions as CUDA indices"
            yield _finding("gres.conf", "warn", message, hint)
        else:
            yield _finding("gres.conf", "ok", message)


# Judging. Pure, but for users' names


def _version(seen: SlurmFindings, commands: tuple[int, int]) -> Iterator[Finding]:
    text = seen.config.get("SLURM_VERSION", "")
    found = re.match(r"(\d+)\.(\d+)", text)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    message = f"Slurm {text or 'of unknown version'}"
    if version < _OLDEST:
        hint = "mode decide needs reservations of 20.11 or later; observe and replays may work"
        yield _finding("version", "warn", message, hint)
    elif version != _TRIED:
        yield _finding("version", "ok", f"{message}; gpusched was tested with {_TRIED[0]}.{_TRIED[1]:02d}")
    else:
        yield _finding("version", "ok", message)
    if commands != version:
        message = f"the commands here have version {commands[0]}.{commands[1]:02d}, slurmctld has {text}"
        yield _finding("version", "warn", message, "install the same version on this machine")


def _clock(seen: SlurmFindings) -> Finding:
    off = abs(seen.skew_s)
    status: Status = "fail" if off > _SKEW_FAIL_S else "warn" if off > _SKEW_WARN_S else "ok"
    message = f"slurmctld is {off:.0f} s {'ahead of' if seen.skew_s > 0 else 'behind'} this machine"
    hint = "" if status == "ok" else "run a time service on both (chrony or systemd-timesyncd)"
    return _finding("clock", status, message if off >= 1.5 else "slurmctld agrees with this machine", hint)


def judge_inventory(inventory: Inventory, seen: SlurmFindings) -> list[Finding]:
    """Check that partitions and nodes are as Slurm has them, and report nodes that Slurm has in several."""
    slurm_partitions, nodes = {p.name: p for p in seen.partitions}, {n.name: n for n in seen.nodes}
    found = []
    for partition in inventory.partitions:
        slurm_partition = slurm_partitions.get(partition.name)
        if slurm_partition is None:
            known = ", ".join(slurm_partitions) or "none"
            hint = f"Slurm has {known}; fix the name, or rewrite the inventory: gpusched init --slurm --force"
            found.append(_of(inventory, "partitions", "fail", f"Slurm has no partition {partition.name}", hint))
            continue
        strange = [node.name for node in partition.nodes if node.name not in slurm_partition.nodes]
        if strange:
            message = f"Slurm does not have {compress_names(strange)} in {partition.name}"
            hint = "none of its jobs can run there; fix the inventory"
            found.append(_of(inventory, "partitions", "fail", message, hint))
        more = [name for name in slurm_partition.nodes if inventory.node(name) is None]
        if more:
            message = f"Slurm's {partition.name} also has {compress_names(more)}"
            hint = "jobs there are not counted; add them, or rewrite the inventory: gpusched init --slurm --force"
            found.append(_of(inventory, "partitions", "warn", message, hint))
        for node in (n for n in partition.nodes if n.name in nodes):
            its = nodes[node.name]
            gpus = sum(its.gpus.values())
            if (node.gpus, node.cores, node.memory_mib) != (gpus, its.cpus, its.memory_mib):
                ours = amounts_of(node.gpus, node.cores, node.memory_mib)
                message = f"{node.name} is declared with {ours}; Slurm has {gpus}, {its.cpus}, {its.memory_mib}M"
                found.append(_of(inventory, "sizes", "warn", message, "declare what Slurm has"))
        for other in seen.partitions:
            shared = [n.name for n in partition.nodes if other.name != partition.name and n.name in other.nodes]
            if shared:
                message = f"{compress_names(shared)} of {partition.name} is also in Slurm's {other.name}"
                hint = f"in mode decide jobs of {other.name} wait too: the lease covers whole nodes"
                found.append(_of(inventory, "overlap", "warn", message, hint))
    if not found:
        message = (
            f"{count_of(len(inventory.partitions), 'partition')}, {count_of(len(inventory.nodes), 'node')}, as in Slurm"
        )
        return [_finding("partitions", "ok", message)]
    return found


def _unread(inventory: Inventory) -> Iterator[Finding]:
    names = [node.name for node in inventory.nodes if node.transport == "none"]
    if names:
        message = f"{compress_names(names)}: not probed over SSH: utilization, power, energy, foreign processes unknown"
        hint = "where SSH is allowed: remove transport: none, and let the controller's account log in"
        yield _of(inventory, "transport", "warn", message, hint)


def _accounting(seen: SlurmFindings) -> Iterator[Finding]:
    kind = seen.config.get("AccountingStorageType", "")
    if "slurmdbd" not in kind:
        message = f"no accounting database (AccountingStorageType={kind or '(null)'})"
        hint = "replays and training use only what gpusched has recorded; see accounting in Slurm's documentation"
        yield _finding("slurmdbd", "warn", message, hint)
        return
    if seen.silence:
        yield _finding("slurmdbd", "fail", f"it does not respond: {seen.silence}", "see slurmdbd's log")
    else:
        yield _finding("slurmdbd", "ok", "it responds")
    if "gres/gpu" not in seen.config.get("AccountingStorageTRES", "").split(","):
        message = "AccountingStorageTRES does not name gres/gpu: the database does not record the GPUs of jobs"
        hint = "in slurm.conf: AccountingStorageTRES=gres/gpu, then restart slurmctld; it records from then on"
        yield _finding("gpus in tres", "warn", message, hint)
    else:
        yield _finding("gpus in tres", "ok", "AccountingStorageTRES names gres/gpu")


def _rights(seen: SlurmFindings, uid: int, mode: SlurmMode) -> Iterator[Finding]:
    name = user_name(uid)
    master = re.match(r"[^(]*\((\d+)\)", seen.config.get("SlurmUser", ""))
    if uid == 0 or (master and int(master[1]) == uid) or may_manage((seen.levels or {}).get(name, "")):
        yield _finding("rights", "ok", f"{name} may change jobs and reservations")
    elif seen.levels is not None:
        hint = f"sacctmgr modify user {name} set adminlevel=Operator"
        hint = hint if name in seen.levels else f"sacctmgr add user {name} account=root adminlevel=Operator"
        private = {"jobs", "reservations"} & set(seen.config.get("PrivateData", "").split(","))
        if private:
            message = f"PrivateData={','.join(sorted(private))}: Slurm shows {name} only its own"
            yield _finding("rights", "fail", message, hint)
            return
        message = f"{name}, who runs gpusched, can only observe; modes advise and decide need an Operator"
        yield _before(SlurmMode.ADVISE, mode, "rights", "fail", message, hint)


def _priority(seen: SlurmFindings, mode: SlurmMode) -> Iterator[Finding]:
    kind = seen.config.get("PriorityType", "")
    if kind != "priority/multifactor":
        message = f"{kind or 'no PriorityType'}: mode advise sets and freezes jobs' Priority instead of SiteFactor"
        hint = "in slurm.conf: PriorityType=priority/multifactor"
        yield _before(SlurmMode.ADVISE, mode, "priority", "warn", message, hint)
    elif seen.config.get("PrioritySiteFactorPlugin", "(null)") not in ("", "(null)", "site_factor/none"):
        plugin = seen.config["PrioritySiteFactorPlugin"]
        message = f"{plugin} also sets SiteFactor: it and mode advise overwrite each other"
        yield _before(SlurmMode.ADVISE, mode, "priority", "warn", message, "use either advise or the plugin")
    else:
        yield _finding("priority", "ok", kind)


def _lease(seen: SlurmFindings, mode: SlurmMode) -> Iterator[Finding]:
    kind = seen.config.get("SchedulerType", "")
    parameters = dict(word.partition("=")[::2] for word in seen.config.get("SchedulerParameters", "").split(","))
    slow = {
        key: parameters.get(key, f"{_UNTUNED[key]}")
        for key in _TUNED
        if _number(parameters.get(key), _UNTUNED[key]) > _TUNED[key]
    }
    if kind != "sched/backfill":
        message = f"SchedulerType is {kind}: a chosen job may wait behind others"
        yield _before(SlurmMode.DECIDE, mode, "scheduler", "warn", message, "use sched/backfill")
    elif slow:
        message = f"{', '.join(f'{key} is {value}' for key, value in slow.items())} s: chosen jobs start late"
        hint = f"in slurm.conf: SchedulerParameters={','.join(f'{k}={v}' for k, v in _TUNED.items())}"
        yield _before(SlurmMode.DECIDE, mode, "scheduler", "warn", message, hint)
    else:
        yield _finding("scheduler", "ok", "SchedulerParameters let chosen jobs start at once")
    if seen.levels is not None and enforces_associations(seen.config) and not seen.has_root:
        message = "associations are enforced, but there is no account root, which the lease needs"
        yield _before(SlurmMode.DECIDE, mode, "accounts", "fail", message, "sacctmgr add account root")
    elif seen.levels is not None and enforces_associations(seen.config) and not seen.has_own:
        message = "associations are enforced: idle time of the lease in mode decide is charged to account root"
        hint = f"sacctmgr add account {LEASE}, without users: idle time of later leases is charged to no user"
        yield _before(SlurmMode.DECIDE, mode, "accounts", "warn", message, hint)
    else:
        how = "enforced" if enforces_associations(seen.config) else "not enforced"
        yield _finding("accounts", "ok", f"associations are {how}; all jobs can be put into the lease of mode decide")


def _guard(seen: SlurmFindings, uid: int, mode: SlurmMode) -> Iterator[Finding]:
    """Check that users cannot name the lease in their own jobs."""
    if "lua" in seen.config.get("JobSubmitPlugins", "") and (seen.script is None or LEASE in seen.script):
        status = "is active" if seen.script else "cannot be read here: make sure that it keeps users out of the lease"
        yield _finding("guard", "ok" if seen.script else "warn", f"job_submit.lua {status}")
        return
    me = f"uid ~= 0 and uid ~= {uid}" if uid else "uid ~= 0"
    message = f"users could start jobs by naming the reservation {LEASE} of mode decide"
    hint = (
        "in slurm.conf JobSubmitPlugins=lua, and in job_submit.lua, in slurm_job_submit and slurm_job_modify: "
        f'if {me} and job.reservation == "{LEASE}" then return slurm.ERROR end'
    )
    yield _before(SlurmMode.DECIDE, mode, "guard", "warn", message, hint)


def _number(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() else otherwise


def _before(by: SlurmMode, mode: SlurmMode, check: str, status: Status, message: str, hint: str) -> Finding:
    """Return the finding if a partition is in a mode that needs it, else OK."""
    if _ORDER.index(mode) >= _ORDER.index(by):
        return _finding(check, status, message, hint)
    return _finding(check, "ok", f"before mode {by}: {message}", hint)


def _finding(check: str, status: Status, message: str, hint: str = "") -> Finding:
    return Finding(_SUBJECT, check, status, message, hint)


def _of(inventory: Inventory, check: str, status: Status, message: str, hint: str) -> Finding:
    return Finding(inventory.path, check, status, message, hint)
