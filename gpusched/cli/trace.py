"""``gpusched trace``: workloads to replay, imported, looked at, cut, scaled, made up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpusched.cli import output

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace

app = output.group("trace", "Workloads to replay: import, look at, cut, scale, make up.")

_Source = Annotated[str, typer.Argument(metavar="TRACE", help="A file or folder of any known format.")]
_Output = Annotated[str, typer.Option("-o", "--output", help="The file to write (ours: F.gpusched.npz).")]
_FormatOption = Annotated[
    str | None, typer.Option("--format", help="Of the source; guessed from its content.", show_default=False)
]
_StrictOption = Annotated[bool, typer.Option("--strict", help="Stop at the first bad row.")]
_VcOption = Annotated[str | None, typer.Option("--vc", help="Only this virtual cluster, partition or queue.")]


@app.command("import")
def import_(
    source: _Source,
    path: _Output,
    format_: _FormatOption = None,
    strict: _StrictOption = False,
    json: output.JsonOption = False,
) -> None:
    """Read a trace and write it in our own format. Bad rows are counted, named by line and kept out."""
    from gpusched.traces.load import load
    from gpusched.traces.statistics import rejected_kinds, rejected_lines

    trace = load(source, format_, strict=strict)
    for line in rejected_lines(trace):
        output.note(f"{source}: {line}")
    rejected = [{"line": line, "why": why} for line, why in trace.rejected]
    _written(path, trace, kept_out=rejected_kinds(trace), rejected_rows=rejected)


@app.command("stats")
def stats(
    source: _Source, format_: _FormatOption = None, vc: _VcOption = None, json: output.JsonOption = False
) -> None:
    """What a trace is like: jobs, arrivals, run times, sizes, load, users."""
    from gpusched.traces.load import load
    from gpusched.traces.statistics import stats_lines, trace_stats

    found = trace_stats(load(source, format_, vc=vc))
    if json:
        output.emit_json(found)
    else:
        output.print_line("\n".join(map(output.printable, stats_lines(found))))


@app.command("slice")
def slice_(
    source: _Source,
    path: _Output,
    since: Annotated[
        str | None, typer.Option("--since", help="2017-10-01T12:00, or 30d after the first submission.")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="As --since; not included.")] = None,
    vc: _VcOption = None,
    user: Annotated[str | None, typer.Option("--user", help="Only this user.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Only the first so many of them.")] = None,
    format_: _FormatOption = None,
    json: output.JsonOption = False,
) -> None:
    """Part of a trace: of a time, a virtual cluster, a user; or its first jobs."""
    from gpusched.traces.load import load
    from gpusched.traces.slicing import slice_trace

    trace = slice_trace(load(source, format_), since=since, until=until, vc=vc, user=user, jobs=jobs)
    _written(path, trace)


@app.command("scale")
def scale(
    source: _Source,
    load_: Annotated[float, typer.Option("--load", help="Offered load to reach: GPU seconds / capacity.")],
    path: Annotated[
        str | None, typer.Option("-o", "--output", help="Write a trace with scaled times between submissions.")
    ] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of a node.")] = 8,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the cluster (with -o).")] = None,
    format_: _FormatOption = None,
    json: output.JsonOption = False,
) -> None:
    """Bring a trace to an offered load.

    With --nodes and -o the times between submissions are scaled for that cluster. Without them nothing is written: it
    says on how many nodes the trace as it is offers that load.
    """
    from gpusched.errors import UsageError
    from gpusched.traces.load import load
    from gpusched.traces.slicing import nodes_for_load, offered_load, scale_arrivals

    if (path is None) != (nodes is None):
        raise UsageError("--nodes and -o go together", "give both to scale arrivals, none to choose the nodes")
    trace = load(source, format_)
    if path is not None and nodes is not None:
        scaled = scale_arrivals(trace, nodes * gpus_per_node, load_)
        _written(path, scaled, how="arrivals", nodes=nodes, load=offered_load(scaled, nodes * gpus_per_node))
        return
    count = nodes_for_load(trace, gpus_per_node, load_)
    reached = offered_load(trace, count * gpus_per_node)
    if json:
        output.emit_json({"how": "nodes", "nodes": count, "gpus_per_node": gpus_per_node, "load": reached})
    else:
        output.print_line(f"{count} nodes of {gpus_per_node} GPUs: offered load {reached:.4f}, arrivals as they are")


@app.command("generate")
def generate(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A YAML description, as 'trace fit' writes it.")],
    path: _Output,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same trace.")] = 0,
    json: output.JsonOption = False,
) -> None:
    """Make up a trace from a description: arrivals, sizes, run times, limits, users."""
    from gpusched.traces.generate import generate as generated
    from gpusched.traces.workload import load_workload

    _written(path, generated(load_workload(spec), seed), seed=seed)


@app.command("fit")
def fit(
    source: _Source,
    path: Annotated[str, typer.Option("-o", "--output", help="The YAML to write.")],
    vc: _VcOption = None,
    format_: _FormatOption = None,
    json: output.JsonOption = False,
) -> None:
    """Write the description of a workload like this trace, for 'trace generate'."""
    from gpusched.traces.fitting import fit as fitted
    from gpusched.traces.load import load
    from gpusched.traces.workload import workload_text

    trace = load(source, format_, vc=vc)
    Path(path).write_text(workload_text(fitted(trace)), encoding="utf-8")
    if json:
        output.emit_json({"path": path, "jobs": len(trace)})
    else:
        output.print_line(f"wrote {path}, fitted to {len(trace):,} jobs of {trace.name}")


def _written(path: str, trace: Trace, **more: Any) -> None:
    """Write the trace and say so."""
    from gpusched.traces import file as tracefile

    tracefile.write(Path(path), trace)
    if output.json_mode():
        output.emit_json(
            {"path": path, "jobs": len(trace), "rejected": len(trace.rejected), "notes": list(trace.notes), **more}
        )
        return
    kept_out = f", {len(trace.rejected):,} rows kept out" if trace.rejected else ""
    output.print_line(f"wrote {path}: {len(trace):,} jobs{kept_out}")
    for note in trace.notes:
        output.note(note)
