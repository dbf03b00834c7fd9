"""config.json in, ModelConfig out: every key honoured, or refused by name and value."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma3TextConfig,
    Glm4Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

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
    ("family", "reference"),
    [
        ("llama", LlamaConfig()),
        ("mistral", MistralConfig()),
        ("qwen2", Qwen2Config()),
        ("qwen3", Qwen3Config()),
        ("gemma3_text", Gemma3TextConfig()),
        ("glm4", Glm4Config()),
        ("phi3", Phi3Config()),
        ("gpt_neox", GPTNeoXConfig()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absent_keys_have_the_reference_defaults(
    tmp_path: Path, family: str, reference: Any
) -> None:
    config = load_model_config(write(tmp_path, {"model_type": family}))
    num_heads, hidden_size = reference.num_attention_heads, reference.hidden_size
    assert config.vocab_size == reference.vocab_size
    assert config.hidden_size == hidden_size
    assert config.intermediate_size == reference.intermediate_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_heads == num_heads
    assert config.num_kv_heads == getattr(reference, "num_key_value_heads", num_heads)
    assert config.head_dim == getattr(reference, "head_dim", hidden_size // num_heads)
    assert config.max_position_embeddings == reference.max_position_embeddings
    norm_eps = [getattr(reference, key, None) for key in ("rms_norm_eps", "layer_norm_eps")]
    assert config.norm_eps in norm_eps
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    ropes = reference.rope_parameters
    assert config.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    partial = ropes.get("partial_rotary_factor", 1.0)
    assert (config.rope.rotary_dim or config.head_dim) == int(config.head_dim * partial)
    if config.sliding_rope is not None:
        assert config.sliding_rope.theta == ropes["sliding_attention"]["rope_theta"]
    assert config.sliding_window == getattr(reference, "sliding_window", None)
    layer_types = getattr(reference, "layer_types", [])
    assert list(config.layer_types) == layer_types
    assert config.qkv_bias == getattr(reference, "attention_bias", family == "qwen2")
    assert config.mlp_bias == getattr(reference, "mlp_bias", family == "gpt_neox")
    eos = reference.eos_token_id
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    assert list(config.eos_token_ids) == ids
    assert config.bos_token_id == reference.bos_token_id


@pytest.mark.parametrize(
    ("family", "keys", "windows"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, [None, None, 8, 8]),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 2}, [None] * 4),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [8, None, 8, None],
        ),
        ("gemma3_text", {"sliding_window_pattern": 2}, [8, None, 8, None]),
        ("gemma3_text", {}, [8] * 4),
        ("phi3", {}, [8] * 4),
        ("phi3", {"sliding_window": None}, [None] * 4),
        ("mistral", {}, [8] * 4),
    ],
)
def test_windows_of_the_layers(
    tmp_path: Path, family: str, keys: dict[str, Any], windows: list[int | None]
) -> None:
    raw = {"model_type": family, "num_hidden_layers": 4, "sliding_window": 8, **keys}
    config = load_model_config(write(tmp_path, raw))
    assert [config.window_of(layer) for layer in range(4)] == windows


def test_gemma3_reads_both_spellings_of_its_two_rotary_embeddings(tmp_path: Path) -> None:
    base = {"model_type": "gemma3_text", "num_hidden_layers": 6}
    older = {
        **base,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    newer = {
        **base,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    configs = [load_model_config(write(tmp_path, raw)) for raw in (older, newer)]
    assert configs[0] == configs[1]
    rope, local = configs[0].rope_of(5), configs[0].rope_of(0)
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 8.0, 5e5)
    assert (local.kind, local.theta) == ("default", 2e4)


@pytest.mark.parametrize(
    ("family", "keys", "named"),
    [
        ("qwen2", {"qkv_bias": False}, "qkv_bias = False"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window = None"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types = ['full_attention']"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "layer_types = "),
        ("qwen2", {"use_mrope": True}, "use_mrope = True"),
        ("qwen3", {"max_window_layers": -1}, "max_window_layers = -1"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters = "),
        ("gemma3_text", {"sliding_window": None}, "sliding_window = None"),
        ("gemma3_text", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        ("glm4", {"mlp_bias": True}, "mlp_bias = True"),
        ("phi3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        ("phi3", {"attention_bias": True}, "attention_bias = True"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias = True"),
        ("gpt_neox", {"rope_theta": 5e5}, "rope_theta = 500000.0"),
        ("gpt_neox", {"num_key_value_heads": 2}, "num_key_value_heads = 2"),
        ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    ],
)
def test_families_refuse_what_they_have_not(
    tmp_path: Path, family: str, keys: dict[str, Any], named: str
) -> None:
    write(tmp_path, {"model_type": family, "num_hidden_layers": 4, **keys})
    with pytest.raises(UnsupportedModelError) as refusal:
        load_model_config(tmp_path)
    assert named in str(refusal.value)


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
