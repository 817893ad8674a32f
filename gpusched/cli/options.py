"""The options of a job on the command line: the parameters of commands that queue one, made from the table."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand

from gpusched.cli import complete, output
from gpusched.cli.coerce import use_fast_conversion
from gpusched.client.request import OPTIONS, SubmitRequest, default_of, type_of, values_of
from gpusched.config.users import user_name
from gpusched.errors import UsageError

if TYPE_CHECKING:
    from gpusched.client.script.values import ScriptContext

_CLICK_EXCEPTION: Any = next(c for c in reversed(typer.BadParameter.__mro__) if c.__name__ == "ClickException")
_COMMAND = Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", show_default=False)]


class WithSbatch(TyperCommand):
    """A command that also accepts sbatch's options, and keeps its words, which show whether there was a ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Translate sbatch's options, then parse as usual."""
        if args and args[0].startswith("-") and args[0] != "--":
            from gpusched.client.script.sbatch import translate_command_line

            args, site = translate_command_line(args, _own_options(self.get_params(ctx)), _sbatch_context)
            if site is not None:
                for note in site.notes:
                    output.note(note)
                ctx.meta["gpusched.sbatch"] = site
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


class CommandLine(NamedTuple):
    """A command line: the fields of `SubmitRequest` that it gives, its words after sbatch's were translated.

    ``sbatch``: the context of the translation; None: there were none of sbatch's.
    """

    given: dict[str, Any]
    words: tuple[str, ...]
    sbatch: ScriptContext | None = None

    def request(self) -> SubmitRequest:
        """Return the request of a command that is no job script."""
        if self.sbatch is None:
            return SubmitRequest(**self.given)
        from gpusched.client.script import layers

        no_script = layers.ScriptOptions(user=user_name(os.getuid()))
        return SubmitRequest(**layers.merge_typed(no_script, self.given, self.sbatch))


def with_options(*without: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command, whose first argument is a `CommandLine`, the options of a job; without those in ``without``."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        parameters = [p for p in (*_parameters(), *own) if p.name not in without]

        @functools.wraps(command)
        def run(context: Any, **given: Any) -> int:
            line = CommandLine(_given(context), context.meta["gpusched.words"], context.meta.get("gpusched.sbatch"))
            return command(line, **{p.name: given[p.name] for p in own})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameters() -> list[inspect.Parameter]:
    """Return typer's parameters. It gets text of what has a parser of its own, and a None of what was left out."""
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    context = inspect.Parameter("context", keyword, annotation=typer.Context)
    found = [context, inspect.Parameter("command", keyword, default=None, annotation=_COMMAND)]
    for name, option in OPTIONS.items():
        kind, default = type_of(name), default_of(name)
        if option.many or option.parse is not None or kind is str:
            kind, default = (list[str] if option.many else str) | None, None
        found.append(complete.parameter(name, kind, default, option.names, option.complete, help=option.help))
    return found


def _given(context: Any) -> dict[str, Any]:
    """Return what the command line gives, by field of `SubmitRequest`."""
    texts = {}
    for name in OPTIONS.keys() & context.params.keys():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            texts[name] = context.params[name]
    return values_of(texts) | {"command": tuple(context.params.get("command") or ())}


def parse(words: Sequence[str]) -> dict[str, Any]:
    """Parse the options of one line of a script; return the fields of `SubmitRequest` that they give.

    Raises:
        UsageError: They are not options of a job.
    """
    try:
        with _parser("wrap").make_context("gpusched submit", list(words)) as context:
            given = _given(context)
    except _CLICK_EXCEPTION as error:
        raise UsageError(_message(error), "'gpusched submit --help' has all options") from None
    if left := given.pop("command"):
        raise UsageError(f"'{left[0][:80]}' is not an option", "quote values that contain spaces")
    return given


def parse_sbatch(words: Sequence[str], site: ScriptContext) -> tuple[dict[str, Any], str | None]:
    """Parse arguments of sbatch; return the fields of `SubmitRequest` that they give, and the value of ``--wrap``.

    Raises:
        UsageError: They are not a valid command line.
    """
    from gpusched.client.script.sbatch import translate_command_line

    command = _parser()
    words, _ = translate_command_line(words, _own_options(command.params), lambda: site)
    try:
        with command.make_context("gpusched submit", list(words)) as context:
            return _given(context), context.params["wrap"]
    except _CLICK_EXCEPTION as error:
        raise UsageError(_message(error)) from None


def _message(error: Any) -> str:
    text = " ".join(error.format_message().split()).rstrip(".")
    return text[:1].lower() + text[1:]


@functools.cache
def _parser(*without: str) -> Any:
    @with_options(*without)
    def submit(line: CommandLine, wrap: Annotated[str | None, typer.Option("--wrap")] = None) -> int:
        return 0

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(add_help_option=False, context_settings={"allow_interspersed_args": False})(submit)
    command = typer.main.get_command(app)
    use_fast_conversion(command)
    return command
