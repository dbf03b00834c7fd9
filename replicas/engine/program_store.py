"""Compiled programs kept on disk, so that a second start compiles nothing.

A program lies under the digest of everything that its machine code depends on, with those parts in
clear text before it. An index says which programs an engine of a given fingerprint needs, so that
an unchanged engine starts without lowering anything; where there is no index, programs are lowered
and found by what they are, so that a change of the host's code costs no compilation.

Invariant: a file is unpickled only after its key and its digest match; one that is stale, cut off,
damaged or not ours is replaced, never trusted. The directory itself must be writable by trusted
users only: a digest does not tell who wrote a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from replicas.engine.program_key import (
    KeyParts,
    describe_difference,
    describe_lowered,
    hash_parts,
)

logger = logging.getLogger(__name__)

LowerFn = Callable[[], jax.stages.Lowered]
CompileFn = Callable[[jax.stages.Lowered], jax.stages.Compiled]

_MAGIC = b"systole program 1\n"
_MAX_HEADER_BYTES = 1 << 16
_KEY_DIGITS = 40
_PROGRAM_SUFFIX = ".program"
_INDEX_SUFFIX = ".index.json"
_PARTIAL_PREFIX = ".partial-"
_PARTIAL_MAX_AGE_S = 3600.0
# Readable by the users that replicas run as, whoever built the store.
_FILE_MODE = 0o644


class DamagedProgram(Exception):
    """A file of the store cannot be used; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramHeader:
    """What a stored program says of itself, in clear text before its payload.

    Attributes:
        parts: what the machine code depends on; their digest is the program's key.
        name: its bucket when it was compiled. Information only, as everything below but the
            payload's size and digest.
        model: directory name of the model that it was compiled for.
        created_s: Unix time, seconds.
        compile_s: what it took, seconds.
        payload_bytes: size of the executable.
        payload_sha256: its digest, hex.
    """

    parts: dict[str, str]
    name: str
    model: str
    created_s: float
    compile_s: float
    payload_bytes: int
    payload_sha256: str

    @property
    def key(self) -> str:
        """Digest of `parts`."""
        return hash_parts(self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredProgram:
    """A file of the store, as `entries` found it.

    Attributes:
        path: the file.
        num_bytes: its size.
        header: None where the file cannot be used.
        problem: why the file cannot be used, or None.
    """

    path: Path
    num_bytes: int
    header: ProgramHeader | None
    problem: str | None


def read_program(path: Path) -> tuple[ProgramHeader, bytes]:
    """Read a program's header and payload; unpickles nothing.

    Raises:
        DamagedProgram: the file is of another kind, cut off or damaged, or lies under a name that
            is not its key.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedProgram("not a program of this format")
        header = _parse_header(file.readline(_MAX_HEADER_BYTES))
        payload = file.read()
    if len(payload) != header.payload_bytes:
        raise DamagedProgram(f"cut off: {len(payload)} of {header.payload_bytes} bytes")
    if hashlib.sha256(payload).hexdigest() != header.payload_sha256:
        raise DamagedProgram("damaged: its digest does not match")
    if path.name != _file_name(header.key):
        raise DamagedProgram("its name is not its key")
    return header, payload


class ProgramStore:
    """The programs of one engine in a directory that several engines may share."""

    def __init__(
        self,
        directory: Path,
        *,
        environment: KeyParts,
        fingerprint: str,
        sources: str,
        model: str,
        devices: Sequence[Any],
    ) -> None:
        """Use a directory.

        Args:
            directory: created when the first program is stored.
            environment: key parts that all programs of this engine share.
            fingerprint: of everything that the lowered programs depend on.
            sources: digest of the sources, part of the fingerprint.
            model: name of the model, for people.
            devices: what the programs run on; a process may see more than its mesh uses.
        """
        self.num_compiled = 0
        self.num_loaded = 0
        self._directory = directory
        self._environment = dict(environment)
        self._model = model
        self._devices = devices
        self._fingerprint = fingerprint
        self._sources = sources
        index = _read_index(self._index_path)
        is_ours = index is not None and index.fingerprint == fingerprint
        self._index = dict(index.programs) if index is not None and is_ours else {}
        self._saved_index = dict(self._index)
        self._prefetched: dict[str, Future[jax.stages.Compiled | None]] = {}

    def prefetch(self) -> None:
        """Begin to load what the index names, beside whatever the caller does next.

        One thread: loading allocates so much that two take half as much processor time again.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="program-loader")
        for key in dict.fromkeys(self._index.values()):
            self._prefetched[key] = pool.submit(self._load, key)
        pool.shutdown(wait=False)

    def load_or_compile(self, name: str, lower: LowerFn, compile_: CompileFn) -> Any:
        """Return the stored program, or compile and store it.

        Args:
            name: identifies the program within the engine: its bucket.
            lower: traces it; called when the index does not know its key, or to compile.
            compile_: called when there is no valid stored program.
        """
        key, lowered = self._find(name, lower)
        prefetched = self._prefetched.pop(key, None)
        program = self._load(key) if prefetched is None else prefetched.result()
        if program is not None:
            self.num_loaded += 1
            return program
        return self._compile(name, lower() if lowered is None else lowered, compile_)

    def ensure(self, name: str, lower: LowerFn, compile_: CompileFn) -> bool:
        """Compile and store a program unless a valid one is there; return whether it was not."""
        key, lowered = self._find(name, lower)
        if self._problem(key) is None:
            return False
        self._compile(name, lower() if lowered is None else lowered, compile_)
        return True

    def check(self, name: str, lower: LowerFn) -> str | None:
        """Return why a program would have to be compiled, or None where a valid one is there."""
        key, _ = self._find(name, lower)
        problem = self._problem(key)
        if problem is None or self._path(key).exists():
            return problem
        same_bucket = [
            entry.header
            for entry in self.entries()
            if entry.header is not None
            and (entry.header.name, entry.header.model) == (name, self._model)
        ]
        if not same_bucket:
            return "missing: never compiled"
        latest = max(same_bucket, key=lambda header: header.created_s)
        difference = describe_difference(latest.parts, self._environment)
        return f"stale: {difference or 'the program itself has changed'}"

    def find_key(self, name: str, lower: LowerFn) -> str:
        """Return the key of a program, whether it is there or not."""
        return self._find(name, lower)[0]

    def save_index(self) -> None:
        """Remember which programs this engine needs; to be called once all were looked up."""
        if self._index == self._saved_index:
            return
        index = _Index(
            fingerprint=self._fingerprint,
            sources=self._sources,
            model=self._model,
            programs=self._index,
        )
        self._write(self._index_path, json.dumps(index.to_json(), indent=1).encode() + b"\n")
        self._saved_index = dict(self._index)

    @property
    def _index_path(self) -> Path:
        return self._directory / f"{self._fingerprint[:_KEY_DIGITS]}{_INDEX_SUFFIX}"

    def entries(self) -> Iterator[StoredProgram]:
        """Every program file of the directory, of whatever engine."""
        for path in sorted(self._directory.glob(f"*{_PROGRAM_SUFFIX}")):
            header, problem = None, None
            try:
                header, _ = read_program(path)
            except (DamagedProgram, OSError) as error:
                problem = str(error)
            with contextlib.suppress(OSError):  # deleted meanwhile
                size = path.stat().st_size
                yield StoredProgram(path=path, num_bytes=size, header=header, problem=problem)

    def describe_staleness(self, header: ProgramHeader) -> str:
        """Say why no engine on this machine would load a program; "" when one might.

        A program for another platform is never stale: it was built here for use elsewhere.
        """
        if header.parts.get("platform") != self._environment["platform"]:
            return ""
        own = ("device_kind", "devices", "native_kernels", "xla_options")  # differ between engines
        shared = {name: value for name, value in self._environment.items() if name not in own}
        return describe_difference(header.parts, shared)

    def prune(self) -> list[tuple[Path, str]]:
        """Delete what no engine here would load at its next start; return files and reasons.

        What the looked-up programs, and indexes of today's sources, name stays; so do programs for
        other platforms, which were built here for use elsewhere.
        """
        removed: list[tuple[Path, str]] = []
        needed = set(self._index.values())
        for path in self._directory.glob(f"*{_INDEX_SUFFIX}"):
            index = _read_index(path)
            if index is None or index.sources != self._sources:
                removed.append((path, "index of other sources"))
            else:
                needed.update(index.programs.values())
        for entry in self.entries():
            if entry.header is None:
                removed.append((entry.path, entry.problem or "unreadable"))
            elif stale := self.describe_staleness(entry.header):
                removed.append((entry.path, f"stale: {stale}"))
            elif entry.header.key not in needed and self._is_own_platform(entry.header):
                removed.append((entry.path, "no engine of today's sources was started with it"))
        for path in self._directory.glob(f"{_PARTIAL_PREFIX}*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _PARTIAL_MAX_AGE_S:
                    removed.append((path, "left by a start that was interrupted"))
        for path, _ in removed:
            path.unlink(missing_ok=True)
        return removed

    def _find(self, name: str, lower: LowerFn) -> tuple[str, jax.stages.Lowered | None]:
        """Return a program's key, and the lowered program where that was needed to tell."""
        if name in self._index:
            return self._index[name], None
        lowered = lower()
        self._index[name] = hash_parts(self._parts(lowered))
        return self._index[name], lowered

    def _parts(self, lowered: jax.stages.Lowered) -> dict[str, str]:
        return self._environment | describe_lowered(lowered)

    def _path(self, key: str) -> Path:
        return self._directory / _file_name(key)

    def _read(self, key: str) -> bytes:
        """Return a program's payload, whatever made us look for this key.

        Raises:
            DamagedProgram, OSError: as `read_program`, or it is of another environment.
        """
        header, payload = read_program(self._path(key))
        if difference := describe_difference(header.parts, self._environment):
            raise DamagedProgram(f"stale: {difference}")
        return payload

    def _problem(self, key: str) -> str | None:
        try:
            self._read(key)
        except (DamagedProgram, OSError) as error:
            return str(error)
        return None

    def _load(self, key: str) -> jax.stages.Compiled | None:
        path = self._path(key)
        try:
            payload = self._read(key)
        except FileNotFoundError:
            return None
        except (DamagedProgram, OSError) as error:
            logger.warning("stored program %s: %s; compiling it again", path.name, error)
            return None
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(payload), execution_devices=self._devices
            )
        except Exception as error:  # any failure of a foreign loader means: do not use the file
            logger.warning("stored program %s does not load (%s); compiling it", path.name, error)
            return None

    def _compile(
        self, name: str, lowered: jax.stages.Lowered, compile_: CompileFn
    ) -> jax.stages.Compiled:
        begin_s = time.monotonic()
        program = compile_(lowered)
        self.num_compiled += 1
        try:
            payload = pickle.dumps(serialize_executable.serialize(program))
        except (NotImplementedError, ValueError) as error:
            logger.warning("program %s cannot be stored: %s", name, error)
            return program
        header = ProgramHeader(
            parts=self._parts(lowered),
            name=name,
            model=self._model,
            created_s=time.time(),
            compile_s=time.monotonic() - begin_s,
            payload_bytes=len(payload),
            payload_sha256=hashlib.sha256(payload).hexdigest(),
        )
        line = json.dumps(dataclasses.asdict(header)).encode() + b"\n"
        self._write(self._path(header.key), _MAGIC + line + payload)
        self._index[name] = header.key
        return program

    def _write(self, path: Path, data: bytes) -> None:
        """Write atomically: several replicas may start at once. On a full disk nothing is left."""
        partial: str | None = None
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                dir=self._directory, prefix=_PARTIAL_PREFIX, delete=False
            ) as file:
                partial = file.name
                file.write(data)
            os.chmod(partial, _FILE_MODE)
            os.replace(partial, path)
        except OSError as error:
            if partial is not None:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
            logger.warning("program store %s is not writable: %s", self._directory, error)

    def _is_own_platform(self, header: ProgramHeader) -> bool:
        return header.parts.get("platform") == self._environment["platform"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Index:
    """Which programs an engine needs.

    Attributes:
        fingerprint: of the engine.
        sources: digest of the sources that its programs were lowered from.
        model: directory name of its model. Information only.
        programs: key by program name.
    """

    fingerprint: str
    sources: str
    model: str
    programs: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data with a digest over it."""
        content = dataclasses.asdict(self)
        return content | {"sha256": hash_parts({"index": json.dumps(content, sort_keys=True)})}


def _read_index(path: Path) -> _Index | None:
    """Read an index; None where there is none that can be trusted."""
    try:
        content = json.loads(path.read_bytes())
        digest = content.pop("sha256")
        index = _Index(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        logger.warning("index %s of the program store is damaged; making it again", path.name)
        return None
    if index.to_json()["sha256"] != digest:
        logger.warning("index %s of the program store is damaged; making it again", path.name)
        return None
    return index


def _parse_header(line: bytes) -> ProgramHeader:
    try:
        header = ProgramHeader(**json.loads(line))
    except (ValueError, TypeError) as error:
        raise DamagedProgram(f"its header is damaged: {error}") from None
    if not isinstance(header.parts, dict):
        raise DamagedProgram("its header is damaged: it names no key parts")
    return header


def _file_name(key: str) -> str:
    return f"{key[:_KEY_DIGITS]}{_PROGRAM_SUFFIX}"
