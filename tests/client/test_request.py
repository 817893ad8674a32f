"""The table of options: its rows do not contradict each other, and what is left out is what a spec has by default."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from gpusched.cli import complete, options
from gpusched.client.request import OPTIONS, SubmitRequest, type_of, values_of
from gpusched.client.submit import _AS_REQUESTED
from gpusched.errors import UsageError
from gpusched.model.jobs import JobSpec


def test_every_name_is_one_options_and_every_completion_exists() -> None:
    names = [name for option in OPTIONS.values() for name in re.split("[ /]", option.names)]
    assert len(names) == len(set(names))
    assert [o.complete for o in OPTIONS.values() if o.complete and not callable(getattr(complete, o.complete))] == []


def test_omitted_values_are_the_defaults_of_a_spec() -> None:
    spec = JobSpec(name="n", partition="p", gpus_per_node=0, cores_per_node=1, memory_mib_per_node=1, time_limit_s=1)
    left_out = SubmitRequest()
    assert {name: getattr(left_out, name) for name in _AS_REQUESTED} == {n: getattr(spec, n) for n in _AS_REQUESTED}


def test_a_line_gives_values_and_only_what_it_says() -> None:
    assert options.parse(["-G", "2-4", "-t", "2h", "--mem", "1G-2G", "-x", "a,b", "-x", "b", "--no-requeue"]) == {
        "gpus": (2, 3, 4), "time": 7200, "mem": (1024, 2048), "exclude": ("a", "b"), "requeue": False,
    }  # fmt: skip


_ELSEWHERE = ("env", "secret", "mount")  # parsed where the job is submitted


@pytest.mark.parametrize(
    "option",
    [o.long for n, o in OPTIONS.items() if n not in _ELSEWHERE and bool not in (type_of(n), *get_args(type_of(n)))],
)
@pytest.mark.parametrize("text", ["", " "])
def test_an_empty_value_is_an_error_of_each_option(option: str, text: str) -> None:
    with pytest.raises(UsageError, match=option):
        options.parse([option, text])


@pytest.mark.parametrize("option", ["--nodelist", "--exclude", "--gpu-type"])
def test_a_list_has_no_empty_part_alone(option: str) -> None:
    with pytest.raises(UsageError) as error:
        options.parse([option, "a", option, ","])
    assert error.value.line() == f"{option}: found ',', expected a value; leave it out for none"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--gpus", "1g.10gb:2"], {"gpus": (2,), "mig": "1g.10gb"}),
        (["-G", "3G.40GB"], {"gpus": (1,), "mig": "3g.40gb"}),
        (["--gpus-per-node", "1g.10gb+me:1"], {"gpus_per_node": 1, "mig": "1g.10gb+me"}),
        (["--gpus", "2", "--mig", "1g.10gb"], {"gpus": (2,), "mig": "1g.10gb"}),
        (["--gpus", "1g.10gb:2", "--mig", "1g.10gb"], {"gpus": (2,), "mig": "1g.10gb"}),
        (["--gpus-per-node", "4"], {"gpus_per_node": 4}),
    ],
)
def test_slices_are_a_number_and_a_profile(words: list[str], given: dict[str, object]) -> None:
    assert options.parse(words) == given


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--gpus", "1g.10gb:2", "--mig", "3g.40gb"], "--gpus 1g.10gb and --mig 3g.40gb are two kinds of slices"),
        (["--gpus", "1g.10gb:x"], "--gpus: found 'x'"),
        (["--gpus", "1g:2"], "--gpus: found '1g:2'"),
        (["--mig", "10gb"], "--mig: found '10gb', expected a profile such as 1g.10gb"),
        (["--gpus-per-node", "a100:2"], "--gpus-per-node: found 'a100:2', expected a number, or slices"),
    ],
)
def test_invalid_slices_are_rejected(words: list[str], why: str) -> None:
    with pytest.raises(UsageError) as error:
        options.parse(words)
    assert error.value.message.startswith(why)


def test_the_error_is_of_the_first_wrong_value_in_the_tables_order() -> None:
    with pytest.raises(UsageError, match="--gpus: found 'x'"):
        values_of({"sizes": "y", "time": "soon", "gpus": "x"})
