"""Models from a bucket and from the Hub: what is downloaded, what is resumed, what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from app.build import build
from app.errors import ConfigError
from app.settings import parse_settings
from replicas.config import EngineConfig
from replicas.engine.serve_file import read_applications
from replicas.engine.startup import has_tokenizer
from replicas.model_files import bucket
from replicas.model_files.fetch import fetch_model, pin_model
from replicas.model_files.source import HubSource, ModelSourceError, parse_source, read_setting
from tests.fake_stores import COMMIT, FakeStore, run_bucket, run_hub

SHARDS = ("model-1.safetensors", "model-2.safetensors")
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model.safetensors.index.json": (
        b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    ),
    SHARDS[0]: bytes(range(256)) * 300,
    SHARDS[1]: bytes(reversed(range(256))) * 200,
    "consolidated.safetensors": b"the same once more",
    "original/model.safetensors": b"and again",
    "README.md": b"about",
}
TEXT_FILES = {name for name in FILES if name.endswith((".jinja", "config.json", "tokenizer.json"))}
WEIGHT_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    *SHARDS,
}
HUB, BUCKET = "hf://org/name", "gs://weights/models/tiny"


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """What HF_ENDPOINT does to a process that has not imported the client yet."""
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + template)
    monkeypatch.setattr(constants, "ENDPOINT", url)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    with run_hub(dict(FILES)) as store:
        use_hub(monkeypatch, store.url)
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 8 << 10)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield store


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStore]:
    objects = {f"models/tiny/{name}": content for name, content in FILES.items()}
    with run_bucket(objects | {"models/tiny/": b"", "models/tiny2/config.json": b"no"}) as store:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
        monkeypatch.setattr(bucket, "_CHUNK_BYTES", 16 << 10)
        yield store


@pytest.fixture
def store(request: pytest.FixtureRequest) -> tuple[str, FakeStore]:
    fixture = "hub" if request.param == HUB else "cloud"
    return request.param, request.getfixturevalue(fixture)


both = pytest.mark.parametrize("store", [HUB, BUCKET], indirect=True)


def names_in(directory: Path) -> set[str]:
    paths = [path for path in directory.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(directory)) for path in paths}


@both
def test_each_part_is_downloaded_once_and_nothing_else(
    store: tuple[str, FakeStore], tmp_path: Path
) -> None:
    model, server = store
    cache = str(tmp_path)
    calls: list[tuple[int, int]] = []
    directory = fetch_model(model, "tokenizer", cache=cache)
    assert names_in(directory) == TEXT_FILES
    weights = fetch_model(model, "weights", cache=cache, progress=lambda *done: calls.append(done))
    assert weights == directory
    assert names_in(directory) == TEXT_FILES | WEIGHT_FILES
    assert all((directory / name).read_bytes() == FILES[name] for name in WEIGHT_FILES)
    num_bytes = sum(len(FILES[name]) for name in SHARDS)
    assert calls[-1] == (num_bytes, num_bytes)
    num_transfers = sum(len(server.transfers(name)) for name in FILES)
    assert fetch_model(model, "weights", cache=cache) == directory
    assert sum(len(server.transfers(name)) for name in FILES) == num_transfers


@both
def test_a_broken_connection_is_continued_where_it_broke(
    store: tuple[str, FakeStore], tmp_path: Path
) -> None:
    model, server = store
    name = next(name for name in server.files if name.endswith(SHARDS[0]))
    server.breaks.add(name)
    directory = fetch_model(model, "weights", cache=str(tmp_path))
    assert (directory / SHARDS[0]).read_bytes() == FILES[SHARDS[0]]
    ranges = server.transfers(SHARDS[0])
    assert len(ranges) > 1
    assert ranges[-1] not in (None, "bytes=0-")


def test_half_a_file_of_a_bucket_is_continued_by_the_next_start(
    cloud: FakeStore, tmp_path: Path
) -> None:
    directory = fetch_model(BUCKET, "config", cache=str(tmp_path))
    part = directory / f"{SHARDS[0]}.part"
    part.write_bytes(FILES[SHARDS[0]][:50_000])
    fetch_model(BUCKET, "weights", cache=str(tmp_path))
    assert (directory / SHARDS[0]).read_bytes() == FILES[SHARDS[0]]
    assert not part.exists()
    assert (cloud.transfers(SHARDS[0])[0] or "").startswith("bytes=50000-")


def test_a_damaged_object_never_gets_its_name(cloud: FakeStore, tmp_path: Path) -> None:
    cloud.spoils.add(f"models/tiny/{SHARDS[1]}")
    with pytest.raises(ModelSourceError, match=f"{SHARDS[1]}: what came is not what the bucket"):
        fetch_model(BUCKET, "weights", cache=str(tmp_path))
    directory = fetch_model(BUCKET, "config", cache=str(tmp_path))
    assert SHARDS[1] not in names_in(directory)
    cloud.spoils.clear()
    fetch_model(BUCKET, "weights", cache=str(tmp_path))
    assert (directory / SHARDS[1]).read_bytes() == FILES[SHARDS[1]]


def test_new_objects_of_a_bucket_leave_the_old_files_alone(
    cloud: FakeStore, tmp_path: Path
) -> None:
    old = fetch_model(BUCKET, "weights", cache=str(tmp_path))
    cloud.files[f"models/tiny/{SHARDS[0]}"] = b"new weights"
    new = fetch_model(BUCKET, "weights", cache=str(tmp_path))
    assert (old / SHARDS[0]).read_bytes() == FILES[SHARDS[0]]
    assert (new / SHARDS[0]).read_bytes() == b"new weights"


def test_the_token_of_the_environment_opens_a_private_model(
    hub: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    with pytest.raises(ModelSourceError, match=r"private.*set HF_TOKEN \(none is set\)"):
        fetch_model(HUB, "config", cache=str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert names_in(fetch_model(HUB, "config", cache=str(tmp_path))) >= {"config.json"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("hf://org/other", "the Hub has no model 'org/other', or it is private"),
        ("hf://org/name@v9", "org/name has no revision 'v9'"),
    ],
)
def test_what_the_hub_has_not_is_named(
    hub: FakeStore, tmp_path: Path, model: str, message: str
) -> None:
    with pytest.raises(ModelSourceError, match=message):
        fetch_model(model, "config", cache=str(tmp_path))


def test_a_gated_model_says_what_to_do(hub: FakeStore, tmp_path: Path) -> None:
    hub.is_gated = True
    with pytest.raises(ModelSourceError, match="is gated: accept its terms"):
        fetch_model(HUB, "config", cache=str(tmp_path))


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("gs://weights/models/other", {}, "there are no objects under this path"),
        ("gs://elsewhere/models", {}, "gs://elsewhere/models: there (is|are) no"),
        (BUCKET, {"token": "secret"}, "credentials do not give access.*401"),
        (BUCKET, {"is_gated": True}, "credentials do not give access.*Forbidden"),
    ],
)
def test_what_a_bucket_refuses_is_named(
    cloud: FakeStore, tmp_path: Path, model: str, change: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(cloud, name, value)
    with pytest.raises(ModelSourceError, match=f"(?s){message}"):
        fetch_model(model, "config", cache=str(tmp_path))


def test_offline_a_cached_model_is_used_and_another_is_refused(
    hub: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = pin_model(HUB, cache=str(tmp_path))
    assert pinned == f"hf://org/name@{COMMIT}"
    directory = fetch_model(pinned, "weights", cache=str(tmp_path))
    fetch_model(pinned, "tokenizer", cache=str(tmp_path))
    use_hub(monkeypatch, "http://127.0.0.1:9")
    assert fetch_model(pinned, "weights", cache=str(tmp_path)) == directory
    assert pin_model(HUB, cache=str(tmp_path)) == pinned
    with pytest.raises(ModelSourceError, match=r"not in the cache in full.*cannot be asked"):
        fetch_model("hf://org/other", "config", cache=str(tmp_path))


@both
def test_a_disk_that_is_too_small_is_refused_before_the_download(
    store: tuple[str, FakeStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, server = store
    fetch_model(model, "config", cache=str(tmp_path))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6, 10**3))
    with pytest.raises(ModelSourceError, match=r"GB free: name a larger disk in model_cache"):
        fetch_model(model, "weights", cache=str(tmp_path))
    assert not server.transfers(SHARDS[0])


def test_a_disk_that_fills_up_is_named(
    cloud: FakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelSourceError, match="the disk is full"):
        fetch_model(BUCKET, "config", cache=str(tmp_path))


def test_a_model_that_cannot_be_served_is_refused_before_anything_starts(
    hub: FakeStore, tmp_path: Path
) -> None:
    args = {"model": "org/name", "model_cache": str(tmp_path)}
    ingress = build(args)._bound_deployment
    [router, config, _] = ingress.init_args
    [engine, _] = router._bound_deployment.init_args
    [engine_config] = engine._bound_deployment.init_args
    assert config.model_dir == engine_config.model == f"hf://org/name@{COMMIT}"
    assert config.model_id == "org/name"
    assert config.model_cache == engine_config.model_cache == str(tmp_path)
    del hub.files["tokenizer.json"]
    with pytest.raises(ConfigError, match=r"model: hf://org/name@main lacks tokenizer\.json"):
        build(args | {"model_cache": str(tmp_path / "another")})


@both
def test_no_name_leads_out_of_the_directory(store: tuple[str, FakeStore], tmp_path: Path) -> None:
    model, server = store
    index = next(name for name in server.files if name.endswith(".index.json"))
    prefix = index.removesuffix("model.safetensors.index.json")
    outside = ("../outside.safetensors", "additional_chat_templates/../../outside.jinja")
    server.files |= {f"{prefix}{name}": b"outside" for name in outside}
    server.files[index] = json.dumps({"weight_map": {"a": outside[0], "b": SHARDS[0]}}).encode()
    fetch_model(model, "tokenizer", cache=str(tmp_path / "cache"))
    directory = fetch_model(model, "weights", cache=str(tmp_path / "cache"))
    assert SHARDS[0] in names_in(directory)
    assert not list(tmp_path.rglob("outside*"))


def test_settings_name_a_source_and_a_cache(tmp_path: Path) -> None:
    settings = parse_settings({"model": "gs://weights/models/tiny/"}, root=tmp_path)
    assert settings.engine.model == BUCKET
    assert settings.engine.model_cache == str(tmp_path / ".cache/models")
    assert settings.ingress.model_id == "tiny"
    settings = parse_settings({"model": "org/name", "revision": "v2"}, root=tmp_path)
    assert settings.engine.model == "hf://org/name@v2"
    assert settings.engine.model_cache is None
    path = tmp_path / "serve.yaml"
    path.write_text("applications: [{args: {model: org/name, revision: v2, model_cache: c}}]")
    [application] = read_applications(path, root=tmp_path)
    assert application.engine.model == "hf://org/name@v2"
    assert application.engine.model_cache == str(tmp_path / "c")


def test_a_path_is_never_taken_for_a_model_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    for text in ("models/tiny", "weights/tinny", "./org/name", "/org/name", "tiny", "a/b/c"):
        assert not isinstance(read_setting(text, root=tmp_path), HubSource)
    assert read_setting("org/name", root=tmp_path) == HubSource("org/name", "main")


@pytest.mark.parametrize(
    ("text", "revision", "message"),
    [
        ("s3://bucket/path", None, "directory, gs://bucket/path or the Hub"),
        ("gs://", None, "not of the form gs://bucket/path"),
        ("hf://name", None, "not of the form hf://org/name@revision"),
        ("gs://bucket/path", "v2", "revision = 'v2' is for models of the Hub"),
        ("hf://org/name@v1", "v2", "different revisions"),
    ],
)
def test_a_malformed_source_is_refused(
    tmp_path: Path, text: str, revision: str | None, message: str
) -> None:
    with pytest.raises(ModelSourceError, match=message):
        read_setting(text, revision=revision, root=tmp_path)


@pytest.mark.parametrize("text", ["/models/tiny", "gs://bucket", "gs://bb/a/b", "hf://o/n@r"])
def test_a_canonical_text_is_read_back(text: str) -> None:
    assert str(parse_source(text)) == text


@both
def test_structured_output_finds_the_tokenizer_of_a_model_that_is_downloaded(
    store: tuple[str, FakeStore], tmp_path: Path
) -> None:
    model, _ = store
    assert has_tokenizer(EngineConfig(model=model, model_cache=str(tmp_path)))
    assert not has_tokenizer(EngineConfig(model=str(tmp_path)))


def test_the_command_downloads_ahead_with_the_usual_variables(tmp_path: Path) -> None:
    with run_hub(dict(FILES)) as store:
        store.token = "secret"
        environment = {"HF_ENDPOINT": store.url, "HF_TOKEN": "secret", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-m", "replicas.model_files.fetch", "org/name"]
        result = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=True
        )
    directory = Path(result.stdout.strip())
    assert directory.is_relative_to(tmp_path / "hub")
    assert names_in(directory) == TEXT_FILES | WEIGHT_FILES
    assert "[##############################] 0.1/0.1 MB" in result.stderr
