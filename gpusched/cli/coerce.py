"""Fast conversion of option values.

New versions of typer build a pydantic adapter for every parameter when they parse, which costs more start-up time than
all of ``gpusched submit``. Strings, enumerations, numbers and lists of them do not need one. Other types, and older
versions of typer, keep typer's own conversion.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

_INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?")
_INFO = ("parser", "click_type", "formats", "path_type")
_NAMES = {
    "FILE": "file",
    "PATH": "file",
    "TRACE": "file",
    "SPEC": "file",
    "DIR": "folder",
    "USER": "user",
    "POLICY": "policy",
}
"""Metavar -> what the value names: an empty one, of an unset variable, would mean the current folder, or no user."""


class _FastParameter:
    """Replaces typer's runtime parameter, of which only ``coerce`` is used."""

    def __init__(self, kind: Any, low: float | None, high: float | None, names: str) -> None:
        self._kind, self._low, self._high, self._names = kind, low, high, names

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        is_list = param.multiple or param.nargs == -1
        if value is None:
            return () if is_list else None
        if is_list:
            return [self._convert(item, param, ctx) for item in value]
        return self._convert(value, param, ctx)

    def _convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "" and self._names:
            raise typer.BadParameter(f"'' names no {self._names}", ctx=ctx, param=param)
        if self._kind in (str, bool) or not isinstance(value, str):
            return value
        if self._kind is Path:
            return Path(value)
        if issubclass(self._kind, StrEnum):
            if value not in (allowed := [member.value for member in self._kind]):
                choices = ", ".join(map(repr, allowed))
                raise typer.BadParameter(f"{value[:80]!r} is not one of {choices}.", ctx=ctx, param=param)
            return self._kind(value)
        pattern, expected = (_INTEGER, "a whole number") if self._kind is int else (_NUMBER, "a number")
        if not pattern.fullmatch(value):
            raise typer.BadParameter(f"{value[:80]!r} is not {expected}", ctx=ctx, param=param)
        number = self._kind(value)
        if self._low is not None and number < self._low:
            raise typer.BadParameter(f"{number} is less than {self._low:g}", ctx=ctx, param=param)
        if self._high is not None and number > self._high:
            raise typer.BadParameter(f"{number} is more than {self._high:g}", ctx=ctx, param=param)
        return number


def use_fast_conversion(command: Any) -> None:
    """Replace the conversion of the command's plain parameters, including its own --help."""
    original = command.get_params

    def get_params(ctx: Any) -> list[Any]:
        params: list[Any] = original(ctx)
        for param in params:
            _replace(param)
        return params

    command.get_params = get_params


def _replace(param: Any) -> None:
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is None or not hasattr(param, "_runtime_param") or isinstance(param._runtime_param, _FastParameter):
        return
    kind = descriptor.annotation
    if get_origin(kind) is list:
        (kind,) = get_args(kind) or (str,)
    info = descriptor.parameter_info
    is_plain = kind in (str, int, float, bool, Path) or (isinstance(kind, type) and issubclass(kind, StrEnum))
    if is_plain and not any(getattr(info, name, None) for name in _INFO):
        param._runtime_param = _FastParameter(kind, info.min, info.max, _what_it_names(info.metavar))


def _what_it_names(metavar: str | None) -> str:
    """Return what a parameter's value names, such as "file"; "" if it may be empty."""
    return _NAMES.get((metavar or "").strip("[].").partition("|")[0], "")
