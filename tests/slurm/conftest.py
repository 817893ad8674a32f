"""An installation beside Slurm as its users have it: the command line, a real controller, real Slurm, real nodes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import SETTINGS, Cluster
from tests.testbed.slurm import SlurmSite
from tests.testbed.slurm_files import CPUS, MEMORY_MIB


class SlurmCluster(Cluster):
    """One installation with ``engine: slurm`` on a Slurm site; partitions and nodes as Slurm has them.

    Attributes:
        site: Slurm; `site.sbatch`.
    """

    settings: Mapping[str, object] = {**SETTINGS, "tick": "2s"}

    def __init__(self, site: SlurmSite, folder: Path) -> None:
        super().__init__(site.testbed, folder)
        self.site = site

    def write_inventory(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        policies: Mapping[str, str] | None = None,
        nodes: Mapping[str, Mapping[str, object]] | None = None,
        leave_out: Iterable[str] = (),
    ) -> None:
        """As `Cluster.write_inventory`."""
        common = {"known_hosts": str(self.testbed.known_hosts), "ssh_config": "/dev/null"}
        partitions: dict[str, object] = {}
        for name in self.partitions:
            model = name.lower()
            members = [n for n in self.testbed.nodes if n.model.key == model and n.name not in leave_out]
            partitions[name] = {
                "policy": (policies or {}).get(name, "easy"),
                "defaults": {
                    "user": "root", "key": str(self.testbed.identity), "gpus": 8, "cores": CPUS[model],
                    "memory_mib": MEMORY_MIB[model], "gpu_type": model,
                },
                "nodes": [
                    {"name": n.name, "address": n.address} | dict((nodes or {}).get(n.name, {})) for n in members
                ],
            }  # fmt: skip
        text = {
            "engine": "slurm",
            "settings": {**self.settings, **common, **(settings or {})},
            "partitions": partitions,
        }
        part = self.inventory.with_suffix(".part")
        part.write_text(json.dumps(text, indent=1))  # JSON is YAML
        part.rename(self.inventory)

    def env(self, **more: str) -> dict[str, str]:
        """The environment of every command and of the controller."""
        return super().env(SLURM_CONF=self.site.env["SLURM_CONF"], **more)


@pytest.fixture
def slurm_cluster(slurm_site: SlurmSite) -> Iterator[SlurmCluster]:
    """An installation that observes, its controller not started."""
    folder = Path(tempfile.mkdtemp(prefix="gs-slurm-"))
    cluster = SlurmCluster(slurm_site, folder)
    cluster.write_inventory()
    try:
        yield cluster
    finally:
        if cluster.controller is not None and cluster.controller.poll() is None:
            cluster.kill_controller()
        shutil.rmtree(folder, ignore_errors=True)
