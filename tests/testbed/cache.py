"""Files built once and shared by every testbed of this checkout: the NVML stub and the container image.

The folder is `build/testbed/` of the checkout, or `$GPUSCHED_TESTBED_CACHE`.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.testbed.requirements import which

HERE = Path(__file__).parent
IMAGE = "localhost/gs/busybox:1"
LIBRARY = "libnvidia-ml.so.1"


@dataclass(frozen=True)
class Cache:
    """Paths of the finished things."""

    library: Path
    rootfs_tar: Path
    image_store: Path
    storage_driver: str


def build() -> Cache:
    """Build what is missing; safe to call from several processes at once."""
    folder = Path(os.environ.get("GPUSCHED_TESTBED_CACHE") or HERE.parents[1] / "build" / "testbed").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    driver = _storage_driver(folder)
    with _exclusive(folder / "lock"):
        return Cache(_library(folder), tar := _rootfs_tar(folder), _image_store(folder, tar, driver), driver)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def _library(folder: Path) -> Path:
    source = HERE / "nvml_stub.c"
    path = folder / f"nvml-{_digest(source.read_bytes())}.so"
    if not path.exists():
        part = path.with_suffix(".part")
        flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
        subprocess.run(["gcc", *flags, "-o", part, source], check=True)
        part.rename(path)
    return path


def _busybox() -> Path:
    path = which("busybox")
    assert path is not None
    return Path(path)


def _rootfs_tar(folder: Path) -> Path:
    """A root file system of one static busybox, as a tar file that both podman and docker import."""
    busybox = _busybox()
    path = folder / f"rootfs-{_digest(busybox.read_bytes())}.tar"
    if path.exists():
        return path
    root = folder / "rootfs.part"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "etc", "dev", "proc", "sys", "root", "tmp", "run", "var"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    shutil.copy(busybox, root / "bin" / "busybox")
    for applet in subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split():
        if applet != "busybox":
            (root / "bin" / applet).symlink_to("busybox")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/tmp:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\nuser:x:1000:\n")
    part = path.with_suffix(".part")
    subprocess.run(["tar", "-C", root, "-cf", part, "."], check=True)
    shutil.rmtree(root)
    part.rename(path)
    return path


def _storage_driver(folder: Path) -> str:
    """Overlay cannot lie on overlay (a checkout inside a container): fall back to plain copies there."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True).stdout
    return "vfs" if kind.strip() == "overlayfs" else "overlay"


def _image_store(folder: Path, tar: Path, driver: str) -> Path:
    """A read-only podman image store with IMAGE in it, so that no node has to import it."""
    path = folder / f"images-{driver}-{_digest(tar.name.encode())}"
    if path.exists():
        return path
    part = path.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    # Its own mount namespace: podman's locks and state must not touch those of the machine.
    script = 'mount -t tmpfs none /run; mount -t tmpfs none /dev/shm; exec podman "$@"'
    options = [
        "--root",
        str(part),
        "--storage-driver",
        driver,
        "--cgroup-manager",
        "cgroupfs",
        "--events-backend",
        "file",
    ]
    podman = [*options, "import", "-q", "--change", "CMD=/bin/sh", "--change", "ENV=PATH=/bin", str(tar), IMAGE]
    unshare = ["unshare", "--mount", "--ipc", "sh", "-ec", script, "sh"]
    subprocess.run([*unshare, *podman], check=True, stdout=subprocess.DEVNULL)
    part.rename(path)
    return path
