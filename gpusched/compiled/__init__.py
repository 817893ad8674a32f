"""The interface to numba: one decorator, and cache folders that are never stale.

In: a function over arrays. Out: the same, compiled on first use. May import: nothing of ours. Begin with
`__init__.jit`, then `loading`.

A pass that was compiled once is loaded as machine code (`loading`), without numba: importing that takes longer than
most commands do. Only what is to be compiled imports it (`compiling`). Both use internals of numba; with an unknown
version, numba itself compiles, keeps and loads the same functions (`by_numba`).

numba notices changes of a function's own file only, not of the files of the functions it calls. So each module with
compiled passes has a cache folder named by a digest of that module and of all it imports of ours: a change
compiles once more what it may touch, and nothing else, and old code never runs. Where the package lies does not count:
the same code installed anew, or checked out elsewhere, is not compiled again.
``NUMBA_DISABLE_JIT=1`` runs the same functions as plain Python, ``GPUSCHED_COMPILED=numba`` leaves all to numba as for
an unknown version, ``GPUSCHED_COMPILED=always`` compiles even what would be done sooner as Python;
``NUMBA_CACHE_DIR`` names another folder for the cache.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property, partial, update_wrapper
from math import inf
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from gpusched.compiled.folders import cache_folder
from gpusched.compiled.loading import SUFFIX, Foreign, VersionFolder, kind_of, load, numba_version

KNOWN = "0.68."
"""Prefix of the versions of numba with the internals that `compiling` and `loading` know."""

BRIEFLY_S = 0.5
"""CPU seconds for which a command may run as Python what is not compiled yet: see `compiled_if_long`."""
ENOUGH_S = 10.0
"""CPU seconds for which a process runs the same as Python, over all calls: about what it takes to compile it."""
_used_s: dict[object, float] = {}
"""How long each version has run as Python so far, in CPU seconds."""

_P = ParamSpec("_P")
_R = TypeVar("_R")
_lock = threading.RLock()
_PATIENCE_S = 60.0  # with another process that compiles the same; it may have been stopped


@cache
def left_to_numba() -> bool:
    """Return whether numba itself compiles, caches and loads passes."""
    return os.environ.get("GPUSCHED_COMPILED") == "numba" or not numba_version().startswith(KNOWN)


def is_on_disk(function: Callable[..., object], versions: int = 1) -> bool:
    """Return whether the cache holds so many compiled versions of ``function``, so that it needs no compiling."""
    folder = cache_folder(function.__module__)
    if folder is None:
        return False
    suffix = ".nbc" if left_to_numba() else SUFFIX  # numba's lie in folders below
    pattern = f"{function.__module__.rpartition('.')[2]}.{function.__name__}-*{suffix}"
    return len(list(folder.rglob(pattern))) >= versions


def is_cached(function: Callable[_P, _R], *args: _P.args, **none: _P.kwargs) -> bool:
    """Return whether the version of ``function`` for these arguments is loaded or cached: needs no compiling.

    Of one that is left to numba: whether any is.
    """
    if isinstance(function, _Pass):
        return function.is_cached(args)
    return bool(getattr(function, "signatures", True)) or is_on_disk(function)


class NotCached(RuntimeError):
    """A pass would have to be compiled where compiling is forbidden.

    Attributes:
        version: The pass and the types of its arguments.
    """

    def __init__(self, version: object) -> None:
        self.version = version
        super().__init__(f"{version} would have to be compiled")


class TookTooLong(NotCached):
    """A pass took longer as Python than it was allowed to: it is to be compiled."""


class _Mode(threading.local):
    """How passes run in this thread.

    Attributes:
        until: As Python, until so much of the thread's CPU time is used; None: compiled.
        calls: So far of these, of which each sixteenth looks at the clock: that takes longer than many a call.
    """

    compiles = True
    until: float | None = None
    calls = 0


_mode = _Mode()


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """Raise NotCached instead of compiling in this thread; what is left to numba still compiles."""
    before, _mode.compiles = _mode.compiles, False
    try:
        yield
    finally:
        _mode.compiles = before


@contextmanager
def interpreted(at_most_s: float) -> Iterator[None]:
    """Run passes as Python in this thread, with equal results.

    What they changed when they raised TookTooLong is of no use: begin anew.

    Raises:
        TookTooLong: After ``at_most_s`` of CPU time.
    """
    from numpy import errstate

    before, _mode.until, _mode.calls = _mode.until, time.thread_time() + at_most_s, 0
    try:
        with errstate(all="ignore"):  # as compiled
            yield
    finally:
        _mode.until = before


def compiled_if_long(do: Callable[[], _R], announce: Callable[[], None] = lambda: None) -> _R:
    """Return what ``do`` returns, without compiling if its passes are cached, or take at most `BRIEFLY_S` as Python.

    To compile them takes ten seconds and more, which a small cluster's queue never earns; so does what a process has
    often run as Python. ``do`` is called up to three times, so that it must begin anew each time; ``announce`` before
    it compiles.
    """
    if os.environ.get("GPUSCHED_COMPILED") != "always" and not left_to_numba():
        try:
            with nothing_compiled():
                return do()
        except NotCached as error:
            missing = error.version
        used = _used_s.get(missing, 0.0)
        if used < ENOUGH_S:
            began = time.thread_time()
            # Python raises where compiled code would go on, such as after a division by zero.
            with suppress(NotCached, ArithmeticError, LookupError, TypeError, ValueError), interpreted(BRIEFLY_S):
                found = do()
                _used_s[missing] = used + time.thread_time() - began
                return found
            _used_s[missing] = ENOUGH_S
    announce()
    return do()


def may_compile() -> bool:
    """Return whether compiling is allowed in this thread."""
    return _mode.compiles


def is_interpreted() -> bool:
    """Return whether passes called in this thread run as Python."""
    return _mode.until is not None


def _open_private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)  # any process that can open it can lock it


@contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Lock a cache folder, so that of several processes one compiles and the others load its result."""
    with ExitStack() as held:
        if folder is not None:
            with suppress(OSError):  # disk full, or a filesystem without locks: each process compiles for itself
                file = held.enter_context(open(folder / "lock", "a", opener=_open_private))
                until = time.monotonic() + _PATIENCE_S
                while time.monotonic() < until:
                    with suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(0.05)
        yield


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compile ``function`` on first use, without Python objects, and cache it on disk.

    It runs without Python's lock, so that the controller continues while an agent decides.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return function
    if left_to_numba():
        from gpusched.compiled.by_numba import compiled_by_numba

        return cast(Callable[_P, _R], compiled_by_numba(function))
    return cast(Callable[_P, _R], _Pass(function))


def specialized(template: Callable[_P, _R], by: Callable[..., object], **names: object) -> Callable[_P, _R]:
    """Compile ``template`` with these names of its module replaced.

    It is kept on disk as a part of the module that ``by`` stands in: what changes there changes it. (Functions that
    refer to variables of a function around them numba compiles in every process.)
    """
    made = _with_globals(template, names, f"{by.__name__}.{template.__name__.strip('_')}")
    made.__module__, made.__qualname__ = by.__module__, made.__name__
    return jit(cast(Callable[_P, _R], made))


def in_python(template: Callable[_P, _R], **names: object) -> Callable[_P, _R]:
    """Return ``template`` in plain Python, with these names of its module replaced.

    For names that cannot be compiled, such as a solver; compiled functions among them run as Python, too.
    """
    plain = {name: getattr(of, "__wrapped__", of) for name, of in names.items()}
    return cast(Callable[_P, _R], _with_globals(getattr(template, "__wrapped__", template), plain, template.__name__))


def _with_globals(template: Callable[..., object], names: dict[str, object], name: str) -> FunctionType:
    code = cast(FunctionType, template)
    return FunctionType(code.__code__, code.__globals__ | names, name)


def inlined(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the compiled function for inlining into its callers, regardless of LLVM's cost estimate.

    For small hooks: to hand some fifty arrays to one takes longer than most of them do.
    """
    return cast(Callable[_P, _R], _Pass(function._function, inlined=True)) if isinstance(function, _Pass) else function


def bound(function: Callable[_P, _R], *args: _P.args, **none: _P.kwargs) -> Callable[[], _R]:
    """Return a compiled function with its arguments, resolved once: for repeated calls with the same ones."""
    resolved = function.version(args) if isinstance(function, _Pass) and _mode.until is None else function
    return partial(resolved, *args)


class _Pass:
    """A compiled function, callable from Python and from other compiled functions.

    Handing some fifty arrays over from Python takes code that is a quarter of all that there is to compile, and most
    functions are only ever called by others: these are compiled without. Nor is a version made for each constant that
    a caller passes.
    """

    def __init__(self, function: Callable[..., Any], inlined: bool = False) -> None:
        self._ready: dict[object, Callable[..., Any]] = {}
        self._inlined = inlined
        update_wrapper(self, function)
        self._function = cast(FunctionType, function)

    def __call__(self, *args: Any) -> Any:
        until = _mode.until
        if until is None:
            return self.version(args)(*args)
        if until != inf:
            if _mode.calls % 16 == 0 and time.thread_time() > until:
                raise TookTooLong(self._function.__qualname__)
            _mode.calls += 1
        return self._function(*args)

    def is_cached(self, args: tuple[Any, ...]) -> bool:
        """Return whether the version for such arguments needs no compiling."""
        try:
            kind = kind_of(args)
        except Foreign:
            return False
        folder = cache_folder(self._function.__module__)
        return kind in self._ready or (folder is not None and VersionFolder(folder, self._function).has(kind))

    def version(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the version for such arguments."""
        try:
            kind = kind_of(args)
        except Foreign:
            self._refuse()
            from gpusched.compiled.compiling import types_of

            return self._version(types_of(args), args, kept=False)
        return self._ready.get(kind) or self._version(kind, args)

    def _version(self, kind: object, args: tuple[object, ...], kept: bool = True) -> Callable[..., Any]:
        """Return the version for arguments of these types: loaded before, loaded now, or compiled."""
        with _lock:
            if kind not in self._ready:
                folder = cache_folder(self._function.__module__) if kept else None
                store = None if folder is None else VersionFolder(folder, self._function)
                ready = store and store.load(kind)
                if not ready:
                    self._refuse(kind)
                    with _one_at_a_time(folder):
                        ready = (store and store.load(kind)) or self._compiled(kind, args, store)
                self._ready[kind] = ready
        return self._ready[kind]

    def _refuse(self, kind: object = None) -> None:
        if not _mode.compiles:
            raise NotCached((self._function.__qualname__, kind))

    def _compiled(self, kind: object, args: tuple[object, ...], store: VersionFolder | None) -> Callable[..., Any]:
        from gpusched.compiled.compiling import compiled

        machine, lasts = compiled(self.outer, args)
        if store is not None and lasts:
            store.save(kind, machine)
        ready = load(self._function, machine)
        if ready is None:
            raise NotImplementedError(f"{self._function.__qualname__} calls what is nowhere: {machine.needs}")
        return ready

    @cached_property
    def outer(self) -> Any:
        """The dispatcher of numba for calls from Python."""
        from gpusched.compiled.compiling import dispatcher

        return dispatcher(self._function)

    @cached_property
    def inner(self) -> Any:
        """The dispatcher of numba for calls from compiled functions."""
        from gpusched.compiled.compiling import dispatcher

        return dispatcher(self._function, inner=True, inlined=self._inlined)

    @property
    def signatures(self) -> list[object]:
        """The versions that Python has called."""
        return list(self._ready)
