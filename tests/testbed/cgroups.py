"""Removal of the control groups that containers leave behind when their node is killed."""

from contextlib import suppress
from pathlib import Path

from tests.testbed.waiting import wait_until

ROOT = Path("/sys/fs/cgroup")
PATTERNS = ("libpod_parent/libpod-{}", "libpod_parent/libpod-conmon-{}", "docker/{}")


def container_ids(disk: Path) -> list[str]:
    """The ids of all containers in a node's podman and docker stores."""
    folders = [*disk.glob("containers/storage/*-containers"), disk / "docker" / "containers"]
    return [p.name for f in folders if f.is_dir() for p in f.iterdir() if len(p.name) == 64]


def remove(ids: list[str]) -> None:
    """Remove the (empty) control groups of these containers; of others, nothing."""
    mounts = [ROOT, *(p for p in ROOT.iterdir() if p.is_dir())] if ids and ROOT.is_dir() else []
    for mount in mounts:
        for pattern in PATTERNS:
            for group in [mount / pattern.format(i) for i in ids]:
                if group.is_dir():
                    _remove_tree(group)


def _remove_tree(group: Path) -> None:
    for child in group.iterdir():
        if child.is_dir():
            _remove_tree(child)
    # Busy until the last killed process is really gone; a group that stays busy is not worth an error.
    with suppress(TimeoutError):
        wait_until(lambda: _rmdir(group), 2, f"the end of {group}", least_s=0.0)


def _rmdir(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
