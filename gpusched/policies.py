"""policies/*.yaml -> PolicySpec. A site's own folder goes before the policies that come with gpusched."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import get_args

from gpusched.errors import FileError, UsageError
from gpusched.model.policy import Backfill, Order, Place, PolicySpec
from gpusched.model.resources import Inventory
from gpusched.yamlfile import Value, parse_file, suggestion

BUILT_IN = Path(__file__).with_name("data") / "policies"


def policy_folders(inventory_path: Path | str) -> tuple[Path, ...]:
    """Where policies are looked for, in order.

    ``$GPUSCHED_POLICIES``, else ``policies/`` beside the inventory where there is one; then those that come along.

    Raises:
        UsageError: ``$GPUSCHED_POLICIES`` is not a folder.
    """
    if named := os.environ.get("GPUSCHED_POLICIES"):
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise UsageError(f"no policies: GPUSCHED_POLICIES names {folder}, which is not a folder")
        return folder, BUILT_IN
    beside = Path(inventory_path).absolute().parent / "policies"
    return (beside, BUILT_IN) if beside.is_dir() else (BUILT_IN,)


def policy_names(inventory_path: Path | str) -> list[str]:
    """Names of all policies a partition may use, sorted."""
    folders = policy_folders(inventory_path)
    return sorted({file.stem for folder in folders for file in folder.glob("*.yaml")})


def load_policies(inventory: Inventory) -> dict[str, PolicySpec]:
    """The policy of every partition: partition name -> policy.

    Raises:
        FileError: A partition names one that does not exist, or its file is wrong.
    """
    folders = policy_folders(inventory.path)
    loaded: dict[str, PolicySpec] = {}
    for partition in inventory.partitions:
        if partition.policy not in loaded:
            file = _find(partition.policy, folders)
            if file is None:
                raise _unknown(inventory, partition.name, folders)
            loaded[partition.policy] = load_policy(file)
    return {p.name: loaded[p.policy] for p in inventory.partitions}


def load_policy(path: Path | str) -> PolicySpec:
    """The policy of one file, named after it.

    Raises:
        FileError: The first thing wrong with it.
    """
    known = {"order": get_args(Order), "place": get_args(Place), "backfill": get_args(Backfill)}
    root = parse_file(path, "a policy").fields("a mapping with order, place, backfill", ("description", *known))
    stages = {key: root[key].choice(options) for key, options in known.items() if key in root}
    description = root["description"].text("a sentence") if "description" in root else ""
    spec = PolicySpec(name=Path(path).stem, description=description, **stages)  # type: ignore[arg-type]
    return _with_version(spec)


def _with_version(spec: PolicySpec) -> PolicySpec:
    meaning = json.dumps({"order": spec.order, "place": spec.place, "backfill": spec.backfill}, sort_keys=True)
    version = hashlib.sha256(meaning.encode()).hexdigest()[:12]
    return PolicySpec(
        name=spec.name,
        order=spec.order,
        place=spec.place,
        backfill=spec.backfill,
        description=spec.description,
        version=version,
    )


def _find(name: str, folders: tuple[Path, ...]) -> Path | None:
    return next((f for folder in folders if (f := folder / f"{name}.yaml").is_file()), None)


def _unknown(inventory: Inventory, partition: str, folders: tuple[Path, ...]) -> FileError:
    names = policy_names(inventory.path)
    looked = " and ".join(str(f) for f in folders)
    value = _policy_value(inventory, partition)
    expected = f"one of {', '.join(names)} (of {looked}){suggestion(value.found().strip(chr(34)), names)}"
    return value.error(expected)


def _policy_value(inventory: Inventory, partition: str) -> Value:
    """Where the inventory names the partition's policy; its entry where it names none."""
    found = parse_file(inventory.path).fields("a mapping")["partitions"].fields("a mapping")[partition]
    return found.fields("a mapping").get("policy", found)
