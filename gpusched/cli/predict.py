"""``gpusched predict``."""

from __future__ import annotations

from typing import Annotated

import typer

from gpusched.cli import complete, output
from gpusched.errors import UsageError

app = typer.Typer()


@app.command("predict")
def predict(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[JOB|TRACE|NAME]",
            autocompletion=complete.all_jobs,
            help="A job, a trace file, or a job name.",
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Train on a trace, or on this cluster's history.")] = False,
    trace: Annotated[str | None, typer.Option("--trace", help="With --train: train on this trace.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="The trace's format; default: detected.")] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="With --train: jobs submitted since: 30d.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Jobs submitted before.")] = None,
    hold_out: Annotated[
        float, typer.Option("--hold-out", help="With --train: fraction of the time span held out for evaluation.")
    ] = 0.2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="With --train: random seed; default 0.")] = 0,
    out: Annotated[
        str | None, typer.Option("--out", help="With --train: output file; default: in the state folder.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Predictor file; default: in the state folder.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="With NAME: GPUs of the whole job.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="With NAME: on this many nodes.")] = None,
    racks: Annotated[int | None, typer.Option("--racks", min=1, help="With NAME: in this many racks.")] = None,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", help="With NAME: beside a job of that name; may be repeated.")
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """Predict run times from past jobs; also speed, and the cost of placements and neighbours.

    For a job, or every job of a trace: the run times that 10 %, 50 % and 90 % of such jobs do not
    exceed. With --train it is retrained and evaluated on held-out days. For a job name it shows
    the reported pace of such jobs, and how much more nodes, racks or neighbours slow them down.
    """
    from gpusched.agents.predictor import request as service
    from gpusched.views import predict as view

    is_class = bool(gpus or nodes or racks or beside)
    if is_class and (train or what is None):
        raise UsageError("--gpus, --nodes, --racks and --beside need a job name", "use: gpusched predict NAME")
    if train:
        if what is not None or model is not None:
            raise UsageError("--train reads --trace and writes --out", "omit the other arguments")
        request = service.PredictorRequest(
            trace=trace, format=format, vc=vc, since=since, until=until, hold_out=hold_out, seed=seed, out=out
        )
        trained = service.train_predictor(request)
        output.show(lambda: trained, lambda: view.trained_screen(trained))
        return
    if what is None:
        raise UsageError("no job or trace given", "name one, or use --train")
    if trace is not None or since is not None or until is not None or out is not None:
        raise UsageError("--trace, --since, --until and --out need --train", "pass the trace file as the argument")
    from gpusched.client.predict import describe_class, is_job_class

    if is_class or is_job_class(what):
        job_class = describe_class(what, gpus, nodes, racks, beside or ())
        output.show(lambda: job_class, lambda: view.kind_screen(job_class))
    elif service.is_trace(what):
        predictions = service.predict_trace(model, what, format, vc)
        output.show(lambda: predictions, lambda: view.trace_screen(predictions))
    else:
        from gpusched.client.predict import predict_job

        jobs = predict_job(model, what)
        output.show(lambda: jobs, lambda: view.jobs_table(jobs))
