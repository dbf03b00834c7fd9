"""Reads safetensors checkpoints, one file or sharded with an index, through memory maps.

Format: u64 header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://github.com/huggingface/safetensors#format). Opening reads headers only, and collects what
is wrong instead of stopping at the first fault, so that one error can list everything. Knows no
model.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from replicas.model_files.safetensors_header import read_header

_DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
}


class CheckpointError(ValueError):
    """The checkpoint is unreadable or does not fit its config; lists every fault."""

    def __init__(self, path: Path | str, problems: list[str] | tuple[str, ...] = ()) -> None:
        super().__init__(path, problems)
        self.path = path
        self.problems = tuple(problems)

    def __str__(self) -> str:
        lines = "".join(f"\n  {problem}" for problem in self.problems)
        return f"checkpoint {self.path} cannot be loaded, {len(self.problems)} problem(s):{lines}"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies.

    Attributes:
        file: the safetensors file.
        dtype: element type of the file.
        shape: as stored.
        offset: bytes from the start of the file.
    """

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint:
    """The tensors of a checkpoint directory, memory-mapped.

    Attributes:
        path: the directory.
        tensors: every usable tensor by name.
        problems: what is wrong with the files: truncated or malformed tensors, missing shards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorEntry] = {}
        self.problems: list[str] = []
        self._maps: dict[Path, mmap.mmap] = {}
        for file, expected in _list_files(path, self.problems).items():
            found = self._read_header(file)
            self.problems += [
                f"missing: {name} (the index places it in {file.name})"
                for name in sorted(expected - found)
            ]
            self.problems += [
                f"unlisted: {name} is in {file.name}, which the index does not say"
                for name in sorted(found - expected if expected else ())
            ]

    def read(self, name: str) -> np.ndarray:
        """Return a read-only view of a tensor; pages are read from disk as they are touched."""
        entry = self.tensors[name]
        if entry.file not in self._maps:
            with entry.file.open("rb") as stream:
                self._maps[entry.file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        count = math.prod(entry.shape)
        flat = np.frombuffer(self._maps[entry.file], entry.dtype, count=count, offset=entry.offset)
        return flat.reshape(entry.shape)

    def release(self) -> None:
        """Drop the file pages read so far from this process's memory; views stay valid."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _read_header(self, file: Path) -> set[str]:
        """Add the tensors of one file; return the names in its header, faulty ones included."""
        try:
            header, data_start = read_header(file)
        except (OSError, ValueError) as error:
            self.problems.append(f"unreadable: {file.name}: {error}")
            return set()
        file_bytes = file.stat().st_size
        for name, description in header.items():
            try:
                entry = _parse_entry(file, description, data_start)
            except (KeyError, TypeError, ValueError) as error:
                self.problems.append(f"malformed: {name} in {file.name}: {error}")
                continue
            if entry.offset + entry.num_bytes > file_bytes:
                self.problems.append(
                    f"truncated: {name} ends at byte {entry.offset + entry.num_bytes} of "
                    f"{file.name}, which has {file_bytes}"
                )
                continue
            if name in self.tensors:
                self.problems.append(f"duplicate: {name} in {file.name}")
            self.tensors[name] = entry
        return set(header)


def _list_files(path: Path, problems: list[str]) -> dict[Path, set[str]]:
    """Return the safetensors files of a directory and the names that an index places in each."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return {single: set()}
    if not index.is_file():
        problems.append(f"missing: neither {single.name} nor {index.name} exists")
        return {}
    files: dict[Path, set[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file_name in weight_map.items():
            if Path(file_name).name != file_name:
                raise ValueError(f"{file_name!r} is not a plain file name")
            files.setdefault(path / file_name, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problems.append(f"unreadable: {index.name}: {error!r}")
    return files


def _parse_entry(file: Path, description: dict[str, Any], data_start: int) -> TensorEntry:
    dtype_name = description["dtype"]
    if dtype_name not in _DTYPES:
        raise ValueError(f"dtype {dtype_name} is not supported (supported: {', '.join(_DTYPES)})")
    begin, end = description["data_offsets"]
    entry = TensorEntry(
        file=file,
        dtype=_DTYPES[dtype_name],
        shape=tuple(int(size) for size in description["shape"]),
        offset=data_start + int(begin),
    )
    if begin < 0 or min(entry.shape, default=0) < 0 or end - begin != entry.num_bytes:
        raise ValueError(
            f"shape {list(entry.shape)} of {dtype_name} needs {entry.num_bytes} bytes, "
            f"data_offsets {[begin, end]} give {end - begin}"
        )
    return entry
