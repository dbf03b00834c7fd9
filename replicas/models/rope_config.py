"""Reads the rotary embedding of a config.json, in either spelling, into a RopeConfig.

`rope_parameters`, or the older `rope_theta` and `rope_scaling`; where both say something, they must
agree. Defaults, and the attention factors that yarn and longrope imply, are the reference
implementation's. Invariant: as in `hf_config`, nothing is ignored that changes the computation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from replicas.config import RopeConfig, RopeKind
from replicas.models.hf_config import (
    RawConfig,
    ReferenceDefaults,
    boolean,
    integer,
    number,
    optional_number,
    read_head_dim,
    read_max_len,
    refuse,
)

_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
_REQUIRED_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": set(),
    "longrope": {"short_factor", "long_factor"},
}
_OPTIONAL_KEYS: dict[str, set[str]] = {
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
    "longrope": {"factor", "attention_factor"},
}


def read_plain_rope(raw: RawConfig, defaults: ReferenceDefaults) -> RopeConfig:
    """Read the rotary embedding of a family that rotates whole heads, in all layers alike.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    return read_rope(
        raw,
        head_dim=read_head_dim(raw, defaults),
        max_position_embeddings=read_max_len(raw, defaults),
    )


def read_rope(
    raw: RawConfig,
    *,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float = 10_000.0,
    theta_key: str = "rope_theta",
    default_partial: float = 1.0,
    partial_key: str | None = None,
    aliases: Mapping[str, RopeKind] | None = None,
    kinds: Sequence[RopeKind] = _KINDS,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Read one rotary embedding for all layers.

    Args:
        raw: config.json.
        head_dim: D.
        max_position_embeddings: the model's.
        default_theta: base where none is stated.
        theta_key: older spelling of the base, beside `rope_scaling`.
        default_partial: share of a head that is rotated where none is stated.
        partial_key: older spelling of that share; None where the family rotates whole heads.
        aliases: names of kinds that the family has beside the usual ones.
        kinds: kinds that the family knows.
        is_interleaved: how the family pairs dimensions.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    spellings = {
        key: raw[key] for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None
    }
    for key, value in spellings.items():
        if not isinstance(value, Mapping) or any(isinstance(v, Mapping) for v in value.values()):
            refuse(key, value, "expected one flat mapping for all layers")
    stated = {
        "rope_theta": theta_key,
        "original_max_position_embeddings": "original_max_position_embeddings",
    }
    if partial_key is not None:
        stated["partial_rotary_factor"] = partial_key
    merged: dict[str, Any] = {}
    for name, key in stated.items():
        _merge(merged, name, raw.get(key), owner=key)
    for owner, parameters in spellings.items():
        merge_parameters(merged, parameters, owner=owner)
    return make_rope(
        merged,
        owner=next(iter(spellings), "rope_parameters"),
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        default_theta=default_theta,
        default_partial=default_partial,
        is_partial=partial_key is not None,
        aliases=aliases or {},
        kinds=kinds,
        is_interleaved=is_interleaved,
    )


def merge_parameters(
    merged: dict[str, Any], parameters: Mapping[str, Any], *, owner: str
) -> dict[str, Any]:
    """Add the keys of one spelling; return `merged`.

    Raises:
        UnsupportedModelError: a key has another value already.
    """
    for key, value in parameters.items():
        _merge(merged, "rope_type" if key == "type" else key, value, owner=f"{owner}.{key}")
    return merged


def make_rope(
    parameters: Mapping[str, Any],
    *,
    owner: str,
    head_dim: int,
    max_position_embeddings: int,
    default_theta: float,
    default_partial: float = 1.0,
    is_partial: bool = False,
    aliases: Mapping[str, RopeKind] | None = None,
    kinds: Sequence[RopeKind] = _KINDS,
    is_interleaved: bool = False,
) -> RopeConfig:
    """Make a RopeConfig of merged parameters; `owner` is their key in config.json.

    Raises:
        UnsupportedModelError: naming the key and its value.
    """
    stated_kind: Any = parameters.get("rope_type", "default")
    kind: RopeKind = stated_kind if not aliases else aliases.get(stated_kind, stated_kind)
    if kind not in kinds:
        refuse(f"{owner}.rope_type", stated_kind, f"supported: {', '.join(kinds)}")
    _check_keys(parameters, kind, owner=owner)
    partial = optional_number(parameters, "partial_rotary_factor") or default_partial
    if partial != 1.0 and not (is_partial and partial < 1.0):
        refuse(f"{owner}.partial_rotary_factor", partial, "every dimension of a head is rotated")
    rotary_dim = int(head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2:
        refuse(f"{owner}.partial_rotary_factor", partial, f"rotates {rotary_dim} dimensions")
    original = integer(parameters, "original_max_position_embeddings", max_position_embeddings)
    factor = number(
        parameters,
        "factor",
        max_position_embeddings / original if kind in ("yarn", "longrope") else 1.0,
    )
    divisors = {
        key: _divisors(parameters, key, owner=owner, count=rotary_dim // 2)
        for key in ("short_factor", "long_factor")
        if kind == "longrope"
    }
    try:
        return RopeConfig(
            kind=kind,
            theta=number(parameters, "rope_theta", default_theta),
            rotary_dim=None if rotary_dim == head_dim else rotary_dim,
            is_interleaved=is_interleaved,
            attention_factor=_attention_factor(parameters, kind, factor=factor, original=original),
            factor=factor,
            original_max_position_embeddings=original,
            low_freq_factor=number(parameters, "low_freq_factor", 1.0),
            high_freq_factor=number(parameters, "high_freq_factor", 4.0),
            beta_fast=number(parameters, "beta_fast", 32.0),
            beta_slow=number(parameters, "beta_slow", 1.0),
            truncates=boolean(parameters, "truncate", default=True),
            short_factors=divisors.get("short_factor", ()),
            long_factors=divisors.get("long_factor", ()),
        )
    except ValueError as error:
        refuse(owner, dict(parameters), str(error))


def _check_keys(parameters: Mapping[str, Any], kind: str, *, owner: str) -> None:
    """Refuse keys that the kind does not use, and ask for those that it needs."""
    known = _KEYS | _REQUIRED_KEYS[kind] | _OPTIONAL_KEYS.get(kind, set())
    for key in sorted(parameters.keys() - known):
        if (key, parameters[key]) != ("factor", 1.0):
            refuse(f"{owner}.{key}", parameters[key], f"rope_type {kind!r} does not use it")
    for key in sorted(_REQUIRED_KEYS[kind] - parameters.keys()):
        refuse(f"{owner}.{key}", None, f"rope_type {kind!r} needs it")


def _attention_factor(
    parameters: Mapping[str, Any], kind: str, *, factor: float, original: int
) -> float:
    """Return what sine and cosine are multiplied by, stated or implied by the context's growth."""
    stated = optional_number(parameters, "attention_factor")
    if stated is not None:
        return stated
    if kind == "longrope" and factor > 1.0:
        return math.sqrt(1 + math.log(factor) / math.log(original))
    if kind != "yarn":
        return 1.0
    mscale = optional_number(parameters, "mscale")
    mscale_all_dim = optional_number(parameters, "mscale_all_dim")
    if mscale is not None and mscale_all_dim is not None:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's temperature for a context extended by `factor` (Peng et al. 2023, 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _divisors(
    parameters: Mapping[str, Any], key: str, *, owner: str, count: int
) -> tuple[float, ...]:
    values = parameters[key]
    if not isinstance(values, list) or len(values) != count:
        refuse(f"{owner}.{key}", values, f"expected a list of {count} numbers")
    return tuple(number({key: value}, key, value) for value in values)


def _merge(merged: dict[str, Any], key: str, value: object, *, owner: str) -> None:
    """Add `key` unless it is null; two spellings that disagree have no right reading."""
    if value is None:
        return
    if key in merged and merged[key] != value:
        refuse(owner, value, f"another spelling of the same key says {merged[key]!r}")
    merged[key] = value
