"""Reads GGUF files (llama.cpp's single-file model format, versions 2 and 3, little endian).

Owns the container: header, metadata, and tensors as memory-mapped bytes. Knows neither model
architectures nor tokenizers. Invariant: every tensor of a `GgufFile` lies inside the file, so a
truncated download is found when the file is opened and not in the middle of a conversion.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Quantization
from gguf.quants import dequantize

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

SUPPORTED_QUANTIZATIONS = (
    Quantization.F32,
    Quantization.F16,
    Quantization.BF16,
    Quantization.Q4_0,
    Quantization.Q4_1,
    Quantization.Q5_0,
    Quantization.Q5_1,
    Quantization.Q8_0,
    Quantization.Q2_K,
    Quantization.Q3_K,
    Quantization.Q4_K,
    Quantization.Q5_K,
    Quantization.Q6_K,
    Quantization.IQ4_NL,
    Quantization.IQ4_XS,
)

_STRING_TYPE = 8
_ARRAY_TYPE = 9
_SCALAR_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}

type Metadata = Mapping[str, object]


class GgufError(ValueError):
    """A file cannot be used; the message names it, what was found and what is supported."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        name: llama.cpp's name, such as "blk.0.attn_q.weight".
        shape: row-major (the file stores dimensions fastest first; this is the reverse).
        quantization: storage type of the elements.
        raw: the file's bytes, u8 [rows, bytes per row], memory-mapped and read-only.
    """

    name: str
    shape: tuple[int, ...]
    quantization: Quantization
    raw: np.ndarray

    def to_float32(self) -> np.ndarray:
        """Return the values, f32 in `shape`; unquantised f32 tensors are not copied."""
        return dequantize(self.raw, self.quantization).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened GGUF file.

    Attributes:
        path: where it was read from.
        metadata: key to int, float, bool, str, or a list of these.
        tensors: by name, in file order.
    """

    path: Path
    metadata: Metadata
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file: parse its header and map its tensors, without reading their data.

    Raises:
        GgufError: the file is not GGUF, truncated, damaged, or of an unsupported version or
            quantisation.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        if path.stat().st_size < len(MAGIC) or file.read(len(MAGIC)) != MAGIC:
            file.seek(0)
            raise GgufError(
                f"{path} is not a GGUF file: it begins with {file.read(4)!r}, expected {MAGIC!r}"
            )
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, buffer, len(MAGIC))
    _check_version(path, cursor.integer(4))
    num_tensors, num_entries = cursor.integer(8), cursor.integer(8)
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.integer(4))
    if (num_splits := metadata.get("split.count", 1)) not in (0, 1):
        raise GgufError(
            f"{path} is one of {num_splits} parts of a split model; join the parts into one file "
            "first (llama.cpp's gguf-split --merge)"
        )
    entries = [cursor.tensor_entry() for _ in range(num_tensors)]
    data_start = _align(cursor.position, _alignment(path, metadata))
    tensors = {}
    for name, shape, type_id, offset in entries:
        tensors[name] = _map_tensor(path, buffer, name, shape, type_id, data_start + offset)
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """A position in the header; every read is bounds-checked against the file's end."""

    def __init__(self, path: Path, buffer: mmap.mmap, position: int) -> None:
        self.path = path
        self.buffer = buffer
        self.position = position

    def take(self, num_bytes: int) -> int:
        """Advance by `num_bytes` and return the position before."""
        start = self.position
        if num_bytes > len(self.buffer) - start:
            raise GgufError(
                f"{self.path} is truncated or damaged: its header needs {num_bytes} bytes at "
                f"offset {start}, but the file has {len(self.buffer)}"
            )
        self.position += num_bytes
        return start

    def integer(self, num_bytes: int) -> int:
        start = self.take(num_bytes)
        return int.from_bytes(self.buffer[start : start + num_bytes], "little")

    def string(self) -> str:
        num_bytes = self.integer(8)
        start = self.take(num_bytes)
        raw = self.buffer[start : start + num_bytes]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise GgufError(f"{self.path} is damaged: no UTF-8 text at offset {start}") from error

    def value(self, type_id: int) -> object:
        if type_id == _ARRAY_TYPE:
            return self.values(self.integer(4), self.integer(8))
        return self.values(type_id, 1)[0]

    def values(self, type_id: int, length: int) -> list[object]:
        if type_id == _STRING_TYPE:
            return [self.string() for _ in range(length)]
        if type_id not in _SCALAR_FORMATS:
            raise GgufError(
                f"{self.path}: unknown type {type_id} of a metadata value at offset "
                f"{self.position}; the file is damaged or newer than this reader"
            )
        fmt = _SCALAR_FORMATS[type_id]
        start = self.take(length * struct.calcsize("<" + fmt))
        return list(struct.unpack_from(f"<{length}{fmt}", self.buffer, start))

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read (name, row-major shape, type id, offset from the start of the data)."""
        name = self.string()
        num_dims = self.integer(4)
        if not 1 <= num_dims <= MAX_DIMS:
            raise GgufError(f"{self.path} is damaged: tensor {name} has {num_dims} dimensions")
        shape = tuple(self.integer(8) for _ in range(num_dims))[::-1]
        return name, shape, self.integer(4), self.integer(8)


def _check_version(path: Path, version: int) -> None:
    if version in SUPPORTED_VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    found = (
        f"version {swapped}, big endian" if swapped in SUPPORTED_VERSIONS else f"version {version}"
    )
    raise GgufError(
        f"{path} is GGUF {found}; supported: little-endian versions {SUPPORTED_VERSIONS}"
    )


def _alignment(path: Path, metadata: Metadata) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise GgufError(f"{path} is damaged: general.alignment is {alignment!r}")
    return alignment


def _align(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _map_tensor(
    path: Path, buffer: mmap.mmap, name: str, shape: tuple[int, ...], type_id: int, start: int
) -> GgufTensor:
    quantization = _quantization(path, name, type_id)
    block_size, block_bytes = GGML_QUANT_SIZES[quantization]
    if shape[-1] % block_size:
        raise GgufError(
            f"{path} is damaged: rows of {name} have {shape[-1]} elements, not a multiple of "
            f"{quantization.name}'s {block_size}"
        )
    row_bytes = shape[-1] // block_size * block_bytes
    num_rows = math.prod(shape[:-1])
    end = start + num_rows * row_bytes
    if end > len(buffer):
        raise GgufError(
            f"{path} is truncated: tensor {name} ends at byte {end}, but the file has {len(buffer)}"
        )
    raw = np.frombuffer(buffer, np.uint8, count=num_rows * row_bytes, offset=start)
    return GgufTensor(name, shape, quantization, raw.reshape(num_rows, row_bytes))


def _quantization(path: Path, name: str, type_id: int) -> Quantization:
    by_id = {item.value: item for item in Quantization}
    quantization = by_id.get(type_id)
    if quantization is None or quantization not in SUPPORTED_QUANTIZATIONS:
        found = f"type {type_id}" if quantization is None else quantization.name
        raise GgufError(
            f"{path}: tensor {name} is stored as {found}, which cannot be converted; supported: "
            + ", ".join(item.name for item in SUPPORTED_QUANTIZATIONS)
        )
    return quantization
