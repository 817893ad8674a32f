"""The options of ``gpusched replay`` and ``gpusched reproduce``: one row each, of which the command line is made.

Each field with a `StudyOption` is an option; its annotation is the type of its value.
"""
# No `from __future__ import annotations`: the rows are read from the annotations. Names in quotes are not loaded here.

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from gpusched.errors import UsageError
from gpusched.model.units import parse_duration

if TYPE_CHECKING:
    from gpusched.model.topology import Topology
    from gpusched.sim.pool import Pool
    from gpusched.traces.workload import Workload


class StudyOption(NamedTuple):
    """An option besides its type and default.

    Attributes:
        names: Of the command line; "": an argument.
        help: Its line there.
        metavar: Of its value; FILE for files. least: Of a number.
        parse: (option, text) -> value. shown: The text of its default.
        complete: The function of `gpusched.cli.complete`.
        papers: Those that it is for; (): all.
    """

    names: str
    help: str
    metavar: str | None = None
    least: int | None = None
    parse: Callable[[str, str], Any] | None = None
    shown: str = ""
    complete: str = ""
    papers: tuple[str, ...] = ()

    @property
    def long(self) -> str:
        """Return the name that errors use."""
        return next((name for name in self.names.replace("/", " ").split() if name.startswith("--")), "")

    @property
    def names_files(self) -> bool:
        """Return whether its values are names of files."""
        return self.metavar in ("FILE", "[TRACE...]")


def rows_of(request: type[msgspec.Struct]) -> Mapping[str, tuple[Any, StudyOption]]:
    """Return the type and the row of each option, by field."""
    hints = {name: hint for name, hint in request.__annotations__.items() if hasattr(hint, "__metadata__")}
    return {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}


def files_of(request: msgspec.Struct, *without: str) -> list[str]:
    """Return the names of the files that options of a request give, ``without`` some of its fields."""
    files = [name for name, (_, row) in rows_of(type(request)).items() if row.names_files]
    values = [getattr(request, name) for name in files if name not in without]
    return [name for value in values for name in ((value,) if isinstance(value, str) else value or ())]


def _seconds(option: str, text: str) -> float:
    try:
        return float(parse_duration(text)) if text not in ("0", "0s") else 0.0
    except ValueError:
        raise UsageError(f"{option} {text!r} is not a time", "for example 30s") from None


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``gpusched replay``, as given, or as a scenario file gives them (`gpusched.study.scenario`).

    Attributes:
        workload: Jobs to draw, for each seed others. about, published: Notes, and figures by policy, of a scenario.
        topology, node_list: Files, or what a scenario has in their place.
    """

    # fmt: off
    traces: Annotated[tuple[str, ...], StudyOption("", "Trace files; default: this cluster's own history.",
        "[TRACE...]")] = ()
    policies: Annotated[tuple[str, ...], StudyOption("-P --policy",
        "A policy's name or file; ORDER+BACKFILL: f1+easy.", complete="replays")] = ()
    format: Annotated[str | None, StudyOption("--format", "Trace format; default: detected.")] = None
    nodes: Annotated[int | None, StudyOption("-N --nodes", "Number of identical nodes.", least=1)] = None
    gpus_per_node: Annotated[int | None, StudyOption("--gpus-per-node", "GPUs per node; default 8.", least=1)] = None
    inventory: Annotated[str | None, StudyOption("--inventory", "The nodes of this inventory.yaml.", "FILE")] = None
    node_list: Annotated["str | Pool | None", StudyOption("--node-list",
        "The nodes of this CSV: sn,cpu_milli,memory_mib,gpu,model.", "FILE")] = None
    topology: Annotated["str | Topology | None", StudyOption("--topology",
        "YAML of switches: jobs that share links slow down.", "FILE")] = None
    gpu_type: Annotated[str | None, StudyOption("--gpu-type", "GPU type of these nodes: V100.")] = None
    profiles: Annotated[tuple[str, ...], StudyOption("--profiles", "Measured speeds: a file or folder of them.",
        "FILE")] = ()
    reference_gpu_type: Annotated[str | None, StudyOption("--reference-gpu-type",
        "GPU type of the trace; default: the profile's.")] = None
    share: Annotated[str, StudyOption("--share",
        "GPU sharing: auto (fractions, if requested), no, fractions, pairs.")] = "auto"
    resizable: Annotated[str | None, StudyOption("--resizable",
        "GPU counts that sizing policies may choose: 1-8.")] = None
    cpus: Annotated[str | None, StudyOption("--cpus",
        "With --resizable: CPU cores: 2-12; default: in proportion to the GPUs.")] = None
    mem: Annotated[str | None, StudyOption("--mem", "With --resizable: memory: 16G-64G.")] = None
    load: Annotated[float | None, StudyOption("--load",
        "Offered load: chooses the number of nodes, or with nodes the pace.")] = None
    vc: Annotated[str | None, StudyOption("--vc", "Only this virtual cluster, partition or queue.")] = None
    placement: Annotated[str | None, StudyOption("--placement", "Override the policy's own.")] = None
    since: Annotated[str | None, StudyOption("--since", "Jobs submitted since: 30d, 2017-10-01.")] = None
    until: Annotated[str | None, StudyOption("--until", "Jobs submitted before.")] = None
    estimates: Annotated[str | None, StudyOption("--estimates",
        "Of run times: `history` (the default), or `last-two`.")] = None
    limits: Annotated[bool, StudyOption("--limits", "Jobs end at their time limits.")] = False
    restart_s: Annotated[float | None, StudyOption("--restart", "Job restart cost: 30s, 5m; default: the policy's.",
        parse=_seconds)] = None
    restart_costs: Annotated[str | None, StudyOption("--restart-costs",
        "CSV model,restart_s: restarts by model; others as --restart.", "FILE")] = None
    backfill_every_s: Annotated[float, StudyOption("--backfill-every",
        "Backfill interval: 30s (Slurm's bf_interval).", parse=_seconds, shown="0s")] = 0.0
    outages: Annotated[str | None, StudyOption("--outages", "CSV node,start,end,drain of failing nodes.",
        "FILE")] = None
    reservations: Annotated[str | None, StudyOption("--reservations",
        "CSV node,start,end of maintenance, in place of recorded ones.", "FILE")] = None
    quotas: Annotated[bool | None, StudyOption("--quotas/--no-quotas",
        "Apply the inventory's limits; default: to own history.")] = None
    seeds: Annotated[tuple[int, ...], StudyOption("--seed", "Random seed; several: one replay each.", least=0)] = ()
    workers: Annotated[int, StudyOption("-j --jobs", "Worker processes; 0: automatic.", least=0)] = 0
    backend: Annotated[str | None, StudyOption("--backend", "A Dask or Ray cluster: dask://HOST:PORT.")] = None
    power: Annotated[str | None, StudyOption("--power", "YAML of idle and busy watts by GPU type and node.",
        "FILE")] = None
    strict: Annotated[bool, StudyOption("--strict", "Stop at the first bad row.")] = False
    workload: "Workload | None" = None
    about: tuple[str, ...] = ()
    published: Mapping[str, Mapping[str, float]] = {}
    # fmt: on

    @property
    def is_own(self) -> bool:
        """Whether this cluster's own jobs are replayed."""
        return not self.traces and self.workload is None


class PaperOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``gpusched reproduce``; `gpusched.study.paper.check_options` refuses those that do not apply.

    ``seeds``, ``policies``, ``loads``; (): as the scenario says.
    """

    # fmt: off
    quick: Annotated[bool, StudyOption("--quick", "One seed, barely trained.")] = False
    seeds: Annotated[tuple[int, ...], StudyOption("--seed", "Random seeds; default 0, 1, 2.", least=0)] = ()
    jobs: Annotated[int, StudyOption("-j --jobs", "Processes; 0: one per core.", least=0,
        papers=("gist", "dl2", "maifs", "topology"))] = 0
    policies: Annotated[tuple[str, ...], StudyOption("--policy",
        "Only these policies (not gist; rltune: with --out).",
        papers=("dl2", "maifs", "rltune", "topology"))] = ()
    trace: Annotated[str | None, StudyOption("--trace", "rltune: on this log; default: on generated jobs.", "FILE",
        papers=("rltune",))] = None
    format: Annotated[str | None, StudyOption("--format", "Trace format; default: detected.",
        papers=("rltune",))] = None
    vcs: Annotated[tuple[str, ...], StudyOption("--vc", "rltune: only these virtual clusters.",
        papers=("rltune",))] = ()
    workloads: Annotated[str | None, StudyOption("--workloads",
        "dl2: these traces; maifs: trace folder. Default: generated.", "FILE", papers=("dl2", "maifs"))] = None
    speeds: Annotated[str | None, StudyOption("--speeds",
        "Other measurements: dl2, config_speed.txt; maifs, a folder.", "FILE", papers=("dl2", "maifs"))] = None
    weights: Annotated[str | None, StudyOption("--weights",
        "dl2, maifs, topology: the agent's weights; default: trained, or shipped.", "FILE",
        papers=("dl2", "maifs", "topology"))] = None
    out: Annotated[str | None, StudyOption("--out",
        "Write trained weights to this file; maifs, rltune, topology: train.", "FILE",
        papers=("dl2", "maifs", "rltune", "topology"))] = None
    restart: Annotated[str | None, StudyOption("--restart", "dl2: cost of a resize, such as 120s; default none.",
        papers=("dl2",))] = None
    changes: Annotated[tuple[str, ...], StudyOption("--change",
        "dl2: MODEL:SLOT:FACTOR changes a model's speed.", papers=("dl2",))] = ()
    topology: Annotated[str | None, StudyOption("--topology",
        "topology: a built-in cluster, or a YAML of switches; default: all built-in.", "FILE",
        papers=("topology",))] = None
    gpus_per_node: Annotated[int | None, StudyOption("--gpus-per-node",
        "topology: GPUs per node of a file; default: its inventory's, or 8.", papers=("topology",))] = None
    nic: Annotated[str | None, StudyOption("--nic", "topology: NIC rate of a file's nodes; default 100G.",
        papers=("topology",))] = None
    table: Annotated[str | None, StudyOption("--table",
        "topology: CSV of measured pairs, from which jobs are drawn.", "FILE", papers=("topology",))] = None
    loads: Annotated[tuple[float, ...], StudyOption("--load",
        "topology: offered load; default 0.7, 0.9, 1.1; rltune --out: 0.9, 1.1.", papers=("rltune", "topology"))] = ()
    device: Annotated[str | None, StudyOption("--device", "dl2: train on cpu (default) or cuda.",
        papers=("dl2",))] = None
    html: Annotated[str | None, StudyOption("--html", "gist, rltune: write a page with plots.", "FILE",
        papers=("gist", "rltune"))] = None
    # fmt: on
