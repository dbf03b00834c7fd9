"""The TPU attention kernels compiled ahead of time, and what their bundles cost per unit of work.

Knows the kernels and their loops; how bundles are read is `llo`'s business.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import process_time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from bench import llo
from kernels.quantized_pages import QuantizedPages
from kernels.tpu.decode import decode_attention
from kernels.tpu.mla import LatentTiling, ragged_paged_latent_attention
from kernels.tpu.plan import page_windows, plan_decode, plan_prefill, plan_store
from kernels.tpu.prefill import HEADS_AT_ONCE, prefill_attention
from kernels.tpu.store import store_pages
from kernels.tpu.tiling import Tiling, choose_tiling, padded_lanes, tokens_per_row
from replicas.engine import tpu_topology
from replicas.engine.tpu_chips import CHIPS

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
HEAD_DIM, PAGE_SIZE = 128, 128
NUM_PAGES, PAGES_PER_SEQ, NUM_SEQS = 2048, 64, 64
NUM_CHUNK_ROWS = 512
LATENT_DIM, LATENT_VALUE_DIM = 576, 512
MIB = 1 << 20
REGRESSION = 1.05
"""More than this times what the baseline has is a regression."""
_TRIES = 8

Baseline = Mapping[str, Mapping[str, float]]
"""Recorded figures by `KernelRow.key`."""


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
        compile_s: the kernel's, CPU time on this machine.
        reference_s: CPU time of compiling a fixed program, the least of just before and just after.
        compile_ratio: their ratio: much of what else runs on the machine, and which machine it is,
            does not show.
    """

    loop: str
    chip: str
    bundles: float
    all_bundles: float
    limit: str
    spills: float
    dma_bundles: float | None
    compile_s: float
    reference_s: float
    compile_ratio: float

    @property
    def key(self) -> str:
        """Name in the baseline."""
        return f"{self.chip}: {self.loop}"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Sizes of a kernel.

    Attributes:
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.
        q_len: new tokens of each sequence that decodes.
        kv_dtype: of the pages.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = HEAD_DIM
    q_len: int = 1
    kv_dtype: Any = jnp.bfloat16

    @property
    def row_tokens(self) -> int:
        """Tokens in a row of lanes."""
        return tokens_per_row(self.head_dim)

    @property
    def tiling(self) -> Tiling:
        """As the engine chooses it."""
        return choose_tiling(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            page_size=PAGE_SIZE,
            kv_dtype=self.kv_dtype,
            head_dim=self.head_dim,
            decode_q_len=self.q_len,
        )

    @property
    def shapes(self) -> tuple[Any, Any]:
        """Static shapes of decode, the one with most tokens, and of prefill."""
        decodes, prefill = self.tiling.shapes(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=PAGE_SIZE,
            kv_dtype=self.kv_dtype,
            dtype=jnp.bfloat16,
            sm_scale=self.head_dim**-0.5,
            sliding_window=None,
        )
        return decodes[-1], prefill

    @property
    def has_scales(self) -> bool:
        """Whether pages are of 8 bits."""
        return jnp.dtype(self.kv_dtype).itemsize == 1

    @property
    def round_mib(self) -> float:
        """KV of a decode round."""
        keys = self.tiling.round_items * self.tiling.block_keys
        size = jnp.dtype(self.kv_dtype).itemsize
        return keys * self.num_kv_heads * self.head_dim * 2 * size / MIB

    @property
    def page_mib(self) -> float:
        """KV of a page."""
        size = jnp.dtype(self.kv_dtype).itemsize
        return PAGE_SIZE * self.num_kv_heads * self.head_dim * 2 * size / MIB


_PLAIN = Variant()
_INT8 = Variant(kv_dtype=jnp.int8)
DECODES = {
    "decode": _PLAIN,
    "decode, head_dim 64": Variant(head_dim=64),
    "decode, 3 KV heads of 64": Variant(num_heads=9, num_kv_heads=3, head_dim=64),
    "decode, head_dim 256": Variant(num_heads=16, num_kv_heads=8, head_dim=256),
    "decode, int8 pages": _INT8,
    "decode, 4 tokens": Variant(q_len=4),
    "decode, 8 tokens": Variant(q_len=8),
    "decode, head_dim 64, 4 tokens": Variant(head_dim=64, q_len=4),
    "decode, int8 pages, 4 tokens": Variant(kv_dtype=jnp.int8, q_len=4),
}
PREFILLS = {
    "prefill": _PLAIN,
    "prefill, head_dim 64": Variant(head_dim=64),
    "prefill, head_dim 256": Variant(num_heads=16, num_kv_heads=8, head_dim=256),
    "int8 prefill": _INT8,
}
STORES = {"store": _PLAIN, "int8 store": _INT8}
LATENTS = {
    "latents": (128, LatentTiling()),
    "latents, shard of 16 heads": (16, LatentTiling()),
}
_SMALL = Variant(num_heads=8, num_kv_heads=2)
SMALL_DECODES = {
    "small decode": _SMALL,
    "small decode, int8 pages": replace(_SMALL, kv_dtype=jnp.int8),
}
"""A quarter of the heads: seconds to compile."""
SMALL_PREFILLS = {"small prefill": _SMALL}
SMALL_STORES = {"small store": _SMALL}
SMALL_LATENTS = {"small latents": (16, LatentTiling(sub_rows=64))}


def kernel_names(*, is_small: bool, containing: str = "") -> list[str]:
    """Names of kernels: with `is_small` those of a quarter of the heads, which are fewer."""
    small = (SMALL_DECODES, SMALL_PREFILLS, SMALL_STORES, SMALL_LATENTS)
    tables = small if is_small else (DECODES, PREFILLS, STORES, LATENTS)
    return [name for table in tables for name in table if containing in name]


def measure_kernels(
    directory: Path, generation: str, baseline: Baseline, names: Sequence[str]
) -> list[KernelRow]:
    """Compile kernels for a generation; libtpu writes what it made into `directory`.

    A kernel that took longer to compile than in the baseline is compiled again, up to eight times
    in all; the least times count. The names of a kernel's loops begin with its own.
    """
    meter = _Meter(directory, generation)
    measures: dict[str, Callable[[], list[KernelRow]]] = {}
    for name, variant in (DECODES | SMALL_DECODES).items():
        measures[name] = functools.partial(meter.measure_decode, name, variant)
    for name, variant in (PREFILLS | SMALL_PREFILLS).items():
        measures[name] = functools.partial(meter.measure_prefill, name, variant)
    for name, variant in (STORES | SMALL_STORES).items():
        measures[name] = functools.partial(meter.measure_store, name, variant)
    for name, (num_heads, tiling) in (LATENTS | SMALL_LATENTS).items():
        measures[name] = functools.partial(meter.measure_latents, name, num_heads, tiling)
    return [row for name in names for row in _measure_steadily(measures[name], baseline)]


def _measure_steadily(
    measure: Callable[[], list[KernelRow]], baseline: Baseline
) -> list[KernelRow]:
    rows = measure()
    recorded = baseline.get(rows[0].key, {}).get("compile_ratio")
    for _ in range(_TRIES - 1):
        if recorded is None or rows[0].compile_ratio <= REGRESSION * recorded:
            break
        rows = [_least_times(row, again) for row, again in zip(rows, measure(), strict=True)]
    return rows


def _least_times(row: KernelRow, again: KernelRow) -> KernelRow:
    compile_s = min(row.compile_s, again.compile_s)
    reference_s = min(row.reference_s, again.reference_s)
    return replace(
        row,
        compile_s=compile_s,
        reference_s=reference_s,
        compile_ratio=round(compile_s / reference_s, 3),
    )


@dataclass(frozen=True, kw_only=True)
class _CompileTime:
    """CPU times of a compilation, and of that of `_compile_reference`."""

    seconds: float
    reference_s: float


@dataclass(frozen=True)
class _Meter:
    """Compiles kernels for one generation and reads what came out."""

    directory: Path
    generation: str

    def measure_decode(self, name: str, variant: Variant) -> list[KernelRow]:
        compiled, time = self._compile("decode_attention", _decode(variant), variant, NUM_SEQS)
        rounds = max(compiled.loops, key=lambda loop: loop.num_bundles)
        units = variant.round_mib
        return [self._row(f"{name}: MiB of KV", compiled, rounds, units, time, kv_mib=1.0)]

    def measure_prefill(self, name: str, variant: Variant) -> list[KernelRow]:
        compiled, time = self._compile(
            "prefill_attention", _prefill(variant), variant, NUM_CHUNK_ROWS
        )
        tiling, num_kv_heads = variant.tiling, variant.num_kv_heads
        share = min(HEADS_AT_ONCE, num_kv_heads) / num_kv_heads
        units = tiling.sub_tokens / 32 * tiling.block_keys / 512 * share
        multiplying = [loop for loop in compiled.loops if loop.slots["MATMUL"]]
        depth = max(loop.depth for loop in multiplying)  # 3, or 2 where one body has all heads
        bodies = [loop for loop in multiplying if loop.depth == depth]
        unit = f"32 queries x 512 keys x {num_kv_heads} heads"
        rows = []
        for kind, body in zip(("diagonal", "interior"), bodies, strict=True):
            row = self._row(f"{name} {kind}: {unit}", compiled, body, units, time)
            # What is done for all heads at once, such as masks.
            around = sum(
                loop.num_own_bundles
                for loop in compiled.loops
                if depth == 3 and loop.encloses(body)  # else the body holds it itself
            )
            bundles = row.bundles + around * share / units
            rows.append(replace(row, bundles=round(bundles, 1)))
        return rows

    def measure_store(self, name: str, variant: Variant) -> list[KernelRow]:
        compiled, time = self._compile("store_pages", _store(variant), variant, NUM_CHUNK_ROWS)
        pages = max(compiled.loops, key=lambda loop: loop.num_bundles)
        kv_mib = 2 * variant.page_mib
        unit = f"page of {PAGE_SIZE} tokens"
        return [self._row(f"{name}: {unit}", compiled, pages, 1.0, time, kv_mib=kv_mib)]

    def measure_latents(self, name: str, num_heads: int, tiling: LatentTiling) -> list[KernelRow]:
        time = self._time(lambda: _compile_latents(self.generation, num_heads, tiling))
        rows: list[KernelRow] = []
        mib = tiling.block_keys * padded_lanes(LATENT_DIM) * 2 / MIB
        decode = llo.read_computations(self.directory, "latent_decode")[-1]
        items = max(decode.loops, key=lambda loop: loop.num_bundles)
        _, whole = _bodies(decode)
        row = self._row(f"{name}, decode: MiB", decode, whole, mib, time, kv_mib=1.0)
        own = items.num_own_bundles / mib
        rows.append(replace(row, bundles=round(row.bundles + own, 1)))
        prefill = llo.read_computations(self.directory, "latent_prefill")[-1]
        masked, whole = _bodies(prefill)
        units = tiling.sub_tokens(num_heads) * num_heads * tiling.block_keys / (256 * 1024)
        for kind, body in (("diagonal", masked), ("interior", whole)):
            loop = f"{name}, {kind}: 256 rows x 1024 keys"
            rows.append(self._row(loop, prefill, body, units, time))
        return rows

    def _compile(
        self, kernel: str, function: Callable[..., Any], variant: Variant, num_rows: int
    ) -> tuple[llo.Computation, _CompileTime]:
        time = self._time(
            lambda: _compile(self.generation, function, num_rows=num_rows, variant=variant)
        )
        return llo.read_computations(self.directory, kernel)[-1], time

    def _time(self, compile_kernel: Callable[[], None]) -> _CompileTime:
        compile_reference = functools.partial(_compile_reference, self.generation)
        before_s = _cpu_seconds(compile_reference)
        seconds = _cpu_seconds(compile_kernel)
        after_s = _cpu_seconds(compile_reference)
        return _CompileTime(seconds=seconds, reference_s=min(before_s, after_s))

    def _row(
        self,
        name: str,
        computation: llo.Computation,
        loop: llo.Loop,
        units: float,
        time: _CompileTime,
        *,
        kv_mib: float = 0.0,
    ) -> KernelRow:
        chip = CHIPS[self.generation]
        slot, need = loop.limiting_slot(computation.capacities)
        dma_s = kv_mib * MIB / chip.hbm_bytes_per_s
        return KernelRow(
            loop=name,
            chip=self.generation,
            bundles=round(loop.num_own_bundles / units, 1),
            all_bundles=round(loop.num_bundles / units, 1),
            limit=f"{slot} {need / units:.0f}",
            spills=round((loop.slots["SPILL"] + loop.slots["FILL"]) / units, 1),
            dma_bundles=round(dma_s * chip.clock_hz) if kv_mib else None,
            compile_s=round(time.seconds, 2),
            reference_s=round(time.reference_s, 2),
            compile_ratio=round(time.seconds / time.reference_s, 3),
        )


def _cpu_seconds(action: Callable[[], None]) -> float:
    started_s = process_time()
    action()
    return process_time() - started_s


def _bodies(computation: llo.Computation) -> tuple[llo.Loop, llo.Loop]:
    """The loops of a latent kernel that multiply: with the causal mask, then without."""
    masked, whole = (loop for loop in computation.loops if loop.depth == 2 and loop.slots["MATMUL"])
    return masked, whole


class _Arrays:
    """Shapes of arguments that lie on one device."""

    def __init__(self, device: Any) -> None:
        self._sharding = SingleDeviceSharding(device)

    def __call__(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding)

    @property
    def indices(self) -> tuple[Any, ...]:
        """Lengths, page table, row bounds and number of sequences."""
        return self(NUM_SEQS), self(NUM_SEQS, PAGES_PER_SEQ), self(NUM_SEQS + 1), self(1)


def _compile(
    generation: str, function: Callable[..., Any], *, num_rows: int, variant: Variant
) -> None:
    devices = tpu_topology.get_devices(TOPOLOGIES[generation])[:1]
    with tpu_topology.lowering_for(devices):
        array = _Arrays(devices[0])
        num_kv_rows, row_tokens = 2 * variant.num_kv_heads, variant.row_tokens
        lanes = padded_lanes(variant.head_dim)
        shape = (NUM_PAGES, num_kv_rows, PAGE_SIZE // row_tokens, lanes)
        kv_pages = array(*shape, dtype=variant.kv_dtype)
        if variant.has_scales:
            kv_pages = QuantizedPages(kv_pages, array(*shape[:3], dtype=jnp.float32))
        num_columns = variant.num_heads + num_kv_rows + variant.has_scales
        qkv = array(num_rows, num_columns, lanes, dtype=jnp.bfloat16)
        jax.jit(function, donate_argnums=1).lower(qkv, kv_pages, *array.indices).compile()


def _compile_reference(generation: str) -> None:
    """Compile a program of XLA's own: a measure of the machine, which no change here touches."""
    devices = tpu_topology.get_devices(TOPOLOGIES[generation])[:1]
    array = functools.partial(_Arrays(devices[0]), dtype=jnp.bfloat16)

    def attend(x: jax.Array, weights: jax.Array) -> jax.Array:
        for layer in range(4):
            scores = x @ weights[layer] @ x.T
            x += jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype) @ x
        return x

    jax.jit(attend).lower(array(512, 1024), array(4, 1024, 1024)).compile()


def _compile_latents(generation: str, num_heads: int, tiling: LatentTiling) -> None:
    devices = tpu_topology.get_devices(TOPOLOGIES[generation])[:1]
    with tpu_topology.lowering_for(devices):
        array = functools.partial(_Arrays(devices[0]), dtype=jnp.bfloat16)
        attend = functools.partial(
            ragged_paged_latent_attention,
            sm_scale=0.1,
            num_value_dims=LATENT_VALUE_DIM,
            tiling=tiling,
        )
        jax.jit(attend, donate_argnums=2).lower(
            array(NUM_CHUNK_ROWS, num_heads, LATENT_DIM),
            array(NUM_CHUNK_ROWS, LATENT_DIM),
            array(NUM_PAGES, 1, PAGE_SIZE, padded_lanes(LATENT_DIM)),
            *_Arrays(devices[0]).indices,
        ).compile()


def _decode(variant: Variant) -> Callable[..., Any]:
    shape, _ = variant.shapes
    tiling = variant.tiling

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
        out = jnp.zeros_like(qkv[:, : variant.num_heads], dtype)
        windows = page_windows(page_indices)
        return decode_attention(
            qkv, kv_pages, windows, plan, out, shape=shape, vmem_limit_bytes=tiling.vmem_limit_bytes
        )

    return decode


def _prefill(variant: Variant) -> Callable[..., Any]:
    _, shape = variant.shapes
    tiling = variant.tiling

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
        out = jnp.zeros_like(qkv[:, : variant.num_heads])
        windows = page_windows(page_indices)
        attended = prefill_attention(
            qkv, kv_pages, windows, plan, out, shape=shape, vmem_limit_bytes=tiling.vmem_limit_bytes
        )
        return attended, kv_pages

    return prefill


def _store(variant: Variant) -> Callable[..., Any]:
    def store(qkv, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs):
        plan = plan_store(
            kv_lens,
            page_indices,
            cu_q_lens,
            num_seqs,
            num_rows=qkv.shape[0],
            min_q_len=2,
            page_size=PAGE_SIZE,
        )
        rows = qkv[:, variant.num_heads :]
        return store_pages(rows, kv_pages, plan, row_tokens=1, vmem_limit_bytes=48 * MIB)

    return store
