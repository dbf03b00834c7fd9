"""The application's args: what is accepted, what is refused, and what comes of it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from app.audit import AuditConfig
from app.auth import hash_key
from app.autoscaling.config import AutoscalingConfig
from app.build import build
from app.errors import ConfigError
from app.settings import parse_settings
from tests.tiny_tokenizer import write_model_dir

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = write_model_dir(tmp_path / "models" / "tiny")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return tmp_path


def args(**fields: Any) -> dict[str, Any]:
    return {"model": "models/tiny", **fields}


def test_the_defaults_need_no_more_than_a_model(root: Path) -> None:
    settings = parse_settings(args(), root=root)
    assert settings.engine.model == str(root / "models/tiny")
    assert settings.ingress.model_dir == str(root / "models/tiny")
    assert settings.ingress.model_id == "tiny"
    assert settings.ingress.key_hashes == frozenset()
    assert (settings.replicas.num_replicas, settings.num_ingress_replicas) == (1, 1)


def test_every_section_reaches_its_part(root: Path) -> None:
    (root / "keys").write_text("secret\n", encoding="utf-8")
    settings = parse_settings(
        args(
            served_model_name="name",
            engine={"page_size": 32, "dtype": "float32", "program_store": "programs"},
            replicas={"resources": {"TPU": 4}, "autoscaling": {"max_replicas": 3}},
            router={"max_queued_requests": 5},
            ingress={"num_replicas": 2, "api_keys_file": "keys", "keep_alive_s": 1},
            tracing={"exporter": "file", "directory": "traces", "sample_ratio": 0.5},
        ),
        root=root,
    )
    assert (settings.engine.page_size, settings.engine.dtype) == (32, "float32")
    assert settings.engine.program_store == str(root / "programs")
    assert settings.replicas.resources == {"TPU": 4}
    assert settings.replicas.autoscaling == AutoscalingConfig(max_replicas=3)
    assert settings.router.max_queued_requests == 5
    assert settings.num_ingress_replicas == 2
    assert (settings.tracing.exporter, settings.tracing.sample_ratio) == ("file", 0.5)
    assert settings.tracing.directory == str(root / "traces")
    assert settings.ingress.key_hashes == {hash_key(b"secret")}
    assert hash_key(b"secret") not in repr(settings)
    assert settings.ingress.model_id == "name"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"colour": 1}, "colour: there is no such setting"),
        ({"engine": {"colour": 1}}, "engine.colour: there is no such setting"),
        ({"router": {"colour": 1}}, "router.colour: there is no such setting"),
        ({"ingress": {"colour": 1}}, "ingress.colour: there is no such setting"),
        ({"tracing": {"colour": 1}}, "tracing.colour: there is no such setting"),
        ({"tracing": {"exporter": "x"}}, "tracing.exporter: .*'otlp'.*got 'x'"),
        ({"tracing": {"exporter": "otlp"}}, "tracing: exporter 'otlp' needs an endpoint"),
        ({"tracing": {"sample_ratio": 2}}, r"tracing: sample_ratio must be in \[0, 1\], got 2"),
        ({"replicas": {"colour": 1}}, "replicas.colour: there is no such setting"),
        ({"engine": {"page_size": 7}}, "power of two >= 8, got 7"),
        ({"engine": {"platform": "gpu"}}, "engine.platform: .*'cpu'.*got 'gpu'"),
        ({"engine": {"model": "x"}}, "engine.model"),
        ({"engine": "x"}, "engine"),
        ({"router": {"max_queued_requests": 0}}, "max_queued_requests must be >= 1"),
        ({"replicas": {"num_replicas": 0}}, "replicas.num_replicas: .*got 0"),
        ({"ingress": {"max_body_bytes": "big"}}, "ingress.max_body_bytes: .*got 'big'"),
        ({"ingress": {"api_key_hashes": ["secret"]}}, "api key hash"),
        ({"ingress": {"api_keys_file": "nowhere"}}, "nowhere"),
        (
            {"ingress": {"limits": {"default": {"requests_per_minute": 0}}}},
            r"ingress.limits.default.*requests_per_minute must be >= 1 or null, got 0",
        ),
        ({"ingress": {"limits": {"default": {"rpm": 1}}}}, "limits.default.rpm: there is no such"),
        ({"ingress": {"limits": {"keys": {"x": {}}}}}, r"limits.keys.x: no API key has that name"),
        ({"ingress": {"audit_file": "nowhere/audit.jsonl"}}, "audit_file: .*not a directory"),
        ({"ingress": {"audit_texts": True}}, "audit_texts: has no effect without audit_file"),
        ({"ingress": {"content_filter": "nowhere"}}, "content_filter: expected 'module:function'"),
        ({"ingress": {"content_filter": "no.where:f"}}, "content_filter: cannot import 'no.where'"),
        ({"ingress": {"content_filter": "json:f"}}, "content_filter: 'json' has no function 'f'"),
        ({"ingress": {"responses": {"ttl_s": 0}}}, "ttl_s must be > 0, got 0"),
        ({"model": "models/none"}, "models/none is not a directory"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"model": "."}, "lacks config.json, tokenizer.json, .*safetensors"),
    ],
)
def test_a_wrong_setting_is_named(root: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(args(**fields), root=root)


def test_keys_have_names_that_limits_and_audit_use(root: Path) -> None:
    (root / "keys").write_text("secret team-a\nother team-a\nthird\n")
    settings = parse_settings(
        args(
            ingress={
                "api_keys_file": "keys",
                "limits": {
                    "default": {"requests_per_minute": 5},
                    "keys": {"team-a": {"tokens_per_minute": 9}},
                },
                "audit_file": "audit.jsonl",
                "content_filter": "json:dumps",
                "responses": {"max_count": 7},
            }
        ),
        root=root,
    )
    ingress = settings.ingress
    assert ingress.key_names == {
        hash_key(b"secret"): "team-a",
        hash_key(b"other"): "team-a",
        hash_key(b"third"): f"key-{hash_key(b'third')[:8]}",
    }
    assert ingress.key_hashes == ingress.key_names.keys()
    assert ingress.limits.of("team-a").tokens_per_minute == 9
    assert ingress.limits.of("team-a").requests_per_minute is None
    assert ingress.limits.of("another").requests_per_minute == 5
    assert settings.shared_state.limits == ingress.limits
    assert settings.shared_state.responses.max_count == 7
    assert ingress.audit == AuditConfig(file=str(root / "audit.jsonl"))
    (root / "keys").write_text("secret team a\n")
    with pytest.raises(ConfigError, match="api key name"):
        parse_settings(args(ingress={"api_keys_file": "keys"}), root=root)


def test_all_wrong_settings_are_named_at_once(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"replicas\.num_cpus.*ingress\.keep_alive_s"):
        parse_settings(args(replicas={"num_cpus": -1}, ingress={"keep_alive_s": 0}), root=root)


def shipped_config() -> dict[str, Any]:
    return yaml.safe_load((CHECKOUT / "serve_config.yaml").read_text(encoding="utf-8"))


def test_the_shipped_config_is_one_that_serve_takes() -> None:
    config = shipped_config()
    schema = ServeDeploySchema.model_validate(config)
    assert schema.http_options.host == "127.0.0.1"
    [application] = schema.applications
    flags = config["controller_options"]["runtime_env"]["env_vars"]
    assert flags["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert flags.items() <= application.runtime_env["env_vars"].items()
    # An unknown key would be ignored by Serve.
    assert not set(config) - set(ServeDeploySchema.model_fields)
    assert not set(config["applications"][0]) - set(type(application).model_fields)


def test_the_shipped_settings_are_valid(root: Path) -> None:
    settings = shipped_config()["applications"][0]["args"]
    parsed = parse_settings({**settings, "model": "models/tiny"}, root=root)
    assert parsed.engine.platform == "cpu"


def test_build_binds_ingress_router_and_engine(root: Path) -> None:
    was_initialized = ray.is_initialized()
    application = build(
        {
            "model": str(root / "models/tiny"),
            "replicas": {"num_replicas": 3, "resources": {"TPU": 4}, "drain_timeout_s": 7},
        }
    )
    ingress = application._bound_deployment
    [router, config, shared] = ingress.init_args
    shared = shared._bound_deployment
    [engine, _] = router._bound_deployment.init_args
    engine = engine._bound_deployment
    assert config.model_id == "tiny"
    assert [ingress.name, router._bound_deployment.name, engine.name] == [
        "Ingress",
        "Router",
        "Engine",
    ]
    assert engine.num_replicas == 3
    assert engine.ray_actor_options["resources"] == {"TPU": 4}
    assert (shared.name, shared.num_replicas) == ("SharedState", 1)
    for deployment in (ingress, router._bound_deployment, engine, shared):
        assert deployment.max_ongoing_requests > 10_000
        assert deployment._deployment_config.graceful_shutdown_timeout_s == 7
    assert ray.is_initialized() == was_initialized, "build starts nothing"


def test_build_hands_serve_our_policy(root: Path) -> None:
    scaling = {"min_replicas": 0, "max_replicas": 4, "boot_s": 100}
    application = build({"model": str(root / "models/tiny"), "replicas": {"autoscaling": scaling}})
    [router, _, _] = application._bound_deployment.init_args
    router = router._bound_deployment
    [engine, config] = router.init_args
    serve_config = engine._bound_deployment._deployment_config.autoscaling_config
    assert (serve_config.min_replicas, serve_config.max_replicas) == (0, 4)
    assert serve_config.policy.policy_function == "app.autoscaling.serve_policy:LoadPolicy"
    assert serve_config.policy.policy_kwargs["boot_s"] == 100
    assert router.init_kwargs["autoscaling"] == AutoscalingConfig(**scaling)
    assert config.replica_wait_s == 150


def test_styles_of_messages_are_told_by_the_template_unless_set(root: Path) -> None:
    ingress = parse_settings(args(), root=root).ingress
    assert (ingress.tool_call_style, ingress.reasoning_style) == (None, None)
    styles = {"tool_call_style": "llama3", "reasoning_style": "none"}
    ingress = parse_settings(args(ingress=styles), root=root).ingress
    assert (ingress.tool_call_style, ingress.reasoning_style) == ("llama3", "none")
    with pytest.raises(ConfigError, match=r"ingress\.tool_call_style"):
        parse_settings(args(ingress={"tool_call_style": "pythonic"}), root=root)


NIGHTS = {"start": "20:00", "end": "06:00", "days": ["mon", "fri"], "max_replicas": 0}


def test_requests_wait_for_the_first_replica_where_there_may_be_none(root: Path) -> None:
    def wait_s(autoscaling: dict[str, object], **router: float) -> float:
        given = args(replicas={"autoscaling": autoscaling}, router=router)
        return parse_settings(given, root=root).router.replica_wait_s

    assert wait_s({"min_replicas": 1}) == 0
    assert wait_s({"min_replicas": 0, "boot_s": 100}) == 150
    assert wait_s({"schedule": [NIGHTS], "boot_s": 100}) == 150
    assert wait_s({"min_replicas": 0}, replica_wait_s=20) == 20


@pytest.mark.parametrize(
    ("autoscaling", "message"),
    [
        ({"max_replica": 3}, "there is no such setting"),
        ({"min_replicas": 3}, "need 0 <= min_replicas <= max_replicas"),
        ({"tpot_target_s": 0}, "tpot_target_s must be > 0"),
        ({"timezone": "Mars/Olympus"}, "not an IANA name"),
        ({"schedule": [NIGHTS | {"start": "8pm"}]}, 'a time of day is "HH:MM"'),
        ({"schedule": [NIGHTS | {"days": ["monday"]}]}, "days must be of mon, tue"),
        ({"schedule": [NIGHTS | {"min_replicas": 2, "max_replicas": None}]}, "exceeds max"),
    ],
)
def test_autoscaling_that_cannot_work_is_refused(
    root: Path, autoscaling: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_settings(args(replicas={"autoscaling": autoscaling}), root=root)


def test_one_autoscaler_at_a_time(root: Path) -> None:
    both = {"autoscaling": {}, "serve_autoscaling": {"max_replicas": 2}}
    with pytest.raises(ConfigError, match="not both"):
        parse_settings(args(replicas=both), root=root)
