"""The Qwen2 family (also Qwen2.5): Llama with biases on q, k and v and a window on some layers."""

from __future__ import annotations

from replicas.config import LayerType, ModelConfig
from replicas.models import hf_config
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.llama import param_specs
from replicas.models.rope_config import read_plain_rope

__all__ = ["param_specs", "parse_config", "read_window"]

_DEFAULTS = ReferenceDefaults(
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    bos_token_id=None,
    eos_token_id=None,
)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a Qwen2ForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(
        raw,
        architecture="Qwen2ForCausalLM",
        honoured={"hidden_act", "use_sliding_window", "qkv_bias"},
    )
    if not hf_config.boolean(raw, "qkv_bias", default=True):
        hf_config.refuse("qkv_bias", False, "q, k and v of this family have biases")
    window, layer_types = read_window(raw, num_layers=_DEFAULTS.num_hidden_layers)
    return hf_config.read_decoder(
        raw,
        family="qwen2",
        defaults=_DEFAULTS,
        rope=read_plain_rope(raw, _DEFAULTS),
        activation=hf_config.read_activation(raw),
        sliding_window=window,
        layer_types=layer_types,
        qkv_bias=True,
    )


def read_window(raw: RawConfig, *, num_layers: int) -> tuple[int | None, tuple[LayerType, ...]]:
    """Read the window and the layers that have it; `num_layers` is the family's default.

    Without `use_sliding_window` there is none, whatever `sliding_window` says. Unless `layer_types`
    names them, the layers from `max_window_layers` on have it.
    """
    num_layers = hf_config.integer(raw, "num_hidden_layers", num_layers)
    window = None
    if hf_config.boolean(raw, "use_sliding_window", default=False):
        window = hf_config.optional_integer(raw, "sliding_window", 4096)
    first = raw.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        hf_config.refuse("max_window_layers", first, "expected an integer >= 0")
    layer_types = hf_config.read_layer_types(
        raw,
        [
            "sliding_attention" if window is not None and layer >= first else "full_attention"
            for layer in range(num_layers)
        ],
    )
    hf_config.require_window(raw, window, layer_types)
    return window, layer_types
