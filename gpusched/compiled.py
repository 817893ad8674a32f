"""The door to numba: one decorator, and cache folders that are never stale.

numba notices changes of a function's own file only, not of the files of the functions it calls. So each module with
compiled passes has a cache folder whose name carries a digest of that module and of all it imports of ours: a change
compiles once more what it may touch, and nothing else, and old code never runs. Where the package lies does not count:
the same code installed anew, or checked out elsewhere, is not compiled again.
``NUMBA_DISABLE_JIT=1`` runs the same functions as plain Python; ``NUMBA_CACHE_DIR`` names another folder for the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

# Where scipy is installed numba looks for its linear algebra, which no pass uses: that takes longer than all the rest.
_without_scipy = sys.modules.setdefault("scipy", cast(Any, None)) is None
try:
    import numba
    from llvmlite import binding as llvm
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
    from numba.core.runtime import nrt
    from numba.extending import models, register_model, typeof_impl
finally:
    if _without_scipy:
        del sys.modules["scipy"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_njit: Any = numba.njit  # with options that its types leave out
_types: Any = numba.types
_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(rb"^from gpusched((?:\.\w+)*) import", re.MULTILINE)


@cache
def _source(module: str) -> bytes:
    """The text of a module below ``gpusched``; a package's is that of its ``__init__``."""
    path = _PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_bytes() if file.is_file() else b""


@cache
def _imports(module: str) -> tuple[str, ...]:
    """The modules of ours that a module imports."""
    return tuple(found.decode().lstrip(".") for found in _IMPORT.findall(_source(module)))


def _digest(module: str) -> str:
    """Of a module, all that it imports of ours, however indirectly, and the way it is compiled."""
    seen: set[str] = set()
    left = [module, "compiled"]
    while left:
        name = left.pop()
        if name and name not in seen:
            seen.add(name)
            left += _imports(name)
    digest = hashlib.sha256()
    for name in sorted(seen):
        digest.update(f"{name}\0".encode() + _source(name))
    return digest.hexdigest()[:16]


@cache
def cache_folder(module: str) -> Path | None:
    """Where the compiled passes of a module are kept; None: nowhere. A read-only home only costs compile time."""
    named, home = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = Path(named) if named else Path(home) / "gpusched" / "numba"
    folder = base / _digest(module.removeprefix("gpusched."))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


def kept_on_disk(function: Callable[..., object], versions: int = 1) -> bool:
    """Whether the cache holds so many compiled versions of ``function``, so that using it does not take seconds."""
    folder = cache_folder(function.__module__)
    if folder is None:
        return False
    pattern = f"{function.__module__.rpartition('.')[2]}.{function.__name__}-*.nbc"
    return len(list(folder.rglob(pattern))) >= versions


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` compiled on first use, without Python objects, kept on disk.

    It runs without Python's lock, so that a controller whose agent thinks for too long goes on meanwhile.
    """
    if vars(numba.config)["DISABLE_JIT"]:
        return function
    return cast(Callable[_P, _R], _Pass(function))


class _Locator(_CacheLocator):
    """Where numba keeps a function of ours; its own locators go by the path of the source file."""

    def __init__(self, folder: Path, file: str, line: int) -> None:
        self._folder, self._file, self._line = folder, file, line

    @classmethod
    def from_function(cls, py_func: FunctionType, py_file: str) -> _Locator | None:
        """None where nothing can be kept."""
        folder = cache_folder(py_func.__module__)
        return cls(folder, py_file, py_func.__code__.co_firstlineno) if folder is not None else None

    def get_cache_path(self) -> str:
        """The module's folder."""
        return str(self._folder)

    def get_source_stamp(self) -> bytes:
        """The folder's name says all about the package's own modules; others may change beside it."""
        return hashlib.sha256(Path(self._file).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        """Of two functions of one name in one module."""
        return str(self._line)


class _Files(CompileResultCacheImpl):
    _locator_classes = cast(Any, [_Locator])


class _Kept(FunctionCache):
    """A function's compiled versions on disk.

    numba registers all that it can compile, a third of a second, before it loads what needs no compiling. A version
    that cannot be read (a power cut leaves such files), or is of other types (two processes may write one file), is
    compiled anew, and replaced.
    """

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """None: to be compiled."""
        _link_runtime()
        try:
            found = cast(Any, super())._load_overload(sig, target_context)
        except Exception:  # whatever unpickling makes of a spoilt file
            with suppress(OSError):
                cast(Any, super()).flush()
            return None
        return found if found is None or found.signature.args == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it; where there is no room it is compiled in every process."""
        with suppress(Exception):  # an index that could not be flushed cannot be read either
            cast(Any, super()).save_overload(sig, data)


@cache
def _link_runtime() -> None:
    """The names by which compiled code finds numba's memory manager, which numba gives when it first compiles."""
    for name, address in cast(Any, nrt)._nrt.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


def _dispatcher(function: Callable[..., Any], **wrappers: bool) -> Any:
    made = _njit(error_model="numpy", nogil=True, no_cfunc_wrapper=True, **wrappers)(function)
    if cache_folder(function.__module__) is not None:
        made._cache = cast(Any, _Kept)(function)
    return made


class _Pass:
    """A compiled function as Python calls it, and as other compiled functions do.

    Handing some fifty arrays over from Python takes code that is a quarter of all that there is to compile, and most
    functions are only ever called by others: these are compiled without. Nor is a version made for each constant that
    a caller passes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._outer = _dispatcher(function)
        code, names = function.__code__, function.__globals__
        inner = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
        inner.__qualname__ = f"{function.__qualname__}_inner"  # its name in the cache
        self.inner = _dispatcher(inner, no_cpython_wrapper=True)
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self._outer(*args)

    @property
    def signatures(self) -> list[Any]:
        """The versions that Python has called."""
        return list(self._outer.signatures)


class _PassType(_types.Dispatcher):  # type: ignore[misc]
    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        plain = {name: _types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_type(context, tuple(map(_types.unliteral, args)), plain)


register_model(_PassType)(models.OpaqueModel)


@typeof_impl.register(_Pass)
def _type_of_pass(value: _Pass, _context: Any) -> _PassType:
    return _PassType(value.inner)
