"""Build the distribution in this folder, and install it into a folder of its own beside the package."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

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
