"""The page allocator keeps its invariant after every operation, and finds what it holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replicas.engine.page_allocator import NULL_PAGE, PageAllocator
from replicas.page_keys import hash_page, hash_root


def chain(length: int, salt: str = "") -> list[bytes]:
    keys, key = [], hash_root("model", salt)
    for i in range(length):
        key = hash_page(key, bytes([i]))
        keys.append(key)
    return keys


def test_null_page_is_never_allocated():
    allocator = PageAllocator(5)
    pages = allocator.allocate(4)
    assert pages is not None
    assert sorted(pages) == [1, 2, 3, 4]
    assert NULL_PAGE not in pages


def test_allocation_beyond_capacity_takes_nothing():
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None
    assert allocator.num_free == 3


def test_released_content_is_found_until_evicted_leaf_first():
    allocator, keys = PageAllocator(4), chain(3)
    pages = allocator.allocate(3)
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        allocator.register(page, key)
    allocator.release(pages)
    assert allocator.num_free == 3

    taken = allocator.allocate(1)
    assert taken == [pages[2]], "the leaf goes first"
    assert allocator.match(keys) == pages[:2]


def test_match_takes_the_longest_prefix_and_counts_references():
    allocator, keys = PageAllocator(8), chain(4)
    pages = allocator.allocate(2)
    assert pages is not None
    for page, key in zip(pages, keys[:2], strict=True):
        allocator.register(page, key)
    assert allocator.match(keys) == pages
    allocator.release(pages)
    assert allocator.num_cached == 0, "still referenced once"
    allocator.release(pages)
    assert allocator.num_cached == 2


def test_first_page_of_a_key_wins():
    allocator, (key,) = PageAllocator(4), chain(1)
    pages = allocator.allocate(2)
    assert pages is not None
    allocator.register(pages[0], key)
    allocator.register(pages[1], key)
    assert allocator.match([key]) == [pages[0]]


def test_without_prefix_caching_nothing_is_found():
    allocator, (key,) = PageAllocator(4, enable_prefix_caching=False), chain(1)
    pages = allocator.allocate(1)
    assert pages is not None
    allocator.register(pages[0], key)
    allocator.release(pages)
    assert allocator.match([key]) == []


def test_keys_differ_by_salt_and_by_everything_before():
    assert chain(2) != chain(2, salt="tenant")
    root = hash_root("model")
    assert hash_page(hash_page(root, b"a"), b"b") != hash_page(hash_page(root, b"c"), b"b")


def test_drop_cache_forgets_unreferenced_pages_only():
    allocator, keys = PageAllocator(8), chain(2)
    held = allocator.allocate(1)
    loose = allocator.allocate(1)
    assert held is not None
    assert loose is not None
    allocator.register(held[0], keys[0])
    allocator.register(loose[0], keys[1])
    allocator.release(loose)
    assert allocator.drop_cache() == 1
    assert allocator.match(keys) == held
    allocator.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """Random sequences that share prefixes come and go."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(12)
        self.held: list[list[int]] = []

    @rule(branch=st.integers(0, 2), length=st.integers(1, 6))
    def start(self, branch, length):
        keys = chain(length, salt=str(branch))
        matched = self.allocator.match(keys)
        pages = self.allocator.allocate(length - len(matched))
        if pages is None:
            self.allocator.release(matched)
            return
        held = matched + pages
        for page, key in zip(held, keys, strict=True):
            self.allocator.register(page, key)
        self.held.append(held)

    @rule(data=st.data())
    def finish(self, data):
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.allocator.release(self.held.pop(index))

    @invariant()
    def integrity(self):
        self.allocator.check_integrity()
        held = {page for pages in self.held for page in pages}
        assert self.allocator.num_free == self.allocator.num_usable - len(held)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
