"""A placement: jobs that need whole nodes get the first ones, others the last, so that whole nodes stay together."""

from __future__ import annotations

import numpy as np

from gpusched.sched.order import Columns
from gpusched.sched.placement import FittingNodes
from gpusched.sched.state import PlacementRequest


def from_both_ends(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """Return what to order the nodes that fit by: one number for each in each column, smaller first.

    The job gets the first ``request.parts`` of them; the first column that differs counts, ties go to the earlier node.
    """
    place = np.arange(len(nodes.rack))
    whole = nodes.total.gpus == request.gpus
    return (np.where(whole, place, -place),)


def one_number(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """Answer wrongly, as code can: jobs are placed by best-fit, and a line says so."""
    return (np.zeros(1),)


def raising(request: PlacementRequest, nodes: FittingNodes) -> Columns:
    """Fail, as code can: the same."""
    raise ZeroDivisionError("no such place")
