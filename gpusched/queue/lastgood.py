"""The last valid inventory and policies, which a controller keeps using while the files are invalid."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gpusched.config.paths import SYSTEM_INVENTORY, expanded, find_inventory
from gpusched.errors import GpuschedError, UsageError, Warnings
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory

if TYPE_CHECKING:
    from gpusched.queue.store import Reader, Store

LAST_GOOD = "last_good"
"""Meta of the store: `Declared` as JSON; the copy that other users read lacks receivers of notices and events."""


class Declared(msgspec.Struct, frozen=True):
    """The inventory and policies in force.

    Attributes:
        trouble: Why it is not what the files say now, or "".
        read_at: When the files were last seen to say it (Unix seconds); 0.0: not known.
    """

    inventory: Inventory
    policies: dict[str, PolicySpec]
    trouble: str = ""
    read_at: float = 0.0


def inventory_path(state: Path) -> Path:
    """Return the inventory file in force; where it is gone but a copy is kept, its former path.

    Raises:
        UsageError: There is none.
    """
    try:
        return find_inventory()
    except UsageError:
        path = expanded(os.environ.get("GPUSCHED_INVENTORY") or SYSTEM_INVENTORY)
        if _kept(path, state) is None:
            raise
        return path


def inventory_or_kept(path: Path | None, state: Path) -> Inventory:
    """Return the inventory for a command; where its file is invalid, the last valid one, with a warning.

    Raises:
        GpuschedError: It is not, and nothing is kept of this file.
    """
    from gpusched.config.inventory import load_inventory  # what reads only the kept copy starts faster without it

    try:
        return load_inventory(path)
    except GpuschedError as error:
        kept = _kept(path or inventory_path(state), state)
        if kept is None:
            raise
        _warn(error, kept)
        return kept.inventory


def policies_or_kept(inventory: Inventory, reader: Reader | None) -> dict[str, PolicySpec]:
    """Return each partition's policy; where its file is invalid, the last valid one, with a warning.

    Raises:
        GpuschedError: It is not, and nothing is kept of what the partitions name.
    """
    from gpusched.config.policies import load_policies  # commands start faster without it

    try:
        return load_policies(inventory)
    except GpuschedError as error:
        kept = _read_kept(reader, Path(inventory.path)) if reader is not None else None
        known = {} if kept is None else {p.name: p.policy for p in kept.inventory.partitions}
        if kept is None or any(known.get(p.name) != p.policy for p in inventory.partitions):
            raise
        _warn(error, kept)
        return kept.policies


def _warn(error: GpuschedError, kept: Declared) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(kept.read_at))
    Warnings.give(f"{error.line()}; using the last good copy, of {when if kept.read_at else 'an earlier time'}")


def declared_or_kept(path: Path, state: Path) -> Declared:
    """Return what the files declare; where they are invalid, the last valid declarations.

    Raises:
        GpuschedError: They are not, and nothing is kept of this file.
    """
    from gpusched.config.inventory import load_inventory
    from gpusched.config.policies import load_policies

    try:
        inventory = load_inventory(path)
        return Declared(inventory, load_policies(inventory))
    except GpuschedError as error:
        kept = _kept(path, state)
        if kept is None:
            raise
        return msgspec.structs.replace(kept, trouble=error.line())


def _kept(path: Path, state: Path) -> Declared | None:
    from gpusched.queue.store import Reader  # commands that need no store start faster without it

    try:
        reader = Reader.open(state)
    except GpuschedError:
        return None  # the store's own opening says it better
    if reader is None:
        return None
    with contextlib.closing(reader):
        return _read_kept(reader, path)


def _read_kept(reader: Reader, path: Path) -> Declared | None:
    kept = kept_declarations(reader)
    return kept if kept is not None and Path(kept.inventory.path).absolute() == path.absolute() else None


def kept_declarations(reader: Reader) -> Declared | None:
    """Return the declarations that the controller uses; None: none are kept, or by another version."""
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(reader.meta(LAST_GOOD) or "null", type=Declared | None)
    return None


def store_declared(store: Store, declared: Declared) -> None:
    """Store valid declarations, or record why they are invalid."""
    from gpusched.queue.store import INVENTORY_TROUBLE

    if not declared.trouble:
        absolute = msgspec.structs.replace(declared.inventory, path=str(Path(declared.inventory.path).absolute()))
        kept = msgspec.structs.replace(declared, inventory=absolute, read_at=time.time())
        store.set_meta(LAST_GOOD, msgspec.json.encode(kept).decode())
    store.set_meta(INVENTORY_TROUBLE, declared.trouble)
