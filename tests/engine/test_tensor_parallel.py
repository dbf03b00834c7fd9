"""Every family on a mesh of fake devices against its reference; shapes that do not divide."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import golden
from kernels import reference
from replicas.config import EngineConfig
from replicas.models import sharding
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import allocate_kv_pages
from replicas.models.registry import get_family, load_model_config
from replicas.models.weights import load_params
from tests.checkpoints import write_checkpoint
from tests.naive import NaiveLlama

PAGE_SIZE = 16


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("llama_hd64_kv3", 2),
        ("llama_hd64_kv3", 4),
        ("llama_hd64_kv3", 8),
        ("gemma3", 4),
        ("glm4", 8),
        ("phi3", 2),
        ("gpt_neox", 8),
    ],
)
def test_logits_are_those_of_the_reference(golden_dir: Path, name: str, num_devices: int) -> None:
    expected = np.load(golden_dir / name / "golden.npz")
    logits = sharded_logits(golden_dir / name, expected["prompt_1"].tolist(), num_devices)
    assert np.abs(logits - expected["logits_1"]).max() < 1e-4


def test_channels_and_vocabulary_that_do_not_divide_are_padded(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path,
        {"intermediate_size": 45, "vocab_size": 121, "mlp_bias": True, "attention_bias": True},
    )
    prompt = list(range(40))
    logits = sharded_logits(path, prompt, 8)
    assert logits.shape == (40, 121)
    assert np.abs(logits - NaiveLlama(path).logits(prompt)).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "num_devices"),
    [("llama_hd64_kv3", 4), ("qwen3_moe", 2), ("gpt_oss", 4)],
)
def test_the_engine_draws_the_reference_tokens(
    golden_dir: Path, name: str, num_devices: int
) -> None:
    path = golden_dir / name
    expected = np.load(path / "golden.npz")
    (tokens,) = golden.generate_greedy(
        path, [expected["prompt_1"].tolist()], [24], tensor_parallel=num_devices
    )
    assert tokens == expected["greedy_1"].tolist()


def sharded_logits(path: Path, prompt: list[int], num_devices: int) -> np.ndarray:
    """Logits of every position by a model spread over `num_devices`, in one prefill."""
    config = load_model_config(path)
    family = get_family(config)
    mesh = sharding.make_mesh(EngineConfig(model="", tensor_parallel=num_devices))
    specs = family.param_specs(config, num_shards=num_devices)
    params = load_params(
        path,
        config,
        dtype=jnp.float32,
        shardings=sharding.param_shardings(specs, mesh),
        num_shards=num_devices,
    )
    num_pages = -(-len(prompt) // PAGE_SIZE)
    kv_pages = allocate_kv_pages(
        config,
        num_pages=1 + num_pages,
        page_size=PAGE_SIZE,
        dtype=jnp.float32,
        num_shards=num_devices,
        sharding=sharding.kv_pages_sharding(mesh),
    )
    inputs = ModelInputs(
        token_ids=np.asarray(prompt, np.int32),
        positions=np.arange(len(prompt), dtype=np.int32),
        kv_lens=np.array([len(prompt)] + [0] * 7, np.int32),
        page_indices=np.array([range(1, 1 + num_pages)] + [[0] * num_pages] * 7, np.int32),
        cu_q_lens=np.array([0] + [len(prompt)] * 8, np.int32),
        num_seqs=np.array([1], np.int32),
    )
    forward = sharding.shard_forward(family.forward, mesh, specs)
    compute_logits = sharding.shard_logits(family.compute_logits, mesh, specs)

    def run(params: Any, kv_pages: Any, inputs: ModelInputs) -> jax.Array:
        hidden, _ = forward(
            params, kv_pages, inputs, config, attention=reference.ragged_paged_attention
        )
        return compute_logits(params, hidden, inputs.num_tokens, config)

    return np.asarray(jax.jit(run)(params, kv_pages, inputs))
