"""``gpusched predict JOB``: how long jobs of this cluster will run."""

from __future__ import annotations

from gpusched.agents.predictor.request import Told, loaded, tell_one
from gpusched.client.context import Client
from gpusched.client.resolve import Resolver
from gpusched.errors import NoHistory
from gpusched.traces.readers.history import trace_of


def tell_job(model: str | None, text: str) -> list[Told]:
    """What the predictor says of one job of this cluster (of each task of an array), as of its submission.

    Raises:
        UsageError: No such job.
        GpuschedError: The predictor cannot be read.
    """
    predictor, client = loaded(model), Client()
    jobs = Resolver(client).target(text).jobs
    try:
        past = trace_of(client.reader, name="history") if client.reader else None
    except NoHistory:
        past = None
    return [tell_one(predictor, past, job) for job in jobs]
