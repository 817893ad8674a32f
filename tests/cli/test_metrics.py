"""``gpusched metrics``: what it prints and writes, and that it starts without what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import yaml

from tests.cli.conftest import Site

HEAVY = "numpy", "numba", "torch", "paramiko", "rich", "yaml", "prometheus_client"


def test_it_prints_openmetrics_or_writes_the_text_format(site: Site) -> None:
    assert site.call("metrics").ok().out.startswith("# TYPE gpusched_build_info gauge\n"), "before the first cycle"
    site.submit()
    site.apply_inbox()
    printed = site.call("metrics").ok().out
    assert printed.endswith("# EOF\n")
    assert 'gpusched_pending_jobs{partition="V100",reason="None"} 1\n' in printed
    file = site.folder / "gpusched.prom"
    assert site.call("metrics", "--textfile", str(file)).ok().out == ""
    written = file.read_text()
    assert "# EOF" not in written
    assert written.splitlines()[-1] == printed.splitlines()[-2]
    assert len(site.call("metrics", "--textfile", "-").ok().out.splitlines()) == len(written.splitlines())


def test_it_needs_no_inventory_for_it_reads_the_controllers(site: Site) -> None:
    site.submit()
    site.apply_inbox()
    site.inventory.unlink()
    assert "gpusched_jobs{" in site.call("metrics").ok().out


def test_dashboard_and_alerts_are_printed(site: Site) -> None:
    assert json.loads(site.call("metrics", "--dashboard").ok().out)["title"] == "gpusched"
    assert yaml.safe_load(site.call("metrics", "--alerts").ok().out)["groups"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--listen", "x"), 2, "--listen x: not an address; such as 9836 or 0.0.0.0:9836"),
        (("--textfile", "none/x.prom"), 1, "No such file or directory"),
    ],
)
def test_wrong_options_are_one_line_errors(site: Site, words: tuple[str, ...], code: int, message: str) -> None:
    result = site.call("metrics", *words)
    assert (result.code, result.out) == (code, "")
    assert message in result.err.splitlines()[-1]


def test_without_prometheus_client_only_listening_is_missing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "pip install 'gpusched-cluster[metrics]'" in site.call("metrics", "--listen", "0").err
    site.call("metrics").ok()


def test_it_starts_without_what_it_does_not_need(site: Site) -> None:
    site.submit()
    site.apply_inbox()
    code = (
        "import sys; from gpusched.cli.main import run; code = run(['metrics']); "
        f"print(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=site.env, capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
