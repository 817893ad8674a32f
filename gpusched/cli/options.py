"""What can be asked for of a job, once for all commands that queue one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from gpusched.cli import complete
from gpusched.cli.coerce import make_plain
from gpusched.client.submit import Request
from gpusched.errors import UsageError

_CLICK_EXCEPTION: Any = next(c for c in reversed(typer.BadParameter.__mro__) if c.__name__ == "ClickException")


def asked(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", show_default=False)] = None,
    name: Annotated[str | None, typer.Option("-J", "--job-name", help="Name; default: the program's.")] = None,
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", autocompletion=complete.partitions, help="Where to run.")
    ] = None,
    flavor: Annotated[
        str | None, typer.Option("-F", "--flavor", autocompletion=complete.flavors, help="A declared bundle.")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("-G", "--gpus", help="GPUs in total; with --resizable the least and the most: 1-8.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs of each node.")] = None,
    nodes: Annotated[int | None, typer.Option("-N", "--nodes", help="Nodes; default: the fewest.")] = None,
    cpus: Annotated[
        str | None, typer.Option("--cpus", help="CPU cores in total; with --resizable the least and the most: 2-12.")
    ] = None,
    mem: Annotated[
        str | None, typer.Option("--mem", help="Memory in total: 512M, 64G, 1T; with --resizable 16G-64G.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("-t", "--time", help="Limit: 90 (minutes), 2h, HH:MM:SS, D-HH:MM:SS.")
    ] = None,
    image: Annotated[str | None, typer.Option("--image", help="Container image.")] = None,
    array: Annotated[
        str | None, typer.Option("-a", "--array", help="One task per index: 0-9, 0-30:5, 1,3, 0-99%10.")
    ] = None,
    dependency: Annotated[
        str | None,
        typer.Option("-d", "--dependency", help="afterok:ID[:ID], afterany:, afternotok:, after:; comma-separated."),
    ] = None,
    begin: Annotated[str | None, typer.Option("--begin", help="Not before: now+2h, 2026-11-20T18:00.")] = None,
    requeue: Annotated[bool, typer.Option("--requeue/--no-requeue", help="Start again after a node failed.")] = True,
    preemptible: Annotated[
        bool | None,
        typer.Option(
            "--preemptible/--no-preemptible",
            help="It saves its work when told to end: a policy may stop it for others. Default: the partition's.",
        ),
    ] = None,
    resizable: Annotated[
        bool | None,
        typer.Option(
            "--resizable/--no-resizable",
            help="It saves its work when told to, and goes on with other numbers of GPUs. Default: the partition's.",
        ),
    ] = None,
    sizes: Annotated[str | None, typer.Option("--sizes", help="GPUs in total that it may have: 1,2,4,8.")] = None,
    base: Annotated[
        int | None, typer.Option("--base", help="GPUs that its batch was tuned for. Default: the fewest it may have.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="fixed, or scale: told to the job (GPUSCHED_BATCH). Default: the partition's."),
    ] = None,
    cooldown: Annotated[
        str | None, typer.Option("--cooldown", help="Not resized before it has run so long. Default: the partition's.")
    ] = None,
    signal: Annotated[
        str | None,
        typer.Option(
            "--signal", help="NAME[@SECONDS]: the grace signal, and how long before the limit; B: script only."
        ),
    ] = None,
    priority: Annotated[int, typer.Option("--priority", help="Higher goes first (above 0: admins).")] = 0,
    nice: Annotated[int, typer.Option("--nice", help="Lower one's own priority by this.")] = 0,
    env: Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to copy yours.")] = None,
    secret: Annotated[
        list[str] | None, typer.Option("--secret", help="NAME (your variable), NAME=@FILE or NAME=- (stdin).")
    ] = None,
    mount: Annotated[list[str] | None, typer.Option("--mount", help="SRC:DST[:ro].")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", help="Folder the command starts in.")] = None,
    output_file: Annotated[
        str | None, typer.Option("-o", "--output", help="File the nodes can write: %j %A %a %x %u %n are filled in.")
    ] = None,
    nodelist: Annotated[
        list[str] | None, typer.Option("--nodelist", autocompletion=complete.nodes, help="Only on these nodes.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("-x", "--exclude", autocompletion=complete.nodes, help="Not on these nodes.")
    ] = None,
    gpu_type: Annotated[
        list[str] | None,
        typer.Option("--gpu-type", autocompletion=complete.gpu_types, help="Only on GPUs of these types: A100,V100."),
    ] = None,
    max_spread: Annotated[
        str | None,
        typer.Option(
            "--max-spread",
            autocompletion=complete.spreads,
            help="How far apart its GPUs may be: server, rack, any. Default: the partition's.",
        ),
    ] = None,
    wait_for_placement: Annotated[
        str | None,
        typer.Option("--wait-for-placement", help="So long it waits for one rack, 0: not. Default: the policy's."),
    ] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Whole nodes, with nobody else on them.")] = False,
    share: Annotated[
        str | None, typer.Option("--share", help="pairs: its GPUs may be one other job's, too. Needs --gpu-mem.")
    ] = None,
    gpu_mem: Annotated[
        str | None, typer.Option("--gpu-mem", help="With --share: the most that it takes of each GPU's memory: 20G.")
    ] = None,
    reservation: Annotated[
        str | None,
        typer.Option("--reservation", autocompletion=complete.reservations, help="It runs in this one only."),
    ] = None,
    mail: Annotated[str | None, typer.Option("--mail", help="Tell ADDRESS about the job.")] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify", help="Of what: begin, end, fail, requeue, limit, node, idle, all. Default: end,limit,node,idle."
        ),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Queue it held.")] = False,
    comment: Annotated[str, typer.Option("--comment", help="For people.")] = "",
    ntasks: Annotated[
        int | None, typer.Option("-n", "--ntasks", help="Tasks in total, which srun starts in a job script.")
    ] = None,
    ntasks_per_node: Annotated[
        int | None, typer.Option("--ntasks-per-node", help="Tasks on each node. Default: one.")
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option("-c", "--cpus-per-task", help="In place of --cpus: cores of each task.")
    ] = None,
    cpus_per_gpu: Annotated[
        int | None, typer.Option("--cpus-per-gpu", help="In place of --cpus: cores for each GPU.")
    ] = None,
    gpus_per_task: Annotated[
        int | None, typer.Option("--gpus-per-task", help="In place of --gpus: GPUs for each task.")
    ] = None,
    mem_per_node: Annotated[
        str | None, typer.Option("--mem-per-node", help="In place of --mem: memory of each node; 0: all that it has.")
    ] = None,
    mem_per_gpu: Annotated[
        str | None, typer.Option("--mem-per-gpu", help="In place of --mem: memory for each GPU.")
    ] = None,
    mem_per_cpu: Annotated[
        str | None, typer.Option("--mem-per-cpu", help="In place of --mem: memory for each core.")
    ] = None,
    error: Annotated[
        str | None, typer.Option("-e", "--error", help="As -o, for stderr. Default: where stdout goes.")
    ] = None,
    slurm_env: Annotated[
        bool | None,
        typer.Option(
            "--slurm-env/--no-slurm-env",
            help="All of Slurm's variables besides ours, as jobs with a script have. Default: the partition's.",
        ),
    ] = None,
) -> Request:
    """The options as typed."""
    return Request(
        command=tuple(command or ()),
        name=name,
        partition=partition,
        flavor=flavor,
        nodes=nodes,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        cpus=cpus,
        mem=mem,
        time=time,
        image=image,
        array=array,
        dependency=dependency,
        begin=begin,
        requeue=requeue,
        preemptible=preemptible,
        resizable=resizable,
        sizes=sizes,
        base=base,
        batch=batch,
        cooldown=cooldown,
        signal=signal,
        priority=priority,
        nice=nice,
        env=tuple(env or ()),
        secret=tuple(secret or ()),
        mount=tuple(mount or ()),
        workdir=workdir,
        output=output_file,
        nodelist=tuple(nodelist or ()),
        exclude=tuple(exclude or ()),
        gpu_type=tuple(gpu_type or ()),
        max_spread=max_spread,
        wait_for_placement=wait_for_placement,
        exclusive=exclusive,
        share=share,
        gpu_mem=gpu_mem,
        reservation=reservation,
        mail=mail,
        notify=tuple(notify or ()),
        hold=hold,
        comment=comment,
        ntasks=ntasks,
        ntasks_per_node=ntasks_per_node,
        cpus_per_task=cpus_per_task,
        cpus_per_gpu=cpus_per_gpu,
        gpus_per_task=gpus_per_task,
        mem_per_node=mem_per_node,
        mem_per_gpu=mem_per_gpu,
        mem_per_cpu=mem_per_cpu,
        error=error,
        slurm_env=slurm_env,
    )


def with_request(*without: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A command that takes all options of a job but those in ``without``, and gets them as ``request``, its first."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        options = [p for p in inspect.signature(asked, eval_str=True).parameters.values() if p.name not in without]
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> int:
            return command(asked(**{p.name: given.pop(p.name) for p in options}), **given)

        own.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        first = [p for p in own if p.default is inspect.Parameter.empty]
        run.__signature__ = inspect.Signature([*first, *options, *own[len(first) :]])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*options, *own)}
        return run

    return decorate


def typed(context: Any) -> dict[str, Any]:
    """The options of a job that stood on a command line, by parameter; those that were left out are not in it."""
    known = inspect.signature(asked).parameters.keys() - {"command"}
    sources = {name: context.get_parameter_source(name) for name in known & context.params.keys()}
    return {
        n: context.params[n] for n, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }


def request_of(given: Mapping[str, Any]) -> Request:
    """The request of such options; what is not given is as if it had been left out."""
    return asked(**given)


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Words as the command line takes them -> `typed`.

    Raises:
        UsageError: They are no options of a job.
    """
    try:
        with _parser().make_context("gpusched submit", list(words)) as context:
            if left := context.params.get("command"):
                raise UsageError(f"'{left[0][:80]}' is no option", "put values with blanks into quotes")
            return typed(context)
    except _CLICK_EXCEPTION as error:
        text = " ".join(error.format_message().split()).rstrip(".")
        raise UsageError(text[:1].lower() + text[1:]) from None


@functools.cache
def _parser() -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(add_help_option=False, context_settings={"allow_interspersed_args": False})
    @with_request()
    def line(request: Request) -> int:
        return 0

    command = typer.main.get_command(app)
    make_plain(command)
    return command
