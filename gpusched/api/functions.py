"""Turn a function and its arguments into the text of a program for any Python of the same version."""

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
RESERVED_BYTES = 1 << 18  # of the maximum size of a result, for the header before the pickle
MAX_SOURCE = 200_000
START = 'exec "$0" -u "$GPUSCHED_JOB_DIR/program.$GPUSCHED_ATTEMPT.$NODE_RANK.py"'
_LOCK = threading.Lock()  # cloudpickle's registry is global to the process


def command(python: str) -> tuple[str, ...]:
    """Return the command of such a job; ``python``: the interpreter's name or path in the image.

    Raises:
        UsageError: It is not a program's name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_./+-][A-Za-z0-9_./+ -]*", python):
        raise UsageError(f"python: expected a name such as python3.11, or a path, found {python[:80]!r}")
    return ("sh", "-c", START, python)


def program(
    called: Sequence[Callable[..., Any]], calls: Sequence[Call], settings: Settings,
    given: Mapping[str, Any] = MappingProxyType({}), *, array: bool = False, is_batch: bool = False,
) -> FunctionProgram:  # fmt: skip
    """Return the program that makes the one call or, for an ``array``, one call in each task.

    Args:
        called: One function for all calls, or one for each.
        calls: Their arguments.
        settings: Of the inventory: how large a result may be.
        given: Options: ``modules``, pickled with their code (None: the user's own modules beside the function's, or
            below), ``result_dir``, ``ntasks_per_node``, ``gpus_per_task``.
        array: Whether there is a task for each call.
        is_batch: Each call's one argument is a list of argument tuples to call the function with.

    Raises:
        UsageError: Something cannot be pickled.
    """
    name, own = name_of(called[0]), [module for function in called for module in _own_modules(function)]
    modules, folder = given.get("modules"), os.fspath(given.get("result_dir") or "")
    own = own if modules is None else [_import_module(module) for module in modules]
    if folder and not os.path.isabs(folder):
        raise UsageError(f"result_dir: expected an absolute path, found {folder[:80]!r}")
    if not (is_batch or folder or settings.job_dirs) and any(map(call.has_checkpoint, called)):
        raise UsageError(
            f"{name} has a checkpoint, and there is no folder where its next start finds what that returns",
            "name one that all nodes see: result_dir=..., or settings.job_dirs of inventory.yaml",
        )
    with _by_value([*own, gpusched.job]):  # the job's helper module is in no image
        if array and len(called) == 1:  # the function is pickled once; each task's text holds only its arguments
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
        "many": is_batch,
        "python": VERSION,
        "protocol": PROTOCOL,
        "most": max(0, (settings.logs.max_mib_per_job << 20) - RESERVED_BYTES),
        "kept": settings.job_dirs is not None,
        "folder": folder,
        "tasks": given.get("ntasks_per_node") or 1,
        "gpus": given.get("gpus_per_task") or 0,
        "source": dict(part for function in called for part in _source(function).items()) if by_value else {},
        **_cloudpickle(by_value),
    }
    packed_facts = packed(json.dumps(facts).encode())
    setup = f'    facts = "{packed_facts}"\n    function = "{packed(common)}"\n'
    text = f'{_runner()}\n\nif __name__ == "__main__":\n{setup}'
    runs = tuple(f'    run(facts, function, "{packed(part)}")\n' for part in parts)
    return FunctionProgram(name, text, runs) if array else FunctionProgram(name, text + runs[0])


def packed(data: bytes) -> str:
    """Return the data as one ASCII word, which `gpusched.job.call.unpack` decodes."""
    return base64.b64encode(zlib.compress(data)).decode()


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for people: ``train.fit``, ``<lambda>``."""
    inner = _unwrapped(function)
    module, name = getattr(inner, "__module__", "") or "", getattr(inner, "__qualname__", type(inner).__qualname__)
    whole = name if module in ("", "__main__", "builtins") else f"{module}.{name}"
    return "".join(c if c.isprintable() else "?" for c in whole)[-MAX_NAME:]


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _dumps(value: object, what: str) -> bytes:
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(value, PROTOCOL))
    except Exception as error:  # an object's own code may raise anything
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UsageError(
            f"{what} cannot be pickled: {problem}", "open files, locks and connections are made within the function"
        ) from error


def _own_modules(function: Callable[..., Any]) -> list[ModuleType]:
    """Return the user's own loaded modules that are beside the function's module, or below."""
    inner = _unwrapped(function)
    folder = _folder(sys.modules.get(getattr(inner, "__module__", None) or type(inner).__module__))
    if folder is None:
        return []
    top = [module for name, module in list(sys.modules.items()) if "." not in name and name != "__main__"]
    return [module for module in top if _file(module).startswith(folder) and _is_own(module)]


def _folder(module: ModuleType | None) -> str | None:
    """Return the folder, with a slash, that the user's own module is imported from; None for other modules."""
    spec = getattr(module, "__spec__", None)
    name = spec.name if spec is not None else getattr(module, "__name__", "")
    if module is None or ((file := _file(module)) and not _is_own(module)):
        return None
    if not file:
        return os.path.join(os.getcwd(), "") if module.__name__ == "__main__" else None  # a notebook, a prompt
    up = name.count(".") + (os.path.basename(file) == "__init__.py") + 1
    return os.path.join(os.path.normpath(os.path.join(file, *[os.pardir] * up)), "")


def _file(module: ModuleType) -> str:
    """Return a module's file, or the folder of a package without one; "" if it has neither."""
    try:
        path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    except Exception:  # lazy modules may raise anything
        return ""
    return os.path.abspath(path) if isinstance(path, str) else ""


def _is_own(module: ModuleType) -> bool:
    path = os.path.realpath(_file(module))
    if module.__name__ == "gpusched":
        return False
    places = {os.path.realpath(sysconfig.get_path(key)) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    installed = any(path.startswith(place + os.sep) for place in places)
    return not installed and not {"site-packages", "dist-packages"} & set(path.split(os.sep))


def _import_module(module: ModuleType | str) -> ModuleType:
    if isinstance(module, ModuleType):
        return module
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"modules: {module!r} cannot be imported here: {error}") from None


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    """Within the block, pickle these modules with their code."""
    import cloudpickle

    with _LOCK:
        registered = cloudpickle.list_registry_pickle_by_value()
        unregistered = [module for module in dict.fromkeys(modules) if module.__name__ not in registered]
        for module in unregistered:
            cloudpickle.register_pickle_by_value(module)
        try:
            yield
        finally:
            for module in unregistered:
                cloudpickle.unregister_pickle_by_value(module)


def _source(function: Callable[..., Any]) -> dict[str, str]:
    """Return the function's source file by its name, for tracebacks."""
    code = getattr(inspect.unwrap(_unwrapped(function)), "__code__", None)
    if code is None:
        return {}
    text = "".join(linecache.getlines(code.co_filename))
    return {code.co_filename: text} if 0 < len(text) <= MAX_SOURCE else {}


@functools.cache
def _runner() -> str:
    return inspect.getsource(call)


def _cloudpickle(is_needed: bool) -> dict[str, Any]:
    if not is_needed:
        return {"cloudpickle": {}, "version": ""}
    import cloudpickle

    names = ("cloudpickle.cloudpickle", "cloudpickle")
    return {"cloudpickle": {n: inspect.getsource(sys.modules[n]) for n in names}, "version": cloudpickle.__version__}
