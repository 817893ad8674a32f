"""The door to numba: one decorator, and cache folders that are never stale.

In: a function over arrays. Out: the same, compiled on first use. May import: nothing of ours. Begin with
`__init__.jit`, then `loading`.

A pass that was compiled once is loaded as machine code (`loading`), without numba: importing that takes longer than
most commands do. Only what is to be compiled imports it (`compiling`).

numba notices changes of a function's own file only, not of the files of the functions it calls. So each module with
compiled passes has a cache folder whose name carries a digest of that module and of all it imports of ours: a change
compiles once more what it may touch, and nothing else, and old code never runs. Where the package lies does not count:
the same code installed anew, or checked out elsewhere, is not compiled again.
``NUMBA_DISABLE_JIT=1`` runs the same functions as plain Python; ``NUMBA_CACHE_DIR`` names another folder for the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, cached_property, partial, update_wrapper
from pathlib import Path
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from gpusched.compiled.loading import SUFFIX, Foreign, Store, kind_of, load

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(rb"^from gpusched((?:\.\w+)*) import", re.MULTILINE)
_lock = threading.RLock()
_PATIENCE_S = 60.0  # with another process that compiles the same; it may have been stopped


@cache
def _source(module: str) -> bytes:
    """The text of a module below ``gpusched`` (a package's is that of its ``__init__``), or of one beside it."""
    path = _PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        file = Path(getattr(sys.modules.get(module), "__file__", None) or "/nowhere")
    return file.read_bytes() if file.is_file() else b""


@cache
def _imports(module: str) -> tuple[str, ...]:
    """The modules of ours that a module imports."""
    return tuple(found.decode().lstrip(".") for found in _IMPORT.findall(_source(module)))


def _digest(module: str) -> str:
    """Of a module, all that it imports of ours, however indirectly, and the way it is compiled."""
    seen: set[str] = set()
    left = [module, "compiled", "compiled.compiling"]
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
    if not _source(module.removeprefix("gpusched.")):
        return None  # nobody could tell a change
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
    pattern = f"{function.__module__.rpartition('.')[2]}.{function.__name__}-*{SUFFIX}"
    return len(list(folder.glob(pattern))) >= versions


def _privately(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)  # whoever can open it can lock it


@contextmanager
def _one_at_a_time(folder: Path | None) -> Iterator[None]:
    """Processes that begin side by side compile the same: one does, the others wait for it and find it on disk."""
    with ExitStack() as held:
        if folder is not None:
            with suppress(OSError):  # no room, or a filesystem without locks: then each compiles for itself
                file = held.enter_context(open(folder / "lock", "a", opener=_privately))
                until = time.monotonic() + _PATIENCE_S
                while time.monotonic() < until:
                    with suppress(BlockingIOError):
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    time.sleep(0.05)
        yield


def jit(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``function`` compiled on first use, without Python objects, kept on disk.

    It runs without Python's lock, so that a controller whose agent thinks for too long goes on meanwhile.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return function
    return cast(Callable[_P, _R], _Pass(function))


def bound(function: Callable[_P, _R], *args: _P.args, **none: _P.kwargs) -> Callable[[], _R]:
    """A compiled function with its arguments, looked at once: for who calls it with the same ones again and again."""
    return partial(function.version(args) if isinstance(function, _Pass) else function, *args)


class _Pass:
    """A compiled function as Python calls it, and as other compiled functions do.

    Handing some fifty arrays over from Python takes code that is a quarter of all that there is to compile, and most
    functions are only ever called by others: these are compiled without. Nor is a version made for each constant that
    a caller passes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._ready: dict[object, Callable[..., Any]] = {}
        update_wrapper(self, function)
        self._function = cast(FunctionType, function)

    def __call__(self, *args: Any) -> Any:
        return self.version(args)(*args)

    def version(self, args: tuple[Any, ...]) -> Callable[..., Any]:
        """That for such arguments."""
        try:
            kind = kind_of(args)
        except Foreign:
            from gpusched.compiled.compiling import types_of

            return self._version(types_of(args), args, kept=False)
        return self._ready.get(kind) or self._version(kind, args)

    def _version(self, kind: object, args: tuple[object, ...], kept: bool = True) -> Callable[..., Any]:
        """That for arguments of these types: at hand, loaded or compiled."""
        with _lock:
            if kind not in self._ready:
                folder = cache_folder(self._function.__module__) if kept else None
                store = None if folder is None else Store(folder, self._function)
                ready = store and store.load(kind)
                if not ready:
                    with _one_at_a_time(folder):
                        ready = (store and store.load(kind)) or self._compiled(kind, args, store)
                self._ready[kind] = ready
        return self._ready[kind]

    def _compiled(self, kind: object, args: tuple[object, ...], store: Store | None) -> Callable[..., Any]:
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
        """numba's, to be called by Python."""
        from gpusched.compiled.compiling import dispatcher

        return dispatcher(self._function)

    @cached_property
    def inner(self) -> Any:
        """numba's, to be called by compiled functions."""
        from gpusched.compiled.compiling import dispatcher

        return dispatcher(self._function, inner=True)

    @property
    def signatures(self) -> list[object]:
        """The versions that Python has called."""
        return list(self._ready)
