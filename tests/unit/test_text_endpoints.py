"""Tokenize, detokenize and score over HTTP."""

from __future__ import annotations

import pytest

from app.auth import hash_key
from tests.fake_client import fake_logprob
from tests.http_server import MODEL, MakeServer, chat_body


async def test_text_and_tokens_are_turned_into_each_other(make_server: MakeServer) -> None:
    server = make_server()
    text = "Hello world, 火星🚀"
    answer = await server.client.post("/tokenize", {"prompt": text, "return_token_strs": True})
    tokens = answer.json()
    assert tokens["tokens"] == server.tokenizer.encode(text, add_special_tokens=True)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 200)
    assert len(tokens["token_strs"]) == tokens["count"]
    back = await server.client.post("/detokenize", {"model": MODEL, "tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_chat_is_tokenized_as_it_would_be_answered(make_server: MakeServer) -> None:
    server = make_server()
    tokens = (await server.client.post("/tokenize", chat_body())).json()
    await server.client.post("/v1/chat/completions", chat_body())
    assert tuple(tokens["tokens"]) == server.fake.calls[0].prompt


async def test_continuations_are_scored_behind_a_shared_prompt(make_server: MakeServer) -> None:
    server = make_server()
    request = {"model": MODEL, "prompt": [5, 6], "continuations": [[7, 8, 9], "Hello"]}
    answer = (await server.client.post("/v1/score", request)).json()
    first, second = answer["data"]
    expected = [fake_logprob(i) for i in (7, 8, 9)]
    assert (first["index"], first["num_tokens"], first["is_greedy"]) == (0, 3, True)
    assert (first["token_logprobs"], first["logprob"]) == (expected, sum(expected))
    assert second["token_ids"] == server.tokenizer.encode("Hello", add_special_tokens=False)
    assert {call.sampling.prompt_logprobs_start for call in server.fake.calls} == {2}
    assert all(call.prompt[:2] == (5, 6) for call in server.fake.calls)
    assert answer["usage"]["prompt_tokens"] == 2 + 3 + second["num_tokens"]
    assert not server.fake.running


@pytest.mark.parametrize(
    ("path", "request_body", "code", "param"),
    [
        ("/tokenize", {}, "missing_required_parameter", "prompt"),
        ("/tokenize", {"prompt": 5}, "invalid_value", "prompt"),
        ("/tokenize", {"prompt": "a", "colour": 1}, "unknown_parameter", "colour"),
        ("/tokenize", {"prompt": "a b " * 500}, "context_length_exceeded", None),
        ("/detokenize", {"tokens": [500]}, "invalid_value", "prompt"),
        ("/detokenize", {"tokens": ["a"]}, "invalid_value", "tokens"),
        ("/v1/score", {"prompt": "a", "continuations": []}, "invalid_value", "continuations"),
        ("/v1/score", {"prompt": "", "continuations": ["a"]}, "invalid_value", "prompt"),
        ("/v1/score", {"prompt": "a", "continuations": [[]]}, "invalid_value", "continuations"),
        ("/v1/chat/completions/render", {"messages": []}, "invalid_value", "messages"),
    ],
)
async def test_bad_bodies_are_refused(
    make_server: MakeServer, path: str, request_body: dict, code: str, param: str | None
) -> None:
    answer = await make_server().client.post(path, request_body)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, code, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/score"])
async def test_another_model_is_not_found(make_server: MakeServer, path: str) -> None:
    bodies = {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [5]},
        "/v1/score": {"prompt": "a", "continuations": ["b"]},
    }
    answer = await make_server().client.post(path, {**bodies[path], "model": "other"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")


async def test_admins_have_keys_of_their_own(make_server: MakeServer) -> None:
    path = "/admin/reset_prefix_cache"
    keys = {"key_hashes": frozenset({hash_key(b"user")})}
    closed = make_server(config=keys)
    server = make_server(config={**keys, "admin_key_hashes": frozenset({hash_key(b"admin")})})
    for client, key in ((closed.client, "user"), (closed.client, ""), (server.client, "user")):
        answer = await client.post(path, {}, {"authorization": f"Bearer {key}"})
        assert answer.status == 401
    assert (await make_server().client.post(path, {})).status == 401, "closed without keys too"
    answer = await server.client.post(path, {}, {"authorization": "Bearer admin"})
    assert (answer.json(), server.fake.num_cache_drops) == ({"num_replicas": 1}, 1)
    refused = await server.client.get("/v1/models", {"authorization": "Bearer admin"})
    assert refused.status == 401


async def test_admins_have_replicas_profiled(make_server: MakeServer) -> None:
    server = make_server(config={"admin_key_hashes": frozenset({hash_key(b"admin")})})
    headers = {"authorization": "Bearer admin"}
    answer = await server.client.post("/admin/profile?steps=5&max_s=2", {}, headers)
    assert answer.json() == {
        "profiles": [
            {"replica_id": "r", "directory": "/traces/2", "num_steps": 5},
            {"error": "starting"},
        ]
    }
    for query in ("steps=0", "steps=1001", "steps=x", "max_s=0", "max_s=61"):
        answer = await server.client.post(f"/admin/profile?{query}", {}, headers)
        assert (answer.status, answer.error["param"]) == (400, "steps")
    assert (await server.client.post("/admin/profile", {})).status == 401


async def test_an_operator_drains_and_resumes(make_server: MakeServer) -> None:
    server = make_server(config={"admin_key_hashes": frozenset({hash_key(b"admin")})})
    admin = {"authorization": "Bearer admin"}
    for path in ("/admin/drain", "/admin/resume"):
        assert (await server.client.post(path, b"")).status == 401
    drained = await server.client.post("/admin/drain", {"replica": "replica-1"}, admin)
    assert drained.json() == {
        "ready": False,
        "draining": False,
        "num_queued_requests": 0,
        "num_running_requests": 0,
        "replicas": {"replica-1": {"drained": True, "num_running_requests": 0}},
    }
    ready = await server.client.get("/ready")
    assert (ready.status, ready.json()["stage"]) == (503, "draining")
    resumed = await server.client.post("/admin/resume", {"replica": "replica-1"}, admin)
    assert resumed.json()["ready"] is True
    assert (await server.client.post("/admin/drain", b"", admin)).json()["draining"] is True
    assert (await server.client.get("/ready")).status == 503
    assert (await server.client.post("/admin/resume", b"", admin)).json()["draining"] is False
    assert (await server.client.get("/ready")).status == 200
    unknown = await server.client.post("/admin/drain", {"replica": "x"}, admin)
    assert (unknown.status, unknown.error["code"]) == (404, "replica_not_found")
    assert "replica-1" in unknown.error["message"]
    wrong = await server.client.post("/admin/drain", {"node": "x"}, admin)
    assert (wrong.status, wrong.error["param"]) == (400, "node")
