"""A model's own sampling defaults: its generation_config.json.

They stand where a request leaves a parameter out, as in vLLM, and are shown with the model.
Invariant: what is read is a value that a request could have asked for.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.errors import ConfigError
from app.json_types import is_object

_LIMITS = {
    "temperature": (0.0, 2.0),
    "top_p": (1e-9, 1.0),
    "top_k": (0, 1 << 30),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults of the parameters that a model's author may set; OpenAI's where he does not."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def as_json(self) -> dict[str, float]:
        """All of them, by name."""
        return asdict(self)


def load_sampling_defaults(directory: Path) -> SamplingDefaults:
    """Read a model directory's generation_config.json, if there is one.

    Raises:
        ConfigError: the file is malformed, or a value is out of range.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model: cannot read {path}: {error}") from error
    if not is_object(content):
        raise ConfigError(f"model: {path} must hold a JSON object")
    found: dict[str, Any] = {}
    for name, (least, most) in _LIMITS.items():
        value = content.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise ConfigError(f"model: {path}: {name} must be in [{least}, {most}], got {value!r}")
        found[name] = int(value) if name == "top_k" else float(value)
    return SamplingDefaults(**found)
