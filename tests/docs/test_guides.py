"""Every command of README and of the guides, run as it stands on real nodes, from a folder as its reader has it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.docs import guides
from tests.e2e.conftest import Cluster
from tests.promotion.conftest import record_days
from tests.testbed import Testbed, wait_until
from tests.traces.samples import real

pytestmark = [pytest.mark.slow]

PAGES = [p for p in guides.GUIDES if p.name != "slurm.md"]
"""All but the one beside Slurm: tests/slurm/test_guide.py."""

ELSEWHERE = {
    "gpusched attach JOB": "tests/e2e/test_shells.py",
    "gpusched run --gpus 1 --forward 8888": "tests/e2e/test_shells.py",
    "gpusched submit --gpus 1g.10gb": "tests/e2e/test_slices.py",
    "gpusched replay big.swf": "tests/study/test_backends.py",
    "gpusched recover": "tests/e2e/test_recover.py",
    "gpusched train dl2": "tests/agents/test_sizing_agents.py",
    "gpusched train maifs": "tests/agents/test_sizing_agents.py",
    "gpusched train topology": "tests/agents/test_topology_train.py",
    "gpusched reproduce gist": "tests/agents/test_reproduce_cli.py",
}
"""Commands with this beginning take minutes, two people or GPUs that are cut: the test file that runs them."""


class Reader(Cluster):
    """A reader of the guides: a cluster of four servers dgx1 to dgx4, some history, a folder of files."""

    runtime = "process"
    mixed = False
    """With a partition of GPUs of two types, as one guide has it."""

    def __init__(self, testbed: Testbed, folder: Path) -> None:
        super().__init__(testbed, folder)
        self.followed: set[str] = set()  # lines of pages before this one

    def write_inventory(self, *_: object, **__: object) -> None:
        """Write what `gpusched init` would, with the groups, classes and partitions that the guides speak of."""
        home = self.folder / "home"
        (home / ".ssh").mkdir(parents=True, exist_ok=True)
        hosts = [f"Host dgx{i}\n HostName {n.address}\n" for i, n in enumerate(self.testbed.nodes, 1)]
        common = f"Host *\n User root\n IdentityFile {self.testbed.identity}\n"
        (home / ".ssh/config").write_text("".join(hosts) + common + f" UserKnownHostsFile {self.testbed.known_hosts}\n")
        defaults = {"gpus": 8, "cores": 128, "memory": "1024G", "runtime": "process", "rated_power": "6.5kW"}
        flavors = {
            "s-A100": {"gpus": 2, "cores": 32, "memory": "256G", "time": "24h"},
            "m-A100": {"gpus": 4, "cores": 64, "memory": "512G", "time": "48h"},
            "f-A100": {"gpus": 16, "cores": 256, "memory": "2048G", "time": "72h"},
        }
        sharing = {"sharing": {"mode": "time-slicing"}}
        a100 = {
            "policy": "elastic", "flavors": flavors, "nodes": ["dgx1", "dgx3"] + ["dgx2", "dgx4"] * (not self.mixed),
            "defaults": {**defaults, "gpu_type": "A100", **sharing},
        }  # fmt: skip
        mixed = {
            "defaults": defaults,
            "nodes": [{"name": "dgx2", "gpu_type": "V100"}, {"name": "dgx4", "gpu_type": "A100"}],
        }
        inventory = {
            "settings": {
                **self.settings, "ssh_config": str(home / ".ssh/config"),
                "known_hosts": str(self.testbed.known_hosts), "auto_promote": False,
                "backup": {"to": str(self.folder / "backups")},
            },
            "groups": {"chem": {"members": ["root"]}, "lab": {"members": ["alice", "bob", "root"]}},
            "qos": {"high": {"priority": 1000, "groups": ["chem"]}},
            "topology": {"r1": {"nodes": ["dgx1", "dgx3"]}, "r2": {"nodes": ["dgx2", "dgx4"]}},
            "partitions": {"A100": a100} | ({"mixed": mixed} if self.mixed else {}),
        }  # fmt: skip
        self.inventory.write_text(yaml.safe_dump(inventory))

    def env(self, **more: str) -> dict[str, str]:
        """As `Cluster.env`, with a home of its own and the programs that the guides take for granted."""
        path = f"{self.folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        return super().env(HOME=str(self.folder / "home"), PATH=path, HF_TOKEN="t0k3n", **more)

    def named(self, line: str) -> str:
        """Put ids of jobs for JOB and ID, and leave out the image, which plain processes have none of."""
        line = re.sub(r" --image \S+", "", line)
        line = re.sub(r"policy promote .*", r"\g<0> --force test", line)  # what days prove is not the guides' matter
        line = line.replace("fabric.txt 'gpu-[01-08]'", f"{self.folder}/fabric.txt 'dgx[1-4]'")
        line = line.replace("audit --policy easy", "audit --policy elastic")
        line = re.sub(r" (/srv|/var)/", rf" {self.folder}\1/", line)
        if re.search(r"\bJOB\b", line):
            going = any(word in line for word in ("exec", "why", "cancel"))
            job = self.sh("echo line; exec sleep 600" if going else "echo line", "--gpus", "1")
            self.wait_state(job, "RUNNING" if going else "COMPLETED")
            line = re.sub(r"\bJOB\b", job, line)
        if "gist@" in line:
            version = next(row["version"] for row in self.json("policy", "list") if row["name"] == "gist")
            line = re.sub(r"gist@\w+", f"gist@{version}", line)
        if re.search(r"\bID", line):
            array = self.submit("--gpus", "1", "--array", "0-99", "--begin", "now+1h")
            line = re.sub(r"\bID(?=\b|_)", array, line)
        return line

    def turn_to(self, page: Path) -> None:
        """Begin a page: nothing is left of the one before, and the inventory is that of this one."""
        self.clear()
        self.cli("policy", "shadow", "--off", check=False)
        self.cli("policy", "rollback", "the next page", check=False)
        for reservation in self.json("reservations"):
            self.cli("reservations", "cancel", reservation["name"])
        if self.mixed != (page.stem == "heterogeneous"):
            self.stop_controller()
            self.mixed = not self.mixed
            self.write_inventory()
            self.start_controller()
        if page.stem == "submitting":
            self.cli("reserve", "--gpus", "8", "--from", "now+1h", "--for", "3h", "--users", "root", "--name", "class")


@pytest.fixture(scope="module")
def reader(testbed_session: Testbed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    reader = Reader(testbed_session, folder)
    guides.write_files(folder)
    (folder / "bin").mkdir()
    for name, text in {"pass": "echo t0k3n", "generate": "cat train.sh"}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    reader.write_inventory()
    for at in (1.0, 1.4):
        record_days(reader.state, 28, partition="A100", until_days_ago=at, first=int(100 * at))
    for node in testbed_session.nodes:
        for program in ("python", "torchrun"):  # the readers' own programs are not the guides' matter
            node.install_script(program, "#!/bin/sh\n")
    reader.start_controller()
    yield reader
    reader.close()
    for node in testbed_session.nodes:
        node.remove_script("python")
        node.remove_script("torchrun")
    testbed_session.reset()


@pytest.mark.parametrize("page", [p for p in PAGES if any(guides.examples(p))], ids=lambda p: p.stem)
def test_every_command_of_a_guide_runs(reader: Reader, page: Path) -> None:
    reader.turn_to(page)
    failed = []
    for line in guides.examples(page):
        if any(line.startswith(beginning) for beginning in ELSEWHERE) or line in reader.followed:
            continue
        if "--profiles" in line and not guides.MEASURED.exists():
            continue
        try:
            line = re.sub("--array 0-9", r"--hold \g<0>", line)  # to run them all is another test's matter
            changes = any(verb in line for verb in ("policy promote", "policy rollback"))
            known = len(reader.json("policy", "history")) if changes else 0
            said = guides.follow(reader, reader.named(line), reader.folder)
            if changes:  # the controller's next cycle does it, and the next line goes by it
                wait_until(lambda n=known: len(reader.json("policy", "history")) > n, 30, line)  # type: ignore[misc]
            if "--hold" in line:
                reader.cli("cancel", said.split()[-1])
        except (AssertionError, TimeoutError) as error:
            failed.append(f"{line}\n{error}")
    assert not failed, "\n\n".join(failed)
    reader.followed |= {*guides.examples(page)}
    if any("--profiles" in line for line in guides.examples(page)):
        real("../profiles")


def test_examples_run_elsewhere_are_in_those_files() -> None:
    root = Path(__file__).parents[2]
    for beginning, file in ELSEWHERE.items():
        words = [w for w in beginning.split()[1:] if w.islower() and not w.endswith(".swf")]
        assert all(word in (root / file).read_text("utf-8") for word in words[:2]), (beginning, file)
