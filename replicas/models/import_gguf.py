"""Converts a GGUF file, once, into a model directory in Hugging Face's format.

    python -m replicas.models.import_gguf model.gguf models/my-model

writes config.json, generation_config.json, the tokenizer and model.safetensors. The directory
appears whole or not at all: it is made beside its final place and renamed. `import.json` in it
records the source's sha256, so that converting the same file again does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from tqdm import tqdm

from replicas.models.gguf import GgufError, GgufFile, read_gguf
from replicas.models.gguf_architectures import (
    Architecture,
    HfConfig,
    TensorTarget,
    get_architecture,
)
from replicas.models.gguf_tokenizer import convert_tokenizer, special_token_id
from replicas.models.import_record import (
    RECORD_NAME,
    ModelDtype,
    is_imported,
    make_record,
    read_record,
    sha256_of,
)

_NUMPY_DTYPES: Mapping[ModelDtype, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_SAFETENSORS_DTYPES: Mapping[ModelDtype, str] = {"bfloat16": "BF16", "float32": "F32"}


def import_gguf(source: Path, target: Path, *, dtype: ModelDtype = "bfloat16") -> bool:
    """Convert the GGUF file `source` into the model directory `target`.

    Returns:
        False where `target` already holds this very file's conversion and nothing was done.

    Raises:
        GgufError: the file is not GGUF, truncated, or of an unsupported kind.
        FileExistsError: `target` exists and was not made by this importer.
    """
    digest = sha256_of(source)
    if is_imported(target, digest, dtype=dtype):
        return False
    if target.exists() and read_record(target) is None:
        raise FileExistsError(
            f"{target} exists and was not made by the importer; remove it or choose another place"
        )
    file = read_gguf(source)
    architecture = get_architecture(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        partial.chmod(0o755)
        _write_model(file, architecture, partial, dtype=dtype)
        _write_json(partial / RECORD_NAME, make_record(source.name, digest, dtype=dtype))
        _replace_directory(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return True


def _write_model(
    file: GgufFile, architecture: Architecture, directory: Path, *, dtype: ModelDtype
) -> None:
    config = architecture.convert_config(file)
    targets = architecture.map_tensors(config)
    _audit_tensors(file, targets, architecture)
    tokenizer = convert_tokenizer(file)
    tokens = _token_ids(file)
    _write_json(directory / "config.json", config | tokens | {"torch_dtype": dtype})
    _write_json(directory / "generation_config.json", tokens)
    tokenizer.save_pretrained(directory)
    _write_safetensors(file, targets, directory / "model.safetensors", dtype=dtype)


def _audit_tensors(
    file: GgufFile, targets: Mapping[str, TensorTarget], architecture: Architecture
) -> None:
    """Check that the file holds exactly the tensors that its config asks for.

    A tensor that has no place would be dropped silently, and the model would answer nonsense.
    """
    if missing := sorted(targets.keys() - file.tensors.keys()):
        raise GgufError(f"{file.path} lacks {len(missing)} tensors, such as {missing[0]}")
    if extra := sorted(file.tensors.keys() - targets.keys() - architecture.ignored_tensors):
        raise GgufError(
            f"{file.path} holds {len(extra)} tensors that its architecture does not support here, "
            f"such as {extra[0]}"
        )
    for name, target in targets.items():
        if (shape := file.tensors[name].shape) != target.shape:
            raise GgufError(f"{file.path}: tensor {name} is {shape}, expected {target.shape}")


def _token_ids(file: GgufFile) -> HfConfig:
    """Collect the ids of BOS, EOS and padding; chat models may end a turn by a token of its own."""
    ends = [special_token_id(file, role) for role in ("eos", "eot")]
    eos = list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    return {
        "bos_token_id": special_token_id(file, "bos"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": special_token_id(file, "padding"),
    }


def _write_safetensors(
    file: GgufFile, targets: Mapping[str, TensorTarget], path: Path, *, dtype: ModelDtype
) -> None:
    """Write the weights one tensor at a time, so that memory holds one of them and not the model.

    Format: u64 header length, a JSON header padded with spaces to 8 bytes, the data in its order.
    """
    item_bytes = _NUMPY_DTYPES[dtype].itemsize
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets.values():
        end = offset + int(np.prod(target.shape)) * item_bytes
        header[target.name] = {
            "dtype": _SAFETENSORS_DTYPES[dtype],
            "shape": target.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (
        path.open("wb") as output,
        tqdm(
            total=offset, desc="Converting weights", unit="B", unit_scale=True, unit_divisor=1024
        ) as progress,
    ):
        output.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, target in targets.items():
            values = file.tensors[name].to_float32()
            if target.transform is not None:
                values = target.transform(values)
            converted = np.ascontiguousarray(values.astype(_NUMPY_DTYPES[dtype]))
            output.write(converted.view(np.uint8).data)
            progress.update(converted.nbytes)
        output.flush()
        os.fsync(output.fileno())


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _replace_directory(new: Path, target: Path) -> None:
    """Put `new` in the place of `target`, which is an older conversion or absent."""
    if not target.exists():
        new.rename(target)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent))
    target.rename(retired / target.name)
    new.rename(target)
    shutil.rmtree(retired)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("source", type=Path, help="GGUF file")
    parser.add_argument("target", type=Path, help="model directory to make")
    parser.add_argument("--dtype", choices=list(_NUMPY_DTYPES), default="bfloat16")
    arguments = parser.parse_args()
    # SIGTERM unwinds like Ctrl-C, so that the half-written directory is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        is_new = import_gguf(arguments.source, arguments.target, dtype=arguments.dtype)
    except (GgufError, OSError) as error:
        print(f"import failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{arguments.target} is {'ready' if is_new else 'up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
