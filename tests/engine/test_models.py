"""The model against the naive one over options and mesh shapes, and bitwise over row counts."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.paged_forward import PagedForward
from kernels import reference
from kernels.cpu import attention, library, matmul
from replicas.config import EngineConfig, ModelConfig, RopeConfig
from replicas.models import decoder, layers, llama, rope, sharding
from replicas.models.decoder_params import Packing, prepare_params
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import allocate_kv_pages, bytes_per_page
from replicas.models.layer_stack import LayerStack, stack_layers
from replicas.models.packing import pack_params
from replicas.models.quantize import quantize_params
from replicas.models.registry import get_family, load_model_config
from replicas.models.weights import load_params
from tests.checkpoints import TINY_LLAMA, write_checkpoint
from tests.naive import NaiveLlama
from tests.naive_neox import NaiveNeoX, random_neox_tensors

PROMPT = np.random.default_rng(3).integers(3, 128, 40).tolist()

SMOLLM2_LAYERS = ModelConfig(
    family="llama",
    vocab_size=1024,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=2,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
SMALL_LAYERS = dataclasses.replace(
    SMOLLM2_LAYERS, hidden_size=48, intermediate_size=80, num_heads=6, head_dim=16
)


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": 7,
        },
    ],
    ids=[
        "biases",
        "one kv head",
        "no grouping",
        "linear rope",
        "llama3 rope",
        "yarn rope",
        "window",
    ],
)
def test_options_equal_the_naive_model(tmp_path: Path, overrides: dict[str, Any]) -> None:
    path = write_checkpoint(tmp_path, overrides)
    expected = NaiveLlama(path).logits(PROMPT)
    logits = PagedForward(path, dtype="float32", page_size=8).logits(PROMPT)
    assert np.abs(logits - expected).max() < 1e-4


@pytest.mark.parametrize(
    ("is_parallel", "is_tied", "attention_bias"), [(False, True, False), (True, False, True)]
)
def test_options_of_gpt_neox_equal_the_naive_model(
    tmp_path: Path, is_parallel: bool, is_tied: bool, attention_bias: bool
) -> None:
    raw = {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "num_attention_heads": 3,
        "num_key_value_heads": None,
        "hidden_size": 60,
        "layer_norm_eps": 1e-5,
        "rms_norm_eps": None,
        "rope_theta": None,
        "rotary_pct": 0.5,
        "rotary_emb_base": 5000,
        "use_parallel_residual": is_parallel,
        "attention_bias": attention_bias,
        "tie_word_embeddings": is_tied,
    }
    tensors = random_neox_tensors({**TINY_LLAMA, **raw})
    path = write_checkpoint(tmp_path, raw, tensors=tensors)
    expected = NaiveNeoX(path).logits(PROMPT)
    logits = PagedForward(path, dtype="float32", page_size=8).logits(PROMPT)
    assert np.abs(logits - expected).max() < 1e-4


@pytest.mark.parametrize("tensor_parallel", [2, 4, 8])
def test_a_sharded_model_equals_the_naive_one(tmp_path: Path, tensor_parallel: int) -> None:
    """2 KV heads on 2, 4 and 8 devices: split, then replicated."""
    path = write_checkpoint(
        tmp_path,
        {"num_attention_heads": 8, "attention_bias": True, "mlp_bias": True, "hidden_size": 64},
    )
    config = load_model_config(path)
    family = get_family(config)
    mesh = sharding.make_mesh(EngineConfig(model="", tensor_parallel=tensor_parallel))
    specs = family.param_specs(config, num_shards=tensor_parallel)
    params = load_params(
        path,
        config,
        dtype=jnp.float32,
        shardings=sharding.param_shardings(specs, mesh),
        num_shards=tensor_parallel,
    )
    kv_pages = allocate_kv_pages(
        config,
        num_pages=8,
        page_size=8,
        dtype=jnp.float32,
        num_shards=tensor_parallel,
        sharding=sharding.kv_pages_sharding(mesh),
    )
    assert kv_pages[0].shape[1] == 2 * max(2, tensor_parallel)
    qkv = params.layers[0].attention.qkv
    assert qkv.sharding.shard_shape(qkv.shape)[0] == qkv.shape[0] // tensor_parallel
    forward = sharding.shard_forward(family.forward, mesh, specs)
    compute_logits = sharding.shard_logits(family.compute_logits, mesh, specs)

    @jax.jit
    def run(params, kv_pages, inputs):
        hidden, kv_pages = forward(
            params, kv_pages, inputs, config, attention=reference.ragged_paged_attention
        )
        return compute_logits(params, hidden, inputs.num_tokens, config), kv_pages

    logits, kv_pages = run(params, kv_pages, prefill_inputs(PROMPT, num_rows=40, page_size=8))
    assert np.abs(np.asarray(logits) - NaiveLlama(path).logits(PROMPT)).max() < 1e-4
    assert kv_pages[0].sharding.is_equivalent_to(sharding.kv_pages_sharding(mesh), 4)


def test_sharded_int8_logits_stay_close_to_the_naive_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"hidden_size": 64})
    config = load_model_config(path)
    family = get_family(config)
    mesh = sharding.make_mesh(EngineConfig(model="", tensor_parallel=2))
    specs = family.param_specs(config, num_shards=2)
    shardings = sharding.param_shardings(specs, mesh)
    params = load_params(path, config, dtype=jnp.float32, shardings=shardings, num_shards=2)
    params = quantize_params(params, config, is_native=False)
    down = params.layers[1].mlp.down
    assert tuple(down.values.sharding.spec) == (None, sharding.TENSOR_AXIS)
    assert down.scales.shape == (2 * 64,), "each device has scales of its own inputs"
    assert down.rotation == 8, "of the 24 inputs on each device"
    partition = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    forward = sharding.shard_forward(family.forward, mesh, partition)
    compute_logits = sharding.shard_logits(family.compute_logits, mesh, partition)
    inputs = prefill_inputs(PROMPT, num_rows=40, page_size=8)
    kv_pages = allocate_kv_pages(
        config,
        num_pages=8,
        page_size=8,
        dtype=jnp.float32,
        num_shards=2,
        sharding=sharding.kv_pages_sharding(mesh, config),
    )

    @jax.jit
    def run(params, kv_pages, inputs):
        hidden, _ = forward(
            params, kv_pages, inputs, config, attention=reference.ragged_paged_attention
        )
        return compute_logits(params, hidden, inputs.num_tokens, config)

    logits = np.asarray(run(params, kv_pages, inputs))
    expected = NaiveLlama(path).logits(PROMPT)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.03


def test_a_dense_layer_has_two_collectives(tmp_path: Path) -> None:
    config = load_model_config(write_checkpoint(tmp_path))
    mesh = sharding.make_mesh(EngineConfig(model="", tensor_parallel=2))
    specs = llama.param_specs(config, num_shards=2)
    params = load_params(
        tmp_path,
        config,
        dtype=jnp.float32,
        shardings=sharding.param_shardings(specs, mesh),
        num_shards=2,
    )
    kv_pages = allocate_kv_pages(
        config,
        num_pages=8,
        page_size=8,
        dtype=jnp.float32,
        num_shards=2,
        sharding=sharding.kv_pages_sharding(mesh),
    )
    forward = sharding.shard_forward(decoder.forward, mesh, specs)
    lowered = jax.jit(
        lambda p, kv, x: forward(p, kv, x, config, attention=reference.ragged_paged_attention)
    ).lower(params, kv_pages, prefill_inputs(PROMPT[:8], num_rows=8, page_size=8))
    # One more for the embedding, whose vocabulary is sharded.
    assert lowered.as_text().count("stablehlo.all_reduce") == 2 * config.num_layers + 1


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_shards", "expected"),
    [
        (8, 4, 2, (8, 4, 1)),
        (8, 2, 4, (8, 4, 2)),
        (8, 2, 8, (8, 8, 4)),
        (6, 3, 2, (8, 4, 1)),
        (6, 3, 4, (8, 4, 1)),
        (6, 3, 8, (8, 8, 2)),
        (9, 3, 2, (12, 4, 1)),
        (32, 8, 16, (32, 16, 2)),
    ],
)
def test_heads_are_copied_and_padded_until_they_divide(
    num_heads: int, num_kv_heads: int, num_shards: int, expected: tuple[int, int, int]
) -> None:
    heads = sharding.shard_heads(num_heads, num_kv_heads, num_shards)
    assert (heads.num_heads, heads.num_kv_heads, heads.repeats) == expected
    assert sharding.shard_heads(num_heads, num_kv_heads, 1) == sharding.ShardedHeads(
        num_heads, num_kv_heads, 1
    )


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor_parallel is 99 but only 8"):
        sharding.make_mesh(EngineConfig(model="", tensor_parallel=99))


def test_page_bytes_are_those_of_the_allocated_pages() -> None:
    pages = allocate_kv_pages(SMOLLM2_LAYERS, num_pages=5, page_size=16, dtype=jnp.bfloat16)
    one_page = bytes_per_page(SMOLLM2_LAYERS, page_size=16, dtype=jnp.bfloat16)
    assert sum(page.nbytes for page in pages) == 5 * one_page
    stacked = allocate_kv_pages(
        SMOLLM2_LAYERS, num_pages=5, page_size=16, dtype=jnp.bfloat16, is_stacked=True
    )
    assert stacked.shape == (SMOLLM2_LAYERS.num_layers, *pages[0].shape)
    quantized = allocate_kv_pages(SMOLLM2_LAYERS, num_pages=5, page_size=16, dtype=jnp.int8)
    small_page = bytes_per_page(SMOLLM2_LAYERS, page_size=16, dtype=jnp.int8)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(quantized)) == 5 * small_page
    assert small_page / one_page == (64 + 4) / (2 * 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", [SMOLLM2_LAYERS, SMALL_LAYERS], ids=["smollm2", "small"])
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(
    config: ModelConfig, dtype: str
) -> None:
    params = random_params(config, dtype)
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, 256).tolist()
    whole = run_prefill(params, config, dtype, token_ids)
    for num_rows in (8, 16, 64):
        part = run_prefill(params, config, dtype, token_ids[:num_rows])
        np.testing.assert_array_equal(part, whole[:num_rows])

    compute_logits = jax.jit(
        lambda params, hidden: decoder.compute_logits(
            params, hidden, jnp.full(1, len(hidden), jnp.int32), config
        )
    )
    logits = compute_logits(params, whole)
    for num_rows in (8, 16, 64):
        part = compute_logits(params, whole[:num_rows])
        np.testing.assert_array_equal(part, logits[:num_rows])
    rolled = compute_logits(params, np.roll(whole[:32], 5, axis=0))
    np.testing.assert_array_equal(rolled, np.roll(logits[:32], 5, axis=0))


def test_padding_rows_of_packed_weights_are_finite_and_change_no_bit() -> None:
    library.load()
    params = pack_params(random_params(SMALL_LAYERS, "bfloat16"), SMALL_LAYERS)
    token_ids = np.random.default_rng(0).integers(0, SMALL_LAYERS.vocab_size, 11).tolist()
    whole = run_prefill(params, SMALL_LAYERS, "bfloat16", token_ids)
    padded = run_prefill(params, SMALL_LAYERS, "bfloat16", token_ids, num_padding=21)
    np.testing.assert_array_equal(padded[:11], whole)
    assert np.isfinite(padded).all()

    compute_logits = jax.jit(
        lambda hidden, num_rows: decoder.compute_logits(params, hidden, num_rows, SMALL_LAYERS)
    )
    logits = compute_logits(whole, np.array([11], np.int32))
    for count in (1, 8):
        part = np.asarray(compute_logits(padded, np.array([count], np.int32)))
        np.testing.assert_array_equal(part[:count], logits[:count])
        assert np.isfinite(part).all()


@pytest.mark.parametrize("width", [8, 64, 576, 5000])
def test_row_sums_do_not_depend_on_the_number_of_rows(width: int) -> None:
    x = np.random.default_rng(0).standard_normal((128, width)).astype(np.float32)
    row_sum = jax.jit(layers.row_sum)
    whole = row_sum(x)
    np.testing.assert_allclose(whole, x.sum(axis=1, dtype=np.float64), atol=1e-3)
    for num_rows in (8, 16, 32, 64):
        np.testing.assert_array_equal(row_sum(x[:num_rows]), whole[:num_rows])


def test_row_sums_of_exponentials() -> None:
    x = np.random.default_rng(0).standard_normal((8, 1000)).astype(np.float32)
    total = jax.jit(lambda x: layers.row_sum(jnp.exp(x - jnp.max(x, axis=1, keepdims=True))))(x)
    shifted = x.astype(np.float64) - x.max(axis=1, keepdims=True)
    np.testing.assert_allclose(total, np.exp(shifted).sum(axis=1), rtol=1e-5)


def test_rotation_is_accurate_at_large_positions() -> None:
    config = RopeConfig(theta=500_000.0)
    positions = np.array([0, 1, 257, 4097, 65_537, 131_071], np.int32)
    cos, sin = jax.jit(lambda p: rope.rope_angles(p, config, 64))(positions)
    # The product of f32 position and f32 frequency is what the reference computes as well.
    frequencies = rope.rope_frequencies(config, 64)
    angles = (positions.astype(np.float32)[:, None] * frequencies[None, :]).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(angles), atol=2e-6)


def test_prepared_weights_reach_every_matmul_and_a_tied_head_keeps_its_embedding() -> None:
    params = random_params(SMALL_LAYERS, "float32")
    packed: list[tuple[int, ...]] = []

    def pack(weight: jax.Array) -> jax.Array:
        packed.append(weight.shape)
        return weight + 1.0

    prepared = prepare_params(params, SMALL_LAYERS, Packing(linear=pack))
    assert len(packed) == 4 * SMALL_LAYERS.num_layers + 1
    assert prepared.embedding is params.embedding
    np.testing.assert_array_equal(prepared.head, params.embedding + 1.0)
    np.testing.assert_array_equal(prepared.layers[1].mlp.down, params.layers[1].mlp.down + 1.0)


def test_stacked_layers_and_pages_give_the_bits_of_separate_ones() -> None:
    library.load()
    params = random_params(SMALL_LAYERS, "bfloat16")
    stacked = pack_params(params, SMALL_LAYERS)
    packing = Packing(linear=matmul.pack, gate_up=matmul.pack_gate_up)
    separate = prepare_params(params, SMALL_LAYERS, packing)
    assert isinstance(stacked.layers, LayerStack)
    assert len(jax.tree.leaves(stacked)) == 3 + 6

    inputs = prefill_inputs(list(range(11)), num_rows=16, page_size=16)
    dtype = jnp.dtype(jnp.bfloat16)

    def run(params: Any, *, is_stacked: bool) -> tuple[np.ndarray, np.ndarray]:
        pages = allocate_kv_pages(
            SMALL_LAYERS, num_pages=4, page_size=16, dtype=dtype, is_stacked=is_stacked
        )
        hidden, pages = jax.jit(
            lambda params, pages: decoder.forward(
                params, pages, inputs, SMALL_LAYERS, attention=attention.ragged_paged_attention
            )
        )(params, pages)
        return np.asarray(hidden), np.asarray(pages)

    expected, expected_pages = run(separate, is_stacked=False)
    assert expected_pages[:, 1].any(axis=(1, 2, 3)).all()
    for params in (separate, stacked):
        hidden, pages = run(params, is_stacked=True)
        np.testing.assert_array_equal(hidden, expected)
        np.testing.assert_array_equal(pages, expected_pages)


def test_layers_that_differ_do_not_stack() -> None:
    layer = {"norm": np.ones(3, np.float32)}
    for other in (
        {"norm": np.ones(1, np.float32)},
        {"norm": np.ones(3, np.int32)},
        {"bias": np.ones(3, np.float32)},
    ):
        with pytest.raises(ValueError, match="layer 1 does not stack onto the first"):
            stack_layers([layer, other], num_layers=2)


def random_params(config: ModelConfig, dtype: str) -> Any:
    family = get_family(config)
    abstract, tree = jax.tree.flatten(family.abstract_params(config, jnp.dtype(dtype)))
    rng = np.random.default_rng(0)
    return tree.unflatten(
        [
            jnp.asarray(
                rng.standard_normal(leaf.shape) * (0.05 if leaf.ndim == 2 else 0.1)
                + (0.0 if leaf.ndim == 2 else 1.0),
                leaf.dtype,
            )
            for leaf in abstract
        ]
    )


def run_prefill(
    params: Any, config: ModelConfig, dtype: str, token_ids: list[int], num_padding: int = 0
) -> np.ndarray:
    num_rows = len(token_ids) + num_padding
    kv_pages = allocate_kv_pages(config, num_pages=33, page_size=16, dtype=jnp.dtype(dtype))
    inputs = prefill_inputs(token_ids, num_rows=num_rows, page_size=16, pages_per_seq=32)
    forward = jax.jit(
        lambda params, kv_pages, inputs: decoder.forward(
            params, kv_pages, inputs, config, attention=reference.ragged_paged_attention
        )[0]
    )
    return np.asarray(forward(params, kv_pages, inputs))


def prefill_inputs(
    token_ids: list[int], *, num_rows: int, page_size: int, pages_per_seq: int = 7
) -> ModelInputs:
    """One sequence from position 0, on pages 1, 2, ..., in 8 sequence rows."""
    num_tokens = len(token_ids)
    num_used = -(-num_tokens // page_size)
    page_indices = np.zeros((8, pages_per_seq), np.int32)
    page_indices[0, :num_used] = 1 + np.arange(num_used)
    kv_lens = np.zeros(8, np.int32)
    kv_lens[0] = num_tokens
    return ModelInputs(
        token_ids=np.pad(np.asarray(token_ids, np.int32), (0, num_rows - num_tokens)),
        positions=np.arange(num_rows, dtype=np.int32),
        kv_lens=kv_lens,
        page_indices=page_indices,
        cu_q_lens=np.array([0] + [num_tokens] * 8, np.int32),
        num_seqs=np.array([1], np.int32),
    )
