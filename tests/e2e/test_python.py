"""`from gpusched import Cluster`: functions as jobs in containers, and what they return."""

from __future__ import annotations

import gpusched
from tests.e2e.conftest import Cluster

PYTHON = ("/usr:/usr:ro", "/usr/lib:/lib:ro", "/usr/lib64:/lib64:ro")
"""Mounts by which the testbed's image has the nodes' Python."""


def test_a_function(house: Cluster) -> None:
    cluster = gpusched.Cluster(state=house.state, inventory=house.inventory)
    job = cluster.submit(
        lambda: 6 * 7, partition="A100", gpus=1, mount=PYTHON, python="/usr/bin/python3", env={"PYTHONHOME": "/usr"}
    )
    try:
        assert job.result(timeout=60) == 42
    finally:
        print(house.logs(job.id))
