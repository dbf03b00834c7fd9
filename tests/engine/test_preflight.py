"""`programs check`: fit, memory and steps of an engine on TPU slices that are not there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from jax.experimental.pallas import tpu as pltpu

from replicas.config import EngineConfig
from replicas.engine import programs, tpu_topology
from replicas.engine.buckets import Bucket
from replicas.engine.memory_plan import HBM_SHARE, device_bytes
from replicas.engine.preflight import (
    MemoryCheck,
    ProgramCheck,
    advise_on_programs,
    check_memory,
    compile_program,
    predict_bucket,
)
from replicas.engine.startup import build_abstract_runner, build_engine, kv_page_shapes, plan_engine
from replicas.engine.step_time import LAUNCH_S
from replicas.engine.tpu_chips import CHIPS
from tests.checkpoints import write_checkpoint

TOPOLOGY = "v6e:1x1"
ENGINE = {
    "platform": "tpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8,
    "max_mixed_tokens": 8,
    "max_model_len": 256,
}
WIDE_HEADS = {"head_dim": 128, "num_hidden_layers": 1}


def write_config(root: Path, **engine: Any) -> str:
    write_checkpoint(root / "model", WIDE_HEADS)
    (root / "model" / "model.safetensors").unlink()
    args = {"model": str(root / "model"), "engine": ENGINE | engine}
    path = root / "serve_config.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"name": "tiny", "args": args}]}))
    return str(path)


def config_of(root: Path, **engine: Any) -> EngineConfig:
    write_config(root)
    return EngineConfig(model=str(root / "model"), **(ENGINE | engine))


@pytest.mark.parametrize("chip", CHIPS.values(), ids=CHIPS)
def test_the_table_of_chips_agrees_with_what_jax_knows(chip: Any) -> None:
    shape = "2x2x1" if chip.name in ("v5p", "tpu7x") else "2x2"
    devices = tpu_topology.get_devices(f"{chip.name}:{shape}")
    assert devices[0].device_kind == chip.device_kind
    with tpu_topology.lowering_for(devices[:1]):
        info = pltpu.get_tpu_info()
    # jax counts a core, and a v5p device is a chip of two; libtpu keeps some memory for itself.
    num_cores = info.num_cores
    assert chip.hbm_bytes_per_s == num_cores * info.mem_bw_bytes_per_second
    assert chip.bf16_flops == num_cores * info.bf16_ops_per_second
    assert chip.int8_ops == num_cores * info.int8_ops_per_second
    assert 0.95 < chip.hbm_bytes / (num_cores * info.hbm_capacity_bytes) < 1


def test_bundles_of_the_table_are_those_that_were_counted() -> None:
    root = Path(__file__).parents[2]
    baseline = json.loads((root / "bench" / "tpu_static_baseline.json").read_text())
    for name in ("v5e", "v6e", "tpu7x"):
        chip = CHIPS[name]
        for counted, loop in (
            (chip.decode_bundles, "decode: MiB of KV"),
            (chip.decode_int8_bundles, "decode, int8 pages: MiB of KV"),
            (chip.prefill_bundles, "prefill interior: 32 queries x 512 keys x 8 heads"),
        ):
            assert counted == pytest.approx(baseline[f"{name}: {loop}"]["bundles"], 0.05)


@pytest.mark.parametrize("topology", [TOPOLOGY, "v5e:1x1", "tpu7x:1x1x1"])
def test_check_says_that_it_fits_and_what_a_step_takes(
    topology: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--config", write_config(tmp_path), "--topology", topology]
    assert programs.main(["check", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens, " in lines[0]
    assert "8x8: fits" in lines[1]
    assert "tokens/s/chip" in lines[1]
    assert lines[-1].startswith(f"tiny: fits {topology}: 1 programs; predicted decode of 8")


def test_check_names_what_to_change_where_it_does_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(**engine: Any) -> str:
        arguments = ["--config", write_config(tmp_path, **engine), "--topology", TOPOLOGY]
        assert programs.main(["check", *arguments]) == 1
        return capsys.readouterr().out

    out = check(memory_bytes=1 << 16)
    assert "a device has for weights and KV pages" in out
    assert "memory_bytes: leave it out" in out
    out = check(num_pages=1 << 18)  # 34 GB of pages on a device of 33.5
    assert "num_pages: " in out
    assert "tensor_parallel: 2" in out


def test_build_and_verify_for_a_slice_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, program_store=str(tmp_path / "programs"))
    arguments = ["--config", config, "--topology", TOPOLOGY]
    assert programs.main(["verify", *arguments]) == 1
    assert "missing: never compiled" in capsys.readouterr().out
    assert programs.main(["build", *arguments]) == 0
    assert programs.main(["verify", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "tiny: 8x8: ok"
    assert programs.main(["verify", "--config", config, "--topology", "v5e:1x1"]) == 1
    assert "stale: device_kind was 'TPU v6 lite'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"page_size": 8}, r"page_size 8: .* power of two in \[16, 1024\] .* set page_size to 128"),
        ({"page_size": 2048}, r"page_size 2048: .* set page_size to 128"),
        ({"tensor_parallel": 2}, "tensor_parallel is 2 but only 1 devices"),
    ],
)
def test_what_cannot_work_is_said_before_anything_compiles(
    tmp_path: Path, engine: dict[str, Any], message: str
) -> None:
    arguments = ["--config", write_config(tmp_path, **engine), "--topology", TOPOLOGY]
    with pytest.raises(SystemExit, match=message):
        programs.main(["check", *arguments])


@pytest.mark.parametrize("topology", ["v6e", "v9:2x2", "v6e:3x1"])
def test_a_topology_that_does_not_exist_is_refused(topology: str) -> None:
    with pytest.raises(ValueError, match=f"topology '{topology}'"):
        tpu_topology.get_devices(topology)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_pages_fill_the_budget_and_are_what_a_tpu_allocates(
    tmp_path: Path, kv_cache_dtype: str
) -> None:
    devices = tpu_topology.get_devices(TOPOLOGY)
    plan = plan_engine(config_of(tmp_path, kv_cache_dtype=kv_cache_dtype), devices)
    assert plan.config.attention == "pallas"
    memory = check_memory(plan, CHIPS["v6e"])
    budget = int(HBM_SHARE * CHIPS["v6e"].hbm_bytes)
    page = memory.kv_bytes // memory.num_pages
    assert 0 <= budget - memory.weight_bytes - memory.kv_bytes < page
    assert memory.kv_bytes == device_bytes(kv_page_shapes(plan))
    runner = build_abstract_runner(plan)
    program = compile_program(runner, runner.buckets[0], devices, kv_bytes=memory.kv_bytes)
    assert program.copied_bytes == 0
    # The compiler pads what is not a multiple of its tiles: of this tiny model, the weights.
    rest = program.argument_bytes - memory.kv_bytes - memory.weight_bytes
    assert 0 <= rest < 1 << 20


def test_check_compiles_experts_and_latents_for_a_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attention by sequence with the TPU kernel, experts on two devices."""
    source = Path(__file__).parents[1] / "golden" / "deepseek_v3" / "config.json"
    raw = json.loads(source.read_text()) | {"num_hidden_layers": 2, "kv_lora_rank": 128}
    config = write_config(tmp_path, tensor_parallel=2)
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw))
    assert programs.main(["check", "--config", config, "--topology", "v6e:2x2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "v6e:2x2, 2 devices" in lines[0]
    assert "8x8: fits" in lines[1]


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_check_compiles_experts_for_a_slice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, quantization: str
) -> None:
    source = Path(__file__).parents[1] / "golden" / name / "config.json"
    wide = {"head_dim": 64, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config = write_config(tmp_path, tensor_parallel=2, quantization=quantization)
    (tmp_path / "model" / "config.json").write_text(
        json.dumps(json.loads(source.read_text()) | wide)
    )
    assert programs.main(["check", "--config", config, "--topology", "v6e:2x2"]) == 0
    assert "8x8: fits" in capsys.readouterr().out.splitlines()[1]


def test_layers_with_a_window_read_no_more_than_it() -> None:
    model = Path(__file__).parents[1] / "golden" / "gemma3"  # 6 of 7 layers see 16 tokens
    plan = plan_engine(EngineConfig(model=str(model), **ENGINE), tpu_topology.get_devices(TOPOLOGY))
    short, long = (
        predict_bucket(plan, CHIPS["v6e"], Bucket(8, 8), context=context) for context in (16, 256)
    )
    assert long.attention_s == pytest.approx(short.attention_s * (6 * 16 + 256) / (7 * 16))


def test_latents_are_counted_on_the_device_that_holds_them() -> None:
    model = Path(__file__).parents[1] / "golden" / "deepseek_v3"
    devices = tpu_topology.get_devices("v6e:2x2")
    budget = int(HBM_SHARE * CHIPS["v6e"].hbm_bytes)
    plans = [
        plan_engine(EngineConfig(model=str(model), **(ENGINE | {"tensor_parallel": n})), devices)
        for n in (1, 2)
    ]
    one, two = (check_memory(plan, CHIPS["v6e"]) for plan in plans)
    assert two.kv_bytes == device_bytes(kv_page_shapes(plans[1]))
    assert one.weight_bytes + one.kv_bytes <= budget
    assert two.weight_bytes + two.kv_bytes <= budget
    assert two.num_tokens == pytest.approx(2 * one.num_tokens, rel=0.001)


def test_attention_by_sequence_exchanges_queries_and_outputs() -> None:
    model = Path(__file__).parents[1] / "golden" / "deepseek_v3"
    chip, devices = CHIPS["v6e"], tpu_topology.get_devices("v6e:2x2")
    config = EngineConfig(model=str(model), **(ENGINE | {"tensor_parallel": 2}))
    step = predict_bucket(plan_engine(config, devices), chip, Bucket(8, 8), context=64)
    # 4 heads with queries of 32 + 8 and outputs of 32 numbers in bf16, half of them elsewhere.
    exchanged_s = 8 * 4 * (32 + 8 + 32) * 2 / 2 / chip.ici_bytes_per_s
    reduced_s = 2 * 8 * 64 * 4 / chip.ici_bytes_per_s
    assert step.collective_s == pytest.approx(3 * (exchanged_s + reduced_s + 4 * LAUNCH_S))


@pytest.mark.parametrize(
    "engine",
    [
        {"memory_bytes": 1 << 20},
        {"memory_bytes": 1 << 20, "kv_cache_dtype": "int8"},
        {"kv_cache_bytes": 1 << 19, "tensor_parallel": 2},
    ],
)
def test_a_cpu_engine_allocates_what_was_planned(tmp_path: Path, engine: dict[str, Any]) -> None:
    fields = ENGINE | {"platform": "cpu", "model": str(write_checkpoint(tmp_path)), **engine}
    config = EngineConfig(**fields)
    plan = plan_engine(config)
    built = build_engine(config)
    assert built.load().num_pages == plan.config.num_pages - 1
    allocated = sum(
        array.nbytes // plan.mesh.size
        for array in jax.live_arrays()
        if array.ndim >= 4 and plan.config.num_pages in array.shape
    )
    planned = device_bytes(kv_page_shapes(plan))
    assert allocated == planned
    budget = engine.get("memory_bytes")
    if budget is None:
        assert planned * plan.mesh.size <= (1 << 19) * (1 + 1 / (plan.config.num_pages - 1))
    else:
        page = planned // plan.config.num_pages
        assert 0 <= budget - device_bytes(plan.weights) - planned < page


def test_a_step_is_predicted_from_what_it_reads_and_computes(tmp_path: Path) -> None:
    chip = CHIPS["v6e"]
    write_checkpoint(tmp_path, {"hidden_size": 1024, "intermediate_size": 4096, **WIDE_HEADS})
    config = EngineConfig(model=str(tmp_path), **ENGINE)
    plan = plan_engine(config, tpu_topology.get_devices(TOPOLOGY))
    short, long = (
        predict_bucket(plan, chip, Bucket(8, 8), context=context) for context in (1024, 8192)
    )
    kv_token = 2 * 2 * 128 * 2  # keys and values of 2 heads in bf16, one layer
    assert long.attention_s == pytest.approx(8 * 8192 * kv_token / chip.hbm_bytes_per_s)
    assert long.attention_s == pytest.approx(8 * short.attention_s)
    assert long.matmul_s == short.matmul_s >= device_bytes(plan.weights.layers) / 1.64e12
    assert short.collective_s == 0
    assert short.bound_s < short.step_s
    chunk = predict_bucket(plan, chip, Bucket(4096, 8), context=4096)
    flops = 2 * sum(x.size for x in jax.tree.leaves(plan.weights.layers) if len(x.shape) == 2)
    assert chunk.matmul_s >= 4096 * flops / chip.bf16_flops


@pytest.mark.parametrize(("num_layers", "share"), [(1, 1 / 2), (4, 1 / 4 + 3 / 4 / 2)])
def test_int8_is_predicted_for_the_layers_that_are_int8(
    tmp_path: Path, num_layers: int, share: float
) -> None:
    """v6e multiplies 8-bit integers twice as fast; the first of several layers stays bf16."""
    chip = CHIPS["v6e"]
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, **WIDE_HEADS}
    write_checkpoint(tmp_path, sizes | {"num_hidden_layers": num_layers})
    devices = tpu_topology.get_devices(TOPOLOGY)
    bf16, int8 = (
        predict_bucket(
            plan_engine(EngineConfig(model=str(tmp_path), **ENGINE, **extra), devices),
            chip,
            Bucket(8192, 8),
            context=8192,
        )
        for extra in ({}, {"quantization": "int8"})
    )
    assert int8.bound_s == pytest.approx(share * bf16.bound_s, rel=0.01)


def test_advice_counts_pages_from_the_memory_that_lacks() -> None:
    chip = CHIPS["v6e"]
    memory = MemoryCheck(
        chip=chip,
        num_devices=1,
        weight_bytes=0,
        kv_bytes=100 << 20,
        num_pages=100,
        num_tokens=99,
        num_full_length=1.0,
    )
    small = ProgramCheck(bucket=Bucket(64, 64), argument_bytes=chip.hbm_bytes, compile_s=0.0)
    large = dataclasses.replace(small, bucket=Bucket(512, 64), temporary_bytes=5 << 19)
    config = EngineConfig(model="", quantization="int8")
    assert advise_on_programs(config, memory, [small]) == []
    advice = advise_on_programs(config, memory, [large, small])
    assert advice[:2] == ["num_pages: 97 instead of 100", "max_num_batched_tokens: 64"]
    assert not any("int8" in line for line in advice)
