"""The documentation against the code: generated parts, commands, words, links."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from gpusched.cli.main import COMMANDS
from gpusched.errors import UsageError
from gpusched.model.jobs import JobState
from gpusched.model.plan import ReasonCode
from gpusched.model.readings import GpuState, NodeState
from gpusched.sim.policies import look_up
from tests.docs import generate

ROOT = generate.DOCS.parent
PAGES = sorted([*generate.DOCS.rglob("*.md"), *ROOT.glob("*.md")])
# GitHub renders `code` inside links and headings; fenced blocks hold neither.
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_generated_parts_say_what_the_code_says() -> None:
    stale = [_name(path) for path, _ in generate.check()]
    assert not stale, f"run python -m tests.docs.generate: {stale}"


def test_every_generated_part_stands_somewhere() -> None:
    assert generate.parts_in_docs() == set(generate.PARTS)


def test_an_edited_generated_part_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (generate.DOCS / "concepts/states.md").read_text("utf-8")
    (tmp_path / "states.md").write_text(page.replace("| `DOWN` | no |", "| `DOWN` | yes |"), encoding="utf-8")
    monkeypatch.setattr(generate, "DOCS", tmp_path)
    assert [path.name for path, _ in generate.check()] == ["states.md"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_reference_and_in_a_guide(command: str) -> None:
    reference = (generate.DOCS / "reference/cli.md").read_text("utf-8")
    assert f"\n## gpusched {command}\n" in reference
    guides = [ROOT / "README.md", generate.DOCS / "getting-started.md", *(generate.DOCS / "guides").glob("*.md")]
    guides += [generate.DOCS / "reference/exit-codes.md", generate.DOCS / "concepts/states.md"]
    said = rf"`{command}`|gpusched {command}\b"
    assert any(re.search(said, page.read_text("utf-8")) for page in guides), command


def _with_and_without_json() -> tuple[list[str], list[str]]:
    """All commands, those of groups by both words: which have ``--json``, and which have not."""
    every = {}
    for name, command in generate.commands().items():
        own = {f"{name} {sub}": c for sub, c in getattr(command, "commands", {}).items()} or {name: command}
        every |= {words: any("--json" in p.opts for p in c.params) for words, c in own.items()}
    return [n for n, has in every.items() if has], [n for n, has in every.items() if not has]


def _missing_json(page: str) -> list[str]:
    """Commands whose JSON the page does not describe, and those without any of which it does not say so."""
    with_json, without = _with_and_without_json()
    missing = [name for name in with_json if not re.search(rf"`gpusched {name}\b[^`]*--json`", page)]
    last = page.rstrip().rpartition("\n\n")[2]
    return missing + [name for name in without if f"`{name}`" not in last]


def test_every_command_with_json_is_in_the_json_reference() -> None:
    page = (generate.DOCS / "reference/json.md").read_text("utf-8")
    assert _missing_json(page) == []
    assert _missing_json(page.replace("`gpusched predict", "`gpusched guess")) == ["predict"]
    assert _missing_json(page.replace("`gpusched trace fit --json`", "")) == ["trace fit"]


def test_every_policy_is_in_the_guide() -> None:
    guide = (generate.DOCS / "guides/policies.md").read_text("utf-8")
    missing = [p.stem for p in generate.policy_files() if f"\n- `{p.stem}`: " not in guide]
    assert not missing


@pytest.mark.parametrize("word", [*JobState, *NodeState, *GpuState, *ReasonCode])
def test_every_state_and_reason_is_explained(word: str) -> None:
    assert re.search(
        rf"^(\| `{word}` \||- `{word}`:) ", (generate.DOCS / "concepts/states.md").read_text("utf-8"), re.M
    )


def test_every_variable_that_is_read_is_documented() -> None:
    code = "\n".join(path.read_text("utf-8") for path in (ROOT / "gpusched").rglob("*.py"))
    read = set(re.findall(r"""environ(?:\.get)?[\[(]["'](GPUSCHED_[A-Z_]+|XDG_[A-Z_]+)""", code))
    read |= set(re.findall(r"""_xdg\(["'](XDG_[A-Z_]+)""", code))
    assert read
    page = (generate.DOCS / "reference/environment.md").read_text("utf-8")
    assert not [name for name in read if not re.search(rf"^- (`[^`]+`, )*`{name}[`=]", page, re.M)]


# -- links


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", h.lower()) for h in headings)
    return {p.strip().replace(" ", "-") for p in plain}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(_FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        if not there.exists() or (anchor and anchor not in _anchors(there)):
            broken.append(target)
    assert not broken


def test_every_page_is_linked_from_another() -> None:
    linked = set()
    for page in PAGES:
        for target in _LINK.findall(page.read_text("utf-8")):
            linked.add((page.parent / target.partition("#")[0]).resolve())
    alone = [_name(p) for p in generate.DOCS.rglob("*.md") if p not in linked]
    assert not alone


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_pages_name_nothing_of_a_developers_machine(page: Path) -> None:
    found = re.findall(r"(?<![\w.])/(?:work|root|tmp/pytest)\b\S*|\.\./shared\S*", page.read_text("utf-8"))
    assert not found


def test_each_promise_of_reliability_is_shown_by_tests_that_exist() -> None:
    page = (generate.DOCS / "reliability.md").read_text("utf-8")
    shown = {row: re.findall(r"`(tests/[^`]+)`", row) for row in page.splitlines() if row.startswith("- ")}
    assert shown
    assert [row for row, tests in shown.items() if not tests or not all((ROOT / t).is_file() for t in tests)] == []


# -- commands in examples


def _commands(page: Path) -> Iterator[str]:
    """Lines that call gpusched: after ``$`` in console blocks, or indented as code."""
    text = page.read_text("utf-8")
    text = re.sub(r"^```text\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)  # output, not input
    text = text.replace("\\\n", " ")
    for line in text.splitlines():
        match = re.match(r"(?:\$ |    )(?:.*\| )?(gpusched [a-z].*)", line)
        if match:
            yield match[1]


GROUPS = {name: group.commands for name, group in generate.commands().items() if hasattr(group, "commands")}


def _options(line: str) -> tuple[str, set[str]]:
    """The command of a line and the options that stand before its ``--``."""
    lexer = shlex.shlex(line.partition(" -- ")[0].replace("'", ""), posix=True, punctuation_chars=";<>|")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    words = list(lexer)
    if words[1] in GROUPS and "".join(words[2:3]).islower():
        words[1:3] = [" ".join(words[1:3])]
    return words[1], {w.partition("=")[0] for w in words[2:] if re.fullmatch(r"--?[A-Za-z][A-Za-z-]*(=.*)?", w)}


@cache
def _known_options() -> dict[str, set[str]]:
    """Return each command's options."""
    return {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"-h", "--help"}
        for name, command in (
            *generate.commands().items(),
            *((f"{group} {name}", c) for group, commands in GROUPS.items() for name, c in commands.items()),
        )
    }


@pytest.mark.parametrize("page", [p for p in PAGES if any(_commands(p))], ids=_name)
def test_examples_call_commands_and_options_that_exist(page: Path) -> None:
    known = _known_options()
    unknown = []
    for line in _commands(page):
        command, options = _options(line)
        flags = {f"-{letter}" for o in options if re.fullmatch(r"-[a-z]{2,}", o) for letter in o[1:]}
        options = {o for o in options if not re.fullmatch(r"-[a-z]{2,}", o)} | flags
        unknown += [line] if command not in known else [f"{line}: {o}" for o in options - known[command]]
    assert not unknown


def _policies(line: str) -> Iterator[str]:
    """The policies that an example names, a version left out."""
    words = shlex.split(line.replace("'", ""), comments=True)
    named = [after for word, after in pairwise(words) if word in ("-P", "--policy") and "benchmarks" not in line]
    after = [w for w in words[3:] if not w.startswith("-")]
    if words[1:3] == ["policy", "compare"]:
        named += after[:2]
    elif words[1] == "policy" and words[2] in ("show", "shadow", "promote"):
        named += after[:1]
    elif words[1] == "train":
        named += words[2:3]
    yield from (name.partition("@")[0] for name in named)


@pytest.mark.parametrize("page", [p for p in PAGES if any(_commands(p)) and p.name != "cli.md"], ids=_name)
def test_examples_name_policies_that_exist(page: Path) -> None:
    """As a name that replays take; a file that is there or that the page says to write; what an example trains."""
    text = page.read_text("utf-8")
    made = set(re.findall(r"--out (\S+)", text))
    for line in _commands(page):
        for name in _policies(line):
            if name in made or (name.endswith(".yaml") and f"`{name}`" in text):
                continue
            file = ROOT / name
            look_up(str(file) if file.suffix == ".yaml" else name)  # raises where there is none


def test_an_example_with_an_unknown_policy_is_noticed() -> None:
    named = ["easy", "sjf-limit+easy", "las", "gist", "fifo", "easy", "gist", "policies/gist.yaml"]
    lines = [
        "gpusched replay --since 30d --policy easy -P sjf-limit+easy --policy las  # a comment --policy x",
        "gpusched policy shadow gist --partition A100", "gpusched policy compare fifo easy --since 30d",
        "gpusched policy promote gist@3f2a", "gpusched train policies/gist.yaml --trace F",
    ]  # fmt: skip
    assert [name for line in lines for name in _policies(line)] == named
    with pytest.raises(UsageError, match="did you mean"):
        look_up("eazy")


@pytest.mark.parametrize("page", [p for p in PAGES if "```python" in p.read_text("utf-8")], ids=_name)
def test_python_examples_import_what_there_is(page: Path) -> None:
    text = page.read_text("utf-8")
    blocks = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    for line in re.findall(r"^ *((?:from gpusched\S* )?import .+)", blocks, re.MULTILINE):
        if "gpusched" in line:
            exec(line, {})
    named = re.findall(r"`(gpusched(?:\.[a-z_]+)+)\.(\w+)\(", text)
    assert [f"{module}.{name}" for module, name in named if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize(
    "record", sorted(p for p in (generate.DOCS / "decisions").glob("*.md") if p.name != "README.md"), ids=_name
)
def test_decisions_say_what_why_and_what_follows(record: Path) -> None:
    text = record.read_text("utf-8")
    assert all(part in text for part in ("**What.**", "**Why.**", "**Consequences.**"))
    assert f"({record.name})" in (record.parent / "README.md").read_text("utf-8")
