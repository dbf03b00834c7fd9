"""What libtpu's final bundles say of a kernel: loops, bundles, and the slots that fill them.

libtpu writes, per compiled computation, the final VLIW bundles and how many operations each holds
per kind of slot, when `LIBTPU_INIT_ARGS` asks for it (`dump_flags`). A bundle issues in one cycle
if nothing stalls; DMA time is not modelled. Knows nothing of what was compiled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SLOTS = (
    "MATMUL", "MATPUSH", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU",
)  # fmt: skip
"""Columns of the utilisation file, in order. FILL and SPILL are the loads and stores of VLOAD and
VSTORE slots that only make room in the register file."""

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+((?:[A-Z]{2})?)\s*:\s*(>*)\s*\{(.*)")
_LOOP_BODY = "LB"


@dataclass(frozen=True)
class Loop:
    """A loop of a computation, with the loops inside it.

    Attributes:
        depth: 1 for the outermost.
        first: index of its first bundle.
        num_bundles: its bundles, those of inner loops once.
        num_own_bundles: without those of inner loops: what a pass costs that enters none.
        slots: operations per kind of slot, those of inner loops once.
        num_dma_starts: DMA instructions, those of inner loops once.
    """

    depth: int
    first: int
    num_bundles: int
    num_own_bundles: int
    slots: dict[str, int]
    num_dma_starts: int

    def encloses(self, inner: Loop) -> bool:
        """Whether a loop of the same computation is the next one inside."""
        is_inside = self.first < inner.first < self.first + self.num_bundles
        return is_inside and self.depth == inner.depth - 1

    def limiting_slot(self, capacities: dict[str, int]) -> tuple[str, int]:
        """The slot that needs the most bundles, and how many it needs."""
        need = {slot: -(-count // capacities[slot]) for slot, count in self.slots.items()}
        slot = max(need, key=lambda name: need[name])
        return slot, need[slot]


@dataclass(frozen=True)
class Computation:
    """One compiled computation.

    Attributes:
        name: as libtpu names it, after the custom call or fusion.
        num_bundles: in all.
        slots: operations per kind of slot.
        loops: in the order in which they begin.
    """

    name: str
    num_bundles: int
    slots: dict[str, int]
    capacities: dict[str, int]
    loops: tuple[Loop, ...]


def dump_flags(directory: Path) -> str:
    """Flags for LIBTPU_INIT_ARGS: final passes only, since all passes are half a gigabyte."""
    return (
        f"--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=.*final.* --xla_jf_dump_hlo_text=false"
    )


def read_computations(directory: Path, name: str) -> list[Computation]:
    """Read the computations whose name contains `name`, in the order of compilation."""
    paths = sorted(directory.glob(f"*{name}*-final_bundles.txt"))
    return [_read(path) for path in paths if "schedule-analysis" not in path.name]


def _read(path: Path) -> Computation:
    prefix = re.sub(r"-\d+-final_bundles\.txt$", "", path.name)
    utilization = next(path.parent.glob(f"{_escape(prefix)}-*-final_hlo-static-per-bundle-*.txt"))
    capacities, rows = _read_utilization(utilization)
    bundles = [
        (match.group(1), len(match.group(2)), match.group(3))
        for line in path.read_text().splitlines()
        if (match := _BUNDLE.match(line))
    ]
    if len(bundles) != len(rows):
        raise ValueError(f"{path.name} has {len(bundles)} bundles, its utilisation {len(rows)}")
    ranges = [
        (first, _loop_end(bundles, first), depth)
        for first, (tag, depth, _) in enumerate(bundles)
        if tag == _LOOP_BODY
    ]
    loops = []
    for first, end, depth in ranges:
        inner = {
            i
            for inner_first, inner_end, inner_depth in ranges
            if first < inner_first < end and inner_depth == depth + 1
            for i in range(inner_first, min(inner_end, end))
        }
        loops.append(
            Loop(
                depth=depth,
                first=first,
                num_bundles=end - first,
                num_own_bundles=end - first - len(inner),
                slots=_sum(rows[first:end]),
                num_dma_starts=sum(bundles[i][2].count(" = dma.") for i in range(first, end)),
            )
        )
    return Computation(
        name=prefix.split("-", 1)[1],
        num_bundles=len(rows),
        slots=_sum(rows),
        capacities=capacities,
        loops=tuple(loops),
    )


def _loop_end(bundles: list[tuple[str, int, str]], first: int) -> int:
    """Index past a loop's last bundle.

    The branch back is printed at the depth outside the loop, and its delay slots, like those of
    every branch, at depth 0.
    """
    depth = bundles[first][1]
    end = first + 1
    while end < len(bundles):
        tag, own_depth, text = bundles[end]
        is_empty = text.startswith("}")
        if not is_empty and (own_depth < depth or (tag == _LOOP_BODY and own_depth == depth)):
            if "sbr.rel (!" in text and own_depth == depth - 1:
                end += 1
                while end < len(bundles) and bundles[end][2].startswith("}"):
                    end += 1
            return end
        end += 1
    return end


def _read_utilization(path: Path) -> tuple[dict[str, int], list[list[int]]]:
    """The capacities of the slots, then one row of counts per bundle."""
    rows = [
        [int(field) for field in line.split()]
        for line in path.read_text().splitlines()
        if re.fullmatch(r"[\d\s]+", line) and len(line.split()) == len(SLOTS)
    ]
    return dict(zip(SLOTS, rows[0], strict=True)), rows[1:]


def _sum(rows: list[list[int]]) -> dict[str, int]:
    return {slot: sum(row[i] for row in rows) for i, slot in enumerate(SLOTS)}


def _escape(name: str) -> str:
    return re.sub(r"([\[\]*?])", r"[\1]", name)
