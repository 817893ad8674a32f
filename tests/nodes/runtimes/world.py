"""One runtime on one real node, driven as gpusched drives it: scripts over a transport, and the probe's lister."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

import gpusched
from gpusched.model.resources import RuntimeName
from gpusched.nodes.runtimes import AttemptRef, LaunchRequest, Runtime, runtime_for
from gpusched.nodes.runtimes.listing import parse_listing
from gpusched.nodes.runtimes.shell import BOUNDED
from gpusched.nodes.transport import CommandResult, RemoteScript, Transport
from tests.testbed import TestNode, wait_until

# For what the launcher's lines do before a runtime is asked for anything: the same for both engines and transports.
once_contained = pytest.mark.parametrize("world", ["process", "podman"], indirect=True)
# Nodes of the testbed share /var/lib with those of other test processes, which remove what is of their own cluster.
CLUSTER = f"c-{os.getpid()}"
IMAGE = "localhost/gs/busybox:1"
ROOT = Path(gpusched.__file__).parents[1]
LISTER_SH = BOUNDED + (ROOT / "gpusched/nodes/payload/attempts.sh").read_text()

LISTER = """
import json, sys
sys.path.insert(0, {root!r})
from gpusched.nodes.payload import attempts
listed = attempts.list_attempts({cluster!r}, {node!r}, {runtime!r}, {version!r})
print(json.dumps([listed, {{pid: attempts.attribute(pid, listed[0]) for pid in {pids!r}}}]))
"""

COMMAND_LINES = r"""
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open("/proc/%s/cmdline" % pid, "rb") as file:
            line = file.read().translate(bytes.maketrans(b"\0\n", b"  "))
    except OSError:
        continue
    os.write(1, b"%s %s\n" % (pid.encode(), line))
"""


class World:
    """A runtime, a node, and short words for what tests do with them."""

    def __init__(self, runtime: RuntimeName, transport: Transport, node: TestNode | None, name: str) -> None:
        self.name = runtime
        self.runtime: Runtime = runtime_for(runtime)
        self.transport = transport
        self.node = node
        self.node_name = name
        self.launched: list[AttemptRef] = []
        self.ran_s: dict[str, float | None] = {}  # by name, as last listed
        # Job ids are unique in real life too; the local world sees the processes of every testbed on this machine.
        self.tag = secrets.token_hex(4)

    @property
    def contained(self) -> bool:
        return self.name in (RuntimeName.PODMAN, RuntimeName.DOCKER)

    # ---- asking the node ------------------------------------------------------------------------------------

    def run(self, script: RemoteScript, timeout_s: float = 300) -> CommandResult:
        return self.transport.run(script, timeout_s)

    def do(self, script: RemoteScript) -> str:
        """Run a script that must succeed."""
        result = self.run(script)
        assert result.exit_code == 0, (result.stdout, result.stderr)
        return result.stdout.decode()

    def sh(self, text: str) -> str:
        return self.do(RemoteScript(("sh", "-s"), text.encode()))

    def listed(
        self, version: bool = False, pids: tuple[int, ...] = ()
    ) -> tuple[dict[str, dict[str, Any]], Any, Any, Any]:
        """Attempts by name, error, version, and whose the pids are."""
        text = LISTER.format(
            root=str(ROOT), cluster=CLUSTER, node=self.node_name, runtime=str(self.name), version=version, pids=pids
        )
        result = self.run(RemoteScript(("python3", "-I", "-S", "-"), text.encode()))
        assert result.exit_code == 0, result.stderr.decode()
        (found, error, engine_version), owners = json.loads(result.stdout)
        self.ran_s = {a["name"]: a.pop("ran_s") for a in found}  # differs from look to look
        return {a["name"]: a for a in found}, error, engine_version, {int(k): v for k, v in owners.items()}

    def listed_sh(self) -> tuple[dict[str, dict[str, Any]], str | None]:
        """Return the same by attempts.sh."""
        variables = f"CLUSTER_ID={CLUSTER} NODE={self.node_name} RUNTIME={self.name} ROOT=\n"
        text = self.do(RemoteScript(("sh", "-s"), (variables + LISTER_SH).encode()))
        found, error = parse_listing(text, CLUSTER, str(self.name))
        assert all(a.pop("ran_s") is None for a in found), "attempts.sh does not report it"
        return {a["name"]: a for a in found}, error

    def read(self, ref: AttemptRef) -> dict[str, Any]:
        """The attempt as the probe sees it; it must be there."""
        found, error, _, _ = self.listed()
        assert error is None
        return found[ref.name]

    def await_phase(self, ref: AttemptRef, *phases: str, timeout_s: float = 30) -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            attempt = self.listed()[0].get(ref.name)
            return attempt if attempt and attempt["phase"] in phases else None

        try:
            # A look runs Python and an engine's client on the node: it takes about the time of a container's start.
            found = wait_until(there, timeout_s, f"{ref.name} to be {phases}", interval_s=0.2)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it is {self.listed()[0].get(ref.name)}") from None
        assert found is not None
        return found

    def folder(self, ref: AttemptRef) -> str:
        return f'"${{XDG_STATE_HOME:-$HOME/.local/state}}/gpusched-node/{CLUSTER}/{self.node_name}/{ref.name}"'

    # ---- jobs -----------------------------------------------------------------------------------------------

    def request(self, *command: str, job: str = "job1", **changes: Any) -> LaunchRequest:
        defaults: dict[str, Any] = {
            "name": f"gpusched-{job}{self.tag}-1-0", "cluster_id": CLUSTER, "node": self.node_name, "job_id": job,
            "attempt": 1, "rank": 0, "image": IMAGE, "command": command, "workdir": "/", "cores": 1, "memory_mib": 256,
        }  # fmt: skip
        return LaunchRequest(**(defaults | changes))

    def launch(self, *command: str, job: str = "job1", **changes: Any) -> AttemptRef:
        request = self.request(*command, job=job, **changes)
        self.launched.append(request.ref)
        assert self.do(self.runtime.launch(request)) == "launched\n"
        return request.ref

    def output(self, ref: AttemptRef, **options: Any) -> str:
        return self.do(self.runtime.log(ref, **options))

    def finish(self, *command: str, **changes: Any) -> tuple[dict[str, Any], str]:
        """Launch, wait for the end, and return the attempt and its output."""
        ref = self.launch(*command, **changes)
        attempt = self.await_phase(ref, "exited", "failed", "lost")
        return attempt, self.output(ref)

    def pids(self, words: str, part: bool = False) -> list[int]:
        """Processes of the node whose command line is ``words``, or holds them."""
        found = []
        for line in self.do(RemoteScript(("python3", "-I", "-S", "-c", COMMAND_LINES))).splitlines():
            pid, _, command = line.partition(" ")
            if words in command if part else words == command.strip():
                found.append(int(pid))
        return found

    def clean(self) -> None:
        for ref in self.launched:
            self.run(self.runtime.remove(ref))
        # Of jobs of other users; what is below /var/lib is not the node's own in the testbed.
        self.run(RemoteScript(("rm", "-rf", f"/var/lib/gpusched-node/{CLUSTER}/{self.node_name}")))
