"""Completions and chat completions over HTTP: shapes, streams, choices, stop strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from replicas.wire import SamplingParams
from tests.fake_client import EOS
from tests.http_server import MODEL, TEXT, MakeServer, body, chat_body

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
