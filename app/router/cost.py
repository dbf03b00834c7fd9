"""What it costs to give a request to a replica: one number, the lower the better.

Today: outstanding tokens. Prediction in milliseconds replaces this function and nothing else.
"""

from __future__ import annotations

from app.router.replica_view import ReplicaView

TYPICAL_REQUEST_TOKENS = 256
"""Stands for a request that another router sent, of which we know no length."""


def cost_of(view: ReplicaView) -> float:
    """Return the tokens that the replica owes: ours as booked, others' as estimated."""
    return view.num_booked_tokens + view.num_foreign * TYPICAL_REQUEST_TOKENS
