"""Asking hosts what they are: GPUs, cores, memory, runtime, rated power."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gpusched.config.fields import expand_hosts, is_name
from gpusched.errors import GpuschedError, UsageError
from gpusched.model.readings import NodeReading
from gpusched.model.resources import Node, RuntimeName, Settings
from gpusched.nodes.inspection import Inspection, RuntimeFacts
from gpusched.nodes.opening import open_transport

_THREADS = 32
_HOST = re.compile(r"(?:([^@\s]+)@)?(\[[0-9A-Fa-f:.%]+\]|[^@\s:\[\]]+)(?::([0-9]{1,5}))?")
_RATED = (  # product name in the firmware -> watts of the data sheet
    (re.compile(r"DGX[ -]?Station"), None),
    (re.compile(r"DGX ?A100"), 6500.0),
    (re.compile(r"DGX ?H[12]00"), 10200.0),
    (re.compile(r"DGX ?B200"), 14300.0),
    (re.compile(r"DGX-2"), 10000.0),
    (re.compile(r"DGX-1"), 3500.0),
)
_SERVER_SHARE = 0.75  # of the GPUs' power limits, for all else in the server: DGX-1 0.5, DGX H100 0.8, DGX A100 1.0


class Host(msgspec.Struct, frozen=True):
    """Where to ask, as typed: ``[user@]host[:port]``."""

    typed: str
    address: str
    user: str | None = None
    port: int | None = None


class Discovered(msgspec.Struct, frozen=True, kw_only=True):
    """A host that answered.

    Attributes:
        name: What the node is to be called; valid and unique.
        gpus: GPUs that NVML counts, lost ones included.
        gpu_type: Short, such as ``A100``; "" without GPUs.
        gpu_memory_mib: Of one GPU; None where unknown.
        rated_power_is_estimate: From the GPUs' power limits, not from the data sheet.
        notes: What a person should know, one line each.
    """

    host: Host
    name: str
    gpus: int
    gpu_type: str
    gpu_memory_mib: int | None
    cores: int
    memory_mib: int
    runtime: RuntimeName
    rated_power_w: float | None = None
    rated_power_is_estimate: bool = False
    notes: tuple[str, ...] = ()


class NotDiscovered(msgspec.Struct, frozen=True):
    """A host that could not be asked, and why."""

    host: Host
    reason: str
    hint: str = ""


Outcome = Discovered | NotDiscovered


def parse_hosts(arguments: Iterable[str]) -> list[Host]:
    """Hosts of ``[user@]host[:port]`` arguments; ranges such as ``dgx[1-4]`` are expanded.

    Raises:
        UsageError: Not such a form, or a host twice.
    """
    hosts: list[Host] = []
    for argument in arguments:
        for typed in _expanded(argument):
            match = _HOST.fullmatch(typed)
            port = int(match[3]) if match and match[3] else None
            if match is None or match[2].startswith("-") or (port is not None and not 1 <= port <= 65535):
                raise UsageError(f'found the host "{typed}", expected [user@]host[:port]')
            host = Host(typed, match[2].strip("[]"), match[1], port)
            if any((h.address, h.port) == (host.address, host.port) for h in hosts):
                raise UsageError(f'the host "{host.address}" is given twice')
            hosts.append(host)
    if not hosts:
        raise UsageError("no hosts given", "name the servers to probe: gpusched init HOST...")
    return hosts


def discover(
    hosts: Sequence[Host],
    settings: Settings | None = None,
    *,
    user: str | None = None,
    key: str | None = None,
    on_progress: Callable[[Host, Outcome], None] | None = None,
) -> list[Outcome]:
    """Ask all hosts at once what they are. Leaves nothing there but the cached probe.

    ``user`` logs in, with the private key ``key``, where a host names no user. ``on_progress`` receives each outcome
    as it comes, from the asking thread; its name may still change.

    Returns:
        One outcome per host, in their order; names of the discovered are unique.
    """
    settings = settings or Settings()

    def ask(host: Host) -> Outcome:
        outcome = _ask(host, settings, host.user or user, key)
        if on_progress is not None:
            on_progress(host, outcome)
        return outcome

    with ThreadPoolExecutor(max_workers=max(1, min(_THREADS, len(hosts)))) as pool:
        return _unique_names(list(pool.map(ask, hosts)))


def gpu_type(name: str) -> str:
    """Return ``A100`` of ``NVIDIA A100-SXM4-80GB``, ``RTX3090`` of ``NVIDIA GeForce RTX 3090``."""
    words = re.split(r"[\s-]+", name)
    dull = r"NVIDIA|Tesla|GeForce|Quadro|Graphics|Device|Generation|SXM[0-9]*|PCIe?|NVL|HBM[0-9a-z]*|[0-9]+G[Bi]*|"
    kept = [w for w in words if not re.fullmatch(dull, w, re.IGNORECASE)]
    return re.sub(r"[^A-Za-z0-9._]", "", "".join(kept))[:32] or "GPU"


def rated_power(product: str, reading: NodeReading) -> tuple[float | None, bool]:
    """Return (rated power in W, whether it is an estimate) of a server; unknown is None."""
    for pattern, watts in _RATED:
        if pattern.search(product):
            if watts is not None:
                return watts, False
            break
    limits = [g.power_limit_w for g in reading.gpus if g.power_limit_w is not None]
    if not limits or len(limits) < len(reading.gpus):
        return None, True
    return round(sum(limits) * (1 + _SERVER_SHARE), -2) or None, True


def choose_runtime(seen: Inspection, gpus: int) -> tuple[RuntimeName, list[str]]:
    """Return the first runtime that works and can give GPUs, else the first that works, else process; and reasons."""
    notes = [f"{r.name} is installed but does not work: {r.error}" for r in seen.runtimes if r.error]
    working = [r for r in seen.runtimes if not r.error]
    able = [r for r in working if not gpus or _offers_gpus(r)]
    if able:
        return RuntimeName(able[0].name), notes
    if working:
        name = working[0].name
        return RuntimeName(name), [*notes, f"{name} cannot give GPUs yet: {_LACKS[name]}"]
    return RuntimeName.PROCESS, [*notes, "no container runtime works here: jobs run without containers"]


_LACKS = {
    "podman": "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, as root",
    "docker": "install nvidia-container-toolkit",
}


def _offers_gpus(runtime: RuntimeFacts) -> bool:
    return {"podman": runtime.cdi, "docker": runtime.toolkit}.get(runtime.name, True)


def _ask(host: Host, settings: Settings, user: str | None, key: str | None) -> Outcome:
    from gpusched.doctor.nodes import inspect
    from gpusched.nodes.probe import probe

    node = Node(
        name=host.address if is_name(host.address) else "host",
        partition="init",
        address=host.address,
        user=user,
        port=host.port,
        key=key,
        gpus=0,
        cores=1,
        memory_mib=1,
        runtime=RuntimeName.PROCESS,
    )
    transport = open_transport(node, settings)
    try:
        seen = inspect(transport, node, ("podman", "docker", "apptainer"))
        if seen is None:
            return NotDiscovered(host, f"{host.typed}: the account's shell does not run `sh`")
        reading = probe(transport, node, "init", settings, time.time, want_links=False)
    except GpuschedError as error:
        return NotDiscovered(host, error.message, error.hint)
    finally:
        transport.close()
    return describe(host, seen, reading)


def describe(host: Host, seen: Inspection, reading: NodeReading) -> Outcome:
    """Return what a host is, from its answer."""
    if reading.cores is None or reading.memory_total_mib is None:
        return NotDiscovered(host, f"{host.typed}: its cores and memory cannot be determined")
    gpus = max((g.index + 1 for g in reading.gpus), default=0)
    runtime, notes = choose_runtime(seen, gpus)
    types = Counter(gpu_type(g.name) for g in reading.gpus if g.name)
    if len(types) > 1:
        notes.append(f"different GPUs in one server: {', '.join(f'{n} {t}' for t, n in types.most_common())}")
    if not gpus:
        notes.append(f"no GPUs found: {reading.gpu_error or 'neither NVML nor nvidia-smi found'}")
    notes += [f"GPU {g.index} is lost: {g.error}" for g in reading.gpus if g.error]
    notes += [f"GPU {g.index} is in MIG mode; jobs get its {len(g.slices)} slices" for g in reading.gpus if g.mig_mode]
    watts, estimate = rated_power(seen.product, reading)
    short = (reading.hostname or "").split(".")[0]
    plain = host.address.split(".")[0] if not re.fullmatch(r"[0-9.]+|.*:.*", host.address) else short
    return Discovered(
        host=host,
        name=next((n for n in (plain, host.address) if is_name(n)), "node"),
        gpus=gpus,
        gpu_type=types.most_common(1)[0][0] if types else "GPU" if gpus else "",
        gpu_memory_mib=max((g.memory_total_mib for g in reading.gpus if g.memory_total_mib), default=None),
        cores=reading.cores,
        memory_mib=reading.memory_total_mib,
        runtime=runtime,
        rated_power_w=watts,
        rated_power_is_estimate=estimate,
        notes=tuple(notes),
    )


def _expanded(argument: str) -> list[str]:
    if re.search(r"\[[0-9,-]+\]", argument) is None:
        return [argument]
    try:
        return expand_hosts(argument)
    except ValueError as error:
        raise UsageError(f'found the host "{argument}", expected {error}') from None


def _unique_names(outcomes: list[Outcome]) -> list[Outcome]:
    taken: set[str] = set()
    named: list[Outcome] = []
    for outcome in outcomes:
        if isinstance(outcome, Discovered):
            numbered = (f"{outcome.name[:56]}-{i}" for i in range(2, len(outcomes) + 2))
            longer = [outcome.name, outcome.host.address, *numbered]
            outcome = msgspec.structs.replace(outcome, name=next(n for n in longer if n not in taken and is_name(n)))
            taken.add(outcome.name)
        named.append(outcome)
    return named
