"""config.json in, ModelConfig out: every key honoured, or refused by name and value."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig

from replicas.config import RopeConfig
from replicas.models.registry import UnsupportedModelError, load_model_config
from tests.checkpoints import TINY_LLAMA

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY_MISTRAL = {
    **TINY_LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 16,
}


def write(path: Path, raw: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(raw))
    return path


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_golden_configs_are_read_in_full(golden_dir: Path) -> None:
    config = load_model_config(golden_dir / "llama3_rope")
    assert (config.family, config.vocab_size, config.hidden_size) == ("llama", 256, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (3, 4, 2)
    assert (config.head_dim, config.intermediate_size) == (16, 128)
    assert config.max_position_embeddings == 512
    assert config.eos_token_ids == (2,)
    assert not config.tie_word_embeddings
    assert config.checkpoint_dtype == "bfloat16"
    assert config.rope == RopeConfig(
        kind="llama3",
        theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    assert load_model_config(golden_dir / "mistral_swa").sliding_window == 16
    assert load_model_config(golden_dir / "llama").tie_word_embeddings


@pytest.mark.parametrize(
    "scaling",
    [{}, {"rope_type": "linear", "factor": 4.0}, LLAMA3],
    ids=["none", "linear", "llama3"],
)
def test_both_rope_spellings_mean_the_same(tmp_path: Path, scaling: dict[str, Any]) -> None:
    base = without(TINY_LLAMA, "rope_theta")
    new = {**base, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default", **scaling}}
    old = {**base, "rope_theta": 5e5, "rope_scaling": scaling or None}
    oldest = {**old}
    if scaling:
        oldest["rope_scaling"] = {"type": scaling["rope_type"], **without(scaling, "rope_type")}
    configs = [load_model_config(write(tmp_path, raw)).rope for raw in (new, old, oldest)]
    assert configs[0] == configs[1] == configs[2]
    assert configs[0].theta == 5e5
    assert configs[0].factor == scaling.get("factor", 1.0)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "float16", "torch.float32"])
def test_both_dtype_spellings_are_read(tmp_path: Path, key: str, value: str) -> None:
    raw = {**without(TINY_LLAMA, "torch_dtype"), key: value}
    config = load_model_config(write(tmp_path, raw))
    assert config.checkpoint_dtype == value.removeprefix("torch.")


@pytest.mark.parametrize(
    ("family", "reference"), [("llama", LlamaConfig()), ("mistral", MistralConfig())]
)
def test_absent_keys_have_the_reference_defaults(
    tmp_path: Path, family: str, reference: Any
) -> None:
    config = load_model_config(write(tmp_path, {"model_type": family}))
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == reference.hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == reference.head_dim
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.norm_eps == reference.rms_norm_eps
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.sliding_window == getattr(reference, "sliding_window", None)
    assert config.qkv_bias == getattr(reference, "attention_bias", False)
    assert config.mlp_bias == getattr(reference, "mlp_bias", False)
    assert config.eos_token_ids == (reference.eos_token_id,)
    assert config.bos_token_id == reference.bos_token_id


def test_optional_sizes_are_derived(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, without(TINY_LLAMA, "num_key_value_heads")))
    assert config.num_kv_heads == config.num_heads == 4
    assert config.head_dim == 8
    explicit = load_model_config(write(tmp_path, {**TINY_LLAMA, "head_dim": 64}))
    assert explicit.head_dim == 64


def test_end_ids_of_the_generation_config_are_merged(tmp_path: Path) -> None:
    write(tmp_path, {**TINY_LLAMA, "eos_token_id": [2, 5]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 5, 7)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    assert load_model_config(tmp_path).eos_token_ids == (2, 5)
    write(tmp_path, {**TINY_LLAMA, "eos_token_id": None})
    assert load_model_config(tmp_path).eos_token_ids == ()


def test_inert_keys_are_accepted(tmp_path: Path) -> None:
    raw = {
        **TINY_LLAMA,
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "is_llama_config": True,
        "rope_interleaved": False,
        "rope_scaling": None,
        "quantization_config": None,
        "sliding_window": TINY_LLAMA["max_position_embeddings"],
        "layer_types": ["full_attention"] * 2,
    }
    assert load_model_config(write(tmp_path, raw)) == load_model_config(write(tmp_path, TINY_LLAMA))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba'"),
        ({"model_type": None}, "model_type = None"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "architectures = ['LlamaForSequenceClassification']",
        ),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"sliding_window": 128}, "sliding_window = 128"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type = 'proportional'"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_scaling.factor = None"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor = None"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor = -2.0"),
        ({"rope_scaling": {**LLAMA3, "beta_fast": 32}}, "rope_scaling.beta_fast = 32"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "low_freq_factor (1.0)"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 2.0}}, "'llama3'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_parameters.rope_theta = 5.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters = "),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor = 0.25",
        ),
        ({"rope_theta": 0}, "rope_theta = 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype = 'float8_e4m3fn'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"hidden_size": 34}, "hidden_size = 34"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"vocab_size": "big"}, "vocab_size = 'big'"),
        ({"num_hidden_layers": True}, "num_hidden_layers = True"),
        ({"attention_bias": 1}, "attention_bias = 1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps = -1.0"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ({"eos_token_id": [2, -1]}, "eos_token_id = [2, -1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_key_and_value(
    tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model_config(write(tmp_path, {**TINY_LLAMA, **overrides}))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures = ['LlamaForCausalLM']"),
        ({"layer_types": ["full_attention", "full_attention"]}, "layer_types = "),
        ({"sliding_window": 0}, "sliding_window = 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistral_refuses_what_it_has_not(
    tmp_path: Path, overrides: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model_config(write(tmp_path, {**TINY_MISTRAL, **overrides}))
    assert named in str(refusal.value)


def test_mistral_without_a_window_attends_to_everything(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, {**TINY_MISTRAL, "sliding_window": None}))
    assert config.sliding_window is None


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_an_unreadable_config_says_which_file(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model_config(tmp_path)
    assert "config.json" in str(refusal.value)
