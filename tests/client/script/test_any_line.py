"""Whatever stands in a script: it is understood, or refused in one line."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gpusched.cli import options
from gpusched.client.request import SubmitRequest
from gpusched.client.script import layers, sbatch
from gpusched.client.script.source import JobScript
from gpusched.config.inventory import load_inventory
from gpusched.config.validate import script_error
from gpusched.errors import UsageError
from gpusched.model.resources import Inventory
from tests.client.script.scripts import INVENTORY

NAMES = st.sampled_from([*sbatch.OPTIONS, *(o.short for o in sbatch.OPTIONS.values() if o.short)])
VALUES = st.sampled_from(
    ["", "0", "-1", "4", "a100:4", "gpu:4", "gpu", "g[01-02]", "g[", "now+1hour", "1:00", "B:USR1@9", "64G", "%j", "%q",
     "ALL", "a=b", "none", "'", '"x y"', "1@1:00", "99999999999999999999", "[a|b]", "a&b", "x" * 300, "\x1b[3m", "é"]
) | st.text(max_size=12)  # fmt: skip
OPTION = st.builds(
    lambda name, equals, value: f"{'-' if len(name) == 1 else '--'}{name}{equals}{value}",
    NAMES | st.text(max_size=5), st.sampled_from(["=", " ", ""]), VALUES,
)  # fmt: skip
LINE = st.builds(
    lambda marker, words: f"{marker} {' '.join(words)}",
    st.sampled_from(["#SBATCH", "#GPUSCHED", "#SBATCH ", "# SBATCH", "x"]), st.lists(OPTION, max_size=3),
)  # fmt: skip


def inventory(folder: Path) -> Inventory:
    path = folder / "inventory.yaml"
    path.write_text(INVENTORY)
    return load_inventory(path)


def test_any_line_is_understood_or_refused(tmp_path: Path) -> None:
    known = inventory(tmp_path)

    @settings(max_examples=300, deadline=None, database=None)
    @given(st.lists(LINE, max_size=3))
    def whatever(lines: list[str]) -> None:
        text = "\n".join(["#!/bin/sh", *lines])
        if script_error(text):
            return
        try:
            read = layers.read_options(JobScript(text=text, where="f", name="f"), options.parse, known, "/cwd", "ada")
            SubmitRequest(**layers.merge_typed(read, {}))
        except UsageError as error:
            said = error.line()
        else:
            said = ""
        assert "\n" not in said

    whatever()
