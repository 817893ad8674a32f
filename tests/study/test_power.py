from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpusched.config.inventory import load_inventory
from gpusched.errors import FileError
from gpusched.sim.pool import NodeSpec, Pool
from gpusched.sim.power import Draw, power_model, read_power
from tests.study.build import gist_pool


def test_the_papers_rated_figures_are_the_default() -> None:
    model = power_model(gist_pool())
    assert model.busy_w.tolist() == [6500.0, 6500.0]
    assert model.idle_w.tolist() == [3250.0, 3250.0]
    assert "assumed" in model.note
    v100 = power_model(Pool.of([NodeSpec(8, gpu_type="V100-SXM2-32GB"), NodeSpec(4, gpu_type="")]))
    assert v100.busy_w.tolist() == [3500.0, 1750.0]


def test_nodes_go_before_types_before_the_inventory(tmp_path: Path) -> None:
    file = tmp_path / "inventory.yaml"
    file.write_text(
        "partitions:\n  A:\n    defaults: {runtime: process, gpus: 8, cores: 8, memory: 8G, gpu_type: A100, "
        "rated_power: 5kW}\n    nodes: [x, y]\n    flavors: {}\n"
    )
    inventory = load_inventory(file)
    pool = Pool.of_inventory(inventory)
    assert power_model(pool, inventory=inventory).busy_w.tolist() == [5000.0, 5000.0]
    model = power_model(pool, inventory=inventory, types={"A100": Draw(1, 2)}, nodes={"y": Draw(3, 4)})
    assert (model.idle_w.tolist(), model.busy_w.tolist()) == ([1.0, 3.0], [2.0, 4.0])
    assert "given" in model.note


def test_energy_is_idle_plus_what_is_held() -> None:
    pool = Pool.uniform(2, 8)
    model = power_model(pool, types={"": Draw(1000, 3000)})
    assert model.energy_j(pool, np.array([80.0, 0.0]), 100.0) == pytest.approx(2 * 1000 * 100 + 2000 * 10)


def test_a_file_of_figures(tmp_path: Path) -> None:
    file = tmp_path / "power.yaml"
    file.write_text("types:\n  A100: {idle: 1.6kW, busy: 6500}\nnodes:\n  dgx1: {idle: 900 W, busy: 6kW}\n")
    assert read_power(file) == ({"A100": Draw(1600, 6500)}, {"dgx1": Draw(900, 6000)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("types: {A100: {idle: 1.6kW}}", "busy"),
        ("types: {A100: {idle: 7kW, busy: 6kW}}", "idle no larger than busy"),
        ("types: {A100: {idle: much, busy: 6kW}}", "a power"),
        ("type: {}", "types"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "power.yaml"
    file.write_text(text)
    with pytest.raises(FileError, match=said):
        read_power(file)
