"""Fills the generated parts of docs/ from the code: ``python -m tests.docs.generate``.

A generated part stands between two marker lines. All else in the files is written by hand. `check` lists which parts
differ from what the code says now; tests/docs/test_docs.py calls it.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import typer
import yaml

from gpusched.cli.main import COMMANDS, app
from gpusched.client.reservations import ReservationResult
from gpusched.client.script.sbatch import OPTIONS, RefusedOption
from gpusched.client.wait import EXIT_CODES
from gpusched.cluster.requests import environment
from gpusched.config import fields as inventory_fields
from gpusched.config import idle as inventory_idle
from gpusched.config import notices as inventory_notices
from gpusched.config.policies import BUILT_IN, default_fallback, load_policy
from gpusched.doctor.findings import Finding
from gpusched.model.audit import AuditEntry
from gpusched.model.events import Event, EventLine
from gpusched.model.health import KINDS, XIDS
from gpusched.model.healthchecks import CheckRecord, HealthCheck
from gpusched.model.jobs import ACTIVE, ENDED, Allocation, Elastic, JobRecord, JobSpec, JobState, NodeAllocation
from gpusched.model.metrics import METRICS
from gpusched.model.plan import ReasonCode
from gpusched.model.policy import PolicySpec
from gpusched.model.readings import GpuProcess, GpuState, Nic, NodeState
from gpusched.model.reports import (
    ConditionRow,
    FailureRow,
    FlavorRow,
    GpuRow,
    HeldIdle,
    IdleReport,
    IdleRow,
    NodeRow,
    PolicyDecisions,
    PowerReport,
    PowerRow,
    QosRow,
    QuotaReport,
    QuotaRow,
    ReservationRow,
    ShareRow,
    TopologyReport,
    WiredNode,
)
from gpusched.model.reservations import Reservation
from gpusched.model.resources import (
    BackupSettings,
    EventSettings,
    Inventory,
    LogSettings,
    MigSettings,
    Node,
    Partition,
    ResizeRules,
    RuntimeName,
    Settings,
    SharingSettings,
)
from gpusched.model.slurm import SlurmFacts, SlurmMode
from gpusched.model.topology import Switch
from gpusched.nightly.proof import ProofVerdict
from gpusched.queue.promotions import Shadow
from gpusched.views.audit import decisions_json
from gpusched.views.healthchecks import checks_json
from gpusched.views.jobs import job_dict, slurm_dict
from gpusched.views.nodes import nodes_json
from gpusched.views.policy import ChangeRow, PolicyPage, PolicyRow
from gpusched.views.policy import page_dict as page_dict_of_policy
from gpusched.views.power import power_json
from gpusched.views.quota import quota_json
from gpusched.views.reservations import request_dict
from gpusched.views.show import Page, page_dict
from gpusched.views.why import Why, dry_run_dict, why_dict
from tests.docs import python_api, replays, words

DOCS = Path(__file__).parents[2] / "docs"
_PART = re.compile(r"<!--([a-z0-9-]+)-->\n.*?<!--end-->", re.DOTALL)


def main() -> int:
    """Write what differs; with ``--check`` only say so."""
    stale = list(check())
    for path, text in stale:
        print(f"{path.relative_to(DOCS.parent)} {'is stale' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    return 1 if stale and "--check" in sys.argv else 0


def check() -> Iterable[tuple[Path, str]]:
    """Files whose generated parts differ from the code, with the text they should have."""
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text("utf-8")
        fresh = _PART.sub(lambda m: f"<!--{m[1]}-->\n\n{PARTS[m[1]]().strip()}\n\n<!--end-->", text)
        if fresh != text:
            yield path, fresh
    for path in DOCS.rglob("event.schema.json"):
        if path.read_text("utf-8") != _event_schema():
            yield path, _event_schema()


def parts_in_docs() -> set[str]:
    """Names of the parts that stand somewhere."""
    return {m[1] for path in DOCS.rglob("*.md") for m in _PART.finditer(path.read_text("utf-8"))}


# -- tables


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(header)]
    lines += [["---"] * len(lines[0]), *(list(row) for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def listing(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and meanings as a list; a table's first column would be too wide for several names."""
    return "\n".join(f"- {names}: {meaning}" if meaning else f"- {names}" for names, meaning in rows) + "\n"


def code(text: object) -> str:
    """As code; nothing stays nothing."""
    return f"`{text}`" if str(text) else ""


# -- the command line


def commands() -> dict[str, Any]:
    """Name -> click command, in the order of ``gpusched --help``."""
    group: Any = typer.main.get_command(app)
    return {name: group.get_command(None, name) for name in COMMANDS}


def _value(hint: Any) -> str:
    """Return ``TEXT``, ``N``, ``TEXT...`` (repeatable), the choices, or "" for a switch, from an annotation."""
    if choices := [str(c.value) for c in _enum(hint)]:
        return "|".join(choices)
    found = str(typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint)
    base = "N" if "int" in found else "" if "bool" in found else "TEXT"
    return f"{base}..." if "list[" in found else base


def _cli() -> str:
    return "\n".join(_command(name, command) for name, command in commands().items())


def _command(name: str, command: Any) -> str:
    if hasattr(command, "commands"):  # a group: its own line, then its commands
        parts = [_command(f"{name} {sub}", c) for sub, c in command.commands.items()]
        return "\n".join([f"## gpusched {name}\n\n{_paragraphs(command.help)}\n", *parts])
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    rows = _options(command)
    common = [shown for (names, meanings), shown in _COMMON.items() if shown and rows.get(names) in meanings]
    rows = {names: meaning for names, meaning in rows.items() if (names, meaning) not in _SHOWN}
    given = " ".join([*common, *(_metavar(a) for a in arguments)])
    usage = f"    gpusched {name} {given}\n\n" if given else ""
    other = _LIKE.get(name)
    theirs = _options(_command_of(other)) if other else {}
    same = [names for names in rows if theirs.get(names) == rows[names]]
    as_there = "\n" + _shared(str(other), same, list(theirs)) if same else ""
    own = "\n" + listing(kept) if (kept := [(names, rows[names]) for names in rows if names not in same]) else ""
    return f"## gpusched {name}\n\n{usage}{_paragraphs(command.help)}\n{as_there}{own}"


_COMMON = {
    ("`-p`, `--partition=TEXT`", ("In this partition.", "Only this partition.")): "[-p PARTITION]",
    ("`-w`, `--watch`", ("Live screen; q or Ctrl-C quits.",)): "[--watch]",
    ("`--json`", ("Print one JSON value.",)): "",
}
"""Options that the page explains once -> how the commands that have them show them."""
_SHOWN = {(names, meaning) for names, meanings in _COMMON for meaning in meanings}
_LIKE = {
    "run": "submit", "attach": "run", "maintenance": "reserve", "reservations change": "reserve", "train": "replay",
    "trace stats": "trace slice", "trace scale": "trace slice", "trace fit": "trace slice",
    "trace import": "trace slice", "trace generate": "trace slice", "predict": "replay", "tick": "controller",
    "web": "controller", "metrics": "controller", "uninstall": "install", "audit": "power", "reproduce": "replay",
}  # fmt: skip
"""Commands -> the one whose page describes the options that both have."""


def _shared(other: str, same: list[str], theirs: list[str]) -> str:
    """Return which options of another command this one has: those, or all but some, whichever is shorter."""
    rest = [names for names in theirs if names not in same and names != "`--json`"]
    named = "; ".join(re.sub(r"[= ][^`]+`", "`", names) for names in min(same, rest, key=len))
    link = f"[{other}](#gpusched-{other.replace(' ', '-')})"
    return f"As for {link}: {named}.\n" if len(same) <= len(rest) else f"All options of {link} but {named}.\n"


def _command_of(name: str) -> Any:
    first, _, second = name.partition(" ")
    return commands()[first].commands[second] if second else commands()[first]


def _options(command: Any) -> dict[str, str]:
    """Return names of an option, with its value -> its meaning."""
    callback = inspect.unwrap(command.callback, stop=lambda of: hasattr(of, "__signature__"))
    hints = typing.get_type_hints(callback, include_extras=True)
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    return dict(_option(option, hints) for option in options)


def _option(option: Any, hints: dict[str, Any]) -> tuple[str, str]:
    """Return the names of an option with its value, and its meaning with its default."""
    names = [*option.opts, *option.secondary_opts]
    if names[1:] == [f"--no-{names[0][2:]}"]:
        names = [f"--[no-]{names[0][2:]}"]
    if value := "" if option.count else _value(hints[option.name]):
        names[-1] += f"={value}" if names[-1].startswith("--") else f" {value}"
    default = "" if option.default in (None, False, (), "") else str(getattr(option.default, "value", option.default))
    note = f"Default: {'on' if default == 'True' else code(default)}." if default else "Required." * option.required
    return ", ".join(map(code, names)), f"{option.help or ''} {note}".strip()


def _sbatch_names(name: str) -> str:
    short = OPTIONS[name].short
    return f"`-{short}`, `--{name}`" if short else f"`--{name}`"


def _sbatch_results() -> str:
    rows: dict[tuple[str, str], list[str]] = {}  # what becomes of options -> these; several of one meaning are one row
    for name in sorted(OPTIONS):
        option = OPTIONS[name]
        if isinstance(option, RefusedOption):
            here, result = option.hint or "nothing like it", "refused"
        elif option.result == "warned" and "use " not in option.means:
            here, result = "no effect", "warned"  # the note at submission says why
        else:
            here, result = option.means.removeprefix("no effect: "), option.result
            here = "the same option" if here == f"--{name}" else here
        rows.setdefault((result, _as_code(here)), []).append(_sbatch_names(name))
    return table(("sbatch", "result", "here"), [(", ".join(names), *of) for of, names in rows.items()])


def _as_code(text: str) -> str:
    """Options in a sentence, as code."""
    return re.sub(
        r"(?:#GPUSCHED |gpusched submit )?--[a-z][a-z-]*(?:[ =](?:(?:1@)?[A-Z]{2,}[A-Z,=]*|rack|pairs))*",
        r"`\g<0>`",
        text,
    )


def _enum(hint: Any) -> Iterable[Any]:
    base: Any = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    found = next((kind for kind in (base, *typing.get_args(base)) if hasattr(kind, "__members__")), None)  # or None
    return [] if found is None else list(found.__members__.values())


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return str(name) if argument.required or name.startswith("[") else f"[{name}]"


def _paragraphs(text: str) -> str:
    return "\n\n".join(" ".join(p.split()) for p in inspect.cleandoc(text).split("\n\n"))


# -- the inventory


def _keys(known: Iterable[str], described: dict[str, tuple[str, str]], defaults: dict[str, str]) -> str:
    def shown(key: str) -> str:
        kind, default = described[key][0], defaults.get(key, "").strip("`")
        evident = default and "`" not in kind  # a default shows what else may be given, except for choices
        return code(f"{key}: {default}" if default else key) + ("" if evident else f" ({kind})")

    return listing((shown(k), described[k][1]) for k in known if k not in words.TWINS)


def _settings() -> str:
    plain = Settings()
    fields = inventory_fields.SETTINGS
    defaults = {key: _default(getattr(plain, field, None), field) for key, (field, _) in fields.items()}
    return _keys(fields, words.SETTINGS, defaults)


def _default(value: object, field: str) -> str:
    if value is None or value == () or isinstance(value, LogSettings | EventSettings | BackupSettings):
        return ""
    if field.endswith("_s"):
        seconds = float(str(value))
        unit, size = next((u, s) for u, s in (("d", 86400), ("m", 60), ("s", 1)) if seconds % s == 0 and seconds >= s)
        return code(f"{seconds / size:g}{unit}")
    return code(f"{value}M" if "_mib" in field else str(value).lower() if isinstance(value, bool) else value)


def _logs() -> str:
    plain = LogSettings()
    defaults = {k: code(f"{getattr(plain, f)}M") for k, (f, _) in inventory_fields.LOGS.items()}
    return _keys(inventory_fields.LOGS, words.LOGS, defaults)


def _backup() -> str:
    plain = BackupSettings()
    defaults = {k: _default(getattr(plain, f) or None, f) for k, (f, _) in inventory_fields.BACKUP.items()}
    return _keys(inventory_fields.BACKUP, words.BACKUP, defaults)


def _events() -> str:
    return _keys(inventory_notices.EVENTS, words.EVENTS, {})


def _event_schema() -> str:
    """Return the JSON schema of a line of ``settings.events``."""
    schema = msgspec.json.schema(EventLine)
    (_, line), *others = schema["$defs"].items()
    assert not others
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "An event of gpusched"}
    return json.dumps(head | {k: v for k, v in line.items() if k != "title"}, indent=1) + "\n"


def _event_kinds() -> str:
    """Return the kinds of events from the docstring of `Event`."""
    lines = inspect.getdoc(Event).split("\n\n")[1].replace("\n", " ")  # type: ignore[union-attr]
    return "\n".join(f"- {part.strip()}." for part in re.split(r"\.(?= |$)", lines) if part.strip()) + "\n"


def _metrics() -> str:
    rows = []
    for metric in METRICS.values():
        labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
        kind = " (histogram)" if metric.kind == "histogram" else ""
        rows.append((code(metric.name + "_total" * (metric.kind == "counter") + labels) + kind, metric.help))
    return listing(rows)


def _partition() -> str:
    return _keys(inventory_fields.PARTITION, words.PARTITION, {"policy": code("fifo")})


def _resizable() -> str:
    plain = ResizeRules()
    defaults = {key: _default(getattr(plain, field), field) for key, (field, _) in inventory_fields.RESIZABLE.items()}
    return _keys(inventory_fields.RESIZABLE, words.RESIZABLE, defaults)


def _idle() -> str:
    return _keys(inventory_idle.IDLE, words.IDLE, {"below": code("5%"), "then": code("warn")})


def _placement() -> str:
    return _keys(inventory_fields.PLACEMENT, words.PLACEMENT, {})


def _node() -> str:
    defaults = {"transport": code("ssh"), "simulated_gpus": code("false")}
    return _keys(inventory_fields.NODE, words.NODE, defaults)


def _sharing() -> str:
    plain = SharingSettings(mode="mps")
    defaults = {key: _default(getattr(plain, key), key) for key in ("slowdown", "pipe")}
    return _keys(inventory_fields.SHARING, words.SHARING, defaults)


def _health_checks() -> str:
    plain = HealthCheck(name="", command="")
    known = {key: inventory_fields.HEALTH_CHECK[key][0] for key in ("timeout", "before_job", "then")}
    defaults = {key: _default(getattr(plain, field), field) for key, field in known.items()}
    return _keys(inventory_fields.HEALTH_CHECK, words.HEALTH_CHECK, defaults)


def _mig() -> str:
    plain = MigSettings()
    defaults = {key: code(" ".join(getattr(plain, key))) for key in ("command", "cdi_command")}
    return _keys(inventory_fields.MIG, words.MIG, defaults)


def _flavor() -> str:
    return _keys(inventory_fields.FLAVOR, words.FLAVOR, {})


def _twins() -> str:
    known = {**inventory_fields.SETTINGS, **inventory_fields.NODE, **inventory_fields.FLAVOR}
    return ", ".join(code(unit) for unit in words.TWINS if unit in known) + "."


# -- policies


def policy_files() -> list[Path]:
    """The policies that come with gpusched."""
    return sorted(BUILT_IN.glob("*.yaml"))


def _policies() -> str:
    rows, default = [], PolicySpec(name="default")
    for path in policy_files():
        spec, keys = load_policy(path), yaml.safe_load(path.read_text("utf-8"))
        del keys["description"]
        usual = {key for key in ("order", "place", "backfill") if keys.get(key) == getattr(default, key)}
        usual |= {"resize"} if spec.resize == default.resize else set()  # the guide has it
        usual |= {"budget"} if spec.budget_s == default.budget_s else set()
        usual |= {"fallback"} if keys.get("fallback") == default_fallback(spec.traits) else set()
        keys = {key: value for key, value in keys.items() if key not in usual}
        flow = yaml.safe_dump(keys, default_flow_style=True, sort_keys=False, width=1e9).strip()
        rows.append((code(path.stem), code(flow[1:-1]) or "the defaults"))
    return listing(rows)


# -- states and reasons


def _job_states() -> str:
    kinds = {s: "holds resources" if s in ACTIVE else "ended" if s in ENDED else "pending" for s in JobState}
    return table(("state", "", "meaning"), [(code(s), kinds[s], words.JOB_STATES[s]) for s in JobState])


def _node_states() -> str:
    return table(("state", "new jobs", "meaning"), [(code(s), *words.NODE_STATES[s]) for s in NodeState])


def _gpu_states() -> str:
    return table(("state", "meaning"), [(code(s), words.GPU_STATES[s]) for s in GpuState])


def _conditions() -> str:
    rows = [(code(k.name), k.title, k.fault, code(k.action)) for k in KINDS]
    return table(("condition", "meaning", "fault", "default"), rows)


def _xids() -> str:
    by_kind = {kind.name: [n for n, xid in sorted(XIDS.items()) if xid.kind == kind.name] for kind in KINDS}
    known = {name: numbers for name, numbers in by_kind.items() if numbers and name != "xid-other"}
    return listing((code(name), ", ".join(map(str, numbers))) for name, numbers in known.items())


def _reasons() -> str:
    return listing((code(r), words.REASONS[r]) for r in ReasonCode)


def _exit_codes() -> str:
    codes = {s: "the job's own" if s is JobState.FAILED else str(EXIT_CODES[s]) for s in JobState if s in ENDED}
    return listing((", ".join(code(s) for s in codes if codes[s] == of), of) for of in dict.fromkeys(codes.values()))


def _limits() -> str:
    return _keys(inventory_fields.LIMITS, words.LIMITS, {})


def _of_group() -> str:
    return _keys(inventory_fields.GROUP, words.GROUP, {"shares": code("1")})


def _qos() -> str:
    return _keys(inventory_fields.QOS, words.QOS, {"priority": code("0"), "exempt": code("false")})


def _notices() -> str:
    return _keys(inventory_notices.NOTICES, words.NOTICES, {"idle": code("30m")})


def _receiver() -> str:
    return _keys(inventory_notices.RECEIVER, words.RECEIVER, {"on": code("all")})


def _switch() -> str:
    return _keys(inventory_fields.SWITCH, words.SWITCH, {})


# -- JSON


_JSON_WORDS = words.JSON | replays.JSON
_NESTED = {inner for keys in _JSON_WORDS.values() for inner in re.findall(r"{([a-z-]+)}", " ".join(keys.values()))}


def _json(name: str) -> Callable[[], str]:
    return lambda: _json_table(name)


def _json_table(name: str, indent: str = "") -> str:
    """Return the keys of an object as a list; a meaning that ends in ``{name}`` has that object's keys below it."""
    described = _JSON_WORDS[name]
    keys = json_keys()[name]
    assert list(keys) == list(described) or set(keys) == set(described), (name, set(keys) ^ set(described))
    meanings = {key: described[key].removeprefix("?") for key in keys}
    lines = []
    for meaning in sorted(dict.fromkeys(meanings.values()), key=bool):  # keys without one first
        named = ", ".join(_nullable(k, described[k]) for k in keys if meanings[k] == meaning)
        text, _, inner = meaning.rstrip("}").partition("{")
        lines.append(f"{indent}- {named}{':' if meaning else ''} {text}".rstrip())
        lines += [_json_table(inner, indent + "    ")] if inner else []
    return "\n".join(lines)


def _nullable(key: str, described: str) -> str:
    """Return the key as code, marked where it may be null."""
    return code(key) + ("?" if described.startswith("?") else "")


def json_keys() -> dict[str, list[str]]:
    """The keys that the views print, by what they describe."""
    job = sample_job()
    why = Why(job=job, reason="", message="", now=0.0)
    event = Event(time=0.0, kind="submitted", job_id=job.id)
    starting = Event(time=0.0, kind="starting", job_id=job.id)
    page = page_dict(Page(job=job, now=0.0, events=(starting, event)))
    status = job_dict(job, 0.0)
    return {
        "status": list(status),
        "slurm": list(slurm_dict(SlurmFacts())),
        "show": [k for k in page if k not in status],
        "attempt": list(page["attempts"][0]),
        "event": list(page["events"][0]),
        "why": list(why_dict(why)),
        "dry-run": [k for k in dry_run_dict(why) if k not in why_dict(why)],
        "nodes": list(nodes_json([_sample_node()])[0]),
        "node-check": list(checks_json([CheckRecord(node="", check="")])[0]),
        "failures": list(FailureRow.__struct_fields__),
        "conditions": list(ConditionRow.__struct_fields__),
        "gpus": list(GpuRow.__struct_fields__),
        "processes": list(GpuProcess.__struct_fields__),
        "topology": list(TopologyReport.__struct_fields__),
        "switch": list(Switch.__struct_fields__),
        "wired-node": list(WiredNode.__struct_fields__),
        "nic": list(Nic.__struct_fields__),
        "flavors": list(FlavorRow.__struct_fields__),
        "quota": list(quota := quota_json(_sample_quota())),
        "quota-row": list(quota["rows"][0]),
        "quota-class": list(QosRow.__struct_fields__),
        "quota-share": list(ShareRow.__struct_fields__),
        "reservations": list(ReservationRow.__struct_fields__),
        "reserved": list(request_dict(_sample_reservation())),
        "audit": list(AuditEntry.__struct_fields__),
        "audit-policy": list(decisions_json([_sample_decisions()])[0]),
        "power": list(power_json(_sample_report())),
        "power-row": list(PowerRow.__struct_fields__),
        "held-idle": list(HeldIdle.__struct_fields__),
        "idle": list(IdleReport.__struct_fields__),
        "idle-row": list(IdleRow.__struct_fields__),
        "check": list(Finding.__struct_fields__),
        "spec": list(msgspec.to_builtins(job.spec)),
        "policy": list(PolicyRow.__struct_fields__),
        "policy-change": list(ChangeRow.__struct_fields__),
        "policy-page": list(_sample_policy()),
        "shadow": list(_sample_policy()["shadows"][0]),
        "verdict": list(ProofVerdict.__struct_fields__),
        **replays.json_keys(),
    }


def _sample_policy() -> dict[str, Any]:
    spec = load_policy(policy_files()[0])
    shadow = Shadow(partition="", spec=spec, since=0.0, by="")
    page = PolicyPage(
        spec=spec, path="", origin="", live=(), other_versions=(), weights={}, cards={}, shadows=(shadow,),
        differences=(), verdicts={}, modes={"": SlurmMode.OBSERVE},
    )  # fmt: skip
    return page_dict_of_policy(page)


def _sample_node() -> NodeRow:
    return NodeRow(
        name="", partition="", state=NodeState.IDLE, gpus_total=0, gpus_free=0, cores_total=0, cores_free=0,
        memory_total_mib=0, memory_free_mib=0,
    )  # fmt: skip


def _sample_quota() -> QuotaReport:
    return QuotaReport(users=(), rows=(QuotaRow(subject="", resource="gpus", used=0.0, limit=0.0, reason=""),), now=0.0)


def _sample_decisions() -> PolicyDecisions:
    return PolicyDecisions(
        partition="", policy="", version="", digest="", act="", user="", since=0.0, until=None, forced=False, starts=()
    )


def _sample_reservation() -> ReservationResult:
    return ReservationResult("reserve", Reservation(name="", nodes=(), begin=0.0, end=1.0))


def _sample_report() -> PowerReport:
    return PowerReport(
        since=0.0, until=0.0, by="job", currency="", price_per_kwh=None, rows=(), total=PowerRow(name="total"),
        unheld_kwh=None, held_idle=(),
    )  # fmt: skip


# -- the environment of jobs


def sample_job() -> JobRecord:
    """A task of an array of gangs, so that every variable is set."""
    parts = tuple(NodeAllocation(rank=r, node=f"dgx{r + 1}", gpus=(0, 1), cores=64, memory_mib=262144) for r in (0, 1))
    spec = JobSpec(
        name="train", partition="A100", nodes=2, gpus_per_node=2, cores_per_node=64, memory_mib_per_node=262144,
        time_limit_s=3600, slurm_env=True, tasks_per_node=2, gpus_per_task=1, submit_dir="/home/alice/run",
        group="vision", qos="normal", reservation="class", array_shape=(10, 0, 9, 1),
        elastic=Elastic(sizes=(1, 2, 4, 8), base_gpus=4, base_cores=128, base_memory_mib=524288),
    )  # fmt: skip
    return JobRecord(
        id="1qdvhwy21kc_3", array_id="1qdvhwy21kc", array_index=3, user="alice", uid=1000, spec=spec,
        state=JobState.RUNNING, submit_time=0.0, attempt=1, allocation=Allocation("1qdvhwy21kc_3", parts),
        master_port=21347,
    )  # fmt: skip


def job_variables(*, slurm_env: bool = True) -> dict[str, str]:
    """Return the environment of rank 1 of `sample_job`."""
    nodes = tuple(
        Node(name=f"dgx{n}", partition="A100", address=f"dgx{n}", gpus=8, cores=256, memory_mib=1 << 20,
             runtime=RuntimeName.PODMAN) for n in (1, 2)
    )  # fmt: skip
    inventory = Inventory(path="", partitions=(Partition(name="A100", nodes=nodes, flavors=()),))
    job = sample_job()
    job = msgspec.structs.replace(job, spec=msgspec.structs.replace(job.spec, slurm_env=slurm_env))
    assert job.allocation is not None
    given = environment(job, job.allocation.parts[1], inventory)
    return given | {
        "GPUSCHED_CONTAINER": "gpusched-1qdvhwy21kc_3-1-1",
        "GPUSCHED_HOSTFILE": "/etc/gpusched-hostfile",
        "GPUSCHED_JOB_DIR": "/gpusched",
        "GPUSCHED_RESIZE": "hot",
        "GPUSCHED_SPOOL": "/var/spool/gpusched",
        "GPUSCHED_RUN_PID": "7",
        "SLURM_MEM_PER_CPU": "4096",
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=20480M",
    }


def _variables(*, of_slurm: bool) -> str:
    """Return what jobs get, with examples: every job, or besides those with a script or ``--slurm-env``."""
    always = [name for name in job_variables(slurm_env=False) if name != "SLURM_MEM_PER_CPU"]
    given = {name: value for name, value in sorted(job_variables().items()) if (name not in always) == of_slurm}
    rows: dict[str, list[str]] = {}  # meaning -> variables
    for name, value in given.items():
        rows.setdefault(words.JOB_VARIABLES[name], []).append(code(f"{name}={value}"))
    return listing((", ".join(rows[meaning]), meaning) for meaning in sorted(rows, key=bool))


def _read_variables() -> str:
    return listing((code(k), v) for k, v in words.READ_VARIABLES.items())


PARTS: dict[str, Callable[[], str]] = {
    "cli": _cli,
    "sbatch-results": _sbatch_results,
    "settings": _settings,
    "logs": _logs,
    "backup": _backup,
    "events": _events,
    "event-kinds": _event_kinds,
    "metrics": _metrics,
    "partition": _partition,
    "placement": _placement,
    "resizable": _resizable,
    "idle": _idle,
    "node": _node,
    "sharing": _sharing,
    "health-checks": _health_checks,
    "mig": _mig,
    "flavor": _flavor,
    "limits": _limits,
    "group": _of_group,
    "qos": _qos,
    "notices": _notices,
    "receiver": _receiver,
    "switch": _switch,
    "twins": _twins,
    "policies": _policies,
    "job-states": _job_states,
    "node-states": _node_states,
    "gpu-states": _gpu_states,
    "conditions": _conditions,
    "xids": _xids,
    "reasons": _reasons,
    "exit-codes": _exit_codes,
    "job-variables": lambda: _variables(of_slurm=False),
    "slurm-variables": lambda: _variables(of_slurm=True),
    "read-variables": _read_variables,
    "python-api": lambda: python_api.reference(_options(commands()["submit"])),
    **{f"json-{name}": _json(name) for name in _JSON_WORDS if name not in _NESTED},
}

if __name__ == "__main__":
    sys.exit(main())
