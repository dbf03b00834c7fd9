"""What every replica has cached, on its device and in the host tier behind it.

Pure. Two prefix indexes: a page that left the device for the tier is still held. Invariant: while
no replica has told of a tier, there is one index only, and everything held is on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.router.events import LoadChanged, ReplicaReported
from app.router.fleet import Floats
from app.router.prefix_index import PrefixIndex


class CachedPages:
    """The pages of all replicas, by the replicas' rows."""

    def __init__(self, *, max_keys: int) -> None:
        self._max_keys = max_keys
        self._held = PrefixIndex(max_keys=max_keys)
        self._on_device: PrefixIndex | None = None

    def __len__(self) -> int:
        return len(self._held)

    def replace(self, row: int, report: ReplicaReported) -> None:
        """Take a replica's snapshot instead of what was known of it."""
        self._held.replace(row, report.cached_pages)
        if report.offloaded_pages:
            self._track_tier()
            self._held.store(row, report.offloaded_pages)
        if self._on_device is not None:
            self._on_device.replace(row, report.cached_pages)

    def change(self, row: int, event: LoadChanged) -> None:
        """Take what became of a replica's pages."""
        cache, tier = event.cache, event.tier
        if tier is not None:
            self._track_tier()
            self._held.store(row, tier.stored)
        if cache.stored:
            self._held.store(row, cache.stored)
        if self._on_device is not None:
            self._on_device.store(row, cache.stored)
            self._on_device.drop(row, cache.dropped)
        if tier is not None:
            self._held.drop(row, tier.dropped)
        elif cache.dropped:
            self._held.drop(row, cache.dropped)

    def forget(self, row: int) -> None:
        """Forget a replica; its row may mean another one from now on."""
        self._held.forget(row)
        if self._on_device is not None:
            self._on_device.forget(row)

    def match(self, keys: Sequence[bytes], num_rows: int) -> tuple[Floats, Floats | None]:
        """Count the leading `keys` that each replica holds, and has on its device; f64 [num_rows].

        The second is None where nothing is held elsewhere.
        """
        held = self._held.match(keys, num_rows)
        return held, None if self._on_device is None else self._on_device.match(keys, num_rows)

    def _track_tier(self) -> None:
        if self._on_device is None:
            self._on_device = PrefixIndex(max_keys=self._max_keys)
