"""First contact with a node: puts the payload into the cache folder and runs it; from memory where nothing is writable.

Executed as text (``python3 -I -S -c "exec(...)" LENGTH FOLDER``), before any of the payload is importable.
stdin after this text: the request as one line, then the files as zlib-compressed JSON (path -> text).
"""
# ruff: noqa: UP031

import json
import os
import shutil
import sys
import time
import zlib
from importlib.machinery import ModuleSpec

MONTH_S = 30 * 86400


def write(path: str, text: str) -> None:
    """Write a file so that it is still there after a power cut."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def is_whole(folder: str, files: "dict[str, str]") -> bool:
    """Whether exactly these files are installed there; what was compiled from them does not count."""
    try:
        for path, text in files.items():
            with open(os.path.join(folder, path), "rb") as file:
                if file.read() != text.encode():
                    return False
        with open(os.path.join(folder, "ok")) as file:
            return file.read().split() == sorted(files)
    except (OSError, ValueError):
        return False


def install(folder: str, files: "dict[str, str]") -> bool:
    """Write ``files`` below ``folder``, all or nothing; False where the disk does not allow it.

    What is there already goes, compiled files too: it was asked for anew because something of it is spoilt.
    """
    part = "%s.part-%d-%d" % (folder, os.getpid(), time.time())
    try:
        parent = os.path.dirname(folder)
        os.makedirs(parent, mode=0o700, exist_ok=True)
        for path, text in files.items():
            target = os.path.join(part, path)
            os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
            write(target, text)
        write(os.path.join(part, "ok"), "\n".join(sorted(files)) + "\n")  # the order in which they are summed up
        os.chmod(part, 0o700)
        old = part + "-old"
        try:
            os.rename(folder, old)
        except OSError:  # there is none
            pass
        shutil.rmtree(old, ignore_errors=True)
        try:
            os.rename(part, folder)
        except OSError:  # another controller was faster
            if not is_whole(folder, files):
                raise
        remove_old(parent, os.path.basename(folder))
        return True
    except OSError:
        return False
    finally:
        shutil.rmtree(part, ignore_errors=True)


def remove_old(parent: str, keep: str) -> None:
    """Remove payloads of earlier versions that nobody installed within a month."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        if name.startswith("probe-") and name != keep and os.path.getmtime(path) < time.time() - MONTH_S:
            shutil.rmtree(path, ignore_errors=True)


class Memory:
    """An importer of the payload's modules from the texts themselves."""

    def __init__(self, files: "dict[str, str]") -> None:
        self.files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """The importlib protocol's finder."""
        base = name.replace(".", "/")
        for file, package in ((base + "/__init__.py", True), (base + ".py", False)):
            if file in self.files:
                spec = ModuleSpec(name, self, origin=file, is_package=package)  # type: ignore[arg-type]
                spec.loader_state = self.files[file]
                return spec
        return None

    def create_module(self, spec: object) -> None:
        """The importlib protocol's loader: the default module."""

    def exec_module(self, module: object) -> None:
        """The importlib protocol's loader."""
        spec = module.__spec__  # type: ignore[attr-defined]
        exec(compile(spec.loader_state, spec.origin, "exec"), module.__dict__)


def boot() -> None:
    """Install, then probe."""
    folder = sys.argv[2]
    request = json.loads(sys.stdin.buffer.readline().decode())
    files = json.loads(zlib.decompress(sys.stdin.buffer.read()).decode())
    request["cached"] = install(folder, files)
    if request["cached"]:
        sys.path.insert(0, folder)
    else:
        sys.meta_path.insert(0, Memory(files))  # type: ignore[arg-type]
    from gpusched.nodes.payload import main

    main.run(request)


if __name__ == "__main__":
    boot()
