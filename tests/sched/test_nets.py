"""Networks as arrays: the same numbers as plain matrix products, and files that are refused."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from gpusched.agents.common.nets import arrays_of, forward, net_of, new_buffers
from gpusched.config.weights import load_model, save_model
from gpusched.errors import GpuschedError


def layers(sizes: list[int], seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(out, into)).astype(np.float32), rng.normal(size=out).astype(np.float32))
        for into, out in pairwise(sizes)
    ]


@pytest.mark.parametrize("sizes", [[3, 2], [5, 8, 1], [4, 16, 32, 3], [1, 1, 1, 1, 1], [2, 3, 2, 3, 2, 3, 2]])
def test_forward_is_a_multilayer_perceptron(sizes: list[int]) -> None:
    made = layers(sizes)
    net = net_of(arrays_of(made, "q"), "q", sizes[0], sizes[-1])
    work, found = new_buffers(net), np.zeros(sizes[-1], np.float32)
    for x in np.random.default_rng(1).normal(size=(20, sizes[0])).astype(np.float32):
        expected = x.astype(np.float64)
        for i, (weight, bias) in enumerate(made):
            expected = weight @ expected + bias
            expected = np.maximum(expected, 0) if i < len(made) - 1 else expected
        forward(net, x, found, work)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_nan_comes_out() -> None:
    made = layers([2, 3, 1])
    made[0][0][:] = np.nan
    net = net_of(arrays_of(made, "q"), "q", 2, 1)
    found = np.zeros(1, np.float32)
    forward(net, np.ones(2, np.float32), found, new_buffers(net))
    assert np.isnan(found[0])


@pytest.mark.parametrize(
    ("inputs", "outputs", "missing", "message"),
    [
        (4, 1, "", "layer 0 of q is 8x5, and takes 4 inputs here"),
        (6, 1, "", "layer 0 of q is 8x5, and takes 6 inputs here"),
        (5, 2, "", "q has 1 outputs, not 2"),
        (5, 1, "q.1.bias", "layer 1 of q is 1x8, and takes 8 inputs here"),
        (5, 1, "q.0.weight", "q has no outputs, not 1"),
    ],
)
def test_another_shape(inputs: int, outputs: int, missing: str, message: str) -> None:
    arrays = arrays_of(layers([5, 8, 1]), "q")
    arrays.pop(missing, None)
    with pytest.raises(ValueError, match=message):
        net_of(arrays, "q", inputs, outputs)


def test_weights_files(tmp_path: Path) -> None:
    arrays = arrays_of(layers([5, 8, 1]), "q")
    save_model(tmp_path / "A100.safetensors", "gist", arrays, {"knows": "limit"})
    assert not list(tmp_path.glob("*.partial"))
    model = load_model(tmp_path, "A100", "gist")
    assert model.about["knows"] == "limit"
    assert {n: a.tobytes() for n, a in model.arrays.items()} == {n: a.tobytes() for n, a in arrays.items()}
    # the only file there is serves any partition; with a second one it has to be named or be the default
    assert load_model(tmp_path, "V100", "gist").digest == model.digest
    save_model(tmp_path / "B.safetensors", "gist", arrays)
    with pytest.raises(GpuschedError, match="no weights for V100"):
        load_model(tmp_path, "V100", "gist")
    save_model(tmp_path / "default.safetensors", "gist", {**arrays, "q.0.bias": arrays["q.0.bias"] * np.nan})
    with pytest.raises(GpuschedError, match=r"q\.0\.bias contains non-finite numbers"):
        load_model(tmp_path, "V100", "gist")
    with pytest.raises(GpuschedError, match="weights belong to gist, not to rltune"):
        load_model(tmp_path, "A100", "rltune")
    whole = (tmp_path / "A100.safetensors").read_bytes()
    for content in (b"", whole[:20], whole[:-3], b"{}" * 40):
        (tmp_path / "A100.safetensors").write_bytes(content)
        with pytest.raises(GpuschedError, match="cannot be read"):
            load_model(tmp_path, "A100", "gist")


@pytest.mark.parametrize(
    ("key", "shape"), [("bias", 7), ("bias", 9), ("bias", (8, 1)), ("weight", 40), ("weight", (8, 5, 1))]
)
def test_a_layer_of_another_shape(key: str, shape: int | tuple[int, ...]) -> None:
    arrays = arrays_of(layers([5, 8, 1]), "q")
    arrays[f"q.0.{key}"] = np.zeros(shape, np.float32)
    with pytest.raises(ValueError, match=r"layer 0 of q is .*, and takes 5 inputs here"):
        net_of(arrays, "q", 5, 1)
