"""The wire format: what is packed comes back, and nothing else gets through."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.frames import (
    FrameBuffer,
    FrameError,
    FrameKind,
    handshake_mac,
    make_nonce,
    pack_frame,
    pack_load,
    pack_report,
    pack_result,
    unpack_load,
    unpack_report,
    unpack_result,
    verify_mac,
)
from replicas.wire import FinishReason, GenerateResult, ModelInfo, ReplicaLoad, ReplicaReport

FRAMES = [[int(FrameKind.TOKENS), ["r", n, list(range(n)), None]] for n in range(20)]


@given(st.lists(st.integers(1, 400), max_size=40))
def test_frames_survive_any_fragmentation(sizes: list[int]) -> None:
    stream = b"".join(pack_frame(FrameKind(frame[0]), frame[1]) for frame in FRAMES)
    buffer = FrameBuffer(1 << 16)
    received: list[object] = []
    for size in [*sizes, len(stream)]:
        piece, stream = stream[:size], stream[size:]
        received += buffer.feed(piece)
    received += buffer.feed(stream)
    assert received == FRAMES


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_frames_or_a_frame_error(data: bytes) -> None:
    buffer = FrameBuffer(64)
    try:
        for frame in buffer.feed(data):
            assert isinstance(frame, list)
            assert isinstance(frame[0], int)
    except FrameError:
        pass


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb({1: 2}),
        msgpack.packb([]),
        msgpack.packb(["kind"]),
        msgpack.packb([True]),
        msgpack.packb([1, 2]) + b"\x00",
        b"\x91" * 100_000,
    ],
)
def test_a_malformed_body_is_refused(body: bytes) -> None:
    buffer = FrameBuffer(1 << 20)
    with pytest.raises(FrameError):
        list(buffer.feed(len(body).to_bytes(4, "big") + body))


def test_an_oversized_body_is_refused_by_its_header_alone() -> None:
    with pytest.raises(FrameError, match="limit 1024"):
        list(FrameBuffer(1024).feed((1025).to_bytes(4, "big")))


def test_records_round_trip() -> None:
    result = GenerateResult(
        request_id="r",
        finish_reason=FinishReason.STOP,
        num_output_tokens=3,
        num_prompt_tokens=4,
        num_cached_tokens=2,
        replica_id="a",
        queue_s=0.25,
        first_token_s=0.5,
    )
    assert unpack_result(pack_result(result), request_id="r", replica_id="a") == result
    load = ReplicaLoad(num_running=1, num_slots=2, step_s=0.5)
    assert unpack_load(pack_load(load)) == load
    assert unpack_load({"num_running": 1, "of_a_later_version": 2}) == ReplicaLoad(num_running=1)
    report = ReplicaReport(
        replica_id="a",
        sequence=7,
        load=load,
        model_info=ModelInfo(
            model_id="m",
            max_model_len=1,
            max_request_tokens=1,
            vocab_size=1,
            eos_token_ids=(1, 2),
            fingerprint="f",
        ),
    )
    (frame,) = FrameBuffer(1 << 16).feed(pack_report(report))
    assert unpack_report(frame, replica_id="a") == report


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["stop", 1, 1, 1, "x", None],
        ["stop", 1, 1, 1, 0.0, "x"],
        ["hm", 1, 1, 1, 0.0, None],
        [None] * 6,
    ],
)
def test_a_malformed_result_is_refused(fields: list[object]) -> None:
    with pytest.raises(FrameError):
        unpack_result(fields, request_id="r", replica_id="a")


def test_a_mac_is_bound_to_key_role_names_and_nonces() -> None:
    nonces = {"sink_nonce": make_nonce(), "replica_nonce": make_nonce()}
    names = {"sink_id": "s", "replica_id": "r"}
    mac = handshake_mac(b"key", "sink", **names, **nonces)
    assert verify_mac(mac, handshake_mac(b"key", "sink", **names, **nonces))
    swapped = {"sink_nonce": nonces["replica_nonce"], "replica_nonce": nonces["sink_nonce"]}
    others = [
        handshake_mac(b"other", "sink", **names, **nonces),
        handshake_mac(b"key", "replica", **names, **nonces),
        handshake_mac(b"key", "sink", sink_id="sr", replica_id="", **nonces),
        handshake_mac(b"key", "sink", **names, **swapped),
        None,
        "text",
    ]
    assert not any(verify_mac(mac, other) for other in others)
