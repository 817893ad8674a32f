"""`submit --resizable`: what is asked for, and what is refused in one line."""

from __future__ import annotations

import pytest

from gpusched.model.jobs import Elastic
from tests.cli.conftest import Site


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--gpus", "1-4"), Elastic(sizes=(1, 2, 3, 4), base_gpus=1, base_cores=32, base_memory_mib=128 << 10)),
        (
            ("--sizes", "8,2,4", "--base", "4", "--batch", "scale", "--cooldown", "20m"),
            Elastic(
                sizes=(2, 4, 8), base_gpus=4, base_cores=128, base_memory_mib=512 << 10, batch="scale", cooldown_s=1200
            ),
        ),
        (
            ("--sizes", "4,16", "--cpus", "10", "--mem", "5G"),
            Elastic(sizes=(4, 16), base_gpus=4, base_cores=10, base_memory_mib=5 << 10),
        ),
    ],
)
def test_what_is_asked_for(site: Site, options: tuple[str, ...], expected: Elastic) -> None:
    site.submit("-p", "A100", "--image", "x", "--resizable", *options, "--", "run")
    spec = site.only_submit().spec
    assert spec.elastic == expected
    assert spec.gpus == expected.base_gpus


def test_cores_and_memory_go_with_the_gpus(site: Site) -> None:
    site.submit(
        "-p", "A100", "--image", "x", "--resizable", "--sizes", "4,16", "--cpus", "10", "--mem", "5G", "--", "r"
    )
    spec = site.only_submit().spec
    there_and_back = spec.at_size(16, 2).at_size(4, 1)
    shapes = [(s.nodes, s.gpus_per_node, s.cores_per_node, s.memory_mib_per_node) for s in (spec, spec.at_size(16, 2))]
    assert shapes == [(1, 4, 10, 5 << 10), (2, 8, 20, 10 << 10)]
    assert there_and_back == spec


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (("--gpus", "1-4"), "--gpus: several sizes are for jobs that can be stopped and resumed; add --resizable"),
        (("--resizable",), "--resizable: say which sizes it may have; --gpus 1-8, or --sizes 1,2,4,8"),
        (("--resizable", "--gpus", "4-1"), "--gpus: 4-1 is no range of at most 1000 sizes; the smaller number first"),
        (("--resizable", "--gpus", "1-1000000"), "--gpus: 1-1000000 is no range of at most 1000 sizes"),
        (("--resizable", "--gpus", "few"), "--gpus: found 'few', expected a number, or with --resizable 1-8"),
        (("--resizable", "--sizes", "1,x"), "--sizes: found '1,x', expected numbers such as 1,2,4,8"),
        (("--resizable", "--sizes", "1-4"), "--sizes: found '1-4', expected numbers such as 1,2,4,8"),
        (
            ("--resizable", "--sizes", "1,2", "--gpus", "2"),
            "--sizes already says how many GPUs, so --gpus has no place",
        ),
        (("--resizable", "--gpus", "1-4", "--base", "8"), "--base 8 is none of the sizes that it may have"),
        (("--resizable", "--gpus", "1-4", "--batch", "big"), "--batch: found 'big', expected fixed or scale"),
        (("--resizable", "--gpus", "1-4", "--cooldown", "soon"), "--cooldown: found 'soon', expected a time"),
        (("--resizable", "--gpus", "1-17"), "--resizable: 9 GPUs fit on no number of equal nodes of partition A100"),
        (("--resizable", "--sizes", "0,1"), "--resizable takes 1 to 1000 sizes of at least one GPU, ascending"),
        (("--gpus", "-1"), "--gpus must not be negative, found -1"),
    ],
)
def test_what_is_refused(site: Site, options: tuple[str, ...], error: str) -> None:
    done = site.call("submit", "-p", "A100", "--image", "x", *options, "--", "run")
    assert done.code == 2
    assert error in done.err
    assert "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_it_is_told_where_its_folder_lies(site: Site) -> None:
    command = ("submit", "-p", "A100", "--image", "x", "--resizable", "--gpus", "1-4", "--", "run")
    assert "keep checkpoints where all nodes see them" in site.call(*command).err
    site.inventory.write_text("settings: {job_dirs: /shared/jobs}\n" + site.inventory.read_text())
    assert "checkpoints" not in site.call(*command).err


def test_why_and_show_and_dry_run_know_sizes(site: Site) -> None:
    options = ("-p", "A100", "--image", "x", "--resizable", "--sizes", "1,2,4,8", "--", "run")
    assert site.call("submit", "--json", "--dry-run", *options).json["spec"]["elastic"]["sizes"] == [1, 2, 4, 8]
    job = site.submit(*options)
    page = site.call("show", "--json", job).json
    assert page["resizes"] == {"count": 0, "why": None, "cost_s": None, "lost_s": 0.0, "unusable": [], "frozen": None}
    assert "sizes:        1-2,4,8 GPUs, now 1" in site.call("show", job).out
