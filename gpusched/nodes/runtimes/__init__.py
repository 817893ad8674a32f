"""How jobs are run on a node: builders of scripts, one per container runtime."""

from __future__ import annotations

from gpusched.config.plugins import installed
from gpusched.nodes.runtimes.base import EXISTS_EXIT_CODE, AttemptRef, LaunchRequest, Runtime
from gpusched.nodes.runtimes.checks import secret_name_error

__all__ = ["EXISTS_EXIT_CODE", "AttemptRef", "LaunchRequest", "Runtime", "runtime_for", "secret_name_error"]

_METHODS = ("launch", "start", "signal", "remove", "log", "finish_output", "exec_argv")  # those of `Runtime`


def runtime_for(name: str) -> Runtime:
    """Return the runtime of that name: a component of the group ``runtimes``.

    Raises:
        ComponentError: It is not installed here, or does not work.
    """
    component = installed("runtimes", name)
    made = component.load()
    if missing := [method for method in _METHODS if not hasattr(made, method)]:
        raise component.error(f"it has no method {missing[0]}")
    runtime: Runtime = made()
    return runtime
