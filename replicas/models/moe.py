"""A mixture of experts: each token through the few MLPs that a router picks for it, and their sum.

Pure functions written for one shard, which holds some of the experts whole and every router.
Invariant: a token's result depends on that token alone, in the order of its own experts: rows are
sorted by expert for the matmuls and put back before they are summed. Padding rows are routed
nowhere.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from replicas.config import MoEConfig
from replicas.models import decoder, layers
from replicas.models.decoder import StepContext
from replicas.models.decoder_params import GatedMlpParams
from replicas.models.moe_params import ExpertParams, MoEParams, RouterParams

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32


def run_mlp(
    weights: MoEParams | GatedMlpParams, normed: Float32[Array, "T M"], step: StepContext
) -> Float32[Array, "T M"]:
    """Run a mixture of experts or, where the layer is dense, a gated MLP."""
    if isinstance(weights, MoEParams):
        return mix_experts(weights, normed, step)
    return decoder.gated_mlp(weights, normed, step)


forward = functools.partial(
    decoder.forward, run_layer=functools.partial(decoder.pre_norm_layer, run_mlp=run_mlp)
)
"""Run one step; see `decoder.forward`."""


def mix_experts(
    weights: MoEParams, normed: Float32[Array, "T M"], step: StepContext
) -> Float32[Array, "T M"]:
    """Return the weighted sum of each token's experts, and of the shared experts if there are."""
    moe = step.config.moe
    assert moe is not None
    with jax.named_scope("router"):
        scores, experts = route(weights.router, normed, moe, step.inputs.num_tokens)
    with jax.named_scope("experts"):
        mixed = _run_experts(weights.experts, normed, scores, experts, step)
    if weights.shared is not None:
        with jax.named_scope("shared_experts"):
            # Partial as well, for want of an axis to sum over: one sum serves both.
            mixed += decoder.gated_mlp(weights.shared, normed, step._replace(axis_name=None))
    return layers.sum_over(mixed, step.axis_name)


def route(
    weights: RouterParams,
    normed: Float32[Array, "T M"],
    moe: MoEConfig,
    num_tokens: Int32[Array, " 1"],
) -> tuple[Float32[Array, "T k"], Int32[Array, "T k"]]:
    """Return each token's factors and experts, the best first.

    softmax: probabilities over all experts (Shazeer et al. 2017). sigmoid: a score for each expert
    by itself; the best by score plus correction, from the best groups of experts if there are
    groups, weighted by the score alone (DeepSeek-V3, arXiv:2412.19437, 2.1.2). All in f32.
    """
    logits = layers.add_bias(layers.linear(normed, weights.weight, num_tokens), weights.bias)
    if moe.scoring == "softmax":
        exponentials = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
        scores = exponentials / layers.row_sum(exponentials)[:, None]
        choice = scores
    else:
        scores = jax.nn.sigmoid(logits)
        choice = scores if weights.correction is None else scores + weights.correction[None, :]
    if moe.num_groups > 1:
        in_best = _in_best_groups(choice, moe)
        choice = jnp.where(in_best, choice, -jnp.inf)
    _, experts = lax.top_k(choice, moe.num_experts_per_tok)
    factors = jnp.take_along_axis(scores, experts, axis=1)
    if moe.normalizes:
        factors = factors / (_add_columns(factors)[:, None] + moe.normalizer_epsilon)
    return factors * moe.scaling_factor, experts


def _in_best_groups(choice: Float32[Array, "T E"], moe: MoEConfig) -> Bool[Array, "T E"]:
    """Whether each expert is in one of the groups whose two best experts sum highest."""
    num_rows, num_experts = choice.shape
    best, _ = lax.top_k(choice.reshape(num_rows, moe.num_groups, -1), 2)
    _, groups = lax.top_k(best[..., 0] + best[..., 1], moe.num_groups_per_tok)
    group_of = jnp.arange(num_experts) // (num_experts // moe.num_groups)
    return (groups[:, :, None] == group_of[None, None, :]).any(axis=1)


def _run_experts(
    weights: ExpertParams,
    normed: Float32[Array, "T M"],
    factors: Float32[Array, "T k"],
    experts: Int32[Array, "T k"],
    step: StepContext,
) -> Float32[Array, "T M"]:
    """Run this shard's experts on their tokens; the result is partial over the tensor axis."""
    moe = step.config.moe
    assert moe is not None
    num_rows, per_token = experts.shape
    num_local = _num_experts(weights)
    first = 0 if step.axis_name is None else lax.axis_index(step.axis_name) * num_local
    local = experts - first
    is_row = jnp.arange(num_rows)[:, None] < step.inputs.num_tokens[None, :]
    is_local = is_row & (local >= 0) & (local < num_local)
    groups = jnp.where(is_local, local, num_local).reshape(-1)
    order = jnp.argsort(groups, stable=True)
    sizes = jnp.sum(groups[:, None] == jnp.arange(num_local)[None, :], axis=0, dtype=jnp.int32)
    expert_of = jnp.minimum(groups[order], num_local - 1)  # any, for rows of no expert here

    def multiply(x: Array, weight: Any, bias: Array | None) -> Float32[Array, "R N"]:
        out = layers.linear_of_experts(x.astype(step.dtype), weight, sizes)
        return out if bias is None else out + bias[expert_of]

    gate_up = multiply(normed[order // per_token], weights.gate_up, weights.gate_up_bias)
    gated = _gate(gate_up, step)
    down = multiply(gated, weights.down, weights.down_bias)
    positions = jnp.argsort(order)  # of each token's experts among the sorted rows
    outputs = down[positions].reshape(num_rows, per_token, -1)
    outputs = jnp.where(is_local[:, :, None], outputs * factors[:, :, None], 0.0)
    return _add_columns(outputs)


def _num_experts(weights: ExpertParams) -> int:
    """Return how many experts this shard holds, in whatever layout."""
    return jax.tree.leaves(weights.down)[0].shape[0]


def _gate(gate_up: Float32[Array, "R 2F"], step: StepContext) -> Float32[Array, "R F"]:
    """Apply the gate; clamped and with an offset where the model has a limit (gpt-oss)."""
    moe = step.config.moe
    assert moe is not None
    gate, up = jnp.split(gate_up, 2, axis=1)
    if moe.swiglu_limit is None:
        return layers.activate(gate, step.config.activation) * up
    gate = jnp.minimum(gate, moe.swiglu_limit)
    up = jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
    return (up + 1.0) * gate * jax.nn.sigmoid(moe.swiglu_alpha * gate)


def _add_columns(x: Float32[Array, "T k ..."]) -> Float32[Array, "T ..."]:
    """Add x[:, 0], x[:, 1] and so on in this order, whatever the number of rows."""
    return functools.reduce(jnp.add, (x[:, column] for column in range(x.shape[1])))
