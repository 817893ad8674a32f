"""Entry point of ``gpusched``: a table of commands, each imported only when it is called."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from gpusched.cli import activity, interrupts, output, stdout
from gpusched.cli.coerce import use_fast_conversion
from gpusched.errors import GpuschedError, Warnings

PROGRAM = "gpusched"
COMPLETION_VARIABLE = "_GPUSCHED_COMPLETE"
BROKEN_PIPE = 141
_CLICK_EXCEPTION = next(c for c in reversed(typer.BadParameter.__mro__) if c.__name__ == "ClickException")

COMMANDS: dict[str, tuple[str, str]] = {
    "submit": (
        "gpusched.cli.submit",
        "Queue a job: gpusched submit train.sh, or gpusched submit --flavor F --image IMG -- COMMAND...",
    ),
    "run": ("gpusched.cli.shell", "Run a command in a job and stay attached: gpusched run --gpus 1 --pty bash."),
    "attach": ("gpusched.cli.shell", "Reattach to a job of run."),
    "status": ("gpusched.cli.jobs", "The queue: jobs, their states, where they run and why they wait."),
    "show": ("gpusched.cli.show", "Everything about one job, including its history."),
    "why": ("gpusched.cli.why", "Why a job waits (or ended), node by node, and what to do."),
    "wait": ("gpusched.cli.wait", "Wait until jobs end; exits with the job's own code."),
    "logs": ("gpusched.cli.logs", "A job's output; -f follows it."),
    "exec": ("gpusched.cli.logs", "Run a command inside a running job."),
    "cancel": ("gpusched.cli.control", "Cancel jobs."),
    "hold": ("gpusched.cli.control", "Prevent pending jobs from starting."),
    "release": ("gpusched.cli.control", "Release held jobs."),
    "requeue": ("gpusched.cli.control", "Queue running or ended jobs again."),
    "priority": ("gpusched.cli.control", "Set the priority of pending jobs."),
    "nodes": ("gpusched.cli.nodes", "Nodes and their GPUs: free, in use, faulty."),
    "drain": ("gpusched.cli.control", "Take nodes out of service after their jobs end."),
    "resume": ("gpusched.cli.control", "Return drained nodes to service."),
    "reserve": ("gpusched.cli.reservations", "Reserve nodes for some users' jobs for a period."),
    "maintenance": ("gpusched.cli.reservations", "Plan maintenance: no job starts that cannot end before it."),
    "reservations": ("gpusched.cli.reservation_list", "List, change and cancel reservations."),
    "quota": ("gpusched.cli.quota", "Your limits: used and left; fair shares."),
    "audit": ("gpusched.cli.audit", "Commands: sender, origin and result of each."),
    "power": ("gpusched.cli.power", "Energy and utilization: used, wasted, cost."),
    "web": ("gpusched.cli.web", "A web page: nodes, queue, timeline, usage."),
    "metrics": ("gpusched.cli.metrics", "Metrics for Prometheus (OpenMetrics)."),
    "replay": ("gpusched.cli.replay", "Simulate a workload under other policies."),
    "train": ("gpusched.cli.train", "Train a policy's agent on this cluster's jobs, a trace or a description."),
    "reproduce": ("gpusched.cli.reproduce", "Reproduce a paper's figures, next to exact ones."),
    "policy": ("gpusched.cli.policy", "Compare policies, shadow, promote and roll back."),
    "predict": ("gpusched.cli.predict", "Predict run times from past jobs."),
    "flavors": ("gpusched.cli.setup", "Resource bundles that can be requested by name."),
    "init": ("gpusched.cli.setup", "Write an inventory.yaml by probing hosts."),
    "check": ("gpusched.cli.setup", "Check everything end to end and say what to fix."),
    "controller": ("gpusched.cli.run", "Run the controller."),
    "tick": ("gpusched.cli.run", "Run one controller cycle (for cron)."),
    "install": ("gpusched.cli.install", "Set up one installation for all users of this machine."),
    "uninstall": ("gpusched.cli.install", "Remove it."),
    "backup": ("gpusched.cli.backup", "Back up the state folder now; list and check backups."),
    "recover": ("gpusched.cli.backup", "Rebuild a lost store from its last backup and the nodes."),
    "trace": ("gpusched.cli.trace", "Workloads to replay: import, inspect, cut, scale, generate."),
    "completion": ("gpusched.cli.completion", "Print the completion script for bash or zsh."),
}

SLURM_COMMANDS = frozenset("submit run attach logs exec cancel hold release requeue priority drain resume".split())
SLURM_COMMANDS |= {"reserve", "maintenance", "reservations"}
"""Commands that Slurm's own replace under ``engine: slurm``."""

SLOW_COMMANDS = {
    "status": "reading the queue", "show": "reading the job's history", "why": "projecting the queue",
    "nodes": "reading the nodes", "flavors": "reading the nodes", "power": "adding up energy", "replay": "reading jobs",
    "train": "reading jobs", "reproduce": "preparing", "predict": "reading jobs", "policy": "reading policies",
    "init": "contacting the servers", "check": "examining", "trace": "reading jobs", "tick": "running a cycle",
    "backup": "copying", "recover": "asking the nodes",
}  # fmt: skip
"""Commands that may be slow to print, and their progress line."""


class _Candidate(NamedTuple):
    value: str
    help: str = ""  # with a help text typer would import all of rich
    type: str = "plain"


class LazyGroup(TyperGroup):
    """A command group that lists `COMMANDS` and imports a command only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return all names, in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the command's module and build just this command."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in SLOW_COMMANDS and ctx is not None and not (ctx.resilient_parsing or output.json_mode()):
            activity.begin(SLOW_COMMANDS[cmd_name])
        module = importlib.import_module(COMMANDS[cmd_name][0])
        interrupts.raise_again()
        if module.app.registered_callback is not None:
            return _group(module.app)
        info = next(i for i in module.app.registered_commands if i.name == cmd_name)
        command = typer.main.get_command_from_info(info, pretty_exceptions_short=False, rich_markup_mode=None)
        use_fast_conversion(command)
        if cmd_name in SLURM_COMMANDS and command.callback is not None:
            command.callback = _refuse_under_slurm(cmd_name, command.callback)
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or suggest a similar one."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from gpusched.model.suggest import did_you_mean

            ctx.fail(f"there is no command '{args[0]}'{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Complete command names without importing any."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [_Candidate(name) for name in COMMANDS if name.startswith(incomplete)]


def _refuse_under_slurm(name: str, callback: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command, which under ``engine: slurm`` only names Slurm's command for it."""

    @functools.wraps(callback)
    def run(**given: Any) -> Any:
        from gpusched.client import slurm

        if slurm.manages_jobs():
            slurm.refuse(name, given)
        return callback(**given)

    return run


def _group(commands: typer.Typer) -> Any:
    """Return a command that is itself a group."""
    group: Any = typer.main.get_command(commands)
    use_fast_conversion(group)
    for command in group.commands.values():
        use_fast_conversion(command)
    return group


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_given: bool) -> None:
    if is_given:
        from gpusched import __version__

        output.print_line(f"gpusched {__version__}")
        raise typer.Exit


@app.callback(help="A GPU cluster over plain SSH: nothing installed on the nodes.")
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Handle the options before the command."""


def main() -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line; errors are printed as one line (or one JSON value), never as a traceback."""
    output.prepare(argv)
    Warnings.given, Warnings.show = set(), output.warn
    try:
        code = _code(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        stdout.discard()
        return BROKEN_PIPE
    except KeyboardInterrupt:  # amid the last lines
        return interrupts.INTERRUPTED
    except OSError as error:  # stdout cannot be written, by an error in JSON mode neither
        stdout.discard()
        output.warn(f"error: stdout: {error.strerror}")
        return 1
    finally:
        activity.stop()


def _code(argv: Sequence[str]) -> int:
    """Run the command, report its error, return its exit code; raise if its output cannot be written."""
    try:
        return _dispatch(list(argv) or ["--help"])
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return interrupts.INTERRUPTED
    except Exception as error:
        if os.environ.get("GPUSCHED_DEBUG") == "1":
            import traceback

            traceback.print_exc()
        return _report(error)


def _dispatch(argv: list[str]) -> int:
    group = typer.main.get_command(app)
    use_fast_conversion(group)
    if os.environ.get(COMPLETION_VARIABLE):
        return _complete(group)
    try:
        with group.make_context(PROGRAM, argv) as context:
            result = group.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _complete(group: Any) -> int:
    """Answer a completion request; errors are suppressed."""
    Warnings.show = lambda line: None
    with contextlib.suppress(SystemExit, Exception):
        importlib.import_module("typer.completion").completion_init()
        group.main(args=[], prog_name=PROGRAM, complete_var=COMPLETION_VARIABLE)
    return 0


def _report(error: Exception) -> int:
    if isinstance(error, GpuschedError):
        output.print_error(error.line())
        return error.exit_code
    if isinstance(error, _CLICK_EXCEPTION):
        output.print_error(_usage_line(error))
        return int(getattr(error, "exit_code", 2))
    if type(error).__module__ == "sqlite3":
        output.print_error(f"the store cannot be read: {error}; see 'gpusched check'")
        return 1
    if isinstance(error, OSError) and error.strerror:
        file = "" if error.filename is None else f"{error.filename or repr('')}: "
        output.print_error(f"{file}{error.strerror}" if file or not _is_folder_gone() else _NO_FOLDER)
        return 1
    if isinstance(error, UnicodeEncodeError):
        output.print_error(f"found '{output.printable(error.object[:80])}', expected UTF-8")
        return 2
    if isinstance(error, MemoryError):
        output.print_error("not enough memory")
        return 1
    description = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    output.print_error(f"internal error: {description} (GPUSCHED_DEBUG=1 shows the traceback)")
    return 1


_NO_FOLDER = "the current folder no longer exists; change to another"


def _is_folder_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _usage_line(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    text = text[:1].lower() + text[1:]
    context = getattr(error, "ctx", None)
    return f"{text}; see '{context.command_path} --help'" if context is not None else text


if __name__ == "__main__":
    main()
