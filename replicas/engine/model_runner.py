"""The device side of the engine: compiled programs, device state, launch and fetch.

Knows shapes and arrays, not requests or policy. Invariant: after warm-up nothing compiles, because
programs are called as compiled objects: an unknown shape is an error, never a stall.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from replicas.config import EngineConfig
from replicas.engine.buckets import Bucket, make_buckets, smallest_bucket
from replicas.engine.programs import ProgramStore
from replicas.engine.sampler import sample
from replicas.engine.scheduler import StepPlan
from replicas.engine.step import DeviceState, PackedLayout, SlotTable, pack_step

ProgressFn = Callable[[str, int, int], None]

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's traced functions, with configuration, kernels and mesh bound in.

    Attributes:
        forward: (params, kv_pages, inputs) -> (hidden [T, M], kv_pages).
        compute_logits: (params, hidden [R, M]) -> f32 [R, V].
    """

    forward: Callable[..., tuple[Array, tuple[Array, ...]]]
    compute_logits: Callable[..., Array]


class CompileCounter:
    """Counts XLA compilations in this process, whoever causes them."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        del duration_secs
        if event == _COMPILE_EVENT:
            self.count += 1


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device may still be running.

    Attributes:
        plan: what it computes.
        token_ids: i32 [S] on the device; row i belongs to `plan.scheduled[i]`.
    """

    plan: StepPlan
    token_ids: Int[Array, " S"]


class ModelRunner:
    """Owns the device state and one program per bucket; used by one thread."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        params: Any,
        kv_pages: tuple[Array, ...],
        replicated: jax.sharding.Sharding | None,
        store: ProgramStore | None,
    ) -> None:
        """Take parameters and pages as they lie on the devices; `warm_up` must follow.

        Args:
            model: forward pass and output head.
            config: resolved engine configuration: nothing in it is None or "auto".
            params: the model's parameters, sharded.
            kv_pages: per layer, [N, 2K, page, D]; owned (donated) from here on.
            replicated: sharding of what every device holds whole; None on a single device.
            store: where compiled programs are kept, or None.
        """
        assert config.max_model_len is not None
        assert config.page_size is not None
        self._model = model
        self._params = params
        self._replicated = replicated
        self._store = store
        self._table = SlotTable(
            num_slots=config.max_num_seqs,
            pages_per_seq=-(-config.max_model_len // config.page_size),
        )
        self._state = DeviceState(
            kv_pages=kv_pages,
            last_token_ids=jnp.zeros(config.max_num_seqs + 1, jnp.int32, device=replicated),
        )
        self._max_mixed_tokens = config.max_mixed_tokens
        self._buckets = make_buckets(
            max_num_seqs=config.max_num_seqs,
            max_mixed_tokens=config.max_mixed_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
        self._layouts = {
            bucket: PackedLayout(bucket, self._table.page_indices.shape[1])
            for bucket in self._buckets
        }
        self._programs: dict[Bucket, Any] = {}
        self._counter = CompileCounter()
        self._num_compiles_at_warmup = 0

    @property
    def num_compiles_after_warmup(self) -> int:
        """Compilations in this process since `warm_up` returned; must stay 0."""
        return self._counter.count - self._num_compiles_at_warmup

    def warm_up(self, report_progress: ProgressFn) -> None:
        """Load or compile every program; run those of decode steps once, on padding only.

        A first call costs milliseconds: much beside a decode step, nothing beside a long prompt.
        """
        for index, bucket in enumerate(self._buckets):
            report_progress("programs", index, len(self._buckets))
            self._programs[bucket] = self._load_program(bucket)
            if bucket.num_tokens <= self._max_mixed_tokens:
                self._run(bucket, self._padding(bucket)).block_until_ready()
        report_progress("programs", len(self._buckets), len(self._buckets))
        self._num_compiles_at_warmup = self._counter.count

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; returns before the device has finished it."""
        bucket = smallest_bucket(
            self._buckets, num_tokens=plan.num_tokens, num_seqs=len(plan.scheduled)
        )
        packed = pack_step(plan, self._layouts[bucket], self._table)
        return LaunchedStep(plan, self._run(bucket, packed))

    def fetch(self, step: LaunchedStep) -> list[int]:
        """Wait for a step; the sampled token of each scheduled sequence (junk if not `samples`)."""
        return np.asarray(step.token_ids)[: len(step.plan.scheduled)].tolist()

    def _run(self, bucket: Bucket, packed: npt.NDArray[np.int32]) -> Int[Array, " S"]:
        self._state, token_ids = self._programs[bucket](self._params, self._state, packed)
        return token_ids

    def _padding(self, bucket: Bucket) -> npt.NDArray[np.int32]:
        return pack_step(StepPlan(scheduled=(), num_tokens=0), self._layouts[bucket], self._table)

    def _load_program(self, bucket: Bucket) -> Any:
        def compile_() -> jax.stages.Compiled:
            return self.lower(bucket, self._params, self._state).compile()

        if self._store is None:
            return compile_()
        return self._store.load_or_compile(repr(bucket), compile_)

    def lower(self, bucket: Bucket, params: Any, state: DeviceState) -> jax.stages.Lowered:
        """Trace and lower the program of a bucket; shapes in place of arrays will do."""
        layout = self._layouts[bucket]

        def step(
            params: Any, state: DeviceState, packed: Int[Array, " words"]
        ) -> tuple[DeviceState, Int[Array, " S"]]:
            return self._step(params, state, packed, layout)

        packed = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=self._replicated)
        return jax.jit(step, donate_argnums=1).lower(params, state, packed)

    def _step(
        self,
        params: Any,
        state: DeviceState,
        packed: Int[Array, " words"],
        layout: PackedLayout,
    ) -> tuple[DeviceState, Int[Array, " S"]]:
        """The fused program: embed, layers, head, sample, update the slots. Traced."""
        batch = layout.unpack(packed)
        num_slots = self._table.num_slots
        token_ids = jnp.where(
            batch.token_slots < num_slots,
            state.last_token_ids[batch.token_slots],
            batch.inputs.token_ids,
        )
        inputs = batch.inputs._replace(token_ids=token_ids)
        hidden, kv_pages = self._model.forward(params, state.kv_pages, inputs)
        last_rows = jnp.maximum(batch.inputs.cu_q_lens[1:] - 1, 0)
        logits = self._model.compute_logits(params, hidden[last_rows])
        sampled = sample(logits, batch.sampling)
        last_token_ids = state.last_token_ids.at[batch.slots].set(sampled)
        return DeviceState(kv_pages, last_token_ids), sampled
