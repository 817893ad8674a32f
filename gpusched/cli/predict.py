"""``gpusched predict``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.cli.together import refuse_others
from gpusched.errors import UsageError

app = typer.Typer()


@app.command("predict")
def predict(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|TRACE|NAME]",
            autocompletion=complete.all_jobs,
            help="A job, a trace file, or a job name.",
        ),
    ] = None,
    format: Annotated[str | None, typer.Option("--format", help="Trace format; default: detected.")] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="With a trace: evaluate on jobs since; default: its second half.")
    ] = None,
    waits: Annotated[
        bool, typer.Option("--waits", help="With a trace: also replay it, shortest estimate first, at a load of 0.9.")
    ] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="With NAME: GPUs of the whole job.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="With NAME: on this many nodes.")] = None,
    racks: Annotated[int | None, typer.Option("--racks", min=1, help="With NAME: in this many racks.")] = None,
    beside: Annotated[list[str] | None, typer.Option("--beside", help="With NAME: beside a job of that name.")] = None,
    json: output.JsonOption = False,
) -> None:
    """Predict run times from past jobs; also speed, and the cost of placements and neighbours.

    For a job, or every job of a trace: quantiles of its run time, as of its submission. For a job name: the reported
    pace of such jobs, and how much more nodes, racks or neighbours slow them down.
    """
    from gpusched.agents.predictor import request as service
    from gpusched.client.predict import describe_class, is_job_class
    from gpusched.views import predict as view

    is_class = bool(gpus or nodes or racks or beside)
    if is_class and what is None:
        raise UsageError("--gpus, --nodes, --racks and --beside need a job name", "use: gpusched predict NAME")
    if not what:
        raise UsageError("no job or trace given", "name one")
    if is_class or is_job_class(what):
        refuse_others(context, "NAME", "what", "gpus", "nodes", "racks", "beside")
        job_class = describe_class(what, gpus, nodes, racks, beside or ())
        output.show(lambda: job_class, lambda: view.kind_screen(job_class))
    elif service.is_trace(what):
        predictions = service.predict_trace(what, format, vc, since, waits)
        output.show(lambda: predictions, lambda: view.trace_screen(predictions))
    else:
        from gpusched.client.predict import predict_job

        refuse_others(context, "JOB", "what")
        jobs = predict_job(what)
        output.show(lambda: jobs, lambda: view.jobs_table(jobs))
