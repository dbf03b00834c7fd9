"""Which replicas hold which pages: page key -> set of replicas, as ints used as bitmasks.

Pure. Follows what the replicas report; a decision takes one lookup per page of the prompt, whatever
the number of replicas. Invariant: a key that the index forgot costs a missed hit, never a wrong
one beyond what an event in flight can explain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

DEFAULT_MAX_KEYS = 1 << 20
MIN_DEAD_COLUMNS = 64
MAX_LISTED_BITS = 12
"""A mask with at most so many bits is taken apart bit by bit, a fuller one as an array."""


class PrefixIndex:
    """Inverted index of page keys, bounded in keys.

    A replica is a *row*, a small int that the caller chose. Inside it has a *column*, its bit. When
    a replica is forgotten its column dies: dead bits are masked out of every answer, and swept out
    of the entries once there are many dead columns.

    An entry is an int: `>= 0` is the only column that holds the key (three pages of four are used
    once, and a small int is cheap), `< 0` is minus the bitmask of several.

    Keys live in two generations. A lookup moves a key into the young one; when that is half of the
    bound, the old one is dropped with all that was not looked up since.
    """

    def __init__(self, *, max_keys: int = DEFAULT_MAX_KEYS) -> None:
        self._max_young = max(1, max_keys // 2)
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}
        self._column_of: dict[int, int] = {}
        self._bits: list[int] = []
        self._free: list[int] = []
        self._live = 0
        self._num_dead = 0
        self._num_moved = 0  # live columns that are not at their row's own place
        self._row_of: npt.NDArray[np.int64] = np.full(64, -1, np.int64)
        self._is_live: npt.NDArray[np.float64] | None = None  # 1 at live rows, once asked for

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def store(self, row: int, keys: Iterable[bytes]) -> None:
        """Note that the replica holds these pages."""
        column = self._column(row)
        bit = self._bits[column]
        young, old, live = self._young, self._old, self._live
        for key in keys:
            entry = young.get(key)
            if entry is None:
                entry = old.pop(key, None)
            if entry is None or entry == column:
                young[key] = column
            elif entry >= 0:
                held = self._bits[entry] & live
                young[key] = -(held | bit) if held else column
            else:
                young[key] = -((-entry & live) | bit)
        if len(young) > self._max_young:
            self._old, self._young = young, {}

    def drop(self, row: int, keys: Iterable[bytes]) -> None:
        """Note that the replica no longer holds these pages."""
        column = self._column(row)
        bit = self._bits[column]
        for key in keys:
            generation = self._young if key in self._young else self._old
            entry = generation.get(key)
            if entry is None:
                continue
            if entry >= 0:
                if entry == column:
                    del generation[key]
                continue
            self._put(generation, key, -entry & ~bit & self._live)

    def replace(self, row: int, keys: Iterable[bytes]) -> None:
        """Forget what was known of the replica and take a snapshot instead."""
        self.forget(row)
        self.store(row, keys)

    def forget(self, row: int) -> None:
        """Forget a replica; its row may mean another one from now on."""
        column = self._column_of.pop(row, None)
        if column is None:
            return
        self._live &= ~self._bits[column]
        self._num_moved -= column != row
        self._row_of[column] = -1
        self._is_live = None
        self._num_dead += 1
        if self._num_dead > max(MIN_DEAD_COLUMNS, len(self._column_of)):
            self._sweep()

    def match(self, keys: Sequence[bytes], num_rows: int) -> npt.NDArray[np.float64]:
        """Return how many leading `keys` each replica holds, f64 [num_rows]; linear in `keys`."""
        hits: npt.NDArray[np.float64] | None = None
        bits, live = self._bits, self._live
        mask, last = live, None
        depth = 0
        for depth, found in enumerate(map(self._young.get, keys)):
            entry = self._refresh(keys[depth]) if found is None else found
            if entry is None:
                break
            if entry == last:
                continue
            last = entry
            left = mask & (bits[entry] if entry >= 0 else -entry)
            if left != mask:
                if depth:  # those of `left` are filled again, deeper
                    hits = self._fill(hits, mask, depth, num_rows)
                mask = left
                if not mask:
                    break
        else:
            depth = len(keys)
        if mask and depth:
            hits = self._fill(hits, mask, depth, num_rows)
        return np.zeros(num_rows) if hits is None else hits

    def _refresh(self, key: bytes) -> int | None:
        """Move a key that was looked up into the young generation; return its entry, if any."""
        entry = self._old.pop(key, None)
        if entry is not None:
            self._young[key] = entry
        return entry

    def _fill(
        self, hits: npt.NDArray[np.float64] | None, mask: int, depth: int, num_rows: int
    ) -> npt.NDArray[np.float64]:
        """Note the depth at the rows of a mask, in `hits` or in a new array."""
        if hits is None:
            if mask == self._live:
                return self._live_mask(num_rows) * depth
            hits = np.zeros(num_rows)
        row_of = self._row_of
        if mask.bit_count() <= MAX_LISTED_BITS:
            while mask:
                lowest = mask & -mask
                hits[row_of[lowest.bit_length() - 1]] = depth
                mask ^= lowest
            return hits
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        is_set = np.unpackbits(packed, bitorder="little").view(np.bool_)
        if self._num_moved:
            hits[row_of[: len(is_set)][is_set]] = depth
        else:
            np.putmask(hits[: len(is_set)], is_set[:num_rows], depth)
        return hits

    def _live_mask(self, num_rows: int) -> npt.NDArray[np.float64]:
        """Return 1 at the rows of replicas, and 0 elsewhere."""
        if self._is_live is None or len(self._is_live) != num_rows:
            self._is_live = np.zeros(num_rows)
            self._is_live[self._row_of[self._row_of >= 0]] = 1.0
        return self._is_live

    def _column(self, row: int) -> int:
        column = self._column_of.get(row)
        if column is None:
            if self._free:
                column = self._free.pop()
            else:
                column = len(self._bits)
                self._bits.append(1 << column)
                if column == len(self._row_of):
                    self._row_of = np.concatenate([self._row_of, np.full(column, -1, np.int64)])
            self._column_of[row] = column
            self._num_moved += column != row
            self._row_of[column] = row
            self._is_live = None
            self._live |= self._bits[column]
        return column

    def _sweep(self) -> None:
        """Clear dead bits everywhere, so that their columns can be used again."""
        for generation in (self._young, self._old):
            for key, entry in tuple(generation.items()):
                mask = (self._bits[entry] if entry >= 0 else -entry) & self._live
                self._put(generation, key, mask)
        used = set(self._column_of.values())
        self._free = [column for column in range(len(self._bits)) if column not in used]
        self._num_dead = 0

    @staticmethod
    def _put(generation: dict[bytes, int], key: bytes, mask: int) -> None:
        if not mask:
            del generation[key]
        elif mask & (mask - 1):
            generation[key] = -mask
        else:
            generation[key] = mask.bit_length() - 1
