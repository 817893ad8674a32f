"""How jobs are run on a node: builders of scripts, one per container runtime."""

from __future__ import annotations

from gpusched.config.plugins import installed
from gpusched.nodes.runtimes.base import EXISTS_EXIT_CODE, AttemptRef, LaunchRequest, Runtime
from gpusched.nodes.runtimes.checks import secret_name_error

__all__ = ["EXISTS_EXIT_CODE", "AttemptRef", "LaunchRequest", "Runtime", "runtime_for", "secret_name_error"]


def runtime_for(name: str) -> Runtime:
    """Return the runtime of that name: a component of the group ``runtimes``.

    Raises:
        ComponentError: It is not installed here, or does not work.
    """
    made: Runtime = installed("runtimes", name).load()()
    return made
