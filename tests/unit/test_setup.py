"""Set-up: lock files, the search for Python, platform messages, what is shown of pip's output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ops.setup as checkout
from ops.setup import SetupError

ROOT = Path(__file__).parents[2]


def test_development_lock_holds_every_runtime_pin() -> None:
    runtime = checkout.read_pins(checkout.RUNTIME_LOCK)
    assert "ray==2.60.0" in {pin.replace("[serve]", "") for pin in runtime}
    assert runtime <= checkout.read_pins(checkout.DEV_LOCK)


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-dev.lock"])
def test_locks_pin_hashes_and_name_no_host(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert text.count("==") <= text.count("--hash=sha256:")


@pytest.mark.parametrize(
    ("system", "machine", "libc", "message"),
    [
        ("Windows", "AMD64", "", "Windows on AMD64 is not supported.*WSL 2"),
        ("Darwin", "x86_64", "", "macOS on Apple silicon"),
        ("Linux", "riscv64", "glibc", "riscv64 is not supported"),
        ("Linux", "x86_64", "", "does not use glibc"),
    ],
)
def test_an_unsupported_platform_is_named(
    system: str, machine: str, libc: str, message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        checkout.check_platform(system, machine, libc)


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [("Linux", "x86_64", "glibc"), ("Linux", "aarch64", "glibc"), ("Darwin", "arm64", "")],
)
def test_a_supported_platform_passes(system: str, machine: str, libc: str) -> None:
    checkout.check_platform(system, machine, libc)


def test_another_python_is_refused() -> None:
    with pytest.raises(SetupError, match=r"needs Python 3\.12, but runs under 3\.11"):
        checkout.check_python((3, 11))


def test_pips_output_is_reduced_to_downloads_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "WARNING: Location 'x' is ignored: it is either a non-existing path or lacks a scheme.",
        "Collecting ray==2.60.0 (from -r requirements.lock (line 7))",
        "  Downloading ray-2.60.0-cp312-cp312-manylinux2014_x86_64.whl (79.3 MB)",
        "Requirement already satisfied: idna==3.20 in ./.venv/lib",
        "Collecting jax==0.12.0.1 (from -r requirements.lock (line 9))",
        "  Using cached jax-0.12.0.1-py3-none-any.whl (3.5 MB)",
        "Installing collected packages: ray, jax",
        "ERROR: something broke",
    ]
    checkout.show_progress(lines, num_packages=2)
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "  [1/2] Downloading ray (79.3 MB)",
        "  [2/2] Using cached jax (3.5 MB)",
        "  Installing 2 packages",
    ]
    assert shown.err == "  ERROR: something broke\n"


def test_an_install_counts_only_for_the_very_lock_it_was_made_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "VENV", tmp_path / ".venv")
    lock = tmp_path / "requirements.lock"
    lock.write_text("a==1\n")
    assert not checkout.is_installed(lock)
    checkout.venv_python().parent.mkdir(parents=True)
    checkout.venv_python().touch()
    checkout.stamp_of(lock).write_text(checkout.digest_of(lock))
    assert checkout.is_installed(lock)
    lock.write_text("a==2\n")
    assert not checkout.is_installed(lock)


def test_the_environments_programs_find_the_checkout_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", "import app.router.pinned as m; print(m.__file__)"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(ROOT / "app" / "router" / "pinned.py")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # As a user would call it: without what a make that runs these tests passes on.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=inherited, capture_output=True, text=True, check=False
    )


def write_script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_python_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    shim = write_script(tmp_path / "python3.12", "echo 'not installed' >&2; exit 127")
    real = write_script(tmp_path / "python3", 'test "$1" = -c || echo "runs $1 $2"')
    result = make("setup-dev", f"PYTHON_CANDIDATES={shim} {real}")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "runs ops/setup.py --dev\n"
    assert result.stderr == ""


def test_without_python_make_says_what_to_install(tmp_path: Path) -> None:
    shim = write_script(tmp_path / "python3.12", "exit 127")
    result = make("setup", f"PYTHON_CANDIDATES={shim} {tmp_path}/none")
    assert result.returncode != 0
    assert "Python 3.12 was not found. Install it" in result.stderr


def test_ci_runs_the_documented_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "exec make test </dev/null" in script.read_text()
