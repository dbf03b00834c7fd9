"""What the HTTP API refuses, and how failures look to the client."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.openai_schema import ChatRequest, CompletionRequest
from replicas.errors import DeadlineExceeded, EngineNotReady, Overloaded, ServingError
from tests.asgi_client import Answer
from tests.http_server import MODEL, MakeServer, body, chat_body

TEXTS = st.sampled_from(["user", "assistant", "system", "text"])


@pytest.mark.parametrize(
    ("request_body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b'{"prompt": "a", "temperature": NaN}', 400, "invalid_json", None),
        ({"model": "other", "prompt": "a"}, 404, "model_not_found", "model"),
        (body(prompt=[5] * 200), 400, "context_length_exceeded", "prompt"),
        (body(prompt="a b c d " * 200), 400, "context_length_exceeded", None),
        (body(prompt="a" * 1_000_000), 400, "context_length_exceeded", None),
        (body(max_tokens=1000), 400, "context_length_exceeded", "max_tokens"),
        (body(prompt=[]), 400, "invalid_value", "prompt"),
        (body(prompt=""), 400, "invalid_value", "prompt"),
        (body(prompt=["a", ""]), 400, "invalid_value", "prompt"),
        (body(max_tokens=-1), 400, "invalid_value", "max_tokens"),
        (body(temperature=1e9), 400, "invalid_value", "temperature"),
        (body(prompt=[5, 500]), 400, "invalid_value", "prompt"),
        (body(prompt=[[5], [10**18]]), 400, "invalid_value", "prompt"),
        (body(stop_token_ids=[500]), 400, "invalid_value", "stop_token_ids"),
        (body(stop=["x"] * 1000), 400, "invalid_value", "stop"),
        (body(n=100, prompt=["a", "b"]), 400, "invalid_value", "prompt"),
        (body(prompt=["a"] * 129), 400, "invalid_value", "prompt"),
        (body(suffix="x"), 400, "unsupported_parameter", "suffix"),
        (body(best_of=3), 400, "unsupported_parameter", "best_of"),
        (body(logit_bias={"500": 1}), 400, "invalid_value", "logit_bias"),
        (body(allowed_token_ids=[500]), 400, "invalid_value", "allowed_token_ids"),
        (body(bad_words=["x" * 90]), 400, "invalid_value", "bad_words"),
        (body(min_tokens=101), 400, "invalid_value", "min_tokens"),
        (body(colour="red"), 400, "unknown_parameter", "colour"),
        ({"model": MODEL}, 400, "missing_required_parameter", "prompt"),
    ],
)
async def test_bad_completions_are_refused_before_any_work(
    make_server: MakeServer, request_body: Any, status: int, code: str, param: str | None
) -> None:
    server = make_server()
    for stream in (False, True):
        sent = request_body
        if isinstance(sent, dict):
            sent = {**sent, "stream": stream}
        answer = await server.client.post("/v1/completions", sent)
        assert answer.status == status
        error = answer.error
        assert (error["code"], error["type"]) == (code, "invalid_request_error")
        assert error["param"] == param
        assert error["message"]
    assert server.fake.calls == []


async def test_a_model_without_a_template_has_no_chat(make_server: MakeServer) -> None:
    answer = await make_server(with_chat=False).client.post("/v1/chat/completions", chat_body())
    assert answer.status == 400
    assert "no chat template" in answer.error["message"]


async def test_a_chat_over_the_context_is_refused(make_server: MakeServer) -> None:
    messages = [{"role": "user", "content": "word " * 500}]
    answer = await make_server().client.post("/v1/chat/completions", chat_body(messages=messages))
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_unknown_paths_and_methods_have_openais_shape(make_server: MakeServer) -> None:
    client = make_server().client
    answer = await client.get("/v1/nothing")
    assert (answer.status, answer.error["code"]) == (404, "path_not_found")
    answer = await client.get("/v1/completions")
    assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
    assert answer.headers["allow"] == "POST"
    answer = await client.post("/v1/models/", {})
    assert answer.status in (404, 405)
    assert answer.error


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_limit_is_refused_before_it_is_read(
    make_server: MakeServer, declared: bool
) -> None:
    server = make_server(config={"max_body_bytes": 1 << 20})
    chunk = b" " * (64 << 10)
    chunks = [chunk] * (50 << 4)  # 50 MB
    headers = {"content-length": str(50 << 20)} if declared else {"transfer-encoding": "chunked"}
    answer = await server.client.request("POST", "/v1/completions", chunks, headers)
    assert (answer.status, answer.error["code"]) == (413, "payload_too_large")
    assert server.client.num_body_chunks_taken <= (0 if declared else 17)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/v1/messages", "/tokenize"])
async def test_a_body_that_does_not_arrive_is_given_up(make_server: MakeServer, path: str) -> None:
    server = make_server(config={"body_timeout_s": 0.1})
    answer = await server.client.request("POST", path, [b'{"model": '], stalls=True)
    assert answer.status == 408
    assert answer.headers["connection"] == "close"
    assert "did not arrive within 0.1 s" in answer.json()["error"]["message"]
    assert server.samples("systole_requests_in_progress") == {(): 0}


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (Overloaded("full", retry_after_s=2.3), 429, "rate_limit_error", "3"),
        (Overloaded("full"), 429, "rate_limit_error", "1"),
        (EngineNotReady("draining", retry_after_s=5), 503, "server_error", "5"),
        (DeadlineExceeded("too late"), 504, "timeout_error", None),
        (ServingError("broken"), 500, "server_error", None),
        (RuntimeError("secret detail"), 500, "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_early_failure_keeps_its_status(
    make_server: MakeServer,
    error: Exception,
    status: int,
    kind: str,
    retry_after: str | None,
    stream: bool,
) -> None:
    server = make_server(error=error)
    answer = Answer()
    try:
        answer = await server.client.post("/v1/completions", body(stream=stream))
    except RuntimeError:  # Starlette answers, then raises for the server's log
        assert status == 500
        return
    assert (answer.status, answer.error["type"]) == (status, kind)
    assert answer.headers.get("retry-after") == retry_after
    assert "secret" not in answer.body.decode()


@pytest.mark.parametrize("error", [Overloaded("late refusal"), RuntimeError("secret detail")])
async def test_a_late_failure_is_an_event_before_done(
    make_server: MakeServer, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(error=error, error_after=3)
    with caplog.at_level(logging.INFO, "ray.serve"):
        answer = await server.client.post(
            "/v1/completions", body(stream=True), {"x-request-id": "req-7"}
        )
    assert answer.status == 200
    *chunks, last = answer.events()
    assert chunks
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in last["error"]["message"]
    assert any("req-7" in record.getMessage() for record in caplog.records)


async def test_one_failing_choice_ends_the_others(make_server: MakeServer) -> None:
    server = make_server(error=Overloaded("full"), error_after=2)
    answer = await server.client.post("/v1/completions", body(n=4))
    assert answer.status == 429
    assert not server.fake.running


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
FIELDS = sorted(
    {name for schema in (CompletionRequest, ChatRequest) for name in schema.model_fields}
    | set(CompletionRequest.neutral)
    | set(ChatRequest.neutral)
)
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "x"]), JSON | TEXTS)
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), JSON, max_size=4),
    MESSAGES,
)
async def test_no_json_makes_the_server_fail(
    make_server: MakeServer, path: str, fields: dict[str, Any], messages: list[Any]
) -> None:
    make_body = body if path == "/v1/completions" else chat_body
    server = make_server()
    for request in (make_body(**fields), chat_body(messages=messages)):
        answer = await server.client.post(path, request)
        assert answer.status in (200, 400, 404)
        if answer.status != 200:
            assert answer.error["message"]
    assert not server.fake.running
