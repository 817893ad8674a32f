"""First contact with a node: installs the payload into the cache folder, if possible, and runs it from memory.

Executed as text (``python3 -I -S -c "exec(...)" LENGTH FOLDER``), before any of the payload can be imported.
stdin holds, after this text, the request as one line, then the files as zlib-compressed JSON (path -> text).
"""
# ruff: noqa: UP031

import binascii
import json
import os
import shutil
import sys
import time
import zlib
from importlib.machinery import ModuleSpec

MONTH_S = 30 * 86400


def write(path: str, text: str) -> None:
    """Write a file that survives a power cut."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def is_there(path: str, text: str) -> bool:
    """Return whether the file holds exactly this text."""
    try:
        with open(path, "rb") as file:
            return file.read() == text.encode()
    except OSError:
        return False


def install(folder: str, files: "dict[str, str]") -> bool:
    """Install ``files`` below ``folder``; return False if the disk does not allow it.

    Several nodes may share this home and install at the same time. A new folder appears complete, by one rename. In an
    existing folder only wrong files are replaced, each by a rename, so that readers never see a partial file.
    """
    parent = os.path.dirname(folder)
    part = "%s.part-%s" % (folder, binascii.hexlify(os.urandom(8)).decode())
    # "ok" lists the files in the order of their checksum. It is written last: without it the folder is not used.
    wanted = [(path, files[path]) for path in sorted(files)] + [("ok", "\n".join(sorted(files)) + "\n")]
    try:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        if not os.path.isdir(folder) and not create(folder, part, wanted):
            remove(folder)  # a file, or a dangling link
            create(folder, part, wanted)
        try:
            repair(folder, part, wanted)
        except OSError:  # the folder is not writable: replace it
            os.rename(folder, part + "-old")
            remove(part + "-old")
            create(folder, part, wanted)
        remove_old(parent, os.path.basename(folder))
        return all(is_there(os.path.join(folder, path), text) for path, text in wanted)
    except OSError:
        return False
    finally:
        remove(part)


def create(folder: str, part: str, wanted: "list[tuple[str, str]]") -> bool:
    """Write the files into ``part``, then rename it to ``folder``; return False if something else has that name."""
    for path, text in wanted:
        target = os.path.join(part, path)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        write(target, text)
    os.chmod(part, 0o700)
    try:
        os.rename(part, folder)
    except OSError:  # another node was faster
        remove(part)
        return os.path.isdir(folder)
    return True


def repair(folder: str, part: str, wanted: "list[tuple[str, str]]") -> None:
    """Replace wrong files, and remove compiled ones, which may be the damaged ones."""
    for path, text in wanted:
        target = os.path.join(folder, path)
        if is_there(target, text):
            continue
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        write(part, text)
        if os.path.isdir(target):
            remove(target)
        os.rename(part, target)
    for place in sorted({os.path.dirname(path) for path, _ in wanted}):
        remove(os.path.join(folder, place, "__pycache__"))


def remove(path: str) -> None:
    """Remove a file or a folder with its contents."""
    shutil.rmtree(path, ignore_errors=True)
    try:
        os.unlink(path)
    except OSError:
        pass


def remove_old(parent: str, keep: str) -> None:
    """Remove payloads of other versions unused for a month (main.py touches those in use)."""
    for name in os.listdir(parent):
        path = os.path.join(parent, name)
        try:
            if name.startswith("probe-") and name != keep and os.path.getmtime(path) < time.time() - MONTH_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # another node removed it meanwhile
            pass


class MemoryImporter:
    """Imports the payload's modules from the texts received."""

    def __init__(self, files: "dict[str, str]") -> None:
        self.files = files

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        """Find a module (importlib's protocol)."""
        base = name.replace(".", "/")
        for file, package in ((base + "/__init__.py", True), (base + ".py", False)):
            if file in self.files:
                spec = ModuleSpec(name, self, origin=file, is_package=package)  # type: ignore[arg-type]
                spec.loader_state = self.files[file]
                return spec
        return None

    def create_module(self, spec: object) -> None:
        """Return None, for the default module (importlib's protocol)."""

    def exec_module(self, module: object) -> None:
        """Run a module's code (importlib's protocol)."""
        spec = module.__spec__  # type: ignore[attr-defined]
        exec(compile(spec.loader_state, spec.origin, "exec"), module.__dict__)


def boot() -> None:
    """Install the payload, then run it with the request."""
    folder = sys.argv[2]
    request = json.loads(sys.stdin.buffer.readline().decode())
    files = json.loads(zlib.decompress(sys.stdin.buffer.read()).decode())
    request["cached"] = install(folder, files)
    # From memory in any case: another node may replace what is on the disk at any moment.
    sys.meta_path.insert(0, MemoryImporter(files))  # type: ignore[arg-type]
    from gpusched.nodes.payload import main

    main.run(request)


if __name__ == "__main__":
    boot()
