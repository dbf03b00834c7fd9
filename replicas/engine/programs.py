"""Compiled programs kept on disk, so that a second start compiles nothing.

A program is found by a key over everything that its machine code depends on, and checked by a
digest before use; a stale or damaged file is never trusted, only replaced.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 32
_SOURCE_PATTERNS = ("kernels/**/*.py", "replicas/models/*.py", "replicas/engine/*.py")


def hash_sources() -> str:
    """Digest of the Python sources that define the programs."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(p for pattern in _SOURCE_PATTERNS for p in root.glob(pattern)):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _cpu_features() -> str:
    """Instruction sets of this machine: XLA compiles for exactly these."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return " ".join(sorted(line.split(":", 1)[1].split()))
    except OSError:
        pass
    return platform.processor()


def environment_key() -> str:
    """Digest of what every program on this machine depends on: versions, flags, CPU, sources."""
    device = jax.devices()[0]
    parts = (
        jax.__version__,
        importlib.metadata.version("jaxlib"),
        device.platform,
        device.device_kind,
        str(jax.device_count()),
        device.client.platform_version,
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        _cpu_features(),
        hash_sources(),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class ProgramStore:
    """A directory of serialised executables."""

    def __init__(self, directory: Path, *, key: str, devices: Sequence[Any]) -> None:
        """Use a directory.

        Args:
            directory: created when the first program is stored.
            key: what all programs of this engine depend on.
            devices: what the programs run on; a process may see more than its mesh uses.
        """
        self._directory = directory
        self._key = key
        self._devices = devices

    def load_or_compile(
        self, name: str, compile_: Callable[[], jax.stages.Compiled]
    ) -> jax.stages.Compiled:
        """Return the stored program, or compile and store it.

        Args:
            name: identifies the program within the key, such as its bucket.
            compile_: called when there is no valid stored program.
        """
        path = self._path(name)
        program = self._load(path)
        if program is None:
            program = compile_()
            self._save(path, program)
        return program

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(f"{self._key}\0{name}".encode()).hexdigest()
        return self._directory / f"{digest[:40]}.program"

    def _load(self, path: Path) -> jax.stages.Compiled | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        digest, payload = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != digest:
            logger.warning("stored program %s is damaged; compiling it again", path.name)
            return None
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(payload), execution_devices=self._devices
            )
        except Exception as error:  # any failure of a foreign loader means: do not use the file
            logger.warning("stored program %s does not load (%s); compiling it", path.name, error)
            return None

    def _save(self, path: Path, program: jax.stages.Compiled) -> None:
        """Write atomically: several replicas may start at once."""
        payload = pickle.dumps(serialize_executable.serialize(program))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, path)
        except OSError as error:
            logger.warning("program store %s is not writable: %s", self._directory, error)
