"""Builds the native CPU kernels with the machine's C++ compiler and registers them with XLA.

Owns the cache of built libraries: one directory per fingerprint under `.cache/native/` of the
checkout, each written aside and renamed into place, so any number of processes may build at once.
Knows nothing of what the kernels compute. Where they cannot be had, `NativeUnavailable` says why,
and the jnp reference serves.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent / "src"
_CACHE_DIR = Path(__file__).resolve().parents[2] / ".cache" / "native"
_LIBRARY_NAME = "libsystole_cpu.so"
_COMPILERS = ("g++", "clang++", "c++")
_COMPILE_TIMEOUT_S = 300

# No fast-math and no contraction: a result is the operations in the order they are written.
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-w",
)
_AVX2_FLAGS = ("-mavx2", "-mfma")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_ISA_FLAGS = {
    "generic": (),
    "avx2": _AVX2_FLAGS,
    "avx512": _AVX512_FLAGS,
    "avx512_vnni": (*_AVX512_FLAGS, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512_FLAGS, "-mavx512vnni", "-mavx512bf16"),
}
_X86_64 = ("x86_64", "AMD64")
_PER_ISA = {  # instruction sets that each is compiled for
    "attention_isa.cc": ("generic", "avx2", "avx512"),
    "matmul_isa.cc": ("generic", "avx2", "avx512", "avx512_bf16"),
    "int8_matmul_isa.cc": ("generic", "avx2", "avx512", "avx512_vnni"),
    "token_masks_isa.cc": ("generic", "avx2", "avx512"),
}
_TARGETS = (
    "systole_int8_experts",
    "systole_int8_linear",
    "systole_linear",
    "systole_quantized_paged_attention",
    "systole_ragged_paged_attention",
    "systole_token_masks",
)  # and their handlers' symbols


class NativeUnavailable(Exception):
    """The native kernels cannot be built or loaded on this machine; the message says why."""


def load() -> None:
    """Register the FFI targets, building the library first where that has not been done.

    Needed before a serialised program that calls a target is loaded. Does its work once per
    process, and logs one line where that fails.

    Raises:
        NativeUnavailable: no compiler, a failed build, or a library that does not load.
    """
    if reason := _register():
        raise NativeUnavailable(reason)


def build() -> Path:
    """Compile the library unless its fingerprint is cached; return its path.

    Takes some 10 s of one core. Concurrent callers each build aside and the first rename wins.

    Raises:
        NativeUnavailable: no compiler, or it failed; the message ends with its last lines.
    """
    target = _CACHE_DIR / fingerprint() / _LIBRARY_NAME
    if target.exists():
        return target
    compiler = _find_compiler()
    logger.info("compiling the native CPU kernels with %s (once, some 10 s)", compiler)
    try:
        _CACHE_DIR.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=_CACHE_DIR) as scratch:
            built = _compile(compiler, Path(scratch))
            target.parent.mkdir(exist_ok=True)
            os.replace(built, target)
    except OSError as error:
        raise NativeUnavailable(
            f"cannot write the native kernels to {_CACHE_DIR}: {error}"
        ) from error
    return target


@functools.cache
def fingerprint() -> str:
    """Return the hash of sources, flags, FFI headers' version and CPU features: 16 hex digits.

    Two machines with one fingerprint run the same instructions and produce the same bits.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(_SOURCE_DIR.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_FLAGS, _isa_flags(), jax.__version__, _cpu_features())).encode())
    return digest.hexdigest()


def instruction_set() -> str:
    """Return the instruction set in use, e.g. "avx512_vnni"; see `_ISA_FLAGS`."""
    function = ctypes.CDLL(str(build())).systole_instruction_set
    function.restype = ctypes.c_char_p
    return function().decode()


def use_instruction_set(name: str) -> None:
    """Make the kernels of this process use `name`, for tests and benches.

    Raises:
        ValueError: this machine does not run it, or there are no kernels for it.
    """
    function = ctypes.CDLL(str(build())).systole_use_instruction_set
    function.restype = ctypes.c_bool
    if not function(name.encode()):
        raise ValueError(f"this machine has no kernels for {name!r}; it uses {instruction_set()!r}")


@functools.cache
def _register() -> str | None:
    """Register every target; return why that is impossible, or None."""
    try:
        path = build()
        library = ctypes.CDLL(str(path))
    except (NativeUnavailable, OSError) as error:
        logger.warning("no native CPU kernels, the slower jnp path serves: %s", error)
        return str(error)
    for target in _TARGETS:
        capsule = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(target, capsule, platform="cpu")
    return None


def _find_compiler() -> str:
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise NativeUnavailable(f"no C++ compiler ({', '.join(_COMPILERS)}) is on PATH")


def _isa_flags() -> dict[str, tuple[str, ...]]:
    if platform.machine() in _X86_64:
        return _ISA_FLAGS
    return {"generic": _ISA_FLAGS["generic"]}


def _cpu_features() -> str:
    """What chooses between instruction sets, e.g. "x86_64 AuthenticAMD avx2 avx512f fma"."""
    avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"}
    wanted = {"avx2", "fma"} | avx512
    fields: dict[str, str] = {}  # of the first processor
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass  # not Linux: the machine's name alone
    features = sorted(wanted & set(fields.get("flags", "").split()))
    return " ".join([platform.machine(), fields.get("vendor_id", ""), *features])


def _compile(compiler: str, out_dir: Path) -> Path:
    """Compile every source into `out_dir`, in parallel, and link; return the library."""
    jobs: list[tuple[Path, tuple[str, ...]]] = []
    for source in sorted(_SOURCE_DIR.glob("*.cc")):
        if source.name in _PER_ISA:
            for isa in _PER_ISA[source.name]:
                if isa in _isa_flags():
                    defines = (f"-DSYSTOLE_ISA={isa}", *_isa_flags()[isa])
                    jobs.append((out_dir / f"{source.stem}_{isa}.o", (*defines, "-c", str(source))))
        else:
            include = ("-isystem", jax.ffi.include_dir())
            jobs.append((out_dir / f"{source.stem}.o", (*include, "-c", str(source))))
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda job: _run([compiler, *_FLAGS, *job[1], "-o", str(job[0])]), jobs):
            pass
    library = out_dir / _LIBRARY_NAME
    objects = [str(path) for path, _ in jobs]
    _run([compiler, "-shared", *objects, "-o", str(library)])
    return library


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise NativeUnavailable(f"{command[0]} failed with status {done.returncode}:\n{tail}")
