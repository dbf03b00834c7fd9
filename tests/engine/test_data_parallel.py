"""Attention by sequence on a mesh of fake devices: what each device sees, and the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from bench import golden
from kernels.mla_reference import ragged_paged_latent_attention
from replicas.config import EngineConfig
from replicas.engine.memory_plan import choose_num_pages
from replicas.models import sharding
from replicas.models.data_parallel import find_own_sequences
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import bytes_per_page
from replicas.models.registry import load_model_config

NUM_PAGES = 4  # of a device


@pytest.mark.parametrize(
    ("name", "num_devices"), [("deepseek_v3", 2), ("kimi_k2", 4), ("deepseek_v3", 8)]
)
def test_the_engine_draws_the_reference_tokens(
    golden_dir: Path, name: str, num_devices: int
) -> None:
    """Texts of several devices in the same steps, prompts and single tokens mixed."""
    expected = np.load(golden_dir / name / "golden.npz")
    indices = range(sum(key.startswith("prompt_") for key in expected.files))
    assert len(indices) > 1
    outputs = golden.generate_greedy(
        golden_dir / name,
        [expected[f"prompt_{i}"].tolist() for i in indices],
        [24] * len(indices),
        tensor_parallel=num_devices,
    )
    for i, tokens in zip(indices, outputs, strict=True):
        assert tokens == expected[f"greedy_{i}"].tolist()


def test_each_device_finds_its_own_sequences() -> None:
    """Rows 0 and 1 are single tokens, 2 to 4 a chunk, 5 to 7 padding; device 1 has pages 4 to 7."""
    inputs = ModelInputs(
        token_ids=jnp.zeros(8, jnp.int32),
        positions=jnp.zeros(8, jnp.int32),
        kv_lens=jnp.array([9, 5, 7, 0], jnp.int32),
        page_indices=jnp.array([[5, 6], [1, 0], [7, 0], [0, 0]], jnp.int32),
        cu_q_lens=jnp.array([0, 1, 2, 5, 5], jnp.int32),
        num_seqs=jnp.array([3], jnp.int32),
    )
    mesh = sharding.make_mesh(EngineConfig(model="", tensor_parallel=2))

    def find(inputs: ModelInputs) -> tuple[jax.Array, ...]:
        own = find_own_sequences(inputs, num_pages=NUM_PAGES, axis_name=sharding.TENSOR_AXIS)
        return tuple(
            leaf[None]
            for leaf in (
                own.kv_lens,
                own.page_indices,
                own.cu_q_lens,
                own.num_seqs,
                own.order,
                own.is_own,
            )
        )

    found = jax.shard_map(
        find,
        mesh=mesh,
        in_specs=(PartitionSpec(),),
        out_specs=PartitionSpec(sharding.TENSOR_AXIS),
        check_vma=False,
    )(inputs)
    kv_lens, page_indices, cu_q_lens, num_seqs, order, is_own = map(np.asarray, found)
    assert num_seqs.tolist() == [[1], [2]]
    assert kv_lens.tolist() == [[5, 0, 0, 0], [9, 7, 0, 0]]
    assert page_indices[0].tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert page_indices[1].tolist() == [[1, 2], [3, 0], [0, 0], [0, 0]]
    assert cu_q_lens.tolist() == [[0, 1, 1, 1, 1], [0, 1, 4, 4, 4]]
    assert order[0, :1].tolist() == [1]
    assert order[1, :4].tolist() == [0, 2, 3, 4]
    assert sorted(order[1].tolist()) == list(range(8))
    assert is_own.sum(axis=1).tolist() == [1, 4]


@pytest.mark.parametrize("num_devices", [2, 8])
def test_attention_over_own_pages_gives_the_bits_of_one_device(num_devices: int) -> None:
    """A chunk, a prefix that goes on and a single token, each on some device; 8 heads."""
    rng = np.random.default_rng(1)
    first = NUM_PAGES * np.array([num_devices - 1, 0, num_devices // 2])  # null pages
    page_indices = np.zeros((4, 3), np.int32)
    page_indices[:3] = first[:, None] + np.array([[1, 2, 3], [3, 1, 0], [2, 0, 0]])
    page_indices[1, 2] = page_indices[2, 1:] = 0
    inputs = ModelInputs(
        token_ids=jnp.zeros(16, jnp.int32),
        positions=jnp.zeros(16, jnp.int32),
        kv_lens=jnp.array([19, 12, 3, 0], jnp.int32),
        page_indices=jnp.asarray(page_indices),
        cu_q_lens=jnp.array([0, 9, 12, 13, 13], jnp.int32),
        num_seqs=jnp.array([3], jnp.int32),
    )
    q = rng.standard_normal((16, 8, 12), np.float32)
    latents = rng.standard_normal((16, 12), np.float32)
    pages = rng.standard_normal((num_devices * NUM_PAGES, 1, 8, 12), np.float32)

    def attend(q: Any, latents: Any, pages: Any, step: Any) -> Any:
        return ragged_paged_latent_attention(
            q,
            latents,
            pages,
            step.kv_lens,
            step.page_indices,
            step.cu_q_lens,
            step.num_seqs,
            sm_scale=0.3,
            num_value_dims=8,
        )

    def attend_own(q: Any, latents: Any, pages: Any, inputs: ModelInputs) -> Any:
        own = find_own_sequences(inputs, num_pages=NUM_PAGES, axis_name=sharding.TENSOR_AXIS)
        updated: list[Any] = []

        def run(q: Any, latents: Any) -> Any:
            out, new_pages = attend(q, latents, pages, own)
            updated.append(new_pages)
            return out

        return own.attend(run, q, latents), updated[0]

    by_head = PartitionSpec(None, sharding.TENSOR_AXIS)
    by_page = PartitionSpec(sharding.TENSOR_AXIS)
    sharded = jax.shard_map(
        attend_own,
        mesh=sharding.make_mesh(EngineConfig(model="", tensor_parallel=num_devices)),
        in_specs=(by_head, PartitionSpec(), by_page, PartitionSpec()),
        out_specs=(by_head, by_page),
        check_vma=False,
    )
    arguments = (q, latents, pages, inputs)
    out, new_pages = jax.jit(sharded)(*arguments)
    expected_out, expected_pages = jax.jit(attend)(*arguments)
    np.testing.assert_array_equal(np.asarray(out)[:13], np.asarray(expected_out)[:13])
    assert np.any(np.asarray(expected_out)[:13], axis=(1, 2)).all()
    np.testing.assert_array_equal(new_pages, expected_pages)


def test_pages_are_counted_once_and_divide_over_the_devices(golden_dir: Path) -> None:
    model_config = load_model_config(golden_dir / "deepseek_v3")

    def num_pages(**fields: int) -> int:
        config = EngineConfig(
            model="", platform="cpu", dtype="float32", page_size=16, tensor_parallel=4, **fields
        )
        return choose_num_pages(config, model_config, weight_bytes=0, device_kind="cpu")

    size = bytes_per_page(model_config, page_size=16, dtype=jnp.float32, num_shards=4)
    assert size == bytes_per_page(model_config, page_size=16, dtype=jnp.float32)
    assert num_pages(num_pages=5) == 8
    assert num_pages(num_pages=13) == 16
    assert num_pages(kv_cache_bytes=21 * size) == 24
    assert num_pages(memory_bytes=10 * size) == 40
    with pytest.raises(ValueError, match="on each device"):
        num_pages(kv_cache_bytes=3 * size)
    with pytest.raises(ValueError, match="the weights take"):
        num_pages(memory_bytes=size)
