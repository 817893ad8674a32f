"""What was discovered, as the text of an inventory.yaml a person can read and change."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gpusched.bootstrap.discover import Discovered, NotDiscovered, Outcome
from gpusched.config.inventory import load_inventory
from gpusched.config.paths import write_atomic
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.topology import Topology
from gpusched.model.units import format_gbps
from gpusched.views.common import compress_names

HEAD_SETTINGS = ("settings:", "  # power_price: 0.30 EUR/kWh      # for the costs in `gpusched power`")
_HEAD = f"""\
# Written by `gpusched init`: from what the servers report. Look it over, change what you like, then run
# `gpusched check`. All keys are explained in the inventory.yaml of gpusched's repository.

{HEAD_SETTINGS[0]}
{HEAD_SETTINGS[1]}
  # admins: [alice]                # may act on all jobs and on nodes
"""
_PLAIN = re.compile(r"[A-Za-z0-9/][A-Za-z0-9._/@+-]*")
_NULLS = frozenset({"null", "Null", "NULL"})
_FLAVORS = (("s", 1, 4, 72), ("m", 1, 2, 168), ("l", 1, 1, 336), ("f", 2, 1, 504))  # name, of a node: part, hours


def inventory_text(
    outcomes: Sequence[Outcome], *, user: str | None = None, key: str | None = None, topology: Topology | None = None
) -> str:
    """Return the text of an inventory with all that was discovered; hosts that failed are comments.

    ``user`` and ``key`` are those that `discover` was given; ``topology`` has the names that the nodes were given.

    Raises:
        GpuschedError: No host was discovered.
    """
    nodes = [o for o in outcomes if isinstance(o, Discovered)]
    failures = [o for o in outcomes if isinstance(o, NotDiscovered)]
    if not nodes:
        reason = failures[0].reason if failures else "no hosts given"
        raise GpuschedError(f"no host responded; nothing was written: {reason}", failures[0].hint if failures else "")
    runtime = Counter(n.runtime for n in nodes).most_common(1)[0][0].value
    typed = {n.host.user for n in nodes}
    user = (typed.pop() if len(typed) == 1 else None) or user
    lines = [_HEAD, "defaults:", f"  runtime: {runtime}"]
    lines += [f"  {name}: {scalar(value)}" for name, value in (("user", user), ("key", key)) if value]
    lines += ["", "partitions:"]
    for name, members in _partitions(nodes).items():
        lines += _partition(name, members, runtime, user)
    lines += _failed(failures)
    lines += ["", topology_text(topology)] if topology else []
    return "\n".join(lines).rstrip("\n") + "\n"


def topology_text(topology: Topology) -> str:
    """Return the ``topology:`` section of an inventory."""
    lines = ["topology:"]
    for switch in topology.switches:
        fields = {
            "nodes": scalar(compress_names(switch.nodes)) if switch.nodes else None,
            "uplink": format_gbps(switch.uplink_gbps) if switch.uplink_gbps is not None else None,
            "parent": scalar(switch.parent) if switch.parent is not None else None,
        }
        values = ", ".join(f"{key}: {value}" for key, value in fields.items() if value is not None)
        lines.append(f"  {scalar(switch.name)}: {{{values}}}")
    return "\n".join(lines) + "\n"


def known_names(outcomes: Sequence[Outcome]) -> Callable[[str], str | None]:
    """Return the name here of a host in another program's file: by name or address, with or without its domain."""
    known: dict[str, str] = {}
    for node in (o for o in outcomes if isinstance(o, Discovered)):
        for name in (node.name, node.host.address, node.host.address.split(".")[0]):
            known.setdefault(name, node.name)
    return lambda name: known.get(name) or known.get(name.split(".")[0])


def write_inventory(path: Path, text: str, *, force: bool = False) -> None:
    """Write the file, whole or not at all, after reading it back through `load_inventory`.

    Raises:
        UsageError: It already exists, and ``force`` is false.
        GpuschedError: It cannot be written, or the text is no inventory (a bug; nothing was written).
    """
    refuse_existing(path, force=force)
    draft = path.parent / f".{path.name}.{os.urandom(8).hex()}.part"  # others cannot have put a link there
    try:
        draft.write_text(text, encoding="utf-8")
        load_inventory(draft)
        if force:
            write_atomic(path, text.encode())
        else:
            os.link(draft, path)  # unlike rename, fails where the file exists
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise GpuschedError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)


def refuse_existing(path: Path, *, force: bool = False) -> None:
    """Say early that the file would be overwritten: before any host is asked.

    Raises:
        UsageError: It already exists, and ``force`` is false.
    """
    if not force and os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path) -> UsageError:
    return UsageError(f"{path} already exists", "use --force to overwrite it, or choose another name")


def _partitions(nodes: Sequence[Discovered]) -> dict[str, list[Discovered]]:
    """Nodes by GPU type; where a type comes with different memories, by both."""
    sizes: dict[str, set[int | None]] = {}
    for node in nodes:
        sizes.setdefault(node.gpu_type, set()).add(_gib(node.gpu_memory_mib))
    found: dict[str, list[Discovered]] = {}
    for node in nodes:
        size = _gib(node.gpu_memory_mib)
        apart = len(sizes[node.gpu_type]) > 1 and size is not None
        found.setdefault((node.gpu_type or "CPU") + (f"-{size}GB" if apart else ""), []).append(node)
    return found


def _partition(name: str, nodes: list[Discovered], runtime: str, user: str | None) -> list[str]:
    like = _typical(nodes)
    shared = [f"gpus: {like.gpus}", f"cores: {like.cores}", f"memory: {_memory(like.memory_mib)}"]
    shared += [f"gpu_type: {scalar(like.gpu_type)}"] if like.gpu_type else []
    shared += [f"rated_power: {power(like.rated_power_w)}"] if like.rated_power_w else []
    lines = [f"  {scalar(name)}:", "    policy: easy"]
    if like.rated_power_w is None:
        why = "(of a whole server, such as 6.5kW) is not known; add it to defaults for `gpusched power`"
        lines.append(f"    # rated_power {why}")
    elif like.rated_power_is_estimate:
        lines.append("    # rated_power is an estimate from the GPUs' power limits: see the server's data sheet")
    lines += [f"    defaults: {{{', '.join(shared)}}}", "    nodes:"]
    for node in nodes:
        lines += [f"      # {node.name}: {comment(note)}" for note in node.notes]
        lines.append(f"      - {_node(node, like, runtime, user)}")
    return [*lines, "    flavors:", *_flavors(name, nodes, like), ""]


def _typical(nodes: list[Discovered]) -> Discovered:
    """Return the most frequent kind of node among them; of equally frequent ones the larger."""
    counts = Counter((n.gpus, n.cores, n.memory_mib) for n in nodes)
    kind = max(counts, key=lambda k: (counts[k], k))
    return next(n for n in nodes if (n.gpus, n.cores, n.memory_mib) == kind)


def _node(node: Discovered, like: Discovered, runtime: str, user: str | None) -> str:
    fields = {
        "address": scalar(node.host.address) if node.host.address != node.name else None,
        "user": scalar(node.host.user) if node.host.user and node.host.user != user else None,
        "port": str(node.host.port) if node.host.port else None,
        "gpus": str(node.gpus) if node.gpus != like.gpus else None,
        "cores": str(node.cores) if node.cores != like.cores else None,
        "memory": _memory(node.memory_mib) if _memory(node.memory_mib) != _memory(like.memory_mib) else None,
        "rated_power": power(node.rated_power_w) if node.rated_power_w not in (None, like.rated_power_w) else None,
        "runtime": node.runtime.value if node.runtime.value != runtime else None,
    }
    own = "".join(f", {key}: {value}" for key, value in fields.items() if value is not None)
    return f"{{name: {scalar(node.name)}{own}}}" if own else scalar(node.name)


def _flavors(partition: str, nodes: list[Discovered], like: Discovered) -> list[str]:
    """Return flavors of a quarter, a half, one and two servers (GIST paper, Table 2), where they come out whole."""
    same = [n for n in nodes if (n.gpus, n.cores) == (like.gpus, like.cores)]
    mib = min(_declared_mib(n.memory_mib) for n in same)
    lines = []
    for name, times, part, hours in _FLAVORS:
        if times > len(same) or like.gpus % part or mib < part or (not like.gpus and like.cores < part):
            continue
        gpus, cores = like.gpus * times // part, max(1, like.cores // part) * times
        memory = _memory(mib // part) if times == 1 else memory_exact(mib * times)
        flavor = f"{{gpus: {gpus}, cores: {cores}, memory: {memory}, time: {hours}h}}"
        lines.append(f"      {scalar(f'{name}-{partition}')}: {flavor}")
    return lines


def _failed(failures: Iterable[NotDiscovered]) -> list[str]:
    lines = []
    for failure in failures:
        lines += [f"# - {comment(failure.host.typed)}    # {comment(failure.reason)}"]
        lines += [f"#   {comment(failure.hint)}"] if failure.hint else []
    return ["# These did not respond. Add them to a partition's nodes once they do:", *lines] if lines else []


def _declared_mib(mib: int) -> int:
    """Return the MiB that `_memory` writes: whole GiB from one GiB on."""
    return mib // 1024 * 1024 if mib >= 1024 else mib


def _memory(mib: int) -> str:
    return f"{mib // 1024}G" if mib >= 1024 else f"{mib}M"


def memory_exact(mib: int) -> str:
    """MiB as a value of ``memory``."""
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def power(watts: float | None) -> str:
    """Format watts as a value of ``rated_power``."""
    return f"{(watts or 0) / 1000:g}kW"


def _gib(mib: int | None) -> int | None:
    return None if mib is None else round(mib / 1024)


def scalar(text: str) -> str:
    """Return a text as YAML, quoted where it must be."""
    return text if _PLAIN.fullmatch(text) and text not in _NULLS else json.dumps(text, ensure_ascii=False)


def comment(text: str) -> str:
    """Return a text as a part of a comment."""
    return "".join(c if c.isprintable() else " " for c in text)
