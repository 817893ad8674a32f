"""A runtime: jobs without containers, as those of gpusched's ``process``, but with lower priority for the CPU."""

from __future__ import annotations

import msgspec

from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.nodes.runtimes.supervised import Process


class Nice(Process):
    """`gpusched.nodes.runtimes.base.Runtime`, of which `SupervisedRuntime` does all but the job's program."""

    name = "nice"  # that of the entry point

    def program(self, request: LaunchRequest) -> str:
        """Return the sh functions that make the job ready and run it; see `SupervisedRuntime.program`."""
        return super().program(msgspec.structs.replace(request, command=("nice", "-n", "7", *request.command)))
