"""How jobs are run on a node: builders of scripts, one per container runtime."""

from __future__ import annotations

from gpusched.model.resources import RuntimeName
from gpusched.nodes.runtimes.base import EXISTS_EXIT_CODE, AttemptRef, LaunchRequest, Runtime
from gpusched.nodes.runtimes.checks import secret_name_error

__all__ = ["EXISTS_EXIT_CODE", "AttemptRef", "LaunchRequest", "Runtime", "runtime_for", "secret_name_error"]


def runtime_for(name: RuntimeName) -> Runtime:
    """The runtime that a node declares."""
    match name:
        case RuntimeName.PODMAN | RuntimeName.DOCKER:
            from gpusched.nodes.runtimes.engine import Docker, Podman

            return Podman() if name is RuntimeName.PODMAN else Docker()
        case RuntimeName.APPTAINER:
            from gpusched.nodes.runtimes.apptainer import Apptainer

            return Apptainer()
        case RuntimeName.PROCESS:
            from gpusched.nodes.runtimes.supervised import Process

            return Process()
