"""Families with experts: goldens, options against the naive model, row bits, meshes, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from bench import golden, paged_forward
from bench.paged_forward import PagedForward
from kernels import mla_reference, reference
from replicas.config import EngineConfig, ModelConfig, Quantization
from replicas.engine.startup import resolve_config
from replicas.models import sharding
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import allocate_kv_pages
from replicas.models.moe_params import MoEParams
from replicas.models.param_spec import ParamSpec
from replicas.models.quantize import abstract_quantized_params, quantize_params
from replicas.models.registry import UnsupportedModelError, get_family, load_model_config
from replicas.models.weights import CheckpointError, abstract_params, load_params
from tests.engine.test_models import prefill_inputs
from tests.naive_moe import NaiveMoE

NAMES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "kimi_k2")
PROMPT = np.random.default_rng(3).integers(3, 200, 40).tolist()
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


def write_variant(path: Path, source: Path, overrides: dict[str, Any], *, seed: int = 1) -> Path:
    """A checkpoint of random tensors for a golden's config with some keys replaced."""
    raw = json.loads((source / "config.json").read_text()) | overrides
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    config = load_model_config(path)
    specs = jax.tree.leaves(
        get_family(config).param_specs(config), is_leaf=lambda node: isinstance(node, ParamSpec)
    )
    shapes = {source.name: source.shape for spec in specs for source in spec.sources}
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        scale = 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        tensors[name] = (mean + scale * rng.standard_normal(shape)).astype(np.float32)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_the_reference(golden_dir: Path, name: str) -> None:
    result = golden.compare(golden_dir / name)
    assert result.max_abs_logit_err <= 1e-4  # the bar is 2e-3
    assert result.greedy_match == result.total == 48
    assert result.passed


@pytest.mark.parametrize("name", NAMES)
def test_the_naive_model_is_a_valid_reference(golden_dir: Path, name: str) -> None:
    reference = np.load(golden_dir / name / "golden.npz")
    logits = NaiveMoE(golden_dir / name).logits(reference["prompt_0"])
    assert np.abs(logits - reference["logits_0"]).max() < 1e-4


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral, window, odd sizes": (
        "mixtral",
        {
            "sliding_window": 9,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "intermediate_size": 40,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "num_hidden_layers": 2,
        },
    ),
    "qwen3_moe, dense layers, no renormalisation": (
        "qwen3_moe",
        {
            "mlp_only_layers": [0],
            "decoder_sparse_step": 2,
            "num_hidden_layers": 4,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "deepseek_v3, queries without a latent": (
        "deepseek_v3",
        {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "v_head_dim": 24,
            "num_hidden_layers": 2,
        },
    ),
    "deepseek_v3, groups, yarn": (
        "deepseek_v3",
        {
            "n_routed_experts": 12,
            "num_local_experts": 12,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "rms_norm_eps": 1e-3,
            "num_hidden_layers": 2,
            "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0},
        },
    ),
    "gpt_oss, yarn, no attention bias, low limit": (
        "gpt_oss",
        {
            "attention_bias": False,
            "swiglu_limit": 0.8,
            "swiglu_alpha": 1.1,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


@pytest.mark.parametrize(("name", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())
def test_options_equal_the_naive_model(
    golden_dir: Path, tmp_path: Path, name: str, overrides: dict[str, Any]
) -> None:
    path = write_variant(tmp_path, golden_dir / name, overrides)
    expected = NaiveMoE(path).logits(PROMPT)
    logits = PagedForward(path, dtype="float32", page_size=8).logits(PROMPT)
    assert np.abs(logits - expected).max() < 1e-4 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "dtype", "quantization"),
    [
        ("qwen3_moe", "float32", "none"),
        ("qwen3_moe", "bfloat16", "none"),
        ("qwen3_moe", "bfloat16", "int8"),
        ("deepseek_v3", "float32", "none"),
        ("deepseek_v3", "float32", "int8"),
    ],
)
def test_chunks_of_a_prompt_give_the_bits_of_the_whole(
    golden_dir: Path, name: str, dtype: str, quantization: Quantization
) -> None:
    """The rows of a step share experts, and padding rows fill it: neither changes a bit."""
    path = golden_dir / name
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
    logits = [
        PagedForward(path, **options, chunk_size=chunk_size, page_size=page_size).logits(PROMPT)
        for chunk_size, page_size in ((64, 16), (8, 8))
    ]
    np.testing.assert_array_equal(logits[1], logits[0])


@pytest.mark.parametrize(
    ("name", "num_devices"), [("qwen3_moe", 2), ("gpt_oss", 8), ("deepseek_v3", 2), ("kimi_k2", 8)]
)
def test_a_mesh_computes_what_one_device_does(
    golden_dir: Path, name: str, num_devices: int
) -> None:
    """4, 8 and 16 experts, 4 heads and 2 KV heads on 2 and 8 devices: split, copied and padded."""
    expected = np.load(golden_dir / name / "golden.npz")
    prompt = expected["prompt_0"].tolist()
    config = load_model_config(golden_dir / name)
    family = get_family(config)
    mesh = sharding.make_mesh(EngineConfig(model="", tensor_parallel=num_devices))
    specs = family.param_specs(config, num_shards=num_devices)
    params = load_params(
        golden_dir / name,
        config,
        dtype=jnp.float32,
        shardings=sharding.param_shardings(specs, mesh),
        num_shards=num_devices,
    )
    kv_pages = allocate_kv_pages(
        config,
        num_pages=8 * sharding.num_page_groups(config, num_devices),
        page_size=16,
        dtype=jnp.float32,
        num_shards=num_devices,
        sharding=sharding.kv_pages_sharding(mesh, config),
    )
    forward = sharding.shard_forward(family.forward, mesh, specs)
    compute_logits = sharding.shard_logits(family.compute_logits, mesh, specs)
    attention = reference_attention(config)

    def run(params: Any, kv_pages: Any, inputs: ModelInputs) -> jax.Array:
        hidden, _ = forward(params, kv_pages, inputs, config, attention=attention)
        return compute_logits(params, hidden, inputs.num_tokens, config)

    num_rows = -(-len(prompt) // 8) * 8
    lowered = jax.jit(run).lower(
        params, kv_pages, prefill_inputs(prompt, num_rows=num_rows, page_size=16)
    )
    # Attention and experts of each layer, and the embedding.
    assert lowered.as_text().count("stablehlo.all_reduce") == 2 * config.num_layers + 1
    # Queries and outputs of attention by sequence; the logits are gathered in any case.
    num_by_sequence = config.num_layers if config.mla is not None else 0
    assert lowered.as_text().count("stablehlo.all_gather") == num_by_sequence + 1
    assert lowered.as_text().count("stablehlo.reduce_scatter") == num_by_sequence
    logits = lowered.compile()(
        params, kv_pages, prefill_inputs(prompt, num_rows=num_rows, page_size=16)
    )
    assert np.abs(np.asarray(logits)[: len(prompt)] - expected["logits_0"]).max() < 1e-4


def reference_attention(config: ModelConfig) -> Any:
    """The kernel that computes a config's attention anywhere."""
    if config.mla is not None:
        return mla_reference.ragged_paged_latent_attention
    return reference.ragged_paged_attention


def test_mxfp4_experts_are_decoded_at_load(golden_dir: Path, tmp_path: Path) -> None:
    plain = write_variant(
        tmp_path / "plain",
        golden_dir / "gpt_oss",
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    )
    packed = tmp_path / "packed"
    packed.mkdir()
    raw = json.loads((plain / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(raw))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    tensors = load_file(plain / "model.safetensors")
    rng = np.random.default_rng(0)
    packed_tensors = dict(tensors)
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        num_experts, num_columns, num_rows = packed_tensors.pop(key).shape
        codes = rng.integers(0, 16, (num_experts, num_rows, num_columns // 32, 16, 2))
        scales = rng.integers(120, 126, (num_experts, num_rows, num_columns // 32))
        blocks = codes[..., 0] + 16 * codes[..., 1]
        packed_tensors[f"{key}_blocks"] = blocks.astype(np.uint8)
        packed_tensors[f"{key}_scales"] = scales.astype(np.uint8)
        weight = values[codes].reshape(*scales.shape, 32) * 2.0 ** (scales[..., None] - 127)
        weight = weight.reshape(num_experts, num_rows, num_columns).astype(np.float32)
        tensors[key] = np.ascontiguousarray(weight.swapaxes(1, 2))
    save_file(tensors, plain / "model.safetensors")
    save_file(packed_tensors, packed / "model.safetensors")
    expected = PagedForward(plain, dtype="float32").logits(PROMPT)
    np.testing.assert_array_equal(PagedForward(packed, dtype="float32").logits(PROMPT), expected)
    assert np.abs(expected - NaiveMoE(plain).logits(PROMPT)).max() < 1e-3

    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: .*gate_up_proj_blocks"):
        PagedForward(packed, dtype="float32")


def test_tensors_of_further_prediction_layers_are_skipped(golden_dir: Path, tmp_path: Path) -> None:
    path = write_variant(tmp_path, golden_dir / "deepseek_v3", {"num_hidden_layers": 2})
    config = load_model_config(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = np.ones((4, 4), np.float32)
    save_file(tensors, path / "model.safetensors")
    load_params(path, config, dtype=jnp.float32)
    tensors["model.layers.3.eh_proj.weight"] = np.ones((4, 4), np.float32)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"extra: model\.layers\.3\.eh_proj"):
        load_params(path, config, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mixtral", "num_experts_per_tok", 5),
        ("mixtral", "num_experts", 5),
        ("mixtral", "quantization_config", {"quant_method": "awq"}),
        ("qwen3_moe", "mlp_only_layers", [7]),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("gpt_oss", "quantization_config", {"quant_method": "fp8"}),
        ("gpt_oss", "layer_types", ["full_attention"]),
        ("gpt_oss", "sliding_window", None),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "head_dim", 16),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "num_mtp_layers", 2),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "topk_group", 3),
        ("kimi_k2", "n_group", 16),
    ],
)
def test_what_is_not_built_is_refused_by_key_and_value(
    golden_dir: Path, tmp_path: Path, name: str, key: str, value: object
) -> None:
    raw = json.loads((golden_dir / name / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_config(tmp_path)
    assert f"{key} = {value!r}" in str(caught.value)


def test_gpt_oss_without_rope_keys_has_the_yarn_of_its_class(
    golden_dir: Path, tmp_path: Path
) -> None:
    raw = json.loads((golden_dir / "gpt_oss" / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw | {"rope_theta": 5000.0}))
    rope = load_model_config(tmp_path).rope
    assert (rope.kind, rope.theta, rope.factor) == ("yarn", 5000.0, 32.0)
    assert (rope.truncates, rope.original_max_position_embeddings) == (False, 4096)


def write_all_picked(path: Path, golden_dir: Path, name: str) -> Path:
    """A variant whose router picks every expert, so that rounding cannot change its choice."""
    raw = json.loads((golden_dir / name / "config.json").read_text())
    key = "n_routed_experts" if "n_routed_experts" in raw else "num_local_experts"
    overrides = {"num_experts_per_tok": raw[key]}
    if "n_group" in raw:
        overrides |= {"n_group": 1, "topk_group": 1}
    return write_variant(path, golden_dir / name, overrides)


@pytest.mark.parametrize("has_native", [True, False], ids=["native", "jnp"])
@pytest.mark.parametrize("name", NAMES)
def test_int8_logits_stay_close_to_the_naive_model(
    golden_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    has_native: bool,
) -> None:
    monkeypatch.setattr(paged_forward, "_has_native", lambda: has_native)
    path = write_all_picked(tmp_path, golden_dir, name)
    expected = NaiveMoE(path).logits(PROMPT)
    logits = PagedForward(path, dtype="float32", quantization="int8", page_size=8).logits(PROMPT)
    error = np.linalg.norm(logits - expected) / np.linalg.norm(expected)
    assert 1e-4 < error < 0.06


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "jnp"])
@pytest.mark.parametrize("name", NAMES)
def test_experts_in_int8_take_half_the_memory_and_routers_stay_exact(
    golden_dir: Path, name: str, is_native: bool
) -> None:
    config = load_model_config(golden_dir / name)
    params = load_params(golden_dir / name, config, dtype=jnp.bfloat16)
    quantized = quantize_params(params, config, is_native=is_native)
    layers = zip(params.layers[1:], tuple(quantized.layers)[1:], strict=True)
    pairs = [
        (before.mlp, after.mlp) for before, after in layers if isinstance(before.mlp, MoEParams)
    ]
    for before, after in pairs:
        jax.tree.map(np.testing.assert_array_equal, after.router, before.router)
        for name in ("gate_up", "down"):
            plain = getattr(before.experts, name)
            num_experts, num_outputs, _ = plain.shape
            num_scales = num_experts * num_outputs
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(getattr(after.experts, name)))
            assert size == plain.nbytes // 2 + 4 * num_scales
    assert pairs
    abstract = abstract_quantized_params(
        abstract_params(config, dtype=jnp.bfloat16), config, is_native=is_native
    )
    assert jax.tree.structure(abstract) == jax.tree.structure(quantized)
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
        abstract,
        quantized,
    )


def test_attention_over_latents_has_one_kernel(golden_dir: Path) -> None:
    config = EngineConfig(model="", num_pages=8)
    latent = load_model_config(golden_dir / "deepseek_v3")
    for platform in ("cpu", "tpu"):
        resolved = resolve_config(config, latent, platform=platform, has_native=True)
        assert resolved.attention == "reference"
    native = dataclasses.replace(config, attention="native")
    with pytest.raises(ValueError, match="no kernel for latents"):
        resolve_config(native, latent, platform="cpu", has_native=True)
    sinks = load_model_config(golden_dir / "gpt_oss")
    assert resolve_config(config, sinks, platform="cpu", has_native=True).attention == "native"
    assert resolve_config(config, sinks, platform="tpu", has_native=False).attention == "pallas"
