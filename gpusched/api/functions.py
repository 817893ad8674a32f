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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any

import gpusched.job
from gpusched.client.submit import FunctionProgram
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
    given: Mapping[str, Any] = MappingProxyType({}), *, array: bool = False, many: bool = False,
) -> FunctionProgram:  # fmt: skip
    """The program that makes the one call, or, of an ``array``, one of them in each task.

    Args:
        called: One function for all calls, or one for each.
        calls: What they are called with.
        settings: Of the inventory: how large a result may be.
        given: Options: ``modules``, whose code goes along (None: the user's own that lie beside the function's, or
            below), ``result_dir``, ``ntasks_per_node``, ``gpus_per_task``.
        array: Whether there is a task for each call.
        many: Each call's one argument is a list of arguments to call the function with.

    Raises:
        UsageError: Something cannot be pickled.
    """
    name, own = name_of(called[0]), [module for function in called for module in _chosen(function)]
    modules, folder = given.get("modules"), os.fspath(given.get("result_dir") or "")
    own = own if modules is None else [_loaded(module) for module in modules]
    if folder and not os.path.isabs(folder):
        raise UsageError(f"result_dir: expected an absolute path, found {folder[:80]!r}")
    if not (many or folder or settings.job_dirs) and any(map(call.has_checkpoint, called)):
        raise UsageError(
            f"{name} has a checkpoint, and there is no folder where its next start finds what that returns",
            "name one that all nodes see: result_dir=..., or settings.job_dirs of inventory.yaml",
        )
    with _by_value([*own, gpusched.job]):  # what tells of progress is for every function, and no image has it
        if array and len(called) == 1:
            common = _dumps(called[0], name)
            parts = [_dumps(call, f"what {name} is called with (number {i})") for i, call in enumerate(calls)]
        else:
            common = b""
            parts = [
                _dumps((function, *call), f"{name_of(function)}, or what it is called with,")
                for function, call in zip(called, calls, strict=True)
            ]
    by_value = any(b"cloudpickle" in data for data in (common, *parts))
    facts = {
        "function": name,
        "many": many,
        "python": VERSION,
        "protocol": PROTOCOL,
        "most": max(0, (settings.logs.max_mib_per_job << 20) - ROOM),
        "kept": settings.job_dirs is not None,
        "folder": folder,
        "tasks": given.get("ntasks_per_node") or 1,
        "gpus": given.get("gpus_per_task") or 0,
        "source": dict(part for function in called for part in _source(function).items()) if by_value else {},
        **_cloudpickle(by_value),
    }
    told = packed(json.dumps(facts).encode())
    text = f'{_runner()}\n\nif __name__ == "__main__":\n    facts = "{told}"\n    function = "{packed(common)}"\n'
    runs = tuple(f'    run(facts, function, "{packed(part)}")\n' for part in parts)
    return FunctionProgram(name, text, runs) if array else FunctionProgram(name, text + runs[0])


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
    """Of the modules that are loaded, those of the user's own that lie beside the function's, or below."""
    inner = _inner(function)
    folder = _folder(sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__))
    if folder is None:
        return []
    top = [module for name, module in list(sys.modules.items()) if "." not in name and name != "__main__"]
    return [module for module in top if _file(module).startswith(folder) and _is_own(module)]


def _folder(module: ModuleType | None) -> str | None:
    """The folder, with a slash, from which the module's top package is imported; None: it is none of the user's own."""
    spec = getattr(module, "__spec__", None)
    name = spec.name if spec is not None else getattr(module, "__name__", "")
    if module is None or ((file := _file(module)) and not _is_own(module)):
        return None
    if not file:
        return os.path.join(os.getcwd(), "") if module.__name__ == "__main__" else None  # a notebook, a prompt
    up = name.count(".") + (os.path.basename(file) == "__init__.py") + 1
    return os.path.join(os.path.normpath(os.path.join(file, *[os.pardir] * up)), "")


def _file(module: ModuleType) -> str:
    """Where a module lies; of a package without a file, its folder; "" where it lies nowhere."""
    try:
        path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    except Exception:  # lazy modules do all kinds of things
        return ""
    return os.path.abspath(path) if isinstance(path, str) else ""


def _is_own(module: ModuleType) -> bool:
    path = os.path.realpath(_file(module))
    if module.__name__ == "gpusched":
        return False
    places = {os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
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
