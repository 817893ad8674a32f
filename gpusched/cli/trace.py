"""``gpusched trace``: import, inspect, cut, scale and generate workloads for replay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpusched.cli import output
from gpusched.cli.together import refuse_inputs
from gpusched.errors import UsageError
from gpusched.model.units import count_of

if TYPE_CHECKING:
    from gpusched.traces.trace import Trace

app = output.group("trace", "Workloads to replay: import, inspect, cut, scale, generate.")

_Source = Annotated[str, typer.Argument(metavar="TRACE", help="A file or folder of any known format.")]
_Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FILE", help="The file to write (ours: F.gpusched.npz).")
]
_FormatOption = Annotated[
    str | None, typer.Option("--format", help="Trace format; default: detected.", show_default=False)
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
    """Convert a trace to our own format. Bad rows are counted, reported by line and rejected."""
    from gpusched.traces.load import load
    from gpusched.traces.statistics import rejected_kinds, rejected_lines

    refuse_inputs("--output", path, (source,))
    trace = load(source, format_, strict=strict)
    for line in rejected_lines(trace):
        output.note(f"{source}: {line}")
    rejected = [{"line": line, "why": why} for line, why in trace.rejected]
    _write_trace(path, trace, kept_out=rejected_kinds(trace), rejected_rows=rejected)


@app.command("formats")
def formats(json: output.JsonOption = False) -> None:
    """List the formats of traces that can be read, and the package that each comes from."""
    from gpusched.config.plugins import components
    from gpusched.views.components import table

    found = components("traces").values()
    output.show(lambda: [{"name": c.name, "origin": c.origin, "object": c.value} for c in found], lambda: table(found))


@app.command("stats")
def stats(
    source: _Source, format_: _FormatOption = None, vc: _VcOption = None, json: output.JsonOption = False
) -> None:
    """Summarize a trace: jobs, arrivals, run times, sizes, load, users."""
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
    until: Annotated[str | None, typer.Option("--until", help="Like --since; exclusive.")] = None,
    vc: _VcOption = None,
    user: Annotated[str | None, typer.Option("--user", help="Only this user.")] = None,
    jobs: Annotated[int | None, typer.Option("--jobs", min=1, help="Only this many, from the first.")] = None,
    format_: _FormatOption = None,
    json: output.JsonOption = False,
) -> None:
    """Cut a trace by time, virtual cluster or user, or to its first jobs."""
    from gpusched.traces.load import load
    from gpusched.traces.slicing import slice_trace

    refuse_inputs("--output", path, (source,))
    trace = slice_trace(load(source, format_), since=since, until=until, vc=vc, user=user, jobs=jobs)
    _write_trace(path, trace)


@app.command("scale")
def scale(
    source: _Source,
    load_: Annotated[float, typer.Option("--load", help="Offered load to reach: GPU seconds / capacity.")],
    path: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write a trace with scaled times between submissions."),
    ] = None,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs per node.")] = 8,
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, help="Nodes of the cluster (with -o).")] = None,
    format_: _FormatOption = None,
    json: output.JsonOption = False,
) -> None:
    """Scale a trace to an offered load.

    With --nodes and -o the times between submissions are scaled for that cluster. Without them it only
    prints the number of nodes on which the unchanged trace has that load.
    """
    from gpusched.traces.load import load
    from gpusched.traces.slicing import nodes_for_load, offered_load, scale_arrivals

    if (path is None) != (nodes is None):
        raise UsageError(
            "--nodes and -o must be used together", "use both to scale arrivals, neither to choose the number of nodes"
        )
    if path is not None:
        refuse_inputs("--output", path, (source,))
    trace = load(source, format_)
    if path is not None and nodes is not None:
        scaled = scale_arrivals(trace, nodes * gpus_per_node, load_)
        _write_trace(path, scaled, how="arrivals", nodes=nodes, load=offered_load(scaled, nodes * gpus_per_node))
        return
    count = nodes_for_load(trace, gpus_per_node, load_)
    reached = offered_load(trace, count * gpus_per_node)
    if json:
        output.emit_json({"how": "nodes", "nodes": count, "gpus_per_node": gpus_per_node, "load": reached})
    else:
        nodes_of = f"{count_of(count, 'node')} with {count_of(gpus_per_node, 'GPU')} each"
        output.print_line(f"{nodes_of}: offered load {reached:.4g}, arrivals unchanged")


@app.command("generate")
def generate(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A YAML description as written by 'trace fit'.")],
    path: _Output,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same trace.")] = 0,
    json: output.JsonOption = False,
) -> None:
    """Generate a trace from a description: arrivals, sizes, run times, limits, users."""
    from gpusched.traces.generate import generate as generated
    from gpusched.traces.workload import load_workload

    refuse_inputs("--output", path, (spec,))
    _write_trace(path, generated(load_workload(spec), seed), seed=seed)


@app.command("fit")
def fit(
    source: _Source,
    path: Annotated[str, typer.Option("-o", "--output", metavar="FILE", help="The YAML to write.")],
    vc: _VcOption = None,
    format_: _FormatOption = None,
    json: output.JsonOption = False,
) -> None:
    """Write a workload description fitted to this trace, for 'trace generate'."""
    from gpusched.config.openers import open_output
    from gpusched.traces.fitting import fit as fitted
    from gpusched.traces.load import load
    from gpusched.traces.workload import workload_text

    refuse_inputs("--output", path, (source,))
    trace = load(source, format_, vc=vc)
    with open_output(path) as file:
        file.write(workload_text(fitted(trace)))
    if json:
        output.emit_json({"path": path, "jobs": len(trace)})
    else:
        output.print_line(f"wrote {path}, fitted to {count_of(len(trace), 'job')} of {trace.name}")


def _write_trace(path: str, trace: Trace, **more: Any) -> None:
    """Write the trace and print its path."""
    from gpusched.traces import file as tracefile

    tracefile.write(Path(path), trace)
    if output.json_mode():
        output.emit_json(
            {"path": path, "jobs": len(trace), "rejected": len(trace.rejected), "notes": list(trace.notes), **more}
        )
        return
    kept_out = f", {count_of(len(trace.rejected), 'row')} rejected" if trace.rejected else ""
    output.print_line(f"wrote {path}: {count_of(len(trace), 'job')}{kept_out}")
    for note in trace.notes:
        output.note(note)
