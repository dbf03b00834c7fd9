"""The GGUF reader: what it reads is what was written, and nothing damaged gets through."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Quantization
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replicas.models.gguf import GgufError, read_gguf
from tests.gguf_files import GgufSpec, llama_spec, patched

# Largest error of one element, as a part of the largest element of its block of 32.
QUANTIZATION_STEPS = {
    Quantization.F32: 0.0,
    Quantization.F16: 2**-11,
    Quantization.BF16: 2**-8,
    Quantization.Q4_0: 1 / 7,
    Quantization.Q4_1: 1 / 7,
    Quantization.Q5_0: 1 / 15,
    Quantization.Q5_1: 1 / 15,
    Quantization.Q8_0: 1 / 127,
}


def small_spec() -> GgufSpec:
    rng = np.random.default_rng(1)
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "answer": 42,
        "ratio": 0.5,
        "flag": True,
        "words": ["one", "zwei", "三"],
        "numbers": [1, -2, 3],
    }
    tensors = {
        "matrix": rng.standard_normal((3, 64), dtype=np.float32),
        "vector": rng.standard_normal(7, dtype=np.float32),
    }
    return GgufSpec(metadata, tensors)


def test_metadata_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    spec = small_spec()
    file = read_gguf(spec.write(tmp_path / "small.gguf"))
    assert file.metadata == spec.metadata
    assert list(file.tensors) == ["matrix", "vector"]
    for name, values in spec.tensors.items():
        np.testing.assert_array_equal(file.tensors[name].to_float32(), values)


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_every_version_and_alignment(tmp_path: Path, version: int, alignment: int) -> None:
    spec = patched(small_spec(), {"general.alignment": alignment})
    spec.version, spec.alignment = version, alignment
    file = read_gguf(spec.write(tmp_path / "aligned.gguf"))
    np.testing.assert_array_equal(file.tensors["vector"].to_float32(), spec.tensors["vector"])


@pytest.mark.parametrize("quantization", QUANTIZATION_STEPS, ids=lambda item: item.name)
def test_quantised_values_are_within_a_step(tmp_path: Path, quantization: Quantization) -> None:
    spec = small_spec()
    spec.quantizations["matrix"] = quantization
    values = spec.tensors["matrix"]
    found = read_gguf(spec.write(tmp_path / "q.gguf")).tensors["matrix"].to_float32()
    assert found.shape == values.shape
    largest = np.abs(values.reshape(3, 2, 32)).max(axis=-1, keepdims=True)
    limit = np.broadcast_to(largest * QUANTIZATION_STEPS[quantization] * 1.01, (3, 2, 32))
    assert (np.abs(found - values) <= limit.reshape(3, 64)).all()


def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    whole = small_spec().write(tmp_path / "whole.gguf").read_bytes()
    padding = 4  # the last vector holds 28 bytes, padded to 32
    cut = tmp_path / "cut.gguf"
    for length in range(len(whole) - padding):
        cut.write_bytes(whole[:length])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_gguf(cut)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 a zip archive", "begins with b'PK"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 3, big endian"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(content)
    with pytest.raises(GgufError, match=message) as caught:
        read_gguf(path)
    assert "foreign.gguf" in str(caught.value)


@pytest.mark.parametrize(
    ("type_id", "found"),
    [(Quantization.IQ1_S, "IQ1_S"), (Quantization.I8, "I8"), (999, "type 999")],
)
def test_an_unsupported_quantisation_names_the_supported(
    tmp_path: Path, type_id: int, found: str
) -> None:
    path = small_spec().write(tmp_path / "odd.gguf")
    raw = path.read_bytes()
    entry = b"matrix" + struct.pack("<IQQ", 2, 64, 3)
    place = raw.index(entry) + len(entry)
    path.write_bytes(raw[:place] + struct.pack("<I", type_id) + raw[place + 4 :])
    with pytest.raises(GgufError, match=rf"matrix is stored as {found}.*supported: F32, .*Q6_K"):
        read_gguf(path)


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    spec = patched(small_spec(), {"split.count": 3})
    with pytest.raises(GgufError, match="one of 3 parts"):
        read_gguf(spec.write(tmp_path / "part.gguf"))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_of_the_header_escapes_as_another_error(
    tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "damaged.gguf"
    raw = bytearray(small_spec().write(path).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, 360))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        file = read_gguf(path)
    except GgufError:
        return
    for tensor in file.tensors.values():
        assert tensor.to_float32().shape == tensor.shape


def test_opening_reads_no_tensor_data(tmp_path: Path) -> None:
    file = read_gguf(llama_spec().write(tmp_path / "model.gguf"))
    for tensor in file.tensors.values():
        assert not tensor.raw.flags.owndata
        assert not tensor.raw.flags.writeable
