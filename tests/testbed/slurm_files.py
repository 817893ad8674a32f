"""The files of a Slurm site: its configuration, and a database in which its accounts exist already."""

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.testbed import processes
from tests.testbed.node import TestNode
from tests.testbed.requirements import which
from tests.testbed.waiting import wait_until

PACKAGE_OF = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurmdbd": "slurmdbd",
    "scontrol": "slurm-client",
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "mariadb-install-db": "mariadb-server-core",
}
"""The Debian package each command comes from."""

CLUSTER = "testbed"
USERS = ("games", "news")
OPERATOR = "daemon"
ACCOUNTS = [
    ["add", "cluster", CLUSTER],
    ["add", "account", "lab", f"cluster={CLUSTER}"],
    ["add", "account", "ops", f"cluster={CLUSTER}"],
    ["add", "account", "small", "GrpJobs=2", f"cluster={CLUSTER}"],
    *(["add", "user", user, "account=lab", f"cluster={CLUSTER}"] for user in USERS),
    *(["add", "user", user, "account=small", f"cluster={CLUSTER}"] for user in USERS),
    ["add", "user", OPERATOR, "account=ops", "adminlevel=Operator", f"cluster={CLUSTER}"],
]

MARIADBD = [
    "--skip-networking", "--skip-name-resolve", "--user=root", "--innodb-log-file-size=8M", "--skip-log-bin",
    "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0", "--innodb-lock-wait-timeout=900",
]  # fmt: skip

# The settings that the docs recommend, except the time after which a silent node counts as down.
SETTINGS = {
    "ClusterName": CLUSTER,
    "SlurmUser": "root",
    "SlurmdUser": "root",
    "AuthType": "auth/munge",
    "CredType": "cred/munge",
    "MpiDefault": "none",
    "ProctrackType": "proctrack/linuxproc",
    "TaskPlugin": "task/none",
    "SwitchType": "switch/none",
    "SelectType": "select/cons_tres",
    "SelectTypeParameters": "CR_Core",
    "SchedulerType": "sched/backfill",
    "SchedulerParameters": "batch_sched_delay=0,sched_interval=5,bf_interval=5",
    "PriorityType": "priority/multifactor",
    "PriorityWeightAge": "1000",
    "JobAcctGatherType": "jobacct_gather/none",
    "JobCompType": "jobcomp/none",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageTRES": "gres/gpu,gres/gpu:a100,gres/gpu:v100",
    "GresTypes": "gpu",
    "SlurmdParameters": "config_overrides",
    "SlurmdPidFile": "/run/slurmd.pid",
    "SlurmdTimeout": "30",
    "SlurmctldTimeout": "30",
    "ReturnToService": "2",
    "KillWait": "2",
    "DebugFlags": "NO_CONF_HASH",
    "MaxJobCount": "50000",
    "MaxArraySize": "20001",
}

CPUS = {"a100": 128, "v100": 80}
MEMORY_MIB = {"a100": 1_000_000, "v100": 500_000}
MARK = "GPUSCHED_TESTBED_SLURM"  # in the environment of a site's daemons: its folder
DEVICES = "/run/gpusched-testbed/dev/nvidia"

# Users could name the reservation in which gpusched starts jobs.
GUARD = """\
function slurm_job_submit(job, parts, uid)
  if uid ~= 0 and job.reservation == "gpusched" then return slurm.ERROR end
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, parts, uid)
  if uid ~= 0 and job.reservation == "gpusched" then return slurm.ERROR end
  return slurm.SUCCESS
end
"""


def folder(index: int) -> Path:
    """The folder of the site on the testbed with this index."""
    return Path(f"/tmp/gstb{index}-slurm")


def sweep(index: int) -> None:
    """End a detached site, or what a killed run left of one, and remove its folder."""
    place = folder(index)
    mark = f"{MARK}={place}".encode()
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
    for pid in pids:
        processes.send(pid, signal.SIGKILL)
    wait_until(lambda: all(processes.state(p) in ("Z", "X", "") for p in pids), 30, f"the end of {pids}", 0.005)
    shutil.rmtree(place, ignore_errors=True)


def why_unavailable() -> str | None:
    """Why this machine cannot run Slurm, in one line for a person; None when it can."""
    missing = sorted({package for command, package in PACKAGE_OF.items() if which(command) is None})
    if not missing:
        return None
    more = ["slurm-wlm-basic-plugins", "slurm-wlm-mysql-plugin", "mariadb-client-core"]
    return f"Slurm is not installed (Debian: apt-get install --no-install-recommends {' '.join([*missing, *more])})"


def slurm_conf(settings: Mapping[str, str], nodes: Sequence[TestNode]) -> str:
    """slurm.conf: these settings, all nodes, and a partition for each model."""
    lines = [f"{key}={value}" for key, value in settings.items() if value]
    for node in nodes:
        model = node.model.key
        lines.append(
            f"NodeName={node.name} NodeAddr={node.address} CPUs={CPUS[model]} RealMemory={MEMORY_MIB[model]}"
            f" Gres=gpu:{model}:{node.gpus} Feature={model} State=UNKNOWN"
        )
    for model in dict.fromkeys(n.model.key for n in nodes):
        names = ",".join(n.name for n in nodes if n.model.key == model)
        default = " Default=YES" if model == nodes[0].model.key else ""
        lines.append(f"PartitionName={model.upper()} Nodes={names}{default} MaxTime=INFINITE State=UP")
    return "\n".join(lines) + "\n"


def gres_conf(nodes: Sequence[TestNode], orders: Mapping[str, Sequence[int]]) -> str:
    """gres.conf: for each node the minor numbers of its devices, in this order; without one, ascending."""
    lines = ["AutoDetect=off"]
    for node in nodes:
        for minor in orders.get(node.name, range(node.gpus)):
            lines.append(f"NodeName={node.name} Name=gpu Type={node.model.key} File={DEVICES}{minor}")
    return "\n".join(lines) + "\n"


def slurmdbd_conf(folder: Path, *, host: str, address: str, port: int, log: Path) -> str:
    """slurmdbd.conf."""
    return "".join(
        f"{key}={value}\n"
        for key, value in {
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder / 'munge'}",
            "DbdHost": host,
            "DbdAddr": address,
            "DbdPort": port,
            "SlurmUser": "root",
            "PidFile": folder / "slurmdbd.pid",
            "LogFile": log,
            "StorageType": "accounting_storage/mysql",
            "StorageHost": "localhost",
            "StorageUser": "root",
            "StorageLoc": "slurm",
        }.items()
    )


def munged(folder: Path, log: Path) -> list[str]:
    """The command line of munged, with the key in `folder`."""
    files = {"socket": folder / "munge", "key-file": folder / "munge.key", "pid-file": folder / "munged.pid"}
    files |= {"log-file": log, "seed-file": folder / "munged.seed"}
    return [which("munged") or "munged", "-F", "--force", *(f"--{key}={path}" for key, path in files.items())]


def mariadbd(folder: Path) -> list[str]:
    """The command line of mariadbd, with its data in `folder`."""
    files = {"datadir": folder / "database", "socket": folder / "mysql", "pid-file": folder / "mariadbd.pid"}
    return [which("mariadbd") or "mariadbd", "--no-defaults", *MARIADBD, *(f"--{k}={p}" for k, p in files.items())]


def database(cache: Path, scratch: Path) -> Path:
    """A tar file of a database that slurmdbd has set up and in which `ACCOUNTS` exist; made where it is missing.

    Args:
        cache: Folder in which it is kept.
        scratch: An empty folder with a short path to make it in, with munge.key.
    """
    programs = [os.stat(program) for program in (_slurmdbd(), mariadbd(scratch)[0])]
    versions = [(program.st_size, program.st_mtime) for program in programs]
    text = repr((versions, MARIADBD, ACCOUNTS, slurmdbd_conf(Path(), host="", address="", port=0, log=Path())))
    path = cache / f"slurmdb-{hashlib.sha256(text.encode()).hexdigest()[:12]}.tar"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "slurmdb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            _make_database(scratch)
            subprocess.run(["tar", "-C", scratch, "-cf", part, "database"], check=True)
            part.rename(path)
    return path


def _slurmdbd() -> str:
    return which("slurmdbd") or "slurmdbd"


def _make_database(folder: Path) -> None:
    data = folder / "database"
    install = ["--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db", "--skip-name-resolve"]
    install += ["--auth-root-authentication-method=normal", "--innodb-log-file-size=8M"]
    subprocess.run([which("mariadb-install-db") or "", *install], check=True, capture_output=True)
    port = 17299
    (folder / "slurm.conf").write_text(
        f"ClusterName={CLUSTER}\nSlurmctldHost=localhost\nSlurmUser=root\nAuthInfo=socket={folder / 'munge'}\n"
        f"AccountingStoragePass={folder / 'munge'}\n"
        f"AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
        f"AccountingStoragePort={port}\nNodeName=localhost\n"
    )
    conf = folder / "slurmdbd.conf"
    conf.write_text(
        slurmdbd_conf(folder, host=os.uname().nodename, address="127.0.0.1", port=port, log=folder / "slurmdbd.log")
    )
    conf.chmod(0o600)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "MYSQL_UNIX_PORT": str(folder / "mysql")}
    log = (folder / "making.log").open("wb")
    running: list[subprocess.Popen[bytes]] = []

    def start(command: list[str]) -> None:
        running.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env))

    def sacctmgr(words: list[str]) -> bool:
        done = subprocess.run(["sacctmgr", "-i", *words], env=env, capture_output=True, text=True)
        return done.returncode == 0

    try:
        start(munged(folder, folder / "munged.log"))
        start(mariadbd(folder))
        wait_until(lambda: (folder / "mysql").exists() and (folder / "munge").exists(), 60, "mariadbd and munged")
        start([_slurmdbd(), "-D"])
        wait_until(lambda: sacctmgr(["show", "cluster"]), 60, "slurmdbd", 0.1)
        for words in ACCOUNTS:
            if not sacctmgr(words):
                raise RuntimeError(f"sacctmgr {' '.join(words)} failed")
    finally:
        for process in reversed(running):
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(300)
            process.kill()
            process.wait()
        log.close()
