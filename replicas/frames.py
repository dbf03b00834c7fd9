"""The data plane's wire format: length-prefixed msgpack frames, and the handshake of a link.

A replica connects to a sink. Both prove that they hold the sink's per-boot key:

    sink    -> replica  CHALLENGE  version, sink_nonce
    replica -> sink     HELLO      sink_id, replica_id, replica_nonce, mac("replica")
    sink    -> replica  WELCOME    mac("sink"), {request_id: next output index}
    replica -> sink     TOKENS [delta...]             to a token sink, one per engine step
                        REPORT, then EVENT...         to a router's event sink
                        PING                          when there is nothing else to say
    sink    -> replica  ACK [request_id...]         the last delta of these has arrived

A frame is a 4-byte big-endian body length and a msgpack array [kind, field...]. Invariant: bytes
from a peer never reach anything that can run code (no pickle), and never grow a buffer past the
limit that was set for that peer.
"""

from __future__ import annotations

import dataclasses
import enum
import hmac
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack

from replicas.page_keys import KEY_BYTES
from replicas.wire import (
    CacheChange,
    FinishReason,
    GenerateResult,
    ModelInfo,
    ReplicaLoad,
    ReplicaReport,
    TokenLogprobs,
)

PROTOCOL_VERSION = 2
HEADER_BYTES = 4
MAX_FRAME_BYTES = 4 << 20
"""A frame's body. A step of 1,024 requests takes 60 KB, a resent output of 128k tokens 0.7 MB."""
MAX_REPORTED_PAGES = 200_000
"""Page keys in a report, 3.2 MB."""
MAX_HANDSHAKE_FRAME_BYTES = 1 << 10
"""A frame's body before the peer has proved that it holds the key."""
NONCE_BYTES = 32


class FrameKind(enum.IntEnum):
    """First field of a frame."""

    CHALLENGE = 1
    HELLO = 2
    WELCOME = 3
    TOKENS = 4
    ACK = 5
    EVENT = 6
    REPORT = 7
    PING = 8


class FrameError(Exception):
    """The peer sent what the protocol does not allow; the connection must be closed."""


def pack_frame(kind: FrameKind, *fields: object) -> bytes:
    """Encode one frame, header included."""
    body = msgpack.packb((int(kind), *fields))
    assert body is not None
    assert len(body) <= MAX_FRAME_BYTES, f"{kind.name} frame of {len(body)} bytes"
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class FrameBuffer:
    """Cuts a byte stream into frames.

    Attributes:
        max_frame_bytes: bodies above it are refused before they are buffered.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Yield [kind, field...] of each frame that `data` completes.

        Raises:
            FrameError: a body is over the limit, or is not a msgpack array led by an int.
        """
        # The usual read holds exactly one frame: cut it without touching the buffer.
        pending = self._pending
        if pending:
            pending += data
            view = bytes(pending)
            pending.clear()
        else:
            view = data
        start = 0
        while len(view) - start >= HEADER_BYTES:
            body_start = start + HEADER_BYTES
            body_bytes = int.from_bytes(view[start:body_start], "big")
            if body_bytes > self.max_frame_bytes:
                raise FrameError(f"frame of {body_bytes} bytes, limit {self.max_frame_bytes}")
            if len(view) - body_start < body_bytes:
                break
            start = body_start + body_bytes
            yield _unpack(view[body_start:start])
        if start < len(view):
            pending += view[start:]


def _unpack(body: bytes) -> list[Any]:
    try:
        frame = msgpack.unpackb(body)
    except ValueError as error:  # every msgpack decoding error, and bad UTF-8, is a ValueError
        raise FrameError(f"not msgpack: {error}") from error
    if not isinstance(frame, list) or not frame or type(frame[0]) is not int:
        raise FrameError("not an array led by a frame kind")
    return frame


def make_nonce() -> bytes:
    """Return fresh randomness for one side of a handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def handshake_mac(
    key: bytes, role: str, *, sink_id: str, replica_id: str, sink_nonce: bytes, replica_nonce: bytes
) -> bytes:
    """Prove that `role` ("replica" or "sink") holds `key`, bound to this pair and these nonces.

    The role is part of the message, so that neither side can be used as an oracle for the other.
    """
    message = msgpack.packb(
        (PROTOCOL_VERSION, role, sink_id, replica_id, sink_nonce, replica_nonce)
    )
    assert message is not None
    return hmac.digest(key, message, "sha256")


def verify_mac(expected: bytes, received: object) -> bool:
    """Compare in constant time; anything but bytes is false."""
    return isinstance(received, bytes) and hmac.compare_digest(expected, received)


def pack_result(result: GenerateResult) -> list[object]:
    """Flatten a result for the last delta; the frame names the request, the link the replica."""
    return [
        result.finish_reason.value,
        result.num_output_tokens,
        result.num_prompt_tokens,
        result.num_cached_tokens,
        result.queue_s,
        result.first_token_s,
    ]


def unpack_result(fields: Sequence[Any], *, request_id: str, replica_id: str) -> GenerateResult:
    """Undo `pack_result`.

    Raises:
        FrameError: wrong number or type of fields.
    """
    try:
        finish_reason, num_output, num_prompt, num_cached, queue_s, first_token_s = fields
        return GenerateResult(
            request_id=request_id,
            finish_reason=FinishReason(finish_reason),
            num_output_tokens=int(num_output),
            num_prompt_tokens=int(num_prompt),
            num_cached_tokens=int(num_cached),
            replica_id=replica_id,
            queue_s=float(queue_s),
            first_token_s=None if first_token_s is None else float(first_token_s),
        )
    except (TypeError, ValueError) as error:
        raise FrameError(f"malformed result: {error}") from error


def pack_logprobs(logprobs: TokenLogprobs | None) -> list[object] | None:
    """Flatten log-probabilities, or their absence."""
    return None if logprobs is None else [logprobs.start, logprobs.num_top, logprobs.data]


def unpack_logprobs(fields: object) -> TokenLogprobs | None:
    """Undo `pack_logprobs`.

    Raises:
        FrameError: wrong number or type of fields, or a broken entry.
    """
    match fields:
        case None:
            return None
        case [int(start), int(num_top), bytes(data)] if num_top >= 0:
            logprobs = TokenLogprobs(start=start, num_top=num_top, data=data)
            if len(data) % logprobs.token_bytes == 0:
                return logprobs
    raise FrameError("malformed logprobs")


class LogprobBuffer:
    """Log-probabilities that arrive in pieces, each token's once, whatever is sent again.

    Attributes:
        start: index of the first token that is kept.
        end: index behind the last token so far.
    """

    __slots__ = ("_data", "_num_top", "end", "start")

    def __init__(self) -> None:
        self.end = 0
        self.start = 0
        self._num_top: int | None = None
        self._data = bytearray()

    def __bool__(self) -> bool:
        return bool(self._data)

    def append(self, part: TokenLogprobs) -> None:
        """Take a piece; what is there already is dropped.

        Raises:
            FrameError: something between is missing.
        """
        if self._num_top is None:
            self.start = self.end = part.start
            self._num_top = part.num_top
        if part.start > self.end or part.num_top != self._num_top:
            raise FrameError(f"logprobs skip from {self.end} to {part.start}")
        if part.end > self.end:
            self._data += part.tail(self.end).data
            self.end = part.end

    def since(self, index: int, *, before: int | None = None) -> TokenLogprobs | None:
        """Those of the tokens [index, before); None where there are none."""
        if self._num_top is None or index >= self.end:
            return None
        token_bytes = 4 + 8 * self._num_top
        index = max(index, self.start)
        end = self.end if before is None else min(before, self.end)
        data = self._data[(index - self.start) * token_bytes : (end - self.start) * token_bytes]
        return TokenLogprobs(start=index, num_top=self._num_top, data=bytes(data))

    def take(self) -> TokenLogprobs | None:
        """Everything since the last call."""
        taken = self.since(self.start)
        self.start = self.end
        self._data.clear()
        return taken


def pack_load(load: ReplicaLoad) -> dict[str, float]:
    """Name each field, so that replica and router may be one version apart."""
    return load._asdict()


def unpack_load(fields: Mapping[str, Any]) -> ReplicaLoad:
    """Undo `pack_load`; unknown fields are dropped, missing ones take their default.

    Raises:
        FrameError: not a mapping of names to numbers.
    """
    try:
        known = {name: fields[name] for name in ReplicaLoad._fields if name in fields}
        if not all(isinstance(value, int | float) for value in known.values()):
            raise TypeError("a load field is not a number")
        return ReplicaLoad(**known)
    except TypeError as error:
        raise FrameError(f"malformed load: {error}") from error


def pack_event(sequence: int, load: ReplicaLoad, cache: CacheChange) -> bytes:
    """Encode an EVENT frame."""
    stored, dropped = b"".join(cache.stored), b"".join(cache.dropped)
    return pack_frame(FrameKind.EVENT, sequence, pack_load(load), stored, dropped)


def unpack_event(frame: Sequence[Any]) -> tuple[int, ReplicaLoad, CacheChange]:
    """Undo `pack_event`.

    Raises:
        FrameError: malformed.
    """
    match frame:
        case [FrameKind.EVENT, int(sequence), dict(load), bytes(stored), bytes(dropped)]:
            cache = CacheChange(_split_keys(stored), _split_keys(dropped))
            return sequence, unpack_load(load), cache
        case [FrameKind.EVENT, int(sequence), dict(load)]:  # a replica one version behind
            return sequence, unpack_load(load), CacheChange()
        case _:
            raise FrameError("malformed EVENT frame")


def _split_keys(joined: bytes) -> tuple[bytes, ...]:
    if len(joined) % KEY_BYTES:
        raise FrameError(f"{len(joined)} bytes are no whole number of page keys")
    return tuple(joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES))


def pack_report(report: ReplicaReport) -> bytes:
    """Encode a REPORT frame; the replica's id is known from the link."""
    model_info = dataclasses.asdict(report.model_info)
    pages = b"".join(report.cached_pages[-MAX_REPORTED_PAGES:])
    return pack_frame(FrameKind.REPORT, report.sequence, pack_load(report.load), model_info, pages)


def unpack_report(frame: Sequence[Any], *, replica_id: str) -> ReplicaReport:
    """Undo `pack_report`.

    Raises:
        FrameError: malformed.
    """
    match frame:
        case [FrameKind.REPORT, int(sequence), dict(load), dict(model_info), *rest]:
            pages = rest[0] if rest else b""  # none from a replica one version behind
            if not isinstance(pages, bytes):
                raise FrameError("malformed page keys in a REPORT frame")
            try:
                eos_token_ids = tuple(model_info.pop("eos_token_ids"))
                info = ModelInfo(eos_token_ids=eos_token_ids, **model_info)
            except (KeyError, TypeError) as error:
                raise FrameError(f"malformed model info: {error}") from error
            return ReplicaReport(
                replica_id=replica_id,
                sequence=sequence,
                load=unpack_load(load),
                model_info=info,
                cached_pages=_split_keys(pages),
            )
        case _:
            raise FrameError("malformed REPORT frame")
