"""The doors: valid seeds of each, and the public function that the CLI or the controller calls for an input."""

from __future__ import annotations

import gzip
import lzma
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from gpusched.config import fields
from gpusched.errors import MAX_LINE, GpuschedError
from gpusched.model import relay as wire
from gpusched.model.commands import AnyCommand
from gpusched.model.jobs import JobState
from gpusched.model.resources import Settings
from gpusched.nodes.transport import CommandResult, RemoteScript, TransportError
from tests.builders import ID, job, spec
from tests.fuzz.mutating import Corpus, broken
from tests.fuzz.running import Defect, check_line

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
Ask = Callable[[bytes], str]
_NOW = 1_800_000_000.0


@dataclass
class Target:
    """A door.

    Attributes:
        make: Returns an input.
        ask: Asks the door; returns in a word how it answered, raises `Defect` or whatever escapes.
        extremes: Inputs of their own: too large, too deep, too many.
    """

    make: Callable[[random.Random], bytes]
    ask: Ask
    extremes: list[Callable[[], bytes]] = field(default_factory=list)


def _answer(call: Callable[[], object]) -> str:
    """Return ``value``, or the name of the product's own error."""
    try:
        call()
    except GpuschedError as error:
        check_line(error)
        return type(error).__name__
    return "value"


_WORKLOAD = b"""sizes: [{gpus: 1, share: 3, cores_per_gpu: 4}, {gpus: 8, share: 1}]
run_time: {parts: [{weight: 1, median: 10m, sigma: 1.5}], min: 10s, max: 7d, tail: {share: 0.1, above: 1d, alpha: 1.2}}
limits: {menu: [1h, 12h, 1d, 7d], of_run_time: 2, default: 0.4}
"""
_INVENTORY = b"""settings: {tick: 5s, admins: [alice], fairshare_half_life: 7d, power_price: 0.30 EUR/kWh, shared: true,
  idle: {after: 2h, then: requeue, exempt: {names: ["serve-*"]}}, logs: {max_per_job: 64M, max_total: 10G}}
defaults: &d {runtime: process, gpus: 8, cores: 128, memory: 1024G, port: 1, health: {xid-gpu: requeue}}
groups: {science: {shares: 3, limits: {gpus: 16}},
  physics: {parent: science, members: [alice, bob], limits: {gpu_hours: 2000}}}
limits: {gpus: 8, running_jobs: 4}
qos: {urgent: {priority: 100, limits: {gpus: 4}, groups: [science]}}
topology: {spine: {}, r1: {nodes: n[1-4], uplink: 4x100G, parent: spine}}
partitions:
  a:
    <<: {policy: easy, max_time: 21d}
    default: yes
    preemptible: true
    resizable: {min: 1, max: 8, cooldown: 20m}
    placement: {max_spread: rack, wait: 10m}
    defaults: {gpu_type: A100, rated_power: 6.5kW, sharing: {mode: time-slicing, slowdown: 0.3}}
    nodes: [n[1-4], {name: n5, address: 10.0.0.13, user: admin, port: 2222, gpu_indices: [0, 1], gpus: 2}]
    flavors: {s: {gpus: 2, cores: 64, memory: 256G, time: 72h}, f: {gpus: 16, cores: 32, memory: 1G, time: 1d}}
"""
_INVENTORY_PARTS = (
    b"partitions: {p: {nodes: [n1], defaults: {gpus: 1, cores: 1, memory: 1G}}}\n",
    b"engine: slurm\npartitions: {p: {nodes: [{name: n1, transport: none, gpus: 1, cores: 1, memory: 1G}]}}\n",
)


# -- files ---------------------------------------------------------------------------------------------------------

_YAML_EXTREMES: list[Callable[[], bytes]] = [
    lambda: b"[" * 300_000,
    lambda: b"{a: " * 100_000,
    lambda: b"- " * 100_000,
    lambda: b"a" * (100 * MIB),
    lambda: b"? " * 100_000,
    lambda: b'a: "' + b"\\" * (4 * MIB),
    lambda: b"{nodes: n[1-2], x: " + b'\\"' * MIB,
    lambda: b"partitions: {p: {nodes: [" + b"n[1-9999], " * 100_000 + b"]}}",
    lambda: b"x" * MIB + b": 1",
    lambda: b"'" + b"''" * MIB,
    lambda: (
        b"a0: &a0 [x]\n"
        + b"".join(b"a%d: &a%d [%s]\n" % (i, i, b", ".join([b"*a%d" % (i - 1)] * 9)) for i in range(1, 40))
    ),
    lambda: b"".join(b"k%d: 1\n" % i for i in range(300_000)),
    lambda: b"&a " * 100_000,
    lambda: b"a: " + b"9" * MIB,
]


@contextmanager
def inventory(folder: Path) -> Iterator[Target]:
    """`load_inventory`, and `inventory_errors`, which reports all errors."""
    from gpusched.config.inventory import inventory_errors, load_inventory

    path = folder / "inventory.yaml"
    example = (ROOT / "inventory.yaml").read_text()
    live = "\n".join(line.partition("  #")[0] for line in example.splitlines() if line.strip()[:1] not in ("", "#"))
    words = [
        key
        for table in vars(fields).values()
        if isinstance(table, dict | tuple)
        for key in table
        if isinstance(key, str)
    ]
    corpus = Corpus([live.encode(), _INVENTORY, *_INVENTORY_PARTS], [w for w in words if w.isidentifier()])

    def ask(data: bytes) -> str:
        path.write_bytes(data)
        found = _answer(partial(load_inventory, path))
        if len(data) < 3000:
            for error in inventory_errors(path):
                check_line(error)
        return found

    yield Target(corpus.mutant, ask, _YAML_EXTREMES)


@contextmanager
def policy(folder: Path) -> Iterator[Target]:
    """`load_policy`."""
    from gpusched.config.policies import BUILT_IN, load_policy

    path = folder / "policy.yaml"
    seeds = [file.read_bytes() for file in sorted(BUILT_IN.glob("*.yaml"))]
    words = (
        "order",
        "ties",
        "agent",
        "fallback",
        "place",
        "backfill",
        "sizes",
        "mapping",
        "placement_wait",
        "resize",
        "preemption",
        "sjf-estimate",
        "rack-wait",
        "contention",
        "conservative",
        "easy",
        "none",
        "interval",
    )
    corpus = Corpus(seeds, words)

    def ask(data: bytes) -> str:
        path.write_bytes(data)
        return _answer(partial(load_policy, path))

    yield Target(corpus.mutant, ask, _YAML_EXTREMES)


@contextmanager
def traces(folder: Path) -> Iterator[Target]:
    """`load` of every format, plain and compressed, and `load_workload`; nothing is kept in the user's cache."""
    from gpusched.traces import file as tracefile
    from gpusched.traces.load import load
    from gpusched.traces.readers import cache
    from gpusched.traces.workload import load_workload
    from tests.traces import samples

    (folder / "sample.swf").write_text(samples.SWF)
    own = folder / f"own{tracefile.SUFFIX}"
    tracefile.write(own, load(folder / "sample.swf", strict=False))
    workload = b"arrivals: {per_hour: 40, start: 2026-01-05, daily: [1, 2, 1], days: 2}\nusers: 5\n" + _WORKLOAD
    texts = {
        "swf": samples.SWF,
        "philly-csv": samples.PHILLY_CSV,
        "philly": samples.PHILLY,
        "helios": samples.HELIOS,
        "acme": samples.SEREN,
        "openb": samples.OPENB,
        "sacct": samples.SACCT,
    }
    gavel = b"ResNet-18 (batch size 64)\tpython3 main.py\timages\t--num_steps\t1\t500\t1\t-1.0\t0.0\t300\n" * 3
    corpora = {name: Corpus([text.encode()]) for name, text in texts.items()}
    corpora |= {"gavel": Corpus([gavel]), "gpusched": Corpus([own.read_bytes()]), "workload": Corpus([workload])}
    names = [*corpora, "pai2020"]
    pai = Corpus([samples.PAI_JOB.encode(), samples.PAI_TASK.encode(), samples.PAI_INSTANCE.encode()])
    packers = (gzip.compress, lzma.compress)

    def make(rng: random.Random) -> bytes:
        name = rng.choice(names)
        data = (
            b"\0\0".join(pai.seed(rng) if rng.random() < 0.5 else seed for seed in pai.seeds)
            if name == "pai2020"
            else own_changed(rng)
            if name == "gpusched" and rng.random() < 0.7
            else corpora[name].mutant(rng)
        )
        if rng.random() < 0.05 and name not in ("workload", "gpusched"):
            data = rng.choice(packers)(data)
            data = broken(data, rng) if rng.random() < 0.5 else data
        guess, strict = rng.random() < 0.2, rng.random() < 0.3
        return b"%s %d %d\n" % (name.encode(), guess, strict) + data

    def own_changed(rng: random.Random) -> bytes:
        """Return a trace of ours with one of its arrays changed, and right checksums."""
        import numpy as np

        with np.load(own) as kept:
            arrays = dict(kept)
        name = rng.choice(sorted(arrays))
        match rng.randrange(6):
            case 0:
                arrays.pop(name)
            case 1:
                arrays[name] = arrays[name][: rng.randrange(3)]
            case 2:
                arrays[name] = np.frombuffer(rng.randbytes(64), rng.choice((np.int64, np.float64, np.uint8, np.int8)))
            case 3:
                arrays[name] = np.full((2, 2), rng.choice((np.nan, np.inf, -1e300, 2.0**63)))
            case 4:
                header = Corpus([bytes(arrays["header"])]).seed(rng)
                arrays["header"] = np.frombuffer(header, np.uint8)
            case _:
                arrays[name] = np.array([rng.choice((-(2**63), 2**63 - 1, -1, 0, 2**31))] * max(1, len(arrays[name])))
        buffer = BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        return buffer.getvalue()

    def ask(data: bytes) -> str:
        head, _, data = data.partition(b"\n")
        name, guess, strict = [*head.decode("latin-1").split(), "swf", "0", "0"][:3]
        path = folder / ("input.npz" if name == "gpusched" else "input.txt")
        if name == "pai2020":
            path = folder / "pai"
            path.mkdir(exist_ok=True)
            for part, content in zip(("job", "task", "instance"), (data + b"\0\0\0\0").split(b"\0\0"), strict=False):
                (path / f"pai_{part}_table.csv").write_bytes(content)
        else:
            path.write_bytes(data)
        if name == "workload":
            return _answer(partial(load_workload, path))
        return _answer(partial(load, path, None if guess == "1" else name, strict=strict == "1"))

    zeros = gzip.compress(b"0" * (64 * MIB))
    extremes: list[Callable[[], bytes]] = [
        lambda: b"swf 0 0\n" + b"1 " * (20 * MIB),
        lambda: b"swf 0 0\n" + b"1" * (100 * MIB),
        lambda: b"swf 1 0\n" + zeros * 32,
        lambda: b"helios 0 0\n" + zeros * 32,
        lambda: b"philly 0 0\n" + zeros * 32,
        lambda: b"sacct 0 0\n" + zeros * 32,
        lambda: b"gavel 0 0\n" + b"\t" * (20 * MIB),
        lambda: b"philly 0 0\n" + b"[" * MIB,
        lambda: b"philly 0 0\n" + b'[{"a":' * 300_000,
        lambda: b"philly-csv 0 0\n" + b'"' + b"a\n" * (10 * MIB),
        lambda: b"gpusched 0 0\n" + _array_bomb(own),
    ]
    with mock.patch.object(cache, "place", return_value=None):
        yield Target(make, ask, extremes)


def _array_bomb(own: Path) -> bytes:
    """Return a trace of ours whose header announces 10^12 jobs, each column being one value for all."""
    import numpy as np

    with np.load(own) as kept:
        arrays = {name: rows[:1] for name, rows in kept.items()}
        header = msgspec.json.decode(bytes(kept["header"])) | {"jobs": 10**12}
    arrays["header"] = np.frombuffer(msgspec.json.encode(header), np.uint8)
    buffer = BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


# -- commands ------------------------------------------------------------------------------------------------------


@contextmanager
def commands(folder: Path) -> Iterator[Target]:
    """Command files in the inbox of a controller, which applies each; every 200 a cycle with what was taken."""
    from gpusched.controller.commandfiles import CommandApplier
    from gpusched.controller.secretfiles import SecretFiles
    from tests.controller.imagined import inventory as imagined
    from tests.controller.site import Site

    fields: dict[str, Any] = {
        "time": _NOW,
        "id": ID,
        "job_ids": [ID, "0123456789b_3"],
        "nodes": ["n0"],
        "priority": 5,
        "name": "resv",
        "users": ["u"],
        "partition": "p",
        "policy": "easy",
        "array": [0, 1, 5],
        "max_running": 2,
        "start": _NOW,
        "end": _NOW + 60,
        "reason": "r",
        "secrets": {"A": "b"},
        "evidence": {},
        "attempt": 1,
        "act": "cancel",
        "job_id": ID,
        "now": True,
        "asked_by": "",
        "spec": msgspec.to_builtins(spec(env={"A": "b"}, nodelist=("n0",), begin_time=_NOW, signal_before_s=60)),
    }
    seeds = []
    for kind in AnyCommand.__args__:
        known = {
            f.encode_name: fields.get(f.name) for f in msgspec.structs.fields(kind) if fields.get(f.name) is not None
        }
        seeds += [msgspec.json.encode({"command": kind.__struct_config__.tag} | known)] * (8 if "spec" in known else 1)
    words = [f.encode_name for kind in AnyCommand.__args__ for f in msgspec.structs.fields(kind)]
    corpus = Corpus(seeds, [*words, *(f.encode_name for f in msgspec.structs.fields(type(spec())))])
    sites: list[Any] = []
    count = 0

    def site() -> Any:
        nonlocal count
        count += 1
        if count % 2000 == 1:
            for old in sites:
                old[0].store.close()
            found = Site(folder / f"state{count}")
            found.world.now = _NOW
            sites[:] = [(found, CommandApplier(found.store, found.inbox, imagined(), SecretFiles(found.state)))]
        if count % 200 == 0:
            sites[0][0].turn()
            failed = [j for j in sites[0][0].store.jobs() if j.reason == "InternalError"]
            if failed:
                raise Defect(f"InternalError: {failed[0].message}")
        return sites[0]

    def ask(data: bytes) -> str:
        found, applier = site()
        (found.inbox.new / f"x{count}.submit").write_bytes(data)
        applier.apply_inbox(_NOW)
        if left := os.listdir(found.inbox.new):
            for name in left:
                os.unlink(found.inbox.new / name)
            raise Defect("the file is still in the inbox")
        for event in found.store.events(limit=5):
            if event.kind == "refused_command" and event.data["file"] == f"x{count}.submit":
                why = str(event.data["why"])
                if why.startswith("internal error") or len(why) > MAX_LINE:
                    raise Defect(f"refused: {why[:300]}")
                return "refused"
        return "applied"

    extremes = [
        lambda: b"[" * 300_000,
        lambda: b"0" * (100 * MIB),
        lambda: b'{"command":' * 200_000,
        lambda: seeds[0][:-1] + b',"x":' + b"[" * MIB,
        lambda: b'{"command":"cancel","time":1e999,"job_ids":[' + b'"a",' * 900_000 + b'"a"]}',
    ]
    yield Target(corpus.mutant, ask, extremes)
    for old in sites:
        old[0].store.close()


# -- node answers --------------------------------------------------------------------------------------------------


class _Answers:
    """A transport whose node answers every command with the same bytes."""

    output = b""

    def run(self, script: RemoteScript, timeout_s: float) -> CommandResult:
        return CommandResult(0, self.output, b"")


class _ReadingSite:
    """A controller that gets every 20th reading as its first node's; a cycle must go on, whatever is in it."""

    def __init__(self, folder: Path) -> None:
        from tests.controller.site import Site

        self._site, self._count = Site(folder), 0
        self._observe = self._site.cluster.observe
        self._site.cluster.observe = self._with_reading  # type: ignore[method-assign]
        self._reading: Any = None
        self._site.submit()

    def read(self, reading: Any) -> None:
        self._count += 1
        if self._count % 20 == 1:
            self._reading = reading
            self._site.turn(heard=False)

    def _with_reading(self, *args: Any, **more: Any) -> Any:
        from gpusched.cluster.base import NodeObservation

        now, found = self._site.world.now, dict(self._observe(*args, **more))
        name = next(iter(self._site.world.hosts))
        reading = msgspec.structs.replace(self._reading, node=name, time=now)
        return found | {name: NodeObservation(began=now, result=reading)}


@contextmanager
def probe(folder: Path) -> Iterator[Target]:
    """`probe` of a node, and the channel of ends and health checks, for whatever the node prints."""
    from gpusched.nodes import probe as module
    from gpusched.nodes.ends import parse_end
    from gpusched.nodes.healthcheck import parse_answer
    from gpusched.nodes.parse_reading import MARK
    from tests.controller.imagined import inventory as imagined
    from tests.nodes.answers import ANSWER, SECTIONS

    node, settings, site = imagined().nodes[0], Settings(), _ReadingSite(folder)
    smi = {
        **ANSWER,
        "source": "nvidia-smi",
        "smi_apps": "GPU-1, 99, 30990",
        "processes": {"99": {"user": "bob"}},
        "smi_gpus": "0, GPU-1, Tesla V100, 32510, 31000, 100, 287.33, 300.00, 71",
    }
    kernel = {
        "source": "kmsg",
        "now_us": 5,
        "messages": [[4, "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 8"]],
    }
    rich: dict[str, Any] = {
        **ANSWER,
        "kernel": kernel,
        "wiring": {"nics": [], "gpus": {}},
        "job_folders": ["a"],
        "containers": [
            {
                "name": "gpusched-0abc-1-0",
                "phase": "running",
                "pid": 7,
                "started_at": 1.5,
                "progress": ['{"step": 1}', 0.5],
                "saved": ['{"step": 1}', 1.0],
                "ask": ["{}", 1.0],
            }
        ],
    }
    attempts = (
        '@@attempts\nattempt gpusched-0abc-1-0\nmeta rank=0\npid 7\nstarted 5\n'
        'progress gpusched-0abc-1-0 0.5 {"step": 1}\n'
        "ask gpusched-0abc-1-0 1 7b7d\nattached 1.5\nengine gpusched-0abc-1-0|running|0|x\nattempts_end\n"
    )
    marked = [
        b"\n" + MARK + msgspec.json.encode(answer) + b"\n" for answer in (ANSWER, smi, rich, {**ANSWER, "spoilt": True})
    ]
    sections = Corpus([SECTIONS.replace("@@end", attempts).encode()])
    answers = Corpus(marked, [f.name for f in msgspec.structs.fields(module.NodeReading)])
    others = Corpus([b"0\nGPU ok\nvalue 3.5 ms\n", b"lost\n", b"hung\nx\n", b"gpusched-0abc-1-0:71\n"])

    def make(rng: random.Random) -> bytes:
        kind = rng.random()
        if kind < 0.45:
            return b"p" + answers.mutant(rng)
        return b"s" + sections.mutant(rng) if kind < 0.9 else b"o" + others.mutant(rng)

    def ask(data: bytes) -> str:
        kind, data = data[:1], data[1:]
        if kind == b"o":
            parse_end(data)
            return "none" if parse_answer(data[:MIB].decode(errors="replace")) is None else "value"
        transport = _Answers()
        transport.output = data
        if kind == b"s":
            module._states[transport] = state = module._ProbeState()  # type: ignore[index]
            state.mode = "sh"
        try:
            reading = module.probe(transport, node, "c", settings, lambda: _NOW)  # type: ignore[arg-type]
        except TransportError as error:
            check_line(error)
            return error.kind
        site.read(reading)
        return "reading"

    mark = b"p\n" + MARK
    gpus = b"@@smi_gpus\n0, GPU-1, V100, 1, 1, 1, 1, 1, 1\n@@smi_apps\n"
    extremes = [
        lambda: mark + b"[" * (8 * MIB),
        lambda: mark + b'{"gpus":' * MIB,
        lambda: b"p" + b"\n@gpusched-probe@" * MIB,
        lambda: mark + b'{"clock":[1,2],"gpus":[' + b"{}," * (2 * MIB) + b"{}]}",
        lambda: b"s\n@gpusched-sections@\n\n" + gpus + b"GPU-1, 99, 30990\n" * 900_000 + b"\n@@end",
        lambda: b"s\n@gpusched-sections@\n\n" + b"\n@@a\n" * (2 * MIB),
        lambda: b"s\n@gpusched-sections@\n\n@@attempts\nattempt a\n" + b"error x\n" * (2 * MIB) + b"attempts_end\n",
        lambda: b"s" + b"a" * (16 * MIB),
        lambda: b"p" + b"\n" * (16 * MIB),
        lambda: b"o" + b"\n" * (16 * MIB),
    ]
    yield Target(make, ask, extremes)


# -- sockets -------------------------------------------------------------------------------------------------------


class _Connection:
    """A client that has sent its bytes and reads nothing before the end."""

    def __init__(self, data: bytes) -> None:
        self._data, self.sent = BytesIO(data), bytearray()

    def makefile(self, mode: str, size: int) -> BytesIO:
        return self._data

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80

    def settimeout(self, seconds: float | None) -> None: ...

    def setsockopt(self, *_: int) -> None: ...


@contextmanager
def http(folder: Path) -> Iterator[Target]:
    """The page's server, for the bytes of a connection."""
    from benchmarks.web import site
    from gpusched.web.access import AccessRules
    from gpusched.web.server import WebServer
    from gpusched.web.server import _Connection as Handler

    site(folder, 4, 12, seed=1, history=False)
    environment = {"GPUSCHED_STATE": str(folder / "state"), "GPUSCHED_INVENTORY": str(folder / "inventory.yaml")}
    from gpusched.queue.store import Store

    store = Store.create_or_open(folder / "state")
    job_id = store.active()[0].id
    store.close()
    head = b' HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\nIf-None-Match: "x"\r\n'
    head += b"Sec-Fetch-Site: same-origin\r\n\r\n"
    paths = [
        "/",
        "/main.js",
        "/api/state?since=x-5",
        "/api/events",
        "/api/me",
        "/api/forecast",
        "/api/usage",
        f"/api/job/{job_id}",
        f"/api/job/{job_id}/log?rank=0&attempt=1",
        "/api/job/%00%ff",
        "/api/job/[1-9]",
        "/../x",
        "http://h/api/me",
    ]
    corpus = Corpus([*(b"GET " + path.encode() + head for path in paths), b"HEAD /" + head, b"POST /" + head])

    def ask(data: bytes) -> str:
        connection = _Connection(data)
        with redirect_stderr(StringIO()) as log:
            Handler(connection, ("127.0.0.1", 5), server)  # type: ignore[arg-type]
        if log.getvalue():
            raise Defect(f"printed {log.getvalue()[:200]!r}")
        sent = bytes(connection.sent)
        if b"Traceback" in sent:
            raise Defect("a traceback is sent")
        for answer in sent.split(b"\r\n\r\n")[:1]:
            if b'"error"' in sent and len(sent) > 4 * MAX_LINE:
                raise Defect(f"an error of {len(sent)} bytes")
            return answer.split(b" ", 2)[1].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "nothing"
        return "nothing"

    extremes = [
        lambda: b"GET /" + b"a" * (100 * MIB),
        lambda: b"a" * (100 * MIB),
        lambda: b"GET /" + head[:-4] + b"\r\nX: y" * (10 * MIB),
        lambda: (b"GET /api/me" + head) * 5000,
        lambda: b"GET /api/state?" + b"a&" * 30_000 + head,
        lambda: b"GET /api/job/" + b"%" * 60_000 + head,
    ]
    with mock.patch.dict(os.environ, environment):
        server = WebServer("127.0.0.1", 0, AccessRules())
        try:
            server.feed.stop()
            yield Target(corpus.mutant, ask, extremes)
        finally:
            server.background.stop()
            server.server_close()


@contextmanager
def relay(folder: Path) -> Iterator[Target]:
    """The relay's side of a connection, for the bytes of a client; and a client's, for the bytes of the relay."""
    from gpusched.client.relay import decoded_frames, exit_code
    from gpusched.config.paths import log_path
    from gpusched.controller import relay as module
    from gpusched.queue.inbox import Inbox
    from gpusched.queue.store import Store

    (folder / "inventory.yaml").write_bytes(_INVENTORY_PARTS[0])
    Inbox(folder / "state").create()
    store = Store.create_or_open(folder / "state")
    store.put_jobs([job(ID, JobState.COMPLETED, {"n1": (0,)}, spec=spec())])
    path = log_path(folder / "state", ID, 1, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"output\n")
    context = module.RelayContext(folder / "state", folder / "inventory.yaml")
    requests = [
        wire.KeptLog(job=ID, attempt=1, rank=0),
        wire.NodeLog(job=ID, attempt=1, rank=0, tail_bytes=5),
        wire.Exec(job=ID, rank=0, argv=("id",), terminal=wire.Terminal()),
        wire.Attach(job=ID, attempt=1),
        wire.Forward(job=ID, attempt=1, port=80),
    ]
    bodies = Corpus([msgspec.json.encode(request) for request in requests])
    failures = Corpus([msgspec.json.encode(wire.Failure("no such job", "see 'gpusched status'", True))])
    kinds = bytes(
        (
            wire.REQUEST,
            wire.INPUT,
            wire.INPUT_ENDED,
            wire.RESIZED,
            wire.OUTPUT,
            wire.ERRORS,
            wire.EXITED,
            wire.FAILED,
            wire.BEGAN,
            0,
            255,
        )
    )

    def framed(kind: int, body: bytes, rng: random.Random) -> bytes:
        length = (
            len(body)
            if rng.random() < 0.9
            else rng.choice((0, 1, len(body) + 1, wire.MAX_PAYLOAD, wire.MAX_PAYLOAD + 1, 2**32 - 1))
        )
        return struct.pack("!BI", kind, length) + body

    def make(rng: random.Random) -> bytes:
        from_client = rng.random() < 0.5
        corpus, kind = (bodies, wire.REQUEST) if from_client else (failures, wire.FAILED)
        first = framed(kind if rng.random() < 0.8 else rng.choice(kinds), corpus.mutant(rng), rng)
        more = [
            framed(rng.choice(kinds), rng.randbytes(rng.choice((0, 1, 4, 9))), rng)
            for _ in range(rng.choice((0, 0, 1, 3)))
        ]
        if not from_client:
            rng.shuffle(more := [*more, first])
            return b"r" + b"".join(more)
        data = first + b"".join(more)
        return b"c" + (broken(data, rng) if rng.random() < 0.1 else data)

    def of_relay(data: bytes) -> None:
        frames = wire.Frames()
        for at in range(0, len(data), 7) if len(data) < 4000 else [0]:
            for kind, payload in decoded_frames(frames, data[at : at + 7] if len(data) < 4000 else data):
                if kind == wire.EXITED:
                    exit_code(payload)
                    return

    def of_client(data: bytes) -> str:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            written = ours.send(data) if data else 0
            ours.shutdown(socket.SHUT_WR)
            if written < len(data) and len(data) < 100_000:
                raise AssertionError("the socket's buffer is too small for this input")
            module.serve(theirs, 0, context)
            answer = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        frames = list(wire.Frames().feed(answer))
        if sum(5 + len(payload) for _, payload in frames) != len(answer):
            raise Defect("a broken frame is sent")
        for kind, payload in frames:
            if kind == wire.FAILED:
                failure = msgspec.json.decode(payload, type=wire.Failure)
                if failure.message.startswith("internal") or len(failure.message) > MAX_LINE:
                    raise Defect(failure.message[:300])
                return "failed"
        return "answered" if frames else "nothing"

    def ask(data: bytes) -> str:
        return of_client(data[1:]) if data[:1] == b"c" else _answer(partial(of_relay, data[1:]))

    deep = b'{"type":"exec","job":"' + ID.encode() + b'","rank":0,"argv":' + b"[" * 200_000
    extremes = [
        lambda: b"c" + wire.frame(wire.REQUEST, deep),
        lambda: b"r" + wire.frame(wire.FAILED, b'{"message":' + b"[" * 200_000),
        lambda: b"r" + wire.frame(wire.OUTPUT, b"") * 2_000_000,
        lambda: b"r" + wire.frame(wire.OUTPUT, b"x" * wire.MAX_PAYLOAD) * 200,
    ]
    try:
        yield Target(make, ask, extremes)
    finally:
        store.close()


TARGETS: dict[str, tuple[Callable[[Path], Any], int]] = {
    "inventory": (inventory, 8),
    "policy": (policy, 12),
    "commands": (commands, 12),
    "traces": (traces, 6),
    "probe": (probe, 22),
    "http": (http, 15),
    "relay": (relay, 25),
}
"""Door by name, and its share in percent of the inputs for all: those that answer fast get more."""


@contextmanager
def opened(name: str, folder: Path) -> Iterator[Target]:
    """Open a door whose files are in ``folder``; the log of what it refuses is not shown."""
    import logging

    logger = logging.getLogger("gpusched")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        folder.mkdir(parents=True, exist_ok=True)
        yield stack.enter_context(TARGETS[name][0](folder))
