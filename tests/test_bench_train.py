"""`python -m jax_gradops bench --suite train`, on tiny models."""

from __future__ import annotations

import argparse
import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gradops
from jax_gradops.__main__ import main
from jax_gradops._tools.bench import (
    options,
    train,
    train_curves,
    train_gpt2,
    train_llama,
    train_resnet,
    train_text,
    train_unet,
    train_vit,
)

TRAIN = ("--suite", "train", "--device", "cpu", "--rounds", "1")


def bench_training(tmp_path: Path, *args: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "train.json"
    status = main(["bench", *TRAIN, "--json", str(path), *args])
    return status, json.loads(path.read_text())


RESNET = ("--model", "resnet50", "--batch", "4", "--image-size", "32", "--steps", "2")


@pytest.fixture
def short_resnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_resnet, "BLOCKS", (1,))


@pytest.mark.usefixtures("standard_promotion", "short_resnet")
def test_resnet(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ("--dtype", "f32", "--variant", "jax_gradops,unfused", "--stages", "1")
    status, report = bench_training(tmp_path, *RESNET, *arguments)
    assert status == 0 and report["suite"] == "train" and report["left_out"] == []
    (result,) = report["results"]
    assert (result["model"], result["unit"]) == ("resnet50", "images")
    assert (result["shape"], result["stages"]) == ([4, 32, 32, 3], ["1"])
    assert result["wrong"] == result["failed"] == {}
    assert list(result["variants"]) == ["stock", "jax_gradops", "unfused"]
    for name, variant in result["variants"].items():
        assert 0 < variant["ms"]["p20"] <= variant["ms"]["median"] <= variant["ms"]["p80"]
        assert variant["examples_per_s"] == pytest.approx(4e3 / variant["ms"]["median"], rel=1e-4)
        assert variant["over_stock"]["median"] > 0 and variant["memory_bytes"] > 1e6
        # The norms of a block with a shortcut; the stem's norm is stock.
        norms = 4 if name != "stock" else 0
        kernels = dict.fromkeys(("batch_norm_bwd", "batch_norm_fwd"), norms) if norms else {}
        assert variant["kernel_calls"] == kernels
        assert variant["losses_off_by"] < 1e-4  # float32 losses
        first, second = variant["losses"]
        assert 5 < first < 10 and first != second
    assert len(result["noise"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("resnet50 f32 4x32x32x3 ") for line in lines)


@pytest.mark.usefixtures("standard_promotion", "short_resnet")
def test_training_something_else_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    right = train_resnet.BatchNorm.__call__

    def without_relu(self: Any, x: jax.Array, *, relu: bool = False, **options: Any) -> jax.Array:
        del relu
        return right(self, x, **options)

    monkeypatch.setattr(train_resnet.BatchNorm, "__call__", without_relu)
    status, report = bench_training(tmp_path, *RESNET)
    assert status == 1
    (result,) = report["results"]
    assert result["wrong"].keys() == {"jax_gradops"} and result["failed"] == {}
    assert "jax_gradops is wrong: the loss of step 1 is " in capsys.readouterr().err


@pytest.mark.usefixtures("standard_promotion", "short_resnet")
def test_training_without_kernels_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    without = functools.partial(jax_gradops.batch_norm, implementation="xla")
    monkeypatch.setattr(jax_gradops, "batch_norm", without)
    status, report = bench_training(tmp_path, *RESNET)
    assert status == 1
    (result,) = report["results"]
    assert result["failed"].keys() == {"jax_gradops"} and result["wrong"] == {}
    assert result["variants"]["jax_gradops"]["ms"] is None
    assert "no kernel of this library" in capsys.readouterr().err


def test_losses_that_roundings_explain() -> None:
    expected, noise = [7.0, 6.0, 5.0], np.array([0.001, 0.01, 0.0])
    mistakes = train_curves.mistakes
    assert mistakes(expected, noise, [7.03, 6.2, 5.2]) == ""
    assert mistakes(expected, noise, [7.1, 6.0, 5.0]).startswith("the loss of step 1 is 7.1,")
    assert "step 3 is 5.3, stock's 5: off by 0.06," in mistakes(expected, noise, [7.0, 6.0, 5.3])
    assert "step 2 is nan" in mistakes(expected, noise, [7.0, float("nan"), 5.0])
    assert mistakes([np.inf], noise[:1], [7.0]) == "losses are not finite"


GPT2 = ("--model", "gpt2", "--batch", "2", "--context", "16", "--steps", "12")


@pytest.fixture
def small_gpt2(monkeypatch: pytest.MonkeyPatch) -> None:
    small = train_gpt2.Config(layers=1, heads=2, width=32, vocabulary=200, padded=256)
    monkeypatch.setattr(train_gpt2, "CONFIG", small)
    monkeypatch.setattr(train_text, "read_text", lambda: "to be, or not to be: that is it\n" * 99)


@pytest.mark.usefixtures("standard_promotion", "small_gpt2")
def test_gpt2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["stock", "jax_gradops", "linear_loss", "stock_loss", "unfused", "save_output", "fuse"]
    arguments = ("--dtype", "f32", "--variant", ",".join(names), "--profile", str(tmp_path))
    status, report = bench_training(tmp_path, *GPT2, *arguments)
    assert status == 0
    (result,) = report["results"]
    assert (result["shape"], result["unit"], result["steps"]) == ([2, 16], "tokens", 12)
    assert "stages" not in result and result["wrong"] == result["failed"] == {}
    assert list(result["variants"]) == names
    gelu, clip = {"bias_gelu_bwd": 1, "bias_gelu_fwd": 1}, {"sum_of_squares": 1}
    norms = {"row_norm_bwd": 3, "row_norm_fwd": 3, "embedding_bwd": 2}
    loss = {"softmax_cross_entropy_bwd": 1, "softmax_cross_entropy_fwd": 1}
    fused = gelu | norms | clip
    expected = [{}, fused | loss, fused | loss, fused, norms | clip | loss, fused | loss]
    expected.append(fused | loss)
    for name, kernels in zip(names, expected, strict=True):
        variant = result["variants"][name]
        calls = variant["kernel_calls"]
        if name == "linear_loss":  # its gradients are also computed again, if cotangents differ
            assert calls.keys() == kernels.keys() and all(calls[n] >= kernels[n] for n in kernels)
        else:
            assert calls == kernels
        assert variant["examples_per_s"] == pytest.approx(32e3 / variant["ms"]["median"], rel=1e-4)
        assert variant["memory_bytes"] > variant["temporary_bytes"] > 0
        assert variant["compile_seconds"] > 0
        assert len(variant["losses"]) == 12 and variant["losses_off_by"] < 1e-4
        assert variant["losses"][0] == pytest.approx(np.log(256), rel=0.1)
        assert variant["losses"][-1] < variant["losses"][0] - 0.01
        for group in variant["profile"]:
            sum_of_kernels = sum(kernel["ms"] for kernel in group["kernels"])
            assert group["ms"] == pytest.approx(sum_of_kernels, rel=1e-3)
        assert sum(group["calls"] for group in variant["profile"]) > 10
    assert (tmp_path / "gpt2-float32-unfused").is_dir() and len(result["noise"]) == 12
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("gpt2 f32 2x16 ") for line in lines)
    assert any(line.startswith("  losses, stock (steps 1, 2, 3,") for line in lines)
    assert any(line.startswith("  gpt2 f32 2x16 stock: kernels of a step") for line in lines)


@pytest.mark.usefixtures("standard_promotion", "small_gpt2")
@pytest.mark.parametrize(("model", "function"), [("gpt2", "tanh"), ("gpt2-exact", "erf")])
def test_gpt2_steps(model: str, function: str) -> None:
    """Each step has its own batch, and the model has its form of GELU."""
    with jax.enable_x64(False):
        setup = train.TrainCase(model, "float32", "cpu", (2, 16), ("stock",)).setup()
        parameters, number = jax.jit(setup.init)(jax.random.key(0))
        loss = jax.jit(setup.loss("stock"))
        corpus = setup.batch(jax.random.key(1))
        first, second = loss(parameters, number, corpus)
        assert second == number + 1 and loss(parameters, second, corpus)[0] != first
        text = str(jax.make_jaxpr(loss)(parameters, number, corpus))
        assert [name in text for name in ("tanh", "erf")] == [function == "tanh", function == "erf"]


@pytest.mark.usefixtures("standard_promotion", "small_gpt2")
@pytest.mark.parametrize(("variant", "additions"), [("unfused", 5), ("jax_gradops", 1)])
def test_gpt2_additions(variant: str, additions: int) -> None:
    """XLA adds embeddings. If "unfused", XLA also adds two biases and two updates."""
    with jax.enable_x64(False):
        setup = train.TrainCase("gpt2", "bfloat16", "cpu", (2, 16), (variant,)).setup()
        arguments = jax.eval_shape(setup.init, jax.random.key(0))
        corpus = setup.batch(jax.random.key(1))
        text = jax.jit(setup.loss(variant)).lower(*arguments, corpus).as_text()
    assert len(re.findall(r"stablehlo\.add .*tensor<2x16x32x", text)) == additions


@pytest.mark.usefixtures("standard_promotion", "small_gpt2")
@pytest.mark.parametrize(
    ("variant", "dtypes"),
    [
        ("stock", ["bf16", "f32"]),
        ("jax_gradops", ["bf16"]),
        ("linear_loss", []),
        ("stock_loss", ["bf16", "f32"]),
        ("unfused", ["bf16"]),
    ],
)
def test_gpt2_logits(variant: str, dtypes: list[str]) -> None:
    """The dtypes of arrays of all logits, in a step of more rows than one chunk has."""
    with jax.enable_x64(False):
        setup = train.TrainCase("gpt2", "bfloat16", "cpu", (2, 4096), (variant,)).setup()
        arguments = jax.eval_shape(setup.init, jax.random.key(0))
        gradient = jax.grad(setup.loss(variant), has_aux=True)
        text = jax.jit(gradient).lower(*arguments, setup.batch(jax.random.key(1))).as_text()
    assert sorted(set(re.findall(r"<(?:2x4096|8192)x256x(b?f\d+)>", text))) == dtypes


@pytest.fixture
def small_llama(monkeypatch: pytest.MonkeyPatch, small_gpt2: None) -> None:
    small = train_llama.Config(layers=1, heads=2, width=32, hidden=48)
    monkeypatch.setattr(train_llama, "CONFIG", small)


@pytest.mark.usefixtures("standard_promotion", "small_llama")
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_llama(model: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["stock", "jax_gradops", "linear_loss", "stock_loss", "unfused"]
    arguments = ("--dtype", "f32", "--vocabulary", "96", "--variant", ",".join(names))
    status, report = bench_training(tmp_path, "--model", model, *GPT2[2:], *arguments)
    assert status == 0
    (result,) = report["results"]
    assert (result["case"], result["vocabulary"]) == (f"{model} f32 2x16 96 words", 96)
    assert list(result["variants"]) == names and result["wrong"] == result["failed"] == {}
    loss = {"softmax_cross_entropy_bwd", "softmax_cross_entropy_fwd"}
    for name, variant in result["variants"].items():
        calls = dict(variant["kernel_calls"])
        with_loss = name in ("jax_gradops", "linear_loss", "unfused")
        assert {kernel for kernel in loss if calls.pop(kernel, 0)} == (loss if with_loss else set())
        others = {"row_norm_bwd": 3, "row_norm_fwd": 3, "sum_of_squares": 1, "embedding_bwd": 1}
        assert calls == (others if name != "stock" else {})
        assert variant["losses_off_by"] < 1e-4
        assert variant["losses"][0] == pytest.approx(np.log(96), rel=0.1)
        assert variant["losses"][-1] < variant["losses"][0] - 0.01


@pytest.mark.usefixtures("standard_promotion", "small_llama")
@pytest.mark.parametrize(
    ("model", "inside", "outside"), [("llama", "logistic", "tanh"), ("gemma", "tanh", "logistic")]
)
def test_activation_of_gates(model: str, inside: str, outside: str) -> None:
    with jax.enable_x64(False):
        setup = train.TrainCase(model, "float32", "cpu", (2, 16), ("stock",)).setup()
        arguments = (*jax.eval_shape(setup.init, jax.random.key(0)), setup.batch(jax.random.key(1)))
        text = str(jax.make_jaxpr(setup.loss("stock"))(*arguments))
    assert f" {inside} " in text and f" {outside} " not in text


IMAGES = ("--batch", "4", "--dtype", "f32", "--steps", "8")


@pytest.mark.usefixtures("standard_promotion")
def test_vit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_vit, "CONFIG", train_vit.Config(layers=1, heads=2, width=32, patch=4))
    names = ["stock", "jax_gradops", "stock_loss", "unfused", "save_output", "fuse"]
    arguments = ("--image-size", "12", "--variant", ",".join(names))
    status, report = bench_training(tmp_path, "--model", "vit", *IMAGES, *arguments)
    assert status == 0
    (result,) = report["results"]
    assert (result["case"], result["unit"]) == ("vit f32 4x12x12x3", "images")
    assert list(result["variants"]) == names and result["wrong"] == result["failed"] == {}
    gelu = {"bias_gelu_bwd": 1, "bias_gelu_fwd": 1}
    norms = {"row_norm_bwd": 3, "row_norm_fwd": 3, "sum_of_squares": 1}
    loss = {"softmax_cross_entropy_bwd": 1, "softmax_cross_entropy_fwd": 1}
    fused = gelu | norms
    expected = [{}, fused | loss, fused, norms | loss, fused | loss, fused | loss]
    for name, kernels in zip(names, expected, strict=True):
        variant = result["variants"][name]
        assert variant["kernel_calls"] == kernels
        assert variant["losses_off_by"] < 1e-4
        assert variant["losses"][0] == pytest.approx(np.log(1000), rel=0.1)
        assert variant["losses"][-1] < variant["losses"][0]


def test_patches() -> None:
    """A patch has all numbers of a square of 16 x 16 pixels, in the order of the image."""
    images = np.arange(2 * 32 * 48 * 3).reshape(2, 32, 48, 3)
    patches = train_vit._cut(jnp.asarray(images))
    assert patches.shape == (2, 6, 768)
    np.testing.assert_array_equal(patches[1, 5], images[1, 16:, 32:].ravel())


def test_vit_attends_to_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class token is the first one: causal attention would hide the image from it."""
    monkeypatch.setattr(train_vit, "CONFIG", train_vit.Config(layers=1, heads=2, width=32, patch=4))
    with jax.enable_x64(False):
        setup = train.TrainCase("vit", "float32", "cpu", (2, 8, 8, 3), ("stock",)).setup()
        parameters, carried = setup.init(jax.random.key(0))
        images, labels = setup.batch(jax.random.key(1))
        loss = jax.jit(setup.loss("stock"))
        first, second = (loss(parameters, carried, (a, labels))[0] for a in (images, -images))
    assert first != second


@pytest.fixture
def small_unet(monkeypatch: pytest.MonkeyPatch) -> None:
    small = train_unet.Config(channels=(8, 16), blocks=1, groups=4, times=8)
    monkeypatch.setattr(train_unet, "CONFIG", small)


@pytest.mark.usefixtures("standard_promotion", "small_unet")
def test_unet(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["stock", "jax_gradops", "unfused"]
    arguments = ("--image-size", "8", "--variant", ",".join(names))
    status, report = bench_training(tmp_path, "--model", "unet", *IMAGES, *arguments)
    assert status == 0
    (result,) = report["results"]
    assert (result["case"], result["unit"]) == ("unet f32 4x8x8x4", "images")
    assert list(result["variants"]) == names and result["wrong"] == result["failed"] == {}
    # Two norms in each of two blocks down, one in the middle, and four up. The last norm.
    norms = {"group_norm_bwd": 15, "group_norm_fwd": 15, "sum_of_squares": 1}
    for name, variant in result["variants"].items():
        assert variant["kernel_calls"] == (norms if name != "stock" else {})
        assert variant["losses_off_by"] < 1e-4
        assert variant["losses"][-1] < variant["losses"][0]
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("unet f32 4x8x8x4 ") for line in lines)


@pytest.mark.usefixtures("standard_promotion", "small_unet")
@pytest.mark.parametrize(
    ("variant", "outside"), [("stock", 17), ("unfused", 17), ("jax_gradops", 2)]
)
def test_unet_silu(variant: str, outside: int) -> None:
    """The number of calls of SiLU outside of norms: two are of the time's embedding."""
    with jax.enable_x64(False):
        setup = train.TrainCase("unet", "bfloat16", "cpu", (2, 8, 8, 4), (variant,)).setup()
        arguments = (*jax.eval_shape(setup.init, jax.random.key(0)), setup.batch(jax.random.key(1)))
        text = jax.jit(setup.loss(variant)).lower(*arguments).as_text()
    # The kernels' references have SiLU too, but in no function of this name.
    assert len(re.findall(r"call @silu", text)) == outside


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt2", "gpt2 bf16 32x1024"),
        ("llama", "llama bf16 4x2048 32000 words"),
        ("gemma", "gemma bf16 4x2048 32000 words"),
        ("resnet50", "resnet50 bf16 256x224x224x3"),
        ("vit", "vit bf16 256x224x224x3"),
        ("unet", "unet bf16 16x64x64x4"),
    ],
)
def test_default_sizes(model: str, expected: str) -> None:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    arguments = ["--suite", "train", "--model", model]
    (case,) = train.select(parser.parse_args(arguments), "cpu")
    assert str(case) == expected and case.variants == ("stock", "jax_gradops")


def test_rotary() -> None:
    """Products of queries and keys depend on the difference of their positions only."""
    with jax.enable_x64(False):
        q, k = np.random.default_rng(0).standard_normal((2, 8), np.float32)
        turned = [train_llama.rotary(jnp.tile(a, (1, 6, 1, 1))) for a in (q, k)]
        products = np.einsum("iqhf,ikhf->qk", *turned)
    for difference in range(-5, 6):
        diagonal = np.diagonal(products, difference)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-5)
    assert products[0, 0] == pytest.approx(q @ k, rel=1e-4)
    assert abs(products[0, 3] - products[0, 0]) > 0.1


def test_tokens() -> None:
    words = ["to", " be", ",", " or", " not", " to", " be", ":", "\n", " be"]
    tokens = train_text.tokens("".join(words), 5)
    assert tokens.tolist() == [1, 0, 2, 3, 4, 4, 0, 4, 4, 0]
    assert train_text.tokens(train_text.read_text(), 50257).size > 100_000
