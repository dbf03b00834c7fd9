"""The TPU attention kernels compiled ahead of time, and what their bundles cost per unit of work.

Knows the kernels and their loops; how bundles are read is `llo`'s business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from bench import llo
from kernels.tpu.decode import decode_attention
from kernels.tpu.plan import page_windows, plan_decode, plan_prefill, plan_store
from kernels.tpu.prefill import HEADS_AT_ONCE, prefill_attention
from kernels.tpu.store import store_pages
from kernels.tpu.tiling import Tiling, choose_tiling
from replicas.engine import tpu_topology
from replicas.engine.tpu_chips import CHIPS

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 128
NUM_PAGES, PAGES_PER_SEQ = 2048, 64
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One loop of one kernel on one generation.

    Attributes:
        loop: which, and its unit of work.
        chip: generation, key of `TOPOLOGIES`.
        bundles: per unit, of a pass that no sequence begins or ends in.
        all_bundles: per unit, with all code inside, of which a pass runs a part.
        limit: the slot that needs most bundles, and how many per unit.
        spills: register spills and fills per unit.
        dma_bundles: bundles that issue in the time of the unit's DMA; None where that is nothing.
        compile_s: the kernel's, on this machine.
    """

    loop: str
    chip: str
    bundles: float
    all_bundles: float
    limit: str
    spills: float
    dma_bundles: float | None
    compile_s: float

    @property
    def key(self) -> str:
        """Name in the baseline."""
        return f"{self.chip}: {self.loop}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A decode kernel.

    Attributes:
        head_dim: D.
        q_len: new tokens of each sequence.
        kv_dtype: of the pages.
    """

    head_dim: int = HEAD_DIM
    q_len: int = 1
    kv_dtype: Any = jnp.bfloat16

    @property
    def row_tokens(self) -> int:
        """Tokens in a row of lanes."""
        return 128 // self.head_dim

    @property
    def tiling(self) -> Tiling:
        """As the engine chooses it."""
        return choose_tiling(
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            page_size=PAGE_SIZE,
            kv_dtype=self.kv_dtype,
            row_tokens=self.row_tokens,
            decode_q_len=self.q_len,
        )

    @property
    def mib(self) -> float:
        """KV of a round."""
        keys = self.tiling.round_items * self.tiling.block_keys
        size = jnp.dtype(self.kv_dtype).itemsize
        return keys * NUM_KV_HEADS * self.head_dim * 2 * size / MIB


VARIANTS = {
    "head_dim 64": Variant(head_dim=64),
    "int8 pages": Variant(kv_dtype=jnp.int8),
    "8 tokens": Variant(q_len=8),
}
_PLAIN = Variant()


def measure_kernels(directory: Path, generation: str) -> list[KernelRow]:
    """Compile every kernel for a generation; libtpu writes what it made into `directory`."""
    tiling = choose_tiling(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        page_size=PAGE_SIZE,
        kv_dtype=jnp.bfloat16,
    )
    chip = CHIPS[generation]

    def compile_(
        name: str, function: Callable[..., Any], num_rows: int, variant: Variant | None = None
    ) -> tuple[Any, float]:
        started_s = time.monotonic()
        _compile(generation, function, num_rows=num_rows, variant=variant or _PLAIN)
        return llo.read_computations(directory, name)[-1], time.monotonic() - started_s

    def row(
        loop_name: str, computation: Any, loop: Any, units: float, compile_s: float, kv_mib: float
    ) -> KernelRow:
        slot, need = loop.limiting_slot(computation.capacities)
        dma_s = kv_mib * MIB / chip.hbm_bytes_per_s
        return KernelRow(
            loop=loop_name,
            chip=generation,
            bundles=round(loop.num_own_bundles / units, 1),
            all_bundles=round(loop.num_bundles / units, 1),
            limit=f"{slot} {need / units:.0f}",
            spills=round((loop.slots["SPILL"] + loop.slots["FILL"]) / units, 1),
            dma_bundles=round(dma_s * chip.clock_hz) if kv_mib else None,
            compile_s=round(compile_s, 1),
        )

    decode, compile_s = compile_("decode_attention", _decode(tiling, _PLAIN), num_rows=64)
    kv_mib = tiling.round_items * tiling.block_keys * NUM_KV_HEADS * HEAD_DIM * 2 * 2 / MIB
    rounds = max(decode.loops, key=lambda loop: loop.num_bundles)
    rows = [row("decode: MiB of KV", decode, rounds, kv_mib, compile_s, 1.0)]
    for name, variant in VARIANTS.items():
        compiled, compile_s = compile_(
            "decode_attention", _decode(variant.tiling, variant), num_rows=64, variant=variant
        )
        rounds = max(compiled.loops, key=lambda loop: loop.num_bundles)
        rows.append(
            row(f"decode, {name}: MiB of KV", compiled, rounds, variant.mib, compile_s, 1.0)
        )

    prefill, compile_s = compile_("prefill_attention", _prefill(tiling), num_rows=512)
    units = tiling.sub_tokens / 32 * tiling.block_keys / 512 * HEADS_AT_ONCE / NUM_KV_HEADS
    bodies = [loop for loop in prefill.loops if loop.depth == 3 and loop.slots["MATMUL"]]
    for name, body in zip(("diagonal", "interior"), bodies, strict=True):
        loop_name = f"prefill {name}: 32 queries x 512 keys x 8 heads"
        rows.append(row(loop_name, prefill, body, units, compile_s, 0.0))

    store, compile_s = compile_("store_pages", _store, num_rows=512)
    pages = max(store.loops, key=lambda loop: loop.num_bundles)
    page_mib = 2 * NUM_KV_HEADS * PAGE_SIZE * HEAD_DIM * 2 / MIB
    rows.append(row("store: page of 128 tokens", store, pages, 1.0, compile_s, 2 * page_mib))
    return rows


def _compile(
    generation: str, function: Callable[..., Any], *, num_rows: int, variant: Variant
) -> None:
    devices = tpu_topology.get_devices(TOPOLOGIES[generation])[:1]
    with tpu_topology.lowering_for(devices):
        sharding = SingleDeviceSharding(devices[0])

        def array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        num_seqs = 64
        jax.jit(function, donate_argnums=1).lower(
            array(num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, 128, dtype=jnp.bfloat16),
            array(
                NUM_PAGES,
                2 * NUM_KV_HEADS,
                PAGE_SIZE // variant.row_tokens,
                128,
                dtype=variant.kv_dtype,
            ),
            array(num_seqs),
            array(num_seqs, PAGES_PER_SEQ),
            array(num_seqs + 1),
            array(1),
        ).compile()


def _shapes(tiling: Tiling, variant: Variant) -> Any:
    return tiling.shapes(
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        row_tokens=variant.row_tokens,
        page_size=PAGE_SIZE,
        kv_dtype=variant.kv_dtype,
        dtype=jnp.bfloat16,
        sm_scale=variant.head_dim**-0.5,
        sliding_window=None,
    )


def _decode(tiling: Tiling, variant: Variant) -> Callable[..., Any]:
    shapes, _ = _shapes(tiling, variant)
    shape = shapes[-1]

    def decode(qkv, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs):
        plan = plan_decode(
            kv_lens,
            cu_q_lens,
            num_seqs,
            min_q_len=1,
            max_q_len=tiling.decode_q_len,
            block_size=tiling.block_keys,
            sliding_window=None,
        )
        dtype = jnp.bfloat16 if variant.row_tokens == 1 else jnp.float32
        out = jnp.zeros_like(qkv[:, :NUM_HEADS], dtype)
        windows = page_windows(page_indices)
        return decode_attention(
            qkv, kv_pages, windows, plan, out, shape=shape, vmem_limit_bytes=tiling.vmem_limit_bytes
        )

    return decode


def _prefill(tiling: Tiling) -> Callable[..., Any]:
    _, shape = _shapes(tiling, _PLAIN)

    def prefill(qkv, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs):
        plan = plan_prefill(
            kv_lens,
            cu_q_lens,
            num_seqs,
            num_rows=qkv.shape[0],
            min_q_len=tiling.decode_q_len + 1,
            query_size=tiling.query_tokens,
            block_size=tiling.block_keys,
            sliding_window=None,
        )
        out = jnp.zeros_like(qkv[:, :NUM_HEADS])
        windows = page_windows(page_indices)
        attended = prefill_attention(
            qkv, kv_pages, windows, plan, out, shape=shape, vmem_limit_bytes=tiling.vmem_limit_bytes
        )
        return attended, kv_pages

    return prefill


def _store(qkv, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs):
    plan = plan_store(
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        num_rows=qkv.shape[0],
        min_q_len=2,
        page_size=PAGE_SIZE,
    )
    return store_pages(qkv, kv_pages, plan, row_tokens=1, vmem_limit_bytes=48 * MIB)
