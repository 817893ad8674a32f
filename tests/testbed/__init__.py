"""A GPU cluster on one machine: real sshd, real containers, NVIDIA's real library interface; no GPU, no network.

Each node is a set of Linux namespaces (network, UTS, mount, PID, IPC) with its own sshd, home, container store and a
stub `libnvidia-ml.so.1`. Faults are injected from outside: freeze a node, pull its cable, reboot it, hang its podman.

    with Testbed(tmp_path) as testbed:
        testbed.nodes[0].nvml_set({"gpu3.error": 15})
        subprocess.run(["ssh", "-F", testbed.write_ssh_config(), "dgx001", "true"], check=True)

The package knows nothing of `gpusched`.
"""

from tests.testbed.cluster import Testbed
from tests.testbed.hardware import A100, V100, Model
from tests.testbed.node import TestNode
from tests.testbed.requirements import why_unavailable
from tests.testbed.waiting import wait_until

__all__ = ["A100", "V100", "Model", "TestNode", "Testbed", "wait_until", "why_unavailable"]
