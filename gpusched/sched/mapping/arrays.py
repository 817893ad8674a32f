"""The arrays of one decision that maps jobs to nodes."""

from __future__ import annotations

from typing import NamedTuple

from gpusched.sched.state import Ints, Jobs, Outcome, Releases, Requests, Resources, Scratch


class PassArrays(NamedTuple):
    """What the passes of `backfill.schedule` take, and the nodes' GPU types.

    Attributes:
        usable: The nodes as they are, empty of jobs. kind: ``int64[nodes]``: GPU type.
    """

    resources: Resources
    releases: Releases
    requests: Requests
    jobs: Jobs
    scratch: Scratch
    outcome: Outcome
    now: float
    usable: Resources
    kind: Ints
