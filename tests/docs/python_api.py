"""The reference of `gpusched.api`, from its signatures and docstrings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from typing import Any

from gpusched import api

CLASSES = ("Cluster", "Job", "Executor")
INHERITED = {"Job": ("done", "cancelled", "add_done_callback")}
"""Of `concurrent.futures.Future`, in one line: the standard library documents them."""


def reference(submit: dict[str, str]) -> str:
    """Everything in ``gpusched.api.__all__``; ``submit``: names of its options -> their meanings."""
    parts = [_class(getattr(api, name)) for name in CLASSES]
    rest = [name for name in api.__all__ if name not in (*CLASSES, "Options")]
    parts.append("## Errors and states\n")
    parts += [f"- **`{name}`**: {_flat(_doc(getattr(api, name)).split(chr(10) * 2)[0])}" for name in rest]
    return "\n".join([*parts, "", "## Options\n", *_options(submit)])


def _class(cls: type) -> str:
    lines = [
        f"## {cls.__name__}\n",
        _code(f"{cls.__name__}{_signature(cls.__init__, skip_first=True)}"),
        _text(_doc(cls)),
        "Members:\n",
    ]
    for name, member in vars(cls).items():
        if name.startswith("_") and name != "__await__":
            continue
        if isinstance(member, property):
            lines += _entry([f"{cls.__name__.lower()}.{name}"], _doc(member))
        elif callable(member) and _doc(member):
            forms = [_signature(form, skip_first=True) for form in typing.get_overloads(member) or [member]]
            shown = [f"{cls.__name__.lower()}.{name}{form}" for form in forms]
            lines += _entry(["await job"] if name == "__await__" else shown, _doc(member))
    lines.append("")
    if inherited := INHERITED.get(cls.__name__):
        assert all(hasattr(cls, name) for name in inherited)
        names = ", ".join(f"`{name}`" for name in inherited)
        lines.append(f"{names} are those of every `concurrent.futures.Future`.\n")
    return "\n".join(lines)


def _signature(function: Callable[..., Any], *, skip_first: bool) -> str:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[skip_first:]
    shown, slash, star = [], False, False
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY:
            slash = True
        elif slash:
            shown.append("/")
            slash = False
        if p.kind is p.KEYWORD_ONLY and not star:
            shown.append("*")
        star |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        name = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + p.name
        name = "**options" if name == "**asked" else name
        shown.append(name if p.default is p.empty else f"{name}={p.default!r}")
    return f"({', '.join([*shown, '/'] if slash else shown)})"


def _options(submit: dict[str, str]) -> Iterator[str]:
    """Yield a line per option; those of which the command line says the same in one list, by type."""
    section = _doc(api.Options).partition("Attributes:\n")[2]
    meanings = dict(re.findall(r"^    (\w+): (.+(?:\n        .+)*)", section, re.MULTILINE))
    there = {
        name.replace("-", "_"): text
        for names, text in submit.items()
        for name in re.findall(r"--(?:\[no-\])?([a-z-]+)", names)
    }
    same: dict[str, list[str]] = {}
    for name, kind in api.Options.__annotations__.items():
        kind = str(getattr(kind, "__forward_arg__", kind)).removesuffix(" | None")
        kind = kind.replace("os.PathLike[str]", "Path").replace("Job[Any]", "Job")
        if name in there and _words(there[name]).startswith(_words(meanings[name])):
            same.setdefault(_kind(kind), []).append(f"`{name}`")
        else:
            yield f"- `{name}` ({_kind(kind)}): {_flat(meanings[name])}"
    yield "\nAs the options of [submit](cli.md#gpusched-submit):\n"
    yield from (f"- {kind}: {', '.join(names)}" for kind, names in same.items())


def _words(text: str) -> str:
    """Return a text without case, marks and its default."""
    return re.sub(r"[^a-z0-9 ]", "", text.partition(" Default:")[0].lower()).strip()


def _kind(kind: str) -> str:
    kind = kind.replace("Names", "str | Sequence[str]")
    return ", ".join(f"`{part}`" for part in re.split(r" \| (?![^\[]*\])", kind))


def _doc(what: Any) -> str:
    return inspect.cleandoc(what.__doc__ or "")


def _entry(shown: list[str], doc: str) -> list[str]:
    """Return a member as an item of a list, what it takes and raises as items below it."""
    first, *rest = [line for line in _text(doc).removeprefix("Return ").split("\n") if line]
    first = first[0].upper() + first[1:]
    called = " or ".join(f"`{form}`" for form in shown)
    return [f"- {called}: {first}", *(f"    {line}" if line.startswith("- ") else f"\n    {line}" for line in rest)]


def _code(text: str) -> str:
    return f"    {text}\n"


def _flat(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def _text(doc: str) -> str:
    """A docstring as Markdown: paragraphs, then what it takes and raises as lists."""
    lines = []
    for block in doc.split("\n\n"):
        title, _, rest = block.partition(":\n")
        if title in ("Args", "Raises", "Attributes"):
            entries = re.findall(r"^    ([\w.*, ]+): (.+(?:\n        .+)*)", rest, re.MULTILINE)
            named = [("options" if name == "asked" else name, text) for name, text in entries]
            if title == "Raises":
                raised = (f"`{name}` ({text[0].lower()}{_flat(text)[1:].rstrip('.')})" for name, text in named)
                lines += [f"- raises {', '.join(raised)}", ""]
            else:
                lines += [*(f"- `{name}`: {_flat(text)}" for name, text in named), ""]
        else:
            lines += [_flat(block), ""]
    return "\n".join(lines)
