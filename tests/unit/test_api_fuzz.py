"""Whatever JSON the endpoints of items and blocks get, they answer or refuse; they never fail."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.anthropic_schema import ANTHROPIC_PARAMETERS, MessagesRequest
from app.responses.schema import RESPONSES_PARAMETERS, ResponsesRequest
from tests.http_server import MODEL, MakeServer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
TYPES = st.sampled_from(
    [
        *("message", "function_call", "function_call_output", "reasoning", "text", "input_text"),
        *("thinking", "tool_use", "tool_result", "function", "custom", "x"),
    ]
)
KEYS = st.sampled_from(
    [
        *("role", "content", "call_id", "name", "arguments", "output", "summary", "id", "input"),
        *("tool_use_id", "thinking", "is_error", "input_schema", "parameters", "text", "strict"),
    ]
)
NAMES = st.sampled_from(["user", "assistant", "system", "f", "{}", '{"a": 1}', ""])
# As in a body that is all but right, so that more than the first check is reached.
THING = st.recursive(
    st.fixed_dictionaries({"type": TYPES}, optional={"role": NAMES, "text": NAMES}),
    lambda inner: st.builds(
        lambda kind, fields: {"type": kind, **fields},
        TYPES,
        st.dictionaries(KEYS, NAMES | JSON | inner | st.lists(inner, max_size=2), max_size=4),
    ),
    max_leaves=4,
)
RESPONSE_FIELDS = sorted({*ResponsesRequest.model_fields, *RESPONSES_PARAMETERS} - {"background"})
MESSAGE_FIELDS = sorted({*MessagesRequest.model_fields, *ANTHROPIC_PARAMETERS})


async def check(make_server: MakeServer, path: str, body: dict[str, Any]) -> None:
    server = make_server()
    answer = await server.client.post(path, json.dumps(body).encode())
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert answer.json()["error"]["message"]
    assert not server.fake.running


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(THING, max_size=3),
    st.dictionaries(st.sampled_from(RESPONSE_FIELDS), JSON | st.lists(THING), max_size=3),
)
async def test_no_json_makes_a_response_fail(
    make_server: MakeServer, items: list[Any], fields: dict[str, Any]
) -> None:
    await check(make_server, "/v1/responses", {"input": items or "Hi", **fields})


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(THING, max_size=3),
    st.dictionaries(st.sampled_from(MESSAGE_FIELDS), JSON | st.lists(THING), max_size=3),
)
async def test_no_json_makes_a_message_fail(
    make_server: MakeServer, blocks: list[Any], fields: dict[str, Any]
) -> None:
    turns = [{"role": "user", "content": blocks or "Hi"}]
    await check(
        make_server, "/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": turns, **fields}
    )
