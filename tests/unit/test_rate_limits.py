"""Requests and tokens per minute of each key: the buckets, and what clients see of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.auth import hash_key
from app.rate_limits import RateLimit, RateLimiter, RateLimits, duration, estimate_tokens
from app.shared_state import SharedState, SharedStateConfig
from replicas.errors import EngineNotReady
from tests.asgi_client import Answer
from tests.chat_server import QWEN, Server

LIMITS = RateLimits(
    default=RateLimit(requests_per_minute=60),
    keys={"team": RateLimit(requests_per_minute=3, tokens_per_minute=600)},
)


def test_a_bucket_refills_evenly_and_tells_how_long_to_wait() -> None:
    limiter = RateLimiter(LIMITS)
    granted = [limiter.acquire("team", 10, 100.0) for _ in range(4)]
    assert [allowance.is_granted for allowance in granted] == [True, True, True, False]
    assert granted[3].retry_after_s == pytest.approx(20)
    assert granted[2].headers() == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "570",
        "x-ratelimit-reset-tokens": "3s",
    }
    assert not limiter.acquire("team", 10, 119.9).is_granted
    assert limiter.acquire("team", 10, 120.1).is_granted
    assert limiter.acquire("somebody else", 10, 120.1).is_granted


def test_what_was_not_used_is_given_back_and_what_was_not_foreseen_is_owed() -> None:
    limiter = RateLimiter(LIMITS)
    assert limiter.acquire("team", 600, 0.0).is_granted
    assert not limiter.acquire("team", 1, 0.0).is_granted
    limiter.settle("team", -500, 0.0)
    assert limiter.acquire("team", 100, 0.0).is_granted
    limiter.settle("team", 1000, 0.0)  # 600 under zero: a minute, and one for the next request
    refused = limiter.acquire("team", 10, 0.0)
    assert refused.retry_after_s == pytest.approx(61)
    assert refused.tokens is not None
    assert refused.tokens.remaining == 0
    assert limiter.acquire("team", 10, 61.1).is_granted


def test_more_than_a_minutes_tokens_pass_when_nothing_was_used() -> None:
    limiter = RateLimiter(LIMITS)
    assert limiter.acquire("team", 6000, 0.0).is_granted
    assert limiter.acquire("team", 1, 1.0).retry_after_s == pytest.approx(539.1)


@pytest.mark.parametrize("num_requests", [1, 7, 50])
def test_no_way_of_asking_gets_more_than_the_limit(num_requests: int) -> None:
    limiter, passed, seconds = RateLimiter(LIMITS), 0, 600
    for tick in range(seconds):
        for _ in range(num_requests):
            passed += limiter.acquire("team", 1, float(tick)).is_granted
    assert passed <= 3 * (1 + seconds / 60)
    assert passed >= 3 * seconds / 60


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (7.66, "7.66s"), (179, "2m59s"), (360, "6m0s")],
)
def test_times_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_request_is_estimated_from_its_bytes_and_what_it_asks_for() -> None:
    assert estimate_tokens({"max_tokens": 50, "n": 2}, 400) == 200
    assert estimate_tokens({"max_output_tokens": 50}, 0) == 50
    assert estimate_tokens({"max_tokens": "many", "n": -1}, 40) == 10


class Away(SharedState):
    """Cannot be reached."""

    async def acquire(self, name: str, num_tokens: int) -> Any:
        raise EngineNotReady("away")


KEYS = {hash_key(b"a"): "team", hash_key(b"b"): "team", hash_key(b"c"): "other"}
MakeServer = Callable[..., Server]


@pytest.fixture
def make_server(tmp_path: Path) -> MakeServer:
    def make(shared: SharedState, limits: RateLimits = LIMITS, **options: Any) -> Server:
        return Server(
            tmp_path,
            QWEN,
            "Hello world",
            shared=shared,
            key_hashes=frozenset(KEYS),
            key_names=KEYS,
            limits=limits,
            **options,
        )

    return make


async def ask(server: Server, key: str = "a", **fields: Any) -> Answer:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, **fields}
    headers = {"authorization": f"Bearer {key}"}
    return await server.client.post("/v1/chat/completions", body, headers)


async def test_ingress_replicas_share_one_limit_and_keys_of_one_name_too(
    make_server: MakeServer,
) -> None:
    shared = SharedState(SharedStateConfig(limits=LIMITS))
    servers = [make_server(shared) for _ in range(3)]
    answers = [await ask(servers[i % 3], "ab"[i % 2]) for i in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == list("21000")
    assert answers[0].headers["x-ratelimit-limit-tokens"] == "600"
    error = answers[3].error
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 15 <= int(answers[3].headers["retry-after"]) <= 20
    assert len(servers[0].fake.calls) + len(servers[1].fake.calls) == 2
    assert (await ask(servers[0], "c")).headers["x-ratelimit-limit-requests"] == "60"


async def test_streams_and_other_endpoints_count_and_tell(make_server: MakeServer) -> None:
    server = make_server(SharedState(SharedStateConfig(limits=LIMITS)))
    stream = await ask(server, stream=True)
    assert stream.headers["x-ratelimit-remaining-requests"] == "2"
    headers = {"authorization": "Bearer a"}
    message = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    answer = await server.client.post("/v1/messages", message, {"x-api-key": "b"})
    assert answer.headers["x-ratelimit-remaining-requests"] == "1"
    answer = await server.client.post("/v1/responses", {"input": "Hi"}, headers)
    assert answer.headers["x-ratelimit-remaining-requests"] == "0"
    answer = await server.client.post("/tokenize", {"prompt": "Hi"}, headers)
    assert answer.status == 429
    refused = await server.client.post("/v1/messages", message, {"x-api-key": "b"})
    assert (refused.status, refused.json()["error"]["type"]) == (429, "rate_limit_error")


async def test_tokens_are_settled_when_a_request_has_ended(make_server: MakeServer) -> None:
    shared = SharedState(SharedStateConfig(limits=LIMITS))
    server = make_server(shared)
    answer = await ask(server, max_tokens=300)
    reserved = 600 - int(answer.headers["x-ratelimit-remaining-tokens"])
    assert reserved >= 300
    used = answer.json()["usage"]["total_tokens"]
    await server.edge.close()
    quota = (await shared.acquire("team", 0)).tokens
    assert quota is not None
    assert 600 - used <= quota.remaining <= 600 - used + 2


async def test_without_its_shared_state_an_ingress_answers_without_limits(
    make_server: MakeServer,
) -> None:
    server = make_server(Away())
    answers = [await ask(server) for _ in range(5)]
    assert [answer.status for answer in answers] == [200] * 5


async def test_every_request_leaves_one_line_without_its_text(
    make_server: MakeServer, tmp_path: Path
) -> None:
    from app.audit import AuditConfig

    file = tmp_path / "audit.jsonl"
    shared = SharedState(SharedStateConfig(limits=LIMITS))
    server = make_server(shared, audit=AuditConfig(file=str(file)))
    secret = "my secret question"
    await ask(server, messages=[{"role": "user", "content": secret}])
    await ask(server, max_tokens=0)
    server.fake.gate.clear()
    body = json.dumps({"input": secret, "stream": True}).encode()
    await server.client.request(
        "POST",
        "/v1/responses",
        [body],
        {"authorization": "Bearer b"},
        before_leaving=lambda: server.fake.wait_running(1),
    )
    server.fake.gate.set()
    await ask(server)
    begun = await server.client.post(
        "/v1/responses", {"input": secret, "background": True}, {"authorization": "Bearer c"}
    )
    await server.edge.close()
    text = file.read_text()
    assert "secret" not in text
    assert "Hello" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    assert [(line["key"], line["status"], line["outcome"]) for line in lines] == [
        ("team", 200, "ok"),
        ("team", 400, "refused"),
        ("team", 499, "client_left"),
        ("team", 429, "refused"),
        ("other", 200, "ok"),
    ]
    first, bad, left, limited, background = lines
    assert first["endpoint"] == "/v1/chat/completions"
    assert first["model"] == "tiny"
    assert first["prompt_tokens"] == len(server.fake.calls[0].prompt)
    assert first["output_tokens"] == len(server.output)
    assert first["finish_reasons"] == ["stop"]
    assert 0 <= first["first_token_s"] <= first["duration_s"]
    assert first["request_id"]
    assert (bad["error"], limited["error"]) == ("invalid_value", "rate_limit_exceeded")
    assert left["output_tokens"] == 0
    assert background["response_id"] == begun.json()["id"]
    assert background["output_tokens"] == len(server.output)


async def test_texts_are_noted_where_the_settings_say_so(
    make_server: MakeServer, tmp_path: Path
) -> None:
    from app.audit import AuditConfig

    file = tmp_path / "audit.jsonl"
    server = make_server(
        SharedState(), limits=RateLimits(), audit=AuditConfig(file=str(file), include_text=True)
    )
    await ask(server)
    await ask(server, stream=True)
    await server.edge.close()
    for line in map(json.loads, file.read_text().splitlines()):
        assert line["request"]["messages"] == [{"role": "user", "content": "Hi"}]
        assert line["output"] == ["Hello world"]
    assert file.stat().st_mode & 0o077 == 0


def forbid(word: str) -> Callable[[str, str], str | None]:
    def check(text: str, stage: str) -> str | None:
        return f"{word} in {stage}" if word in text else None

    return check


@pytest.mark.parametrize("stream", [False, True])
async def test_a_filter_refuses_prompts_and_ends_answers(tmp_path: Path, stream: bool) -> None:
    server = Server(tmp_path, QWEN, "Hello bad world", check=forbid("bad"))
    body = {"messages": [{"role": "user", "content": "A bad one"}], "stream": stream}
    refused = await server.client.post("/v1/chat/completions", body)
    assert (refused.status, refused.error["code"]) == (400, "content_filter")
    assert (refused.error["param"], server.fake.calls) == ("messages", [])
    completion = server.streamed if stream else server.whole
    [choice] = (await completion()).choices
    assert choice.finish_reason == "content_filter"
    content = choice.message.content
    assert content is not None
    assert "Hello bad".startswith(content)
    assert "bad" not in content
    assert server.fake.given_up
    message = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    answer = await server.client.post("/v1/messages", {**message, "stream": stream})
    assert b'"stop_reason":"refusal"' in answer.body
    answer = await server.client.post("/v1/responses", {"input": "Hi", "stream": stream})
    assert b'"incomplete_details":{"reason":"content_filter"}' in answer.body
    assert b" bad" not in answer.body
    answer = await server.client.post(
        "/v1/completions", {"prompt": "So bad", "max_tokens": 5, "stream": stream}
    )
    assert answer.error["param"] == "prompt"


async def test_a_filter_may_wait_and_sees_calls_and_reasoning(tmp_path: Path) -> None:
    seen: list[str] = []

    async def check(text: str, stage: str) -> str | None:
        await asyncio.sleep(0)
        if stage == "output":
            seen.append(text)
        return None

    text = '<think>\nhm\n</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    server = Server(tmp_path, QWEN, text, check=check)
    await server.whole()
    assert seen[-1] == "hmSo.f{}"
    assert seen == sorted(seen, key=len)


async def test_a_filter_that_fails_lets_nothing_pass(tmp_path: Path) -> None:
    def check(text: str, stage: str) -> str | None:
        raise RuntimeError("broken")

    server = Server(tmp_path, QWEN, "Hello", check=check)
    with pytest.raises(RuntimeError, match="broken"):
        await server.whole()
    assert not server.fake.calls
