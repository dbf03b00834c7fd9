"""The application's settings: the `args` of serve_config.yaml, checked before anything starts.

Pydantic at the door, frozen dataclasses behind it. Unknown keys are refused. Knows neither Ray nor
what the parts do with their configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from app.auth import load_key_hashes
from app.errors import ConfigError
from app.ingress_config import IngressConfig
from app.json_types import is_object
from app.router.core import RouterConfig
from app.tool_calls.styles import CallStyle, ReasoningStyle
from replicas.config import DEFAULT_PROFILE_DIRECTORY, EngineConfig, TracingConfig
from replicas.tracing import check_exporter

_CHECKOUT = Path(__file__).resolve().parents[1]
_MODEL_FILES = ("config.json", "tokenizer.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many engine replicas there are and what each reserves.

    Attributes:
        num_replicas: fixed number of replicas; ignored where `autoscaling` is given.
        autoscaling: Serve's autoscaling_config, or None.
        num_cpus: logical CPUs that a replica reserves.
        resources: custom resources that it reserves, e.g. {"TPU": 4} for a host with four chips.
        drain_timeout_s: how long a stopping replica may finish its requests.
        health_check_period_s: seconds between health checks.
        health_check_timeout_s: a check without an answer for this long counts as failed.
    """

    num_replicas: int = 1
    autoscaling: dict[str, Any] | None = None
    num_cpus: float = 0.0
    resources: dict[str, float]
    drain_timeout_s: float = 10.0
    health_check_period_s: float = 5.0
    health_check_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that `app.build` binds.

    Attributes:
        engine: how one replica runs the model.
        replicas: how many there are.
        router: limits of the router.
        ingress: the HTTP edge.
        num_ingress_replicas: processes that speak HTTP, about one core each under load.
        tracing: where the spans of all of them go.
        sink_ports: first and last port on which tokens and load events may arrive; None: any.
    """

    engine: EngineConfig
    replicas: ReplicaOptions
    router: RouterConfig
    ingress: IngressConfig
    num_ingress_replicas: int
    tracing: TracingConfig
    sink_ports: tuple[int, int] | None = None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Replicas(_Section):
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: dict[str, Any] | None = None
    num_cpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    drain_timeout_s: float = Field(default=10.0, ge=0)
    health_check_period_s: float = Field(default=5.0, gt=0)
    health_check_timeout_s: float = Field(default=60.0, gt=0)


class _Ingress(_Section):
    num_replicas: int = Field(default=1, ge=1)
    api_keys_file: Path | None = None
    api_key_hashes: list[str] = Field(default_factory=list)
    admin_keys_file: Path | None = None
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_choices: int = Field(default=128, ge=1)
    keep_alive_s: float = Field(default=5.0, gt=0)
    request_timeout_s: float | None = Field(default=3600.0, gt=0)
    tool_call_style: Literal["auto"] | CallStyle = "auto"
    reasoning_style: Literal["auto"] | ReasoningStyle = "auto"


class _Args(_Section):
    model: str
    served_model_name: str | None = None
    engine: EngineConfig
    replicas: _Replicas = _Replicas()
    router: RouterConfig = RouterConfig()
    ingress: _Ingress = _Ingress()
    tracing: TracingConfig = TracingConfig()
    sink_ports: tuple[int, int] | None = None

    @field_validator("sink_ports")
    @classmethod
    def _check_ports(cls, ports: tuple[int, int] | None) -> tuple[int, int] | None:
        if ports is not None and not 1024 <= ports[0] <= ports[1] <= 65535:
            raise ValueError(f"first and last port, in [1024, 65535], got {list(ports)}")
        return ports


def parse_settings(args: Mapping[str, Any], *, root: Path = _CHECKOUT) -> Settings:
    """Check the application's `args` and turn them into settings.

    Args:
        args: as in serve_config.yaml.
        root: directory that relative paths are relative to: the checkout, because Ray's processes
            run in directories of their own.

    Raises:
        ConfigError: a key is unknown or a value is wrong (all are listed), or a file that is named
            is not there.
    """
    model_dir = _find_model(args.get("model"), root)
    engine: object = args.get("engine") or {}
    if is_object(engine):
        if "model" in engine:
            raise ConfigError("engine.model: set the model at the top of args, not in `engine`")
        engine = {**engine, "model": str(model_dir)}
        if isinstance(store := engine.get("program_store"), str):
            engine["program_store"] = str(root / Path(store).expanduser())
        profiles = str(engine.get("profile_directory") or DEFAULT_PROFILE_DIRECTORY)
        engine["profile_directory"] = str(root / Path(profiles).expanduser())
    sections = {name: value for name, value in args.items() if value is not None}
    try:
        parsed = _Args.model_validate({**sections, "engine": engine})
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    ingress = parsed.ingress
    try:
        check_exporter(parsed.tracing)
    except ValueError as error:
        raise ConfigError(f"tracing: {error}") from None
    trace_directory = str(root / Path(parsed.tracing.directory).expanduser())
    keys_file = None if ingress.api_keys_file is None else root / ingress.api_keys_file
    admin_file = None if ingress.admin_keys_file is None else root / ingress.admin_keys_file
    return Settings(
        engine=parsed.engine,
        replicas=ReplicaOptions(**parsed.replicas.model_dump()),
        router=parsed.router,
        ingress=IngressConfig(
            model_dir=str(model_dir),
            model_id=parsed.served_model_name or model_dir.name,
            key_hashes=load_key_hashes(ingress.api_key_hashes, keys_file),
            admin_key_hashes=load_key_hashes((), admin_file),
            max_body_bytes=ingress.max_body_bytes,
            max_choices=ingress.max_choices,
            keep_alive_s=ingress.keep_alive_s,
            request_timeout_s=ingress.request_timeout_s,
            tool_call_style=None if ingress.tool_call_style == "auto" else ingress.tool_call_style,
            reasoning_style=None if ingress.reasoning_style == "auto" else ingress.reasoning_style,
        ),
        num_ingress_replicas=ingress.num_replicas,
        tracing=replace(parsed.tracing, directory=trace_directory),
        sink_ports=parsed.sink_ports,
    )


def _find_model(model: object, root: Path) -> Path:
    if not isinstance(model, str) or not model:
        raise ConfigError("model: the directory of a model is required")
    directory = (root / Path(model).expanduser()).resolve()
    if not directory.is_dir():
        raise ConfigError(
            f"model: {directory} is not a directory; `make setup` imports the default model, and "
            "any directory in Hugging Face's format can be named"
        )
    missing = [name for name in _MODEL_FILES if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"model: {directory} lacks {', '.join(missing)}")
    return directory


def _describe(error: ValidationError) -> str:
    lines: list[str] = []
    for problem in error.errors(include_url=False, include_context=False):
        path = ".".join(map(str, problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = "there is no such setting"
        elif problem["type"] not in ("value_error", "missing"):
            message = f"{message[:1].lower()}{message[1:]}, got {problem['input']!r}"
        lines.append(f"{path}: {message}")
    return "; ".join(lines)
