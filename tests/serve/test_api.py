"""The whole service over real Ray and a real engine, driven by OpenAI's and Anthropic's clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import aiohttp
import openai
import pydantic
import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.build import build
from app.tokenizer import Tokenizer

pytestmark = pytest.mark.ray

MODEL_DIR = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct"
KEY = "test-key"
MAX_MODEL_LEN = 1024
PROMPT = "The capital of France is"
# What must read the same before and after any load.
IDLE_GAUGES = (
    "systole_engine_running",
    "systole_engine_waiting",
    "systole_engine_free_pages",
    "systole_engine_pending_prefill_tokens",
    "systole_router_queued_requests",
    "systole_router_inflight_requests",
    "systole_token_sink_entries",
)


@dataclass(frozen=True)
class Service:
    url: str

    def client(self, key: str = KEY) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    async def gauges(self) -> dict[str, float]:
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{self.url}/metrics") as response,
        ):
            text = await response.text()
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples}

    async def until_idle(self, before: dict[str, float]) -> None:
        """Wait until everything that a request holds has been given back."""
        give_up_at = time.monotonic() + 30
        while True:
            gauges = await self.gauges()
            now = {name: gauges[name] for name in IDLE_GAUGES}
            if now == {name: before[name] for name in IDLE_GAUGES}:
                return
            assert time.monotonic() < give_up_at, (now, before)
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    """The service that `--service-url` names, or one of our own."""
    url = request.config.getoption("--service-url")
    service = Service(url or f"http://127.0.0.1:{request.getfixturevalue('serve_port')}/api")
    if url is None:
        request.getfixturevalue("handle")
    asyncio.run(wait_until_ready(service))
    yield service
    gauges = asyncio.run(service.gauges())
    assert gauges["systole_engine_compiles_after_warmup_total"] == 0


@pytest.fixture(scope="module")
def handle(
    serve_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeploymentHandle[Any]]:
    """The application, deployed here."""
    keys_file = tmp_path_factory.mktemp("keys") / "api_keys"
    keys_file.write_text(f"{KEY}\n", encoding="utf-8")
    application = build(
        {
            "model": str(MODEL_DIR),
            "engine": {
                "platform": "cpu",
                "max_num_seqs": 8,
                "max_model_len": MAX_MODEL_LEN,
                "max_num_batched_tokens": 128,
                "max_mixed_tokens": 32,
                "kv_cache_bytes": 1 << 27,
                "program_store": str(MODEL_DIR.parents[1] / ".cache" / "programs"),
            },
            "ingress": {"api_keys_file": str(keys_file), "max_body_bytes": 1 << 20},
        }
    )
    yield serve.run(application, name="api", route_prefix="/api")
    serve.delete("api")


async def wait_until_ready(service: Service) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(300):
            async with session.get(f"{service.url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
    pytest.fail("not ready after 30 s")


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncOpenAI]:
    async with service.client() as client:
        yield client


@pytest.fixture
async def anthropic(service: Service) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(
        base_url=service.url, api_key=KEY, max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL_DIR)


MODEL = MODEL_DIR.name
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


async def test_a_completion_whole_and_streamed(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12)
    [choice] = whole.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    stream = await client.completions.create(
        **GREEDY,
        prompt=PROMPT,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == choice.text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_logprobs_and_penalties_come_through_the_whole_service(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=4, logprobs=2, frequency_penalty=0.5
    )
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 4
    assert all(-9 < value < 0 for value in logprobs.token_logprobs)
    chat = await client.chat.completions.create(
        **GREEDY,
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        stream=True,
    )
    entries = [
        entry
        async for chunk in chat
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or ()
    ]
    assert len(entries) == 4
    assert all(entry.token == entry.top_logprobs[0].token for entry in entries)


async def test_scores_of_the_whole_service(service: Service) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    score = {"prompt": PROMPT, "continuations": [" Paris", " cheese"]}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{service.url}/v1/score", json=score) as response,
    ):
        likely, unlikely = (await response.json())["data"]
    assert likely["logprob"] > unlikely["logprob"] + 3


async def test_anthropics_client_whole_streamed_and_counted(anthropic: AsyncAnthropic) -> None:
    body: Any = {
        "model": MODEL,
        "system": "Answer in one word.",
        "messages": [{"role": "user", "content": "What is the capital of Italy?"}],
    }
    greedy: Any = {"max_tokens": 20, "extra_body": {"temperature": 0}}  # no longer an argument
    whole = await anthropic.messages.create(**body, **greedy)
    [block] = whole.content
    assert block.type == "text"
    assert "Rome" in block.text
    assert whole.stop_reason == "end_turn"
    async with anthropic.messages.stream(**body, **greedy) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == block.text
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = await anthropic.messages.count_tokens(**body)
    cached = whole.usage.cache_read_input_tokens or 0
    assert count.input_tokens == whole.usage.input_tokens + cached


async def test_anthropics_client_sees_errors_as_its_own(anthropic: AsyncAnthropic) -> None:
    body: Any = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    with pytest.raises(NotFoundError):
        await anthropic.messages.create(**body, model="other")
    with pytest.raises(BadRequestError, match="temperature"):
        await anthropic.messages.create(**body, model=MODEL, extra_body={"temperature": 9})


async def test_a_chat_whole_and_streamed(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    messages: Any = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "What is the capital of Italy?"}]},
    ]
    whole = await client.chat.completions.create(**GREEDY, messages=messages, max_tokens=20)
    message = whole.choices[0].message
    assert message.content is not None
    assert "Rome" in message.content
    assert whole.choices[0].finish_reason == "stop"
    stream = await client.chat.completions.create(
        **GREEDY, messages=messages, max_completion_tokens=20, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_text_is_what_the_token_ids_say(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = await client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=64,
        temperature=1.5,
        seed=3,
        extra_body={"return_token_ids": True, "ignore_eos": True, "skip_special_tokens": False},
    )
    choice: Any = answer.choices[0]
    assert len(choice.token_ids) == 64
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=False)
    assert choice.prompt_token_ids == tokenizer.encode(PROMPT, add_special_tokens=True)


async def test_the_four_kinds_of_prompts_agree(client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    texts = [PROMPT, "Once upon a time"]
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    single = [
        (await client.completions.create(**GREEDY, prompt=prompt, max_tokens=8)).choices[0].text
        for prompt in (*texts, *ids)
    ]
    assert single[:2] == single[2:]
    for prompts in (texts, ids):
        batch = await client.completions.create(**GREEDY, prompt=prompts, max_tokens=8)
        assert [choice.text for choice in batch.choices] == single[:2]


async def test_choices_differ_and_repeat_with_the_seed(client: AsyncOpenAI) -> None:
    async def texts(**options: Any) -> list[str]:
        answer = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=10, temperature=1.2, **options
        )
        return [choice.text for choice in answer.choices]

    first = await texts(n=16, seed=42)
    assert len(set(first)) > 8
    assert await texts(n=16, seed=42) == first
    assert await texts(n=1, seed=42) == first[:1]
    assert await texts(n=4, seed=43) != first[:4]


class City(pydantic.BaseModel):
    """What a client wants to know; the model is too small to be right, not to be in form."""

    name: Annotated[str, pydantic.Field(max_length=24)]
    size: Literal["small", "large"]
    population: Annotated[int, pydantic.Field(ge=0, le=99_999_999)]


async def test_answers_have_the_form_that_was_asked_for(client: AsyncOpenAI) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Paris?"}], "max_tokens": 150}
    parsed = await asyncio.gather(
        *(
            client.chat.completions.parse(
                **chat, response_format=City, temperature=1.0, seed=seed, logprobs=seed == 3
            )
            for seed in range(6)
        )
    )
    for answer in parsed:
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, City)
    any_json = await client.chat.completions.create(
        **chat, response_format={"type": "json_object"}, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in any_json])
    assert text.startswith("{")
    lark = 'start: "Pa" /[a-z]{3}/ "!"\n'
    for demand, pattern in (
        ({"structured_outputs": {"regex": "(Paris|Rome){2}"}}, "(Paris|Rome){2}"),
        ({"structured_outputs": {"choice": ["Rome", "Oslo"]}}, "Rome|Oslo"),
        ({"structured_outputs": {"grammar": lark}}, "Pa[a-z]{3}!"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
    ):
        answer = await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=30, temperature=1.0, n=3, extra_body=demand
        )
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert re.fullmatch(pattern, choice.text), choice.text


async def test_bad_forms_are_refused_while_others_are_served(client: AsyncOpenAI) -> None:
    stream = await client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    first = [await anext(stream) for _ in range(5)]
    nested = {"type": "string"}
    for _ in range(70):
        nested = {"type": "array", "items": nested}
    for demand, reason in (
        ({"guided_json": {"type": "strin"}}, "strin"),
        ({"guided_json": nested}, "deeper than 64"),
        ({"guided_regex": "(a{1000}){1000}"}, "too complex"),
        ({"guided_choice": [f"a text of some length {i}" for i in range(10_000)]}, "at most"),
    ):
        with pytest.raises(openai.BadRequestError, match=reason) as refusal:
            await client.completions.create(**GREEDY, prompt=PROMPT, extra_body=demand)
        assert (refusal.value.param or "").split(".")[0] in demand
    rest = [chunk async for chunk in stream]
    assert len(first) + len(rest) > 200  # a chunk may bring several tokens' text
    assert rest[-1].choices[0].finish_reason == "length"


async def test_a_stop_string_across_tokens_ends_the_sequence(
    service: Service, client: AsyncOpenAI
) -> None:
    before = await service.gauges()
    whole = await client.completions.create(**GREEDY, prompt=PROMPT, max_tokens=40)
    text = whole.choices[0].text
    stop = text[7:15]
    stream = await client.completions.create(
        **GREEDY, prompt=PROMPT, max_tokens=40, stop=[stop], stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    await service.until_idle(before)


async def test_a_repeated_prompt_is_found_in_the_prefix_cache(client: AsyncOpenAI) -> None:
    prompt = "A long shared beginning, told many times. " * 8
    answers = [
        await client.completions.create(**GREEDY, prompt=prompt, max_tokens=8) for _ in range(2)
    ]
    assert answers[0].choices == answers[1].choices
    usage = answers[1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert 32 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


async def test_errors_arrive_as_the_clients_own_exceptions(
    service: Service, client: AsyncOpenAI
) -> None:
    async def failing(**options: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as info:
            await client.completions.create(**{**GREEDY, "prompt": PROMPT, **options})
        return info.value

    assert isinstance(await failing(model="other"), openai.NotFoundError)
    assert isinstance(await failing(temperature=1e9), openai.BadRequestError)
    error = await failing(prompt="word " * 9000)
    assert (error.status_code, error.code) == (400, "context_length_exceeded")
    error = await failing(prompt=[1, 10**6])
    assert (error.status_code, error.param) == (400, "prompt")
    error = await failing(best_of=3)
    assert (error.code, error.param) == ("unsupported_parameter", "best_of")
    async with service.client("wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()


@pytest.mark.parametrize("framing", ["Content-Length: 52428800", "Transfer-Encoding: chunked"])
async def test_a_huge_body_is_refused_while_it_is_sent(service: Service, framing: str) -> None:
    # By hand: HTTP clients want to send a whole body before they look at the answer.
    url = urlsplit(service.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    head = f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: test\r\n{framing}\r\n"
    writer.write(f"{head}Authorization: Bearer {KEY}\r\n\r\n".encode())

    async def send() -> None:
        chunk = b" " * (1 << 16)
        for _ in range(800):  # 50 MB
            is_chunked = "chunked" in framing
            writer.write(b"10000\r\n%b\r\n" % chunk if is_chunked else chunk)
            await writer.drain()

    sending = asyncio.create_task(send())
    try:
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
    finally:
        sending.cancel()
        await asyncio.wait((sending,))
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer[answer.index(b"{") :])["error"]["code"] == "payload_too_large"


async def test_models_health_and_version(service: Service, client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    async with aiohttp.ClientSession() as session:
        async with session.get(
            f"{service.url}/health", headers={"X-Request-Id": "my-id"}
        ) as response:
            assert response.status == 200
            assert response.headers.getall("X-Request-Id") == ["my-id"]
        async with session.get(f"{service.url}/version") as response:
            assert response.status == 401


async def test_a_handle_streams_without_http(
    service: Service, handle: DeploymentHandle[Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    handle = handle.options(stream=True)
    items = [item async for item in handle.generate.remote(body)]
    *deltas, last = items
    assert "Paris" in "".join(item["text"] for item in deltas)
    assert sum(len(item["token_ids"]) for item in deltas) == 12
    assert deltas[-1]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 12
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert [item async for item in handle.generate.remote(chat)]
    with pytest.raises(Exception, match="temperature"):
        _ = [item async for item in handle.generate.remote({**body, "temperature": 9})]


async def test_200_requests_of_which_half_disconnect_leave_nothing_behind(
    service: Service,
) -> None:
    before = await service.gauges()
    rng = random.Random(0)
    headers = {"Authorization": f"Bearer {KEY}"}
    outcomes: list[str] = []

    async def one(session: aiohttp.ClientSession, index: int) -> None:
        # Half leave: some in the queue or during prefill, some in mid-stream.
        leaves_after_s = rng.uniform(0, 1.5) if index % 2 else None
        body = {
            "model": MODEL,
            "prompt": " ".join(rng.choices(["river", "stone", "light"], k=rng.randint(4, 300))),
            "max_tokens": rng.randint(4, 24),
            "stream": bool(index % 3),
            "ignore_eos": True,
        }
        try:
            async with asyncio.timeout(leaves_after_s):
                async with session.post(f"{service.url}/v1/completions", json=body) as response:
                    content = await response.read()
                    assert response.status == 200, content
                    if body["stream"]:
                        assert content.endswith(b"data: [DONE]\n\n")
                        assert b'"error"' not in content
                    else:
                        usage = json.loads(content)["usage"]
                        assert usage["completion_tokens"] == body["max_tokens"]
                    outcomes.append("complete")
        except TimeoutError:
            assert leaves_after_s is not None
            outcomes.append("left")

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        semaphore = asyncio.Semaphore(40)

        async def limited(index: int) -> None:
            async with semaphore:
                await one(session, index)

        await asyncio.gather(*map(limited, range(200)))
    assert outcomes.count("complete") >= 100
    assert outcomes.count("left") >= 20
    await service.until_idle(before)
