"""The note that an imported model directory keeps about where it came from.

Small and free of heavy imports, because every start asks it whether there is anything to do.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

type ModelDtype = Literal["bfloat16", "float32"]

# Bump when the same source file would be converted differently.
FORMAT_VERSION = 1
RECORD_NAME = "import.json"


def sha256_of(path: Path) -> str:
    """Compute the sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_record(source: str, digest: str, *, dtype: ModelDtype) -> dict[str, object]:
    """Describe the conversion of the file named `source`, whose sha256 is `digest`."""
    return {"source": source, "sha256": digest, "format_version": FORMAT_VERSION, "dtype": dtype}


def read_record(directory: Path) -> dict[str, object] | None:
    """Read the record of a model directory, None where it was not made by the importer."""
    try:
        record = json.loads((directory / RECORD_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def is_imported(directory: Path, digest: str, *, dtype: ModelDtype = "bfloat16") -> bool:
    """Tell whether `directory` is this importer's conversion of the file with sha256 `digest`."""
    record = read_record(directory)
    if record is None:
        return False
    return make_record(str(record.get("source")), digest, dtype=dtype) == record
