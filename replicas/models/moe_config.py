"""Reads the keys of config.json that families with a mixture of experts share."""

from __future__ import annotations

from collections.abc import Sequence

from replicas.models.hf_config import RawConfig, integer, refuse


def read_num_experts(raw: RawConfig, keys: Sequence[str], *, default: int) -> int:
    """Read the number of experts, which a family may spell in several ways.

    Raises:
        UnsupportedModelError: two spellings disagree, or a value is no integer >= 1.
    """
    values = {key: integer(raw, key, default) for key in keys if raw.get(key) is not None}
    for key, value in values.items():
        if value != next(iter(values.values())):
            refuse(key, value, f"another spelling of the same key says {values}")
    return next(iter(values.values()), default)


def read_experts_per_tok(raw: RawConfig, *, num_experts: int, default: int) -> int:
    """Read how many experts a token goes through.

    Raises:
        UnsupportedModelError: there are not so many.
    """
    count = integer(raw, "num_experts_per_tok", default)
    if count > num_experts:
        refuse("num_experts_per_tok", count, f"there are {num_experts} experts")
    return count


def read_count(raw: RawConfig, key: str, default: int) -> int:
    """Read an integer >= 0; null is 0."""
    value = raw.get(key, default)
    if value is None or (value == 0 and not isinstance(value, bool)):
        return 0
    return integer(raw, key, default)


def read_layer_indices(raw: RawConfig, key: str, *, num_layers: int) -> frozenset[int]:
    """Read a list of layers; absent and null are none.

    Raises:
        UnsupportedModelError: it is no list of integers in [0, num_layers).
    """
    value = raw.get(key)
    indices = [] if value is None else value
    is_list = isinstance(indices, list) and all(type(index) is int for index in indices)
    if not is_list or not all(0 <= index < num_layers for index in indices):
        refuse(key, value, f"expected a list of layers in [0, {num_layers})")
    return frozenset(indices)
