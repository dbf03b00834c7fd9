"""A model through its paged cache, one sequence at a time, with the logits of every position.

What the engine computes without the engine: chunked prefill over pages in a scrambled order, the
platform's attention kernel. The engine itself keeps only the last row's logits, on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from kernels import mla_reference, reference
from kernels.cpu import attention as native
from kernels.cpu import library
from replicas.config import ModelConfig, Quantization
from replicas.models.inputs import ModelInputs
from replicas.models.kv_cache import allocate_kv_pages
from replicas.models.packing import has_packable_sizes, pack_params
from replicas.models.quantize import quantize_params
from replicas.models.registry import get_family, load_model_config
from replicas.models.weights import load_params

_NUM_SEQS = 8


class PagedForward:
    """Loaded weights, and one compiled step of `chunk_size` rows.

    Attributes:
        config: the model's configuration.
        max_len: longest sequence, tokens.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str,
        quantization: Quantization = "none",
        rotates: bool = True,
        keeps_first: bool = True,
        kv_dtype: str | None = None,
        chunk_size: int = 16,
        page_size: int = 16,
        max_len: int = 128,
    ) -> None:
        """Load a checkpoint directory.

        Args:
            path: config.json and safetensors.
            dtype: of weights that are not quantised, and of activations.
            quantization: of the matmul weights and their inputs.
            rotates: see `quantize_params`.
            keeps_first: see `quantize_params`.
            kv_dtype: of the cache; None for `dtype`.
            chunk_size: rows of a step.
            page_size: tokens per page.
            max_len: longest sequence, tokens.

        Raises:
            UnsupportedModelError: the family or an option is not built.
            CheckpointError: the weights do not fit the config.
        """
        self.config: ModelConfig = load_model_config(path).for_length(max_len)
        self.max_len = max_len
        self._dtype = jnp.dtype(dtype)
        self._kv_dtype = jnp.dtype(kv_dtype or dtype)
        self._params = load_params(path, self.config, dtype=self._dtype)
        self._chunk_size, self._page_size = chunk_size, page_size
        self._num_pages = 1 + -(-max_len // page_size)
        self._step = jax.jit(self._run, donate_argnums=1)
        self._attention = reference.ragged_paged_attention
        is_native = jax.default_backend() == "cpu" and _has_native()
        if quantization == "int8":
            self._params = quantize_params(
                self._params,
                self.config,
                is_native=is_native,
                rotates=rotates,
                keeps_first=keeps_first,
            )
        if self.config.mla is not None:
            self._attention = mla_reference.ragged_paged_latent_attention
        elif is_native and self.config.head_dim % native.HEAD_DIM_MULTIPLE == 0:
            self._attention = native.ragged_paged_attention
        has_bf16_weights = self._dtype == jnp.bfloat16 and quantization == "none"
        if is_native and has_bf16_weights and has_packable_sizes(self.config):
            self._params = pack_params(self._params, self.config)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the f32 logits [len(token_ids), V] that follow each token."""
        kv_pages = allocate_kv_pages(
            self.config, num_pages=self._num_pages, page_size=self._page_size, dtype=self._kv_dtype
        )
        rows: list[npt.NDArray[np.float32]] = []
        for start in range(0, len(token_ids), self._chunk_size):
            chunk = token_ids[start : start + self._chunk_size]
            logits, kv_pages = self._step(self._params, kv_pages, self._inputs(chunk, start))
            rows.append(np.asarray(logits)[: len(chunk)])
        return np.concatenate(rows)

    def _inputs(self, chunk: Sequence[int], start: int) -> ModelInputs:
        """Build the step that computes `chunk` at [start, start + len(chunk))."""
        num_rows = len(chunk)
        end = start + num_rows
        assert end <= self.max_len, f"{end} tokens exceed {self.max_len}"
        token_ids, positions = np.zeros((2, self._chunk_size), np.int32)
        token_ids[:num_rows] = chunk
        positions[:num_rows] = np.arange(start, end)
        page_indices = np.zeros((_NUM_SEQS, self._num_pages - 1), np.int32)
        num_used = -(-end // self._page_size)
        # Descending pages: a step that ignored the table would read the wrong ones.
        page_indices[0, :num_used] = self._num_pages - 1 - np.arange(num_used)
        kv_lens = np.zeros(_NUM_SEQS, np.int32)
        kv_lens[0] = end
        return ModelInputs(
            token_ids=jnp.asarray(token_ids),
            positions=jnp.asarray(positions),
            kv_lens=jnp.asarray(kv_lens),
            page_indices=jnp.asarray(page_indices),
            cu_q_lens=jnp.asarray([0] + [num_rows] * _NUM_SEQS, jnp.int32),
            num_seqs=jnp.asarray([1], jnp.int32),
        )

    def _run(self, params: Any, kv_pages: Any, inputs: ModelInputs) -> Any:
        family = get_family(self.config)
        hidden, kv_pages = family.forward(
            params, kv_pages, inputs, self.config, attention=self._attention
        )
        logits = family.compute_logits(params, hidden, inputs.num_tokens, self.config)
        return logits, kv_pages


def _has_native() -> bool:
    try:
        library.load()
    except library.NativeUnavailable:
        return False
    return True
