"""API keys: who may call, and whether the server may listen where it is told to.

Keys are held as sha256 digests only, so neither a config file nor a memory dump of the settings
gives them away. Invariant: a server without keys never listens beyond the local machine.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

from app.errors import ConfigError
from replicas.errors import AuthenticationError

_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


def hash_key(key: bytes) -> str:
    """Return the digest under which a key is stored: lower-case hex of its sha256."""
    return hashlib.sha256(key).hexdigest()


def load_key_hashes(hashes: Iterable[str], path: Path | None) -> frozenset[str]:
    """Collect the digests of all accepted keys.

    Args:
        hashes: digests from the config, with or without a `sha256:` prefix.
        path: a file with one entry a line, or None: `sha256:<digest>`, or a key in clear text.
            Blank lines and lines that start with `#` do not count.

    Raises:
        ConfigError: a digest is malformed, or the file is unreadable or holds no key.
    """
    entries = [entry if entry.startswith("sha256:") else f"sha256:{entry}" for entry in hashes]
    if path is not None:
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_keys_file: cannot read {path}: {error}") from error
        from_file = [line for line in lines if line and not line.startswith("#")]
        if not from_file:
            raise ConfigError(f"api_keys_file: {path} holds no key")
        entries += from_file
    return frozenset(_digest_of(entry) for entry in entries)


def _digest_of(entry: str) -> str:
    if not entry.startswith("sha256:"):
        return hash_key(entry.encode())
    digest = entry.removeprefix("sha256:").lower()
    if not _HEX_DIGEST.fullmatch(digest):
        raise ConfigError(
            "api key hash: expected 64 hex digits (the key's sha256), got "
            f"{len(digest)} characters; `printf %s KEY | sha256sum` prints one"
        )
    return digest


def check_key(authorization: bytes | None, key_hashes: frozenset[str]) -> None:
    """Accept or refuse the value of an Authorization header.

    With no keys configured everybody is accepted. Every configured digest is compared, each in
    constant time, so the answer's timing tells nothing about which of them came close.

    Raises:
        AuthenticationError: no key, a malformed header, or a key that is not ours.
    """
    if not key_hashes:
        return
    scheme, _, key = (authorization or b"").partition(b" ")
    key = key.strip()
    if scheme.lower() != b"bearer" or not key:
        raise AuthenticationError(
            "no API key: send it in the header `Authorization: Bearer YOUR_KEY`"
        )
    digest = hash_key(key)
    matches = [hmac.compare_digest(digest, known) for known in key_hashes]
    if not any(matches):
        raise AuthenticationError("the API key is not one of this server's keys")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, *, has_keys: bool) -> None:
    """Refuse to listen beyond the local machine without API keys.

    Raises:
        ConfigError: `host` is reachable from elsewhere and no key is configured.
    """
    if not has_keys and not is_loopback(host):
        raise ConfigError(
            f"http_options.host is {host!r}, which other machines can reach, and no API key is "
            "configured: set ingress.api_keys_file or ingress.api_key_hashes in the application's "
            "args, or listen on 127.0.0.1"
        )
