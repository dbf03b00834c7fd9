"""Families whose engines differ most, end to end; `make golden-http` serves every checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.golden_http import GOLDEN_DIR, serve_checkpoint

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_greedy_tokens_over_http_are_the_reference(
    serve_port: int, tmp_path: Path, name: str
) -> None:
    equal, total = serve_checkpoint(GOLDEN_DIR / name, tmp_path, port=serve_port)
    assert equal == total == 48
