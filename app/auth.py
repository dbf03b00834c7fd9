"""API keys: who may call, and whether the server may listen where it is told to.

Keys are held as sha256 digests only, so neither a config file nor a memory dump of the settings
gives them away. Invariant: a server without keys never listens beyond the local machine.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from app.errors import ConfigError
from replicas.errors import AuthenticationError

_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


def hash_key(key: bytes) -> str:
    """Return the digest under which a key is stored: lower-case hex of its sha256."""
    return hashlib.sha256(key).hexdigest()


def load_key_hashes(hashes: Iterable[str], path: Path | None) -> frozenset[str]:
    """Collect the digests of all accepted keys; arguments and errors as in `load_keys`."""
    return frozenset(load_keys(hashes, path))


def load_keys(hashes: Iterable[str], path: Path | None) -> dict[str, str]:
    """Collect the digests of all accepted keys, each with its name.

    Args:
        hashes: digests from the config, with or without a `sha256:` prefix.
        path: a file with one entry a line, or None: `sha256:<digest>`, or a key in clear text,
            then perhaps a space and the key's name. Several keys may share one. Blank lines and
            lines that start with `#` do not count.

    Raises:
        ConfigError: a digest or a name is malformed, or the file is unreadable or holds no key.
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
    named = [entry.split(maxsplit=1) for entry in entries]
    digests = [_digest_of(entry[0]) for entry in named]
    names = [_checked_name(entry[1]) if len(entry) == 2 else "" for entry in named]
    return {d: name or default_name(d) for d, name in zip(digests, names, strict=True)}


def default_name(digest: str) -> str:
    """Name a key that was given no name."""
    return f"key-{digest[:8]}"


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "api key name: expected 1 to 64 letters, digits, '-', '_' or '.' behind the key, got "
            f"{len(name)} characters that are not"
        )
    return name


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


def check_key(authorization: bytes | None, key_hashes: Collection[str]) -> str | None:
    """Accept or refuse the value of an Authorization header; return the digest of its key.

    With no keys configured everybody is accepted, and it is None. Every configured digest is
    compared, each in constant time, so the answer's timing tells nothing about which of them came
    close.

    Raises:
        AuthenticationError: no key, a malformed header, or a key that is not ours.
    """
    if not key_hashes:
        return None
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
    return digest


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
