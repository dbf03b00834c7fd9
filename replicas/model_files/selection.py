"""Which files of a model are needed for what. Pure: names in, names out.

Repositories hold much else: the same weights for other programs, pictures, licences. Invariant: one
set of weights is chosen, the one that `replicas.models.checkpoint` will read, and no name that is
chosen leads out of the model's directory.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Literal

Part = Literal["config", "tokenizer", "weights"]
"""Of a model: what tells its shapes; what text needs; what the engine loads, shapes included."""

_SHAPES = ("config.json", "generation_config.json")
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TEMPLATES = "additional_chat_templates/"


def select_metadata(names: Collection[str], part: Part) -> list[str]:
    """Return the small files that a part consists of, the index of its weights included."""
    if part == "tokenizer":
        return sorted(name for name in names if _is_text_file(name))
    wanted = _SHAPES if part == "config" or _SINGLE in names else (*_SHAPES, _INDEX)
    return [name for name in wanted if name in names]


def select_weights(names: Collection[str], directory: Path) -> list[str]:
    """Return the files that hold the weights.

    Args:
        names: all that there are.
        directory: where the index lies, if there is one.

    Raises:
        ValueError: the index is no index.
    """
    if _SINGLE in names or _INDEX not in names:
        return [name for name in (_SINGLE,) if name in names]
    try:
        content = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        shards = set(content["weight_map"].values())
        # A shard that is not there is for the loader to report, with all that is in it. A name
        # with a slash could lead out of the directory; the loader refuses those, too.
        return sorted(name for name in shards & set(names) if "/" not in name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{_INDEX} is malformed: {error!r}") from error


def list_missing(names: Collection[str]) -> list[str]:
    """Return what a model that can be served has and this one lacks, for people."""
    missing = [name for name in ("config.json", "tokenizer.json") if name not in names]
    if not any("/" not in name and name.endswith(".safetensors") for name in names):
        missing.append("*.safetensors")
    return missing


def _is_text_file(name: str) -> bool:
    if name.startswith(_TEMPLATES):
        return "/" not in name.removeprefix(_TEMPLATES) and name.endswith(".jinja")
    return "/" not in name and name.endswith((".json", ".jinja")) and name != _INDEX
