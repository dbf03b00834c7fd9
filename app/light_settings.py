"""Settings that a running replica takes over without a restart: Serve's `user_config`.

Serve compares an application's `args`, and replaces every replica when they change. What is under
`deployments` in serve_config.yaml is sent to the running replicas instead. Invariant: a value that
is wrong changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from app.auth import load_keys
from app.errors import ConfigError
from app.ingress_config import IngressConfig
from app.router.config import RouterConfig

LIGHT_ROUTER_SETTINGS = (
    "max_queued_requests",
    "max_queued_tokens",
    "max_waiting_per_replica",
    "replica_wait_s",
    "discovery_s",
    "migration_wait_s",
    "max_silent_ticks",
    "max_backlog_s",
)

LIGHT_INGRESS_SETTINGS = (
    "max_body_bytes",
    "body_timeout_s",
    "max_choices",
    "keep_alive_s",
    "request_timeout_s",
)

KEY_FILES = ("api_keys_file", "admin_keys_file")
"""Read again whenever the user_config changes: new keys take a new file name."""

_CHECKOUT = Path(__file__).resolve().parents[1]

# Serve sets up this logger's handlers in every replica.
logger = logging.getLogger("ray.serve")


class UserConfig[T]:
    """What Serve's `user_config` makes of the settings of one deployment's replica."""

    def __init__(self, owner: str, apply: Callable[[Mapping[str, Any]], T]) -> None:
        """Read settings for `owner`, as the log calls it; `apply` raises ConfigError."""
        self._owner = owner
        self._apply = apply
        self._was_taken = False

    def take(self, user_config: Mapping[str, Any]) -> T | None:
        """Return the settings from now on; None: those in force stay, and the log says why.

        Raises:
            ConfigError: a setting is unknown or wrong, and this is the replica's start.
        """
        try:
            settings = self._apply(user_config)
        except ConfigError as error:
            if not self._was_taken:
                raise
            logger.error("user_config of %s is not used: %s", self._owner, error)
            return None
        self._was_taken = True
        logger.info("the settings of %s are now %s", self._owner, settings)
        return settings


def apply_light_settings[T: (IngressConfig, RouterConfig)](
    config: T, user_config: Mapping[str, Any], allowed: tuple[str, ...]
) -> T:
    """Return `config` with what `user_config` says.

    Raises:
        ConfigError: a key is not one of `allowed`, or a value is wrong.
    """
    if unknown := sorted(set(user_config) - set(allowed)):
        raise ConfigError(
            f"user_config: {unknown[0]} cannot be changed while a replica runs; these can: "
            f"{', '.join(allowed)}. Others belong to the application's args"
        )
    try:
        return TypeAdapter(type(config)).validate_python({**asdict(config), **user_config})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if name := ".".join(map(str, first["loc"])):  # else the message names it
            message = f"{name}: {message}, got {user_config.get(name)!r}"
        raise ConfigError(f"user_config: {message}") from None


def apply_ingress_settings(
    config: IngressConfig, user_config: Mapping[str, Any], *, root: Path = _CHECKOUT
) -> IngressConfig:
    """Return the ingress' `config` with what `user_config` says, files of keys included.

    Raises:
        ConfigError: a key is not one that may change, or a value is wrong.
    """
    files = {name: user_config[name] for name in KEY_FILES if name in user_config}
    rest = {name: value for name, value in user_config.items() if name not in files}
    for name, value in rest.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise ConfigError(f"user_config: {name} must be > 0, got {value!r}")
    keys = {
        name: load_keys((), root / Path(str(path)).expanduser()) for name, path in files.items()
    }
    changed = apply_light_settings(config, rest, LIGHT_INGRESS_SETTINGS)
    if (names := keys.get("api_keys_file")) is not None:
        changed = replace(changed, key_hashes=frozenset(names), key_names=names)
    if (names := keys.get("admin_keys_file")) is not None:
        changed = replace(changed, admin_key_hashes=frozenset(names))
    return changed
