"""Completion, driven through a real bash (and zsh where it is installed)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import GPUSCHED, Site

BASH = """
eval "$(gpusched completion bash)"
COMP_WORDS=({words})
COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
complete -p gpusched >/dev/null || exit 9
_gpusched_completion gpusched
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def complete(site: Site, *words: str, env: dict[str, str] | None = None) -> list[str]:
    script = BASH.format(words=" ".join(f"'{w}'" for w in ("gpusched", *words)))
    path = f"{Path(GPUSCHED).parent}:{site.env['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script], env=site.env | {"PATH": path} | (env or {}), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [line for line in done.stdout.splitlines() if line]


def test_commands_and_options(site: Site) -> None:
    assert complete(site, "su") == ["submit"]
    assert set(complete(site, "re")) == {"release", "requeue", "resume"}
    assert "--gpus-per-node" in complete(site, "submit", "--gpus")


def test_job_ids(site: Site) -> None:
    a, b = site.submit(), site.submit()
    assert set(complete(site, "cancel", "")) == {a, b}
    site.fold()
    site.start(a)
    site.end(a)
    assert complete(site, "cancel", "") == [b]
    assert set(complete(site, "show", a[:3])) == {a, b}
    assert complete(site, "why", a) == [a]


def test_nodes_partitions_flavors_states(site: Site) -> None:
    assert complete(site, "drain", "dgx-a") == ["dgx-a100-1", "dgx-a100-2"]
    assert complete(site, "submit", "-p", "") == ["A100", "V100", "bare"]
    assert complete(site, "submit", "--flavor", "s-") == ["s-A100", "s-V100"]
    assert complete(site, "status", "-s", "comp") == ["completing", "completed"]
    assert complete(site, "status", "-s", "RUN") == ["RUNNING"]
    assert complete(site, "completion", "b") == ["bash"]


def test_silent_whatever_is_wrong(site: Site) -> None:
    site.inventory.write_text("{")
    (site.state / "gpusched.db").write_text("no database")
    for words in (("drain", ""), ("submit", "-p", ""), ("cancel", ""), ("nosuch", ""), ("submit", "'")):
        complete(site, *[w.replace("'", "") for w in words])
    assert complete(site, "cancel", "", env={"GPUSCHED_STATE": "/no/such"}) == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh(site: Site) -> None:
    script = 'autoload -U compinit && compinit -u; eval "$(gpusched completion zsh)"; echo ${_comps[gpusched]}'
    path = f"{Path(GPUSCHED).parent}:{site.env['PATH']}"
    done = subprocess.run(["zsh", "-f", "-c", script], env=site.env | {"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "_gpusched_completion"


def test_zsh_protocol(site: Site) -> None:
    """What the zsh function evaluates, asked for as it does."""
    job_id = site.submit()
    env = {"_GPUSCHED_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "gpusched cancel "}
    done = site.run(env=env)
    assert (done.code, done.err) == (0, "")
    assert job_id in done.out
    assert site.run("completion", "zsh").ok().out.startswith("#compdef gpusched")
