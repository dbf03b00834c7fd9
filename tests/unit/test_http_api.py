"""The HTTP endpoints over a fake token client: schemas, streams, errors, disconnects, keys."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families

from app.auth import hash_key
from app.openai_schema import ChatRequest, CompletionRequest
from app.version import VERSION
from replicas.errors import DeadlineExceeded, EngineNotReady, Overloaded, ServingError
from replicas.wire import ReplicaLoad, SamplingParams, StartupProgress
from tests.asgi_client import Answer
from tests.fake_client import EOS
from tests.http_server import MODEL, TEXT, MakeServer, body, chat_body

TEXTS = st.sampled_from(["user", "assistant", "system", "text"])


ENDPOINTS = pytest.mark.parametrize(
    ("path", "make_body"), [("/v1/completions", body), ("/v1/chat/completions", chat_body)]
)


async def test_a_completion_has_openais_schema(make_server: MakeServer) -> None:
    server = make_server(num_cached_tokens=1)
    answer = await server.client.post("/v1/completions", body())
    assert answer.status == 200
    completion = Completion.model_validate(answer.json())
    assert completion.id.startswith("cmpl-")
    assert (completion.object, completion.model) == ("text_completion", MODEL)
    assert completion.system_fingerprint == "fp_0123456789abcdef"
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "stop", None)
    usage = completion.usage
    assert usage is not None
    num_tokens = len(server.tokenizer.encode(TEXT, add_special_tokens=False)) + 1
    num_prompt = len(server.tokenizer.encode("Hello", add_special_tokens=True))
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_tokens)
    assert usage.total_tokens == num_prompt + num_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1


async def test_a_chat_completion_has_openais_schema(make_server: MakeServer) -> None:
    server = make_server()
    answer = await server.client.post("/v1/chat/completions", chat_body())
    completion = ChatCompletion.model_validate(answer.json())
    assert completion.id.startswith("chatcmpl-")
    [choice] = completion.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert answer.json()["choices"][0]["message"]["refusal"] is None
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert list(server.fake.calls[0].prompt) == server.tokenizer.encode(
        prompt, add_special_tokens=False
    )


async def test_a_chat_may_fill_the_context_and_a_completion_gets_16_tokens(
    make_server: MakeServer,
) -> None:
    server = make_server(max_model_len=50)
    await server.client.post("/v1/chat/completions", chat_body())
    await server.client.post("/v1/completions", {"model": MODEL, "prompt": "Hello"})
    await server.client.post("/v1/completions", {"model": MODEL, "prompt": [5] * 45})
    limits = [call.sampling.max_tokens for call in server.fake.calls]
    assert limits == [50 - len(server.fake.calls[0].prompt), 16, 5]


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 1000])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_completion_adds_up_to_the_whole_one(
    make_server: MakeServer, tokens_per_delta: int, include_usage: bool
) -> None:
    server = make_server(tokens_per_delta=tokens_per_delta)
    whole = (await server.client.post("/v1/completions", body(return_token_ids=True))).json()
    options = {"include_usage": True} if include_usage else None
    answer = await server.client.post(
        "/v1/completions", body(stream=True, stream_options=options, return_token_ids=True)
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    events = answer.events()
    # OpenAI's type is the same for bodies and chunks and has no null; its servers send one.
    for event in events:
        for choice in event["choices"]:
            Completion.model_validate({**event, "choices": [{**choice, "finish_reason": "stop"}]})
    chunks = [Completion.model_construct(**event) for event in events]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1
    if include_usage:
        assert all(event["usage"] is None for event in events[:-1])
        last = events.pop()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
    else:
        assert all("usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    ids = [i for choice in choices for i in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert choices[0]["prompt_token_ids"] == whole["choices"][0]["prompt_token_ids"]
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert choices[-1]["text"] == ""


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(
    make_server: MakeServer, include_usage: bool
) -> None:
    server = make_server()
    answer = await server.client.post(
        "/v1/chat/completions",
        chat_body(stream=True, stream_options={"include_usage": include_usage}),
    )
    events = answer.events()
    chunks = [ChatCompletionChunk.model_validate(event) for event in events]
    if include_usage:
        assert chunks.pop().usage is not None
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert events[len(chunks) - 1]["choices"][0]["delta"] == {}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]


async def test_token_ids_of_a_chat_stand_where_vllm_puts_them(make_server: MakeServer) -> None:
    server = make_server()
    whole = await server.client.post("/v1/chat/completions", chat_body(return_token_ids=True))
    prompt_ids = list(server.fake.calls[0].prompt)
    assert whole.json()["prompt_token_ids"] == prompt_ids
    streamed = await server.client.post(
        "/v1/chat/completions", chat_body(return_token_ids=True, stream=True)
    )
    events = streamed.events()
    assert events[0]["prompt_token_ids"] == prompt_ids
    ids = [i for event in events for i in event["choices"][0].get("token_ids", [])]
    assert ids == whole.json()["choices"][0]["token_ids"]


async def test_what_is_ready_together_is_sent_together(make_server: MakeServer) -> None:
    server = make_server(tokens_per_delta=1000)
    answer = await server.client.post("/v1/chat/completions", chat_body(stream=True))
    assert len(answer.chunks) == 1


async def test_no_chunk_cuts_a_character(make_server: MakeServer) -> None:
    answer = await make_server().client.post("/v1/completions", body(stream=True))
    assert not any("\ufffd" in event["choices"][0]["text"] for event in answer.events())


@ENDPOINTS
async def test_every_choice_has_a_sequence_and_a_seed_of_its_own(
    make_server: MakeServer, path: str, make_body: Callable[..., Any]
) -> None:
    server = make_server(lambda _, sampling: [sampling.seed % 400 + 5, EOS])
    request = make_body(n=5, seed=9, return_token_ids=True)
    whole = (await server.client.post(path, request)).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(5))
    seeds = [call.sampling.seed for call in server.fake.calls]
    assert len(set(seeds)) == 5
    assert seeds[0] == 9
    assert len({call.request_id for call in server.fake.calls}) == 5
    assert whole["usage"]["prompt_tokens"] == len(server.fake.calls[0].prompt)
    assert whole["usage"]["completion_tokens"] == 10
    streamed = (await server.client.post(path, {**request, "stream": True})).events()
    for index in range(5):
        own = [e["choices"][0] for e in streamed if e["choices"][0]["index"] == index]
        ids = [i for choice in own for i in choice.get("token_ids", [])]
        assert ids == whole["choices"][index]["token_ids"]
        assert own[-1]["finish_reason"] == "stop"
    assert [call.sampling.seed for call in server.fake.calls[5:]] == seeds


async def test_a_list_of_prompts_is_answered_in_order(make_server: MakeServer) -> None:
    server = make_server(lambda prompt, _: [prompt[0], EOS])
    request = body(prompt=[[10], [11, 12]], n=2, return_token_ids=True, seed=1)
    answer = (await server.client.post("/v1/completions", request)).json()
    assert [choice["token_ids"][0] for choice in answer["choices"]] == [10, 10, 11, 11]
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [[10], [10], [11, 12], [11, 12]]
    assert answer["usage"]["prompt_tokens"] == 3
    # The i-th choice of a prompt does not depend on the prompts beside it.
    assert server.fake.calls[0].sampling.seed == server.fake.calls[2].sampling.seed


@ENDPOINTS
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_text_and_the_sequence(
    make_server: MakeServer, path: str, make_body: Callable[..., Any], stream: bool
) -> None:
    server = make_server()
    answer = await server.client.post(path, make_body(stop=["small tok", "nope"], stream=stream))
    events = answer.events() if stream else [answer.json()]
    choices = [event["choices"][0] for event in events]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    texts = [part.get("text") or part.get("content") or "" for part in parts]
    assert "".join(texts) == TEXT[: TEXT.index("small tok")]
    assert choices[-1]["finish_reason"] == "stop"
    assert server.fake.given_up == [server.fake.calls[0].request_id]
    assert not server.fake.running


async def test_cached_tokens_are_not_guessed_after_a_stop_string(make_server: MakeServer) -> None:
    server = make_server(num_cached_tokens=1)
    answer = await server.client.post("/v1/completions", body(stop="small"))
    assert answer.json()["usage"]["prompt_tokens_details"] is None


async def test_sampling_parameters_reach_the_engine(make_server: MakeServer) -> None:
    server = make_server()
    await server.client.post(
        "/v1/completions",
        body(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=3,
            max_tokens=4,
            stop_token_ids=[9],
            ignore_eos=True,
            cache_salt="s",
        ),
        {"traceparent": "00-1-2-01", "x-slo-ttft-ms": "1500", "x-priority": "1"},
    )
    [call] = server.fake.calls
    assert (call.hints.ttft_target_s, call.priority) == (1.5, 1)
    assert call.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        seed=3,
        max_tokens=4,
        stop_token_ids=(9,),
        ignore_eos=True,
    )
    assert (call.cache_salt, call.traceparent, call.timeout_s) == ("s", "00-1-2-01", 3600.0)


async def test_special_tokens_are_shown_on_request(make_server: MakeServer) -> None:
    server = make_server(lambda *_: [0, 1, 1])
    request = body(ignore_eos=True)
    assert (await server.client.post("/v1/completions", request)).json()["choices"][0]["text"] == ""
    shown = await server.client.post("/v1/completions", {**request, "skip_special_tokens": False})
    assert shown.json()["choices"][0]["text"] == "<|im_start|><|im_end|><|im_end|>"


# --- refusals ---------------------------------------------------------------------------------


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


# --- time and disconnects ---------------------------------------------------------------------


async def test_a_silent_stream_is_kept_alive_from_submission_on(make_server: MakeServer) -> None:
    server = make_server(config={"keep_alive_s": 0.01})
    server.fake.gate.clear()

    def release_after_three(answer: Answer) -> bool:
        if answer.chunks == [b": keep-alive\n\n"] * 3:
            server.fake.gate.set()
        return False

    raw = json.dumps(body(stream=True)).encode()
    answer = await server.client.request(
        "POST", "/v1/completions", [raw], until=release_after_three
    )
    assert answer.body.startswith(b": keep-alive\n\n" * 3)
    assert "".join(event["choices"][0]["text"] for event in answer.events()) == TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_before_the_first_token_gives_the_request_up(
    make_server: MakeServer, stream: bool, n: int
) -> None:
    server = make_server()
    server.fake.gate.clear()

    raw = json.dumps(body(stream=stream, n=n)).encode()
    answer = await server.client.request(
        "POST", "/v1/completions", [raw], before_leaving=lambda: server.fake.wait_running(n)
    )
    assert not answer.is_complete
    assert len(server.fake.given_up) == n
    assert not server.fake.running
    assert server.samples("systole_requests_total") == {("/v1/completions", "499"): 1}
    assert server.samples("systole_requests_in_progress") == {(): 0}


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_in_mid_stream_gives_the_request_up(make_server: MakeServer, n: int) -> None:
    server = make_server(lambda *_: [5] * 100)
    raw = json.dumps(body(stream=True, n=n)).encode()
    answer = await server.client.request(
        "POST", "/v1/completions", [raw], until=lambda answer: len(answer.chunks) == 4
    )
    assert not answer.is_complete
    assert len(answer.chunks) < 20
    assert not server.fake.running
    assert len(server.fake.given_up) == n


async def test_leaving_while_the_body_is_sent_is_no_error(make_server: MakeServer) -> None:
    server = make_server()
    received = iter(
        [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> Any:
        return next(received)

    async def send(_: Any) -> None:
        pytest.fail("nobody is there to be answered")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
    }
    await server.client._app(scope, receive, send)
    assert server.fake.calls == []


async def test_the_app_starts_and_stops_under_a_server(make_server: MakeServer) -> None:
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    answers: list[str] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        answers.append(message["type"])

    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    await make_server().client._app(scope, receive, send)
    assert answers == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_cancelled_server_cancels_the_request(make_server: MakeServer) -> None:
    server = make_server()
    server.fake.gate.clear()
    call = asyncio.create_task(server.client.post("/v1/completions", body()))
    await server.fake.wait_running(1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0.01)
    assert not server.fake.running


# --- the other endpoints ----------------------------------------------------------------------


async def test_models_are_listed_and_found_by_id(make_server: MakeServer) -> None:
    client = make_server().client
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    [model] = [Model.model_validate(model) for model in listed["data"]]
    assert model.id == MODEL
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    answer = await client.get("/v1/models/other")
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_ready_follows_the_replicas(make_server: MakeServer) -> None:
    server = make_server()
    answer = await server.client.get("/ready")
    assert answer.status == 200
    assert answer.json()["ready"] is True
    server.fake.state = dataclasses.replace(
        server.fake.state,
        ready=False,
        replicas={},
        model_info=None,
        startup=(StartupProgress(replica_id="r", stage="compile", done=3, total=9),),
    )
    answer = await server.client.get("/ready")
    assert answer.status == 503
    progress = answer.json()
    assert (progress["ready"], progress["stage"]) == (False, "compile")
    assert (progress["done"], progress["total"]) == (3, 9)
    assert (await server.client.get("/health")).status == 200


async def test_a_server_that_is_starting_says_503(make_server: MakeServer) -> None:
    server = make_server()
    server.fake.state = dataclasses.replace(server.fake.state, ready=False, model_info=None)
    answer = await server.client.post("/v1/completions", body())
    assert (answer.status, answer.error["code"]) == (503, "engine_not_ready")
    assert int(answer.headers["retry-after"]) > 0
    assert (await server.client.get("/v1/models")).status == 200
    assert (await server.client.get("/version")).json()["version"] == VERSION


async def test_probes_answer_while_the_router_is_silent(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server()
    monkeypatch.setattr("app.system_endpoints._STATUS_TIMEOUT_S", 0.01)

    async def never() -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(server.fake, "status", never)
    answer = await server.client.get("/ready")
    assert (answer.status, answer.json()["stage"]) == (503, "starting the router")
    assert (await server.client.get("/metrics")).status == 200


async def test_metrics_count_requests_and_show_engines(make_server: MakeServer) -> None:
    server = make_server(num_cached_tokens=1)
    server.fake.state = dataclasses.replace(
        server.fake.state,
        replicas={"r1": ReplicaLoad(num_compiles_after_warmup=2, num_steps=7, step_s=0.5)},
        num_queued=4,
        num_inflight=3,
    )
    whole = (await server.client.post("/v1/completions", body())).json()
    await server.client.post("/v1/completions", body(temperature=9))
    answer = await server.client.get("/metrics")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.body.decode())
        for sample in family.samples
    }
    ingress = ("ingress", "ingress-1")
    path = ("endpoint", "/v1/completions")
    assert samples["systole_requests_total", (path, ingress, ("status", "200"))] == 1
    assert samples["systole_requests_total", (path, ingress, ("status", "400"))] == 1
    assert samples["systole_time_to_first_token_seconds_count", (ingress,)] == 1
    num_tokens = whole["usage"]["completion_tokens"]
    assert samples["systole_output_tokens_total", (ingress,)] == num_tokens
    assert samples["systole_inter_token_latency_seconds_count", (ingress,)] == num_tokens - 1
    assert samples["systole_time_per_output_token_seconds_count", (ingress,)] == 1
    assert samples["systole_prompt_tokens_total", (ingress,)] == whole["usage"]["prompt_tokens"]
    assert samples["systole_cached_prompt_tokens_total", (ingress,)] == 1
    assert samples["systole_request_duration_seconds_count", (path, ingress)] == 2
    assert samples["systole_requests_in_progress", (ingress,)] == 0
    replica = (("replica", "r1"),)
    assert samples["systole_engine_compiles_after_warmup_total", replica] == 2
    assert samples["systole_engine_steps_total", replica] == 7
    assert samples["systole_engine_step_seconds", replica] == 0.5
    assert samples["systole_router_queued_requests", ()] == 4
    assert samples["systole_router_inflight_requests", ()] == 3
    assert samples["systole_token_sink_entries", (ingress,)] == 0


async def test_keys_protect_everything_but_the_probes(make_server: MakeServer) -> None:
    server = make_server(config={"key_hashes": frozenset({hash_key(b"secret")})})
    paths = ["/v1/models", "/v1/models/x", "/metrics", "/version", "/v1/nothing", "/healthx"]
    for path in paths:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await server.client.get(path, headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
            assert answer.headers["www-authenticate"] == "Bearer"
    answer = await server.client.post("/v1/completions", b"x" * (50 << 20))
    assert answer.status == 401
    assert server.client.num_body_chunks_taken == 0
    for path in ("/health", "/ready"):
        assert (await server.client.get(path)).status == 200
    allowed = await server.client.get("/v1/models", {"authorization": "Bearer secret"})
    assert allowed.status == 200


@pytest.mark.parametrize("given", ["req-1", "a" * 128])
async def test_a_request_id_is_echoed(make_server: MakeServer, given: str) -> None:
    client = make_server().client
    for answer in (
        await client.post("/v1/completions", body(), {"x-request-id": given}),
        await client.post("/v1/completions", body(stream=True), {"x-request-id": given}),
        await client.get("/v1/nothing", {"x-request-id": given}),
    ):
        assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "has space", "a" * 129])
async def test_an_unusable_request_id_is_replaced(make_server: MakeServer, given: str) -> None:
    answer = await make_server().client.get("/health", {"x-request-id": given})
    assert answer.headers["x-request-id"] not in ("", given)


def test_the_version_is_pyprojects() -> None:
    import tomllib

    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    assert tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"] == VERSION
