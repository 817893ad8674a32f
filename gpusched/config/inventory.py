"""inventory.yaml -> Inventory, validated; errors name file:line, key, value found and value expected.

The keys and their units are explained in the inventory.yaml at the repository's root. A value of a node comes from the
node itself, else its partition's ``defaults``, else the file's ``defaults``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from gpusched.config import fields
from gpusched.config.groups import read_groups, read_quotas
from gpusched.config.idle import IdleKeys, check_exempt_partitions, idle_rules, read_idle
from gpusched.config.notices import read_events, read_notices
from gpusched.config.paths import find_inventory
from gpusched.config.topology import read_topology
from gpusched.config.validate import nodes_that_hold
from gpusched.config.yamlfile import Value, parse_file
from gpusched.errors import FileError
from gpusched.model.limits import Groups, Quotas
from gpusched.model.notices import Notices
from gpusched.model.resources import (
    BackupSettings,
    Flavor,
    Inventory,
    LogSettings,
    Node,
    Partition,
    PlacementRules,
    ResizeRules,
    RuntimeName,
    Settings,
)
from gpusched.model.slicetables import whole_gpus
from gpusched.model.topology import Topology
from gpusched.model.units import amounts_of


def load_inventory(path: Path | str | None = None) -> Inventory:
    """Load the inventory of a file; by default of the one in force.

    Raises:
        FileError: The first thing wrong with it.
        UsageError: There is none.
    """
    return _InventoryReader(find_inventory() if path is None else path).inventory()


def inventory_errors(path: Path | str) -> list[FileError]:
    """Return all errors of an inventory file, in order of detection; empty when it is valid."""
    errors: list[FileError] = []
    try:
        _InventoryReader(path, errors).inventory()
    except FileError as error:
        errors.append(error)
    return errors


def flavor_nodes(flavor: Flavor, nodes: tuple[Node, ...]) -> int | None:
    """Return how many of these nodes a job of this flavor needs: the fewest equal parts that fit.

    None where it fits on no number of them, even empty.
    """
    for count in range(1, len(nodes) + 1):
        if flavor.gpus % count or flavor.cores % count or flavor.memory_mib % count:
            continue
        gpus = whole_gpus(flavor.gpus // count, flavor.profile)
        if nodes_that_hold(nodes, gpus, flavor.cores // count, flavor.memory_mib // count) >= count:
            return count
    return None


def _resize_rules(value: Value, nodes: list[Node]) -> ResizeRules:
    rules = ResizeRules(**fields.read(value, fields.RESIZABLE, "a mapping with min, max, cooldown, batch, default"))
    if rules.most is not None and rules.most < rules.least:
        raise value.error("a max that is not below min", f"min {rules.least} and max {rules.most}")
    if nodes and rules.least > (has := sum(node.gpus for node in nodes)):
        raise value.error(f"a min of at most the partition's {has} GPUs", str(rules.least))
    return rules


class _InventoryReader:
    """One pass over one file. With ``errors`` given, a section's error is added there and the next section is read."""

    def __init__(self, path: Path | str, errors: list[FileError] | None = None) -> None:
        self._path = path
        self._errors = errors
        self._engine: Literal["ssh", "slurm"] = "ssh"
        self._names: dict[str, Value] = {}
        self._default: str | None = None
        self._idle: IdleKeys = {}
        self._addresses: dict[tuple[str, int | None], str] = {}

    def inventory(self) -> Inventory:
        root = parse_file(self._path, "an inventory")
        known = root.fields("a mapping with partitions", fields.INVENTORY)
        settings, defaults = Settings(), dict[str, Any]()
        with self._noting():
            if "engine" in known and known["engine"].choice(("ssh", "slurm")) == "slurm":
                self._engine = "slurm"
        with self._noting():
            settings = self._settings(known.get("settings"))
        notices = Notices()
        with self._noting():
            notices = read_notices(known.get("notices"))
        with self._noting():
            defaults = fields.read(known.get("defaults"), fields.DEFAULTS, "a mapping of node settings")
        if self._engine == "slurm":
            defaults.setdefault("runtime", RuntimeName.PROCESS)  # Slurm starts its jobs itself
        if "partitions" not in known:
            raise root.missing("partitions", "at least one partition with its nodes")
        found = known["partitions"].fields("a mapping: name of partition -> its nodes")
        if not found:
            raise known["partitions"].error("at least one partition with its nodes", "none")
        with self._noting():
            self._check_idle(known.get("settings"), found)
        partitions = []
        for name, value in found.items():
            with self._noting():
                partitions.append(self._partition(name, value, defaults))
        topology = Topology()
        nodes = None if self._errors else self._names  # a node that could not be read is not a node that is not there
        with self._noting():
            topology = read_topology(known.get("topology"), nodes, self._noting)
        if self._engine == "slurm":
            for key in ("groups", "limits", "qos"):
                with self._noting():
                    if key in known:
                        raise known[key].error("nothing: with engine: slurm they are Slurm's (sacctmgr)")
        groups = Groups()
        with self._noting():
            groups = read_groups(known.get("groups"), self._noting)
        quotas = Quotas(groups=groups)
        with self._noting():
            quotas = read_quotas(known.get("limits"), known.get("qos"), groups, self._noting)
        return Inventory(
            path=str(self._path), partitions=tuple(partitions), settings=settings, topology=topology,
            engine=self._engine, quotas=quotas, notices=notices,
        )  # fmt: skip

    def _settings(self, value: Value | None) -> Settings:
        if value is None:
            return Settings()
        values = fields.read(value, fields.SETTINGS, "a mapping of settings")
        logs = fields.read(values.pop("logs", None), fields.LOGS, "a mapping of log settings")
        events = read_events(values.pop("events", None))
        backup = fields.read(values.pop("backup", None), fields.BACKUP, "a mapping of backup settings")
        if "idle" in values:
            self._idle = self._idle_keys(values.pop("idle"))
        if isinstance(price := values.get("power_price_per_kwh"), tuple):
            values["power_price_per_kwh"], currency = price
            if currency is not None and values.setdefault("currency", currency) != currency:
                raise value.error("one currency", f"{values['currency']} and {currency}")
        return Settings(**values, logs=LogSettings(**logs), events=events, backup=BackupSettings(**backup))

    def _idle_keys(self, value: Value) -> IdleKeys:
        if self._engine == "slurm":
            raise value.error("nothing: with engine: slurm, jobs are ended by Slurm alone")
        return read_idle(value, self._idle)

    def _check_idle(self, settings: Value | None, partitions: Collection[str]) -> None:
        if self._idle and settings is not None:
            check_exempt_partitions(settings.fields("a mapping of settings")["idle"], partitions)

    def _partition(self, name: str, value: Value, file_defaults: Mapping[str, Any]) -> Partition:
        fields.check_name(name, value)
        known = value.fields("a mapping with nodes and flavors", fields.PARTITION)
        own = fields.read(known.get("defaults"), fields.DEFAULTS, "a mapping of node settings")
        defaults = fields.with_defaults(own, file_defaults)
        if "nodes" not in known:
            raise value.missing("nodes", "a list of nodes")
        listed = known["nodes"]
        nodes: list[Node] = []
        entries = [listed] if listed.is_text else listed.items("a list of nodes")
        if not entries:
            raise listed.error("at least one node", "none")
        for entry in entries:
            with self._noting():
                nodes += self._nodes(name, entry, defaults)
        max_time_s = fields.duration(known["max_time"]) if "max_time" in known else None
        return Partition(
            name=name,
            nodes=tuple(nodes),
            flavors=tuple(self._flavors(known.get("flavors"), tuple(nodes), max_time_s)),
            policy=fields.name(known["policy"]) if "policy" in known else "fifo",
            default_image=fields.image(known["image"]) if "image" in known else None,
            max_time_s=max_time_s,
            auto_promote=known["auto_promote"].flag() if "auto_promote" in known else None,
            preemptible=known["preemptible"].flag() if "preemptible" in known else False,
            slurm_env=known["slurm_env"].flag() if "slurm_env" in known else False,
            default="default" in known and self._is_default(name, known["default"]),
            placement=PlacementRules(
                **fields.read(known.get("placement"), fields.PLACEMENT, "a mapping with max_spread, wait")
            ),
            idle=idle_rules(self._idle_keys(known["idle"]) if "idle" in known else self._idle),
            resizable=_resize_rules(known["resizable"], nodes) if "resizable" in known else ResizeRules(),
        )

    def _is_default(self, name: str, value: Value) -> bool:
        if not value.flag():
            return False
        if self._default is not None:
            raise value.error("one default partition", f"{name} besides {self._default}")
        self._default = name
        return True

    def _nodes(self, partition: str, entry: Value, defaults: Mapping[str, Any]) -> list[Node]:
        own: dict[str, Any] = {"name": fields.host_range(entry)} if entry.is_text else {}
        if not entry.is_text:
            own = fields.read(entry, fields.NODE, "a node: a host name, or a mapping with a name")
        if "name" not in own:
            raise entry.missing("name", "the node's name")
        values = fields.complete_node(entry, own, defaults)
        names: list[str] = values.pop("name")
        addresses: list[str] = values.pop("address", names)
        if len(addresses) != len(names):
            raise entry.error(f"as many addresses as names ({len(names)})", f"{len(addresses)} addresses")
        for name, address in zip(names, addresses, strict=True):
            self._claim(entry, name, address, values)
        return [Node(name=n, address=a, partition=partition, **values) for n, a in zip(names, addresses, strict=True)]

    def _claim(self, entry: Value, name: str, address: str, values: Mapping[str, Any]) -> None:
        first = self._names.setdefault(name, entry)
        if first is not entry:
            raise entry.error("every node once", f'the node "{name}" again (first in line {first.line})')
        if values.get("transport") == "none" and self._engine != "slurm":
            raise entry.error("a transport by which the node can be reached", "none, which is for engine: slurm")
        if values.get("health_checks") and self._engine == "slurm":
            raise entry.error("no health_checks: with engine: slurm they are Slurm's", "health_checks")
        if values.get("transport") in ("local", "none"):
            if values.get("become"):
                raise entry.error("become for nodes reached by ssh only", f"transport: {values['transport']}")
            return
        owner = self._addresses.setdefault((address, values.get("port")), name)
        if owner != name:
            raise entry.error("an address of its own for every node", f'"{address}" again (it is {owner}\'s)')

    def _flavors(self, value: Value | None, nodes: tuple[Node, ...], max_time_s: int | None) -> list[Flavor]:
        flavors: list[Flavor] = []
        found = {} if value is None else value.fields("a mapping: name of flavor -> gpus, cores, memory, time")
        for name, entry in found.items():
            with self._noting():
                flavors.append(self._flavor(name, entry, nodes, max_time_s))
        return flavors

    def _flavor(self, name: str, entry: Value, nodes: tuple[Node, ...], max_time_s: int | None) -> Flavor:
        fields.check_name(name, entry)
        values = fields.read(entry, fields.FLAVOR, "a mapping with gpus, cores, memory and time", fields.FLAVOR_NEEDS)
        gpus, profile = values.pop("gpus")
        flavor = Flavor(name=name, gpus=gpus, profile=profile, **values)
        if max_time_s is not None and flavor.time_limit_s > max_time_s:
            raise entry.error("a time within the partition's max_time", "a longer time limit")
        if nodes and not self._errors and flavor_nodes(flavor, nodes) is None:
            asked = amounts_of(flavor.gpus, flavor.cores, flavor.memory_mib, flavor.profile)
            raise entry.error(f"what can be split evenly across {fields.describe(nodes)}", asked)
        return flavor

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except FileError as error:
            if self._errors is None:
                raise
            self._errors.append(error)
