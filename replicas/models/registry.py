"""The model families that are built: one line each.

A family is its config parser and a description of its parameters, over which the functions of the
shared decoder run; where the family differs from it, functions of its own.
Invariant: what is not listed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from replicas.config import ModelConfig
from replicas.models import (
    decoder,
    decoder_params,
    deepseek_v3,
    gemma3,
    glm4,
    gpt_neox,
    gpt_oss,
    hf_config,
    llama,
    mistral,
    mixtral,
    moe,
    moe_params,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from replicas.models.hf_config import RawConfig, UnsupportedModelError
from replicas.models.sharding import ParamSpec

if TYPE_CHECKING:
    from jax.typing import DTypeLike

__all__ = ["ModelFamily", "UnsupportedModelError", "get_family", "load_model_config"]


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """What the engine and the weight loader need of a family.

    Attributes:
        parse_config: config.json as a mapping to ModelConfig; refuses what is not supported.
        param_specs: the parameter tree with a `ParamSpec` at every leaf.
        forward: (params, kv_pages, inputs, config, *, attention) -> (hidden, kv_pages).
        compute_logits: (params, hidden rows, rows in use, config) -> f32 logits.
        prepare_params: (params, config, packing, stack, *, first) -> params in the layout of a
            platform's kernels; see `decoder_params.prepare_params`.
    """

    parse_config: Callable[[RawConfig], ModelConfig]
    param_specs: Callable[..., Any]
    forward: Callable[..., Any] = decoder.forward
    compute_logits: Callable[..., Any] = decoder.compute_logits
    prepare_params: Callable[..., Any] = decoder_params.prepare_params

    def abstract_params(self, config: ModelConfig, dtype: DTypeLike, *, num_shards: int = 1) -> Any:
        """Return the parameter tree as ShapeDtypeStructs: nothing is allocated."""
        specs = self.param_specs(config, num_shards=num_shards)
        return jax.tree.map(lambda spec: spec.abstract(dtype), specs, is_leaf=_is_spec)


def _with_experts(
    parse_config: Callable[[RawConfig], ModelConfig],
    param_specs: Callable[..., Any],
    forward: Callable[..., Any] = moe.forward,
) -> ModelFamily:
    return ModelFamily(parse_config, param_specs, forward, prepare_params=moe_params.prepare_params)


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(llama.parse_config, llama.param_specs),
    "mistral": ModelFamily(mistral.parse_config, mistral.param_specs),
    "mixtral": _with_experts(mixtral.parse_config, mixtral.param_specs),
    "qwen3_moe": _with_experts(qwen3_moe.parse_config, qwen3_moe.param_specs),
    "gpt_oss": _with_experts(gpt_oss.parse_config, gpt_oss.param_specs),
    "deepseek_v3": _with_experts(
        deepseek_v3.parse_config, deepseek_v3.param_specs, deepseek_v3.forward
    ),
    "kimi_k2": _with_experts(
        deepseek_v3.parse_kimi_k2, deepseek_v3.param_specs, deepseek_v3.forward
    ),
    "qwen2": ModelFamily(qwen2.parse_config, qwen2.param_specs),
    "qwen3": ModelFamily(qwen3.parse_config, qwen3.param_specs),
    "gemma3_text": ModelFamily(gemma3.parse_config, gemma3.param_specs, gemma3.forward),
    "glm4": ModelFamily(glm4.parse_config, glm4.param_specs),
    "phi3": ModelFamily(phi3.parse_config, phi3.param_specs),
    "gpt_neox": ModelFamily(
        gpt_neox.parse_config, gpt_neox.param_specs, gpt_neox.forward, gpt_neox.compute_logits
    ),
}


def load_model_config(path: Path) -> ModelConfig:
    """Read config.json (and the end ids of generation_config.json) of a checkpoint directory.

    Raises:
        UnsupportedModelError: the family or an option is not built; names the key and its value.
    """
    raw = hf_config.read_config_json(path)
    family = raw.get("model_type")
    if family not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise UnsupportedModelError(
            f"config.json: model_type = {family!r} is not supported (supported: {supported})"
        )
    return FAMILIES[family].parse_config(raw)


def get_family(config: ModelConfig) -> ModelFamily:
    """Return the functions of the family that `config` belongs to."""
    return FAMILIES[config.family]


def _is_spec(node: object) -> bool:
    return isinstance(node, ParamSpec)
