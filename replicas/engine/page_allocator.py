"""Pages of the KV cache: which are free, which are referenced, which can be found by content.

Knows page ids and content keys, not sequences, tokens or arrays. Invariant: every page except the
null page is in exactly one of three states: free, cached (unreferenced, findable by key, evictable)
or referenced (by one or more sequences, findable when its content is registered).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from replicas.page_keys import PageKey
from replicas.wire import CacheChange

NULL_PAGE = 0
"""Target of padded writes; never allocated."""


class PageAllocator:
    """Reference-counted pages with a prefix cache of unreferenced ones.

    Unreferenced pages with registered content are evicted least recently used first; since a
    sequence releases its pages last to first, leaves of a prefix tree go before their parents.
    """

    def __init__(self, num_pages: int, *, enable_prefix_caching: bool = True) -> None:
        """Own pages [1, num_pages); page 0 is the null page."""
        self.num_pages = num_pages
        self._enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_pages - 1, NULL_PAGE, -1))
        self._num_refs = [0] * num_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, PageKey] = {}
        self._page_of: dict[PageKey, int] = {}
        self._changes: dict[PageKey, bool] = {}

    @property
    def num_usable(self) -> int:
        """Pages in all, without the null page."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages that an allocation could take: free ones and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced pages that are kept for their content."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` pages with unspecified content, each referenced once; None if too few."""
        if count > self.num_free:
            return None
        pages: list[int] = []
        for _ in range(count):
            page = self._free.pop() if self._free else self._evict()
            self._num_refs[page] = 1
            pages.append(page)
        return pages

    def match(self, keys: SequenceOf[PageKey]) -> list[int]:
        """Reference and return the pages of the longest prefix of `keys` that is held."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            if self._num_refs[page] == 0:
                del self._cached[page]
            self._num_refs[page] += 1
            pages.append(page)
        return pages

    def register(self, page: int, key: PageKey) -> None:
        """Make the content of a referenced page findable; the first page of a key wins."""
        assert self._num_refs[page] > 0, f"page {page} is not referenced"
        if self._enable_prefix_caching and key not in self._page_of and page not in self._key_of:
            self._page_of[key] = page
            self._key_of[page] = key
            self._changes[key] = True

    def release(self, pages: SequenceOf[int]) -> None:
        """Drop one reference of each page, last page first."""
        for page in reversed(pages):
            assert self._num_refs[page] > 0, f"page {page} is released too often"
            self._num_refs[page] -= 1
            if self._num_refs[page] == 0:
                if page in self._key_of:
                    self._cached[page] = None
                else:
                    self._free.append(page)

    def take_changes(self) -> CacheChange:
        """Return which keys became findable and which ceased to, since the last call."""
        if not self._changes:
            return CacheChange()
        stored = tuple(key for key, is_held in self._changes.items() if is_held)
        dropped = tuple(key for key, is_held in self._changes.items() if not is_held)
        self._changes.clear()
        return CacheChange(stored, dropped)

    def drop_cache(self) -> int:
        """Forget the content of all unreferenced pages; returns how many there were."""
        count = len(self._cached)
        while self._cached:
            self._free.append(self._evict())
        return count

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        self._changes[key] = False
        return page

    def check_integrity(self) -> None:
        """Assert the module's invariant; linear in the number of pages."""
        free, cached = set(self._free), set(self._cached)
        referenced = {p for p in range(1, self.num_pages) if self._num_refs[p] > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached
        assert not (free | cached) & referenced
        assert free | cached | referenced == set(range(1, self.num_pages))
        assert self._num_refs[NULL_PAGE] == 0
        assert all(page in self._key_of for page in cached)
        assert not any(page in self._key_of for page in free)
        assert {k: p for p, k in self._key_of.items()} == self._page_of
