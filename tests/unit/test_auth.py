"""API keys, and where a server without any may listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.auth import check_exposure, check_key, hash_key, is_loopback, load_key_hashes
from app.errors import ConfigError
from replicas.errors import AuthenticationError

KEYS = frozenset({hash_key(b"first"), hash_key(b"second")})


def test_any_of_several_keys_is_accepted() -> None:
    for key in (b"first", b"second"):
        check_key(b"Bearer " + key, KEYS)
        check_key(b"bearer  " + key + b" ", KEYS)


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer third",
        b"Basic first",
        b"first",
        b"Bearer First",
        b"Bearer \xff",
        b"Bearer " + hash_key(b"first").encode(),
    ],
)
def test_everything_else_is_refused(header: bytes | None) -> None:
    with pytest.raises(AuthenticationError) as info:
        check_key(header, KEYS)
    assert (info.value.status, info.value.code) == (401, "invalid_api_key")


def test_without_keys_everybody_is_accepted() -> None:
    check_key(None, frozenset())


def test_keys_come_from_hashes_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(
        f"# comment\n\n  plain-key \nsha256:{hash_key(b'b').upper()}\n", encoding="utf-8"
    )
    hashes = load_key_hashes([hash_key(b"c"), f"sha256:{hash_key(b'd')}"], path)
    assert hashes == {hash_key(key) for key in (b"plain-key", b"b", b"c", b"d")}


@pytest.mark.parametrize("content", ["", "# only a comment\n", "sha256:123"])
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError):
        load_key_hashes([], path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_key_hashes([], tmp_path / "nowhere")


def test_a_clear_text_key_among_hashes_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError) as info:
        load_key_hashes(["my-secret-key"], None)
    assert "my-secret-key" not in str(info.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, has_keys=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "localhost.x"])
def test_elsewhere_a_key_is_needed(host: str) -> None:
    check_exposure(host, has_keys=True)
    with pytest.raises(ConfigError, match="api_keys_file"):
        check_exposure(host, has_keys=False)
