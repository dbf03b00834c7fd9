"""Int8 weights: what becomes of a parameter tree, and how far the logits move."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import paged_forward
from bench.paged_forward import PagedForward
from kernels.cpu.int8_matmul import Int8GateUp, Int8Weight
from kernels.cpu.matmul import PackedGateUp, PackedWeight
from kernels.int8_reference import Int8Matrix
from replicas.config import EngineConfig
from replicas.models.packing import pack_params
from replicas.models.quantize import quantize_params
from replicas.models.registry import load_model_config
from replicas.models.weights import load_params
from tests.checkpoints import write_checkpoint
from tests.naive import NaiveLlama

jax.config.update("jax_platforms", "cpu")

PROMPT = np.random.default_rng(3).integers(3, 128, 40).tolist()


@pytest.mark.parametrize("has_native", [True, False], ids=["native", "jnp"])
@pytest.mark.parametrize(
    "overrides",
    [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["tied", "biases"],
)
def test_int8_logits_stay_close_to_the_naive_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, Any], has_native: bool
) -> None:
    monkeypatch.setattr(paged_forward, "_has_native", lambda: has_native)
    path = write_checkpoint(tmp_path, overrides)
    expected = NaiveLlama(path).logits(PROMPT)
    logits = PagedForward(path, dtype="float32", quantization="int8", page_size=8).logits(PROMPT)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.03


def test_embedding_norms_and_biases_stay_as_they_are(tmp_path: Path) -> None:
    overrides = {"tie_word_embeddings": True, "attention_bias": True}
    path = write_checkpoint(tmp_path, overrides)
    config = load_model_config(path)
    params = load_params(path, config, dtype=jnp.bfloat16)
    quantized = quantize_params(params, config, is_native=True)
    for name in ("embedding", "final_norm"):
        np.testing.assert_array_equal(getattr(quantized, name), getattr(params, name))
    assert isinstance(quantized.head, Int8Weight)
    for index, (before, after) in enumerate(zip(params.layers, quantized.layers, strict=True)):
        is_kept = index == 0
        assert isinstance(after.mlp.gate_up, PackedGateUp if is_kept else Int8GateUp)
        for weight in (after.attention.qkv, after.attention.out, after.mlp.down):
            assert isinstance(weight, PackedWeight if is_kept else Int8Weight)
        for name in ("attention_norm", "mlp_norm"):
            np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
        for name in ("qkv_bias", "out_bias"):
            np.testing.assert_array_equal(
                getattr(after.attention, name), getattr(before.attention, name)
            )


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["bf16", "int8, native", "int8"])
def test_weights_are_freed_as_they_are_packed(tmp_path: Path, kind: str, is_tied: bool) -> None:
    path = write_checkpoint(tmp_path, {"tie_word_embeddings": is_tied})
    config = load_model_config(path)

    def pack(*, consumes: bool) -> tuple[Any, Any]:
        params = load_params(path, config, dtype=jnp.bfloat16)
        if kind == "bf16":
            return params, pack_params(params, config, consumes=consumes)
        is_native = kind != "int8"
        return params, quantize_params(params, config, is_native=is_native, consumes=consumes)

    params, packed = pack(consumes=True)
    jax.tree.map(np.testing.assert_array_equal, packed, pack(consumes=False)[1])
    left = [leaf for leaf in jax.tree.leaves(params) if not leaf.is_deleted()]
    kept = [params.embedding, *(jax.tree.leaves(params.layers[0]) if kind == "int8" else ())]
    assert all(leaf.ndim == 1 or any(leaf is other for other in kept) for leaf in left)
    assert any(leaf is params.embedding for leaf in left)


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "jnp"])
def test_the_first_layer_keeps_its_weights_unless_it_is_the_only_one(
    tmp_path: Path, is_native: bool
) -> None:
    path = write_checkpoint(tmp_path, {"num_hidden_layers": 3})
    config = load_model_config(path)
    params = load_params(path, config, dtype=jnp.float32)
    first, *others = quantize_params(params, config, is_native=is_native).layers
    jax.tree.map(np.testing.assert_array_equal, first, params.layers[0])
    int8_weight = Int8Weight if is_native else Int8Matrix
    assert [type(layer.mlp.down) for layer in others] == [int8_weight] * 2
    [only] = quantize_params(
        params._replace(layers=params.layers[:1]),
        dataclasses.replace(config, num_layers=1),
        is_native=is_native,
    ).layers
    assert isinstance(only.mlp.down, int8_weight)


def test_what_int8_does_not_run_with_is_refused() -> None:
    with pytest.raises(ValueError, match="matmul 'native' needs tensor_parallel 1"):
        EngineConfig(model="m", matmul="native", quantization="int8", tensor_parallel=4)
    with pytest.raises(ValueError, match="matmul 'native' needs tensor_parallel 1, and dtype"):
        EngineConfig(model="m", matmul="native", dtype="float32")
    EngineConfig(model="m", matmul="native", dtype="float32", quantization="int8")
