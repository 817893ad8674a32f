"""The last inventory and policies that were in order: what a controller goes on with beside files that are not."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from gpusched.config.inventory import load_inventory
from gpusched.config.paths import SYSTEM_INVENTORY, find_inventory
from gpusched.config.policies import load_policies
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory
from gpusched.queue.store import INVENTORY_TROUBLE, Reader, Store

_KEY = "last_good"


class Declared(msgspec.Struct, frozen=True):
    """What is in force. ``trouble``: why it is not what the files say now, or ""."""

    inventory: Inventory
    policies: dict[str, PolicySpec]
    trouble: str = ""


def inventory_path(state: Path) -> Path:
    """The inventory file in force, or the one that was, where it is gone and its text is kept.

    Raises:
        UsageError: There is none.
    """
    try:
        return find_inventory()
    except UsageError:
        path = Path(os.environ.get("GPUSCHED_INVENTORY") or SYSTEM_INVENTORY).expanduser()
        if _kept(path, state) is None:
            raise
        return path


def declared_or_kept(path: Path, state: Path) -> Declared:
    """What the files declare; where they are not in order, what they did when they last were.

    Raises:
        GpuschedError: They are not, and nothing is kept of this file.
    """
    try:
        inventory = load_inventory(path)
        return Declared(inventory, load_policies(inventory))
    except GpuschedError as error:
        kept = _kept(path, state)
        if kept is None:
            raise
        return msgspec.structs.replace(kept, trouble=error.line())


def _kept(path: Path, state: Path) -> Declared | None:
    try:
        reader = Reader.open(state)
    except GpuschedError:
        return None  # the store's own opening says it better
    if reader is None:
        return None
    with contextlib.closing(reader), contextlib.suppress(msgspec.MsgspecError):  # of another version
        kept = msgspec.json.decode(reader.meta(_KEY) or "null", type=Declared | None)
        if kept is not None and Path(kept.inventory.path).absolute() == path.absolute():
            return kept
    return None


def keep(store: Store, declared: Declared) -> None:
    """Remember what is in order, or note for everybody what is not."""
    if not declared.trouble:
        absolute = msgspec.structs.replace(declared.inventory, path=str(Path(declared.inventory.path).absolute()))
        kept = msgspec.structs.replace(declared, inventory=absolute)
        store.set_meta(_KEY, msgspec.json.encode(kept).decode())
    store.set_meta(INVENTORY_TROUBLE, declared.trouble)
