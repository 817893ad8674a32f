"""The files of a node's disk, written before its first start."""

import json
import re
import shutil
import subprocess
import sysconfig
import uuid
from functools import cache
from pathlib import Path

from tests.testbed.cache import Cache
from tests.testbed.hardware import cdi_spec
from tests.testbed.requirements import which

HIDDEN_AT_FIRST = ("docker", "nvidia-smi")
"""Commands a node does not have until a test says so."""

CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]
init_path = "{tini}"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""

STORAGE_CONF = """\
[storage]
driver = "{driver}"
graphroot = "/var/lib/containers/storage"
runroot = "/run/containers/storage"
[storage.options]
additionalimagestores = ["{store}"]
"""

SSHD_CONFIG = """\
ListenAddress 0.0.0.0:22
HostKey "{disk}/ssh/hostkey"
PidFile /run/sshd.pid
AuthorizedKeysFile "{authorized_keys}"
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UseDNS no
PrintMotd no
Subsystem sftp internal-sftp
"""

# dockerd offers --gpus only where it finds this command; the container's start runs it.
HOOK = "#!/bin/sh\nexit 0\n"


@cache
def library_folder() -> str:
    """Return the folder that the dynamic linker searches by default."""
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folder = f"/usr/lib/{multiarch}"
    return folder if multiarch and Path(folder).is_dir() else "/usr/lib64"


@cache
def _penalties() -> str:
    """OpenSSH 9.8 and later shut out an address that fails to log in; tests fail to log in on purpose."""
    done = subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=True)
    version = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stderr)
    return "PerSourcePenalties no\n" if version and (int(version[1]), int(version[2])) >= (9, 8) else ""


def write_disk(disk: Path, *, name: str, gpus: int, hosts: str, authorized_keys: Path, cache: Cache) -> None:
    """Make a node's folders and configuration; the host key, home and containers of an earlier start stay."""
    for folder in ("bin", "containers", "docker-bin", "home", "nvml", "ssh", "vartmp", "etc/cdi", "etc/containers"):
        (disk / folder).mkdir(parents=True, exist_ok=True)
    (disk / "vartmp").chmod(0o1777)
    for leftover in (disk / "bin").iterdir():
        leftover.unlink()
    (disk / "hidden").write_text("".join(f"{c}\n" for c in HIDDEN_AT_FIRST))
    config = SSHD_CONFIG.format(disk=disk, authorized_keys=authorized_keys) + _penalties()
    (disk / "ssh" / "sshd_config").write_text(config)
    (disk / "etc" / "hostname").write_text(f"{name}\n")
    (disk / "etc" / "hosts").write_text(hosts)
    (disk / "etc" / "cdi" / "nvidia.json").write_text(cdi_spec(gpus))
    containers = disk / "etc" / "containers"
    (containers / "containers.conf").write_text(CONTAINERS_CONF.format(tini=which("tini-static")))
    (containers / "storage.conf").write_text(
        STORAGE_CONF.format(driver=cache.storage_driver, store=json.dumps(str(cache.image_store))[1:-1])
    )
    (containers / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
    hook = disk / "docker-bin" / "nvidia-container-runtime-hook"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    new_boot_id(disk)


def new_boot_id(disk: Path) -> None:
    """Write a fresh boot id, in place: the old file may be mounted somewhere."""
    (disk / "boot_id").write_text(f"{uuid.uuid4()}\n")


def make_host_keys(disks: list[Path]) -> None:
    """Generate an ed25519 host key for every disk without one, all at once; keep a copy as the original."""
    todo = [d / "ssh" for d in disks if not (d / "ssh" / "hostkey.original").exists()]
    for ssh in todo:
        (ssh / "hostkey").unlink(missing_ok=True)
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "host", "-f"]
    running = [subprocess.Popen([*command, ssh / "hostkey"], stdin=subprocess.DEVNULL) for ssh in todo]
    if any([process.wait() for process in running]):
        raise RuntimeError("ssh-keygen failed")
    for ssh in todo:
        shutil.copy(ssh / "hostkey.pub", ssh / "hostkey.original.pub")
        shutil.copy(ssh / "hostkey", ssh / "hostkey.original")
    for disk in disks:
        restore_host_key(disk)


def restore_host_key(disk: Path) -> None:
    """Put the first host key back."""
    for suffix in ("", ".pub"):
        shutil.copy(disk / "ssh" / f"hostkey.original{suffix}", disk / "ssh" / f"hostkey{suffix}")
