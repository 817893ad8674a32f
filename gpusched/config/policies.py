"""policies/*.yaml -> PolicySpec. A site's own folder precedes the included policies.

A trained policy NAME.yaml has its weights in the folder NAME beside it. That folder holds a ``policy.yaml`` as well,
and so is the policy itself: it can be moved elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, get_args

import msgspec

from gpusched.config.paths import expanded
from gpusched.config.yamlfile import Value, parse_file, suggestion
from gpusched.errors import FileError, UnreadableFile, UsageError, Warnings
from gpusched.model.policy import (
    AGENTS,
    MAPPING_PLACES,
    ORDERS,
    SIMPLE_BACKFILLS,
    AgentTraits,
    Backfill,
    Mapping,
    Place,
    PolicySpec,
    PreemptionSettings,
    Resizing,
    Sizing,
    Ties,
    traits_of,
)
from gpusched.model.resources import Inventory
from gpusched.model.units import parse_duration

BUILT_IN = Path(__file__).parents[1] / "data" / "policies"
POLICY, WEIGHTS = "policy.yaml", ".safetensors"  # of a trained policy's folder
DEFAULT_FALLBACK, SIZING_FALLBACK, PLACING_FALLBACK = (
    "easy",
    "elastic",
    "contention",
)  # of agents that choose sizes, nodes
MOST_SCHEDULERS = 16
_MAX_NAME_BYTES = 200  # with its suffix within what file systems allow


def policy_folders(inventory_path: Path | str) -> tuple[Path, ...]:
    """Return the folders that are searched for policies, in order.

    ``$GPUSCHED_POLICIES``, else ``policies/`` beside the inventory where there is one; then those that come along.

    Raises:
        UsageError: ``$GPUSCHED_POLICIES`` is not a folder.
    """
    if named := os.environ.get("GPUSCHED_POLICIES"):
        folder = expanded(named)
        if not folder.is_dir():
            raise UsageError(f"no policies: GPUSCHED_POLICIES names {folder}, which is not a folder")
        return folder, BUILT_IN
    beside = Path(inventory_path).absolute().parent / "policies"
    return (beside, BUILT_IN) if beside.is_dir() else (BUILT_IN,)


def names_in(folders: tuple[Path, ...]) -> list[str]:
    """Return the names of all policies in these folders, sorted."""
    return sorted(
        {file.stem for folder in folders for file in folder.glob("*.yaml")}
        | {file.parent.name for folder in folders for file in folder.glob(f"*/{POLICY}")}
    )


def load_policies(inventory: Inventory) -> dict[str, PolicySpec]:
    """Load the policy of every partition: partition name -> policy.

    Raises:
        FileError: A partition names one that does not exist, or its file is wrong.
    """
    folders = policy_folders(inventory.path)
    loaded: dict[str, PolicySpec] = {}
    for partition in inventory.partitions:
        if partition.policy not in loaded:
            file = policy_file(partition.policy, folders)
            if file is None:
                raise _unknown(inventory, partition.name, folders)
            loaded[partition.policy] = load_policy(file, folders)
    return {p.name: loaded[p.policy] for p in inventory.partitions}


def load_policy(path: Path | str, folders: tuple[Path, ...] = (BUILT_IN,)) -> PolicySpec:
    """Load the policy of a file, or of a trained policy's folder; it has the name of that.

    An agent's fallback is looked for in ``folders``, besides the file's own.

    Raises:
        FileError: The first thing wrong with it.
    """
    file = Path(path)
    trained = file if file.is_dir() else file.with_suffix("")
    file = file / POLICY if file.is_dir() else file
    stages = ("place", "backfill", "sizes")
    root = parse_file(file, "a policy")
    expected = "a mapping with order, place, backfill"
    known = ("order", "ties", *(_AGENT_KEYS if "agent" in root.fields(expected) else ("agent",)), *stages)
    fields = root.fields(expected, ("description", "mapping", "placement_wait", "resize", *known), _EARLIER_KEYS)
    chosen: dict[str, Any] = {
        key: fields[key].component(group, ours)
        for key, (group, ours) in _COMPONENTS.items()
        if key in fields
    }  # fmt: skip
    if "backfill" in fields:
        chosen["backfill"] = fields["backfill"].choice(get_args(Backfill))
    if "ties" in fields:
        if chosen.get("order") != "sjf-estimate":
            raise fields["ties"].error("this only with order: sjf-estimate", "it with another")
        chosen["ties"] = fields["ties"].choice(get_args(Ties))
    if "description" in fields:
        chosen["description"] = fields["description"].text("a sentence")
    if "mapping" in fields:
        if chosen.get("place") not in MAPPING_PLACES:
            raise fields["mapping"].error(f"this only with place: {' or '.join(MAPPING_PLACES)}", "it without")
        chosen["mapping"] = _mapping_of(fields["mapping"])
    if "placement_wait" in fields:
        if chosen.get("place") not in ("rack-wait", "contention"):
            raise fields["placement_wait"].error("this only with place: rack-wait or contention", "it without")
        wait = fields["placement_wait"].converted(_seconds_or_none, "a time, such as 24h; 0s: none")
        chosen["placement_wait_s"] = wait
    if "agent" in fields:
        chosen |= _agent_of(fields, trained, (file.parent, *folders))
    traits = traits_of(chosen.get("agent"), chosen.get("agent_traits"))
    sizing = traits.sizes
    if sizing:  # the agent chooses sizes; the file, or its fallback, says the rest
        behind = chosen["fallback"]
        if "sizes" in fields or behind.sizes == "base":
            key = "sizes" if "sizes" in fields else "fallback"
            raise fields[key].error(f"a fallback that chooses sizes, such as {SIZING_FALLBACK}")
        chosen = {k: getattr(behind, k) for k in ("order", "place", "backfill", "sizes", "resize")} | chosen
    if traits.places:
        if chosen.get("place", "contention") != "contention":
            raise fields["place"].error("contention, by which this agent goes")
        behind = chosen["fallback"]
        chosen = {k: getattr(behind, k) for k in ("order", "backfill", "placement_wait_s")} | chosen
        chosen["place"] = "contention"
    if "sizes" in fields and chosen["sizes"] != "base":
        if "agent" in fields or chosen.get("order", "fifo") != "fifo":
            raise fields["sizes"].error("this only with order: fifo and without an agent", "it with another")
    if "resize" in fields:
        if chosen.get("sizes", "base") == "base":
            raise fields["resize"].error("this only with a policy that chooses sizes", "it without")
        chosen["resize"] = _resizing_of(fields["resize"])
    place = chosen.get("place", "first-fit")
    others = place not in get_args(Place)
    if others and ("agent" in fields or chosen.get("sizes", "base") != "base"):
        ours = "a placement of gpusched's own with an agent, or with sizes that change"
        raise (fields["place"] if "place" in fields else fields["fallback"]).error(ours, f'"{place}"')
    own_pass = ("agent" in fields and not sizing) or place in (*MAPPING_PLACES, "contention") or others
    if own_pass and chosen.get("backfill") == "conservative":
        whose = "an agent" if "agent" in fields else f"place: {place}"
        where = fields["backfill"] if "backfill" in fields else fields["fallback"]
        raise where.error(
            f"{', '.join(SIMPLE_BACKFILLS[:-1])} or {SIMPLE_BACKFILLS[-1]} with {whose}", '"conservative"'
        )
    if chosen.get("order") == "sjf-estimate" and chosen.get("backfill") in ("easy", "conservative"):
        # reservations of pending jobs need times that are never exceeded: limits, not estimates
        raise fields["backfill"].error("none or skip with order: sjf-estimate")
    return _with_version(PolicySpec(name=trained.name, **chosen))


_EARLIER_KEYS = {"place_wait": "placement_wait"}  # of files of earlier versions, frozen ones too
_COMPONENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "order": ("orders", ORDERS), "place": ("placements", get_args(Place)), "sizes": ("sizings", get_args(Sizing))
}  # fmt: skip
_AGENT_KEYS = ("agent", "fallback", "budget", "preempt", "schedulers", "train")


def default_fallback(traits: AgentTraits) -> str:
    """Return the name of the policy that decides for an agent that cannot, unless its file names another."""
    return SIZING_FALLBACK if traits.sizes else PLACING_FALLBACK if traits.places else DEFAULT_FALLBACK


def _agent_of(fields: dict[str, Value], trained: Path, folders: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file's agent."""
    found: dict[str, Any] = {"agent": fields["agent"].component("agents", AGENTS), "folder": str(trained)}
    if found["agent"] not in AGENTS:
        found["agent_traits"] = _traits_of(found["agent"])
    traits = traits_of(found["agent"], found.get("agent_traits"))
    default = default_fallback(traits)
    name = fields["fallback"].text("a policy's name") if "fallback" in fields else default
    file = policy_file(name, folders)
    # looked at before it is loaded: its own fallback could be this very policy
    if file is None or file.is_dir() or "agent" in parse_file(file, "a policy").fields("a mapping"):
        names = sorted({f.stem for folder in folders for f in folder.glob("*.yaml")} - {"policy", trained.name})
        expected = f"a policy without an agent, such as {default}{suggestion(name, names)}"
        raise fields["fallback"].error(expected)
    found["fallback"] = load_policy(file)
    if "budget" in fields:
        found["budget_s"] = fields["budget"].converted(_seconds, "a time, such as 200ms")
    if "schedulers" in fields:
        if not traits.places:
            raise fields["schedulers"].error("this only with an agent that chooses nodes: topology", "it with another")
        found["schedulers"] = fields["schedulers"].whole(1, MOST_SCHEDULERS)
    if "preempt" in fields:
        found["preempt"] = _preempting_of(fields["preempt"])
    if "train" in fields:
        section = fields["train"].fields("a mapping of hyper-parameters")
        found["settings"] = {key: _plain(value) for key, value in section.items()}
    return found


def _traits_of(agent: str) -> AgentTraits:
    """Return the traits of another package's agent; if it does not work, the fallback decides, and a line says so."""
    from gpusched.config.plugins import ComponentError, installed

    try:
        component = installed("agents", agent)
        parts = component.load()
        traits = getattr(parts, "traits", None)
        if not isinstance(traits, AgentTraits):
            raise component.error(f"it is a {type(parts).__name__}, not gpusched.agents.base.AgentParts")
        if traits.places:
            raise component.error("only gpusched's own agents choose nodes (its traits have places)")
    except ComponentError as error:
        Warnings.give(f"{error.line()}; the fallback decides")
        return AgentTraits()
    return traits


def _mapping_of(section: Value) -> Mapping:
    """Read how jobs are mapped to nodes and GPU types."""
    numbers = {"floor": (0.0, 1.0), "user_share": (0.0, 1.0), "order_weight": (0.0, 1e6), "open_cost": (0.0, 1e6),
               "fragment_cost": (0.0, 1e6)}  # fmt: skip
    fields = section.fields("a mapping", ("window", "budget", *numbers, "speeds"))
    found: dict[str, Any] = {key: fields[key].number(*bounds) for key, bounds in numbers.items() if key in fields}
    if "window" in fields:
        found["window"] = fields["window"].whole(1, 10_000)
    if "budget" in fields:
        found["budget_s"] = fields["budget"].converted(_seconds, "a time, such as 200ms")
    if "speeds" in fields:
        patterns = fields["speeds"].fields("a mapping of job names to speeds by GPU type")
        found["speeds"] = {
            pattern: {name: speed.number(0.0, 1e9) for name, speed in by_type.fields("speeds by GPU type").items()}
            for pattern, by_type in patterns.items()
        }
    return Mapping(**found)


def _resizing_of(section: Value) -> Resizing:
    """Read the limits on resizes."""
    times = ("min_run", "start_timeout")
    fields = section.fields("a mapping with min_run, start_timeout, per_hour, gain", (*times, "per_hour", "gain"))
    found: dict[str, Any] = {
        f"{key}_s": fields[key].converted(_seconds_or_none, "a time, such as 10m; 0s: none")
        for key in times
        if key in fields
    }
    if "per_hour" in fields:
        found["per_hour"] = fields["per_hour"].whole(1, 3600)
    if "gain" in fields:
        found["gain"] = fields["gain"].number(0.0, 1e6)
    return Resizing(**found)


def _preempting_of(section: Value) -> PreemptionSettings:
    """Read the limits on preemption."""
    fields = section.fields("a mapping with min_run, per_hour, restart", ("min_run", "per_hour", "restart"))
    found: dict[str, Any] = {
        f"{key}_s": fields[key].converted(_seconds_or_none, "a time, such as 10m; 0s: none")
        for key in ("min_run", "restart")
        if key in fields
    }
    if "per_hour" in fields:
        found["per_hour"] = fields["per_hour"].whole(0, 3600)
    return PreemptionSettings(**found)


def _seconds_or_none(text: str) -> float:
    return 0.0 if text in ("0", "0s") else _seconds(text)


def _seconds(text: str) -> float:
    """Parse ``200ms``, or a duration as elsewhere."""
    if text.endswith("ms"):
        if not (number := float(text.removesuffix("ms"))) > 0:
            raise ValueError(text)
        return number / 1000
    return float(parse_duration(text))


def _plain(value: Value) -> Any:
    """Return a number where the text is one, else the text."""
    text = value.text("a number or a word")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _with_version(spec: PolicySpec) -> PolicySpec:
    """Add the digest of its content, and of its weights if any."""
    meaning: dict[str, Any] = {"order": spec.order, "place": spec.place, "backfill": spec.backfill}
    if spec.ties != "first":
        meaning["ties"] = spec.ties
    if spec.sizes != "base":
        meaning |= {"sizes": spec.sizes, "resize": msgspec.to_builtins(spec.resize)}
    if spec.place == "contention":
        meaning["place_wait_s"] = spec.placement_wait_s  # its earlier name: versions stay what they were
    if spec.place in MAPPING_PLACES:
        meaning["mapping"] = msgspec.to_builtins(spec.mapping)
    if spec.agent is not None:
        files = sorted(Path(spec.folder).glob(f"*{WEIGHTS}"))
        try:
            weights = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
        except OSError as error:  # it was replaced meanwhile, say
            raise UnreadableFile(str(error.filename), error.strerror or str(error), "weights") from None
        meaning |= {"agent": spec.agent, "fallback": spec.fallback and spec.fallback.version, "weights": weights}
        meaning |= {"budget_s": spec.budget_s, "train": spec.settings}
        if spec.traits.places:
            meaning["schedulers"] = spec.schedulers
        if (
            spec.preempt != PreemptionSettings()
        ):  # left out where it is the default, so that other policies keep their versions
            meaning["preempt"] = msgspec.to_builtins(spec.preempt)
    version = hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).hexdigest()[:12]
    return msgspec.structs.replace(spec, version=version)


def others_of(spec: PolicySpec) -> list[tuple[str, str]]:
    """Return the other packages' components that a policy or its fallback names: group and name of each."""
    known = {**_COMPONENTS, "agent": ("agents", tuple(AGENTS))}
    named = [
        (group, str(name))
        for one in (spec, spec.fallback)
        for key, (group, ours) in known.items()
        if (name := getattr(one, key, None)) is not None and name not in ours
    ]
    return list(dict.fromkeys(named))


def policy_file(name: str, folders: tuple[Path, ...]) -> Path | None:
    """Return the file (or trained policy's folder) of that name in the first folder that has one, if any."""
    if len(name.encode(errors="replace")) > _MAX_NAME_BYTES:
        return None
    for folder in folders:
        if (file := folder / f"{name}.yaml").is_file():
            return file
        if (folder / name / POLICY).is_file():
            return folder / name
    return None


def _unknown(inventory: Inventory, partition: str, folders: tuple[Path, ...]) -> FileError:
    names = names_in(folders)
    looked = " and ".join(str(f) for f in folders)
    entry = parse_file(inventory.path).fields("a mapping")["partitions"].fields("a mapping")[partition]
    value = entry.fields("a mapping").get("policy", entry)
    return value.error(f"one of {', '.join(names)} (of {looked}){suggestion(value.found().strip(chr(34)), names)}")
