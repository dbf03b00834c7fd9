"""What users of other servers complain of most, and the tests that hold it off here.

The list is that of the issue trackers of vLLM, SGLang, llama.cpp, TGI, litellm and Ray, in the
order of how much it hurts; a number is an issue or a pull request of theirs. What this server does
not offer (13, 14, 19) has to be refused in words, not half done.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.api_reference import ENDPOINTS, Endpoint
from app.auth import hash_key
from tests.http_server import MakeServer

TESTS = Path(__file__).parents[1]

COMPLAINTS: dict[str, tuple[str, ...]] = {
    "1 streamed tool calls are malformed or crash (vllm 19056, 10395, 21544; sglang 13292)": (
        "test_a_call_and_its_reasoning_are_answered_whole_and_streamed",
        "test_no_text_and_no_chunking_breaks_the_guarantees",
        "test_a_malformed_call_is_content",
    ),
    "2 the serving layer costs more than the engine (ray 59681, 52746)": (
        "test_one_connection_carries_all_requests_of_a_sink",
        "test_what_is_ready_together_is_sent_together",
    ),
    "3 the Responses API is missing or incomplete (vllm 14721; sglang 4793, 17853)": (
        "test_openais_client_creates_retrieves_lists_and_deletes",
        "test_items_of_every_kind_become_the_chat",
        "test_a_stream_adds_up_to_its_last_event_and_to_the_whole",
        "test_responses_are_seen_and_cancelled_at_every_ingress_replica",
    ),
    "4 a client that leaves does not end its request (vllm 9428, 54947; litellm 13774)": (
        "test_200_requests_of_which_half_disconnect_leave_nothing_behind",
        "test_a_grpc_call_is_cancelled_by_another",
    ),
    "5 no times of first and later tokens, engine and framework not told apart (ray 63585)": (
        "test_metrics_count_requests_and_show_engines",
        "test_a_request_makes_one_trace_with_the_right_parents",
    ),
    "6 usage is wrong or missing in streams (vllm 6083, 7179; litellm 8450; llama.cpp 22659)": (
        "test_a_streamed_completion_adds_up_to_the_whole_one",
        "test_a_response_has_openais_shape_and_usage",
        "test_a_streamed_message_adds_up_to_the_whole_one",
    ),
    "7 include_usage changes how tool calls are streamed (litellm 38926)": (
        "test_a_call_and_its_reasoning_are_answered_whole_and_streamed",
    ),
    "8 reasoning has two names (litellm 20246, 26501; vllm 42664)": (
        "test_a_received_assistant_message_may_be_passed_back",
    ),
    "9 null or spelt-out defaults crash (sglang 4589; n8n 24492)": (
        "test_values_that_change_nothing_are_accepted",
        "test_defaults_that_clients_spell_out_are_accepted",
    ),
    "10 the start is slow and says nothing (vllm 19824, 43189)": (
        "test_a_starting_replica_shows_its_progress",
        "test_progress_is_shown_in_words",
    ),
    "11 compiled programs are not used again (tpu-inference 606)": (
        "test_a_second_start_neither_lowers_nor_compiles",
        "test_a_second_start_takes_its_programs_from_the_store",
    ),
    "12 healthy before it is warm (vllm 30700)": ("test_ready_follows_the_replicas",),
    "13 many models behind one address (llama.cpp 13027): one a server here": (
        "test_another_model_is_not_found",
    ),
    "14 batches and files (vllm 4777): not offered": (
        "test_unknown_paths_and_methods_have_openais_shape",
    ),
    "15 Anthropic's Messages, with tools (ray 65486; ai-gateway 1360)": (
        "test_calls_and_thinking_whole_and_streamed",
        "test_a_conversation_with_results_becomes_the_prompt",
    ),
    "16 errors of the context's length are wrong or unclear (vllm 33418, 20409)": (
        "test_a_prompt_over_the_context_is_refused",
        "test_a_chat_over_the_context_is_refused",
    ),
    "17 API keys: several, on all routes (vllm 9698, 18892)": (
        "test_any_of_several_keys_is_accepted",
        "test_every_path_but_the_probes_asks_for_a_key",
    ),
    "18 the same seed gives another text under load (vllm 23138, 24067)": (
        "test_any_traffic_gives_the_models_tokens",
        "test_a_row_does_not_depend_on_its_neighbours",
    ),
    "19 adapters (llama.cpp 7635): not offered": ("test_another_model_is_not_found",),
    "20 limits of each user, and scaling that knows LLMs (ray-llm 133; aibrix 859)": (
        "test_ingress_replicas_do_not_multiply_a_limit",
        "test_tenants_that_wait_take_turns",
        "test_scaling_down_breaks_no_stream",
    ),
    "absent `refusal`, and `text: {}` without a format (lmstudio 1576)": (
        "test_a_chat_completion_has_openais_schema",
        "test_defaults_that_clients_spell_out_are_accepted",
    ),
}


def test_every_complaint_has_its_tests() -> None:
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        found |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE))
    named = {name for names in COMPLAINTS.values() for name in names}
    assert named <= found, named - found


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: f"{e.method} {e.path}")
async def test_every_path_but_the_probes_asks_for_a_key(
    make_server: MakeServer, endpoint: Endpoint
) -> None:
    keys = frozenset({hash_key(b"secret")})
    client = make_server(config={"key_hashes": keys, "admin_key_hashes": keys}).client
    path = re.sub(r"{\w+}", "x", endpoint.path)
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
        answer = await client.request(endpoint.method, path, [b"{}"], headers)
        assert (answer.status == 401) is (endpoint.key != "none")
