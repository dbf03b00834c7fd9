"""Engine configurations out of a Serve config file, for tools that run without the app.

Reads `model`, `engine` and the compilers' variables of each application and nothing else. The app
checks the whole file with pydantic, which has no place here; values that it would refuse are
refused here, too, if less politely. Paths are relative to the checkout, as they are for the app.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from replicas.config import EngineConfig
from replicas.model_files.fetch import read_cache_setting
from replicas.model_files.source import read_setting

_CHECKOUT = Path(__file__).resolve().parents[2]
_COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApplication:
    """An application of a Serve config file, as far as its engine is concerned.

    Attributes:
        name: of the application.
        engine: how one replica runs its model.
        compiler_variables: those environment variables of its replicas that compilers read.
    """

    name: str
    engine: EngineConfig
    compiler_variables: dict[str, str]


def read_applications(path: Path, *, root: Path = _CHECKOUT) -> list[EngineApplication]:
    """Read every application of a Serve config file.

    Raises:
        ValueError: the file is not one, or an engine's settings are wrong; named with the value.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    applications = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(applications, list) or not applications:
        raise ValueError(f"{path} is not a Serve config file: it has no list `applications`")
    return [_read_application(application, root) for application in applications]


def _read_application(application: Mapping[str, Any], root: Path) -> EngineApplication:
    name = str(application.get("name", "default"))
    args = application.get("args") or {}
    if not isinstance(args.get("model"), str):
        raise ValueError(f"application {name!r}: args.model: the directory of a model is required")
    settings = dict(args.get("engine") or {})
    _check_types(settings)
    source = read_setting(args["model"], revision=args.get("revision"), root=root)
    settings["model"] = str(source)
    settings["model_cache"] = read_cache_setting(args.get("model_cache"), source=source, root=root)
    if store := settings.get("program_store"):
        settings["program_store"] = str(root / Path(store).expanduser())
    variables = (application.get("runtime_env") or {}).get("env_vars") or {}
    return EngineApplication(
        name=name,
        engine=EngineConfig(**settings),
        compiler_variables={
            key: str(variables[key]) for key in _COMPILER_VARIABLES if key in variables
        },
    )


def _check_types(settings: Mapping[str, Any]) -> None:
    hints = typing.get_type_hints(EngineConfig)
    known = {field.name for field in dataclasses.fields(EngineConfig)} - {"model", "model_cache"}
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"engine.{name}: there is no such setting")
        if not _is_instance(value, hints[name]):
            raise ValueError(f"engine.{name}: needs {hints[name]}, got {value!r}")


def _is_instance(value: object, hint: Any) -> bool:
    """Whether a YAML value is of a setting's type: scalars, literals, unions and mappings."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_instance(value, part) for part in typing.get_args(hint))
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))
