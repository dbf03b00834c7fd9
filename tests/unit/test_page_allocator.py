"""The page allocator keeps its invariant after every operation, and finds what it holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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


def test_pages_of_a_group_come_from_its_own_range():
    allocator = PageAllocator(12, num_groups=3)
    assert allocator.num_usable == 9
    assert allocator.max_per_sequence == 3
    assert allocator.allocate(4, group=1) is None
    pages = allocator.allocate(3, group=1)
    assert pages is not None
    assert sorted(pages) == [5, 6, 7], "page 4 is the null page of group 1"
    assert {allocator.group_of(page) for page in pages} == {1}
    assert (allocator.num_free_in(1), allocator.num_free) == (0, 6)
    allocator.check_integrity()


def test_a_sequence_goes_where_its_prefix_is_unless_it_does_not_fit_there():
    allocator, keys = PageAllocator(12, num_groups=3), chain(2)
    assert allocator.allocate(1, group=0) is not None
    pages = allocator.allocate(2, group=2)
    assert pages is not None
    for page, key in zip(pages, keys, strict=True):
        allocator.register(page, key)
    assert allocator.choose_group(keys, 3) == 2
    assert allocator.choose_group(keys, 4) == 2, "nowhere it fits: where most is held"
    assert allocator.match(keys, group=2) == pages
    assert allocator.match(keys, group=1) == []
    assert allocator.allocate(1, group=2) is not None
    assert allocator.choose_group(keys, 3) == 1, "the emptiest"


def test_a_key_ceases_to_be_findable_with_its_last_page():
    allocator, (key,) = PageAllocator(4, num_groups=2), chain(1)
    held = [allocator.allocate(1, group=group) for group in (0, 1)]
    for pages in held:
        assert pages is not None
        allocator.register(pages[0], key)
        allocator.release(pages)
    assert allocator.take_changes().stored == (key,)
    assert allocator.allocate(1, group=0) is not None
    assert allocator.take_changes().dropped == ()
    assert allocator.allocate(1, group=1) is not None
    assert allocator.take_changes().dropped == (key,)


class AllocatorMachine(RuleBasedStateMachine):
    """Random sequences that share prefixes come and go."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(12)
        self.held: list[list[int]] = []

    @initialize(num_groups=st.sampled_from([1, 2, 3]))
    def divide(self, num_groups):
        self.allocator = PageAllocator(12, num_groups=num_groups)

    @rule(branch=st.integers(0, 2), length=st.integers(1, 6))
    def start(self, branch, length):
        keys = chain(length, salt=str(branch))
        group = self.allocator.choose_group(keys, length)
        matched = self.allocator.match(keys, group=group)
        pages = self.allocator.allocate(length - len(matched), group=group)
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
