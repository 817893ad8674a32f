"""From a function and what it is called with to the text of a program that any Python of its version can run."""

from __future__ import annotations

import base64
import functools
import inspect
import json
import linecache
import os
import pickle
import re
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import gpusched.job
from gpusched.client.submit import Program
from gpusched.config.validate import MAX_NAME
from gpusched.errors import UsageError
from gpusched.job import call
from gpusched.model.resources import Settings

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""

VERSION = list(sys.version_info[:3])
PROTOCOL = min(5, pickle.HIGHEST_PROTOCOL)  # 3.8 and later
ROOM = 1 << 18  # of a result's largest size, for what stands before the pickle
MAX_SOURCE = 200_000
START = 'exec "$0" -u "$GPUSCHED_JOB_DIR/program.$GPUSCHED_ATTEMPT.$NODE_RANK.py"'
_LOCK = threading.Lock()  # cloudpickle's list of modules is one for the whole process


def command(python: str) -> tuple[str, ...]:
    """What such a job runs; ``python``: the interpreter's name or path in the image.

    Raises:
        UsageError: That is no name of a program.
    """
    if not re.fullmatch(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+ -]*", python):
        raise UsageError(f"python: expected a name such as python3.11, or a path, found {python[:80]!r}")
    return ("sh", "-c", START, python)


def program(
    called: Sequence[Callable[..., Any]], calls: Sequence[Call], settings: Settings,
    modules: Iterable[ModuleType | str] | None = None, *, array: bool = False, many: bool = False,
) -> Program:  # fmt: skip
    """The program that makes the one call, or, of an ``array``, one of them in each task.

    Args:
        called: One function for all calls, or one for each.
        calls: What they are called with.
        settings: Of the inventory: how large a result may be.
        modules: Whose code goes along; None: the function's own, unless it is installed.
        array: Whether there is a task for each call.
        many: Each call's one argument is a list of arguments to call the function with.

    Raises:
        UsageError: Something cannot be pickled.
    """
    name, own = name_of(called[0]), [module for function in called for module in _chosen(function)]
    own = own if modules is None else [_loaded(module) for module in modules]
    with _by_value([*own, gpusched.job]):  # what tells of progress is for every function, and no image has it
        if array and len(called) == 1:
            common = _dumps(called[0], name)
            parts = [_dumps(call, f"what {name} is called with (number {i})") for i, call in enumerate(calls)]
        else:
            common = b""
            parts = [
                _dumps(
                    (called[i % len(called)], *call), f"{name_of(called[i % len(called)])}, or what it is called with,"
                )
                for i, call in enumerate(calls)
            ]
    by_value = any(b"cloudpickle" in data for data in (common, *parts))
    facts = {
        "function": name,
        "many": many,
        "python": VERSION,
        "protocol": PROTOCOL,
        "most": max(0, (settings.logs.max_mib_per_job << 20) - ROOM),
        "kept": settings.job_dirs is not None,
        "source": dict(part for function in called for part in _source(function).items()) if by_value else {},
        **_cloudpickle(by_value),
    }
    told = packed(json.dumps(facts).encode())
    text = f'{_runner()}\n\nif __name__ == "__main__":\n    facts = "{told}"\n    function = "{packed(common)}"\n'
    runs = tuple(f'    run(facts, function, "{packed(part)}")\n' for part in parts)
    return Program(name, text, runs) if array else Program(name, text + runs[0])


def packed(data: bytes) -> str:
    """As one word of ASCII, which `gpusched.job.call.unpack` undoes."""
    return base64.b64encode(zlib.compress(data)).decode()


def name_of(function: Callable[..., Any]) -> str:
    """A function's name for people: ``train.fit``, ``<lambda>``."""
    inner = _inner(function)
    module, name = getattr(inner, "__module__", "") or "", getattr(inner, "__qualname__", type(inner).__qualname__)
    whole = name if module in ("", "__main__", "builtins") else f"{module}.{name}"
    return "".join(c if c.isprintable() else "?" for c in whole)[-MAX_NAME:]


def _inner(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _dumps(value: object, what: str) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value, PROTOCOL))
    except Exception as error:  # whatever an object's own code raises
        told = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UsageError(
            f"{what} cannot be pickled: {told}", "open files, locks and connections are made within the function"
        ) from error


def _chosen(function: Callable[..., Any]) -> list[ModuleType]:
    """The top package of the function's own module, where it is not installed but the user's own."""
    inner = _inner(function)
    name = getattr(inner, "__module__", None) or type(inner).__module__
    module = sys.modules.get(name.partition(".")[0])
    return [module] if module is not None and name != "__main__" and _is_own(sys.modules.get(name)) else []


def _is_own(module: ModuleType | None) -> bool:
    path = getattr(module, "__file__", None)
    if not path or module is None or module.__name__.partition(".")[0] == "gpusched":
        return False
    places = {os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    path = os.path.realpath(path)
    installed = any(path.startswith(place + os.sep) for place in places)
    return not installed and not {"site-packages", "dist-packages"} & set(path.split(os.sep))


def _loaded(module: ModuleType | str) -> ModuleType:
    if isinstance(module, ModuleType):
        return module
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"modules: {module!r} cannot be imported here: {error}") from None


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """While this lasts, what is of these modules is pickled with its code."""
    import cloudpickle

    with _LOCK:
        before = cloudpickle.list_registry_pickle_by_value()
        fresh = [module for module in dict.fromkeys(modules) if module.__name__ not in before]
        for module in fresh:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in fresh:
                cloudpickle.unregister_pickle_by_value(module)


def _source(function: Callable[..., Any]) -> dict[str, str]:
    """The function's file by its name, as its tracebacks have it."""
    code = getattr(inspect.unwrap(_inner(function)), "__code__", None)
    if code is None:
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if 0 < len(text) <= MAX_SOURCE else {}


@functools.cache
def _runner() -> str:
    return inspect.getsource(call)


def _cloudpickle(wanted: bool) -> dict[str, Any]:
    if not wanted:
        return {"cloudpickle": {}, "version": ""}
    import cloudpickle

    names = ("cloudpickle.cloudpickle", "cloudpickle")
    return {"cloudpickle": {n: inspect.getsource(sys.modules[n]) for n in names}, "version": cloudpickle.__version__}
