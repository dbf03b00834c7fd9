"""Loading: fused exactly, every dtype, one file or shards, and one error that lists every fault."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from replicas.models.registry import load_model_config
from replicas.models.weights import CheckpointError, load_params
from tests.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint


def load(path: Path, dtype: str = "float32", **options):
    return load_params(path, load_model_config(path), dtype=jnp.dtype(dtype), **options)


def shard(path: Path, num_files: int = 3) -> dict[str, str]:
    """Split model.safetensors into files with an index; return its weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensors[name] for name, owner in weight_map.items() if owner == file}
        save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_projections_are_fused_in_order(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    params = load(write_checkpoint(tmp_path, tensors=tensors))
    prefix = "model.layers.1"
    qkv = np.concatenate([tensors[f"{prefix}.self_attn.{n}_proj.weight"] for n in "qkv"])
    gate_up = np.concatenate([tensors[f"{prefix}.mlp.{n}_proj.weight"] for n in ("gate", "up")])
    np.testing.assert_array_equal(params.layers[1].attention.qkv, qkv)
    np.testing.assert_array_equal(params.layers[1].mlp.gate_up, gate_up)
    np.testing.assert_array_equal(params.head, tensors["lm_head.weight"])


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", ["bfloat16", "float32"])
def test_every_dtype_is_converted_by_value(tmp_path: Path, source: str, target: str) -> None:
    storage = ml_dtypes.bfloat16 if source == "bfloat16" else source
    tensors = random_tensors(TINY_LLAMA)
    params = load(write_checkpoint(tmp_path, tensors=tensors, dtype=source), target)
    expected = tensors["model.embed_tokens.weight"].astype(storage).astype(jnp.dtype(target))
    np.testing.assert_array_equal(np.asarray(params.embedding), expected)
    assert params.embedding.dtype == target
    assert params.layers[0].attention.qkv.dtype == target
    assert params.final_norm.dtype == "float32"


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"attention_bias": True, "mlp_bias": True})
    whole = load(path)
    shard(path)
    jax.tree.map(np.testing.assert_array_equal, load(path), whole)


def test_progress_reaches_the_total_bytes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    calls: list[tuple[int, int]] = []
    load(path, progress=lambda done, total: calls.append((done, total)))
    num_bytes = sum(tensor.nbytes for tensor in random_tensors(TINY_LLAMA).values())
    assert calls[-1] == (num_bytes, num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_parameters_do_not_alias_the_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    params = load(path)
    before = np.array(params.embedding)
    with (path / "model.safetensors").open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(b"\xff" * 4096)
    np.testing.assert_array_equal(np.asarray(params.embedding), before)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_one_error_lists_every_fault(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(7, np.float32)
    tensors["model.layers.9.extra"] = np.ones(3, np.float32)
    with pytest.raises(CheckpointError) as error:
        load(write_checkpoint(tmp_path, tensors=tensors))
    assert set(error.value.problems) == {
        "missing: model.layers.0.mlp.up_proj.weight [48, 32]",
        "misshapen: model.norm.weight is [7], config.json asks for [32]",
        "extra: model.layers.9.extra [3] is not part of the model that config.json describes",
    }
    assert all(problem in str(error.value) for problem in error.value.problems)


def test_biases_that_the_config_denies_are_extra(tmp_path: Path) -> None:
    tensors = random_tensors({**TINY_LLAMA, "attention_bias": True})
    with pytest.raises(CheckpointError, match=r"extra: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(write_checkpoint(tmp_path, tensors=tensors))


def test_every_truncated_tensor_is_listed(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 5000])
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert len(error.value.problems) >= 2
    assert all(problem.startswith("truncated: ") for problem in error.value.problems)


def test_faults_of_shards_are_listed_together(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    weight_map = shard(path)
    (path / "model-0.safetensors").unlink()
    lost = [name for name, file in weight_map.items() if file == "model-0.safetensors"]
    broken = path / "model-1.safetensors"
    broken.write_bytes(broken.read_bytes()[:-16])
    with pytest.raises(CheckpointError) as error:
        load(path)
    text = str(error.value)
    assert "unreadable: model-0.safetensors" in text
    assert "truncated: " in text
    assert all(f"missing: {name} " in text for name in lost)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path)
    weight_map = shard(path)
    moved, left_out = "model.norm.weight", "lm_head.weight"
    owner, other = weight_map[moved], "model-9.safetensors"
    save_file({"model.layers.9.extra": np.ones(3, np.float32)}, path / other)
    weight_map |= {moved: other, "model.layers.9.extra": other}
    listed = {name: file for name, file in weight_map.items() if name != left_out}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError) as error:
        load(path)
    problems = error.value.problems
    assert f"missing: {moved} (the index places it in {other})" in problems
    assert f"unlisted: {moved} is in {owner}, which the index does not say" in problems
    assert any(p.startswith(f"unlisted: {left_out} is in ") for p in problems)
    assert any(p.startswith("extra: model.layers.9.extra ") for p in problems)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        b"\xff" * 64,
        (2**40).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"[1] ",
    ],
    ids=["empty", "short", "noise", "huge header", "not an object"],
)
def test_a_foreign_file_is_an_error_and_not_a_crash(tmp_path: Path, content: bytes) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"unreadable: model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "I8"},
        {"shape": [1, 2, 3]},
        {"shape": [-4, 8]},
        {"data_offsets": [-8, 120]},
        {"data_offsets": [0]},
        {"shape": None},
    ],
    ids=str,
)
def test_a_malformed_entry_is_listed(tmp_path: Path, change: dict[str, object]) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"].update(change)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert any(p.startswith("malformed: model.norm.weight ") for p in error.value.problems)
    assert not any(p.startswith("missing: ") for p in error.value.problems)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


def test_an_index_cannot_point_outside_the_directory(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model")
    (path / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        load(path)


def test_a_stored_copy_of_a_tied_head_is_accepted_and_another_head_is_not(tmp_path: Path) -> None:
    raw = {"tie_word_embeddings": True}
    tensors = random_tensors({**TINY_LLAMA, **raw})
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    assert load(write_checkpoint(tmp_path, raw, tensors=tensors)).head is None
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + np.float32(1)
    with pytest.raises(CheckpointError, match=r"extra: lm_head\.weight"):
        load(write_checkpoint(tmp_path, raw, tensors=tensors))
