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
            help="A job, a trace's file, or a name of jobs.",
        ),
    ] = None,
    train: Annotated[bool, typer.Option("--train", help="Learn from a trace, or this cluster's history.")] = False,
    trace: Annotated[str | None, typer.Option("--trace", help="With --train: learn from this trace.")] = None,
    format: Annotated[str | None, typer.Option("--format", help="The trace's format; else guessed.")] = None,
    vc: Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="With --train: jobs submitted since: 30d.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="And before.")] = None,
    hold_out: Annotated[float, typer.Option("--hold-out", help="With --train: part of the time to judge by.")] = 0.2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="With --train.")] = 0,
    out: Annotated[str | None, typer.Option("--out", help="With --train: the file; else in the state folder.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="The file to ask; else the state folder's.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="With NAME: GPUs of the whole job.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="With NAME: over so many nodes.")] = None,
    racks: Annotated[int | None, typer.Option("--racks", min=1, help="With NAME: in so many racks.")] = None,
    beside: Annotated[
        list[str] | None, typer.Option("--beside", help="With NAME: beside a job of that name; repeat it for more.")
    ] = None,
    json: output.JsonOption = False,
) -> None:
    """How long a job will run, learned from what has run before; how fast, and what placements and neighbours cost.

    Says for a job, or for every job of a trace, the times that one in ten, one in two and nine in ten such jobs do not
    exceed. With --train it learns that anew, and says how good it is on days that it has not seen. For a name it says
    what jobs of that name told of their pace, and by how much more nodes, racks or neighbours slow them.
    """
    from gpusched.agents.predictor import request as service
    from gpusched.views import predict as view

    of_kind = bool(gpus or nodes or racks or beside)
    if of_kind and (train or what is None):
        raise UsageError("--gpus, --nodes, --racks and --beside go with a name of jobs", "say: gpusched predict NAME")
    if train:
        if what is not None or model is not None:
            raise UsageError("--train takes its workload from --trace, and writes to --out", "leave out the rest")
        request = service.TrainRequest(
            trace=trace, format=format, vc=vc, since=since, until=until, hold_out=hold_out, seed=seed, out=out
        )
        trained = service.train_predictor(request)
        output.show(lambda: trained, lambda: view.trained_screen(trained))
        return
    if what is None:
        raise UsageError("name a job or a trace", "or say --train")
    if trace is not None or since is not None or until is not None or out is not None:
        raise UsageError("--trace, --since, --until and --out go with --train", "name the trace's file alone")
    from gpusched.client.predict import believed, tell_kind

    if of_kind or believed(what):
        kind = tell_kind(what, gpus, nodes, racks, beside or ())
        output.show(lambda: kind, lambda: view.kind_screen(kind))
    elif service.is_trace(what):
        told = service.tell_trace(model, what, format, vc)
        output.show(lambda: told, lambda: view.trace_screen(told))
    else:
        from gpusched.client.predict import tell_job

        jobs = tell_job(model, what)
        output.show(lambda: jobs, lambda: view.jobs_table(jobs))
