"""The device side of the engine: compiled programs, device state, launch and fetch.

Knows shapes and arrays, not requests or policy. Invariant: after warm-up nothing compiles, because
programs are called as compiled objects: an unknown shape is an error, never a stall.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int

from replicas.config import EngineConfig
from replicas.engine.adjustments import LOGPROBS, draw, slot_row_fields
from replicas.engine.buckets import MIN_ROWS, Bucket, make_buckets, smallest_bucket
from replicas.engine.engine import StepOutput
from replicas.engine.guided import (
    ApplyTokenMasks,
    GuidedDraw,
    GuidedLayout,
    GuidedState,
    HeldLogits,
    hold_logits,
    with_guided,
)
from replicas.engine.logprobs import compute_logprobs
from replicas.engine.program_store import LowerFn, ProgramStore
from replicas.engine.prompt_lookup import PromptLookup
from replicas.engine.scheduler import ScheduledSequence, StepPlan
from replicas.engine.speculation import VerifyLayout, text_shapes
from replicas.engine.step import DeviceState, PackedLayout, SlotTable, Texts, wants_logprobs
from replicas.models.kv_cache import KVPages, zeros

ProgressFn = Callable[[str, int, int], None]

_MANY_OUTPUTS = 64
"""Output rows above which draws of few of them have a program of their own."""

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True, slots=True)
class Model:
    """A model's traced functions, with configuration, kernels and mesh bound in.

    Attributes:
        forward: (params, kv_pages, inputs) -> (hidden [T, M], kv_pages).
        compute_logits: (params, hidden [R, M], rows in use [1]) -> f32 [R, V].
        apply_token_masks: see `kernels.token_masks`.
        vocab_size: V.
    """

    forward: Callable[..., tuple[Array, KVPages]]
    compute_logits: Callable[..., Array]
    apply_token_masks: ApplyTokenMasks
    vocab_size: int


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
        layout: knows how to read the output.
        output: i32, on the device; row i belongs to `plan.scheduled[i]`.
        logprobs: i32, on the device, by token row; see `compute_logprobs`.
        held: on the device, for a draw behind the step; None once that is launched, and without
            structured output.
        guided: of sequences whose tokens are drawn apart, those that were; None: none.
    """

    plan: StepPlan
    layout: PackedLayout | VerifyLayout
    output: Int[Array, "S ..."]
    logprobs: Int[Array, "T W"]
    held: HeldLogits | None
    guided: GuidedDraw | None = None


class ModelRunner:
    """Owns the device state and its programs, one per bucket first of all; used by one thread."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        *,
        params: Any,
        kv_pages: KVPages,
        replicated: jax.sharding.Sharding | None,
        store: ProgramStore | None,
    ) -> None:
        """Take parameters and pages as they lie on the devices; `warm_up` must follow.

        Where both are abstract (`jax.ShapeDtypeStruct`), programs can be lowered, not run.

        Args:
            model: forward pass and output head.
            config: resolved engine configuration: nothing in it is None or "auto".
            params: the model's parameters, sharded.
            kv_pages: as from `allocate_kv_pages`; owned (donated) from here on.
            replicated: sharding of what every device holds whole; None on a single device.
            store: where compiled programs are kept, or None.
        """
        assert config.max_model_len is not None
        assert config.page_size is not None
        self._model = model
        self._params = params
        self._replicated = replicated
        self._store = store
        self._xla_options = dict(config.xla_options)
        self._table = SlotTable(
            num_slots=config.max_num_seqs,
            pages_per_seq=-(-config.max_model_len // config.page_size),
            vocab_size=model.vocab_size,
        )
        last_token_ids: Any = jax.ShapeDtypeStruct(
            (config.max_num_seqs + 1,), jnp.int32, sharding=replicated
        )
        pages = jax.tree.leaves(kv_pages)[0]
        texts: Texts | None = None
        num_draft_rows = 0
        layout_of: Callable[[Bucket], PackedLayout | VerifyLayout]
        layout_of = functools.partial(PackedLayout, table=self._table)
        if config.speculation == "prompt_lookup":
            num_draft_rows = MIN_ROWS - 1  # drafts and the tokens before them fit MIN_ROWS
            layout_of = functools.partial(
                VerifyLayout,
                table=self._table,
                lookup=PromptLookup(
                    min_ngram=config.prompt_lookup_min,
                    max_ngram=config.prompt_lookup_max,
                    num_drafts=config.num_speculative_tokens,
                ),
            )
            texts = text_shapes(
                num_pages=pages.shape[-4],
                page_size=config.page_size,
                num_slots=config.max_num_seqs,
                sharding=replicated,
            )
        slot_rows: Any = jax.ShapeDtypeStruct(
            (config.max_num_seqs, slot_row_fields(model.vocab_size).size),
            jnp.int32,
            sharding=replicated,
        )
        slots = (last_token_ids, slot_rows, texts)
        if isinstance(pages, jax.Array):
            slots = zeros(slots)
        self._state = DeviceState(kv_pages, *slots)
        self._max_mixed_tokens = config.max_mixed_tokens
        self._buckets = make_buckets(
            max_num_seqs=config.max_num_seqs + num_draft_rows,
            max_mixed_tokens=config.max_mixed_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
            is_head_cost_fixed=config.platform == "tpu",
        )
        self._layouts = {bucket: layout_of(bucket) for bucket in self._buckets}
        self._guided_layouts = self._lay_out_guided(config) if config.structured_output else {}
        self._programs: dict[Bucket, Any] = {}
        self._guided_programs: dict[str, Any] = {}
        self._write_slot: Any = None
        self._last_bucket: Bucket | None = None
        self._counter = CompileCounter()
        self._num_compiles_at_warmup = 0

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Shapes of all programs, smallest first."""
        return self._buckets

    @property
    def programs(self) -> Mapping[str, LowerFn]:
        """What `warm_up` loads or compiles, by name, each with what traces it."""
        steps = {str(b): functools.partial(self.lower, b) for b in self._buckets}
        guided = {n: functools.partial(self._lower_guided, n) for n in self._guided_layouts}
        return {**steps, **guided}

    @property
    def last_bucket(self) -> Bucket | None:
        """What the latest launch was padded to; None before the first."""
        return self._last_bucket

    @property
    def num_compiles_after_warmup(self) -> int:
        """Compilations in this process since `warm_up` returned; must stay 0."""
        return self._counter.count - self._num_compiles_at_warmup

    def warm_up(self, report_progress: ProgressFn) -> None:
        """Load or compile every program; run those of decode steps once, on padding only.

        A first call costs milliseconds: much beside a decode step, nothing beside a long prompt.
        """
        num_programs = len(self.programs)
        for index, bucket in enumerate(self._buckets):
            report_progress("programs", index, num_programs)
            self._programs[bucket] = self._load_program(str(bucket))
            if bucket.num_tokens <= self._max_mixed_tokens:
                jax.block_until_ready(self._run(bucket, self._padding(bucket)))
        for index, (name, layout) in enumerate(self._guided_layouts.items(), len(self._buckets)):
            report_progress("programs", index, num_programs)
            self._guided_programs[name] = self._load_program(name)
            nothing = zeros(layout.held_shapes(self._replicated))
            jax.block_until_ready(self._run_guided(layout, nothing, ()))
        # Small enough to compile at every start.
        self._write_slot = self.compile(self._lower_write_slot())
        report_progress("programs", num_programs, num_programs)
        if self._store is not None:
            self._store.save_index()
        self._num_compiles_at_warmup = self._counter.count

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step; returns before the device has finished it."""
        bucket = smallest_bucket(
            self._buckets,
            num_tokens=plan.num_tokens,
            num_seqs=len(plan.scheduled) + plan.num_drafts,
        )
        self._last_bucket = bucket
        layout = self._layouts[bucket]
        packed = layout.pack(plan)
        for row in self._table.take_new_rows():
            slot_rows = self._write_slot(self._state.slot_rows, row)
            self._state = self._state._replace(slot_rows=slot_rows)
        return LaunchedStep(plan, layout, *self._run(bucket, packed))

    def draw_guided(self, step: LaunchedStep, indices: tuple[int, ...]) -> LaunchedStep:
        """Start the draw of guided sequences of the latest step, behind it.

        Works out the masks: the tokens before must be known to the sequences' matchers.

        Args:
            step: still running, most likely.
            indices: places among its scheduled sequences.
        """
        assert step.held is not None
        parts = [step.plan.scheduled[index] for index in indices]
        layout = next(
            layout
            for layout in self._guided_layouts.values()
            if layout.num_outputs == step.held.logits.shape[0] and layout.num_rows >= len(parts)
        )
        drawn = GuidedDraw(indices, *self._run_guided(layout, step.held, parts))
        return dataclasses.replace(step, guided=drawn, held=None)

    def fetch(self, step: LaunchedStep) -> StepOutput:
        """Wait for a step; the new tokens of each scheduled sequence (junk if not `samples`).

        Junk too is the token of a guided sequence that `draw_guided` was not asked for.
        """
        if step.guided is not None:  # the last to be ready: one wake-up instead of two
            step.guided.token_ids.block_until_ready()
        logprobs = np.asarray(step.logprobs) if wants_logprobs(step.plan) else None
        output = np.asarray(step.output)[: len(step.plan.scheduled)]
        read = step.layout.read(step.plan, output, logprobs)
        return read if step.guided is None else with_guided(step.plan, read, step.guided)

    def _run(
        self, bucket: Bucket, packed: npt.NDArray[np.int32]
    ) -> tuple[Int[Array, "S ..."], Int[Array, "T W"], HeldLogits | None]:
        self._state, *outputs = self._programs[bucket](self._params, self._state, packed)
        output, logprobs, held = outputs
        return output, logprobs, held

    def _run_guided(
        self, layout: GuidedLayout, held: HeldLogits, parts: Sequence[ScheduledSequence]
    ) -> tuple[Int[Array, " N"], Int[Array, "N W"]]:
        state = GuidedState(self._state.last_token_ids, self._state.slot_rows)
        program = self._guided_programs[str(layout)]
        state, token_ids, logprobs = program(state, held, layout.pack(parts))
        self._state = self._state._replace(**state._asdict())
        return token_ids, logprobs

    def _padding(self, bucket: Bucket) -> npt.NDArray[np.int32]:
        return self._layouts[bucket].pack(StepPlan(scheduled=(), num_tokens=0))

    def _load_program(self, name: str) -> Any:
        lower = self.programs[name]
        if self._store is None:
            return self.compile(lower())
        return self._store.load_or_compile(name, lower, self.compile)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        """Compile a program with the configuration's options for the compiler."""
        return lowered.compile(compiler_options=self._xla_options or None)

    def lower(self, bucket: Bucket) -> jax.stages.Lowered:
        """Trace the program of a bucket; reads shapes only, so that abstract weights do."""
        layout = self._layouts[bucket]

        def step(
            params: Any, state: DeviceState, packed: Int[Array, " words"]
        ) -> tuple[DeviceState, Int[Array, "S ..."], Int[Array, "T W"], HeldLogits | None]:
            return self._step(params, state, packed, layout)

        packed = jax.ShapeDtypeStruct((layout.fields.size,), jnp.int32, sharding=self._replicated)
        return jax.jit(step, donate_argnums=1).lower(self._params, self._state, packed)

    def _step(
        self,
        params: Any,
        state: DeviceState,
        packed: Int[Array, " words"],
        layout: PackedLayout | VerifyLayout,
    ) -> tuple[DeviceState, Int[Array, "S ..."], Int[Array, "T W"], HeldLogits | None]:
        """The fused program: embed, layers, head, sample, update the slots. Traced."""
        rows = layout.begin(state, packed)
        hidden, kv_pages = self._model.forward(params, state.kv_pages, rows.inputs)
        logits = self._model.compute_logits(params, hidden[rows.output_rows], rows.num_outputs)
        sampled = draw(logits, rows.sampling, rows.outputs, state.slot_rows)
        logprobs = compute_logprobs(
            logits=logits,
            drawn=sampled,
            output_rows=rows.output_rows,
            is_wanted=rows.outputs.have(LOGPROBS),
            hidden=hidden,
            targets=rows.targets,
            head=functools.partial(self._model.compute_logits, params),
        )
        held: HeldLogits | None = None
        if self._guided_layouts:
            held = hold_logits(logits, rows.outputs, num_slots=self._table.num_slots)
        state, output = rows.finish(
            state._replace(kv_pages=kv_pages), sampled, vocab_size=self._model.vocab_size
        )
        return state, output, logprobs, held

    def _lower_guided(self, name: str) -> jax.stages.Lowered:
        """Trace the program of a guided draw."""
        state = GuidedState(self._state.last_token_ids, self._state.slot_rows)
        return self._guided_layouts[name].lower(state, self._replicated)

    def _lay_out_guided(self, config: EngineConfig) -> dict[str, GuidedLayout]:
        """Draws behind the steps of every number of output rows.

        Where those are many, one for few sequences too: a mask takes V / 8 bytes a row, which are
        sent to the device for every draw.
        """
        layouts: dict[str, GuidedLayout] = {}
        for num_outputs in sorted({bucket.num_seqs for bucket in self._buckets}):
            most = min(num_outputs, config.max_num_seqs)
            sizes = {-(-most // MIN_ROWS) * MIN_ROWS}
            if num_outputs > _MANY_OUTPUTS:
                sizes.add(MIN_ROWS)
            for size in sorted(sizes):
                layout = GuidedLayout(
                    size,
                    num_outputs=num_outputs,
                    table=self._table,
                    apply_token_masks=self._model.apply_token_masks,
                )
                layouts[str(layout)] = layout
        return layouts

    def _lower_write_slot(self) -> jax.stages.Lowered:
        """Trace the program that takes the row of a sequence that has got a slot."""

        def write(
            slot_rows: Int[Array, "slots W"], packed: Int[Array, " 1+W"]
        ) -> Int[Array, "slots W"]:
            return slot_rows.at[packed[0]].set(packed[1:])

        num_words = 1 + slot_row_fields(self._model.vocab_size).size
        packed = jax.ShapeDtypeStruct((num_words,), jnp.int32, sharding=self._replicated)
        return jax.jit(write, donate_argnums=0).lower(self._state.slot_rows, packed)
