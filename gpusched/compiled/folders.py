"""Cache folders of compiled passes that are never stale: their names digest all that code depends on."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_IMPORT = re.compile(rb"^from gpusched((?:\.\w+)*) import", re.MULTILINE)


@cache
def _source(module: str) -> bytes:
    """Return the source of a module below ``gpusched`` (a package's ``__init__``), or of one outside it."""
    path = _PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        file = Path(getattr(sys.modules.get(module), "__file__", None) or "/nowhere")
    return file.read_bytes() if file.is_file() else b""


@cache
def _imports(module: str) -> tuple[str, ...]:
    """Return the modules of this package that a module imports."""
    return tuple(found.decode().lstrip(".") for found in _IMPORT.findall(_source(module)))


def _digest(module: str) -> str:
    """Return a digest of a module, all its direct and indirect imports from this package, and the compiler's code."""
    seen: set[str] = set()
    left = [module, "compiled", "compiled.compiling", "compiled.by_address", "compiled.by_numba"]
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
    """Return the cache folder of a module; None: none. A read-only home, or none, only costs compile time."""
    if not _source(module.removeprefix("gpusched.")):
        return None  # changes could not be detected
    named, home = os.environ.get("NUMBA_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(named) if named else Path(home or Path.home() / ".cache") / "gpusched" / "numba"
        folder = base / _digest(module.removeprefix("gpusched."))
        folder.mkdir(0o700, parents=True, exist_ok=True)
        private = _is_private(folder.stat(), base.stat())
    except (OSError, RuntimeError):  # without HOME an account that is not in passwd has no home
        return None
    return folder if private and os.access(folder, os.W_OK) else None


def _is_private(folder: os.stat_result, base: os.stat_result) -> bool:
    """Return whether only this user can put code into the folder, where it would run in this user's name."""
    shared = base.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH  # any user could rename what is in it
    own = folder.st_uid == os.geteuid() and not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return own and base.st_uid in (0, folder.st_uid) and not shared
