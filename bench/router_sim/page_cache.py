"""The pages of a modelled replica: counted, referenced, cached by key, with a host tier behind.

Behaves like `replicas.engine.page_allocator`, but counts pages where that one numbers them.
Invariant: private + referenced + cached pages never exceed the capacity.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PageKey = bytes


class PageCache:
    """Prefix cache of one replica.

    Attributes:
        num_pages: capacity.
        num_private: pages in use that cannot be found by key.
        stored, dropped: keys that became findable on the device or ceased to, since `take_changes`.
    """

    def __init__(self, num_pages: int, *, num_host_pages: int = 0) -> None:
        self.num_pages = num_pages
        self.num_private = 0
        self._num_host_pages = num_host_pages
        self._refs: dict[PageKey, int] = {}
        self._cached: OrderedDict[PageKey, None] = OrderedDict()
        self._host: OrderedDict[PageKey, None] = OrderedDict()
        self._changes: dict[PageKey, bool] = {}
        self._host_changes: dict[PageKey, bool] = {}

    @property
    def has_tier(self) -> bool:
        """Whether evicted pages go to host memory."""
        return self._num_host_pages > 0

    @property
    def num_free(self) -> int:
        """Pages that could be taken, evictable ones included."""
        return self.num_pages - self.num_private - len(self._refs)

    def match(self, keys: Sequence[PageKey]) -> tuple[int, int]:
        """Length of the longest prefix on the device, and on device or host."""
        refs, cached = self._refs, self._cached
        depth = 0
        for key in keys:
            if key not in refs and key not in cached:
                break
            depth += 1
        held = depth
        if self._host:
            for key in keys[depth:]:
                if key not in self._host and key not in refs and key not in cached:
                    break
                held += 1
        return depth, held

    def take(self, keys: Sequence[PageKey], num_private: int) -> bool:
        """Reference `keys`, all on the device, and take private pages; False when too few."""
        newly = [key for key in keys if key not in self._refs]
        if len(newly) + num_private > self.num_free:
            return False
        for key in newly:
            del self._cached[key]
            self._refs[key] = 0
        for key in keys:
            self._refs[key] += 1
        self.num_private += num_private
        while self.num_private + len(self._refs) + len(self._cached) > self.num_pages:
            self._evict()
        return True

    def register(self, key: PageKey) -> bool:
        """Make a private page findable, referenced once; False when the key is held already."""
        if key in self._refs or key in self._cached:
            return False
        self.num_private -= 1
        self._refs[key] = 1
        self._changes[key] = True
        return True

    def release(self, keys: Sequence[PageKey], num_private: int) -> None:
        """Give pages back; found ones stay cached, the first page longest."""
        refs = self._refs
        for key in reversed(keys):
            left = refs[key] - 1
            if left:
                refs[key] = left
            else:
                del refs[key]
                self._cached[key] = None
        self.num_private -= num_private

    def take_changes(self) -> tuple[tuple[PageKey, ...], ...]:
        """Device pages stored and dropped, and host pages likewise, since the last call."""
        parts: list[tuple[PageKey, ...]] = []
        for changes in (self._changes, self._host_changes):
            if not changes:
                parts += ((), ())
                continue
            stored = tuple([key for key, is_held in changes.items() if is_held])
            is_all = len(stored) == len(changes)
            dropped = () if is_all else tuple([key for key, held in changes.items() if not held])
            parts += (stored, dropped)
            changes.clear()
        return tuple(parts)

    def snapshot(self) -> tuple[tuple[PageKey, ...], tuple[PageKey, ...]]:
        """All keys on the device, and those on the host."""
        return (*self._refs, *self._cached), tuple(self._host)

    def check(self) -> None:
        """Assert the invariant."""
        used = self.num_private + len(self._refs) + len(self._cached)
        assert self.num_private >= 0
        assert used <= self.num_pages
        assert not self._refs.keys() & self._cached.keys()

    def _evict(self) -> None:
        key, _ = self._cached.popitem(last=False)
        self._changes[key] = False
        if not self._num_host_pages:
            return
        self._host[key] = None
        self._host.move_to_end(key)
        self._host_changes[key] = True
        if len(self._host) > self._num_host_pages:
            lost, _ = self._host.popitem(last=False)
            if lost in self._refs or lost in self._cached:
                return  # a copy is on the device: it goes to the host again when evicted
            self._host_changes[lost] = False
