"""The command line of the program store, and engines that start from what it built."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from replicas.config import EngineConfig
from replicas.engine import programs
from replicas.engine.serve_file import read_applications
from replicas.engine.startup import build_engine
from tests.checkpoints import write_checkpoint

ENGINE = {
    "platform": "cpu",
    "dtype": "float32",
    "attention": "reference",
    "num_pages": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "max_mixed_tokens": 8,
    "max_model_len": 64,
}


def write_config(root: Path, **engine: Any) -> Path:
    """A Serve config file for a tiny checkpoint, and its store beside it."""
    args = {
        "model": str(root / "model"),
        "engine": ENGINE | {"program_store": str(root / "programs")} | engine,
    }
    path = root / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"name": "tiny", "args": args}]}))
    return path


def drop_weights(root: Path) -> None:
    (root / "model" / "model.safetensors").unlink()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root whose programs were built from config.json alone."""
    root = tmp_path_factory.mktemp("built")
    write_checkpoint(root / "model")
    drop_weights(root)
    assert programs.main(["build", "--config", str(write_config(root))]) == 0
    return root


@pytest.fixture
def root(tmp_path: Path, built: Path) -> Path:
    """A copy of `built`, with weights."""
    shutil.copytree(built / "programs", tmp_path / "programs")
    write_checkpoint(tmp_path / "model")
    return tmp_path


def start(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Start the engine of a config file; what it logged of its programs."""
    caplog.set_level(logging.INFO)
    caplog.clear()
    (application,) = read_applications(path)
    build_engine(application.engine)
    (line,) = (m for m in caplog.messages if m.startswith("programs: "))
    return line


def test_an_engine_starts_from_what_build_made_without_weights(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert start(write_config(root), caplog) == "programs: 2 loaded, 0 compiled"


@pytest.mark.parametrize(
    "engine",
    [
        {"dtype": "bfloat16", "matmul": "native", "attention": "native"},
        {"quantization": "int8", "attention": "native"},
        {"quantization": "int8", "matmul": "xla"},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "quantization": "int8"},
    ],
    ids=["packed", "int8", "int8_xla", "sharded", "sharded_int8"],
)
def test_abstract_weights_lower_to_the_programs_of_real_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: dict[str, Any]
) -> None:
    write_checkpoint(tmp_path / "model")
    path = write_config(tmp_path, max_num_batched_tokens=8, **engine)
    assert programs.main(["build", "--config", str(path)]) == 0
    for index in (tmp_path / "programs").glob("*.index.json"):
        index.unlink()  # so that the start has to lower its programs itself
    assert start(path, caplog) == "programs: 1 loaded, 0 compiled"


def test_build_compiles_what_is_missing_only(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(root)
    programs.main(["build", "--config", str(path)])
    assert capsys.readouterr().out.count("there already") == 2
    next((root / "programs").glob("*.program")).unlink()
    programs.main(["build", "--config", str(path)])
    out = capsys.readouterr().out
    assert out.count("there already") == 1
    assert out.count("compiled in") == 2, "one program, and the sum"


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "reason"),
    [(None, None), (Path.unlink, "missing: never compiled"), (damage, "cut off")],
)
def test_verify_tells_by_status_and_reason(
    root: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], None] | None,
    reason: str | None,
) -> None:
    if change is not None:
        for path in sorted((root / "programs").glob("*.program"))[:1]:
            change(path)
    status = programs.main(["verify", "--config", str(write_config(root))])
    lines = capsys.readouterr().out.splitlines()
    assert status == (0 if change is None else 1)
    assert sum(line.endswith(": ok") for line in lines) == (2 if change is None else 1)
    assert reason is None or any(reason in line for line in lines)


def test_verify_says_what_has_changed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(root, xla_options={"xla_backend_optimization_level": 1})
    assert programs.main(["verify", "--config", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.count("stale: xla_options was '{}'") == 2
    path = write_config(root, max_num_seqs=16, max_num_batched_tokens=16, max_mixed_tokens=16)
    assert programs.main(["verify", "--config", str(path)]) == 1
    assert "stale: the program itself has changed" in capsys.readouterr().out


def test_list_shows_the_state_of_each_program_without_unpickling(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("replicas.engine.program_store.pickle.loads", refuse)
    (root / "programs" / "other.program").write_bytes(b"?")
    assert programs.main(["list", "--config", str(write_config(root))]) == 0
    out = capsys.readouterr().out
    assert sum(line.endswith("current") for line in out.splitlines()) == 2
    assert "16x8" in out
    assert "unusable: not a program of this format" in out
    programs.main(["list", "--config", str(write_config(root, page_size=32))])
    assert capsys.readouterr().out.count("of another configuration") == 2


def test_prune_leaves_a_store_that_verifies(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(root)
    (root / "programs" / "other.program").write_bytes(b"?")
    assert programs.main(["build", "--prune", "--config", str(path)]) == 0
    assert "deleted other" in capsys.readouterr().out
    assert programs.main(["verify", "--config", str(path)]) == 0
    assert not (root / "programs" / "other.program").exists()


def test_an_option_that_the_compiler_does_not_have_is_refused_at_once(root: Path) -> None:
    path = write_config(root, xla_options={"xla_no_such_option": 1})
    with pytest.raises(SystemExit, match=r"xla_options: .*No such compile option"):
        programs.main(["build", "--config", str(path)])


def test_options_reach_the_compiler_and_the_fingerprint(tmp_path: Path) -> None:
    model = str(write_checkpoint(tmp_path / "model"))
    config = ENGINE | {"model": model, "max_num_batched_tokens": 8, "num_pages": 4}
    plain = build_engine(EngineConfig(**config))
    options = {"xla_backend_optimization_level": 0}
    optioned = build_engine(EngineConfig(**config, xla_options=options))
    assert plain.model_info.fingerprint != optioned.model_info.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "no list `applications`"),
        ("a: [", "cannot read"),
        ("applications: [{args: {}}]", "model"),
        ("applications: [{args: {model: m, engine: {colour: 1}}}]", "engine.colour: there is no"),
        ("applications: [{args: {model: m, engine: {page_size: x}}}]", "engine.page_size: .*'x'"),
        ("applications: [{args: {model: m, engine: {max_num_seqs: true}}}]", "max_num_seqs"),
        ("applications: [{args: {model: m, engine: {page_size: 7}}}]", "power of two >= 8, got 7"),
        ("applications: [{args: {model: m}}]", "program_store is not set"),
    ],
)
def test_a_file_that_cannot_work_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        programs.main(["list", "--config", str(path)])


def test_the_shipped_file_is_read_as_the_app_reads_it() -> None:
    root = Path(__file__).parents[2]
    (application,) = read_applications(root / "serve_config.yaml")
    assert application.engine.model == str((root / "models/smollm2-135m-instruct").resolve())
    assert application.engine.program_store == str(root / ".cache/programs")


def test_the_variables_of_a_compiler_come_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    (tmp_path / "a.yaml").write_text(
        "applications:\n"
        "- {name: a, args: {model: m}, runtime_env: {env_vars: {XLA_FLAGS: --x=1, OTHER: y}}}\n"
        "- {name: b, args: {model: m}}\n"
    )
    first, second = read_applications(tmp_path / "a.yaml")
    assert first.compiler_variables == {"XLA_FLAGS": "--x=1"}
    assert second.compiler_variables == {}
    with pytest.raises(SystemExit, match="name one with --application"):
        programs.main(["list", "--config", str(tmp_path / "a.yaml")])
