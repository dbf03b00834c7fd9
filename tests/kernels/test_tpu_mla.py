"""The Pallas kernel for latents against the reference, in TPU interpret mode, and compiled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from kernels import mla_reference
from kernels.tpu.mla import LatentTiling, ragged_paged_latent_attention
from replicas.config import EngineConfig, MLAConfig, ModelConfig
from replicas.engine import tpu_topology
from replicas.engine.startup import resolve_config
from tests.kernels.ragged_cases import TOLERANCE, Case, draw

NUM_DIMS, NUM_VALUE_DIMS = 192, 128
TILING = LatentTiling(block_keys=256, part_keys=128, sub_rows=32, num_subs=2)
SHAPE = {"num_heads": 8, "num_kv_heads": 1, "head_dim": NUM_DIMS, "page_size": 32}
MIXED = {"q_lens": (1, 1, 40, 7, 1, 2), "kv_lens": (5, 100, 60, 7, 257, 130)}
OPTIONS = {"sm_scale": 0.1, "num_value_dims": NUM_VALUE_DIMS}


def run(case: Case, *, detect_races: bool = False) -> tuple[np.ndarray, np.ndarray, tuple]:
    """Output, pages and the reference's inputs; keys are latents, values are dropped."""
    q, k, _, pages, *indices = draw(case)
    inputs = (q, k[:, 0], pages[:, :1], *indices)
    padding = [(0, 0)] * 3 + [(0, -NUM_DIMS % 128)]
    attend = functools.partial(
        ragged_paged_latent_attention,
        tiling=TILING,
        interpret=pltpu.InterpretParams(detect_races=detect_races),
        **OPTIONS,
    )
    out, after = jax.jit(attend)(*inputs[:2], jnp.pad(inputs[2], padding), *indices)
    return np.asarray(out, np.float32), np.asarray(after, np.float32)[..., :NUM_DIMS], inputs


def test_equals_the_reference_and_reads_no_spare_memory():
    dtype = "bfloat16"
    case = Case(**MIXED, **SHAPE, dtype=dtype, kv_dtype=dtype)
    out, pages, inputs = run(case)
    reference = functools.partial(mla_reference.ragged_paged_latent_attention, **OPTIONS)
    expected, expected_pages = jax.jit(reference)(*inputs)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2 * TOLERANCE[dtype])
    np.testing.assert_array_equal(pages, np.asarray(expected_pages, np.float32))
    assert not out[sum(case.q_lens) :].any()


def test_no_copy_races_with_another_or_with_arithmetic():
    case = Case(q_lens=(1, 20, 1), kv_lens=(130, 150, 5), **SHAPE)
    out, _, inputs = run(case, detect_races=True)
    reference = functools.partial(mla_reference.ragged_paged_latent_attention, **OPTIONS)
    expected, _ = jax.jit(reference)(*inputs)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2 * TOLERANCE["float32"])


def test_row_bits_do_not_depend_on_batch_chunk_or_launch():
    shape = {**SHAPE, "dtype": "bfloat16", "kv_dtype": "bfloat16"}
    whole, _, _ = run(Case(q_lens=(150,), kv_lens=(150,), seed_of=(7,), **shape))
    for begin, end in [(149, 150), (100, 131)]:  # a decode step's launch, then a chunk's
        case = Case(q_lens=(3, end - begin, 1), kv_lens=(50, end, 90), seed_of=(1, 7, 2), **shape)
        out, _, _ = run(case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


def test_compiles_for_256_sequences_of_128k_tokens_in_place():
    num_rows, num_seqs = 272, 256
    devices = tpu_topology.get_devices("v6e:2x2")[:1]
    with tpu_topology.lowering_for(devices):
        sharding = SingleDeviceSharding(devices[0])

        def array(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        bf16 = jnp.dtype(jnp.bfloat16)
        pages = array(4096, 1, 128, 640, dtype=bf16)
        attend = functools.partial(ragged_paged_latent_attention, sm_scale=0.1, num_value_dims=512)
        lowered = jax.jit(attend, donate_argnums=2).lower(
            array(num_rows, 16, 576, dtype=bf16),
            array(num_rows, 576, dtype=bf16),
            pages,
            array(num_seqs),
            array(num_seqs, 1024),
            array(num_seqs + 1),
            array(1),
        )
        memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pages.size * 2
    assert lowered.as_text().count("tpu_custom_call") == 3


def test_refuses_what_it_cannot_compute():
    q, k, _, pages, *indices = draw(Case(q_lens=(1,), kv_lens=(1,), **SHAPE))
    with pytest.raises(ValueError, match=r"pages must be \[N, 1, page, 256\]"):
        ragged_paged_latent_attention(q, k[:, 0], pages[:, :1], *indices, **OPTIONS)
    padded = jnp.zeros((4, 1, 8, 256))
    with pytest.raises(ValueError, match="needs a power of two in \\[16, 1024\\]"):
        ragged_paged_latent_attention(q, k[:, 0], padded, *indices, **OPTIONS)
    with pytest.raises(TypeError, match="q and pages must both be"):
        ragged_paged_latent_attention(q, k[:, 0], padded.astype(jnp.bfloat16), *indices, **OPTIONS)


def test_engine_takes_it_on_tpus():
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_layers"), 8)
    mla = MLAConfig(
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    model = ModelConfig(
        family="deepseek_v3",
        num_heads=16,
        num_kv_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        mla=mla,
        **sizes,
    )
    config = EngineConfig(model="")
    for platform, attention in (("tpu", "pallas"), ("cpu", "reference")):
        resolved = resolve_config(config, model, platform=platform, has_native=True)
        assert resolved.attention == attention
    eight_bits = EngineConfig(model="", kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="kv_cache_dtype 'int8' is not for latents"):
        resolve_config(eight_bits, model, platform="cpu", has_native=True)
