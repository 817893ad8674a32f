"""numpy's linear algebra in one thread.

OpenBLAS starts a thread for each core when it is loaded, and these wait for work by spinning: a third of what a short
command costs, and on a login node with a low limit of processes an error. No command multiplies matrices that need two;
torch has threads of its own.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_THREADS = "OPENBLAS_NUM_THREADS"
_BY_USER = (_THREADS, "OMP_NUM_THREADS", "GOTO_NUM_THREADS")


class _OneThread(MetaPathFinder):
    """Set the number of threads while numpy is loaded: jobs and programs that we start must not inherit it."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        if name != "numpy":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                os.putenv(_THREADS, "1")  # for C only: os.environ, which jobs are given, stays as it is
                try:
                    load(module)
                finally:
                    os.unsetenv(_THREADS)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def use_one_thread() -> None:
    """Make numpy, once it is imported, start no threads, unless the user has set how many."""
    if "numpy" not in sys.modules and not any(name in os.environ for name in _BY_USER):
        sys.meta_path.insert(0, _OneThread())
