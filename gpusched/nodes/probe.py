"""One exec that reads all of a node: GPUs, processes, gpusched's attempts, the machine.

The payload (payload/*.py and nvidia-ml-py's own file) lies in the node's cache folder under a name made of its content;
a constant command runs it with a small request on stdin. The first contact, and only that, takes a second exec.
"""

from __future__ import annotations

import hashlib
import shlex
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec

from gpusched.model.readings import ContainerReading, NodeReading
from gpusched.model.resources import Node, Settings
from gpusched.nodes.parse_reading import find_answer, parse_reading, reading_of_sections, split_sections
from gpusched.nodes.runtimes.shell import BOUNDED
from gpusched.nodes.transport import CommandResult, RemoteScript, Transport, TransportError

_PAYLOAD = Path(__file__).parent / "payload"
_PACKAGE = "gpusched/nodes/payload"
_NEED_PREFIX = "@gpusched-need-"
_PATH = 'umask 077; PATH="$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"; export PATH; '
_MARGIN_S = 6.0  # what a probe keeps of its timeout for the connection and for a runtime that hangs
_MAX_ANSWER_BYTES = 16 << 20  # a node of 16 GPUs with a hundred attempts answers some hundred kB
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 600.0  # before a payload that did not help is sent again
_Mode = Literal["cached", "upload", "sh"]


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the payload is asked, as one line of JSON on its stdin.

    Attributes:
        indices: NVML indices the inventory declares (the simulated ones are made from it).
        want_links: Whether to read how GPUs and NICs are wired, which hardly changes while a machine is up.
        want_profiles: Whether to read what GPUs can be cut into also where MIG mode is off.
        deadline_s: After so many seconds GPUs that have not answered are reported as such.
        engine_timeout_s: And so many are given to a call of the container engine: a hung one is reported by name.
        want_kernel: Whether to read NVIDIA's messages in the kernel's log, after ``kernel_after_us`` since boot (None:
            all), from the file ``kernel_log`` (None: from the kernel, else from journald).
        listen: Whether a process on the node is to receive NVML's events; False ends one, None leaves it as it is.
    """

    cluster_id: str
    node: str
    runtime: str
    indices: tuple[int, ...]
    simulated: bool = False
    want_links: bool = False
    want_profiles: bool = False
    deadline_s: float = 12.0
    engine_timeout_s: float = 8.0
    want_kernel: bool = False
    kernel_after_us: int | None = None
    kernel_log: str | None = None
    listen: bool | None = None


class _ProbeState:
    """How the node behind a transport wants to be probed; learnt from its answers, forgotten with the transport."""

    mode: _Mode = "cached"
    _pause_s = 0.0
    _resend_at = float("-inf")

    def may_resend(self) -> bool:
        """Return whether the payload may be sent again: one that did not help is, but ever more seldom."""
        return time.monotonic() >= self._resend_at

    def record_upload(self, helped: bool) -> None:
        """Remember whether a payload just sent gave a whole answer: then sending it again would, too."""
        self._pause_s = 0.0 if helped else min(_LONGEST_PAUSE_S, max(_SHORTEST_PAUSE_S, 2 * self._pause_s))
        self._resend_at = float("-inf") if helped else time.monotonic() + self._pause_s


_states: weakref.WeakKeyDictionary[Transport, _ProbeState] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def probe(
    transport: Transport,
    node: Node,
    cluster_id: str,
    settings: Settings,
    now: Callable[[], float],
    want_links: bool = False,
    want_kernel: bool = True,
    kernel_after_us: int | None = None,
    listen: bool | None = None,
) -> NodeReading:
    """Read a node.

    Args:
        transport: To the node.
        node: As declared.
        cluster_id: The installation of which to list attempts.
        settings: ``probe_timeout_s`` bounds the whole probe.
        now: The controller's clock, Unix seconds.
        want_links: Read how GPUs and NICs are wired, too (ask at first contact, after a boot, and once in a while).
        want_kernel: Read the driver's messages in the kernel's log, those after ``kernel_after_us`` (None: all).
        kernel_after_us: Microseconds since boot.
        listen: Have NVML's events received between probes (never where GPUs are cut on demand: a GPU that is open
            cannot be reset); False: end that; None: leave it as it is.

    Raises:
        TransportError: The node did not answer, or with something else than a reading (kind ``protocol``).
    """
    request = _request(node, cluster_id, settings, want_links, want_kernel, kernel_after_us, listen)
    deadline = time.monotonic() + settings.probe_timeout_s
    with _lock:
        state = _states.setdefault(transport, _ProbeState())
    for _ in range(3):
        script = msgspec.structs.replace(_script(state.mode, request), max_bytes=_MAX_ANSWER_BYTES)
        sent = now()
        result = transport.run(script, max(0.1, deadline - time.monotonic()))
        received = now()
        reading, state.mode = _read(state.mode, request, result, sent, received, state)
        if reading is not None:
            return reading
    raise _no_reading(node.name, result)


def has_python(transport: Transport) -> bool:
    """Return whether python3 runs on the node, by its last answer."""
    with _lock:
        state = _states.get(transport)
    return state is None or state.mode != "sh"


def request_script(node: Node, cluster_id: str, settings: Settings) -> RemoteScript:
    """Return what a probe in the steady state runs on a node; for benchmarks and for inspection by hand."""
    return _script("cached", _request(node, cluster_id, settings, want_links=False))


def _request(
    node: Node, cluster_id: str, settings: Settings, want_links: bool, want_kernel: bool = True,
    kernel_after_us: int | None = None, listen: bool | None = None,
) -> ProbeRequest:  # fmt: skip
    return ProbeRequest(
        cluster_id=cluster_id,
        node=node.name,
        runtime=str(node.runtime),
        indices=node.indices(),
        simulated=node.simulated_gpus,
        want_links=want_links,
        want_profiles=bool(node.cut_on_demand()),
        deadline_s=max(settings.probe_timeout_s / 2, settings.probe_timeout_s - _MARGIN_S),
        engine_timeout_s=min(8.0, 0.75 * settings.probe_timeout_s),
        want_kernel=want_kernel and node.gpus > 0,
        kernel_after_us=kernel_after_us,
        kernel_log=node.kernel_log,
        listen=listen and node.gpus > 0 and not node.cut_on_demand(),
    )


def _read(
    mode: _Mode, request: ProbeRequest, result: CommandResult, sent: float, received: float, state: _ProbeState
) -> tuple[NodeReading | None, _Mode]:
    """Return the reading, if there is one, and how to ask next time."""
    if mode == "sh":
        return _read_sections(request, result, sent, received)
    # A disk that lost something may spoil the cached payload in any way: sent anew, it runs from memory.
    try:
        answer = find_answer(result.stdout)
        if answer is not None:
            if answer.get("spoilt") and mode == "cached" and state.may_resend():
                return None, "upload"
            reading = parse_reading(request.node, answer, sent, received)
            if mode == "upload":
                state.record_upload(not answer.get("spoilt"))
            return reading, "cached" if answer.get("cached") else "upload"
    except (LookupError, ArithmeticError, AttributeError, RecursionError, TypeError, ValueError) as error:
        if mode == "cached" and state.may_resend():
            return None, "upload"
        raise _unparsable(request.node, error) from None
    if f"{_NEED_PREFIX}python@".encode() in result.stdout:
        return None, "sh"
    if mode == "upload" and result.exit_code != 0:
        state.record_upload(False)  # a python3 that cannot run the payload
        return None, "sh"
    if mode == "cached" and state.may_resend():
        return None, "upload"
    if result.exit_code != 0 or f"{_NEED_PREFIX}payload@".encode() in result.stdout:
        return None, "sh"
    raise _no_reading(request.node, result)


def _read_sections(
    request: ProbeRequest, result: CommandResult, sent: float, received: float
) -> tuple[NodeReading | None, _Mode]:
    from gpusched.nodes.runtimes.listing import parse_listing

    sections = split_sections(result.stdout.decode("utf-8", "replace"))
    if sections is None:
        raise _no_reading(request.node, result)
    try:
        reading = reading_of_sections(request.node, sections, sent, received)
    except (ArithmeticError, ValueError) as error:
        raise _unparsable(request.node, error) from None
    try:
        found, trouble = parse_listing(sections.get("attempts", ""), request.cluster_id, request.runtime)
        containers = None if trouble else msgspec.convert(found, tuple[ContainerReading, ...], strict=False)
    except (ValueError, KeyError) as error:
        containers, trouble = None, f"the list of its jobs cannot be parsed: {error}"
    words = [line.partition(" ") for line in sections.get("attempts", "").splitlines()]
    folders = tuple(name for word, _, name in words if word == "job_folder")
    reading = msgspec.structs.replace(reading, containers=containers, runtime_error=trouble, job_folders=folders)
    return reading, "cached" if sections.get("python3") else "sh"


def _unparsable(node: str, error: Exception) -> TransportError:
    return TransportError(
        "protocol",
        f"{node}: the probe's answer cannot be parsed: {str(error)[:200]}",
        "report this with the node's python3 and driver versions",
    )


def _no_reading(node: str, result: CommandResult) -> TransportError:
    lines = (result.stderr.strip() or result.stdout.strip()).decode("utf-8", "replace").splitlines()
    what = f": {lines[-1][:200]}" if lines else ""
    return TransportError(
        "protocol",
        f"{node}: the probe ended with exit code {result.exit_code} and without a reading{what}",
        "does a non-interactive `ssh NODE sh` work, and does the account's shell start-up file end the session?",
    )


def _script(mode: _Mode, request: ProbeRequest) -> RemoteScript:
    line = msgspec.json.encode(request) + b"\n"
    if mode == "cached":
        return RemoteScript(_cached_argv(), line)
    if mode == "upload":
        boot, files = _bundle()[1:]
        code = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
        command = f'{_PATH}{_folder()}exec python3 -I -S -c "{code}" {len(boot)} "$D"'
        return RemoteScript(("sh", "-c", command), boot + line + files)
    names = {"CLUSTER_ID": request.cluster_id, "NODE": request.node, "RUNTIME": request.runtime, "ROOT": ""}
    head = "".join(f"{key}={shlex.quote(value)}\n" for key, value in names.items())
    return RemoteScript(("sh", "-c", _PATH + "exec sh -s"), (head + _shell_probe()).encode())


def _folder() -> str:
    return f'D="${{XDG_CACHE_HOME:-$HOME/.cache}}/gpusched/probe-{_bundle()[0]}"; '


@lru_cache(maxsize=1)
def _cached_argv() -> tuple[str, ...]:
    # No exclamation marks, quotes or line breaks: the login shell that takes this apart may be csh.
    # The file ok names the payload's files; their sum, one after the other in the order of their names (bootstrap.py),
    # shows whether the disk still has what was written. Whatever goes wrong, the payload is needed anew: files may go
    # at any moment.
    files = _files()
    total = zlib.crc32("".join(files[name] for name in sorted(files)).encode())
    module = _PACKAGE.replace("/", ".")
    check = (
        "import sys, zlib; from io import FileIO; ok, d, wanted, need = sys.argv[1:]; "
        "sys.excepthook = lambda *e: print(need); "
        "names = FileIO(ok).read().decode().split(); "
        "found = zlib.crc32(bytes().join(FileIO(d + n).read() for n in names)); "
        "str(found) == wanted or sys.exit(print(need)); "
        f"sys.path.insert(0, d); from {module} import main; main.from_stdin()"
    )
    return (
        "sh",
        "-c",
        f"{_PATH}{_folder()}if command -v python3 >/dev/null 2>&1; then "
        f'if [ -f "$D/ok" ]; then exec python3 -I -S -c "{check}" "$D/ok" "$D/" {total} {_NEED_PREFIX}payload@; fi; '
        f"echo; echo {_NEED_PREFIX}payload@; else echo; echo {_NEED_PREFIX}python@; fi",
    )


@lru_cache(maxsize=1)
def _bundle() -> tuple[str, bytes, bytes]:
    """Return the payload: digest of its content, the bootstrap's text, the files (compressed JSON)."""
    files = _files()
    boot = files[f"{_PACKAGE}/bootstrap.py"].encode()
    packed = msgspec.json.encode(files)
    return hashlib.sha256(packed).hexdigest()[:16], boot, zlib.compress(packed, 6)


def _files() -> dict[str, str]:
    files = {f"{_PACKAGE}/{path.name}": path.read_text("utf-8") for path in sorted(_PAYLOAD.glob("*.py"))}
    files.update({"gpusched/__init__.py": "", "gpusched/nodes/__init__.py": ""})
    pynvml = find_spec("pynvml")
    if pynvml is not None and pynvml.origin is not None:
        files["pynvml.py"] = Path(pynvml.origin).read_text("utf-8")
    return files


@lru_cache(maxsize=1)
def _shell_probe() -> str:
    return BOUNDED + "".join((_PAYLOAD / name).read_text("utf-8") for name in ("facts.sh", "attempts.sh"))
