"""All replicas of a router, as views to change and as arrays to decide by.

Pure. A decision looks at every replica; at a thousand of them only arrays are fast enough.
Invariant: after `refresh(view)` the arrays say what the view says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from app.router.replica_view import ReplicaView
from app.router.step_model import StepModel
from replicas.wire import ReplicaLoad

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]

SLOWNESS_WEIGHT = 0.05
MIN_FOREIGN_SHARE = 0.25
"""With fewer requests of others, these are our own that have just ended."""
KV_PRESSURE_FROM = 0.9
KV_PRESSURE_S = 1.0
"""Cost of filling a replica's pages from `KV_PRESSURE_FROM` to the last: it preempts beyond."""

MAX_TEACHERS = 64
"""The step model learns from as many reports as so many replicas send; of more replicas' reports it
takes a part. They come so fast that it would forget within milliseconds what it has seen."""

PREFILL_SHARE_S = 10.0
"""Window of `ReplicaView.prefill_share`."""

_COLUMNS = (
    "free_slots",
    "free_tokens",
    "outstanding",
    "booked_tokens",
    "foreign",
    "page_size",
    "calm_tokens",
    "pressure_s_per_token",
    "context",
    "coming_context",
    "decodes",
    "pending_tokens",
    "claimed_tokens",
    "loaded_at",
    "prefill_share",
    "step_s",
    "token_s",
    "half_pair_s",
    "free_at",
    "claimed_s",
)

EMPTY_ROW = np.zeros(len(_COLUMNS))
"""Of a row without a replica: counts for nothing."""


class Fleet:
    """The replicas that a router knows.

    Attributes:
        views: by replica id.
        model: how long steps take; shared, since all replicas run one model.
        is_routable: bool [rows]; rows without a replica, or of one that is drained, are False.
            Those have no `free_slots` either.
        drained: ids of replicas that get no new requests, whether they are known or not.
        Each name of `_COLUMNS` is an f64 [rows]: see `refresh`.
    """

    free_slots: Floats
    free_tokens: Floats
    outstanding: Floats
    booked_tokens: Floats
    foreign: Floats
    page_size: Floats
    calm_tokens: Floats
    pressure_s_per_token: Floats
    context: Floats
    coming_context: Floats
    decodes: Floats
    pending_tokens: Floats
    claimed_tokens: Floats
    loaded_at: Floats
    prefill_share: Floats
    step_s: Floats
    token_s: Floats
    half_pair_s: Floats
    free_at: Floats
    claimed_s: Floats

    def __init__(self, *, max_waiting_per_replica: int, model: StepModel | None = None) -> None:
        self.views: dict[str, ReplicaView] = {}
        self.drained: set[str] = set()
        self.model = model or StepModel()
        self._max_waiting = max_waiting_per_replica
        # Kept, since every decision asks: requests at all replicas, and of those, not ours.
        self._num_outstanding = 0
        self._num_foreign = 0
        self._counted: list[tuple[int, int]] = []
        self._num_untaught = 0  # reports since one that the model learned from
        self._view_of: list[ReplicaView | None] = []
        self._free_rows: list[int] = []
        self._table: Floats = np.zeros((len(_COLUMNS), 0))
        self.is_routable: Bools = np.zeros(0, np.bool_)
        self._grow(8)

    @property
    def num_rows(self) -> int:
        """Length of the arrays; at least the number of replicas."""
        return len(self._view_of)

    @property
    def has_routable(self) -> bool:
        """Whether any replica takes new requests."""
        return bool(np.count_nonzero(self.is_routable))  # several times as fast as any()

    def set_max_waiting(self, max_waiting: int) -> None:
        """Change how many requests each replica may get beyond its slots."""
        self._max_waiting = max_waiting
        for view in self.views.values():
            self.refresh(view)

    def add(self, replica_id: str) -> ReplicaView:
        """Return the replica's view, made when it is new."""
        view = self.views.get(replica_id)
        if view is None:
            if not self._free_rows:
                self._grow(2 * self.num_rows)
            view = ReplicaView(replica_id, self._free_rows.pop())
            self.views[replica_id] = view
            self._view_of[view.row] = view
            self.refresh(view)
        return view

    def remove(self, view: ReplicaView) -> None:
        """Forget a replica; its row is used again."""
        del self.views[view.replica_id]
        self._view_of[view.row] = None
        self.is_routable[view.row] = False
        self._count(view.row, 0, 0)
        self._table[:, view.row] = EMPTY_ROW
        self._free_rows.append(view.row)

    def view_of(self, row: int) -> ReplicaView:
        """Return the view of a row that has one."""
        view = self._view_of[row]
        assert view is not None, row
        return view

    def update(self, view: ReplicaView, load: ReplicaLoad, sequence: int, now: float) -> None:
        """Take a replica's load, and learn from the steps that it has made."""
        before = view.load
        self._num_untaught += 1
        ratio = None
        if before.num_steps:
            learns = self._num_untaught * MAX_TEACHERS >= len(self.views)
            ratio = self.model.observe(before, load, learns=learns)
            if learns:
                self._num_untaught = 0
        if ratio is not None:
            ratio = min(max(ratio, 0.1), 10.0)
            view.slowness *= math.exp(SLOWNESS_WEIGHT * math.log(ratio / view.slowness))
            costs = self.model.costs
            prefill_s = costs.token * (load.num_prefill_tokens - before.num_prefill_tokens)
            prefill_s += costs.pair * (load.num_prefill_pairs - before.num_prefill_pairs)
            elapsed = max(now - view.loaded_at, 1e-3)
            weight = 1 - math.exp(-elapsed / PREFILL_SHARE_S)
            share = min(1.0, prefill_s / elapsed)
            view.prefill_share += weight * (share - view.prefill_share)
        view.update(load, sequence, now)
        self.refresh(view)

    def refresh(self, view: ReplicaView) -> None:
        """Write a view that has changed into its row."""
        load, row = view.load, view.row
        free, num_pages = view.num_creditable_pages, load.num_pages or 1
        page_size = load.page_size or 1
        # Seconds at the model's present costs: a replica reports every second at least, so they
        # are never much older, and a decision need not work them out for every replica.
        costs, slowness = self.model.costs, view.slowness
        step_s = slowness * (costs.step + costs.context * load.num_decode_context_tokens)
        # A step takes as much of a prompt as `max_chunk_tokens` at its start would take time, so
        # fewer tokens far into it: how many steps a prompt needs goes by time, not by tokens.
        chunk_s = slowness * costs.token * load.max_chunk_tokens
        stretch = slowness * (1 + step_s / chunk_s if chunk_s else 1.0)
        token_s = stretch * costs.token
        pair_s = stretch * costs.pair
        pending = load.num_pending_prefill_tokens + load.num_waiting_tokens
        pending_s = token_s * pending + pair_s * load.num_pending_pairs
        claimed = view.num_claimed_tokens
        num_outstanding, num_foreign = view.num_outstanding, view.num_foreign
        if self._counted[row] != (num_outstanding, num_foreign):
            self._count(row, num_outstanding, num_foreign)
        is_routable = view.is_routable and view.replica_id not in self.drained
        self.is_routable[row] = is_routable
        self._table[:, row] = (
            view.free_slots(max_waiting=self._max_waiting) if is_routable else 0,
            free * load.page_size if num_outstanding and load.page_size else math.inf,
            num_outstanding,
            view.num_booked_tokens,
            num_foreign,
            load.page_size,
            page_size * (free - (1 - KV_PRESSURE_FROM) * num_pages),
            KV_PRESSURE_S / ((1 - KV_PRESSURE_FROM) * page_size * num_pages),
            load.num_decode_context_tokens,
            load.num_decode_context_tokens + pending + claimed,
            load.num_decodes,
            pending,
            claimed,
            view.loaded_at,
            view.prefill_share,
            step_s,
            token_s,
            0.5 * pair_s,
            view.loaded_at + pending_s,
            token_s * claimed + pair_s * view.num_claimed_pairs,
        )

    def has_pages_for(self, num_prompt_tokens: int) -> Bools:
        """Which rows have pages for a prompt, see `ReplicaView.has_pages_for`."""
        return self.free_tokens > num_prompt_tokens  # n // p + 1 <= free, in integers

    def unseen_prefill_s(self, now: float) -> float:
        """Estimate the prompts that other routers have sent since the replicas reported, seconds.

        From the share of the requests there that are not ours and the replicas' time on prompts.
        """
        foreign, outstanding = self._num_foreign, self._num_outstanding
        if foreign < MIN_FOREIGN_SHARE * outstanding or outstanding == 0:
            return 0.0
        busy = float(np.add.reduce(self.prefill_share))  # half the time of sum()
        if not busy:
            return 0.0
        age = now - float(np.add.reduce(self.loaded_at)) / len(self.views)
        return busy * age * foreign / outstanding

    def routable(self) -> Iterator[ReplicaView]:
        """Yield the replicas that can take requests; those that are drained can."""
        return (view for view in self.views.values() if view.is_routable)

    def _count(self, row: int, num_outstanding: int, num_foreign: int) -> None:
        before = self._counted[row]
        self._num_outstanding += num_outstanding - before[0]
        self._num_foreign += num_foreign - before[1]
        self._counted[row] = (num_outstanding, num_foreign)

    def _grow(self, num_rows: int) -> None:
        old = self.num_rows
        self._view_of += [None] * (num_rows - old)
        self._counted += [(0, 0)] * (num_rows - old)
        self._free_rows += range(num_rows - 1, old - 1, -1)
        table = np.tile(EMPTY_ROW[:, None], (1, num_rows))
        table[:, :old] = self._table
        self._table = table
        for name, column in zip(_COLUMNS, table, strict=True):
            setattr(self, name, column)
        self.is_routable = np.concatenate([self.is_routable, np.zeros(num_rows - old, np.bool_)])
