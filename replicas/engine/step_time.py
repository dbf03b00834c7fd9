"""How long a step takes on a TPU, from sizes: the model's bytes and FLOP, and kernels' bundles.

A prediction, for planning and for telling one program from another: launches and links are
assumptions, and the host's time is not in it. XLA's own estimate is not used, since it does not see
what a kernel reads. Knows no program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from replicas.config import EngineConfig, ModelConfig
from replicas.engine.memory_plan import device_bytes
from replicas.engine.tpu_chips import Chip
from replicas.models.moe_params import ExpertParams
from replicas.models.quantize import keeps_first_layer

LAUNCH_S = 3e-6
"""Of a kernel's launch and first copies, three to a layer, and of a collective: assumed."""
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """What a step reads and computes on one device of a replica.

    Attributes:
        num_devices: of the replica.
        num_layers: L.
        hidden_size: M.
        ffn_size: F on this device.
        num_heads: H that this device attends with: all, where attention is by sequence.
        layer_bytes: weights of all layers, without those of routed experts.
        layer_flops: of their matmuls, per token.
        expert_bytes: weights of the routed experts of all layers.
        expert_flops: of a token that went through all of them.
        expert_share: of the experts, that a token goes through.
        head_bytes: of the output head.
        head_flops: per row of logits.
        num_int8_layers: layers whose matmuls are of 8-bit integers; if any are, so is the head's.
        is_kv_int8: whether pages are.
        kv_token_bytes: KV of one token, all layers; of all tokens' on average, where each is on one
            device.
        exchanged_bytes: of a token in a layer, where attention is by sequence: queries that are
            gathered from all devices, and outputs that are scattered over them; else 0.
        windows: tokens that a layer attends over at most, of the layers that have a window.
    """

    num_devices: int
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    layer_bytes: int
    layer_flops: int
    expert_bytes: int
    expert_flops: int
    expert_share: float
    head_bytes: int
    head_flops: int
    num_int8_layers: int
    is_kv_int8: bool
    kv_token_bytes: int
    exchanged_bytes: int = 0
    windows: tuple[int, ...] = ()

    def attended(self, context: float) -> float:
        """Tokens of `context` that a layer reads, on average over the layers."""
        skipped = sum(max(0.0, context - window) for window in self.windows)
        return context - skipped / self.num_layers

    def read_bytes(self, num_tokens: int) -> float:
        """Weights of the layers that a step reads: experts that no token goes to it does not.

        Routing is taken to be even.
        """
        touched = 1 - (1 - self.expert_share) ** num_tokens
        return self.layer_bytes + touched * self.expert_bytes

    def token_flops(self) -> float:
        """Of the matmuls of all layers, per token."""
        return self.layer_flops + self.expert_share * self.expert_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences of a step that are alike.

    Attributes:
        num_seqs: how many.
        q_len: new tokens of each.
        context: tokens in the cache of each after the step.
    """

    num_seqs: int
    q_len: int
    context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        bound_s: weights and KV read once at full bandwidth, or all matmuls at peak if that is more.
        matmul_s: of all weights.
        attention_s: over the pages.
        activation_s: residual stream, norms and activations between operations.
        launch_s: of kernels.
        collective_s: two all-reduces per layer, and what attention by sequence exchanges.
    """

    bound_s: float
    matmul_s: float
    attention_s: float
    activation_s: float
    launch_s: float
    collective_s: float

    @property
    def step_s(self) -> float:
        """All of them, one after the other."""
        parts = (self.matmul_s, self.attention_s, self.activation_s)
        return sum(parts) + self.launch_s + self.collective_s


def measure_sizes(
    config: EngineConfig, model_config: ModelConfig, weights: Any, *, page_bytes: int
) -> StepSizes:
    """Take the sizes of a replica's step.

    Args:
        config: resolved.
        model_config: of the checkpoint.
        weights: the replica's, or their shapes; `embedding`, `layers` and `head` among them.
        page_bytes: over all layers and devices.
    """
    assert config.page_size is not None
    num_devices = config.tensor_parallel
    head = weights.embedding if weights.head is None else weights.head
    moe = model_config.moe
    experts = [
        node for node in jax.tree.leaves(weights.layers, is_leaf=_is_experts) if _is_experts(node)
    ]
    expert_elements = _matrix_elements(experts)
    ffn_size = model_config.intermediate_size if moe is None else moe.active_intermediate_size
    mla = model_config.mla
    exchanged_bytes = 0
    if mla is not None:
        numbers = model_config.num_heads * (mla.cache_dim + mla.kv_lora_rank)
        exchanged_bytes = numbers * jnp.dtype(config.dtype).itemsize
    return StepSizes(
        num_devices=num_devices,
        num_layers=model_config.num_layers,
        hidden_size=model_config.hidden_size,
        ffn_size=ffn_size // num_devices,
        num_heads=model_config.num_heads // (1 if mla is not None else num_devices),
        layer_bytes=device_bytes(weights.layers) - device_bytes(experts),
        layer_flops=2 * (_matrix_elements(weights.layers) - expert_elements) // num_devices,
        expert_bytes=device_bytes(experts),
        expert_flops=2 * expert_elements // num_devices,
        expert_share=1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts,
        head_bytes=device_bytes(head),
        head_flops=2 * _matrix_elements(head) // num_devices,
        num_int8_layers=_count_int8_layers(config, model_config),
        is_kv_int8=config.kv_cache_dtype == "int8",
        kv_token_bytes=page_bytes // config.page_size // num_devices,
        exchanged_bytes=exchanged_bytes,
        windows=tuple(
            window
            for window in map(model_config.window_of, range(model_config.num_layers))
            if window is not None
        ),
    )


def predict_step(
    sizes: StepSizes, chip: Chip, groups: tuple[Group, ...], *, num_logits: int
) -> StepTime:
    """Predict a step in which every device does its part of every layer.

    Args:
        sizes: of the replica.
        chip: its devices.
        groups: the sequences.
        num_logits: rows of the output head.
    """
    num_tokens = sum(group.num_seqs * group.q_len for group in groups)
    int8_ops = chip.int8_ops or chip.bf16_flops
    int8_share = sizes.num_int8_layers / sizes.num_layers
    bandwidth = chip.hbm_bytes_per_s
    layer_bytes = sizes.read_bytes(num_tokens)
    layer_compute_s = (
        sizes.token_flops()
        * num_tokens
        * (int8_share / int8_ops + (1 - int8_share) / chip.bf16_flops)
    )
    head_peak = int8_ops if sizes.num_int8_layers else chip.bf16_flops
    head_compute_s = sizes.head_flops * num_logits / head_peak
    matmul_s = max(layer_bytes / bandwidth, layer_compute_s)
    matmul_s += max(sizes.head_bytes / bandwidth, head_compute_s)
    attention_s = sum(_attention_s(sizes, chip, group) for group in groups)
    attended = sum(group.num_seqs * sizes.attended(group.context) for group in groups)
    kv_bytes = attended * sizes.kv_token_bytes
    read_s = (layer_bytes + sizes.head_bytes + kv_bytes) / bandwidth
    row_bytes = 4 * (8 * sizes.hidden_size + 3 * sizes.ffn_size)
    return StepTime(
        bound_s=max(read_s, layer_compute_s + head_compute_s),
        matmul_s=matmul_s,
        attention_s=attention_s,
        activation_s=sizes.num_layers * num_tokens * row_bytes / bandwidth,
        launch_s=3 * sizes.num_layers * LAUNCH_S,
        collective_s=_collective_s(sizes, chip, num_tokens),
    )


def _attention_s(sizes: StepSizes, chip: Chip, group: Group) -> float:
    if group.q_len <= 8:
        kv_bytes = group.num_seqs * sizes.attended(group.context) * sizes.kv_token_bytes
        per_mib = chip.decode_int8_bundles if sizes.is_kv_int8 else chip.decode_bundles
        bundles = kv_bytes / _MIB * per_mib
        return max(kv_bytes / chip.hbm_bytes_per_s, bundles / chip.clock_hz)
    # A query sees half of the chunk that it is part of.
    scores = group.num_seqs * group.q_len * sizes.attended(group.context - group.q_len / 2)
    units = scores / (32 * 512) * sizes.num_heads / 32 * sizes.num_layers
    return units * chip.prefill_bundles / chip.clock_hz


def _collective_s(sizes: StepSizes, chip: Chip, num_tokens: int) -> float:
    if sizes.num_devices == 1:
        return 0.0
    reduced = 4 * num_tokens * sizes.hidden_size
    others = (sizes.num_devices - 1) / sizes.num_devices
    layer_s = 2 * (reduced * 2 * others / chip.ici_bytes_per_s + LAUNCH_S)
    if sizes.exchanged_bytes:
        layer_s += num_tokens * sizes.exchanged_bytes * others / chip.ici_bytes_per_s
        layer_s += 2 * LAUNCH_S
    return sizes.num_layers * layer_s


def _count_int8_layers(config: EngineConfig, model_config: ModelConfig) -> int:
    if config.quantization != "int8":
        return 0
    return model_config.num_layers - keeps_first_layer(model_config)


def _is_experts(node: Any) -> bool:
    return isinstance(node, ExpertParams)


def _matrix_elements(weights: Any) -> int:
    """Elements of all matrices, over all devices."""
    leaves = jax.tree.leaves(weights)
    return sum(math.prod(leaf.shape) for leaf in leaves if len(leaf.shape) >= 2)
