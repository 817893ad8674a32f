"""podman, rootless or not; GPUs by the Container Device Interface."""

from __future__ import annotations

from gpusched.nodes.runtimes.engine import EngineRuntime


class Podman(EngineRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` for podman 3.4 and later."""

    binary = "podman"
    daemon_pid = "echo self"
    # journald, the default where systemd runs, drops lines of jobs that write fast.
    create_arguments = ("--pull", "missing", "--log-driver", "k8s-file")

    def gpu_arguments(self, gpus: tuple[int, ...]) -> tuple[str, ...]:
        """One CDI device per GPU; podman silently ignores --gpus.

        CUDA images ask for all GPUs by a variable that an old NVIDIA hook beside CDI obeys: void turns that off.
        """
        devices = (word for gpu in gpus for word in ("--device", f"nvidia.com/gpu={gpu}"))
        return (*devices, "--env", "NVIDIA_VISIBLE_DEVICES=void")
