"""A runtime: jobs without containers, as those of gpusched's ``process``, but with lower priority for the CPU."""

from __future__ import annotations

from gpusched.nodes.runtimes.supervised import Process


class Nice(Process):
    """`gpusched.nodes.runtimes.base.Runtime`, of which `Process` does all but the words before each command."""

    name = "nice"  # that of the entry point
    wrapper = ("nice", "-n", "7")
