"""What a compiled program depends on, as named parts that a person can read and compare.

Two keys. A program's own key covers the lowered program itself and everything that turns it into
machine code, so it is exact by construction. An engine's fingerprint covers what the lowering
depends on (all sources, the configuration): it is broader, and cheap, because nothing is lowered.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

_ROOT = Path(__file__).parents[2]
_SOURCE_PATTERNS = ("kernels/**/*.py", "replicas/**/*.py")

KeyParts = Mapping[str, str]


def hash_parts(parts: KeyParts) -> str:
    """Digest of named parts, whatever their order: 64 hex digits."""
    return _hash(json.dumps(dict(parts), sort_keys=True))


def hash_sources(root: Path = _ROOT) -> str:
    """Digest of every Python source that a lowering could depend on."""
    digest = hashlib.sha256()
    for path in sorted(p for pattern in _SOURCE_PATTERNS for p in root.glob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def describe_environment(
    devices: Sequence[Any], *, native: str, xla_options: Mapping[str, Any]
) -> dict[str, str]:
    """Parts that all programs of an engine share: versions, flags, options, machine.

    Args:
        devices: what the programs run on, in mesh order; those of a topology will do.
        native: fingerprint of the native kernels, "" where the programs call none.
        xla_options: given to the compiler.
    """
    device = devices[0]
    is_cpu = device.platform == "cpu"
    return {
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "platform": device.platform,
        # A TPU's runtime puts its own name before what the compiler alone says: when it was built.
        "platform_version": device.client.platform_version.splitlines()[-1],
        "device_kind": device.device_kind,
        "devices": ",".join(str(d.id) for d in devices),
        # XLA compiles for exactly the instruction sets of this machine.
        "cpu_features": _hash(_cpu_features())[:16] if is_cpu else "",
        "native_kernels": native,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_flags": "" if is_cpu else os.environ.get("LIBTPU_INIT_ARGS", ""),
        "xla_options": json.dumps(dict(xla_options), sort_keys=True),
    }


def describe_lowered(lowered: jax.stages.Lowered) -> dict[str, str]:
    """Parts that tell one program from another: its text, and the trees that it is called with."""
    return {
        "stablehlo": _hash(lowered.as_text()),
        "arguments": _hash(f"{lowered.in_tree}\0{lowered.out_tree}"),
    }


def describe_difference(stored: KeyParts, current: KeyParts) -> str:
    """Name the parts of `current` that `stored` has otherwise; "" when there are none."""
    return ", ".join(
        f"{name} was {stored.get(name)!r}, is {value!r}"
        for name, value in current.items()
        if stored.get(name) != value
    )


def _cpu_features() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass  # not Linux: the processor's name must do
    return platform.processor()


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
