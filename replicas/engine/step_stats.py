"""What all steps together took and held, as counts that only grow; a microsecond a step.

Written by the device thread, read by any other: a reader may see a step half counted. Knows no
exporter. Bounds are of replicas/histograms.py.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Literal

from replicas.engine.buckets import Bucket
from replicas.histograms import INTER_TOKEN_BUCKETS_S

if TYPE_CHECKING:
    from replicas.engine.engine import StepTimes
    from replicas.engine.scheduler import StepPlan

StepKind = Literal["decode", "mixed"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed")
PHASES = ("schedule", "launch", "wait", "postprocess")


class StepStats:
    """Sums over the steps of an engine.

    Attributes:
        phase_s: seconds in each of PHASES.
        durations: for each kind of step, how many took so long: one count for each bound of
            INTER_TOKEN_BUCKETS_S, not cumulative, and one for the steps beyond the last.
        num_tokens: tokens that steps computed.
        num_token_rows: rows of their buckets' token dimension; the difference is padding.
        num_sequences: sequences in steps, a sequence counted once in each.
        num_sequence_rows: rows of their buckets' sequence dimension.
        num_steps: launches of each bucket.
    """

    __slots__ = (
        "_in_flight",
        "durations",
        "num_sequence_rows",
        "num_sequences",
        "num_steps",
        "num_token_rows",
        "num_tokens",
        "phase_s",
    )

    def __init__(self) -> None:
        self.phase_s = [0.0] * len(PHASES)
        self.durations: dict[StepKind, list[int]] = {
            kind: [0] * (len(INTER_TOKEN_BUCKETS_S) + 1) for kind in STEP_KINDS
        }
        self.num_tokens = 0
        self.num_token_rows = 0
        self.num_sequences = 0
        self.num_sequence_rows = 0
        self.num_steps: dict[Bucket, int] = {}
        self._in_flight: StepKind | None = None

    def add(self, times: StepTimes, plan: StepPlan | None, bucket: Bucket | None) -> None:
        """Count one turn of the engine, which launched `plan` and waited for the one before.

        Args:
            times: of the turn.
            plan: what it launched, or None.
            bucket: of that launch.
        """
        phase_s = self.phase_s
        phase_s[0] += times.schedule
        phase_s[1] += times.launch
        phase_s[2] += times.wait
        phase_s[3] += times.postprocess
        if self._in_flight is not None:
            self.durations[self._in_flight][bisect_left(INTER_TOKEN_BUCKETS_S, times.total)] += 1
        if plan is None or bucket is None:
            self._in_flight = None
            return
        num_sequences = len(plan.scheduled)
        is_decode = plan.num_tokens - plan.num_drafts == num_sequences
        self._in_flight = "decode" if is_decode else "mixed"
        self.num_tokens += plan.num_tokens
        self.num_token_rows += bucket.num_tokens
        self.num_sequences += num_sequences
        self.num_sequence_rows += bucket.num_seqs
        self.num_steps[bucket] = self.num_steps.get(bucket, 0) + 1
