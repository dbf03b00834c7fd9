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
from kernels import reference
from kernels.quantized_pages import QuantizedPages, quantize_rows
from kernels.tpu.attention import ragged_paged_attention
from kernels.tpu.block import LANES
from kernels.tpu.tiling import Tiling, padded_head_dim
from replicas.config import EngineConfig, ModelConfig
from replicas.engine import tpu_topology
from replicas.engine.startup import resolve_config
from tests.kernels.ragged_cases import (
    TOLERANCE,
    Case,
    draw,
    expected_pages,
    oracle,
    oracle_of_pages,
    run,
)

TILING = Tiling(block_keys=128, round_items=2, decode_q_len=1, sub_tokens=8, query_tokens=16)
WIDE = dataclasses.replace(TILING, decode_q_len=8)
BF16 = {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
SHAPE = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 32, **BF16}
MIXED = {"q_lens": (1, 1, 40, 7, 1), "kv_lens": (5, 100, 60, 7, 257)}
HALF = {**SHAPE, "head_dim": 64, "page_size": 32}
CASES = {
    "mixed": (Case(**MIXED, **SHAPE), TILING),
    "window": (Case(**MIXED, **{**SHAPE, "window": 50}), TILING),
    "two_slots": (
        Case(q_lens=(1, 1, 2), kv_lens=(257, 40, 300), **SHAPE),
        dataclasses.replace(WIDE, decode_slots=2),
    ),
    "speculative": (Case(q_lens=(8, 3, 0, 1), kv_lens=(130, 70, 9, 1), **SHAPE), WIDE),
    "odd_heads_f32": (
        Case(q_lens=(1, 9), kv_lens=(140, 130), num_heads=9, num_kv_heads=3, head_dim=128),
        TILING,
    ),
    "half": (Case(**MIXED, **HALF), TILING),
    "half_window_odd": (
        Case(
            q_lens=(1, 3, 20),
            kv_lens=(38, 130, 71),
            **{**HALF, "window": 33, "num_heads": 9, "num_kv_heads": 3},
        ),
        WIDE,
    ),
    "cap_and_sinks": (Case(**MIXED, **SHAPE, soft_cap=2.0, has_sinks=True), TILING),
    "double": (Case(**MIXED, **{**SHAPE, "head_dim": 256, "window": 50}, has_sinks=True), TILING),
    "padded": (Case(**MIXED, **{**SHAPE, "head_dim": 96}), TILING),
    "padded_half": (Case(**MIXED, **{**HALF, "head_dim": 40}), TILING),
}


def interpreted(tiling: Tiling, case: Case | None = None, *, detect_races: bool = False, **options):
    """The kernels, on pages in the layout of the reference."""
    params = pltpu.InterpretParams(detect_races=detect_races)
    if case is not None and case.soft_cap is not None:
        options["soft_cap"] = case.soft_cap

    def attend(q, k, v, kv_pages, *indices, **named):
        head_dim = kv_pages.shape[-1]
        width = padded_head_dim(head_dim)
        wide = jnp.pad(kv_pages, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))
        rows = wide.reshape(*kv_pages.shape[:2], -1, max(width, LANES))
        out, rows = ragged_paged_attention(
            q, k, v, rows, *indices, tiling=tiling, interpret=params, **options, **named
        )
        return out, rows.reshape(wide.shape)[..., :head_dim]

    return attend


@pytest.mark.parametrize(("case", "tiling"), CASES.values(), ids=CASES.keys())
def test_equals_dense_attention_and_reads_no_spare_memory(case, tiling):
    inputs = draw(case)
    out, pages = run(interpreted(tiling, case), case, inputs)
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=TOLERANCE[case.dtype])
    np.testing.assert_array_equal(pages, expected_pages(case, inputs))
    assert not out[sum(case.q_lens) :].any()


def test_rounds_that_run_ahead_read_no_page_ids_beyond_the_table():
    # One window of 128 ids, 64 pages a round: interpret mode raises where a copy starts outside.
    case = Case(q_lens=(1,), kv_lens=(40,), **{**SHAPE, "page_size": 16})
    tiling = dataclasses.replace(TILING, block_keys=512)
    inputs = draw(case)
    out, _ = run(interpreted(tiling), case, inputs)
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("decode_slots", [2, 3])
def test_no_copy_races_with_another_or_with_arithmetic(decode_slots):
    tiling = dataclasses.replace(TILING, decode_slots=decode_slots)
    # Nine blocks of decodes, two a round: every slot is filled again.
    case = Case(q_lens=(1, 20, 1, 1), kv_lens=(390, 150, 5, 385), **{**SHAPE, "page_size": 64})
    inputs = draw(case)
    out, _ = run(interpreted(tiling, detect_races=True), case, inputs)
    np.testing.assert_allclose(out, oracle(case, inputs), rtol=0, atol=TOLERANCE[case.dtype])


def test_row_bits_do_not_depend_on_batch_chunk_or_kernel():
    whole, _ = run(interpreted(TILING), Case(q_lens=(150,), kv_lens=(150,), seed_of=(7,), **SHAPE))
    for begin, end in [(149, 150), (100, 131)]:  # the decode kernel, then the prefill kernel
        case = Case(q_lens=(3, end - begin, 1), kv_lens=(50, end, 90), seed_of=(1, 7, 2), **SHAPE)
        out, _ = run(interpreted(TILING), case)
        np.testing.assert_array_equal(out[3 : 3 + end - begin], whole[begin:end])


@pytest.mark.parametrize(
    ("topology", "head_dim"),
    [*((topology, 128) for topology in TOPOLOGIES.values()), (TOPOLOGIES["v6e"], 256)],
)
def test_compiles_for_256_sequences_of_128k_tokens_in_place(topology, head_dim):
    num_seqs, pages_per_seq, num_rows = 256, 1024, 272
    devices = tpu_topology.get_devices(topology)[:1]
    with tpu_topology.lowering_for(devices):
        sharding = SingleDeviceSharding(devices[0])

        def array(*shape: int, dtype: jnp.dtype = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        bf16 = jnp.dtype(jnp.bfloat16)
        kv_pages = array(4096, 4, 128, head_dim, dtype=bf16)
        lowered = jax.jit(
            functools.partial(ragged_paged_attention, sm_scale=0.1), donate_argnums=3
        ).lower(
            array(num_rows, 8, head_dim, dtype=bf16),
            array(num_rows, 2, head_dim, dtype=bf16),
            array(num_rows, 2, head_dim, dtype=bf16),
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
    case = Case(q_lens=(1,), kv_lens=(1,), head_dim=384)
    with pytest.raises(ValueError, match="head_dim must be at most 256"):
        ragged_paged_attention(*draw(case), sm_scale=1.0)
    inputs = draw(Case(q_lens=(1,), kv_lens=(1,), head_dim=128))
    eight_bits = inputs._replace(kv_pages=inputs.kv_pages.astype(jnp.int8))
    with pytest.raises(TypeError, match="quantised if they have 8 bits, got int8"):
        ragged_paged_attention(*eight_bits, sm_scale=1.0)


@pytest.mark.parametrize(
    ("kv_dtype", "window", "head_dim"),
    [("int8", 90, 128), ("int8", None, 256), ("float8_e5m2", None, 128)],
)
def test_pages_of_8_bits_are_written_and_read_at_their_precision(kv_dtype, window, head_dim):
    shape = {**SHAPE, "page_size": 128, "window": window, "head_dim": head_dim}
    case = Case(q_lens=(1, 20, 3), kv_lens=(140, 60, 129), **shape)
    inputs = draw(case)
    values, scales = quantize_rows(jnp.nan_to_num(inputs.kv_pages), kv_dtype)
    is_spare = jnp.isnan(inputs.kv_pages[..., 0])
    if kv_dtype != "int8":
        values = jnp.where(is_spare[..., None], jnp.asarray(jnp.nan, kv_dtype), values)
    pages = QuantizedPages(values=values, scales=jnp.where(is_spare, jnp.nan, scales))
    inputs = inputs._replace(kv_pages=pages)
    params = pltpu.InterpretParams()
    attend = functools.partial(ragged_paged_attention, tiling=WIDE, interpret=params)
    out, after = jax.jit(functools.partial(attend, **case.kwargs))(*inputs)
    as_written = functools.partial(reference.ragged_paged_attention, **case.kwargs)
    if kv_dtype == "int8":  # which the reference writes as well, to the bit
        _, expected = jax.jit(as_written)(*inputs)
        np.testing.assert_array_equal(after.values, expected.values)
        np.testing.assert_array_equal(after.scales, expected.scales)
    stood_for = after.values.astype(jnp.float32) * after.scales[..., None]
    dense = oracle_of_pages(case, inputs._replace(kv_pages=stood_for))
    np.testing.assert_allclose(np.asarray(out, np.float32), dense, rtol=0, atol=2.5e-2)


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
    odd, huge = (dataclasses.replace(wide, head_dim=dim) for dim in (80, 512))
    config = EngineConfig(model="")
    assert resolve(config, wide, platform="tpu").attention == "pallas"
    assert resolve(config, narrow, platform="tpu").attention == "pallas"
    assert resolve(config, odd, platform="tpu").attention == "pallas"
    assert resolve(config, huge, platform="tpu").attention == "reference"
    assert resolve(config, wide, platform="cpu").attention == "reference"
    with pytest.raises(ValueError, match=r"head_dim of up to 256 .*; got 'tpu', 512"):
        resolve(dataclasses.replace(config, attention="pallas"), huge, platform="tpu")
