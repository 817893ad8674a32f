"""Build the distribution in this folder, and install it into a folder of its own beside the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpusched.config import plugins

HERE = Path(__file__).parent


def install(folder: Path) -> Path:
    """Build the distribution's wheel in ``folder`` and unpack it, as pip does; returns the folder for `sys.path`."""
    source, wheels, target = folder / "source", folder / "wheels", folder / "installed"
    source.mkdir()
    shutil.copy(HERE / "pyproject.toml", source)
    shutil.copytree(HERE / "src", source / "src")
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(target)
    return target


@contextmanager
def registered(folder: Path, points: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """Have a distribution ``acme 1`` in this process with these entry points, by group of gpusched's."""
    about = folder / "acme-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1\n")
    lines = [f"[gpusched.{group}]\n" + "".join(f"{n} = {at}\n" for n, at in of.items()) for group, of in points.items()]
    (about / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        plugins.components.cache_clear()
        yield
    plugins.components.cache_clear()
