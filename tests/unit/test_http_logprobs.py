"""Log-probabilities, echo and the other parameters of the output, over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.generation_config import SamplingDefaults
from replicas.wire import SamplingParams
from tests.fake_client import EOS, fake_logprob
from tests.http_server import TEXT, MakeServer, body, chat_body


async def test_a_chat_has_openais_logprobs(make_server: MakeServer) -> None:
    server = make_server(tokens_per_delta=3)
    request = chat_body(logprobs=True, top_logprobs=2, return_token_ids=True)
    answer = (await server.client.post("/v1/chat/completions", request)).json()
    [choice] = ChatCompletion.model_validate(answer).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    ids = answer["choices"][0]["token_ids"]
    assert [entry.logprob for entry in content] == [fake_logprob(i) for i in ids]
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert content[0].top_logprobs[0].token == content[0].token
    raw = b"".join(bytes(entry.bytes or ()) for entry in content[:-1])
    assert raw.decode() == TEXT, "bytes of tokens that cut a character add up"
    assert server.fake.calls[0].sampling.logprobs == 2

    streamed = await server.client.post("/v1/chat/completions", {**request, "stream": True})
    events = streamed.events()
    chunks = [ChatCompletionChunk.model_validate(event) for event in events]
    parts = [c.choices[0].logprobs.content or [] for c in chunks if c.choices[0].logprobs]
    whole = [entry.model_dump() for entry in content]
    assert [entry.model_dump() for part in parts for entry in part] == whole


async def test_logprobs_without_alternatives_are_the_tokens_alone(make_server: MakeServer) -> None:
    server = make_server()
    answer = await server.client.post("/v1/chat/completions", chat_body(logprobs=True))
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert server.fake.calls[0].sampling.logprobs == 0


@pytest.mark.parametrize("echo", [False, True])
async def test_a_completion_has_openais_logprobs(make_server: MakeServer, echo: bool) -> None:
    server = make_server(tokens_per_delta=2)
    request = body(logprobs=1, echo=echo, return_token_ids=True)
    answer = (await server.client.post("/v1/completions", request)).json()
    # OpenAI's server has a null for an echoed prompt's first token, its client's type has not.
    shape = answer["choices"][0]["logprobs"]
    without_null = {name: values[1:] if echo else values for name, values in shape.items()}
    strict = {**answer["choices"][0], "logprobs": without_null}
    Completion.model_validate({**answer, "choices": [strict]})
    text = answer["choices"][0]["text"]
    ids = answer["choices"][0]["token_ids"]
    prompt_ids = answer["choices"][0]["prompt_token_ids"] if echo else []
    assert text == ("Hello" if echo else "") + TEXT
    expected: list[float | None] = [fake_logprob(i) for i in [*prompt_ids, *ids]]
    if echo:
        expected[0] = None
        assert answer["choices"][0]["logprobs"]["top_logprobs"][0] is None
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == expected
    assert shape["text_offset"][:2] == [0, len(shape["tokens"][0])]
    assert server.fake.calls[0].sampling.prompt_logprobs == (1 if echo else None)

    streamed = await server.client.post("/v1/completions", {**request, "stream": True})
    choices = [event["choices"][0] for event in streamed.events()]
    assert "".join(c["text"] for c in choices) == text
    shapes = [c["logprobs"] for c in choices if c["logprobs"]]
    joined = {name: [x for shape in shapes for x in shape[name]] for name in shapes[0]}
    assert joined == answer["choices"][0]["logprobs"]


async def test_lm_eval_gets_the_logprobs_of_its_prompt(make_server: MakeServer) -> None:
    """Token ids in, echo, one token: what a harness for evaluation sends."""
    server = make_server()
    for max_tokens, num_output in ((1, 1), (0, 0)):
        request = body(prompt=[[5, 6, 7]], echo=True, logprobs=1, max_tokens=max_tokens)
        answer = (await server.client.post("/v1/completions", request)).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][:3] == [None, fake_logprob(6), fake_logprob(7)]
        assert len(logprobs["tokens"]) == 3 + num_output
        assert answer["usage"]["completion_tokens"] == num_output
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "make_body"), [("/v1/completions", body), ("/v1/chat/completions", chat_body)]
)
async def test_prompt_logprobs_have_vllms_shape(
    make_server: MakeServer, path: str, make_body: Any
) -> None:
    server = make_server()
    request = make_body(prompt_logprobs=1)
    if "prompt" in request:
        request["prompt"] = [5, 6, 7]
    answer = (await server.client.post(path, request)).json()
    holder = answer if "chat" in path else answer["choices"][0]
    prompt = server.fake.calls[0].prompt
    assert len(holder["prompt_logprobs"]) == len(prompt)
    assert holder["prompt_logprobs"][0] is None
    entry = holder["prompt_logprobs"][1][str(prompt[1])]
    assert (entry["logprob"], entry["rank"]) == (fake_logprob(prompt[1]), 1)
    assert entry["decoded_token"]


async def test_tokens_may_be_named_by_their_ids(make_server: MakeServer) -> None:
    server = make_server(lambda *_: [9, EOS])
    request = body(logprobs=0, return_tokens_as_token_ids=True)
    answer = (await server.client.post("/v1/completions", request)).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:9", f"token_id:{EOS}"]


async def test_tokens_behind_a_stop_string_have_no_logprobs(make_server: MakeServer) -> None:
    server = make_server(tokens_per_delta=1000)
    request = body(logprobs=0, stop="small", return_token_ids=True)
    choice = (await server.client.post("/v1/completions", request)).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"])


async def test_every_parameter_reaches_the_engine(make_server: MakeServer) -> None:
    server = make_server()
    await server.client.post(
        "/v1/completions",
        body(
            seed=1,
            temperature=0,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            repetition_penalty=1.2,
            logit_bias={"7": -5, "8": 1.5},
            allowed_token_ids=[7, 8],
            bad_words=["Hello"],
            min_tokens=3,
        ),
    )
    [call] = server.fake.calls
    encode = server.tokenizer.encode
    words = [tuple(encode(w, add_special_tokens=False)) for w in ("Hello", " Hello")]
    assert call.sampling == SamplingParams(
        seed=1,
        max_tokens=100,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.2,
        logit_bias=((7, -5.0), (8, 1.5)),
        allowed_token_ids=(7, 8),
        bad_words=tuple(words),
        min_tokens=3,
    )


async def test_the_models_defaults_are_used_and_shown(make_server: MakeServer) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20)
    server = make_server(defaults=defaults)
    await server.client.post("/v1/completions", body())
    await server.client.post("/v1/completions", body(temperature=0, top_k=-1))
    first, second = (call.sampling for call in server.fake.calls)
    assert (first.temperature, first.top_p, first.top_k) == (0.6, 0.9, 20)
    assert (second.temperature, second.top_p, second.top_k) == (0.0, 0.9, 0)
    [model] = (await server.client.get("/v1/models")).json()["data"]
    assert model["default_sampling_params"] == defaults.as_json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_may_be_part_of_the_text(make_server: MakeServer, stream: bool) -> None:
    request = body(stop="small tok", include_stop_str_in_output=True, stream=stream)
    answer = await make_server().client.post("/v1/completions", request)
    events = answer.events() if stream else [answer.json()]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == TEXT[: TEXT.index("small tok") + len("small tok")]


async def test_a_stop_string_counts_behind_min_tokens_only(make_server: MakeServer) -> None:
    request = body(stop="l", min_tokens=8)
    text = (await make_server().client.post("/v1/completions", request)).json()["choices"][0]
    assert text["text"].startswith("Hello world,")


async def test_long_prompts_are_cut_where_the_request_says_so(make_server: MakeServer) -> None:
    server = make_server()
    ids = list(range(5, 25))
    for fields in ({}, {"truncation_side": "right"}):
        request = body(prompt=ids, truncate_prompt_tokens=4, **fields)
        assert (await server.client.post("/v1/completions", request)).status == 200
    long = body(prompt="a b c d " * 200, truncate_prompt_tokens=-1, max_tokens=1)
    assert (await server.client.post("/v1/completions", long)).status == 200
    prompts = [call.prompt for call in server.fake.calls]
    assert prompts[:2] == [tuple(ids[-4:]), tuple(ids[:4])]
    assert len(prompts[2]) == 199


async def test_the_last_message_may_be_continued(make_server: MakeServer) -> None:
    server = make_server()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello wor"}]
    for fields, end in (
        ({"continue_final_message": True}, "assistant\nHello wor"),
        ({"add_generation_prompt": False}, "Hello wor<|im_end|>\n"),
        ({}, "<|im_start|>assistant\n"),
    ):
        answer = await server.client.post(
            "/v1/chat/completions/render", chat_body(messages=messages, **fields)
        )
        rendered = answer.json()
        assert rendered["prompt"].endswith(end)
        assert rendered["token_ids"] == server.tokenizer.encode(
            rendered["prompt"], add_special_tokens=False
        )
    assert server.fake.calls == []
