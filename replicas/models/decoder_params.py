"""The weights of a decoder: their tree, and the specs from which they are loaded and sharded.

Trees that most families share, and functions that describe them for a checkpoint's own tensor
names. Knows no forward pass. Invariant: a dimension that does not divide over the shards is padded
with zeros, which add nothing: heads and channels of the MLP in pairs of producer and consumer.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from replicas.config import ModelConfig
from replicas.models.param_spec import ParamSpec, Source
from replicas.models.sharding import round_up, shard_heads

type Pack = Callable[[Any], Any]


class Packing(NamedTuple):
    """How matmul operands come into the layout of a platform's kernels.

    Attributes:
        linear: of a weight [N, K], for `layers.linear`.
        gate_up: of fused gates and ups [2F, K], for `layers.gated_linear`; None: `linear`.
        experts: of the weights [E, N, K] of experts, for `layers.linear_of_experts`; None: they
            keep their layout.
    """

    linear: Pack
    gate_up: Pack | None = None
    experts: Pack | None = None

    def wrapped(self, wrap: Callable[[Pack], Pack]) -> Packing:
        """Return the packing whose functions are these, each wrapped."""
        return Packing(
            wrap(self.linear),
            self.gate_up and wrap(self.gate_up),
            self.experts and wrap(self.experts),
        )


@runtime_checkable
class PackableParams(Protocol):
    """Weights that know which of them are matmul operands."""

    def packed(self, config: ModelConfig, packing: Packing) -> Any:
        """Return the same tree with operands in the layout of a platform's kernels."""
        ...


class AttentionParams(NamedTuple):
    """Weights of an attention block, [out, in]; None for those that the family has not.

    Attributes:
        qkv: [(H + 2K) D, M], rows of q, k, v (of each shard in turn).
        qkv_bias: [(H + 2K) D].
        out: [M, H D].
        out_bias: [M].
        q_norm: [D] f32.
        k_norm: [D] f32.
        sinks: [H] f32.
    """

    qkv: Any
    qkv_bias: Any
    out: Any
    out_bias: Any
    q_norm: Any = None
    k_norm: Any = None
    sinks: Any = None

    def packed(self, config: ModelConfig, packing: Packing) -> AttentionParams:
        """See `PackableParams`."""
        del config
        return self._replace(qkv=packing.linear(self.qkv), out=packing.linear(self.out))


class GatedMlpParams(NamedTuple):
    """Weights of a gated MLP, [out, in]; None for biases that the family has not.

    Attributes:
        gate_up: [2F, M], rows of gate, up (of each shard in turn).
        gate_up_bias: [2F].
        down: [M, F].
        down_bias: [M].
    """

    gate_up: Any
    gate_up_bias: Any
    down: Any
    down_bias: Any

    def packed(self, config: ModelConfig, packing: Packing) -> GatedMlpParams:
        """See `PackableParams`; the fused kernel is for SiLU without a bias."""
        is_fused = config.activation == "silu" and self.gate_up_bias is None
        pack_gate_up = packing.gate_up if packing.gate_up and is_fused else packing.linear
        return self._replace(gate_up=pack_gate_up(self.gate_up), down=packing.linear(self.down))


class LayerParams(NamedTuple):
    """Weights of one pre-norm layer; norms are [M] f32.

    Attributes:
        attention_norm: of the attention's input.
        attention: the attention block.
        mlp_norm: of the MLP's input.
        mlp: the MLP.
        attention_out_norm: of the attention's output, or None.
        mlp_out_norm: of the MLP's output, or None.
    """

    attention_norm: Any
    attention: Any
    mlp_norm: Any
    mlp: Any
    attention_out_norm: Any = None
    mlp_out_norm: Any = None


class LayerNormParams(NamedTuple):
    """Weights of a `layers.layer_norm`.

    Attributes:
        weight: [M] f32.
        bias: [M] f32.
    """

    weight: Any
    bias: Any


class MlpParams(NamedTuple):
    """Weights of an MLP without a gate, [out, in].

    Attributes:
        up: [F, M].
        up_bias: [F].
        down: [M, F].
        down_bias: [M].
    """

    up: Any
    up_bias: Any
    down: Any
    down_bias: Any

    def packed(self, config: ModelConfig, packing: Packing) -> MlpParams:
        """See `PackableParams`."""
        del config
        return self._replace(up=packing.linear(self.up), down=packing.linear(self.down))


class NormNames(NamedTuple):
    """What a pre-norm layer's norms are called in the checkpoint; None for those it has not.

    Attributes:
        attention: of the attention's input.
        mlp: of the MLP's input.
        attention_out: of the attention's output.
        mlp_out: of the MLP's output.
    """

    attention: str = "input_layernorm"
    mlp: str = "post_attention_layernorm"
    attention_out: str | None = None
    mlp_out: str | None = None


_PLAIN_NORMS = NormNames()


class DecoderParams(NamedTuple):
    """Weights of the model.

    Attributes:
        embedding: [V, M].
        layers: one entry per layer; a tuple, or a `LayerStack` of packed weights.
        final_norm: the family's norm of [M] f32.
        head: [V, M], or None when tied to the embedding.
    """

    embedding: Any
    layers: Iterable[Any]
    final_norm: Any
    head: Any


def prepare_params(
    params: DecoderParams,
    config: ModelConfig,
    packing: Packing,
    stack: Callable[[Iterable[Any]], Iterable[Any]] = tuple,
    *,
    first: Packing | None = None,
) -> DecoderParams:
    """Return the weights with every matmul operand replaced by what `packing` makes of it.

    `stack` takes the layers one by one, as they are packed; the first of them is packed by `first`,
    if that is given. A tied head becomes a packed copy of its own, since the lookup needs plain
    rows.
    """

    def pack_layer(layer: Any, packing: Packing) -> Any:
        return jax.tree.map(
            lambda node: node.packed(config, packing) if _is_packable(node) else node,
            layer,
            is_leaf=_is_packable,
        )

    packings = itertools.chain((first or packing,), itertools.repeat(packing))
    layers = stack(map(pack_layer, params.layers, packings))
    # The largest matrix comes last: int8 layers have freed half of their memory by then.
    head = packing.linear(params.embedding if params.head is None else params.head)
    return params._replace(layers=layers, head=head)


def decoder_specs(
    config: ModelConfig,
    *,
    layers: Sequence[Any],
    final_norm: Any,
    embedding: str = "model.embed_tokens.weight",
    head: str = "lm_head.weight",
    num_shards: int,
) -> DecoderParams:
    """Describe the whole model: its layers, and embedding and head with a sharded vocabulary."""

    def vocab_spec(name: str) -> ParamSpec:
        padding = round_up(config.vocab_size, num_shards) - config.vocab_size
        shape = (config.vocab_size, config.hidden_size)
        return ParamSpec(
            sources=(Source(name=name, shape=shape, num_padding_rows=padding),),
            axes=("vocab", "model"),
        )

    return DecoderParams(
        embedding=vocab_spec(embedding),
        layers=tuple(layers),
        final_norm=final_norm,
        head=None if config.tie_word_embeddings else vocab_spec(head),
    )


def pre_norm_specs(
    config: ModelConfig,
    *,
    attention: Callable[[str], Any],
    mlp: Callable[[str], Any],
    norms: NormNames = _PLAIN_NORMS,
    norm_offset: float = 0.0,
    num_shards: int,
) -> DecoderParams:
    """Describe a model of `LayerParams` layers under the usual names.

    Args:
        config: the model's.
        attention: describes a layer's attention, from the layer's prefix.
        mlp: describes a layer's MLP, from the layer's prefix.
        norms: names of a layer's norms.
        norm_offset: added to the weights of all norms.
        num_shards: devices on the tensor axis.
    """

    def norm(name: str) -> ParamSpec:
        return norm_spec(f"{name}.weight", config.hidden_size, offset=norm_offset)

    def layer(prefix: str) -> LayerParams:
        return LayerParams(
            attention_norm=norm(f"{prefix}.{norms.attention}"),
            attention=attention(prefix),
            mlp_norm=norm(f"{prefix}.{norms.mlp}"),
            mlp=mlp(prefix),
            attention_out_norm=norms.attention_out and norm(f"{prefix}.{norms.attention_out}"),
            mlp_out_norm=norms.mlp_out and norm(f"{prefix}.{norms.mlp_out}"),
        )

    return decoder_specs(
        config,
        layers=[layer(f"model.layers.{index}") for index in range(config.num_layers)],
        final_norm=norm("model.norm"),
        num_shards=num_shards,
    )


def attention_specs(
    config: ModelConfig,
    prefix: str,
    *,
    qkv: Callable[[ModelConfig, str, str], Sequence[Source]] | None = None,
    out: str = "o_proj",
    has_head_norms: bool = False,
    norm_offset: float = 0.0,
    sinks: str | None = None,
    num_shards: int,
) -> AttentionParams:
    """Describe an attention block.

    Args:
        config: the model's.
        prefix: of the block's tensor names.
        qkv: (config, prefix, "weight" or "bias") to the sources of q, k and v; None: three tensors
            (`separate_qkv`).
        out: name of the output projection.
        has_head_norms: q and k are normalised head by head, by `q_norm` and `k_norm`.
        norm_offset: added to the weights of these norms.
        sinks: name of the heads' sinks; None for none.
        num_shards: devices on the tensor axis.
    """
    heads = shard_heads(config.num_heads, config.num_kv_heads, num_shards)
    head_dim = config.head_dim
    num_padding_heads = heads.num_heads - config.num_heads
    num_padding_kv_heads = heads.num_kv_heads - config.num_kv_heads * heads.repeats

    def qkv_spec(suffix: str) -> ParamSpec:
        q, k, v = (qkv or separate_qkv)(config, prefix, suffix)
        kv = {
            "num_heads": config.num_kv_heads,
            "repeats": heads.repeats,
            "num_padding_rows": num_padding_kv_heads * head_dim,
        }
        sources = (
            dataclasses.replace(q, num_padding_rows=num_padding_heads * head_dim),
            dataclasses.replace(k, **kv),
            dataclasses.replace(v, **kv),
        )
        axes = ("qkv_rows",) if suffix == "bias" else ("qkv_rows", "model")
        return ParamSpec(sources=sources, axes=axes, num_shards=num_shards)

    out_source = Source(
        name=f"{prefix}.{out}.weight",
        shape=(config.hidden_size, config.num_heads * head_dim),
        num_padding_columns=num_padding_heads * head_dim,
    )
    sinks_source = Source(
        name=f"{prefix}.{sinks}", shape=(config.num_heads,), num_padding_rows=num_padding_heads
    )
    head_norm = norm_spec if has_head_norms else lambda *_, **__: None
    return AttentionParams(
        qkv=qkv_spec("weight"),
        qkv_bias=qkv_spec("bias") if config.qkv_bias else None,
        out=ParamSpec(sources=(out_source,), axes=("model", "attention_out")),
        out_bias=model_bias_spec(config, f"{prefix}.{out}.bias")
        if config.attention_out_bias
        else None,
        q_norm=head_norm(f"{prefix}.q_norm.weight", head_dim, axis="head_dim", offset=norm_offset),
        k_norm=head_norm(f"{prefix}.k_norm.weight", head_dim, axis="head_dim", offset=norm_offset),
        sinks=None
        if sinks is None
        else ParamSpec(sources=(sinks_source,), axes=("heads",), is_float32=True),
    )


def separate_qkv(config: ModelConfig, prefix: str, suffix: str) -> tuple[Source, Source, Source]:
    """Return the sources of q, k and v where each is a tensor of its own."""
    columns = () if suffix == "bias" else (config.hidden_size,)
    q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    return (
        Source(name=f"{prefix}.q_proj.{suffix}", shape=(q_size, *columns)),
        Source(name=f"{prefix}.k_proj.{suffix}", shape=(kv_size, *columns)),
        Source(name=f"{prefix}.v_proj.{suffix}", shape=(kv_size, *columns)),
    )


def gated_mlp_specs(
    config: ModelConfig,
    prefix: str,
    *,
    fused: str | None = None,
    ffn_size: int | None = None,
    num_shards: int,
) -> GatedMlpParams:
    """Describe a gated MLP.

    Args:
        config: the model's.
        prefix: of the block's tensor names.
        fused: name of the tensor that holds gate before up; None: `gate_proj` and `up_proj`.
        ffn_size: its F; None: the model's.
        num_shards: devices on the tensor axis.
    """
    ffn_size = config.intermediate_size if ffn_size is None else ffn_size
    padding = round_up(ffn_size, num_shards) - ffn_size

    def gate_up(suffix: str) -> ParamSpec:
        columns = () if suffix == "bias" else (config.hidden_size,)
        if fused is None:
            sources = tuple(
                Source(
                    name=f"{prefix}.{name}.{suffix}",
                    shape=(ffn_size, *columns),
                    num_padding_rows=padding,
                )
                for name in ("gate_proj", "up_proj")
            )
        else:
            sources = tuple(
                Source(
                    name=f"{prefix}.{fused}.{suffix}",
                    shape=(2 * ffn_size, *columns),
                    begin=begin,
                    end=begin + ffn_size,
                    num_padding_rows=padding,
                )
                for begin in (0, ffn_size)
            )
        axes = ("gate_up_rows",) if suffix == "bias" else ("gate_up_rows", "model")
        return ParamSpec(sources=sources, axes=axes, num_shards=num_shards)

    return GatedMlpParams(
        gate_up=gate_up("weight"),
        gate_up_bias=gate_up("bias") if config.mlp_bias else None,
        down=down_spec(
            config, f"{prefix}.down_proj.weight", ffn_size=ffn_size, num_shards=num_shards
        ),
        down_bias=model_bias_spec(config, f"{prefix}.down_proj.bias") if config.mlp_bias else None,
    )


def up_spec(config: ModelConfig, name: str, *, num_shards: int) -> ParamSpec:
    """Describe the weight [F, M] or the bias [F] of an MLP's first projection, without a gate."""
    ffn_size, is_bias = config.intermediate_size, name.endswith(".bias")
    source = Source(
        name=name,
        shape=(ffn_size,) if is_bias else (ffn_size, config.hidden_size),
        num_padding_rows=round_up(ffn_size, num_shards) - ffn_size,
    )
    return ParamSpec(sources=(source,), axes=("ffn",) if is_bias else ("ffn", "model"))


def down_spec(
    config: ModelConfig, name: str, *, ffn_size: int | None = None, num_shards: int
) -> ParamSpec:
    """Describe the projection [M, F] from an MLP's channels back to the residual stream."""
    ffn_size = config.intermediate_size if ffn_size is None else ffn_size
    source = Source(
        name=name,
        shape=(config.hidden_size, ffn_size),
        num_padding_columns=round_up(ffn_size, num_shards) - ffn_size,
    )
    return ParamSpec(sources=(source,), axes=("model", "ffn"))


def norm_spec(name: str, size: int, *, axis: str = "model", offset: float = 0.0) -> ParamSpec:
    """Describe a norm's weight or bias, in f32."""
    return ParamSpec(
        sources=(Source(name=name, shape=(size,)),), axes=(axis,), is_float32=True, offset=offset
    )


def model_bias_spec(config: ModelConfig, name: str) -> ParamSpec:
    """Describe the bias [M] of a projection back to the residual stream."""
    return ParamSpec(sources=(Source(name=name, shape=(config.hidden_size,)),), axes=("model",))


def _is_packable(node: object) -> bool:
    return isinstance(node, PackableParams)
