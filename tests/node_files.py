"""Files that an example's `args` expect on a node, for tests that only parse them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def provide_files(args: dict[str, Any], directory: Path, *, model_name: str) -> None:
    """Make an empty model and a file of keys below `directory`, and point `args` at them."""
    model = directory / model_name
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).touch()
    keys = directory / "api_keys"
    keys.write_text("sha256:" + "0" * 64 + "\n")
    args["model"], args["ingress"]["api_keys_file"] = str(model), str(keys)
