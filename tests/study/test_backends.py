"""The same runs on a local Dask or Ray cluster, through joblib: equal figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusched.errors import UsageError
from gpusched.study.request import _connected

GPUSCHED = str(Path(sys.executable).parent / "gpusched")
SWF = "".join(f"{i} {i * 7} -1 {50 + i % 9} {1 + i % 4} -1 -1 -1 900 -1 1 {i % 3} 1 -1 1 -1 -1 -1\n" for i in range(40))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_local_cluster_gives_the_same_figures(tmp_path: Path, backend: str, package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs the extra '{backend}': pip install 'gpusched-cluster[{backend}]' (Ray: 80 MB to download)")
    (tmp_path / "log.swf").write_text(SWF)
    env = os.environ | {"NUMBA_DISABLE_JIT": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}

    def rows(*words: str) -> list[dict[str, object]]:
        command = [GPUSCHED, "replay", "log.swf", "-N", "1", "-P", "fifo", "-P", "sjf", "--json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, env=env, cwd=tmp_path)
        found: list[dict[str, object]] = json.loads(done.stdout)
        return [{k: v for k, v in row.items() if k not in ("sim_seconds", "jobs_per_s")} for row in found]

    assert rows("--backend", backend) == rows()


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_only_a_backend_s_own_import_error_names_its_package(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    ended = list[str]()
    client = SimpleNamespace(Client=lambda *_, **__: closing(SimpleNamespace(close=lambda: ended.append("dask"))))
    ray = SimpleNamespace(init=lambda **_: None, shutdown=lambda: ended.append("ray"))
    modules = {"distributed": client, "ray": ray, "ray.util.joblib": SimpleNamespace(register_ray=lambda: None)}
    for name, module in (modules | {"ray.util": SimpleNamespace()}).items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match="no such policy"), _connected(backend):
        raise ImportError("no such policy")
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="needs its package"), _connected(backend):
        pass
