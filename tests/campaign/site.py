"""The cluster that a campaign torments, and what is known about it besides gpusched's own records."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from gpusched.model.jobs import ENDED
from tests.campaign.faults.base import environment
from tests.campaign.ledger import now
from tests.campaign.schedule import Work, jobs_of
from tests.campaign.shim import Shim
from tests.campaign.tormented import Tormented, resize
from tests.e2e.conftest import SETTINGS
from tests.e2e.people import nobody
from tests.testbed import Testbed, TestNode, processes

HOME_KIB = 64 << 10
NODE_FAIL_AFTER_S = 14.0
PROBE_TIMEOUT_S = 5.0
POWER_W = 100
"""Of every GPU, by its energy counter."""


class Site(Tormented):
    """A cluster with its state folder and its nodes' homes on file systems of their own.

    Attributes:
        client_shim: To those of the clients of `submit_anyhow`.
        node_clock: Of the nodes whose clock is off.
        accepted_at: Accepted job -> when, in seconds since the machine's start.
        perhaps: Names of jobs whose clients died or failed: each is there once, or not at all.
        struck: Jobs of which a process was killed by a stranger.
        ordered: Jobs that were cancelled.
        resumed: Nodes for which a person had to come.
        unordered: Work whose cancellation or release found no room.
    """

    settings: Mapping[str, object] = SETTINGS | {
        "tick": "2s", "probe_timeout": f"{PROBE_TIMEOUT_S}s", "connect_timeout": "4s", "down_after": "6s",
        "node_fail_after": f"{NODE_FAIL_AFTER_S}s", "grace": "3s", "max_retries": 50,
    }  # fmt: skip

    def __init__(self, testbed: Testbed, folder: Path, *, shared: bool = False, on_fuse: bool = False) -> None:
        super().__init__(testbed, folder)
        self.on_fuse = on_fuse
        self.set_up()
        self._other: tuple[str, ...] = ()
        if shared:
            folder.chmod(0o755)
            self.state.chmod(0o755)
            self.settings = {**self.settings, "shared": True, "root_jobs": True}
            self.ledger.open_to_all(testbed.nodes)
            self._other = nobody()
        self.settings = {**self.settings, "allowed_mounts": [str(self.ledger.folder)]}
        self.client_shim = Shim(folder / "client.orders", self.state / "inbox")
        self.node_clock = Shim(folder / "node.orders", folder)
        self.accepted: dict[str, Work] = {}
        self.perhaps: list[str] = []
        self.struck: set[str] = set()
        self.ordered: set[str] = set()
        self.unordered: list[Work] = []
        self._all_orders: list[Work] = []
        self.accepted_at: dict[str, float] = {}
        self.resumed: list[str] = []
        self._clients = 0
        for node in testbed.nodes:
            home = node.disk / "home"
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={HOME_KIB}k,mode=700", "campaign", home], check=True)
            self.mounts.append(home)
            node.figures = {"gpu*.energy_rate_mw": 1000 * POWER_W}
            node.reboot()  # what is mounted now it sees only then
        self.write_inventory()

    def close(self) -> None:
        """As `Tormented.close`; GPUs use no energy any more."""
        for node in self.testbed.nodes:
            node.figures = {}
        super().close()

    # ---- the inventory --------------------------------------------------------------------------------------

    def write_inventory(
        self, settings: Mapping[str, object] | None = None, *, leave_out: Iterable[str] = (),
        flavors: Mapping[str, object] | None = None, **more: object,
    ) -> None:  # fmt: skip
        """Partition A100 runs containers, V100 processes. ``flavors``: keys of every flavor that differ."""
        runtimes = {n.name: {"runtime": "process"} for i, n in enumerate(self.testbed.nodes) if i % 2}
        super().write_inventory(settings, nodes=runtimes, leave_out=leave_out)
        if flavors:
            declared = json.loads(self.inventory.read_text())
            for partition in declared["partitions"].values():
                for flavor in partition["flavors"].values():
                    flavor.update(flavors)
            part = self.inventory.with_suffix(".part")
            part.write_text(json.dumps(declared))
            part.rename(self.inventory)

    def set_clock(self, ahead_s: int) -> None:
        """As `Tormented.set_clock`; also that of the clients of `submit_anyhow`."""
        super().set_clock(ahead_s)
        self.client_shim.clock_s = ahead_s

    # ---- disks ----------------------------------------------------------------------------------------------

    def resize_home(self, node: TestNode, left_kib: int | None) -> None:
        """Leave so much room in a node's home; None: as at first."""
        resize(node.disk / "home", HOME_KIB, left_kib)

    # ---- jobs -----------------------------------------------------------------------------------------------

    def words(self, work: Work, name: str) -> list[str]:
        """The command line that submits it."""
        options = ["submit", "--json", "-p", work.partition, "--job-name", name]
        if work.gpus:
            options += ["--gpus", str(work.gpus * (2 if work.shape == "gang" else 1))]
        else:
            options += ["--cpus", "1"]
        # A limit of its own: the default is the longest that the partition has, which an edit may lower on the way.
        options += ["-t", "0:00:02" if work.shape == "limit" else "0:30:00"]
        options += {
            "gang": ["-N", "2"], "array": ["--array", "0-2"], "held": ["--hold"],
            "once": ["--no-requeue"], "oom": ["--mem", "32M"], "image": ["--image", "localhost/no/such:1"],
        }.get(work.shape, [])  # fmt: skip
        share = str(self.ledger.folder)
        if work.partition == "A100":
            options += ["--mount", f"{share}:/share"]
            share = "/share"
        return [*options, "--", "sh", f"{share}/job.sh", str(work.seconds), str(work.code),
                *(["/dev/zero"] if work.shape == "oom" else [])]  # fmt: skip

    def submit_work(self, work: Work) -> None:
        """Submit it; where the client fails it may be there or not."""
        name = f"w{work.number}"
        prefix = self._other if work.number % 2 else ()
        words = self.words(work, name)
        words[1:1] = ["--workdir", "/tmp"] if prefix else []  # nobody has no home
        done = self.cli(*words, check=False, prefix=prefix, env={"HOME": "/tmp"} if prefix else None)
        found = re.search(r'"id": *"([^"]+)"', done.stdout) if done.returncode == 0 else None
        if found is not None:
            self._accept(found[1], work)
            return
        # On stderr may stand that the last good inventory is used.
        self.expect(done.returncode in (1, 2) and done.stdout.count("\n") == 1, f"submit: {done}")
        self.perhaps.append(name)

    def _accept(self, job: str, work: Work) -> None:
        self.accepted[job], self.accepted_at[job] = work, now()

    def submit_anyhow(self) -> None:
        """Submit a short job by a client with the client's orders."""
        self._clients += 1
        name = f"c{self._clients}"
        work = Work(-1, "V100", 1, 0.2, 0, "plain")
        done = self.cli(*self.words(work, name), check=False, env={"CAMPAIGN_SHIM": str(self.client_shim.path)})
        found = re.search(r'"id": *"([^"]+)"', done.stdout) if done.returncode == 0 else None
        if found is not None:
            self._accept(found[1], work)
            return
        failed = done.returncode in (1, 2) and done.stdout.count("\n") == 1
        self.expect(failed or done.returncode == -signal.SIGKILL, f"a client that failed: {done}")
        self.perhaps.append(name)

    def order(self, work: Work) -> None:
        """Cancel, or release, what was submitted; again until the disk takes it."""
        self._all_orders.append(work)
        for job, one in self.accepted.items():
            if one is work:
                verb = "release" if work.shape == "held" else "cancel"
                done = self.cli(verb, job, check=False)
                if verb == "cancel":
                    self.ordered.add(job)
                state = self.state_of(job) if done.returncode else "COMPLETED"
                if state not in ENDED and not (state == "" and self.may_lose.issuperset(jobs_of(job, one))):
                    self.unordered.append(work)

    def order_again(self) -> None:
        """Give all orders again: those since the backup are lost with it."""
        self.unordered = list(dict.fromkeys([*self.unordered, *self._all_orders]))
        self._all_orders = []

    def start(self) -> None:
        """Begin."""
        self.begin()

    def people(self) -> None:
        """Orders that found no room are given again; nodes that were suspended after failed launches are resumed."""
        for name, node in self.nodes().items():
            if "suspended: " in str(node["reason"]):
                self.resumed.append(name)
                self.cli("resume", name, check=False)
        for job in self.records():  # reported as failed: its submitter no longer wants it
            if job.spec.name in self.perhaps and job.state not in ENDED and job.id not in self.ordered:
                self.ordered.add(job.id)
                self.cli("cancel", job.id, check=False)
        unordered, self.unordered = self.unordered, []
        for work in unordered:
            self.order(work)

    def has_ended(self) -> bool:
        """Whether all have ended."""
        self.people()
        return self.unfinished() == 0

    def violations(self) -> Iterator[str]:
        """Yield what needs an operator at the end."""
        if self._other and not any("gpusched.controller.relay" in processes.command_line(p) for p in self.children()):
            yield "the relay did not come back"
        for name, node in self.nodes().items():
            if str(node["state"]) not in ("IDLE", "MIXED"):
                yield f"{name} does not come back by itself: {node['state']}, {node['reason']}"

    def killed(self, pid: int) -> None:
        """A stranger kills this process."""
        self.struck.add(environment(pid).get(b"GPUSCHED_JOB_ID", b"").decode())

    def holds(self, node: str) -> bool:
        """Whether the node has jobs, by the store."""
        with suppress(Exception), self.reader() as reader:
            jobs = reader.active() if reader else []
            return any(part.node == node for job in jobs if job.allocation for part in job.allocation.parts)
        return False
