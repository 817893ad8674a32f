"""Tables of contention: figures read by hand from the files, and bad files."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measured_tables import pairs_of, read_pairs, read_steps
from gpusched.errors import FileError, GpuschedError
from gpusched.sim.profiles import read_profiles
from tests.traces.samples import real


def table_of(name: str):
    return read_pairs(real(f"../profiles/contention/{name}"))


def ratio(table, job: str, beside: str) -> list[float]:
    rows = (table.job == table.kinds.index(job)) & (table.beside == table.kinds.index(beside))
    return list(table.ratio[rows])


def test_jobs_that_share_a_network():
    table = table_of("deepshare_pairs.csv")
    assert (len(table.ratio), len(table.kinds)) == (900, 30)
    assert ratio(table, "MobileNetV3 2 on 2", "GraphSage 4 on 2") == [0.904]
    assert table.families[table.kinds.index("GraphSage 4 on 2")] == "GraphSage"


def test_jobs_on_the_same_gpus_by_their_own_speed_alone():
    table = table_of("pal_colocation_norm_speed.csv")
    assert ratio(table, "vgg19 1x32", "resnet50 1x32") == [0.80]
    assert ratio(table, "resnet50 1x32", "vgg19 1x32") == [0.41]
    assert ratio(table, "Bert-Base 2x256/16 4,8", "vgg19 2x32") == [pytest.approx(0.32 / 0.57)]
    assert ratio(table, "Bert-Base 2x256/16 6,6", "resnet50 2x32") == [1.0]  # 0.54 after 0.52 alone
    assert len(ratio(table, "vgg19 1x32", "vgg19 1x32")) == 1


def test_jobs_inside_one_server_and_on_one_gpu():
    table = table_of("hiest_power8.csv")
    assert ratio(table, "bvlc_alexnet 1x1", "bvlc_alexnet 1x4") == [pytest.approx(69.165 / 75.03)]
    gavel = pairs_of(read_profiles([real("../profiles/gavel_throughputs.json.gz")]), "P100")
    assert (len(gavel.ratio), len(set(gavel.families))) == (656, 7)


def test_steps_by_placement():
    one = read_steps(real("../profiles/placement/bert-placements-aws.csv"))
    assert (one.model, one.machine, one.bus) == ("bert", "aws", True)
    row = np.flatnonzero((one.times.placed.gpus == 2) & (one.times.placed.servers == 2) & (one.times.batch == 4))
    assert one.times.step_s[row] == pytest.approx(1.2252386063)
    assert not read_steps(real("../profiles/placement/bert-placements-dgx-ext.csv")).bus


HEAD = "model,gpus,nodes,beside_model,beside_gpus,beside_nodes,ratio\n"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a,b\n1,2\n", 1, "beside_model"),
        (HEAD + "a,1,1,b,1,1,nan\n", 2, "a number, more than 0"),
        (HEAD + "a,1,1,b,1,1,0.5\na,1,1,b,1,1,-1\n", 3, "a number, more than 0"),
        (HEAD + "a,1,1,b,1,1,0\n", 2, "more than 0"),
        (HEAD + "a,1,1,b,1,1\n", 2, "7 fields"),
    ],
)
def test_errors_in_files_name_the_line(tmp_path, text: str, line: int, says: str):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(FileError, match=says) as error:
        read_pairs(tmp_path / "bad.csv")
    assert f"bad.csv:{line}" in str(error.value)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(GpuschedError, match=r"none\.csv"):
        read_pairs(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text(HEAD)
    with pytest.raises(GpuschedError, match=r"empty\.csv"):
        read_pairs(tmp_path / "empty.csv")
    (tmp_path / "steps.csv").write_text("a\n")
    with pytest.raises(FileError, match="MODEL-placements-CLUSTER"):
        read_steps(tmp_path / "steps.csv")
