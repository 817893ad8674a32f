"""No container engine: the job is a process group of the node."""

from __future__ import annotations

from gpusched.errors import UsageError
from gpusched.nodes.runtimes.base import LaunchRequest
from gpusched.nodes.runtimes.shell import quote_all
from gpusched.nodes.runtimes.supervised import SupervisedRuntime, in_job


class Process(SupervisedRuntime):
    """`gpusched.nodes.runtimes.base.Runtime` without containers: the image is ignored, mounts are refused."""

    name = "process"

    def program(self, request: LaunchRequest) -> str:
        """See `SupervisedRuntime.program`."""
        if not request.command:
            raise UsageError("runtime process needs a command: there is no image whose own could run")
        if request.mounts:
            raise UsageError("runtime process cannot mount folders: its jobs see the node's own")
        job = in_job(quote_all(request.command), '"$output"')
        other = in_job('"$@"', "''")
        return f"prepare() {{ :; }}\njob() {{ {job}; }}\nrun() {{ {other}; }}\n"
