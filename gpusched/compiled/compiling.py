"""numba's front end: compiles passes and stores them for `loading`. Importing this takes some 0.2 s."""

from __future__ import annotations

import gc
import hashlib
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, cast

from gpusched.compiled import _Pass
from gpusched.compiled.folders import cache_folder
from gpusched.compiled.loading import CompiledVersion

# Where scipy is installed numba looks for its linear algebra, which no pass uses: that takes longer than all the rest.
_without_scipy = sys.modules.setdefault("scipy", cast(Any, None)) is None
try:
    import numba
    from llvmlite import binding as llvm
    from numba.core import environment, ir, typing
    from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler, compile_result
    from numba.core.compiler_lock import global_compiler_lock
    from numba.core.compiler_machinery import register_pass
    from numba.core.targetconfig import TargetConfig
    from numba.core.typed_passes import NativeLowering
    from numba.extending import models, overload, register_model, typeof_impl
    from numba.np import arrayobj

    from gpusched.compiled.by_address import Lowering, drop_unread
finally:
    if _without_scipy:
        del sys.modules["scipy"]

_njit: Any = numba.njit  # with options that its types leave out
_types: Any = numba.types
_typeof: Any = typing.typeof
_environment: Any = environment.lookup_environment
_result: Any = compile_result
_registered: Any = register_pass


def _unequal(source: Any, target: Any) -> None:
    """Raise numba's error without the shapes: code that formats numbers takes seconds to compile."""


@overload(_unequal)
def _compiled_unequal(source: Any, target: Any) -> Any:
    def unequal(source: Any, target: Any) -> None:
        raise ValueError("cannot assign slice from input of different size")

    return unequal


cast(Any, arrayobj).raise_with_shape_context = _unequal


@cache
def _defaults(kind: Any) -> dict[str, object]:
    return {name: option.default for name, option in kind.options.items()}


# numba compares settings whenever it looks for an overload; it reads each by a property: a tenth of compiling.
cast(Any, TargetConfig).values = lambda self: _defaults(cast(Any, type(self))) | self._values


class _Locator(_CacheLocator):
    """Where numba caches our functions; its own locators use the path of the source file."""

    def __init__(self, folder: Path, file: str, line: int) -> None:
        self._folder, self._file, self._line = folder, file, line

    @classmethod
    def from_function(cls, py_func: FunctionType, py_file: str) -> _Locator | None:
        """Return the locator, or None if nothing can be cached."""
        folder = cache_folder(py_func.__module__)
        return cls(folder, py_file, py_func.__code__.co_firstlineno) if folder is not None else None

    def get_cache_path(self) -> str:
        """Return the module's folder."""
        return str(self._folder)

    def get_source_stamp(self) -> bytes:
        """Return a digest of the file: the folder's name covers only the package's own modules."""
        return hashlib.sha256(Path(self._file).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        """Return the line, which distinguishes functions of one name in one module."""
        return str(self._line)


class _Part(JITCodeLibrary):
    """A function to be linked into those that Python calls; numba would also optimise and translate it alone.

    That is done once for a whole (`_machine`), which has all that it calls in it.
    """

    def finalize(self) -> None:
        """Finish without optimising the function alone."""
        self._finalized = True

    def add_ir_module(self, module: Any) -> None:
        """Add numba's code of a function, without unused reads."""
        drop_unread(module)
        cast(Any, super()).add_ir_module(module)

    def optimized(self) -> Any:
        """Return the function and all that it calls as one optimised LLVM module."""
        whole = cast(Any, JITCodeLibrary)(self._codegen, self.name)
        whole._final_module = self.closure()
        whole._optimize_final_module()
        whole._final_module.verify()
        return whole._final_module

    def closure(self) -> Any:
        """Return the function and all that it calls as one LLVM module, unoptimised."""
        module = self._final_module.clone()
        for library in self._below({}):  # LLVM takes only what modules linked before need
            module.link_in(library._get_module_for_linking(), preserve=True)
        return module

    def _below(self, seen: dict[Any, None]) -> list[Any]:
        """Return all libraries that it needs, each after those that need it."""
        for library in self._linking_libraries:
            if library not in seen:
                if isinstance(library, _Part):
                    library._below(seen)
                seen[library] = None
        return list(reversed(seen))

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: only `loading` runs code."""
        return 0

    @property
    def codegen(self) -> Any:
        """The library itself, as numba only calls its `set_env`."""
        return self

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing, as there is no machine code yet."""


def _part(codegen: Any, name: str) -> Any:
    return cast(Any, _Part)(codegen, name)


class _Pipeline(Compiler):
    def define_pipelines(self) -> Any:
        self.state.library = _part(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        (passes,) = cast(Any, super()).define_pipelines()
        passes.passes = [(_Lowering if one is NativeLowering else one, name) for one, name in passes.passes]
        passes.finalize()
        return [passes]


@_registered(mutates_CFG=True, analysis_only=False)
class _Lowering(NativeLowering):
    """Omits reference counting where nothing is allocated: the caller holds a function's arguments.

    Of each array in the tuples that passes hand on numba would count wherever a variable begins or ends, which is most
    of the code that it makes.
    """

    _name = "gpusched_lowering"

    @property
    def lowering_class(self) -> Any:
        """The class that generates code from numba's own form."""
        return Lowering

    def run_pass(self, state: Any) -> bool:
        counting, library, lower = state.targetctx, state.library, cast(Any, super()).run_pass
        if _borrows(state):
            state.targetctx = counting.subtarget(enable_nrt=False)
            try:
                return bool(lower(state))
            except numba.errors.NumbaError:  # something that it calls allocates after all
                state.targetctx, state.library = counting, _part(library._codegen, library.name)
        return bool(lower(state))


_LOOKS = frozenset(("getattr", "static_getitem", "build_tuple", "exhaust_iter", "cast", "phi"))
_PLAIN = (_types.Integer, _types.SliceType)  # what an index takes without making a copy


def _borrows(state: Any) -> bool:
    """Return whether all arrays named in a function come from its arguments, and none is returned."""
    models = state.targetctx.data_model_manager
    if models[state.return_type].contains_nrt_meminfo():
        return False
    for block in state.func_ir.blocks.values():
        for assigned in block.find_insts(ir.Assign):
            made = assigned.value
            if isinstance(made, ir.Expr) and models[state.typemap[assigned.target.name]].contains_nrt_meminfo():
                plain = made.op == "getitem" and isinstance(state.typemap[made.index.name], _PLAIN)
                if not plain and made.op not in _LOOKS:
                    return False
    return True


class _Files(CompileResultCacheImpl):
    _locator_classes = cast(Any, [_Locator])

    def reduce(self, cres: Any) -> Any:
        """Return what is cached of a function: itself and all that it calls, as LLVM bitcode."""
        module = cres.library.closure()
        cres.fndesc.typemap = cres.fndesc.calltypes = None  # needed no more, and large
        return module.as_bitcode(), cres.fndesc, cres.environment, cres.signature, _environments(module)

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Return the function from its cached form."""
        code, fndesc, environment, signature, environments = payload
        library = _part(target_context.codegen(), fndesc.qualname)
        library._final_module = llvm.parse_bitcode(code)
        library.finalize()
        return _result(
            typing_context=target_context.typing_context, target_context=target_context, library=library,
            environment=environment, fndesc=fndesc, signature=signature, objectmode=False, lifted=(), reload_init=(),
            entry_point=target_context.get_executable(library, fndesc, environment), referenced_envs=environments,
        )  # fmt: skip


def _environments(module: Any) -> list[Any]:
    """Return the environments of a module's functions, which hold their Python constants."""
    names = [thing.name for thing in module.global_variables if thing.name.startswith("_ZN08NumbaEnv")]
    return [made for name in names if (made := _environment(name)) is not None]


class _StoredVersions(FunctionCache):
    """A function's compiled versions on disk, for compiling others.

    A version that cannot be read (a power cut leaves such files), or is of other types (two processes may write one
    file), is compiled again, and replaced.
    """

    _impl_class = _Files

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load a version; None: it must be compiled."""
        try:
            found = cast(Any, super()).load_overload(sig, target_context)
        except Exception:  # whatever unpickling makes of a spoilt file
            with suppress(OSError):
                cast(Any, super()).flush()
            return None
        return found if found is None or found.signature.args == tuple(sig) else None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Cache a version; without disk space every process compiles it."""
        with suppress(Exception):  # an index that could not be flushed cannot be read either
            cast(Any, super()).save_overload(sig, data)


def dispatcher(function: FunctionType, inner: bool = False, inlined: bool = False) -> Any:
    """Return numba's dispatcher of ``function`` for callers in Python; or for compiled callers, cached by numba.

    ``inlined``: into these, whatever LLVM thinks of its size.
    """
    if inner:
        given, code = function, function.__code__
        function = FunctionType(code, given.__globals__, given.__name__, given.__defaults__, given.__closure__)
        function.__module__ = given.__module__  # its cache folder depends on this; `specialized` sets it
        function.__qualname__ = f"{given.__qualname__}_{'inlined' if inlined else 'inner'}"  # its name in the cache
    wrappers = {"no_cfunc_wrapper": True} | ({"no_cpython_wrapper": True} if inner else {})
    made = _njit(
        error_model="numpy", nogil=True, pipeline_class=_Pipeline, forceinline=inlined, **wrappers
    )(function)  # fmt: skip
    if inner and cache_folder(function.__module__) is not None:
        made._cache = cast(Any, _StoredVersions)(function)
    return made


def types_of(args: tuple[object, ...]) -> tuple[Any, ...]:
    """Return numba's types of the arguments."""
    return tuple(_typeof.typeof(arg, _typeof.Purpose.argument) for arg in args)


def compiled(outer: Any, args: tuple[object, ...]) -> tuple[CompiledVersion, bool]:
    """Return the version for such arguments, and whether other processes may run it, too."""
    types = types_of(args)
    collects = gc.isenabled()
    gc.disable()  # hardly anything that compiling makes is garbage: looking takes a tenth of its time
    codegen = outer.targetdescr.target_context.codegen()
    whole, codegen._library_class = codegen._library_class, _Part  # what numba adds of its own is a part, too
    try:
        with global_compiler_lock:
            return _machine(outer._compiler.compile(types, None))
    finally:
        codegen._library_class = whole
        if collects:
            gc.enable()


def _machine(result: Any) -> tuple[CompiledVersion, bool]:
    library = result.library
    module = library.optimized()
    named = [*module.functions, *module.global_variables]
    needs = [thing.name for thing in named if thing.is_declaration and not thing.name.startswith("llvm.")]
    bound = any(thing.name.startswith("numba.dynamic.globals") for thing in named)  # addresses in this process
    constants = {made.env_name: list(made.consts) for made in _environments(module)}
    code = library._codegen._tm.emit_object(module)
    return CompiledVersion(
        result.fndesc.llvm_cpython_wrapper_name, result.environment.env_name, constants, tuple(needs), code
    ), not bound


class _PassType(_types.Dispatcher):  # type: ignore[misc]
    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        plain = {name: _types.unliteral(kind) for name, kind in kws.items()}
        return super().get_call_type(context, tuple(map(_types.unliteral, args)), plain)


register_model(_PassType)(models.OpaqueModel)


@typeof_impl.register(_Pass)
def _type_of_pass(value: _Pass, _context: Any) -> _PassType:
    return _PassType(value.inner)
