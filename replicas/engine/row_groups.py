"""Work on the few rows that need it, a group of fixed size at a time; device code.

What only some rows ask for is computed for them alone: gathered into groups, so that shapes stay
static and the cost follows their number. Invariant: a group has at least as many rows as XLA's row
reductions need to keep their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int32

GROUP_ROWS = 8
"""Rows in a group: the fewest for which row reductions keep their bits."""


def for_each_group[CarryT](
    is_member: Bool[Array, " R"],
    visit: Callable[[Int32[Array, " G"], CarryT], CarryT],
    carry: CarryT,
    *,
    group_rows: int = GROUP_ROWS,
) -> CarryT:
    """Run `visit(rows, carry)` over the members' row numbers, `group_rows` at a time.

    The last group is filled up with row number R, which does not exist: read with mode="clip" and
    written with mode="drop" it changes nothing.
    """
    num_rows = is_member.shape[0]
    members_first = jnp.argsort(~is_member, stable=True)
    rows = jnp.where(is_member[members_first], members_first, num_rows).astype(jnp.int32)
    rows = jnp.pad(rows, (0, -num_rows % group_rows), constant_values=num_rows)
    num_groups = (jnp.sum(is_member) + group_rows - 1) // group_rows

    def visit_group(group: Array, carry: CarryT) -> CarryT:
        return visit(lax.dynamic_slice(rows, (group * group_rows,), (group_rows,)), carry)

    return lax.fori_loop(0, num_groups, visit_group, carry)
