"""The model families that are built: one line each.

A family is its config parser and three pure functions over one description of its parameters.
Invariant: what is not listed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from replicas.config import ModelConfig
from replicas.models import hf_config, llama
from replicas.models.hf_config import RawConfig, UnsupportedModelError
from replicas.models.sharding import ParamSpec

if TYPE_CHECKING:
    from jax.typing import DTypeLike

__all__ = ["ModelFamily", "UnsupportedModelError", "get_family", "load_model_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """What the engine and the weight loader need of a family.

    Attributes:
        parse_config: config.json as a mapping to ModelConfig; refuses what is not supported.
        param_specs: the parameter tree with a `ParamSpec` at every leaf.
        prepare_params: (params, pack, pack_gate_up) -> params in the layout of native kernels.
        forward: (params, kv_pages, inputs, config, *, attention) -> (hidden, kv_pages).
        compute_logits: (params, hidden rows, rows in use, config) -> f32 logits.
    """

    parse_config: Callable[[RawConfig], ModelConfig]
    param_specs: Callable[..., Any]
    prepare_params: Callable[..., Any]
    forward: Callable[..., Any]
    compute_logits: Callable[..., Any]

    def abstract_params(self, config: ModelConfig, dtype: DTypeLike, *, num_shards: int = 1) -> Any:
        """Return the parameter tree as ShapeDtypeStructs: nothing is allocated."""
        specs = self.param_specs(config, num_shards=num_shards)
        return jax.tree.map(lambda spec: spec.abstract(dtype), specs, is_leaf=_is_spec)


FAMILIES: dict[str, ModelFamily] = {
    "llama": ModelFamily(
        parse_config=hf_config.parse_llama,
        param_specs=llama.param_specs,
        prepare_params=llama.prepare_params,
        forward=llama.forward,
        compute_logits=llama.compute_logits,
    ),
    "mistral": ModelFamily(
        parse_config=hf_config.parse_mistral,
        param_specs=llama.param_specs,
        prepare_params=llama.prepare_params,
        forward=llama.forward,
        compute_logits=llama.compute_logits,
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
