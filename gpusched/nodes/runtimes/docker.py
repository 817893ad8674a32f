"""docker; GPUs by its own --gpus."""

from __future__ import annotations

from gpusched.nodes.runtimes.engine import EngineRuntime


class Docker(EngineRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` for docker 19.03 and later."""

    binary = "docker"
    daemon_pid = "cat /run/docker.pid"
    # `docker logs` cannot read what a daemon-wide driver such as syslog took.
    create_arguments = ("--log-driver", "json-file")

    def gpu_arguments(self, gpus: tuple[int, ...]) -> tuple[str, ...]:
        """--gpus with the inner quotes that keep docker from splitting at the comma.

        CUDA images ask for all GPUs by a variable that NVIDIA's runtime, where it is the default, obeys: void turns
        that off where no GPU was asked for.
        """
        if not gpus:
            return ("--env", "NVIDIA_VISIBLE_DEVICES=void")
        return ("--gpus", f'"device={",".join(map(str, gpus))}"')
