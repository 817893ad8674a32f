"""The contents of an image: installed distributions, and Python, where the nodes see them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import gpusched


def install(site: Path, *distributions: str) -> Path:
    """Copy the distributions and what they require to a folder for PYTHONPATH, compiled where they are here."""
    waiting, done = list(distributions), set[str]()
    while waiting:
        found = metadata.distribution(waiting.pop())
        if found.name in done:
            continue
        done.add(found.name)
        for file in found.files or ():
            target = site / file
            if "tests" not in file.parts and target.resolve().is_relative_to(site):
                _copy(Path(str(file.locate())), target)
        asked = [Requirement(line) for line in found.requires or ()]
        waiting += [one.name for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    return site


def install_plugins(site: Path) -> Path:
    """Copy of this package what nodes need for submitit's jobs, and of its metadata what submitit finds it by."""
    own, folder = metadata.distribution("gpusched-cluster"), site / "gpusched_cluster.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {own.name}\nVersion: {own.version}\n")
    (folder / "entry_points.txt").write_text(own.read_text("entry_points.txt") or "")
    root = Path(gpusched.__file__).parents[1]
    for file in ("__init__.py", "errors.py", "integrations/__init__.py", "integrations/submitit.py"):
        _copy(root / "gpusched" / file, site / "gpusched" / file)
    _copy(root / "hydra_plugins/gpusched_launcher.py", site / "hydra_plugins/gpusched_launcher.py")
    return site


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() and source.exists():
        shutil.copy2(source, target)  # with its time, by which compiled files are known
    if source.suffix == ".py":
        compiled = Path(importlib.util.cache_from_source(str(source)))
        if compiled.exists():
            _copy(compiled, target.parent / "__pycache__" / compiled.name)


def python_for_nodes(folder: Path) -> str:
    """Return the command of this Python on the nodes: their /root is their own, so one that is there is linked."""
    program = Path(sys.executable).resolve()
    if Path("/root") not in program.parents:
        return sys.executable
    home, version = folder / "python", f"python{sys.version_info.major}.{sys.version_info.minor}"
    (home / "bin").mkdir(parents=True)
    shutil.copy2(program, home / "bin")
    without = shutil.ignore_patterns("site-packages", "test", "__pycache__")
    shutil.copytree(
        Path(sys.base_prefix, "lib", version),
        home / "lib" / version,
        ignore=without,
        copy_function=_linked,
        symlinks=True,
    )
    for library in Path(sys.base_prefix, "lib").glob("libpython*"):
        shutil.copy2(library, home / "lib")
    return f"env PYTHONHOME={home} LD_LIBRARY_PATH={home}/lib {home}/bin/{program.name}"


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # on another file system
        shutil.copy2(source, target)
