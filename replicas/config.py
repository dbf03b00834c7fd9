"""Frozen configuration of a replica: what the model is and how the engine runs it.

No jax here: the app reads these too. "auto" values are resolved by functions that return a new
config (`EngineConfig.resolve` in engine start-up), never by mutation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Platform = Literal["auto", "cpu", "tpu"]
AttentionImpl = Literal["auto", "native", "pallas", "reference"]
MatmulImpl = Literal["auto", "native", "xla"]
Quantization = Literal["none", "int8"]
KVCacheDtype = Literal["auto", "int8"]
Speculation = Literal["none", "prompt_lookup"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
LayerType = Literal["full_attention", "sliding_attention"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
RouterScoring = Literal["softmax", "sigmoid"]
CompilerOption = bool | int | float | str

TraceExporter = Literal["none", "file", "otlp"]

DEFAULT_PROFILE_DIRECTORY = ".cache/profiles"

_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: how a position becomes angles.

    Attributes:
        kind: how frequencies are scaled for longer contexts; "default" not at all (see
            `replicas.models.rope`).
        theta: base of the geometric series of frequencies, > 0.
        rotary_dim: dimensions of a head that are rotated, the first ones; None for all.
        is_interleaved: pairs are neighbours (2i, 2i + 1), not (i, i + rotary_dim / 2).
        attention_factor: sine and cosine are multiplied by it; > 0.
        factor: linear, dynamic, llama3, yarn: context extension, > 0.
        original_max_position_embeddings: llama3, yarn, longrope: context length of the original
            training, tokens.
        low_freq_factor: llama3: wavelengths above original / low_freq_factor are divided.
        high_freq_factor: llama3: wavelengths below original / high_freq_factor are kept.
        beta_fast: yarn: dimensions that turn at least so often in the original context are kept.
        beta_slow: yarn: those that turn at most so often are divided.
        truncates: yarn: bounds between the two are rounded to whole dimensions.
        short_factors: longrope: divisor of each frequency up to the original context length.
        long_factors: longrope: divisor of each frequency for longer contexts.
        is_long: longrope: which of the two; see `ModelConfig.for_length`.
    """

    kind: RopeKind = "default"
    theta: float = 10_000.0
    rotary_dim: int | None = None
    is_interleaved: bool = False
    attention_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def __post_init__(self) -> None:
        if self.theta <= 0:
            raise ValueError(f"rope theta must be > 0, got {self.theta}")
        if self.factor <= 0:
            raise ValueError(f"rope factor must be > 0, got {self.factor}")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"rope low_freq_factor ({self.low_freq_factor}) must be below high_freq_factor "
                f"({self.high_freq_factor})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP.

    Attributes:
        num_experts: E, routed ones.
        num_experts_per_tok: k, those that a token goes through.
        intermediate_size: F of one expert.
        shared_intermediate_size: F of the MLP that every token goes through as well; 0 for none.
        dense_layers: layers with an ordinary MLP instead.
        scoring: how the router's logits become scores.
        normalizes: the scores of a token's experts are divided by their sum.
        normalizer_epsilon: added to that sum.
        scaling_factor: of the scores, after that.
        num_groups: groups of consecutive experts; 1 for no choice between groups.
        num_groups_per_tok: groups that a token's experts come from.
        swiglu_limit: bound of gate and up, for experts of (up + 1) gate sigmoid(alpha gate); None
            for experts of the model's own activation.
        swiglu_alpha: alpha of that.
        is_mxfp4: the checkpoint holds the experts' weights in that format.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    dense_layers: tuple[int, ...] = ()
    scoring: RouterScoring = "softmax"
    normalizes: bool = True
    normalizer_epsilon: float = 0.0
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_groups_per_tok: int = 1
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    is_mxfp4: bool = False

    @property
    def active_intermediate_size(self) -> int:
        """F of all experts that a token goes through."""
        return self.num_experts_per_tok * self.intermediate_size + self.shared_intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention: keys and values of all heads from one latent a token.

    Attributes:
        q_lora_rank: Q, size of the queries' latent; None for queries of the hidden state itself.
        kv_lora_rank: R, size of the latent.
        qk_nope_head_dim: N, dimensions of a head's query and key without position.
        qk_rope_head_dim: P, dimensions with rotated positions, of a key that all heads share.
        v_head_dim: V, dimensions of a head's value.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def cache_dim(self) -> int:
        """Numbers that the cache holds of a token in a layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a checkpoint computes, read in full from its config.json.

    What all checkpoints of a family have in common is its code's business, not a field here.

    Attributes:
        family: `model_type` of the checkpoint; picks the entry of the model registry.
        vocab_size: V.
        hidden_size: M.
        intermediate_size: F.
        num_layers: L.
        num_heads: query heads H, a multiple of `num_kv_heads`.
        num_kv_heads: key/value heads K.
        head_dim: D, even.
        max_position_embeddings: longest context that the checkpoint was made for, tokens.
        norm_eps: added to the mean square or the variance.
        activation: of the MLP; "gelu" is exact, "gelu_tanh" its approximation.
        rope: rotary position embedding.
        sliding_rope: that of layers with a window, where it is another.
        sliding_window: a query attends to its own and the latest positions before it, that
            many in all; None: to every earlier position.
        layer_types: which layers have the window; empty: all of them.
        attention_scale: factor of the attention scores; None: D^-1/2.
        qkv_bias: biases on the q, k and v projections.
        attention_out_bias: bias on the output projection of attention.
        mlp_bias: biases on the projections of the MLP.
        is_parallel: attention and MLP read the same residual stream and are added together.
        moe: the experts, of a model that has some.
        mla: the latents, of a model that attends over such; `head_dim` is then what is rotated,
            and there is one KV head.
        has_sinks: each head's softmax has one more key, of a score of its own and no value.
        num_skipped_layers: layers after the last that the checkpoint holds and nothing computes.
        tie_word_embeddings: the output head is the embedding.
        final_logit_softcapping: logits are squashed into (-c, c) by c tanh(x / c); None: not.
        eos_token_ids: ids that end a generation, of config.json and generation_config.json.
        bos_token_id: id that begins a text, or None.
        checkpoint_dtype: dtype that config.json states, or None. Information only.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float = 1e-6
    activation: Activation = "silu"
    rope: RopeConfig = RopeConfig()
    sliding_rope: RopeConfig | None = None
    sliding_window: int | None = None
    layer_types: tuple[LayerType, ...] = ()
    attention_scale: float | None = None
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    is_parallel: bool = False
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    has_sinks: bool = False
    num_skipped_layers: int = 0
    tie_word_embeddings: bool = False
    final_logit_softcapping: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    checkpoint_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be >= 1, got {self.sliding_window}")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types must name {self.num_layers} layers, got {len(self.layer_types)}"
            )

    @property
    def sm_scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def ropes(self) -> frozenset[RopeConfig]:
        """The rotary embeddings of all layers."""
        return frozenset(self.rope_of(layer) for layer in range(self.num_layers))

    def is_sliding(self, layer: int) -> bool:
        """Whether a layer has the window."""
        if self.sliding_window is None:
            return False
        return not self.layer_types or self.layer_types[layer] == "sliding_attention"

    def window_of(self, layer: int) -> int | None:
        """Positions that a query of a layer attends to; None for all."""
        return self.sliding_window if self.is_sliding(layer) else None

    def rope_of(self, layer: int) -> RopeConfig:
        """Rotary embedding of a layer."""
        if self.sliding_rope is not None and self.is_sliding(layer):
            return self.sliding_rope
        return self.rope

    def for_length(self, max_len: int) -> ModelConfig:
        """Return the configuration for sequences of up to `max_len` tokens.

        longrope has two sets of frequencies. A replica uses one of them for all its requests, the
        long one if it admits sequences beyond the original context: the keys in the cache must not
        depend on how long a sequence will become.
        """
        rope = self.rope
        if rope.kind != "longrope" or max_len <= rope.original_max_position_embeddings:
            return self
        return replace(self, rope=replace(rope, is_long=True))


def _no_options() -> dict[str, CompilerOption]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one replica runs its model.

    Attributes:
        model: directory with config.json, tokenizer files and safetensors; or where they are
            downloaded from, `gs://bucket/path` or `hf://org/name@revision`.
        model_cache: directory for downloads; None: see `replicas.model_files.fetch`.
        platform: device kind; "auto" takes a TPU when one is attached.
        dtype: compute and weight dtype, "bfloat16" or "float32".
        page_size: tokens per KV page, a power of two; None: 16 on CPU, 128 on TPU.
        num_pages: KV pages including the null page; None: as many as `kv_cache_bytes` holds.
        kv_cache_bytes: memory for KV pages over all devices; None: what weights leave of
            `memory_bytes`.
        memory_bytes: memory of each device for weights and KV pages; None: 92% of a TPU's, and on
            CPU the weights' and 512 MiB.
        max_num_seqs: slots, i.e. sequences in one step.
        max_model_len: longest prompt + output in tokens; None: the model's own limit.
        max_num_batched_tokens: tokens in one step.
        max_mixed_tokens: tokens in a step that also contains decode rows: bounds the delay that a
            long prompt adds to running streams.
        enable_prefix_caching: keep full pages of finished sequences for reuse.
        attention: kernel choice; "auto" is native on CPU where a compiler was found, and pallas on
            TPU where the kernels take the model.
        quantization: "int8": matmul weights, the output head's included, become 8-bit integers at
            load, and so do their inputs, row by row. The first layer, embedding, norms and cache
            keep `dtype`.
        kv_cache_dtype: of the KV pages; "auto" is `dtype`. "int8": the keys of each token and
            head become 8-bit integers with a scale of their own, and so do its values. Refused for
            models that attend over latents.
        matmul: kernel of the weights' matmuls; "auto" is native, with weights packed at load, for
            bfloat16 or int8 on one CPU device where a compiler was found.
        speculation: "prompt_lookup": while few sequences run, a step also verifies guesses of the
            tokens after the next one, found where the text repeats itself. Tokens stay the same.
        num_speculative_tokens: most guesses for a sequence in one step, in [1, 7].
        prompt_lookup_min: shortest run of latest tokens that must occur earlier, >= 1.
        prompt_lookup_max: longest run that is compared, at most 8; the longer, the better a guess.
        structured_output: outputs can be made to follow a grammar, if the model directory has a
            tokenizer.json. A row of logits per slot is then kept on the device.
        tensor_parallel: devices that one model is sharded over.
        program_store: directory of compiled programs, or None to compile at every start.
        profile_directory: where the profiler's traces are written, on the replica's node.
        max_step_s: a step that takes longer counts as hung, and the replica is replaced; > 0.
        xla_options: options of XLA's compiler for every program, by name without dashes; which
            there are depends on the platform, and the compiler refuses others at start.
        libtpu_options: flags of libtpu by name without dashes, for platform "tpu"; added to
            LIBTPU_INIT_ARGS before the TPU is opened.
    """

    model: str
    model_cache: str | None = None
    platform: Platform = "auto"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    memory_bytes: int | None = None
    max_num_seqs: int = 64
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_mixed_tokens: int = 64
    enable_prefix_caching: bool = True
    attention: AttentionImpl = "auto"
    quantization: Quantization = "none"
    kv_cache_dtype: KVCacheDtype = "auto"
    matmul: MatmulImpl = "auto"
    speculation: Speculation = "none"
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    structured_output: bool = True
    tensor_parallel: int = 1
    program_store: str | None = None
    profile_directory: str = DEFAULT_PROFILE_DIRECTORY
    max_step_s: float = 15.0
    # Left out of the hash, not of equality: a mapping has none.
    xla_options: Mapping[str, CompilerOption] = field(default_factory=_no_options, hash=False)
    libtpu_options: Mapping[str, CompilerOption] = field(default_factory=_no_options, hash=False)

    def __post_init__(self) -> None:
        if self.page_size is not None and (
            self.page_size < 8 or self.page_size & (self.page_size - 1)
        ):
            raise ValueError(f"page_size must be a power of two >= 8, got {self.page_size}")
        if not 1 <= self.max_num_seqs <= 1024:
            raise ValueError(f"max_num_seqs must be in [1, 1024], got {self.max_num_seqs}")
        if self.max_num_batched_tokens < 8:
            raise ValueError(
                f"max_num_batched_tokens must be >= 8, got {self.max_num_batched_tokens}"
            )
        if self.max_mixed_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_mixed_tokens ({self.max_mixed_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token in a step"
            )
        if self.max_num_batched_tokens < self.max_mixed_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_mixed_tokens ({self.max_mixed_tokens})"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be >= 2, got {self.max_model_len}")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel must be >= 1, got {self.tensor_parallel}")
        if self.max_step_s <= 0:
            raise ValueError(f"max_step_s must be > 0, got {self.max_step_s}")
        if self.matmul == "native" and not self.has_packable_weights:
            raise ValueError(
                "matmul 'native' needs tensor_parallel 1, and dtype 'bfloat16' or quantization "
                f"'int8'; got {self.tensor_parallel}, {self.dtype!r} and {self.quantization!r}"
            )
        _check_options("xla_options", self.xla_options)
        _check_options("libtpu_options", self.libtpu_options)
        if self.libtpu_options and self.platform != "tpu":
            raise ValueError(
                f"libtpu_options need platform 'tpu', got {self.platform!r}: no other reads them"
            )
        self._check_memory()
        self._check_speculation()

    @property
    def has_packable_weights(self) -> bool:
        """Whether there is a native matmul for these weights."""
        is_packable = self.dtype == "bfloat16" or self.quantization == "int8"
        return is_packable and self.tensor_parallel == 1

    @property
    def has_native_kernels(self) -> bool:
        """Whether any kernel of a resolved configuration is a native CPU kernel."""
        return "native" in (self.attention, self.matmul)

    @property
    def kv_dtype(self) -> str:
        """Dtype of the KV pages, by its name."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def _check_memory(self) -> None:
        if self.num_pages is not None and self.num_pages < 2:
            raise ValueError(
                f"num_pages must be >= 2 (page 0 is the null page), got {self.num_pages}"
            )
        for name in ("kv_cache_bytes", "memory_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")

    def _check_speculation(self) -> None:
        if not 1 <= self.num_speculative_tokens <= 7:
            raise ValueError(
                f"num_speculative_tokens must be in [1, 7], got {self.num_speculative_tokens}"
            )
        if self.speculation != "none" and self.max_mixed_tokens < 16:
            raise ValueError(
                "speculation needs max_mixed_tokens >= 16, so that prompts have room beside the "
                f"8 rows that guesses may take, got {self.max_mixed_tokens}"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= 8:
            raise ValueError(
                "1 <= prompt_lookup_min <= prompt_lookup_max <= 8 is needed, got "
                f"{self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Where the spans of requests go; see replicas/tracing.py.

    Attributes:
        exporter: "none" is off; "file" writes JSON lines, a file for each process; "otlp" sends
            OTLP over HTTP.
        directory: of exporter "file", on each node.
        endpoint: of exporter "otlp", for example http://127.0.0.1:4318/v1/traces.
        sample_ratio: share of the requests without a trace of their client's that are traced, in
            [0, 1]. A client that sends a traceparent decides itself.
    """

    exporter: TraceExporter = "none"
    directory: str = ".cache/traces"
    endpoint: str | None = None
    sample_ratio: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.sample_ratio <= 1:
            raise ValueError(f"sample_ratio must be in [0, 1], got {self.sample_ratio}")
        if self.exporter == "otlp" and self.endpoint is None:
            raise ValueError(
                "exporter 'otlp' needs an endpoint, e.g. http://127.0.0.1:4318/v1/traces"
            )


def _check_options(setting: str, options: Mapping[str, CompilerOption]) -> None:
    for name, value in options.items():
        if not _OPTION_NAME.fullmatch(name):
            raise ValueError(
                f"{setting}: {name!r} is not the name of an option; write it without dashes, "
                "as in xla_backend_optimization_level"
            )
        if isinstance(value, str) and any(character.isspace() for character in value):
            raise ValueError(f"{setting}: the value of {name} has a space in it: {value!r}")
