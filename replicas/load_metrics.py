"""How the fields of a ReplicaLoad appear as metrics, on /metrics and on Ray's own endpoints alike.

A count that only grows is a counter; the rest are gauges. Ray adds the prefix `ray_`; both add
`_total` to counters.
"""

from __future__ import annotations

from replicas.wire import ReplicaLoad

LOAD_COUNTERS = frozenset(
    {
        "num_steps",
        "num_preemptions",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_compiles_after_warmup",
        "num_computed_tokens",
        "num_prefill_tokens",
        "num_prefill_pairs",
        "num_context_tokens",
        "busy_s",
    }
)
"""Fields of ReplicaLoad that only grow since the replica's start."""

LOAD_FIELDS = ReplicaLoad._fields


def load_metric_name(field: str) -> str:
    """Return the metric's name, without prefix or suffix of an exporter."""
    stem = field.removeprefix("num_")
    if stem.endswith("_s"):
        stem = stem.removesuffix("_s") + "_seconds"
    return f"systole_engine_{stem}"
