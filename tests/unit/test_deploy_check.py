"""What is refused before Serve touches the application that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.build import build
from app.deploy_check import check_deployable, count_weights
from app.errors import ConfigError
from app.settings import ReplicaOptions
from replicas.config import EngineConfig
from tests.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.tiny_tokenizer import write_model_dir

GB = 10**9
CPU_NODE = {"CPU": 8.0, "memory": 4.0 * GB, "object_store_memory": 1.0 * GB}
TPU_NODE = {"CPU": 180.0, "TPU": 4.0, "memory": 600.0 * GB}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(write_model_dir(tmp_path / "model"))


def check(
    model: Path,
    resources: dict[str, float] | None = None,
    *,
    num_cpus: float = 0.0,
    nodes: tuple[dict[str, float], ...] = (CPU_NODE, TPU_NODE),
    can_grow: bool = False,
    **engine: Any,
) -> None:
    check_deployable(
        EngineConfig(model=str(model), **engine),
        ReplicaOptions(resources=resources or {}, num_cpus=num_cpus),
        nodes=nodes,
        can_grow=can_grow,
    )


def test_what_fits_passes(model: Path) -> None:
    check(model)
    check(model, {"TPU": 4}, platform="tpu", tensor_parallel=4)
    check(model, {"TPU": 8, "TPU-v6e-8-head": 1}, platform="tpu", can_grow=True)
    check(model, {"TPU": 4}, platform="tpu", nodes=())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resources": {"TPU": 3}}, r"replicas\.resources\.TPU: .*1, 2, 4 or 8.*got 3"),
        ({"resources": {"TPU": 8}}, r"replicas\.resources\.TPU: a replica wants 8.* has 4"),
        ({"resources": {"TPU-v6e-4-head": 1}}, r"TPU-v6e-4-head: a replica wants 1.* has 0"),
        ({"num_cpus": 200}, r"replicas\.num_cpus: a replica wants 200.* has 180"),
        (
            {"resources": {"TPU": 1}, "platform": "tpu", "tensor_parallel": 4},
            r"engine\.tensor_parallel: 4 devices are more than the 1 chips",
        ),
        ({"memory_bytes": 1000}, r"engine\.memory_bytes: the weights of .*; raise it"),
        (
            {"platform": "cpu", "kv_cache_bytes": 700 * GB},
            r"engine\.kv_cache_bytes take 700\.00 GB, and the largest node has 600\.00 GB",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    model: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(model, **fields)


def test_weights_are_counted_and_looked_at(model: Path) -> None:
    assert count_weights(model) == sum(t.size for t in random_tensors(TINY_LLAMA).values())
    file = model / "model.safetensors"
    whole = file.read_bytes()
    (model / "consolidated.safetensors").write_bytes(whole)  # the same once more, not loaded
    assert count_weights(model) == sum(t.size for t in random_tensors(TINY_LLAMA).values())
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=r"is cut off: \d+ of \d+ bytes; download it again"):
        count_weights(model)
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="no readable safetensors file"):
        count_weights(model)
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    )
    with pytest.raises(ConfigError, match="2 of 2 weight files are missing, the first is"):
        count_weights(model)


def test_build_looks_before_it_binds(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"1, 2, 4 or 8 chips of one host, got 16"):
        build({"model": str(model), "replicas": {"resources": {"TPU": 16}}})
