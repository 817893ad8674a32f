"""Paths of gpusched's state and inventory, the same for every command."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from gpusched.errors import UsageError, Warnings

SHARED_STATE = Path("/var/lib/gpusched")
SYSTEM_INVENTORY = Path("/etc/gpusched/inventory.yaml")
ALERT_RULES = Path(__file__).parents[1] / "data" / "monitoring" / "alerts.yaml"


def state_folder() -> Path:
    """Return the state folder; it need not exist yet.

    ``$GPUSCHED_STATE``; else /var/lib/gpusched where it is a gpusched state (a shared installation: all users of the
    login node meet there); else ``$XDG_STATE_HOME/gpusched``; else ~/.local/state/gpusched.
    """
    if named := os.environ.get("GPUSCHED_STATE"):
        return expanded(named).absolute()
    if os.path.isdir(SHARED_STATE / "inbox"):
        return SHARED_STATE
    return _xdg("XDG_STATE_HOME", ".local/state") / "gpusched"


def config_folder() -> Path:
    """Return the user's settings folder: ``$XDG_CONFIG_HOME/gpusched``, else ~/.config/gpusched."""
    return _xdg("XDG_CONFIG_HOME", ".config") / "gpusched"


def find_inventory() -> Path:
    """Return the inventory file in force.

    ``$GPUSCHED_INVENTORY`` (a file, or a folder that holds inventory.yaml); else ./inventory.yaml, unless another
    user's; else ``$XDG_CONFIG_HOME/gpusched/inventory.yaml``; else /etc/gpusched/inventory.yaml.

    Raises:
        UsageError: None of them is there.
    """
    if named := os.environ.get("GPUSCHED_INVENTORY"):
        path = expanded(named)
        path = path / "inventory.yaml" if path.is_dir() else path
        if not os.path.exists(path):
            raise UsageError(f"no inventory: GPUSCHED_INVENTORY names {path}, which is not there", _HINT)
        return path
    places = [Path("inventory.yaml"), SYSTEM_INVENTORY]
    with suppress(UsageError):  # a user without a home folder
        places.insert(1, config_folder() / "inventory.yaml")
    for place in places:
        if os.path.exists(place):
            # It names commands that are run with our rights: ssh_config's ProxyCommand, checks.
            if place is not places[0] or {os.lstat(place).st_uid, os.stat(place).st_uid} <= _trusted():
                return place
            Warnings.give(f"{place.absolute()} is another user's and not used; if you trust it, set GPUSCHED_INVENTORY")
    looked = ", ".join(str(p) for p in (places[0].absolute(), *places[1:]))
    raise UsageError(f"no inventory: looked for {looked}", _HINT)


def _trusted() -> set[int]:
    """Return the accounts whose ./inventory.yaml is used: root, ours, and that of the user of sudo."""
    sudo = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return {0, os.geteuid(), *map(int, re.findall(r"^[0-9]{1,10}$", sudo))}


_HINT = "write one with `gpusched init HOST...`, or set GPUSCHED_INVENTORY"


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return a path that may begin with ``~`` or ``~USER``.

    Raises:
        UsageError: There is no such home folder.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(f"{path}: no such user, or HOME is not set and this user has no home folder") from None


def log_path(state: Path, job_id: str, attempt: int, rank: int) -> Path:
    """Return the path of one rank's collected output."""
    return state / "logs" / job_id / f"{attempt}.{rank}.log"


def result_path(state: Path, job_id: str, attempt: int, rank: int) -> Path:
    """Return the path of the collected result of one rank of a Python function."""
    return state / "logs" / job_id / f"{attempt}.{rank}.result"


def write_atomic(path: Path, content: bytes | memoryview, mode: int | None = None) -> None:
    """Write a file atomically: after a crash, even of the machine, either the old or the new one exists.

    Of several writers, on several machines too, the last one's file stays. What is no file, such as /dev/null, is
    written to: root could replace it. ``mode``: the file's; None: as the umask has it.

    Raises:
        OSError: It cannot be written; ``filename`` is the path's.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        from gpusched.config.openers import output_opener

        try:
            with open(path, "wb", opener=output_opener) as file:
                file.write(content)
        except OSError as error:
            error.filename = str(path)
            raise
        return
    partial = path.parent / f"{path.name}.{os.urandom(4).hex()}.partial"
    try:
        with open(partial, "xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None  # users do not know the draft
        raise


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk: without it a renamed file may be lost in a power failure.

    Raises:
        OSError: It cannot be done.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _xdg(variable: str, default: str) -> Path:
    named = os.environ.get(variable, "")
    return Path(named) if os.path.isabs(named) else expanded(f"~/{default}")  # the XDG standard ignores relative ones
