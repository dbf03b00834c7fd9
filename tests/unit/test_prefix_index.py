"""The prefix index against a dictionary of sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from app.router.prefix_index import PrefixIndex
from replicas.page_keys import hash_page, hash_prompt, hash_root

KEYS = [bytes([n]) for n in range(12)]
ROWS = 5
keys = st.lists(st.sampled_from(KEYS), max_size=6)
rows = st.integers(0, ROWS - 1)


class IndexMachine(RuleBasedStateMachine):
    """Any order of reports; the model is one set of keys a row."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(max_keys=1000)
        self.held: dict[int, set[bytes]] = {row: set() for row in range(ROWS)}

    @rule(row=rows, stored=keys)
    def store(self, row: int, stored: list[bytes]) -> None:
        self.index.store(row, stored)
        self.held[row] |= set(stored)

    @rule(row=rows, dropped=keys)
    def drop(self, row: int, dropped: list[bytes]) -> None:
        self.index.drop(row, dropped)
        self.held[row] -= set(dropped)

    @rule(row=rows, snapshot=keys)
    def replace(self, row: int, snapshot: list[bytes]) -> None:
        self.index.replace(row, snapshot)
        self.held[row] = set(snapshot)

    @rule(row=rows, times=st.sampled_from([1, 200]))
    def forget(self, row: int, times: int) -> None:
        for _ in range(times):  # many: dead columns are swept
            self.index.store(row, KEYS[:1])
            self.index.forget(row)
        self.held[row] = set()

    @rule(prompt=keys)
    def match(self, prompt: list[bytes]) -> None:
        hits = self.index.match(prompt, ROWS).tolist()
        for row in range(ROWS):
            depth = 0
            while depth < len(prompt) and prompt[depth] in self.held[row]:
                depth += 1
            assert hits[row] == depth

    @invariant()
    def each_key_alone_matches(self) -> None:
        for key in KEYS:
            hits = self.index.match([key], ROWS).tolist()
            assert hits == [int(key in self.held[row]) for row in range(ROWS)]


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("step", [1, -1, 7])
def test_many_replicas_are_told_apart_in_whatever_order_they_came(step: int) -> None:
    index = PrefixIndex()
    for place in range(1000):
        row = place * step % 1000
        index.store(row, [b"everyone", *([b"odd"] if row % 2 else [])])
    index.store(7, [b"seven"])
    hits = index.match([b"everyone", b"odd", b"seven"], 1000)
    assert hits[7] == 3
    assert set(hits[1::2].tolist()) == {2, 3}
    assert set(hits[::2].tolist()) == {1}
    index.forget(500)
    index.store(999, [b"more"])
    index.drop(3, [b"odd"])
    hits = index.match([b"everyone", b"odd"], 1000)
    assert (hits[500], hits[3], hits[999]) == (0, 1, 2)


def test_it_is_bounded_and_keeps_what_is_looked_up() -> None:
    index = PrefixIndex(max_keys=100)
    index.store(0, [b"system prompt"])
    for number in range(1000):
        index.store(0, [number.to_bytes(4)])
        assert index.match([b"system prompt"], 1).tolist() == [1]
        assert len(index) <= 101
    assert index.match([(0).to_bytes(4)], 1).tolist() == [0]


def test_a_prompts_keys_leave_its_last_token_out_and_depend_on_the_salt() -> None:
    tokens = tuple(range(40))
    root = hash_root("model", "salt")
    chain = hash_prompt(root, tokens, page_size=16)
    first = hash_page(root, b"".join(t.to_bytes(4, "little") for t in range(16)))
    assert len(chain) == 2
    assert chain[0] == first
    assert len(hash_prompt(root, tokens[:32], page_size=16)) == 1
    assert len(hash_prompt(root, tokens[:33], page_size=16)) == 2
    assert not set(chain) & set(hash_prompt(hash_root("model", ""), tokens, page_size=16))
