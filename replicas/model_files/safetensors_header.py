"""Reads the header of a safetensors file, which tells what is in it, and nothing of its data.

Format: https://github.com/huggingface/safetensors#format. Knows no model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

_MAX_HEADER_BYTES = 100_000_000


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header, {name: {dtype, shape, data_offsets}}, and the offset of the data.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no safetensors file, or ends inside its header.
    """
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
            raise ValueError("not a safetensors file")
        text = stream.read(length)
    if len(text) < length:
        raise ValueError(f"the file ends inside its header of {length} bytes")
    header: object = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    header = cast("dict[str, Any]", header)
    header.pop("__metadata__", None)
    return header, 8 + length
