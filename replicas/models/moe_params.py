"""The weights of a mixture of experts: their tree, and how they come from a checkpoint.

Experts lie along the first axis of one array for each projection, so that a grouped matmul takes
them all; that axis is the one that is sharded. Invariant: experts that only pad it are zeros, and
no router knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from replicas.config import ModelConfig
from replicas.models import decoder_params
from replicas.models.decoder_params import DecoderParams, GatedMlpParams, Packing
from replicas.models.derived_spec import StackSpec
from replicas.models.param_spec import ParamSpec, Source
from replicas.models.sharding import round_up


class RouterParams(NamedTuple):
    """Weights of a router, f32: it decides, and costs little.

    Attributes:
        weight: [E, M].
        bias: [E], added to the logits; None for none.
        correction: [E], added to the scores for the choice only; None for none.
    """

    weight: Any
    bias: Any = None
    correction: Any = None


class ExpertParams(NamedTuple):
    """Weights of the routed experts, or of a shard's, [out, in] each; None for absent biases.

    Attributes:
        gate_up: [E, 2F, M], rows of gate, then up.
        down: [E, M, F].
        gate_up_bias: [E, 2F] f32.
        down_bias: [E, M] f32.
    """

    gate_up: Any
    down: Any
    gate_up_bias: Any = None
    down_bias: Any = None

    def packed(self, config: ModelConfig, packing: Packing) -> ExpertParams:
        """See `PackableParams`."""
        del config
        if packing.experts is None:
            return self
        gate_up, down = packing.experts(self.gate_up), packing.experts(self.down)
        return self._replace(gate_up=gate_up, down=down)


class MoEParams(NamedTuple):
    """Weights of one mixture.

    Attributes:
        router: picks the experts.
        experts: those that it picks from.
        shared: an MLP that every token goes through as well; None for none.
    """

    router: RouterParams
    experts: ExpertParams
    shared: GatedMlpParams | None = None


def expert_padding(config: ModelConfig, num_shards: int) -> int:
    """Return the experts of zeros that make their number a multiple of the shards."""
    assert config.moe is not None
    return round_up(config.moe.num_experts, num_shards) - config.moe.num_experts


def router_specs(
    config: ModelConfig,
    prefix: str,
    *,
    bias: str | None = None,
    correction: str | None = None,
) -> RouterParams:
    """Describe the router at `prefix`; `bias` and `correction` are names below it."""
    assert config.moe is not None
    num_experts = config.moe.num_experts

    def vector(name: str | None) -> ParamSpec | None:
        if name is None:
            return None
        source = Source(name=f"{prefix}.{name}", shape=(num_experts,))
        return ParamSpec(sources=(source,), axes=("router",), is_float32=True)

    weight = Source(name=f"{prefix}.weight", shape=(num_experts, config.hidden_size))
    return RouterParams(
        weight=ParamSpec(sources=(weight,), axes=("router", "model"), is_float32=True),
        bias=vector(bias),
        correction=vector(correction),
    )


def expert_specs(
    config: ModelConfig,
    prefix: str,
    *,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    num_shards: int,
) -> ExpertParams:
    """Describe experts that are tensors of their own, `prefix`.N.`gate`.weight and so on."""
    assert config.moe is not None
    num_experts, ffn_size = config.moe.num_experts, config.moe.intermediate_size
    hidden_size = config.hidden_size

    def stack(names: Sequence[str], shape: tuple[int, int]) -> StackSpec:
        members = tuple(
            ParamSpec(
                sources=tuple(
                    Source(name=f"{prefix}.{index}.{name}.weight", shape=shape) for name in names
                ),
                axes=("expert_ffn", "model"),
            )
            for index in range(num_experts)
        )
        return StackSpec(
            members=members,
            num_padding=expert_padding(config, num_shards),
            sources=tuple(source for member in members for source in member.sources),
            axes=("expert", "expert_ffn", "model"),
        )

    return ExpertParams(
        gate_up=stack((gate, up), (ffn_size, hidden_size)),
        down=stack((down,), (hidden_size, ffn_size)),
    )


def prepare_params(
    params: DecoderParams,
    config: ModelConfig,
    packing: Packing,
    *_: Any,
    first: Packing | None = None,
) -> DecoderParams:
    """As `decoder_params.prepare_params`, for layers that stay apart.

    They differ from each other in some families, and a slice of stacked experts would be a copy.
    """
    return decoder_params.prepare_params(params, config, packing, first=first)
