"""The keys of inventory.yaml: the model field that each fills, and its parser."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gpusched.config.validate import IMAGE
from gpusched.config.yamlfile import Value
from gpusched.errors import FileError
from gpusched.model.health import ACTIONS, KIND, HealthAction
from gpusched.model.healthchecks import HealthCheck
from gpusched.model.images import TRANSPORTS
from gpusched.model.limits import Limits
from gpusched.model.resources import MigSettings, Node, RuntimeName, SharingSettings
from gpusched.model.slices import is_profile
from gpusched.model.units import amounts_of, count_of, parse_duration, parse_memory_mib

Reader = Callable[[Value], Any]
Fields = Mapping[str, tuple[str, Reader]]

MAX_GPUS = 64  # of one node: sets of GPUs are 64-bit masks
MAX_RANGE = 10_000
MAX_RANGES = 8  # in one name
MAX_SHARES = 1_000_000
MAX_CLASS_PRIORITY = 1_000_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_NAME_EXPECTED = "a name of at most 63 letters, digits, '.', '_', '-', the first a letter or digit"
_ADDRESS = re.compile(r"[A-Za-z0-9:_][A-Za-z0-9:._%-]{0,252}")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]{0,254}\$?")
_LINE = re.compile(r"[^\x00-\x1f\x7f]{1,1024}")
_ABSOLUTE = re.compile(r"/[^\x00-\x1f\x7f]{0,1023}")
_FOLDER = re.compile(r"/[^\x00-\x1f\x7f,:\"'\\]{1,900}")  # it goes into an engine's --mount
_RANGE = re.compile(r"([^\[\]]*)\[([0-9,-]+)\](.*)")
_SPAN = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COMMA = re.compile(r",(?![^\[]*\])")  # not inside of brackets
_RATE = re.compile(r"(?:([0-9]{1,6})\s*[x*]\s*)?([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([MGTmgt])(?:b(?:it|ps)?(?:/s)?)?")
_POWER = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*([kK]?)[wW]?")
_SHORT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h|d|w)")
_COMMAND = re.compile(r"[^\x00]{1,8192}")
_COMMAND_EXPECTED = "a command for sh, of at most 8192 characters"
_PRICE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(?:\s*([A-Za-z€$£¥]{1,8})(?:\s*/\s*kWh)?)?")
CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT "
    "SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP "
    "MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
).split()
"""All Linux capabilities, named as the engines do: capabilities(7) without CAP_."""
_GBPS = {"M": 0.001, "G": 1.0, "T": 1000.0}
_WATTS = {"": 1.0, "k": 1000.0, "K": 1000.0}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def read(value: Value | None, known: Fields, expected: str, needs: Mapping[str, str] = {}) -> dict[str, Any]:
    """Read a mapping into model fields; empty where there is no mapping. ``needs``: required key -> what it is."""
    if value is None:
        return {}
    values: dict[str, Any] = {}
    for key, item in value.fields(expected, known).items():
        field, reader = known[key]
        if field in values:
            raise item.error("one of the two", f"{field} given twice, in two units")
        values[field] = reader(item)
    for key, what in needs.items():
        if known[key][0] not in values:
            raise value.missing(key, what)
    return values


def with_defaults(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that hold: own ones before defaults; ``health`` is joined kind by kind."""
    values = {**defaults, **own}
    if "health" in own and "health" in defaults:
        values["health"] = {**defaults["health"], **own["health"]}
    return values


def complete_node(entry: Value, own: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Apply defaults to a node's own values, and reconcile GPU count and GPU indices.

    Raises:
        FileError: One of the values every node needs is nowhere, or count and indices differ.
    """
    values = with_defaults(own, defaults)
    indices = values.get("gpu_indices")
    if indices is not None and (values.get("gpus") is None or ("gpu_indices" in own and "gpus" not in own)):
        values["gpus"] = len(indices)
    for key, expected in _NODE_NEEDS:
        if NODE[key][0] not in values:
            raise entry.missing(key, expected)
    if indices is not None and len(indices) != values["gpus"]:
        raise entry.error(f"as many gpu_indices as gpus ({values['gpus']})", f"{len(indices)} gpu_indices")
    return values


def describe(nodes: tuple[Node, ...]) -> str:
    """Describe a partition's size, for errors: ``2 nodes of at most 8 GPUs, 256 cores, 1024G``."""
    gpus, cores, mib = max(n.gpus for n in nodes), max(n.cores for n in nodes), max(n.memory_mib for n in nodes)
    return f"{count_of(len(nodes), 'node')} of at most {amounts_of(gpus, cores, mib)}"


# Readers of one value


def check_name(text: str, value: Value) -> str:
    """Return ``text`` if it is a valid name of a partition, flavor, node or policy."""
    if not is_name(text):
        raise value.error(_NAME_EXPECTED, f'the name "{text}"')
    return text


def name(value: Value) -> str:
    """Read a name."""
    return value.text(_NAME_EXPECTED, _NAME)


def image(value: Value) -> str:
    """Read a container image."""
    return value.text("an image such as docker.io/library/busybox:1, without spaces", IMAGE)


def duration(value: Value) -> int:
    """Read a time limit as seconds."""
    return value.converted(parse_duration, "a time such as 72h, 1d12h, HH:MM:SS, D-HH:MM:SS or 90 (minutes)")


def host_range(value: Value) -> list[str]:
    """Read the node names of ``dgx1`` or ``dgx[01-04,7]``."""
    return _expand(value, f"{_NAME_EXPECTED}, or a range such as dgx[1-4]", _NAME)


def hosts(value: Value) -> tuple[str, ...]:
    """Read node names from a list of names and ranges, or from text such as ``dgx1,dgx[3-4]``."""
    if not value.is_text:
        return tuple(host for item in value.items("a list of node names and ranges") for host in host_range(item))
    expected = f"{_NAME_EXPECTED}, or ranges such as dgx[1-4],dgx7"
    return tuple(_expand(value, expected, _NAME, split_hosts))


def split_hosts(text: str) -> list[str]:
    """Expand comma-separated host ranges, as Slurm writes them: ``dgx1,dgx[3-4]``.

    Raises:
        ValueError: Not ranges, or together too many; says what was expected.
    """
    found = [host for part in _COMMA.split(text) for host in expand_hosts(part.strip())]
    if len(found) > MAX_RANGE:
        raise ValueError(f"ranges of at most {MAX_RANGE} hosts")
    return found


def parse_gbps(text: str) -> float:
    """Parse ``100G``, ``4x100G`` or ``400 Gb/s`` into Gbit/s.

    Raises:
        ValueError: Not such a rate, or not more than zero.
    """
    match = _RATE.fullmatch(text)
    rate = float(match[1] or 1) * float(match[2]) * _GBPS[match[3].upper()] if match else 0.0
    if not 0 < rate <= 1e9:
        raise ValueError(text)
    return round(rate, 6)


def _rate(value: Value) -> float:
    return value.converted(parse_gbps, "a rate such as 100G, 4x100G or 400Gb/s, greater than zero")


def _address_range(value: Value) -> list[str]:
    expected = "a host name, an IP address, an alias of ~/.ssh/config, or a range such as 10.0.0.[1-4]"
    return _expand(value, expected, _ADDRESS)


def expand_hosts(text: str) -> list[str]:
    """Expand ``dgx[01-04,7]`` or ``r[1-2]n[1-4]``; text without brackets is returned as is.

    Raises:
        ValueError: Not a range; says what was expected.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return [text]
    if text.count("[") > MAX_RANGES:
        raise ValueError(f"at most {MAX_RANGES} ranges in a name")
    before, spans, after = match.groups()
    numbers: list[str] = []
    for span in spans.split(","):
        found = _SPAN.fullmatch(span)
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not 0 <= int(last) - int(first) < MAX_RANGE - len(numbers):
            raise ValueError(f"a range such as dgx[1-4], ascending, of at most {MAX_RANGE} hosts")
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    if len(set(numbers)) < len(numbers):
        raise ValueError("every number of the range once")
    ends = expand_hosts(after)
    if len(numbers) * len(ends) > MAX_RANGE:
        raise ValueError(f"a range of at most {MAX_RANGE} hosts")
    return [before + n + end for n in numbers for end in ends]


def is_name(text: str) -> bool:
    """Return whether ``text`` is a valid name of a partition, flavor, node or policy."""
    return _NAME.fullmatch(text) is not None


def _expand(
    value: Value, expected: str, pattern: re.Pattern[str], expand: Callable[[str], list[str]] = expand_hosts
) -> list[str]:
    try:
        found = expand(value.text(expected))
    except ValueError as error:
        raise value.error(str(error)) from None
    if not all(map(pattern.fullmatch, found)):
        raise value.error(expected)
    return found


def _gpu_indices(value: Value) -> tuple[int, ...]:
    if value.is_text:
        indices = value.converted(_index_spans, "GPU indices such as [0, 1, 3] or 0-3")
    else:
        indices = [i.whole(0, MAX_GPUS - 1, "a GPU index") for i in value.items("GPU indices such as [0, 1, 3] or 0-3")]
    if len(set(indices)) < len(indices) or not all(0 <= i < MAX_GPUS for i in indices):
        raise value.error(f"different GPU indices from 0 to {MAX_GPUS - 1}", ", ".join(map(str, indices[:MAX_GPUS])))
    return tuple(sorted(indices))


def _index_spans(text: str) -> list[int]:
    indices: list[int] = []
    for span in text.replace(" ", "").split(","):
        match = _SPAN.fullmatch(span)
        if match is None or int(match[2] or match[1]) - int(match[1]) >= MAX_GPUS:
            raise ValueError(text)
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
    return indices


def _watts(value: Value) -> float:
    return _measured(value, _POWER, _WATTS, 3, 1e6, "a power greater than zero, such as 6.5kW or 6500 (W)")


def _seconds(value: Value) -> float:
    expected = "a time with its unit, such as 500ms, 5s or 10m, greater than zero"
    return _measured(value, _SHORT, _SECONDS, 6, 1e9, expected)


def _measured(
    value: Value, pattern: re.Pattern[str], units: Mapping[str, float], digits: int, most: float, expected: str
) -> float:
    """Read a positive number times its unit, rounded to ``digits``."""
    match = pattern.fullmatch(value.text(expected))
    number = round(float(match[1]) * units[match[2]], digits) if match else 0.0
    if not 0 < number <= most:
        raise value.error(expected)
    return number


def whole_seconds(value: Value) -> int:
    """Read a time with its unit as whole seconds."""
    seconds = _seconds(value)
    if seconds != int(seconds):
        raise value.error("a time of whole seconds, such as 30s or 10m")
    return int(seconds)


def _price(value: Value) -> tuple[float, str | None]:
    expected = "a price per kWh such as 0.30 or 0.30 EUR/kWh"
    match = _PRICE.fullmatch(value.text(expected))
    if match is None:
        raise value.error(expected)
    return float(match[1]), match[2]


def _memory(value: Value) -> int:
    return value.converted(parse_memory_mib, "a memory size such as 512M, 64G or 1T, greater than zero")


def _gpus_or_slices(value: Value) -> tuple[int, str]:
    """Read ``8``, or slices such as ``1g.10gb:2``; return how many, and of which profile ("": GPUs)."""
    profile, _, number = (value.text("a number of GPUs") if value.is_text else "").strip().lower().partition(":")
    if not is_profile(profile):
        return value.whole(0, 1_000_000, "a number of GPUs"), ""
    if not re.fullmatch(r"[1-9][0-9]{0,6}", number or "1"):
        raise value.error("slices such as 1g.10gb:2")
    return int(number or 1), profile


def _words(expected: str, pattern: re.Pattern[str]) -> Reader:
    return lambda value: tuple(item.text(expected, pattern) for item in value.items("a list"))


def users(value: Value) -> tuple[str, ...]:
    """Read a list of user names."""
    return tuple(item.text("a user name", _USER) for item in value.items("a list"))


def _choices(*options: str) -> Reader:
    return lambda value: tuple(item.choice(options) for item in value.items("a list"))


def _text(expected: str, pattern: re.Pattern[str] = _LINE) -> Reader:
    return lambda value: value.text(expected, pattern)


def _whole(minimum: int, maximum: int, what: str) -> Reader:
    return lambda value: value.whole(minimum, maximum, what)


def _number(minimum: float, maximum: float, what: str) -> Reader:
    return lambda value: value.number(minimum, maximum, what)


def _transport(value: Value) -> str:
    """Read a transport; ``none`` is for engine: slurm only (see `gpusched.config.inventory`), and not suggested."""
    try:
        return value.choice(("none",))
    except FileError:
        return value.choice(("ssh", "local"))


def user_name(text: str, value: Value) -> str:
    """Return ``text`` if it is a valid user name."""
    if _USER.fullmatch(text) is None:
        raise value.error("a user name", f'the name "{text}"')
    return text


def _members(value: Value) -> dict[str, int]:
    """Read user -> shares from a list of users, or from a mapping of users to shares."""
    if value.is_list:
        found = [item.text("a user name", _USER) for item in value.items("a list of users")]
        if len(set(found)) < len(found):
            raise value.error("every user once", f"{next(n for n in found if found.count(n) > 1)} again")
        return dict.fromkeys(found, 1)
    shares = value.fields("a list of users, or a mapping: user -> shares")
    return {user_name(u, item): item.whole(1, MAX_SHARES, "a number of shares") for u, item in shares.items()}


def _or_none(reader: Reader) -> Reader:
    """Return a reader that also accepts ``none`` for unlimited."""
    return lambda value: None if value.is_text and value.found() == '"none"' else reader(value)


def limits(value: Value, over: Limits | None = None) -> Limits:
    """Read limits from a mapping; missing keys default to ``over``."""
    found = read(value, LIMITS, "a mapping with gpus, jobs, queued, gpu_hours, time")
    return msgspec.structs.replace(over or Limits(), **found)


def _sharing(value: Value) -> SharingSettings | None:
    values = read(value, SHARING, "a mapping with mode, slowdown, pipe", {"mode": "mps, time-slicing or none"})
    return None if values["mode"] == "none" else SharingSettings(**values)


def _health_checks(value: Value) -> tuple[HealthCheck, ...]:
    checks = tuple(_health_check(item) for item in value.items("a list of checks, each with a name and a command"))
    names = [check.name for check in checks]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise value.error("every check once", f'the name "{again}" again')
    return checks


def _health_check(value: Value) -> HealthCheck:
    needs = {"name": "the check's name", "command": _COMMAND_EXPECTED}
    values = read(value, HEALTH_CHECK, "a mapping with name, command, every, timeout, before_job, then", needs)
    check = HealthCheck(**values)
    if check.every_s is None and not check.before_job:
        raise value.missing("every", "how often it runs, such as 10m, or before_job: true")
    if check.before_job and check.then == "warn":
        # A job that could not start on the node would be started there again at once.
        raise value.error("no-new-jobs or drain where before_job is true", "then: warn")
    return check


def _mig(value: Value) -> MigSettings | None:
    if value.is_text:
        return MigSettings() if value.choice(("fixed", "on-demand")) == "on-demand" else None
    expected = "fixed, on-demand, or a mapping with mode, gpus, command, cdi_command"
    values = read(value, MIG, expected, {"mode": "fixed or on-demand"})
    return MigSettings(**values) if values.pop("mode") == "on-demand" else None


def _command(value: Value) -> tuple[str, ...]:
    expected = "a command such as sudo -n /usr/bin/nvidia-smi"
    words = value.converted(shlex.split, expected)
    if not words:
        raise value.error(expected)
    return tuple(words)


def _health(value: Value) -> dict[str, HealthAction]:
    """Read kind of condition -> action; a kind has a most that may follow from it."""
    found = {}
    for kind, item in value.fields("a mapping: kind of condition -> action", KIND).items():
        found[kind] = HealthAction(item.choice(ACTIONS[: ACTIONS.index(KIND[kind].max_action) + 1]))
    return found


# The keys

MIG: Fields = {
    "mode": ("mode", lambda value: value.choice(("fixed", "on-demand"))),
    "gpus": ("gpus", _gpu_indices),
    "command": ("command", _command),
    "cdi_command": ("cdi_command", _command),
}

SHARING: Fields = {
    "mode": ("mode", lambda value: value.choice(("mps", "time-slicing", "none"))),
    "slowdown": ("slowdown", _number(0, 100, "the part by which a job may be slower")),
    "pipe": ("pipe", _text("an absolute path without quotes, commas and colons", _FOLDER)),
}


DEFAULTS: Fields = {
    "transport": ("transport", _transport),
    "user": ("user", _text("a user name", _USER)),
    "become": ("become", lambda value: value.choice(("sudo",))),
    "port": ("port", _whole(1, 65535, "a port")),
    "key": ("key", _text("the path of a private key")),
    "gpus": ("gpus", _whole(0, MAX_GPUS, "a number of GPUs")),
    "cores": ("cores", _whole(1, 100_000, "a number of CPU cores")),
    "memory": ("memory_mib", _memory),
    "memory_mib": ("memory_mib", _whole(1, 1 << 40, "MiB of memory")),
    "gpu_type": ("gpu_type", _text("the GPUs' type, such as A100")),
    "gpu_indices": ("gpu_indices", _gpu_indices),
    "rated_power": ("rated_power_w", _watts),
    "rated_power_w": ("rated_power_w", _number(1, 1e6, "watts")),
    "runtime": ("runtime", lambda value: value.component("runtimes", tuple(RuntimeName))),
    "simulated_gpus": ("simulated_gpus", Value.flag),
    "sharing": ("sharing", _sharing),
    "health_checks": ("health_checks", _health_checks),
    "mig": ("mig", _mig),
    "health": ("health", _health),
    "kernel_log": ("kernel_log", _text("an absolute path", _ABSOLUTE)),
}
NODE: Fields = {
    **DEFAULTS,
    "name": ("name", host_range),
    "address": ("address", _address_range),
    "fabric_address": ("fabric_address", _text("a host name or an IP address", _ADDRESS)),
}
_NODE_NEEDS = (
    ("gpus", "how many GPUs the node has, here or in defaults"),
    ("cores", "how many CPU cores the node has, here or in defaults"),
    ("memory", "how much memory the node has, such as 512G, here or in defaults"),
    ("runtime", "podman, docker, apptainer or process, here or in defaults"),
)
FLAVOR: Fields = {
    "gpus": ("gpus", _gpus_or_slices),
    "cores": ("cores", _whole(1, 100_000_000, "a number of CPU cores")),
    "memory": ("memory_mib", _memory),
    "memory_mib": ("memory_mib", _whole(1, 1 << 50, "MiB of memory")),
    "time": ("time_limit_s", duration),
}
FLAVOR_NEEDS = {
    "gpus": "how many GPUs a job of this flavor gets in all",
    "cores": "how many CPU cores a job of this flavor gets in all",
    "memory": "how much memory a job of this flavor gets in all, such as 256G",
    "time": "the time limit, such as 72h",
}
HEALTH_CHECK: Fields = {
    "name": ("name", name),
    "command": ("command", _text(_COMMAND_EXPECTED, _COMMAND)),
    "every": ("every_s", whole_seconds),
    "timeout": ("timeout_s", whole_seconds),
    "before_job": ("before_job", Value.flag),
    "then": ("then", lambda value: value.choice(("warn", "no-new-jobs", "drain"))),
}
SWITCH: Fields = {
    "nodes": ("nodes", hosts),
    "uplink": ("uplink_gbps", _rate),
    "uplink_gbps": ("uplink_gbps", _number(0.001, 1e9, "Gbit/s")),
    "parent": ("parent", name),
}
LIMITS: Fields = {
    "gpus": ("gpus", _or_none(_whole(0, 1_000_000, "a number of GPUs"))),
    "jobs": ("jobs", _or_none(_whole(0, 1_000_000, "a number of jobs"))),
    "queued": ("queued", _or_none(_whole(0, 1_000_000_000, "a number of jobs"))),
    "gpu_hours": ("gpu_hours", _or_none(_number(0, 1e9, "a number of GPU hours"))),
    "time": ("time_s", _or_none(duration)),
}
GROUP: Fields = {
    "members": ("members", _members),
    "parent": ("parent", name),
    "limits": ("limits", limits),
    "shares": ("shares", _whole(1, MAX_SHARES, "a number of shares")),
}
QOS: Fields = {
    "priority": ("priority", _whole(-MAX_CLASS_PRIORITY, MAX_CLASS_PRIORITY, "a priority")),
    "users": ("users", _words("a user name", _USER)),
    "groups": ("groups", _words(_NAME_EXPECTED, _NAME)),
    "limits": ("limits", limits),
    "per_user": ("per_user", limits),
    "preemptible": ("preemptible", Value.flag),
    "exempt": ("exempt", Value.flag),
}
INVENTORY = ("engine", "settings", "defaults", "groups", "limits", "notices", "partitions", "qos", "topology")
PARTITION = ("auto_promote", "default", "defaults", "flavors", "idle", "image", "max_time", "nodes", "placement",
             "policy", "preemptible", "resizable", "slurm_env")  # fmt: skip
PLACEMENT: Fields = {
    "max_spread": ("max_spread", lambda value: value.choice(("rack", "any"))),
    "wait": ("placement_wait_s", whole_seconds),
}
RESIZABLE: Fields = {
    "min": ("least", _whole(1, 1_000_000, "a number of GPUs")),
    "max": ("most", _whole(1, 1_000_000, "a number of GPUs")),
    "cooldown": ("cooldown_s", whole_seconds),
    "batch": ("batch", lambda value: value.choice(("fixed", "scale"))),
    "default": ("default", Value.flag),
}
LOGS: Fields = {
    "max_per_job": ("max_mib_per_job", _memory),
    "max_total": ("max_total_mib", _memory),
}
BACKUP: Fields = {
    "to": ("to", _text("an absolute path without commas, quotes and colons", _FOLDER)),
    "every": ("every_s", whole_seconds),
    "keep": ("keep", _whole(1, 10_000, "a number of backups")),
    "keep_days": ("keep_days", _whole(0, 3650, "a number of days")),
}
_YEAR_S = 366 * 86400
SETTINGS: Fields = {
    "tick": ("tick_s", _seconds),
    "tick_s": ("tick_s", _number(0.01, _YEAR_S, "seconds")),
    "probe_timeout": ("probe_timeout_s", _seconds),
    "probe_timeout_s": ("probe_timeout_s", _number(0.1, _YEAR_S, "seconds")),
    "down_after": ("down_after_s", _seconds),
    "down_after_s": ("down_after_s", _number(0, _YEAR_S, "seconds")),
    "node_fail_after": ("node_fail_after_s", _seconds),
    "node_fail_after_s": ("node_fail_after_s", _number(0, _YEAR_S, "seconds")),
    "launch_timeout": ("launch_timeout_s", whole_seconds),
    "grace": ("grace_s", whole_seconds),
    "grace_s": ("grace_s", _whole(0, _YEAR_S, "seconds")),
    "session_keep": ("session_keep_s", whole_seconds),
    "session_keep_s": ("session_keep_s", _whole(1, _YEAR_S, "seconds")),
    "connect_timeout": ("connect_timeout_s", _seconds),
    "connect_timeout_s": ("connect_timeout_s", _number(0.1, _YEAR_S, "seconds")),
    "fairshare_half_life": ("fairshare_half_life_s", whole_seconds),
    "fairshare_half_life_s": ("fairshare_half_life_s", _whole(1, 100 * _YEAR_S, "seconds")),
    "keep_reports": ("keep_reports_s", whole_seconds),
    "keep_reports_s": ("keep_reports_s", _whole(1, 100 * _YEAR_S, "seconds")),
    "max_retries": ("max_retries", _whole(0, 1000, "a number of retries")),
    "power_price": ("power_price_per_kwh", _price),
    "power_price_per_kwh": ("power_price_per_kwh", _number(0, 1e9, "a price per kWh")),
    "currency": ("currency", _text("a currency such as EUR", re.compile(r"[^\s\x00-\x1f\x7f]{1,8}"))),
    "admins": ("admins", users),
    "shared": ("shared", Value.flag),
    "root_jobs": ("root_jobs", Value.flag),
    "allowed_mounts": ("allowed_mounts", _words("an absolute path", _ABSOLUTE)),
    "max_queued_jobs_per_user": ("max_queued_jobs_per_user", _whole(1, 1_000_000_000, "a number of jobs")),
    "max_queued_jobs_by_jobs": ("max_queued_jobs_by_jobs", _whole(0, 1_000_000_000, "a number of jobs")),
    "max_queued_size_per_user": ("max_queued_mib_per_user", _memory),
    "capabilities": ("capabilities", _choices(*CAPABILITIES)),
    "image_transports": ("image_transports", _choices(*TRANSPORTS)),
    "job_dirs": ("job_dirs", _text("an absolute path without commas, quotes and colons", _FOLDER)),
    "network": ("network", _text("a network mode of the container runtime, such as host or bridge", IMAGE)),
    "known_hosts": ("known_hosts", _text("the path of a known_hosts file")),
    "ssh_config": ("ssh_config", _text("the path of an ssh_config file")),
    "idle": ("idle", lambda value: value),
    "logs": ("logs", lambda value: value),
    "events": ("events", lambda value: value),
    "backup": ("backup", lambda value: value),
    "retrain_days": ("retrain_days", _whole(2, 3650, "a number of days")),
    "auto_promote": ("auto_promote", Value.flag),
}
