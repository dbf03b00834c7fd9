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

from app.audit import AuditConfig, check_file
from app.auth import load_key_hashes, load_keys
from app.autoscaling.config import AutoscalingConfig
from app.content_filter import load_check
from app.errors import ConfigError
from app.ingress_config import IngressConfig
from app.json_types import is_object
from app.rate_limits import RateLimit, RateLimits
from app.responses.store import StoreLimits
from app.router.config import RouterConfig
from app.shared_state import SharedStateConfig
from app.tool_calls.styles import CallStyle, ReasoningStyle
from replicas.config import DEFAULT_PROFILE_DIRECTORY, EngineConfig, TracingConfig
from replicas.model_files.fetch import pin_model, read_cache_setting
from replicas.model_files.selection import list_missing
from replicas.model_files.source import (
    LocalSource,
    ModelSource,
    ModelSourceError,
    read_setting,
)
from replicas.tracing import check_exporter

_CHECKOUT = Path(__file__).resolve().parents[1]
WAIT_FOR_BOOT = 1.5
"""A request that finds no replica waits for so many times what a replica takes to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """How many engine replicas there are and what each reserves.

    Attributes:
        num_replicas: fixed number of replicas; ignored where one of the next two is given.
        autoscaling: our policy's settings, or None.
        serve_autoscaling: Serve's own autoscaling_config instead, or None.
        num_cpus: logical CPUs that a replica reserves.
        resources: custom resources that it reserves, e.g. {"TPU": 4} for a host with four chips.
        drain_timeout_s: how long a stopping replica may finish its requests.
        health_check_period_s: seconds between health checks.
        health_check_timeout_s: a check without an answer for this long counts as failed.
    """

    num_replicas: int = 1
    autoscaling: AutoscalingConfig | None = None
    serve_autoscaling: dict[str, Any] | None = None
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
        shared_state: what its replicas share.
        num_ingress_replicas: processes that speak HTTP, about one core each under load.
        tracing: where the spans of all of them go.
        sink_ports: first and last port on which tokens and load events may arrive; None: any.
    """

    engine: EngineConfig
    replicas: ReplicaOptions
    router: RouterConfig
    ingress: IngressConfig
    shared_state: SharedStateConfig
    num_ingress_replicas: int
    tracing: TracingConfig
    sink_ports: tuple[int, int] | None = None


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Replicas(_Section):
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingConfig | None = None
    serve_autoscaling: dict[str, Any] | None = None
    num_cpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    drain_timeout_s: float = Field(default=10.0, ge=0)
    health_check_period_s: float = Field(default=5.0, gt=0)
    health_check_timeout_s: float = Field(default=60.0, gt=0)


class _RateLimits(_Section):
    default: RateLimit = RateLimit()
    keys: dict[str, RateLimit] = Field(default_factory=dict)


class _Ingress(_Section):
    num_replicas: int = Field(default=1, ge=1)
    api_keys_file: Path | None = None
    api_key_hashes: list[str] = Field(default_factory=list)
    admin_keys_file: Path | None = None
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    body_timeout_s: float = Field(default=60.0, gt=0)
    max_choices: int = Field(default=128, ge=1)
    keep_alive_s: float = Field(default=5.0, gt=0)
    request_timeout_s: float | None = Field(default=3600.0, gt=0)
    tool_call_style: Literal["auto"] | CallStyle = "auto"
    reasoning_style: Literal["auto"] | ReasoningStyle = "auto"
    limits: _RateLimits = _RateLimits()
    audit_file: Path | None = None
    audit_texts: bool = False
    content_filter: str | None = None
    responses: StoreLimits = StoreLimits()


class _Args(_Section):
    model: str
    revision: str | None = None
    model_cache: str | None = None
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
    source = _find_model(args.get("model"), args.get("revision"), root)
    cache = args.get("model_cache")
    model_cache = read_cache_setting(
        cache if isinstance(cache, str) else None, source=source, root=root
    )
    engine: object = args.get("engine") or {}
    if is_object(engine):
        for name in ("model", "model_cache"):
            if name in engine:
                raise ConfigError(f"engine.{name}: set it at the top of args, not in `engine`")
        engine = {**engine, "model": str(source), "model_cache": model_cache}
        if isinstance(store := engine.get("program_store"), str):
            engine["program_store"] = str(root / Path(store).expanduser())
        profiles = str(engine.get("profile_directory") or DEFAULT_PROFILE_DIRECTORY)
        engine["profile_directory"] = str(root / Path(profiles).expanduser())
    sections = {name: value for name, value in args.items() if value is not None}
    try:
        parsed = _Args.model_validate({**sections, "engine": engine})
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None
    ingress, replicas = parsed.ingress, parsed.replicas
    if replicas.autoscaling is not None and replicas.serve_autoscaling is not None:
        raise ConfigError("replicas: give autoscaling or serve_autoscaling, not both")
    try:
        check_exporter(parsed.tracing)
    except ValueError as error:
        raise ConfigError(f"tracing: {error}") from None
    trace_directory = str(root / Path(parsed.tracing.directory).expanduser())
    keys_file = None if ingress.api_keys_file is None else root / ingress.api_keys_file
    key_names = load_keys(ingress.api_key_hashes, keys_file)
    limits = _rate_limits(ingress.limits, key_names)
    admin_file = None if ingress.admin_keys_file is None else root / ingress.admin_keys_file
    return Settings(
        engine=parsed.engine,
        replicas=ReplicaOptions(**dict(replicas)),
        router=_router_config(parsed.router, replicas.autoscaling),
        ingress=IngressConfig(
            model_dir=str(source),
            model_id=parsed.served_model_name or source.name,
            model_cache=model_cache,
            key_hashes=frozenset(key_names),
            key_names=key_names,
            admin_key_hashes=load_key_hashes((), admin_file),
            max_body_bytes=ingress.max_body_bytes,
            body_timeout_s=ingress.body_timeout_s,
            max_choices=ingress.max_choices,
            keep_alive_s=ingress.keep_alive_s,
            request_timeout_s=ingress.request_timeout_s,
            tool_call_style=None if ingress.tool_call_style == "auto" else ingress.tool_call_style,
            reasoning_style=None if ingress.reasoning_style == "auto" else ingress.reasoning_style,
            limits=limits,
            audit=_audit(ingress, root),
            content_filter=_checked_filter(ingress.content_filter),
        ),
        shared_state=SharedStateConfig(responses=ingress.responses, limits=limits),
        num_ingress_replicas=ingress.num_replicas,
        tracing=replace(parsed.tracing, directory=trace_directory),
        sink_ports=parsed.sink_ports,
    )


def _router_config(router: RouterConfig, autoscaling: AutoscalingConfig | None) -> RouterConfig:
    """Have requests wait for the first replica where there are times without one."""
    if autoscaling is None or not autoscaling.can_reach_zero or router.replica_wait_s:
        return router
    return replace(router, replica_wait_s=WAIT_FOR_BOOT * autoscaling.boot_s)


def pin_version(settings: Settings) -> Settings:
    """Replace a model that is downloaded by the version of it that there is now.

    Asks the bucket or the Hub; all replicas then serve the same files, whenever they start.

    Raises:
        ConfigError: the model cannot be had.
    """
    engine = settings.engine
    try:
        model = pin_model(engine.model, cache=engine.model_cache)
    except ModelSourceError as error:
        raise ConfigError(f"model: {error}") from error
    return replace(
        settings,
        engine=replace(engine, model=model),
        ingress=replace(settings.ingress, model_dir=model),
    )


def _rate_limits(given: _RateLimits, key_names: Mapping[str, str]) -> RateLimits:
    unknown = given.keys.keys() - set(key_names.values())
    if unknown:
        raise ConfigError(
            f"ingress.limits.keys.{min(unknown)}: no API key has that name; a name stands behind "
            "its key in api_keys_file"
        )
    return RateLimits(default=given.default, keys=dict(given.keys))


def _audit(ingress: _Ingress, root: Path) -> AuditConfig | None:
    if ingress.audit_file is None:
        if ingress.audit_texts:
            raise ConfigError("ingress.audit_texts: has no effect without audit_file")
        return None
    path = root / ingress.audit_file.expanduser()
    try:
        check_file(path)
    except OSError as error:
        raise ConfigError(f"ingress.audit_file: {error}") from None
    return AuditConfig(file=str(path), include_text=ingress.audit_texts)


def _checked_filter(name: str | None) -> str | None:
    if name is not None:
        try:
            load_check(name)
        except ValueError as error:
            raise ConfigError(f"ingress.content_filter: {error}") from None
    return name


def _find_model(model: object, revision: object, root: Path) -> ModelSource:
    if not isinstance(model, str) or not model:
        raise ConfigError("model: a directory, gs://bucket/path or org/name of the Hub is required")
    try:
        source = read_setting(
            model, revision=revision if isinstance(revision, str) else None, root=root
        )
    except ModelSourceError as error:
        raise ConfigError(f"model: {error}") from None
    if not isinstance(source, LocalSource):
        return source
    directory = source.directory
    if not directory.is_dir():
        raise ConfigError(
            f"model: {directory} is not a directory; `make setup` imports the default model, and "
            "any directory in Hugging Face's format can be named"
        )
    names = [path.name for path in directory.iterdir() if path.is_file()]
    if missing := list_missing(names):
        raise ConfigError(f"model: {directory} lacks {', '.join(missing)}")
    return source


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
