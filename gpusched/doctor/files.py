"""The examination of inventory.yaml and the policies, and of what these need besides gpusched itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from gpusched.config.inventory import inventory_errors, load_inventory
from gpusched.config.paths import find_inventory
from gpusched.config.policies import load_policies, load_policy, others_of, policy_folders
from gpusched.doctor.findings import Finding, failed
from gpusched.errors import FileError, GpuschedError
from gpusched.model.policy import PolicySpec
from gpusched.model.resources import Inventory, Node
from gpusched.model.units import count_of
from gpusched.promotion.live import overrides
from gpusched.queue.damage import UNREADABLE
from gpusched.queue.store import Reader

_LEARN = "pip install 'gpusched-cluster[learn]'"


def examine_inventory(path: Path | str | None) -> tuple[list[Finding], Inventory | None]:
    """Everything wrong with the inventory file, and the inventory where it can be used."""
    try:
        path = find_inventory() if path is None else path
    except GpuschedError as error:
        return [failed("inventory", "file", error)], None
    try:
        inventory = load_inventory(path)
    except FileError as error:
        hint = "fix the line and run check again"
        errors = inventory_errors(path) or [error]
        return [Finding(str(path), "file", "fail", error.message, hint) for error in errors], None
    flavors = sum(len(p.flavors) for p in inventory.partitions)
    found = ((len(inventory.partitions), "partition"), (len(inventory.nodes), "node"), (flavors, "flavor"))
    counts = ", ".join(count_of(number, noun) for number, noun in found)
    if inventory.default_partition is not None:
        counts += f", default partition {inventory.default_partition}"
    return [Finding(str(path), "file", "ok", counts), *_omissions(inventory)], inventory


def _omissions(inventory: Inventory) -> list[Finding]:
    found = []
    unrated = [n.name for n in inventory.nodes if n.rated_power_w is None]
    if unrated:
        message = f"no rated power for {', '.join(unrated[:8])}{' ...' if len(unrated) > 8 else ''}"
        hint = "add rated_power: 6.5kW (from the server's data sheet); without it its inefficient energy is unknown"
        found.append(Finding(inventory.path, "rated power", "warn", message, hint))
    for partition in inventory.partitions:
        if not partition.flavors and inventory.engine == "ssh":
            message = f"partition {partition.name} has no flavors"
            hint = "add flavors: the largest one limits what a job may request"
            found.append(Finding(inventory.path, "flavors", "warn", message, hint))
    return found + _unreadable_keys(inventory)


def _unreadable_keys(inventory: Inventory) -> list[Finding]:
    used: dict[str, Node] = {n.key: n for n in inventory.nodes if n.key is not None and n.transport == "ssh"}
    found = []
    for key, node in used.items():
        try:
            with open(Path(key).expanduser(), "rb"):
                pass
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or str(error)
            message = f"the key {key} of {node.name} cannot be read: {why}"
            hint = "fix key: in the inventory, or create one with ssh-keygen"
            found.append(Finding(inventory.path, "key", "fail", message, hint))
    return found


def _promoted(inventory: Inventory, state: Path) -> tuple[dict[str, PolicySpec], list[Finding]]:
    """Partition -> what was promoted there; and what is odd about it, or about an agent."""
    try:
        reader = Reader.open(state)
        if reader is None:
            return {}, []
        with closing(reader):
            changes, out = reader.live_changes(), reader.fallbacks()
    except (GpuschedError, *UNREADABLE, OSError):  # the examination of the state folder says why
        return {}, []
    promoted = {p.name: changes[p.name].spec for p in inventory.partitions if overrides(p, changes.get(p.name))}
    found = [Finding("policies", "agent", "warn", f.line, "see 'gpusched policy show'") for f in out.values()]
    for partition in inventory.partitions:
        last = changes.get(partition.name)
        if last is not None and last.override and partition.name not in promoted:
            name = last.spec.name
            message = f"{partition.name}: inventory.yaml was edited after the promotion of {name} and overrides it"
            hint = f"to restore {name}: gpusched policy promote {name} -p {partition.name}"
            found.append(Finding("policies", "policy", "warn", message, hint))
    return promoted, found


def examine_policies(inventory: Inventory, state: Path) -> list[Finding]:
    """Check the policies in use, and files of the site's own folder that no partition uses but that are wrong.

    A policy that was promoted goes before the one that inventory.yaml names, until the file names another.
    """
    try:
        policies = load_policies(inventory)
    except GpuschedError as error:
        return [failed("policies", "policy", error)]
    promoted, found = _promoted(inventory, state)
    policies |= promoted
    used = [f"{n}: {p.name} ({p.version}{', promoted' if n in promoted else ''})" for n, p in policies.items()]
    found.insert(0, Finding("policies", "policy", "ok", ", ".join(used)))
    found += examine_needs(inventory, policies)
    for file in sorted(policy_folders(inventory.path)[0].glob("*.yaml")):
        try:
            load_policy(file)
        except GpuschedError as error:
            if not file.exists():
                continue  # it was removed or renamed meanwhile
            hint = "no partition uses it yet; fix it before one does"
            found.append(Finding("policies", "policy", "warn", error.message, hint))
    return found


def examine_needs(inventory: Inventory, policies: Mapping[str, PolicySpec]) -> Iterator[Finding]:
    """Return what the active policies (by partition) lack, and what happens without it."""
    for partition, spec in policies.items():
        stages = (spec, spec.fallback) if spec.fallback is not None else (spec,)
        if any(stage.place == "milp" for stage in stages) and not _importable("highspy"):
            message = f"{partition}: place: milp needs HiGHS, which is not installed: jobs are placed greedily"
            yield Finding("policies", "optimiser", "warn", message, "pip install 'gpusched-cluster[milp]'")
        yield from _of_components(partition, spec)
        if spec.agent is not None:
            fallback = spec.fallback.name if spec.fallback is not None else "fifo"
            yield from _of_agent(inventory, partition, spec.agent, fallback)


def _of_components(partition: str, spec: PolicySpec) -> Iterator[Finding]:
    """Return the other packages' components of a policy that do not work; what the policy does then is its guide's."""
    others = others_of(spec)
    if others:
        from gpusched.sched.agent import why_broken  # arrays, which most installations need not load here

        for group, name in others:
            if why := why_broken(group, name):
                yield Finding("policies", "component", "warn", f"{partition}: {why}")


def _of_agent(inventory: Inventory, partition: str, agent: str, fallback: str) -> Iterator[Finding]:
    if not _importable("safetensors"):
        message = f"{partition}: {agent}'s weights need safetensors, which is not installed: {fallback} decides"
        yield Finding("policies", "weights", "fail", message, "reinstall gpusched with its dependencies")
    declared = inventory.partition(partition)
    own = declared.auto_promote if declared is not None else None
    wanted = inventory.settings.auto_promote if own is None else own
    if wanted and find_spec("torch") is None:
        message = f"{partition}: auto_promote needs agents, which cannot be trained here: torch is not installed"
        yield Finding("policies", "training", "warn", message, f"{_LEARN}, or copy trained policies here")


def _importable(module: str) -> bool:
    """Return whether it can be imported; one that is there and broken cannot."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True
