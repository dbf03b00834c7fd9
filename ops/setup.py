"""Sets a checkout up: virtual environment, locked packages, default model, native kernels.

    python3.12 ops/setup.py [--dev]

Standard library only, because nothing is installed yet when it runs. Every part leaves a mark of
what it was made from, so that a second run does nothing and takes a fraction of a second.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
RUNTIME_LOCK = ROOT / "requirements.lock"
# Holds every pin of the runtime lock too (tests/unit/test_setup.py), so it also satisfies that one.
DEV_LOCK = ROOT / "requirements-dev.lock"
KERNELS = ROOT / "kernels" / "cpu"
KERNEL_SUFFIXES = (".py", ".cc", ".h")
KERNELS_UNAVAILABLE_STATUS = 3  # of ops/build_kernels.py
CACHE = ROOT / ".cache"
PLATFORMS = {
    ("Linux", "x86_64"),
    ("Linux", "aarch64"),
    ("Darwin", "arm64"),
}


class SetupError(Exception):
    """Set-up cannot go on; the message says why and what to do."""


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Set this checkout up.")
    parser.add_argument("--dev", action="store_true", help="also install what tests need")
    arguments = parser.parse_args()
    try:
        check_platform(platform.system(), platform.machine(), platform.libc_ver()[0])
        check_python(sys.version_info[:2])
        install(DEV_LOCK if arguments.dev else RUNTIME_LOCK)
        add_checkout_to_path()
        if run_module("replicas.models.default_model") != 0:
            raise SetupError("the default model could not be made (see above)")
        build_kernels()
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def check_platform(system: str, machine: str, libc: str) -> None:
    """Refuse a platform that Ray and JAX publish no packages for.

    Raises:
        SetupError: no packages exist for it.
    """
    supported = "Linux with glibc on x86_64 or aarch64, and macOS on Apple silicon"
    if (system, machine) not in PLATFORMS:
        hint = " On Windows, use WSL 2." if system == "Windows" else ""
        raise SetupError(f"{system} on {machine} is not supported; supported: {supported}.{hint}")
    if system == "Linux" and libc != "glibc":
        raise SetupError(f"this Linux does not use glibc; supported: {supported}.")


def check_python(version: tuple[int, int]) -> None:
    """Refuse another Python than the one the lock files were made for.

    Raises:
        SetupError: it is another version, or it lacks `venv`.
    """
    if version != (3, 12):
        raise SetupError(f"needs Python 3.12, but runs under {version[0]}.{version[1]}")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        raise SetupError(
            "this Python 3.12 cannot make virtual environments; on Debian and Ubuntu: "
            "apt install python3.12-venv"
        ) from None


def install(lock: Path) -> None:
    """Install exactly what `lock` pins into the virtual environment, if that was not done yet.

    Raises:
        SetupError: pip failed.
    """
    if is_installed(lock):
        return
    make_venv()
    print(f"Installing Python packages from {lock.name}", flush=True)
    if not pip_install(venv_python(), lock, "--require-hashes"):
        raise SetupError("pip failed (see above); fix that and run the same command again")
    for installed in {lock, RUNTIME_LOCK}:
        stamp_of(installed).write_text(digest_of(installed), encoding="utf-8")


def add_checkout_to_path() -> None:
    """Let the environment's programs import this checkout from any directory.

    `serve status` needs it: it imports the request router that the running config names.
    """
    (site_packages,) = VENV.glob("lib/python3.*/site-packages")
    path_file = site_packages / "systole.pth"
    content = f"{ROOT}\n"
    if not path_file.exists() or path_file.read_text(encoding="utf-8") != content:
        path_file.write_text(content, encoding="utf-8")


def pip_install(python: Path, lock: Path, *options: str) -> bool:
    """Install what `lock` pins where `python` is, showing progress; False if pip failed."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += [*options, "--progress-bar", "off", "-r", str(lock)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        show_progress(pip.stdout, num_packages=len(read_pins(lock)))
    return pip.returncode == 0


def show_progress(lines: Iterable[str], *, num_packages: int) -> None:
    """Show what pip downloads with its size, and pip's errors; leave its other lines out."""
    num_seen = 0
    for line in lines:
        text = line.strip()
        if text.startswith(("Collecting ", "Processing ")):
            num_seen += 1
        elif match := re.match(r"(Downloading|Using cached) (\S+?)-[^-]*-\S+ (\(.*\))", text):
            verb, name, size = match.groups()
            print(f"  [{num_seen}/{num_packages}] {verb} {name} {size}", flush=True)
        elif text.startswith("Installing collected packages"):
            print(f"  Installing {text.count(',') + 1} packages", flush=True)
        elif text.startswith("ERROR"):
            print(f"  {text}", file=sys.stderr, flush=True)


def read_pins(lock: Path) -> set[str]:
    """Collect the "name==version" pins of a lock file."""
    return set(re.findall(r"^[\w.\-]+==[^\s;\\]+", lock.read_text(encoding="utf-8"), re.MULTILINE))


def make_venv() -> None:
    """Make the virtual environment, anew where it does not run (a Python that was removed)."""
    if venv_python().exists():
        check = subprocess.run(
            [
                str(venv_python()),
                "-c",
                "import pip, sys; sys.exit(sys.version_info[:2] != (3, 12))",
            ],
            check=False,
            capture_output=True,
        )
        if check.returncode == 0:
            return
    print(f"Making the virtual environment {VENV.relative_to(ROOT)}", flush=True)
    venv.create(VENV, with_pip=True, clear=True, symlinks=True)


def venv_python() -> Path:
    """Return the interpreter of the virtual environment."""
    return VENV / "bin" / "python"


def is_installed(lock: Path) -> bool:
    """Tell whether the virtual environment was made from this very lock file and still runs."""
    stamp = stamp_of(lock)
    return (
        stamp.exists()
        and stamp.read_text(encoding="utf-8") == digest_of(lock)
        and venv_python().exists()
    )


def stamp_of(lock: Path) -> Path:
    """Return the file that records which version of `lock` is installed."""
    return VENV / f"{lock.name}.sha256"


def digest_of(path: Path) -> str:
    """Compute the sha256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_kernels() -> None:
    """Build the native kernels, if that was not done yet from these sources.

    Raises:
        SetupError: the build broke; that there is no compiler is not an error.
    """
    sources = sorted(path for path in KERNELS.rglob("*") if path.suffix in KERNEL_SUFFIXES)
    digests = [digest_of(path) for path in (*sources, RUNTIME_LOCK)]
    key = hashlib.sha256("".join([*digests, platform.machine()]).encode()).hexdigest()
    stamp = CACHE / "kernels.sha256"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == key:
        return
    status = run_module("ops.build_kernels")
    if status not in (0, KERNELS_UNAVAILABLE_STATUS):
        raise SetupError("building the native kernels failed (see above)")
    if status == 0:
        CACHE.mkdir(exist_ok=True)
        stamp.write_text(key, encoding="utf-8")


def run_module(name: str) -> int:
    """Run a module of this checkout in the virtual environment; returns its exit status."""
    environment = os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}
    command = [str(venv_python()), "-m", name]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
