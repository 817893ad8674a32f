"""Compiled passes as files of machine code, loaded without numba's front end.

A file holds one pass for arguments of certain types: the object code that LLVM made, with all that it calls, and the
name of the function in it that takes arguments from Python. numba's extension modules (memory, conversions) are loaded
without the package around them. Arguments of other types never get there: numba's dispatch keys are compared here, and
what is not known here is left to numba.
"""

from __future__ import annotations

import builtins
import hashlib
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from ctypes import PYFUNCTYPE, c_int, c_void_p, cast, py_object, string_at
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

SUFFIX = ".code"
_C_ORDER, _FORTRAN, _REST = 0x0001, 0x0002, 0x0100 | 0x0400  # of numpy's flags; the rest: aligned, writeable
_SCALARS = {float: np.dtype(np.float64), bool: np.dtype(np.bool_), type(None): "none"}  # dtypes claim to equal None
_OTHER = ("NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")  # say where, and whether; no code depends on them
_INTEGER, _LEAST, _MOST = np.dtype(np.int64), -(2**63), 2**63 - 1


class Foreign(Exception):
    """An argument of a type that is unknown here."""


def kind_of(value: object) -> object:
    """Return all that a value's compiled type depends on; equal for values that the same code accepts.

    Raises:
        Foreign: It is left to numba.
    """
    kind = type(value)
    if kind is np.ndarray:
        dtype = value.dtype  # type: ignore[attr-defined]
        flags = value.flags.num  # type: ignore[attr-defined]
        order = flags & _C_ORDER or flags & _FORTRAN  # a single row is in both
        return dtype, dtype.isalignedstruct, value.ndim, order | flags & _REST  # type: ignore[attr-defined]
    if kind in _SCALARS:
        return _SCALARS[kind]
    if isinstance(value, tuple):
        return kind, *map(kind_of, value)
    if kind is int and _LEAST <= value <= _MOST:  # type: ignore[operator]
        return _INTEGER
    if isinstance(value, np.number | np.bool_) and kind.__module__ == "numpy":
        return value.dtype
    raise Foreign


class CompiledVersion(NamedTuple):
    """One version as compiled by numba."""

    wrapper: str  # the function in it that Python calls
    environment: str  # and the name of what that hands on
    constants: dict[str, list[object]]  # of all such things in it, by name
    needs: tuple[str, ...]  # what it calls elsewhere
    code: bytes


class VersionFolder:
    """A function's versions in a folder; damaged, truncated or foreign files are ignored."""

    def __init__(self, folder: Path, function: FunctionType) -> None:
        self._folder, self._function = folder, function

    def load(self, kind: object) -> Callable[..., Any] | None:
        """Load the version for arguments of this kind; None: there is none."""
        text = self._text(kind)
        if (data := self._read(text)) is None:
            return None
        try:
            kept, *rest = pickle.loads(data)
        except Exception:  # a type that it names is no longer there
            return None
        return load(self._function, CompiledVersion(*rest)) if kept == text else None

    def has(self, kind: object) -> bool:
        """Return whether there is a whole file for arguments of this kind."""
        return self._read(self._text(kind)) is not None

    def save(self, kind: object, machine: CompiledVersion) -> None:
        """Store a version; without disk space every process compiles it."""
        text = self._text(kind)
        if "<locals>" in text:  # another time the same name may be another type's
            return
        with suppress(OSError, pickle.PicklingError):
            data = pickle.dumps((text, *machine))
            handle, name = tempfile.mkstemp(dir=self._folder)
            try:
                with open(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                os.replace(name, self._path(text))
            except OSError:
                os.unlink(name)
                raise

    def _read(self, text: str) -> bytes | None:
        try:
            data = self._path(text).read_bytes()
        except OSError:
            return None
        return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None

    def _text(self, kind: object) -> str:
        code = self._function.__code__
        where = f"{self._function.__module__}.{self._function.__qualname__}:{code.co_firstlineno}"
        return f"{where}\n{_made_by()}\n{kind}"

    def _path(self, text: str) -> Path:
        module, name = self._function.__module__.rpartition(".")[2], self._function.__name__
        return self._folder / f"{module}.{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}{SUFFIX}"


@cache
def _made_by() -> str:
    """Return what code depends on besides our own sources: versions, numba's switches and the processor."""
    import llvmlite
    from llvmlite import binding as llvm

    switches = {k: v for k, v in os.environ.items() if k.startswith("NUMBA_") and k not in _OTHER}
    versions = sys.version, np.__version__, llvmlite.__version__, numba_version()
    features = llvm.get_host_cpu_features().flatten()
    return repr((versions, sorted(switches.items()), llvm.get_host_cpu_name(), features))


@cache
def _numba() -> Path:
    """Return numba's folder without importing numba."""
    spec = find_spec("numba")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def numba_version() -> str:
    """Return numba's version without importing it; "" if it is not where expected."""
    with suppress(OSError):
        found = re.search(r'"version": "([^"]+)"', (_numba() / "_version.py").read_text())
        return found[1] if found else ""
    return ""


def _extension(name: str) -> Any:
    """Load one of numba's extension modules so that a later import of numba finds the same one."""
    if name not in sys.modules:
        folder = _numba().joinpath(*name.split(".")[1:-1])
        spec = PathFinder.find_spec(name, [str(folder)])
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


@cache
def _linked() -> Any:
    """Return LLVM with all symbols that compiled code may call, as numba registers them when it first compiles."""
    from llvmlite import binding as llvm

    helpers, functions = _extension("numba._helperlib"), _extension("numba._dynfunc")
    memory = _extension("numba.core.runtime._nrt_python")
    memory.memsys_use_cpython_allocator()
    for name, address in memory.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)
    for name, address in (functions.c_helpers | helpers.c_helpers).items():
        llvm.add_symbol(f"numba_{name}", address)
        if llvm.address_of_symbol(name) is None:  # functions of C's mathematics
            llvm.add_symbol(name, address)
    llvm.add_symbol("_Py_NoneStruct", id(None))
    for name, value in vars(builtins).items():
        if isinstance(value, type) and issubclass(value, BaseException):
            llvm.add_symbol(f"PyExc_{name}", id(value))
    llvm.add_symbol("numba_unpickle", cast(_unpickle, c_void_p).value)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    _engine(llvm)  # the first one makes the process's own symbols known
    return llvm


def _named(address: int, size: int, _digest: int) -> object:
    """Unpickle a type or exception used by compiled code; numba's own way would import all of numba."""
    return _unpickled(string_at(address, size))


_unpickled = cache(pickle.loads)
_unpickle = PYFUNCTYPE(py_object, c_void_p, c_int, c_void_p)(_named)


def _engine(llvm: Any) -> Any:
    target = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(codemodel="jitdefault", jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)


def load(function: FunctionType, machine: CompiledVersion) -> Callable[..., Any] | None:
    """Return the function for Python to call; None if this process lacks a symbol that it needs."""
    llvm, functions = _linked(), _extension("numba._dynfunc")
    # LLVM ends the process where a name in the code it loads means nothing.
    if any(llvm.address_of_symbol(name) is None for name in machine.needs):
        return None
    engine = _engine(llvm)
    engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(machine.code))
    engine.finalize_object()
    environments = {name: _environment(functions, function, held) for name, held in machine.constants.items()}
    for name, value in environments.items():
        c_void_p.from_address(engine.get_global_value_address(name)).value = id(value)
    address, kept = engine.get_function_address(machine.wrapper), (engine, *environments.values())
    module, name = sys.modules[function.__module__], function.__name__
    own = environments[machine.environment]
    made: Callable[..., Any] = functions.make_function(module, name, f"{name}, compiled", address, own, kept)
    return made


def _environment(functions: Any, function: FunctionType, constants: list[object]) -> Any:
    made = functions.Environment(function.__globals__)
    made.consts.extend(constants)
    return made
