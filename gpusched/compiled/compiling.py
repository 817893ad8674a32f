"""numba's front end: what compiles a pass, and what it leaves for `loading`. Importing this takes some 0.2 s."""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from gpusched.compiled import _Pass, cache_folder
from gpusched.compiled.loading import Machine, resolved

# Where scipy is installed numba looks for its linear algebra, which no pass uses: that takes longer than all the rest.
_without_scipy = sys.modules.setdefault("scipy", cast(Any, None)) is None
try:
    import numba
    from numba.core import environment, typing
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
    from numba.extending import models, register_model, typeof_impl
finally:
    if _without_scipy:
        del sys.modules["scipy"]

_njit: Any = numba.njit  # with options that its types leave out
_types: Any = numba.types
_typeof: Any = typing.typeof
_environment: Any = environment.lookup_environment


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
    """A function's compiled versions on disk, for others to be compiled with.

    A version that cannot be read (a power cut leaves such files), or is of other types (two processes may write one
    file), is compiled anew, and replaced.
    """

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """None: to be compiled."""
        try:
            found = cast(Any, super()).load_overload(sig, target_context)
        except Exception:  # whatever unpickling makes of a spoilt file
            with suppress(OSError):
                cast(Any, super()).flush()
            return None
        return found if found is None or found.signature.args == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep it; where there is no room it is compiled in every process."""
        with suppress(Exception):  # an index that could not be flushed cannot be read either
            cast(Any, super()).save_overload(sig, data)


def dispatcher(function: FunctionType, inner: bool = False) -> Any:
    """What compiles ``function`` for callers in Python; or for other compiled functions, kept as numba keeps them."""
    if not inner:
        return _njit(error_model="numpy", nogil=True, no_cfunc_wrapper=True)(function)
    code, names = function.__code__, function.__globals__
    called = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    called.__qualname__ = f"{function.__qualname__}_inner"  # its name in the cache
    made = _njit(error_model="numpy", nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(called)
    if cache_folder(function.__module__) is not None:
        made._cache = cast(Any, _Kept)(called)
    return made


def compiled(outer: Any, args: tuple[object, ...]) -> tuple[Callable[..., Any], Machine | None]:
    """The version for such arguments, and what to keep of it; None: it holds what only this process has."""
    types = tuple(_typeof.typeof(arg, _typeof.Purpose.argument) for arg in args)
    entry = outer.compile(types)
    return entry, _machine(outer.overloads[types])


def _machine(result: Any) -> Machine | None:
    library = result.library
    module = library._final_module
    named = [*module.functions, *module.global_variables]
    needs = [thing.name for thing in named if thing.is_declaration and not thing.name.startswith("llvm.")]
    if library.has_dynamic_globals or result.lifted or result.reload_init or not resolved(needs):
        return None
    names = [thing.name for thing in module.global_variables if thing.name.startswith("_ZN08NumbaEnv")]
    found = {name: list(made.consts) for name in names if (made := _environment(name)) is not None}
    try:
        constants = pickle.dumps((list(result.environment.consts), found))
    except Exception:  # whatever cannot be pickled says so in its own way
        return None
    return Machine(result.fndesc.llvm_cpython_wrapper_name, result.environment.env_name, constants, tuple(needs),
                   library._get_compiled_object())  # fmt: skip


class _PassType(_types.Dispatcher):  # type: ignore[misc]
    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        plain = {name: _types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_type(context, tuple(map(_types.unliteral, args)), plain)


register_model(_PassType)(models.OpaqueModel)


@typeof_impl.register(_Pass)
def _type_of_pass(value: _Pass, _context: Any) -> _PassType:
    return _PassType(value.inner)
