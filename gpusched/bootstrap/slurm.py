"""What Slurm says of its nodes, partitions and limits, as the text of an inventory.yaml. Changes nothing there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gpusched.bootstrap.discover import Discovered, Host, Outcome
from gpusched.bootstrap.write import HEAD_SETTINGS, comment, memory_exact, power, scalar, topology_text
from gpusched.config.fields import MAX_GPUS, expand_hosts, is_name
from gpusched.errors import GpuschedError
from gpusched.model.slurm import SlurmNode, SlurmPartition
from gpusched.model.topology import Topology
from gpusched.slurm.commands import Slurm
from gpusched.views.common import compress_names

SAMPLE = 16
"""So many nodes are asked first; where none of them answers, SSH is taken to be closed."""
_HEAD = """\
# Written by `gpusched init --slurm` from what Slurm {version} says of its nodes, partitions and limits; nothing was changed
# there. Look it over, change what you like, then run `gpusched check`. All keys are explained in the inventory.yaml of
# gpusched's repository, and what follows in docs/guides/slurm.md.

engine: slurm                      # jobs are Slurm's: sbatch, scancel. gpusched looks on, until it is let do more

"""
_NO_SSH = "nothing is read over SSH: utilization, power, energy and foreign processes are unknown"


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says. ``jobs``: partition -> how many it knows now; ``admins``: its operators and administrators."""

    version: str
    partitions: tuple[SlurmPartition, ...]
    nodes: tuple[SlurmNode, ...]
    jobs: Mapping[str, int] = {}
    admins: tuple[str, ...] = ()


class Chosen(msgspec.Struct, frozen=True):
    """Partition -> its nodes, each node in one; partitions that have none -> why; partition -> others of its nodes."""

    nodes: Mapping[str, tuple[SlurmNode, ...]]
    left_out: Mapping[str, str]
    shared: Mapping[str, Mapping[str, tuple[str, ...]]]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know, a line each."""
        also = (
            f"{compress_names(names)} of {own} {'is' if len(names) == 1 else 'are'} in {other}, too"
            for own, others in self.shared.items()
            for other, names in others.items()
        )
        return (*also, *(f"{name} is left out: {why}" for name, why in self.left_out.items()))


def read_site(slurm: Slurm) -> Site:
    """All that `inventory_of_site` needs.

    Raises:
        GpuschedError: Slurm does not answer.
    """
    jobs = Counter(name for job in slurm.jobs() if job.gpus for name in job.partitions)
    try:
        admins = slurm.admins()
    except GpuschedError:
        admins = ()  # without slurmdbd nobody is any
    return Site(
        version=slurm.version(),
        partitions=tuple(slurm.partitions()),
        nodes=tuple(slurm.nodes()),
        jobs=jobs,
        admins=admins,
    )


def choose(site: Site) -> Chosen:
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
            left_out[name] = "names here are letters, digits, '.', '_', '-'"
        elif not nodes:
            left_out[name] = "it has no nodes"
        elif any_gpus and not any(node.gpus for node in nodes):
            left_out[name] = f"none of its {len(nodes)} nodes has GPUs"
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
        raise GpuschedError("Slurm names no node that could be declared, so nothing is written", "see scontrol show node")
    return Chosen({p.name: chosen[p.name] for p in site.partitions if p.name in chosen}, left_out, shared)


def hosts_of(chosen: Chosen, port: int | None) -> list[Host]:
    """Where to ask the nodes."""
    return [Host(n.name, n.address, port=port) for nodes in chosen.nodes.values() for n in nodes]


def inventory_of_site(
    site: Site,
    chosen: Chosen,
    answers: Mapping[str, Outcome],
    *,
    user: str | None = None,
    port: int | None = None,
    key: str | None = None,
    topology: Topology | None = None,
) -> str:
    """The text of the inventory. ``answers``: what the nodes said over SSH, by Slurm's names; of others nothing is read.

    ``user``, ``port`` and ``key`` are those with which they were asked.
    """
    found = {name: answer for name, answer in answers.items() if isinstance(answer, Discovered)}
    lines = [_HEAD.format(version=site.version).rstrip("\n"), "", *HEAD_SETTINGS]
    lines.append(f"  admins: [{', '.join(map(scalar, site.admins))}]" if site.admins else "  # admins: [alice]")
    lines[-1] = f"{lines[-1]:<34} # " + ("Slurm's operators and administrators; may" if site.admins else "may") + " change policies"
    told = {"user": user, "port": port, "key": key} if found else {}
    own = [f"  {name}: {scalar(str(value))}" for name, value in told.items() if value]
    own += [] if found else [f"  transport: none                  # {_NO_SSH}"]
    lines += ["", "defaults:", *own] if own else []
    lines += ["", "partitions:"]
    limits = {partition.name: partition.max_time_s for partition in site.partitions}
    for name, nodes in chosen.nodes.items():
        lines += [*_partition(name, nodes, limits[name], found, chosen.shared.get(name, {})), ""]
    if chosen.left_out:
        lines += ["# Partitions of Slurm that are not here:"]
        lines += [f"# - {comment(name)}: {why}" for name, why in chosen.left_out.items()]
    lines += ["", topology_text(topology)] if topology else []
    return "\n".join(lines).rstrip("\n") + "\n"


class _Shape(msgspec.Struct, frozen=True):
    """What nodes of one line have in common."""

    gpus: int
    gpu_type: str
    cores: int
    memory_mib: int
    rated_power_w: float | None
    asked: bool


def _shape(node: SlurmNode, found: Mapping[str, Discovered]) -> _Shape:
    """As Slurm has it; the rest as the node says."""
    answer = found.get(node.name)
    types = Counter({name: number for name, number in node.gpus.items() if name})
    kind = types.most_common(1)[0][0] if types else (answer.gpu_type if answer and node.gpus else "")
    return _Shape(
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
    yield from (f"    # {compress_names(names)}: also in Slurm's partition {comment(other)}" for other, names in shared.items())
    yield "    policy: easy"
    if max_time_s is not None:
        yield f"    max_time: {_duration(max_time_s)}"
    if like.rated_power_w is None:
        yield "    # rated_power (of a whole server, such as 6.5kW) is not known; add it to defaults for `gpusched power`"
    elif any(found[n.name].rated_power_is_estimate for n in nodes if n.name in found):
        yield "    # rated_power is an estimate from the GPUs' power limits: see the server's data sheet"
    yield f"    defaults: {{{', '.join(f'{key}: {value}' for key, value in _fields(like).items())}}}"
    yield "    nodes:"
    yield from (f"      # {node.name}: {comment(note)}" for node in nodes for note in _notes(node, found))
    if any(not shape.asked for shape in shapes.values()):
        yield f"      # transport: none: {_NO_SSH}"
    for shape in dict.fromkeys(shapes.values()):
        own = {key: value for key, value in _fields(shape).items() if _fields(like).get(key) != value}
        own |= {} if shape.asked else {"transport": "none"}
        for run in _runs([node for node in nodes if shapes[node.name] == shape]):
            fields = {"address": scalar(_range([n.address for n in run]))} if run[0].address != run[0].name else {}
            words = "".join(f", {key}: {value}" for key, value in (fields | own).items())
            names = scalar(_range([n.name for n in run]))
            yield f"      - {{name: {names}{words}}}" if words else f"      - {names}"


def _fields(shape: _Shape) -> dict[str, str]:
    found = {"gpus": str(shape.gpus), "cores": str(shape.cores), "memory": memory_exact(shape.memory_mib)}
    found |= {"gpu_type": scalar(shape.gpu_type)} if shape.gpu_type else {}
    return found | ({"rated_power": power(shape.rated_power_w)} if shape.rated_power_w else {})


def _notes(node: SlurmNode, found: Mapping[str, Discovered]) -> Iterator[str]:
    gpus, answer = sum(node.gpus.values()), found.get(node.name)
    if gpus > MAX_GPUS:
        yield f"Slurm gives it {gpus} GPUs; at most {MAX_GPUS} can be declared"
    if len(node.gpus) > 1:
        yield f"different GPUs in one server: {', '.join(f'{n} {t}' for t, n in node.gpus.items())}"
    if answer is not None and answer.gpus != gpus:
        yield f"Slurm gives it {gpus} GPUs, the driver sees {answer.gpus}"


# Ranges


def _runs(nodes: Iterable[SlurmNode]) -> list[list[SlurmNode]]:
    """Nodes that can stand in one line: names in a range, and addresses that are the names or are in a range, too."""
    runs: list[list[SlurmNode]] = []
    for node in nodes:
        if runs and _continues(runs[-1], node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _continues(run: Sequence[SlurmNode], node: SlurmNode) -> bool:
    last = run[-1]
    same = last.name == last.address
    if same != (node.name == node.address):
        return False
    texts = [[n.name for n in (*run[:1], last, node)]] + [[n.address for n in (*run[:1], last, node)]] * (not same)
    return all(_counts_on(*words) for words in texts)


def _counts_on(first: str, last: str, text: str) -> bool:
    """Whether ``text`` is the next after ``last`` in the range that begins with ``first``: in one number."""
    began, before, now = (re.split(r"([0-9]+)", word) for word in (first, last, text))
    if not len(began) == len(before) == len(now):
        return False
    differs = [i for i, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
    if len(differs) != 1 or differs[0] % 2 == 0 or len(began[differs[0]]) > 9:
        return False
    at = differs[0]
    return began[:at] + began[at + 1 :] == now[:at] + now[at + 1 :] and now[at] == str(int(before[at]) + 1).zfill(
        len(began[at])
    )


def _range(texts: Sequence[str]) -> str:
    """``dgx[1-4]`` of texts that count on in one number."""
    if len(texts) == 1:
        return texts[0]
    first, last = (re.split(r"([0-9]+)", text) for text in (texts[0], texts[-1]))
    at = next(i for i, (a, b) in enumerate(zip(first, last, strict=True)) if a != b)
    found = "".join([*first[:at], f"[{first[at]}-{last[at]}]", *first[at + 1 :]])
    assert expand_hosts(found) == list(texts)
    return found


def _natural(name: str) -> list[tuple[str, int]]:
    return [(word, 0) if i % 2 == 0 else ("", int(word)) for i, word in enumerate(re.split(r"([0-9]+)", name))]


def _duration(seconds: int) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
