"""The TPU example and the configuration page, checked against what the application accepts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from ray.serve._private.constants import RAY_SERVE_HAPROXY_RETRY_ON
from ray.serve.schema import ServeDeploySchema

from app.autoscaling.config import AutoscalingConfig
from app.autoscaling.serve_policy import serve_autoscaling
from app.errors import ConfigError
from app.settings import _Args, parse_settings  # pyright: ignore[reportPrivateUsage]
from tests.node_files import provide_files

ROOT = Path(__file__).resolve().parents[2]
V6E = ROOT / "ops" / "serve_config.v6e.yaml"
TWO_MODELS = ROOT / "ops" / "serve_config.two-models.yaml"
DOCUMENT = ROOT / "docs" / "configuration.md"
NO_DEFAULT = "required"


@pytest.fixture
def v6e() -> dict[str, Any]:
    return yaml.safe_load(V6E.read_text())


@pytest.fixture
def v6e_args(v6e: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The example's `args`, with the files that it expects on a node."""
    args = v6e["applications"][0]["args"]
    assert args["model"].startswith("/")
    assert args["ingress"]["api_keys_file"].startswith("/")
    provide_files(args, tmp_path, model_name="YOUR_MODEL")
    return args


def test_ray_accepts_the_example(v6e: dict[str, Any]) -> None:
    schema = ServeDeploySchema.model_validate(v6e)
    (application,) = schema.applications
    assert application.import_path == "app.build:build"


def test_the_application_accepts_the_example(v6e_args: dict[str, Any]) -> None:
    settings = parse_settings(v6e_args)
    assert settings.engine.platform == "tpu"
    assert settings.ingress.key_hashes
    assert settings.replicas.resources["TPU"] == settings.engine.tensor_parallel


def test_a_misspelt_key_in_the_example_would_be_refused(v6e_args: dict[str, Any]) -> None:
    v6e_args["engine"]["max_num_seq"] = 1
    with pytest.raises(ConfigError, match="max_num_seq"):
        parse_settings(v6e_args)


def test_serve_accepts_the_example_s_autoscaling(v6e_args: dict[str, Any]) -> None:
    settings = parse_settings(v6e_args)
    config = settings.replicas.autoscaling
    assert config is not None
    serve = serve_autoscaling(config)
    assert (serve.min_replicas, serve.max_replicas) == (1, 4)
    assert not serve.policy.is_default_policy_function()


def test_the_example_has_the_keys_of_the_default_configuration(v6e: dict[str, Any]) -> None:
    default = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    assert v6e.keys() == default.keys()
    ours, theirs = v6e["applications"][0], default["applications"][0]
    assert ours.keys() == theirs.keys()
    assert ours["args"].keys() == theirs["args"].keys()


def test_no_stream_is_cut_while_it_may_still_run(v6e: dict[str, Any]) -> None:
    application = v6e["applications"][0]
    longest_s = application["args"]["ingress"]["request_timeout_s"]
    environment = application["runtime_env"]["env_vars"]
    assert application["args"]["replicas"]["drain_timeout_s"] > longest_s
    assert int(environment["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > longest_s
    controller = v6e["controller_options"]["runtime_env"]["env_vars"]
    assert controller.items() <= environment.items()


@pytest.mark.parametrize(
    "path", [ROOT / "serve_config.yaml", *sorted((ROOT / "ops").rglob("*serv*.yaml"))], ids=str
)
def test_every_haproxy_gives_up_slow_headers(path: Path) -> None:
    default = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    lines = default["controller_options"]["runtime_env"]["env_vars"]["RAY_SERVE_HAPROXY_RETRY_ON"]
    environments = list(find_environments(yaml.safe_load(path.read_text())))
    assert environments
    assert all(found["RAY_SERVE_HAPROXY_RETRY_ON"] == lines for found in environments)
    first, *others = lines.splitlines()
    assert first == RAY_SERVE_HAPROXY_RETRY_ON  # Ray's own value, if it is not set here
    assert any(line.startswith("timeout http-request ") for line in others)


def find_environments(node: object) -> Iterator[dict[str, str]]:
    """Yield every `env_vars` with HAProxy within a configuration or manifest."""
    if isinstance(node, str) and "env_vars" in node:
        node = yaml.safe_load(node)
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "env_vars" and "RAY_SERVE_ENABLE_HA_PROXY" in value:
                yield value
            else:
                yield from find_environments(value)
    elif isinstance(node, list):
        for item in node:
            yield from find_environments(item)


def test_a_replica_of_the_example_brings_up_a_v6e_host_and_no_other(v6e: dict[str, Any]) -> None:
    """Exactly one node type of cluster.yaml, as Ray completes it, declares its resources."""
    resources: dict[str, float] = v6e["applications"][0]["args"]["replicas"]["resources"]
    types = yaml.safe_load((ROOT / "cluster.yaml").read_text())["available_node_types"]
    fitting: list[str] = []
    for name, node_type in types.items():
        accelerator = node_type["node_config"].get("acceleratorType")
        offered = node_type["resources"] | {f"TPU-{accelerator}-head": 1}
        if all(offered.get(key, 0) >= amount for key, amount in resources.items()):
            fitting.append(name)
    assert fitting == ["tpu_v6e_4"]


def test_two_models_share_a_service(tmp_path: Path) -> None:
    """Paths and names of their own, and chips that add up to whole hosts."""
    config = yaml.safe_load(TWO_MODELS.read_text())
    schema = ServeDeploySchema.model_validate(config)
    assert len({application.route_prefix for application in schema.applications}) == 2
    marks: dict[str, float] = {}
    for application in config["applications"]:
        args = application["args"]
        provide_files(args, tmp_path, model_name=application["name"])
        settings = parse_settings(args)
        assert settings.ingress.model_id == application["name"]
        assert settings.replicas.resources["TPU"] == settings.engine.tensor_parallel
        marks[application["name"]] = settings.replicas.resources["TPU-v6e-4-head"] * (
            4 / settings.replicas.resources["TPU"]
        )
    assert marks == {"large": 1.0, "small": 1.0}


def settings_of(schema: type[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of every setting below `schema`, a pydantic model or a dataclass."""
    fields: Mapping[str, tuple[Any, Any]]
    if issubclass(schema, BaseModel):
        fields = {
            name: (field.annotation, field.get_default(call_default_factory=True))
            for name, field in schema.model_fields.items()
        }
    else:
        fields = {
            field.name: (
                field.type,
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory(),
            )
            for field in dataclasses.fields(schema)
        }
    for name, (annotation, default) in fields.items():
        key = prefix + name
        if isinstance(annotation, type) and (
            issubclass(annotation, BaseModel) or dataclasses.is_dataclass(annotation)
        ):
            yield from settings_of(annotation, f"{key}.")
        elif key not in ("engine.model", "engine.model_cache"):  # given once, beside `engine`
            yield key, default
        if annotation == AutoscalingConfig | None:
            yield from settings_of(AutoscalingConfig, f"{key}.")


def shown(default: Any) -> str:
    """A default as the page writes it: as in YAML."""
    if default is PydanticUndefined or default is dataclasses.MISSING:
        return NO_DEFAULT
    if default is None:
        return "null"
    if default == ():
        return "[]"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float) and default.is_integer():
        return str(int(default))
    return str(default)


def documented() -> dict[str, str]:
    """Setting -> default, from the page's tables."""
    rows = re.findall(r"^\| `([a-z_.]+)` \| `?([^|`]*)`? \|", DOCUMENT.read_text(), re.MULTILINE)
    assert len(rows) == len({key for key, _ in rows}), "a key is documented twice"
    return {key: default.strip() for key, default in rows}


def test_every_setting_is_documented_with_its_default() -> None:
    assert documented() == {key: shown(default) for key, default in settings_of(_Args)}


@pytest.mark.parametrize("path", [ROOT / "serve_config.yaml", V6E])
def test_every_key_outside_args_is_explained(path: Path) -> None:
    text = DOCUMENT.read_text()
    config = yaml.safe_load(path.read_text())
    names = [*config, *config["applications"][0], *config["http_options"]]
    names += [*config["logging_config"]]
    names += [*config["applications"][0]["runtime_env"]["env_vars"]]
    assert [name for name in names if f"`{name}`" not in text] == []
