"""Native CPU kernel behind `kernels.token_masks`: one pass over a row, in place of five."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from kernels.cpu import library
from kernels.token_masks import check_shapes


def apply_token_masks(
    logits: Float32[Array, "R V"],
    rows: Int32[Array, " N"],
    masks: Int32[Array, "N W"],
    needs_logits: Bool[Array, " N"],
    num_rows: Int32[Array, " 1"],
) -> tuple[Float32[Array, "N V"], Int32[Array, " N"]]:
    """As `kernels.token_masks.apply_token_masks`, for any N.

    Raises:
        ValueError: a shape does not fit.
        kernels.cpu.library.NativeUnavailable: the kernels cannot be built here.
        jax.errors.JaxRuntimeError: at run time, `num_rows` outside [0, N].
    """
    check_shapes(logits, rows, masks, needs_logits)
    library.load()
    results = (
        jax.ShapeDtypeStruct((rows.shape[0], logits.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct(rows.shape, jnp.int32),
    )
    call = jax.ffi.ffi_call("systole_token_masks", results)
    allowed, best = call(logits, rows, masks, needs_logits, num_rows)
    return allowed, best
