"""The Pallas kernels against the oracle, in TPU interpret mode, and compiled for real TPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import SingleDeviceSharding

from bench.tpu_kernels import TOPOLOGIES
from kernels.tpu.attention import ragged_paged_attention
from kernels.tpu.tiling import Tiling
from replicas.config import EngineConfig, ModelConfig
from replicas.engine import tpu_topology
from replicas.engine.startup import resolve_config
from tests.kernels.ragged_cases import TOLERANCE, Case, draw, expected_pages, oracle, run

TILING = Tiling(block_keys=128, round_items=2, decode_q_len=1, sub_tokens=8, query_tokens=16)
WIDE = dataclasses.replace(TILING, decode_q_len=8)
BF16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 32, **BF16}
MIXED = {"q_lens": (1, 1, 40, 7, 1), "kv_lens": (5, 100, 60, 7, 257)}
CASES = {
    "mixed": (Case(**MIXED, **SHAPE), TILING),
    "window": (Case(**MIXED, **{**SHAPE, "window": 50}), TILING),
    "speculative": (Case(q_lens=(8, 3, 0, 1), kv_lens=(130, 70, 9, 1), **SHAPE), WIDE),
    "odd_heads_f32": (
        Case(q_lens=(1, 9), kv_lens=(140, 130), num_heads=9, num_kv_heads=3, head_dim=128),
        TILING,
    ),
}


def interpreted(tiling: Tiling, *, detect_races: bool = False):
    params = pltpu.InterpretParams(detect_races=detect_races)
    return functools.partial(ragged_paged_attention, tiling=tiling, interpret=params)


@pytest.mark.parametrize(("case", "tiling"), CASES.values(), ids=CASES.keys())
def test_equals_dense_attention_and_reads_no_spare_memory(case, tiling):
    inputs = draw(case)
    out, pages = run(interpreted(tiling), case, inputs)
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=TOLERANCE[case.dtype])
    np.testing.assert_array_equal(pages, expected_pages(case, inputs))
    assert not out[sum(case.q_lens) :].any()


def test_no_copy_races_with_another_or_with_arithmetic():
    case = Case(q_lens=(1, 20, 1), kv_lens=(130, 150, 5), **{**SHAPE, "page_size": 64})
    inputs = draw(case)
    out, _ = run(interpreted(TILING, detect_races=True), case, inputs)
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=TOLERANCE[case.dtype])


def test_row_bits_do_not_depend_on_batch_chunk_or_kernel():
    whole, _ = run(interpreted(TILING), Case(q_lens=(150,), kv_lens=(150,), seed_of=(7,), **SHAPE))
    for begin, end in [(149, 150), (100, 131)]:  # the decode kernel, then the prefill kernel
        case = Case(q_lens=(3, end - begin, 1), kv_lens=(50, end, 90), seed_of=(1, 7, 2), **SHAPE)
        out, _ = run(interpreted(TILING), case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


@pytest.mark.parametrize("topology", TOPOLOGIES.values())
def test_compiles_for_256_sequences_of_128k_tokens_in_place(topology):
    num_seqs, pages_per_seq, num_rows = 256, 1024, 272
    devices = tpu_topology.get_devices(topology)[:1]
    with tpu_topology.lowering_for(devices):
        sharding = SingleDeviceSharding(devices[0])

        def array(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        bf16 = jnp.dtype(jnp.bfloat16)
        kv_pages = array(4096, 4, 128, 128, dtype=bf16)
        lowered = jax.jit(
            functools.partial(ragged_paged_attention, sm_scale=0.1), donate_argnums=3
        ).lower(
            array(num_rows, 8, 128, dtype=bf16),
            array(num_rows, 2, 128, dtype=bf16),
            array(num_rows, 2, 128, dtype=bf16),
            kv_pages,
            array(num_seqs),
            array(num_seqs, pages_per_seq),
            array(num_seqs + 1),
            array(1),
        )
        memory = lowered.compile().memory_analysis()
    kv_bytes = kv_pages.size * 2
    assert memory.alias_size_in_bytes >= kv_bytes  # the pages are updated in place
    assert memory.temp_size_in_bytes < 8 << 20
    assert lowered.as_text().count("tpu_custom_call") == 3


def test_refuses_what_it_cannot_compute():
    case = Case(q_lens=(1,), kv_lens=(1,))
    with pytest.raises(ValueError, match="head_dim must be 128"):
        ragged_paged_attention(*draw(case), sm_scale=1.0)


def test_engine_takes_the_kernels_on_tpus_and_for_the_heads_that_they_take():
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"), 8
    )
    wide, narrow = (
        ModelConfig(
            family="llama", num_kv_heads=8, max_position_embeddings=64, head_dim=dim, **sizes
        )
        for dim in (128, 64)
    )
    resolve = functools.partial(resolve_config, has_native=False)
    config = EngineConfig(model="")
    assert resolve(config, wide, platform="tpu").attention == "pallas"
    assert resolve(config, narrow, platform="tpu").attention == "reference"
    assert resolve(config, wide, platform="cpu").attention == "reference"
    with pytest.raises(ValueError, match="head_dim of 128, got 'tpu' and 64"):
        resolve(dataclasses.replace(config, attention="pallas"), narrow, platform="tpu")
