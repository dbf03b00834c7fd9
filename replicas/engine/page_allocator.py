"""Pages of the KV cache: which are free, which are referenced, which can be found by content.

Knows page ids and content keys, not sequences, tokens or arrays. Invariant: every page except the
null page is in exactly one of three states: free, cached (unreferenced, findable by key, evictable)
or referenced (by one or more sequences, findable when its content is registered). Pages may be
divided into groups, one a device, where a device can only reach its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf

from replicas.page_keys import PageKey
from replicas.wire import CacheChange

NULL_PAGE = 0
"""Target of padded writes; never allocated. Each group has one, its first page."""


class PageAllocator:
    """Reference-counted pages with a prefix cache of unreferenced ones.

    Unreferenced pages with registered content are evicted least recently used first; since a
    sequence releases its pages last to first, leaves of a prefix tree go before their parents. The
    pages of a sequence are all of one group, and so is the prefix that it can find.
    """

    def __init__(
        self, num_pages: int, *, num_groups: int = 1, enable_prefix_caching: bool = True
    ) -> None:
        """Own pages [0, num_pages), group g as many of them from g num_pages / num_groups on."""
        assert num_pages % num_groups == 0, f"{num_pages} pages in {num_groups} groups"
        self.num_pages = num_pages
        self.num_groups = num_groups
        self._enable_prefix_caching = enable_prefix_caching
        self._group_size = size = num_pages // num_groups
        self._free = [
            list(range((group + 1) * size - 1, group * size, -1)) for group in range(num_groups)
        ]
        self._num_refs = [0] * num_pages
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_groups)]
        self._key_of: dict[int, PageKey] = {}
        self._page_of: list[dict[PageKey, int]] = [{} for _ in range(num_groups)]
        self._changes: dict[PageKey, bool] = {}

    @property
    def num_usable(self) -> int:
        """Pages in all, without the null pages."""
        return self.num_pages - self.num_groups

    @property
    def max_per_sequence(self) -> int:
        """Pages that one sequence can have at most: those of a group."""
        return self._group_size - 1

    @property
    def num_free(self) -> int:
        """Pages that allocations could take: free ones and evictable ones, of all groups."""
        return sum(map(self.num_free_in, range(self.num_groups)))

    @property
    def num_cached(self) -> int:
        """Unreferenced pages that are kept for their content."""
        return sum(map(len, self._cached))

    def num_free_in(self, group: int) -> int:
        """Pages that an allocation in a group could take."""
        return len(self._free[group]) + len(self._cached[group])

    def group_of(self, page: int) -> int:
        """Return the group of a page."""
        return page // self._group_size

    def choose_group(self, keys: SequenceOf[PageKey], count: int) -> int:
        """Return where a new sequence of `count` pages should go.

        Where they fit, if anywhere; then where most of its prefix is held; then where most is free.
        """
        if self.num_groups == 1:
            return 0

        def rank(group: int) -> tuple[bool, int, int]:
            held, num_free = self._page_of[group], self.num_free_in(group)
            num_held = next((i for i, key in enumerate(keys) if key not in held), len(keys))
            return count - num_held <= num_free, num_held, num_free

        return max(range(self.num_groups), key=rank)

    def allocate(self, count: int, *, group: int = 0) -> list[int] | None:
        """Take `count` pages with unspecified content, each referenced once; None if too few."""
        if count > self.num_free_in(group):
            return None
        free, pages = self._free[group], list[int]()
        for _ in range(count):
            page = free.pop() if free else self._evict(group)
            self._num_refs[page] = 1
            pages.append(page)
        return pages

    def match(self, keys: SequenceOf[PageKey], *, group: int = 0) -> list[int]:
        """Reference and return the pages of the longest prefix of `keys` that is held."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of[group].get(key)
            if page is None:
                break
            if self._num_refs[page] == 0:
                del self._cached[group][page]
            self._num_refs[page] += 1
            pages.append(page)
        return pages

    def register(self, page: int, key: PageKey) -> None:
        """Make the content of a referenced page findable; the first page of a key wins."""
        assert self._num_refs[page] > 0, f"page {page} is not referenced"
        page_of = self._page_of[self.group_of(page)]
        if self._enable_prefix_caching and key not in page_of and page not in self._key_of:
            page_of[key] = page
            self._key_of[page] = key
            self._changes[key] = True

    def release(self, pages: SequenceOf[int]) -> None:
        """Drop one reference of each page, last page first."""
        for page in reversed(pages):
            assert self._num_refs[page] > 0, f"page {page} is released too often"
            self._num_refs[page] -= 1
            if self._num_refs[page] == 0:
                group = self.group_of(page)
                if page in self._key_of:
                    self._cached[group][page] = None
                else:
                    self._free[group].append(page)

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
        count = self.num_cached
        for group, cached in enumerate(self._cached):
            while cached:
                self._free[group].append(self._evict(group))
        return count

    def _evict(self, group: int) -> int:
        page, _ = self._cached[group].popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[group][key]
        self._changes[key] = any(key in page_of for page_of in self._page_of)
        return page

    def check_integrity(self) -> None:
        """Assert the module's invariant; linear in the number of pages."""
        null_pages = set(range(0, self.num_pages, self._group_size))
        pages = set(range(self.num_pages)) - null_pages
        free = {page for group in self._free for page in group}
        cached = {page for group in self._cached for page in group}
        referenced = {page for page in pages if self._num_refs[page] > 0}
        assert len(free) == sum(map(len, self._free)), "a page is free twice"
        assert not free & cached
        assert not (free | cached) & referenced
        assert free | cached | referenced == pages
        assert all(self._num_refs[page] == 0 for page in null_pages)
        assert all(page in self._key_of for page in cached)
        assert not any(page in self._key_of for page in free)
        for group in range(self.num_groups):
            held = {*self._free[group], *self._cached[group], *self._page_of[group].values()}
            assert all(self.group_of(page) == group for page in held)
        assert self._key_of == {p: k for page_of in self._page_of for k, p in page_of.items()}
