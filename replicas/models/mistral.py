"""The Mistral family: Llama's tensors, a window on every layer."""

from __future__ import annotations

from replicas.config import ModelConfig
from replicas.models import hf_config
from replicas.models.hf_config import RawConfig, ReferenceDefaults
from replicas.models.llama import param_specs
from replicas.models.rope_config import read_plain_rope

__all__ = ["param_specs", "parse_config"]

_DEFAULTS = ReferenceDefaults(
    intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=4096 * 32
)


def parse_config(raw: RawConfig) -> ModelConfig:
    """Parse the config of a MistralForCausalLM checkpoint.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    hf_config.require_supported(raw, architecture="MistralForCausalLM", honoured={"hidden_act"})
    window = hf_config.optional_integer(raw, "sliding_window", 4096)
    hf_config.require_uniform_layers(
        raw, "full_attention" if window is None else "sliding_attention"
    )
    return hf_config.read_decoder(
        raw,
        family="mistral",
        defaults=_DEFAULTS,
        rope=read_plain_rope(raw, _DEFAULTS),
        activation=hf_config.read_activation(raw),
        sliding_window=window,
    )
