"""The options of a job, defined once for all commands that queue one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gpusched.cli import complete, output
from gpusched.cli.coerce import use_fast_conversion
from gpusched.client.submit import SubmitRequest
from gpusched.errors import UsageError

if TYPE_CHECKING:
    from gpusched.client.script.values import ScriptContext

_CLICK_EXCEPTION: Any = next(c for c in reversed(typer.BadParameter.__mro__) if c.__name__ == "ClickException")


def job_options(
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", show_default=False)] = None,
    name: Annotated[str | None, typer.Option("-J", "--job-name", help="Name; default: the program's.")] = None,
    partition: Annotated[
        str | None, typer.Option("-p", "--partition", autocompletion=complete.partitions, help="Partition to run in.")
    ] = None,
    flavor: Annotated[
        str | None,
        typer.Option("-F", "--flavor", autocompletion=complete.flavors, help="A flavor: a declared resource bundle."),
    ] = None,
    gpus: Annotated[
        str | None, typer.Option("-G", "--gpus", help="GPUs in total; with --resizable a range: 1-8.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option("--gpus-per-node", help="GPUs per node.")] = None,
    nodes: Annotated[int | None, typer.Option("-N", "--nodes", help="Nodes; default: the fewest.")] = None,
    cpus: Annotated[
        str | None, typer.Option("--cpus", help="CPU cores in total; with --resizable a range: 2-12.")
    ] = None,
    mem: Annotated[
        str | None, typer.Option("--mem", help="Memory in total: 512M, 64G, 1T; with --resizable a range: 16G-64G.")
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
        typer.Option(
            "-d",
            "--dependency",
            help="afterok:ID[:ID], afterany:, afternotok:, after:, aftercorr:, singleton; comma-separated.",
        ),
    ] = None,
    chain: Annotated[
        int | None,
        typer.Option(
            "--chain", help="A chain of this many jobs, one after the other, for work longer than the time limit."
        ),
    ] = None,
    begin: Annotated[
        str | None, typer.Option("--begin", help="Do not start before: now+2h, 16:00, 2026-11-20T18:00.")
    ] = None,
    requeue: Annotated[bool, typer.Option("--requeue/--no-requeue", help="Restart after a node failure.")] = True,
    preemptible: Annotated[
        bool | None,
        typer.Option(
            "--preemptible/--no-preemptible",
            help="It saves its work when signalled: a policy may stop it for other jobs. Default: the partition's.",
        ),
    ] = None,
    resizable: Annotated[
        bool | None,
        typer.Option(
            "--resizable/--no-resizable",
            help="It saves its work when signalled and can resume on other GPU counts. Default: the partition's.",
        ),
    ] = None,
    sizes: Annotated[str | None, typer.Option("--sizes", help="GPU counts it may run with: 1,2,4,8.")] = None,
    base_gpus: Annotated[
        int | None,
        typer.Option("--base-gpus", help="GPU count its batch size was tuned for. Default: the smallest allowed."),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="fixed or scale, passed to the job (GPUSCHED_BATCH). Default: the partition's."),
    ] = None,
    cooldown: Annotated[
        str | None, typer.Option("--cooldown", help="Minimum run time before a resize. Default: the partition's.")
    ] = None,
    signal: Annotated[
        str | None,
        typer.Option(
            "--signal", help="NAME[@SECONDS]: the warning signal, and how long before the limit; B: script only."
        ),
    ] = None,
    priority: Annotated[int, typer.Option("--priority", help="Higher starts first (above 0: admins only).")] = 0,
    nice: Annotated[int, typer.Option("--nice", help="Lower the priority by this.")] = 0,
    env: Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to copy your own.")] = None,
    secret: Annotated[
        list[str] | None, typer.Option("--secret", help="NAME (your variable), NAME=@FILE or NAME=- (stdin).")
    ] = None,
    mount: Annotated[list[str] | None, typer.Option("--mount", help="SRC:DST[:ro].")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", help="Working directory of the command.")] = None,
    output_file: Annotated[
        str | None,
        typer.Option("-o", "--output", help="File that the nodes can write; %j %A %a %x %u %n are expanded."),
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
    placement_wait: Annotated[
        str | None,
        typer.Option(
            "--placement-wait", help="How long to wait for one rack; 0: do not wait. Default: the policy's."
        ),
    ] = None,
    exclusive: Annotated[bool, typer.Option("--exclusive", help="Whole nodes, shared with no other job.")] = False,
    share: Annotated[
        str | None, typer.Option("--share", help="pairs: share its GPUs with one other job. Needs --gpu-mem.")
    ] = None,
    gpu_mem: Annotated[
        str | None, typer.Option("--gpu-mem", help="With --share: its maximum use of each GPU's memory: 20G.")
    ] = None,
    reservation: Annotated[
        str | None,
        typer.Option("--reservation", autocompletion=complete.reservations, help="Run only in this reservation."),
    ] = None,
    mail: Annotated[str | None, typer.Option("--mail", help="Mail notices about the job to ADDRESS.")] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option(
            "--notify",
            help="Events to notify: begin, end, fail, requeue, limit, node, idle, all. Default: end,limit,node,idle.",
        ),
    ] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Queue it on hold.")] = False,
    comment: Annotated[str, typer.Option("--comment", help="A comment, shown to others.")] = "",
    group: Annotated[
        str | None,
        typer.Option(
            "-A",
            "--group",
            "--account",
            autocompletion=complete.groups,
            help="The group of yours that is charged. Default: the first.",
        ),
    ] = None,
    qos: Annotated[
        str | None, typer.Option("-q", "--qos", autocompletion=complete.classes, help="Its class of service.")
    ] = None,
    ntasks: Annotated[
        int | None, typer.Option("-n", "--ntasks", help="Tasks in total, started by srun in a job script.")
    ] = None,
    ntasks_per_node: Annotated[
        int | None, typer.Option("--ntasks-per-node", help="Tasks per node. Default: one.")
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option("-c", "--cpus-per-task", help="Instead of --cpus: cores per task.")
    ] = None,
    cpus_per_gpu: Annotated[
        int | None, typer.Option("--cpus-per-gpu", help="Instead of --cpus: cores per GPU.")
    ] = None,
    gpus_per_task: Annotated[
        int | None, typer.Option("--gpus-per-task", help="Instead of --gpus: GPUs per task.")
    ] = None,
    mem_per_node: Annotated[
        str | None, typer.Option("--mem-per-node", help="Instead of --mem: memory per node; 0: all of it.")
    ] = None,
    mem_per_gpu: Annotated[str | None, typer.Option("--mem-per-gpu", help="Instead of --mem: memory per GPU.")] = None,
    mem_per_cpu: Annotated[str | None, typer.Option("--mem-per-cpu", help="Instead of --mem: memory per core.")] = None,
    error: Annotated[
        str | None, typer.Option("-e", "--error", help="Like -o, for stderr. Default: the same as stdout.")
    ] = None,
    open_mode: Annotated[
        str | None,
        typer.Option(
            "--open-mode", help="append or truncate: what a restarted job does with its -o and -e files."
        ),
    ] = None,
    slurm_env: Annotated[
        bool | None,
        typer.Option(
            "--slurm-env/--no-slurm-env",
            help="Set Slurm's variables too, as in jobs with a script. Default: the partition's.",
        ),
    ] = None,
) -> None:
    """Define the options of a job and their help; their names are those of `SubmitRequest`, but for ``output_file``."""


class WithSbatch(TyperCommand):
    """A command that also accepts sbatch's options, and keeps its words, which show whether there was a ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate sbatch's options, then parse as usual."""
        if args and args[0].startswith("-") and args[0] != "--":
            from gpusched.client.script.sbatch import translate_command_line

            args, notes = translate_command_line(args, _own_options(self.get_params(ctx)), _sbatch_context)
            for note in notes:
                output.note(note)
            ctx.meta["gpusched.notes"] = notes
        ctx.meta["gpusched.words"] = tuple(args)
        try:
            return super().parse_args(ctx, args)
        except _CLICK_EXCEPTION as error:
            if (name := getattr(error, "option_name", "")) and hasattr(error, "possibilities"):
                raise type(error)(name, possibilities=_similar_options(name, self.get_params(ctx)), ctx=ctx) from None
            raise


def _similar_options(name: str, parameters: Any) -> list[str]:
    """Return options similar to a mistyped one, including supported options of sbatch."""
    from difflib import get_close_matches

    from gpusched.client.script.sbatch import OPTIONS, SupportedOption

    sbatch_options = (f"--{option}" for option, how in OPTIONS.items() if isinstance(how, SupportedOption))
    return get_close_matches(name, sorted({*_own_options(parameters), *sbatch_options}))


def _own_options(parameters: Any) -> dict[str, bool]:
    """Return a command's options, and whether each takes a value."""
    return {o: not getattr(p, "is_flag", False) for p in parameters for o in (*p.opts, *p.secondary_opts)}


def _sbatch_context() -> Any:
    """Return the context for translating sbatch's options."""
    from gpusched.client.context import Client
    from gpusched.client.script.values import ScriptContext
    from gpusched.client.submit import current_folder

    return ScriptContext(Client().inventory, current_folder(), [])


def with_request(*without: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of a job except those in ``without``; its first argument is then the ``request``."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        parameters = inspect.signature(job_options, eval_str=True).parameters.values()
        options = [p for p in parameters if p.name not in without]
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @functools.wraps(command)
        def run(**given: Any) -> int:
            return command(request_of({p.name: given.pop(p.name) for p in options}), **given)

        own.sort(key=lambda p: p.default is not inspect.Parameter.empty)
        first = [p for p in own if p.default is inspect.Parameter.empty]
        run.__signature__ = inspect.Signature([*first, *options, *own[len(first) :]])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*options, *own)}
        return run

    return decorate


def typed_options(context: Any) -> dict[str, Any]:
    """Return the options given on the command line, by parameter; options left out are missing."""
    known = inspect.signature(job_options).parameters.keys() - {"command"}
    sources = {name: context.get_parameter_source(name) for name in known & context.params.keys()}
    return {
        n: context.params[n] for n, source in sources.items() if source is not None and source.name == "COMMANDLINE"
    }


def request_of(given: Mapping[str, Any]) -> SubmitRequest:
    """Return the request of these options; missing ones have their defaults."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    values["output"] = values.pop("output_file", None)
    return SubmitRequest(**{name: value for name, value in values.items() if value is not None})


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse arguments as the command line does; return `typed_options`.

    Raises:
        UsageError: They are not options of a job.
    """
    with _context(_own_parser(), words) as context:
        if left := context.params.get("command"):
            raise UsageError(f"'{left[0][:80]}' is not an option", "quote values that contain spaces")
        return typed_options(context)


def parse_sbatch(words: Sequence[str], site: ScriptContext) -> tuple[dict[str, Any], tuple[str, ...], str | None]:
    """Parse arguments of sbatch; return `typed_options`, the words after the options, and the value of ``--wrap``.

    Raises:
        UsageError: They are not a valid command line.
    """
    from gpusched.client.script.sbatch import translate_command_line

    command = _sbatch_parser()
    words, _ = translate_command_line(words, _own_options(command.params), lambda: site)
    with _context(command, words) as context:
        return typed_options(context), tuple(context.params.get("command") or ()), context.params["wrap"]


def _context(command: Any, words: Sequence[str]) -> Any:
    try:
        return command.make_context("gpusched submit", list(words))
    except _CLICK_EXCEPTION as error:
        text = " ".join(error.format_message().split()).rstrip(".")
        raise UsageError(text[:1].lower() + text[1:]) from None


@functools.cache
def _own_parser() -> Any:
    @with_request()
    def line(request: SubmitRequest) -> int:
        return 0

    return _parser(line)


@functools.cache
def _sbatch_parser() -> Any:
    @with_request()
    def sbatch(request: SubmitRequest, wrap: Annotated[str | None, typer.Option("--wrap")] = None) -> int:
        return 0

    return _parser(sbatch)


def _parser(function: Callable[..., int]) -> Any:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(add_help_option=False, context_settings={"allow_interspersed_args": False})(function)
    command = typer.main.get_command(app)
    use_fast_conversion(command)
    return command
