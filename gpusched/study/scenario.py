"""Scenario files: all that a replay needs, in YAML, read into the request that ``replay``'s options make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpusched.config import fields
from gpusched.config.topology import load_topology, read_topology
from gpusched.config.yamlfile import Value, parse_file
from gpusched.errors import UsageError
from gpusched.model.slices import PROFILE, slice_index
from gpusched.model.slicetables import published
from gpusched.model.snapshot import SliceView
from gpusched.model.suggest import did_you_mean
from gpusched.model.topology import Topology
from gpusched.model.units import count_of
from gpusched.sched.slices.tree import arranged
from gpusched.sim.outages import read_node_list
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.study.metrics import Metrics
from gpusched.study.options import ReplayRequest
from gpusched.traces.workload import PHILLY_LIKE, Workload, load_workload, read_workload

SHIPPED = PHILLY_LIKE.parent
FIGURES = tuple(name for name in Metrics.__struct_fields__ if name not in ("users", "groups"))
MAX_NODES = 1_000_000
_TEXTS = ("format", "vc", "placement", "since", "until", "gpu_type", "reference_gpu_type", "share", "resizable", "cpus",
          "mem", "estimates")  # fmt: skip
_FILES = ("inventory", "outages", "reservations", "power", "restart_costs")
_SLICES = "a list of the GPUs that are cut, such as [[3g.40gb, 3g.40gb], [7g.80gb]]"
_EXPECTED = "a mapping such as {workload: jobs.yaml, nodes: 4, policies: [fifo, easy]}"
_NODE: fields.Fields = {
    "count": ("count", lambda value: value.whole(1, MAX_NODES)),
    "gpu_type": ("gpu_type", fields.name),
    "partition": ("partition", fields.name),
    "gpus": ("gpus", lambda value: value.whole(0, 1_000_000, "a number of GPUs")),
    **{key: fields.FLAVOR[key] for key in ("cores", "memory")},
    "slices": ("slices", lambda value: value.items(_SLICES)),
    "mig": ("mig", lambda value: value.choice(("fixed", "on-demand"))),
}


def load_scenario(path: Path | str) -> ReplayRequest:
    """Return the request of a scenario file, or of a built-in one by name; its files are relative to it.

    Raises:
        FileError: The first thing wrong with it (file, line, key, found and expected).
        UsageError: There is none of this name.
    """
    file = Path(path)
    if not file.exists() and file.parent == Path() and not file.suffix:
        if not (shipped := SHIPPED / f"{path}.yaml").exists():
            names = sorted(built_in.stem for built_in in SHIPPED.glob("*.yaml"))
            raise UsageError(f"no file, and no built-in scenario, named '{path}'{did_you_mean(str(path), names)}")
        file = shipped
    root = parse_file(file, "a scenario")
    found = fields.read(root, _keys(file.parent), _EXPECTED)
    if found.keys() == {"paper"}:
        raise root.error(f"a workload; this is for gpusched reproduce {file.stem}", "only what a paper's figures need")
    request = ReplayRequest(**{name: value for name, value in found.items() if name != "paper"})
    for name, value in root.fields(_EXPECTED).items():
        if name == "published" and (others := request.published.keys() - set(request.policies)):
            raise value.error("policies of this scenario", f"the policy {min(others)}")
    return request


def with_options(scenario: ReplayRequest, options: ReplayRequest, given: Collection[str] = ()) -> ReplayRequest:
    """Return the scenario with these options replaced; traces replace a workload, too.

    ``given``: fields that were given, though perhaps with their default.
    """
    plain = ReplayRequest()
    said = {name: getattr(options, name) for name in ReplayRequest.__struct_fields__}
    said = {name: value for name, value in said.items() if name in given or value != getattr(plain, name)}
    if others := [name for name in said if name not in ("policies", "seeds", "workers", "backend", "strict")]:
        said["about"] = (*scenario.about, f"not as the scenario says: {', '.join(others)}")
    if "traces" in said:
        said["workload"] = None
    return msgspec.structs.replace(scenario, **said)


def _keys(folder: Path) -> fields.Fields:
    """Return the keys of a file in this folder."""

    def path(value: Value) -> str:
        return str(folder / value.text("the name of a file"))

    def policy(text: str) -> str:
        return str(folder / text) if text.endswith((".yaml", ".yml")) or "/" in text else text

    def paths(value: Value) -> tuple[str, ...]:
        return (path(value),) if value.is_text else tuple(map(path, value.items("names of files")))

    def policies(value: Value) -> tuple[str, ...]:
        return tuple(policy(item.text("the name or file of a policy")) for item in value.items("a list of policies"))

    def published(value: Value) -> dict[str, Mapping[str, float]]:
        return {policy(name): _figures(of) for name, of in value.fields("a mapping: policy -> figures").items()}

    def workload(value: Value) -> Workload:
        return load_workload(path(value)) if value.is_text else read_workload(value)

    def topology(value: Value) -> Topology:
        return load_topology(path(value)) if value.is_text else read_topology(value)

    def node_list(value: Value) -> Pool:
        if value.is_text:
            return read_node_list(Path(path(value)))
        expected = "a file, or nodes such as [{count: 2, gpus: 8}]"
        if not (nodes := [node for item in value.items(expected) for node in _nodes(item)]):
            raise value.error(expected)
        return Pool.of(nodes)

    readers: dict[str, Callable[[Value], Any]] = {
        **{name: lambda value: value.text("text") for name in _TEXTS},
        **dict.fromkeys(_FILES, path),
        **dict.fromkeys(("limits", "quotas", "strict"), lambda value: value.flag()),
        **dict.fromkeys(("traces", "profiles"), paths),
        "about": lambda value: (value.text("a sentence"),),
        "nodes": lambda value: value.whole(1, MAX_NODES),
        "gpus_per_node": lambda value: value.whole(1, 1_000_000),
        "load": lambda value: value.number(1e-6, 1000),
        "seeds": lambda value: tuple(item.whole(0, 1 << 31) for item in value.items("a list of seeds")),
        "policies": policies, "published": published, "workload": workload, "topology": topology,
        "node_list": node_list,
        "paper": lambda value: value.fields("what `gpusched reproduce` needs, see `study.paper`"),
    }  # fmt: skip
    seconds = {"restart": ("restart_s", fields.duration), "backfill_every": ("backfill_every_s", fields.duration)}
    return {**{name: (name, reader) for name, reader in readers.items()}, **seconds}


def _figures(value: Value) -> dict[str, float]:
    return {name: of.number(-1e15, 1e15) for name, of in value.fields("figures of a replay", FIGURES).items()}


def _nodes(value: Value) -> list[NodeSpec]:
    found = fields.read(value, _NODE, "nodes such as {count: 2, gpus: 8}")
    if "gpus" not in found:
        raise value.missing("gpus", "how many GPUs each of them has")
    count, cut, mig = found.pop("count", 1), found.pop("slices", []), found.pop("mig", "fixed")
    node = NodeSpec(**found)
    if mig == "on-demand":
        if not (table := published(node.gpu_type)):
            raise value.error("a gpu_type that can be cut into MIG slices, such as A100-80GB", node.gpu_type)
        node = node._replace(cuttable=tuple((gpu, table) for gpu in range(len(cut), node.gpus)))
    if len(cut) > node.gpus:
        raise value.error(f"slices of at most {count_of(node.gpus, 'GPU')}", f"of {len(cut)}")
    slices = tuple(one for gpu, of in enumerate(cut) for one in _cut(of, gpu, node.gpu_type))
    return [node._replace(slices=slices)] * count


def _cut(value: Value, gpu: int, gpu_type: str) -> list[SliceView]:
    """Return the slices of a GPU of a node."""
    every = value.items("profiles such as [3g.40gb, 2g.20gb]")
    names = [one.text("a profile such as 1g.10gb", PROFILE) for one in every]
    geometry = arranged(published(gpu_type, names), tuple(names))
    if geometry is None:
        raise value.error(f"profiles that fit on one GPU {gpu_type}".rstrip(), ", ".join(names))
    return [SliceView(slice_index(gpu, start), name) for name, start in geometry]
