"""An inventory of the testbed's nodes, as an operator would write it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpusched.doctor import Finding
from tests.testbed import Testbed

WriteInventory = Callable[..., Path]


def of(findings: list[Finding], subject: str, *statuses: str) -> dict[str, Finding]:
    """Return a subject's findings by check; with ``statuses`` only those."""
    return {f.check: f for f in findings if f.subject == subject and (not statuses or f.status in statuses)}


@pytest.fixture
def write_inventory(testbed: Testbed, tmp_path: Path) -> WriteInventory:
    """Writes inventory.yaml with the nodes named (all four by default) and these values for each of them."""

    def write(*names: str, **values: object) -> Path:
        values = {"gpus": 8, "cores": 1, "memory": "1G", "runtime": "podman", "rated_power": "6.5kW", **values}
        nodes = [n for n in testbed.nodes if not names or n.name in names]
        lines = [f"      - {{name: {n.name}, address: {n.address}}}" for n in nodes]
        text = (
            f"settings: {{known_hosts: {testbed.known_hosts}, connect_timeout: 3s, probe_timeout: 10s}}\n"
            f"defaults: {{user: root, key: {testbed.identity}}}\n"
            "partitions:\n  P:\n"
            f"    defaults: {{{', '.join(f'{k}: {v}' for k, v in values.items())}}}\n    nodes:\n"
            + "\n".join(lines)
            + "\n    flavors:\n      s: {gpus: 2, cores: 1, memory: 1G, time: 1h}\n"
        )
        path = tmp_path / "inventory.yaml"
        path.write_text(text)
        return path

    return write
