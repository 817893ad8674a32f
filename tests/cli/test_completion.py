"""Completion, driven through a real bash (and zsh where it is installed)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

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
    found = {"recover", "release", "replay", "reproduce", "requeue", "reservations", "reserve", "resume"}
    assert set(complete(site, "re")) == found
    assert "--gpus-per-node" in complete(site, "submit", "--gpus")


def test_job_ids(site: Site) -> None:
    a, b = site.submit(), site.submit()
    assert set(complete(site, "cancel", "")) == {a, b}
    site.apply_inbox()
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
    assert complete(site, "submit", "--max-spread", "r") == ["rack"]


def test_policies(site: Site) -> None:
    (site.folder / "policies").mkdir()
    (site.folder / "policies/ours.yaml").write_text("order: sjf\n")
    (site.folder / "policies/learned.yaml").write_text("agent: gist\n")
    for words in (("policy", "show"), ("policy", "compare", "easy"), ("policy", "shadow"), ("policy", "promote")):
        assert complete(site, *words, "ou") == ["ours"], words
        assert {"easy", "gist", "ours"} < set(complete(site, *words, ""))
    assert set(complete(site, "train", "")) == {
        "dl2", "gist", "learned", "maifs", "rltune", "rltune-limit", "rltune-milp", "rltune-nothing",
        "rltune-preempt", "topology",
    }  # fmt: skip
    assert complete(site, "train", "gist", "--partition", "A") == ["A100"]
    assert {"ours", "sjf", "sjf-oracle", "sjf+easy"} <= set(complete(site, "replay", "--policy", ""))
    assert complete(site, "replay", "-P", "fifo+e") == ["fifo+easy"]
    assert "ours" in zsh(site, "replay", "--policy", "our")
    assert "gist" in zsh(site, "train", "gi")


def test_nothing_heavy_is_imported_for_names_of_policies(site: Site) -> None:
    program = (
        "import sys; from gpusched.cli.complete import agents, policies, replays\n"
        "assert all(offer('') for offer in (agents, policies, replays))\n"
        "print([m for m in ('numpy', 'numba', 'torch', 'paramiko') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=site.env, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr


def test_silent_whatever_is_wrong(site: Site) -> None:
    site.inventory.write_text("{")
    (site.state / "gpusched.db").write_text("no database")
    for words in (("drain", ""), ("submit", "-p", ""), ("cancel", ""), ("nosuch", ""), ("submit", "'")):
        complete(site, *[w.replace("'", "") for w in words])
    assert complete(site, "cancel", "", env={"GPUSCHED_STATE": "/no/such"}) == []


def zsh(site: Site, *words: str) -> str:
    """Return the arguments of the completion function to zsh's _arguments; without zsh by the same protocol."""
    if shutil.which("zsh") is None:
        env = {"_GPUSCHED_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": " ".join(("gpusched", *words))}
        return site.run(env=env).ok().out
    quoted = " ".join(f"'{w}'" for w in ("gpusched", *words))
    script = (
        'compdef() { }; _arguments() { print -r -- "$@" }; _files() { print files }; '
        f'eval "$(gpusched completion zsh)"; words=({quoted}); CURRENT=${{#words}}; _gpusched_completion'
    )
    path = f"{Path(GPUSCHED).parent}:{site.env['PATH']}"
    done = subprocess.run(
        ["zsh", "-f", "-c", script], env=site.env | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout


def test_zsh(site: Site) -> None:
    job_id = site.submit()
    assert job_id in zsh(site, "cancel", "")
    assert "dgx-a100-1" in zsh(site, "drain", "dgx")
    assert "submit" in zsh(site, "su")
    assert site.run("completion", "zsh").ok().out.startswith("#compdef gpusched")


def test_other_users_text_never_reaches_the_shell(site: Site) -> None:
    """Zsh evaluates descriptions, so there are none."""
    job_id = site.submit("-F", "one", "-J", "\\$(touch pwned)`touch pwned`'\"", "--", "x")
    out = zsh(site, "cancel", "")
    assert job_id in out
    assert "touch" not in out
    assert complete(site, "cancel", "") == [job_id]
    assert not (site.folder / "pwned").exists()
