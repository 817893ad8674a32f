"""What Slurm says of its nodes, partitions and limits, as the text of an inventory.yaml. Changes nothing there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from gpusched.bootstrap.discover import Discovered, Host, Outcome, discover
from gpusched.bootstrap.write import HEAD_SETTINGS, comment, memory_exact, power, scalar, topology_text
from gpusched.config.fields import MAX_GPUS, expand_hosts, is_name
from gpusched.errors import GpuschedError
from gpusched.model.slurm import SlurmNode, SlurmPartition
from gpusched.model.topology import Topology
from gpusched.model.units import count_of
from gpusched.slurm.accounts import admin_levels, may_manage
from gpusched.slurm.commands import Slurm
from gpusched.views.common import compress_names

SAMPLE = 16
"""So many nodes are asked first; where none of them answers, SSH is taken to be closed."""
_HEAD = """\
# Written by `gpusched init --slurm` from what Slurm {version} says of its nodes, partitions and limits; nothing was
# changed there. Look it over, change what you like, then run `gpusched check`. All keys are explained in the
# inventory.yaml of gpusched's repository, and what follows in docs/guides/slurm.md.

engine: slurm                      # jobs are Slurm's: sbatch, scancel. gpusched looks on, until it is let do more

"""
_LOST = "utilization, power, energy and foreign processes are unknown there"


class SlurmSite(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says. ``jobs``: partition -> how many it knows now; ``admins``: its operators and administrators."""

    version: str
    partitions: tuple[SlurmPartition, ...]
    nodes: tuple[SlurmNode, ...]
    jobs: Mapping[str, int] = {}
    admins: tuple[str, ...] = ()


class ChosenNodes(msgspec.Struct, frozen=True):
    """Partition -> its nodes, each node in one; partitions that have none -> why; partition -> others of its nodes."""

    nodes: Mapping[str, tuple[SlurmNode, ...]]
    left_out: Mapping[str, str]
    shared: Mapping[str, Mapping[str, tuple[str, ...]]]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know, a line each."""
        also = (
            f"{compress_names(names)} {'is' if len(names) == 1 else 'are'} in Slurm's {own} and {other}; here in {own}"
            for own, others in self.shared.items()
            for other, names in others.items()
        )
        return (*also, *(f"partition {name} is excluded: {why}" for name, why in self.left_out.items()))


def read_site(slurm: Slurm) -> SlurmSite:
    """Return all that `inventory_of_site` needs.

    Raises:
        GpuschedError: Slurm does not answer.
    """
    jobs = Counter(name for job in slurm.jobs() if job.gpus for name in job.partitions)
    try:
        levels = admin_levels(slurm)
    except GpuschedError:
        levels = {}  # without slurmdbd there are no admins
    return SlurmSite(
        version=slurm.config().get("SLURM_VERSION", ""),
        partitions=tuple(slurm.partitions()),
        nodes=tuple(slurm.nodes()),
        jobs=jobs,
        admins=tuple(sorted(u for u, level in levels.items() if may_manage(level) and u != "root")),
    )


def choose(site: SlurmSite) -> ChosenNodes:
    """Which partition a node belongs to here, where Slurm has it in several.

    That of the most jobs with GPUs that Slurm knows now has all of its nodes, then that of the next; between equals,
    Slurm's default, then that with the most nodes. Partitions without GPUs are left out where others have some.

    Raises:
        GpuschedError: No node is left.
    """
    known = {node.name: node for node in site.nodes if is_name(node.name)}
    left_out = {}
    has: dict[str, list[SlurmNode]] = {}
    for partition in site.partitions:
        has[partition.name] = sorted((known[n] for n in partition.nodes if n in known), key=lambda n: _natural(n.name))
    any_gpus = any(node.gpus for node in known.values())
    order = sorted(
        site.partitions,
        key=lambda p: (-site.jobs.get(p.name, 0), p.state != "UP", not p.is_default, -len(has[p.name])),
    )
    taken: dict[str, str] = {}
    chosen: dict[str, tuple[SlurmNode, ...]] = {}
    shared: dict[str, dict[str, tuple[str, ...]]] = {}
    for name in (p.name for p in order):
        nodes = has[name]
        own = tuple(node for node in nodes if node.name not in taken)
        if not is_name(name):
            left_out[name] = "names may only have letters, digits, '.', '_', '-'"
        elif not nodes:
            left_out[name] = "it has no nodes"
        elif any_gpus and not any(node.gpus for node in nodes):
            left_out[name] = f"none of its {count_of(len(nodes), 'node')} has GPUs"
        elif not own:
            left_out[name] = f"its nodes are in {', '.join(dict.fromkeys(taken[n.name] for n in nodes))}"
        else:
            chosen[name] = own
            taken |= dict.fromkeys((node.name for node in own), name)
        for node in nodes:
            owner = taken.get(node.name, name)
            if owner != name:
                others = shared.setdefault(owner, {})
                others[name] = (*others.get(name, ()), node.name)
    if not chosen:
        raise GpuschedError("Slurm has no node that can be declared; nothing was written", "see scontrol show node")
    return ChosenNodes({p.name: chosen[p.name] for p in site.partitions if p.name in chosen}, left_out, shared)


def ask_nodes(
    chosen: ChosenNodes, user: str | None, port: int | None, key: str | None, on_answer: Callable[[Outcome], None]
) -> dict[str, Outcome]:
    """Ask the nodes over SSH what they are, by Slurm's names. Nothing changes there but the cached probe.

    Where none of the first `SAMPLE` answers, the others are not asked.
    """
    hosts = [Host(n.name, n.address, port=port) for nodes in chosen.nodes.values() for n in nodes]
    first = hosts[:: max(1, len(hosts) // SAMPLE)][:SAMPLE]
    outcomes_by_host: dict[str, Outcome] = {}
    for some in (first, [host for host in hosts if host not in first]):
        # If no node of the first group answered, a key or an account is wrong: do not ask all the others in vain.
        is_reachable = any(isinstance(outcome, Discovered) for outcome in outcomes_by_host.values())
        if some and (not outcomes_by_host or is_reachable):
            outcomes = discover(some, user=user, key=key, on_progress=lambda _, outcome: on_answer(outcome))
            outcomes_by_host |= {host.typed: outcome for host, outcome in zip(some, outcomes, strict=True)}
    return outcomes_by_host


def without_ssh(chosen: ChosenNodes, answers: Mapping[str, Outcome]) -> tuple[str, ...]:
    """Return a line on what is unknown because nodes were not asked or did not answer; none if all did."""
    count = sum(len(nodes) for nodes in chosen.nodes.values())
    lost = count - sum(isinstance(answer, Discovered) for answer in answers.values())
    if not lost:
        return ()
    return (f"{lost} of {count_of(count, 'node')} not probed over SSH (transport: none): {_LOST}",)


def inventory_of_site(
    site: SlurmSite,
    chosen: ChosenNodes,
    answers: Mapping[str, Outcome],
    *,
    user: str | None = None,
    port: int | None = None,
    key: str | None = None,
    topology: Topology | None = None,
) -> str:
    """Return the text of the inventory. ``answers``: what nodes said over SSH, by Slurm's names.

    ``user``, ``port`` and ``key`` are those with which they were asked.
    """
    found = {name: answer for name, answer in answers.items() if isinstance(answer, Discovered)}
    lines = [_HEAD.format(version=site.version).rstrip("\n"), "", *HEAD_SETTINGS]
    lines.append(f"  admins: [{', '.join(map(scalar, site.admins))}]" if site.admins else "  # admins: [alice]")
    lines[-1] = (
        f"{lines[-1]:<34} # "
        + ("Slurm's operators and administrators; may" if site.admins else "may")
        + " change policies"
    )
    access = {"user": user, "port": port, "key": key} if found else {}
    own = [f"  {name}: {scalar(str(value))}" for name, value in access.items() if value]
    own += [] if found else [f"  # No node is read over SSH: {_LOST}", "  transport: none"]
    lines += ["", "defaults:", *own] if own else []
    lines += ["", "partitions:"]
    limits = {partition.name: partition.max_time_s for partition in site.partitions}
    for name, nodes in chosen.nodes.items():
        lines += [*_partition(name, nodes, limits[name], found, chosen.shared.get(name, {})), ""]
    if chosen.left_out:
        lines += ["# Partitions of Slurm that are not here:"]
        lines += [f"# - {comment(name)}: {why}" for name, why in chosen.left_out.items()]
    lines += [*([""] if lines[-1] else []), topology_text(topology)] if topology else []
    return "\n".join(lines).rstrip("\n") + "\n"


class _NodeShape(msgspec.Struct, frozen=True):
    """What nodes of one line have in common."""

    gpus: int
    gpu_type: str
    cores: int
    memory_mib: int
    rated_power_w: float | None
    asked: bool


def _shape(node: SlurmNode, found: Mapping[str, Discovered]) -> _NodeShape:
    """As Slurm has it; the rest as the node says."""
    answer = found.get(node.name)
    types = Counter({name: number for name, number in node.gpus.items() if name})
    kind = types.most_common(1)[0][0] if types else (answer.gpu_type if answer and node.gpus else "")
    return _NodeShape(
        gpus=min(sum(node.gpus.values()), MAX_GPUS),
        gpu_type=kind,
        cores=max(1, node.cpus),
        memory_mib=max(1, node.memory_mib),
        rated_power_w=answer.rated_power_w if answer else None,
        asked=answer is not None or not found,
    )


def _partition(
    name: str,
    nodes: Sequence[SlurmNode],
    max_time_s: int | None,
    found: Mapping[str, Discovered],
    shared: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    shapes = {node.name: _shape(node, found) for node in nodes}
    like = max(Counter(shapes.values()).items(), key=lambda item: item[1])[0]
    yield f"  {scalar(name)}:"
    yield from (
        f"    # {compress_names(names)}: also in Slurm's partition {comment(other)}" for other, names in shared.items()
    )
    yield "    policy: easy"
    if max_time_s is not None:
        yield f"    max_time: {_duration(max_time_s)}"
    if like.rated_power_w is None:
        why = "(of a whole server, such as 6.5kW) is not known; add it to defaults for `gpusched power`"
        yield f"    # rated_power {why}"
    elif any(found[n.name].rated_power_is_estimate for n in nodes if n.name in found):
        yield "    # rated_power is an estimate from the GPUs' power limits: see the server's data sheet"
    yield f"    defaults: {{{', '.join(f'{key}: {value}' for key, value in _fields(like).items())}}}"
    yield "    nodes:"
    yield from (f"      # {node.name}: {comment(note)}" for node in nodes for note in _notes(node, found))
    if any(not shape.asked for shape in shapes.values()):
        yield f"      # transport: none: not read over SSH; {_LOST}"
    for shape in dict.fromkeys(shapes.values()):
        own = {key: value for key, value in _fields(shape).items() if _fields(like).get(key) != value}
        own |= {} if shape.asked else {"transport": "none"}
        for names, addresses in _ranges(node for node in nodes if shapes[node.name] == shape):
            fields = {"address": scalar(addresses)} if addresses else {}
            words = "".join(f", {key}: {value}" for key, value in (fields | own).items())
            yield f"      - {{name: {scalar(names)}{words}}}" if words else f"      - {scalar(names)}"


def _fields(shape: _NodeShape) -> dict[str, str]:
    found = {"gpus": str(shape.gpus), "cores": str(shape.cores), "memory": memory_exact(shape.memory_mib)}
    found |= {"gpu_type": scalar(shape.gpu_type)} if shape.gpu_type else {}
    return found | ({"rated_power": power(shape.rated_power_w)} if shape.rated_power_w else {})


def _notes(node: SlurmNode, found: Mapping[str, Discovered]) -> Iterator[str]:
    gpus, answer = sum(node.gpus.values()), found.get(node.name)
    if gpus > MAX_GPUS:
        yield f"Slurm lists {count_of(gpus, 'GPU')}; at most {MAX_GPUS} can be declared"
    if len(node.gpus) > 1:
        yield f"different GPUs in one server: {', '.join(f'{n} {t}' for t, n in node.gpus.items())}"
    if answer is not None and answer.gpus != gpus:
        yield f"Slurm lists {count_of(gpus, 'GPU')}, the driver sees {answer.gpus}"


# Ranges


def _ranges(nodes: Iterable[SlurmNode]) -> Iterator[tuple[str, str]]:
    """Names and addresses ("": the names) by lines: a range of each where they go together, else node by node."""
    alike: dict[tuple[str, str], list[SlurmNode]] = {}
    for node in nodes:
        behind = node.address.removeprefix(node.name)
        where = f"+{behind}" if behind != node.address else node.address.rstrip("0123456789")
        alike.setdefault((node.name.rstrip("0123456789"), where), []).append(node)
    for group in alike.values():
        names = _range([node.name for node in group])
        own = [node.address for node in group if node.address != node.name]
        behind = group[0].address.removeprefix(group[0].name)
        addresses = names + behind if own and behind != group[0].address else _range(own) if own else ""
        if names and bool(own) == bool(addresses):
            yield names, addresses
        else:
            yield from ((node.name, "" if node.name == node.address else node.address) for node in group)


def _range(texts: list[str]) -> str:
    """Return ``dgx[1-3,5]``; "" where no one range has just these in their order."""
    found = compress_names(texts)
    try:
        return found if expand_hosts(found) == texts else ""
    except ValueError:
        return ""


def _natural(name: str) -> list[tuple[str, int]]:
    return [(word, 0) if i % 2 == 0 else ("", int(word)) for i, word in enumerate(re.split(r"([0-9]+)", name))]


def _duration(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
