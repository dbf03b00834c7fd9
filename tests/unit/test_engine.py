"""The engine over a fake device: batching, chunks, caching and preemption change no token."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.engine.scheduler import ScheduledSequence
from replicas.errors import ContextLengthExceeded, InvalidRequest
from replicas.page_keys import hash_prompt, hash_root
from replicas.wire import FinishReason, TokenDelta
from tests.fake_runner import (
    Deltas,
    make_engine,
    make_request,
    naive_tokens,
    output,
    run,
    step,
)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(1000) for _ in range(length)]


def until(stop_ids: tuple[int, ...], tokens: list[int]) -> list[int]:
    """Tokens up to the first that ends them."""
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: end + 1]


def test_one_request_gives_the_models_tokens():
    engine, _ = make_engine()
    engine.add(make_request("a", prompt(5), max_tokens=20))
    deltas = run(engine)["a"]
    assert output(deltas) == naive_tokens(prompt(5), 20)
    assert deltas[-1].result.finish_reason is FinishReason.LENGTH
    assert engine.load().num_free_pages == engine.load().num_pages


def test_sequences_stay_in_the_pages_of_their_device_and_are_preempted_there():
    """Two devices with 7 pages of 8 tokens each; 6 sequences that grow to 40 tokens."""
    engine, _ = make_engine(num_pages=16, num_page_groups=2, max_num_seqs=6)
    prompts = {f"r{i}": prompt(12, seed=i) for i in range(6)}
    for name, tokens in prompts.items():
        engine.add(make_request(name, tokens, max_tokens=28))
    deltas: Deltas = {}
    seen: set[int] = set()
    while engine.has_work:
        step(engine, deltas)
        for sequence in engine.scheduler.running:
            groups = {page // 8 for page in sequence.page_ids}
            assert len(groups) == 1
            seen |= groups
    assert seen == {0, 1}
    assert engine.scheduler.num_preemptions > 0
    for name, tokens in prompts.items():
        assert output(deltas[name]) == naive_tokens(tokens, 28)
    assert engine.load().num_free_pages == engine.load().num_pages == 14


def test_a_request_that_no_device_has_pages_for_is_refused():
    engine, _ = make_engine(num_pages=16, num_page_groups=2)
    with pytest.raises(ContextLengthExceeded):
        engine.validate(make_request("a", prompt(60)))


def test_next_step_is_launched_before_the_previous_is_fetched():
    engine, runner = make_engine()
    engine.add(make_request("a", prompt(5), max_tokens=4))
    assert engine.step().deltas == ()
    engine.step()
    assert len(runner.plans) == 2, "step 2 was launched although step 1 had not been fetched before"


def test_rows_and_deltas_have_all_their_fields():
    """Those of most steps are made without their constructors."""
    engine, runner = make_engine()
    engine.add(make_request("a", prompt(5), max_tokens=9))
    deltas = run(engine)["a"]
    assert {len(delta) for delta in deltas} == {len(TokenDelta._fields)}
    rows = [row for plan in runner.plans for row in plan.scheduled]
    assert {len(row) for row in rows} == {len(ScheduledSequence._fields)}


def test_a_plan_names_those_that_got_a_slot_for_it():
    engine, runner = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(make_request(name, prompt(5), max_tokens=3))
    run(engine)
    admitted = [[s.request.request_id for s in plan.admitted] for plan in runner.plans]
    assert [names for names in admitted if names] == [["a", "b"], ["c"]]
    assert sum(map(len, admitted)) == 3


def test_long_prompt_is_computed_in_chunks():
    engine, runner = make_engine(max_num_batched_tokens=32)
    engine.add(make_request("a", prompt(100), max_tokens=3))
    assert output(run(engine)["a"]) == naive_tokens(prompt(100), 3)
    assert [plan.num_tokens for plan in runner.plans[:4]] == [32, 32, 32, 4]


def test_chunks_beside_decodes_are_bounded():
    engine, runner = make_engine(
        max_num_batched_tokens=32, max_mixed_tokens=16, break_even_context=10**9
    )
    engine.add(make_request("a", prompt(4), max_tokens=40))
    engine.step()
    engine.add(make_request("b", prompt(100, seed=1), max_tokens=3))
    run(engine)
    mixed = [p.num_tokens for p in runner.plans[1:] if any(r.num_tokens == 1 for r in p.scheduled)]
    assert max(mixed) == 16


@pytest.mark.parametrize(("num_prompts", "most"), [(1, 1 + 16), (2, 1 + 32), (3, 1 + 48), (9, 64)])
def test_more_prompts_take_more_of_a_step_with_decode_rows(num_prompts, most):
    engine, runner = make_engine(
        num_pages=256, max_num_batched_tokens=64, max_mixed_tokens=64, break_even_context=10**9
    )
    engine.add(make_request("a", prompt(4), max_tokens=40))
    engine.step()
    for index in range(num_prompts):
        engine.add(make_request(f"b{index}", prompt(150, seed=index + 1), max_tokens=2))
    engine.step()
    assert runner.plans[-1].num_tokens == most


def test_chunks_beside_decodes_shrink_with_the_context():
    engine, runner = make_engine(
        num_pages=128, max_num_batched_tokens=64, max_mixed_tokens=33, break_even_context=100
    )
    engine.add(make_request("a", prompt(4), max_tokens=60))
    engine.step()
    engine.add(make_request("b", prompt(600, seed=1), max_tokens=2))
    assert output(run(engine)["b"]) == naive_tokens(prompt(600, seed=1), 2)
    chunks = [
        (part.start, part.num_tokens)
        for plan in runner.plans
        for part in plan.scheduled
        if part.sequence.request.request_id == "b" and len(plan.scheduled) == 2
    ]
    for start, count in chunks[:-2]:
        cost = sum(1 + position / 100 for position in range(start, start + count))
        one_more = 1 + (start + count) / 100
        assert cost <= 16 + one_more / 2 or count == 8
    counts = [count for _, count in chunks[:-2]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 12
    assert counts[-1] == 8


def test_second_request_reuses_the_prefix():
    engine, _ = make_engine(page_size=8)
    engine.add(make_request("a", prompt(40), max_tokens=4))
    run(engine)
    engine.add(make_request("b", prompt(40), max_tokens=4))
    deltas = run(engine)["b"]
    assert output(deltas) == naive_tokens(prompt(40), 4)
    assert deltas[-1].result.num_cached_tokens == 32, "the last token is always computed"


def test_output_pages_are_reused_by_a_follow_up():
    engine, _ = make_engine(page_size=8)
    engine.add(make_request("a", prompt(16), max_tokens=17))
    first = output(run(engine)["a"])
    engine.add(make_request("b", prompt(16) + first + [7], max_tokens=2))
    assert run(engine)["b"][-1].result.num_cached_tokens == 32


def test_salts_do_not_share_pages():
    engine, _ = make_engine()
    engine.add(make_request("a", prompt(40), cache_salt="x"))
    run(engine)
    engine.add(make_request("b", prompt(40), cache_salt="y"))
    assert run(engine)["b"][-1].result.num_cached_tokens == 0


def test_pages_are_reported_under_the_keys_that_the_router_computes():
    engine, _ = make_engine(page_size=8)
    engine.add(make_request("a", prompt(41), max_tokens=1))
    stored: set[bytes] = set()
    while engine.has_work:
        cache = engine.step().cache
        stored = (stored | set(cache.stored)) - set(cache.dropped)
    root = hash_root(engine.model_info.fingerprint, "")
    keys = hash_prompt(root, prompt(41), page_size=8)
    assert len(keys) == 5
    assert set(keys) <= stored


def test_the_routers_keys_are_taken_over_and_wrong_ones_are_not():
    for root, num_cached in ((None, 40), ("another model", 40)):
        engine, _ = make_engine(page_size=8)
        fingerprint = engine.model_info.fingerprint if root is None else root
        keys = hash_prompt(hash_root(fingerprint, ""), prompt(41), page_size=8)
        given = dataclasses.replace(make_request("a", prompt(41), max_tokens=2), page_keys=keys)
        engine.add(given)
        assert output(run(engine)["a"]) == naive_tokens(prompt(41), 2)
        engine.add(make_request("b", prompt(41), max_tokens=2))
        assert run(engine)["b"][-1].result.num_cached_tokens == num_cached


def test_the_load_counts_a_steps_work_when_it_has_its_time():
    """Counted at the launch, each step's time would be fitted to the next one's work."""
    engine, _ = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("a", prompt(100), max_tokens=5))
    computed = [engine.step().load.num_computed_tokens for _ in range(4)]
    assert computed == [0, 64, 100, 101]


def test_the_load_tells_what_the_steps_computed():
    engine, runner = make_engine(max_num_batched_tokens=32)
    engine.add(make_request("a", prompt(100), max_tokens=5))
    run(engine)
    load = engine.load()
    assert load.num_steps == len(runner.plans)
    assert load.num_computed_tokens == 100 + 4
    assert load.num_prefill_tokens == 100
    assert load.num_prefill_pairs == 100 * 100 // 2
    assert load.num_context_tokens == 100 + 101 + 102 + 103
    assert load.busy_s > 0
    engine.add(make_request("b", prompt(50), max_tokens=5))
    assert (engine.load().num_waiting_tokens, engine.load().num_pending_pairs) == (50, 1250)
    engine.abort("b")
    assert engine.load().num_waiting_tokens == 0


def test_preempted_sequences_give_the_same_tokens():
    engine, _ = make_engine(num_pages=9, page_size=8, max_num_seqs=4)
    for i in range(4):
        engine.add(make_request(str(i), prompt(9, seed=i), max_tokens=40))
    deltas = run(engine)
    assert engine.load().num_preemptions > 0
    for i in range(4):
        assert output(deltas[str(i)]) == naive_tokens(prompt(9, seed=i), 40)
    assert engine.load().num_free_pages == 8


def test_stop_token_ends_and_overrun_is_dropped():
    tokens = naive_tokens(prompt(5), 10)
    engine, _ = make_engine(eos_token_ids=(tokens[3],))
    engine.add(make_request("a", prompt(5), max_tokens=10))
    engine.add(make_request("b", prompt(5), max_tokens=10, ignore_eos=True))
    engine.add(make_request("c", prompt(5), max_tokens=10, stop_token_ids=(tokens[1],)))
    deltas = run(engine)
    assert output(deltas["a"]) == tokens[:4]
    assert deltas["a"][-1].result.finish_reason is FinishReason.STOP
    assert output(deltas["b"]) == tokens
    assert output(deltas["c"]) == tokens[:2]


def test_priority_goes_first():
    engine, runner = make_engine(max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -5), ("mid", 0)):
        engine.add(make_request(name, prompt(4), max_tokens=2, priority=priority))
    run(engine)
    order = [p.scheduled[0].sequence.request.request_id for p in runner.plans]
    assert list(dict.fromkeys(order)) == ["high", "mid", "low"]


def test_abort_while_waiting_prefilling_and_decoding_frees_everything():
    engine, _ = make_engine(max_num_seqs=2)
    engine.add(make_request("decoding", prompt(4), max_tokens=50))
    deltas = {}
    for _ in range(4):
        step(engine, deltas)
    engine.add(make_request("prefilling", prompt(100, seed=2), max_tokens=50))
    step(engine, deltas)
    engine.add(make_request("waiting", prompt(4, seed=3), max_tokens=50))
    for name in ("decoding", "prefilling", "waiting", "unknown"):
        engine.abort(name)
    run(engine, deltas)
    assert {n: d[-1].result.finish_reason for n, d in deltas.items()} == dict.fromkeys(
        ("decoding", "prefilling", "waiting"), FinishReason.ABORT
    )
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_free_pages) == (0, 0, load.num_pages)


def test_migrated_request_numbers_its_tokens_from_the_offset():
    engine, _ = make_engine()
    tokens = naive_tokens(prompt(5), 10)
    engine.add(make_request("a", prompt(5) + tokens[:4], max_tokens=6, output_offset=4))
    deltas = run(engine)["a"]
    assert deltas[0].start_index == 4
    assert output(deltas) == tokens[4:]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt": []}, InvalidRequest),
        ({"prompt": [1000]}, InvalidRequest),
        ({"prompt": [-1]}, InvalidRequest),
        ({"prompt": [1], "max_tokens": 0}, InvalidRequest),
        ({"prompt": [1], "temperature": float("nan")}, InvalidRequest),
        ({"prompt": [1], "temperature": -1.0}, InvalidRequest),
        ({"prompt": [1], "top_p": 0.0}, InvalidRequest),
        ({"prompt": [1], "top_k": -2}, InvalidRequest),
        ({"prompt": [1] * 5000}, ContextLengthExceeded),
        ({"prompt": [1] * 500, "max_tokens": 5}, ContextLengthExceeded),
    ],
)
def test_what_could_never_run_is_refused(fields, error):
    engine, _ = make_engine(num_pages=64, page_size=8)
    with pytest.raises(error):
        engine.validate(make_request("a", **fields))


def test_the_largest_request_that_fits_runs():
    engine, _ = make_engine(num_pages=9, page_size=8)
    request = make_request("a", prompt(60), max_tokens=4)
    engine.validate(request)
    engine.add(request)
    assert output(run(engine)["a"]) == naive_tokens(prompt(60), 4)


def test_accepted_drafts_come_as_deltas_of_several_tokens():
    engine, runner = make_engine(max_drafts=7)
    engine.add(make_request("a", prompt(5), max_tokens=60))
    deltas = run(engine)["a"]
    assert output(deltas) == naive_tokens(prompt(5), 60)
    assert max(len(delta.token_ids) for delta in deltas) == 8
    assert len(runner.plans) < 40
    load = engine.load()
    assert load.num_output_tokens == 60
    assert load.num_accepted_tokens == 60 - len(deltas)
    assert load.num_accepted_tokens < load.num_draft_tokens
    assert load.num_free_pages == load.num_pages


def test_a_speculating_step_is_launched_before_the_previous_is_fetched():
    engine, runner = make_engine(max_drafts=7)
    engine.add(make_request("a", prompt(5), max_tokens=30))
    deltas, num_steps = {}, 0
    while "a" not in deltas or deltas["a"][-1].result is None:
        step(engine, deltas)
        num_steps += 1
        is_known_to_end = deltas.get("a") and deltas["a"][-1].result is not None
        assert len(runner.plans) == num_steps or is_known_to_end


def test_a_stop_token_inside_the_drafts_ends_the_output_there():
    tokens = naive_tokens(prompt(5), 40)
    for stop in range(1, 30):
        engine, _ = make_engine(max_drafts=7, eos_token_ids=(tokens[stop],), seed=stop)
        engine.add(make_request("a", prompt(5), max_tokens=40))
        deltas = run(engine)["a"]
        assert output(deltas) == until((tokens[stop],), tokens)
        assert deltas[-1].result.finish_reason is FinishReason.STOP


def test_drafts_stay_within_the_smallest_step():
    engine, runner = make_engine(max_drafts=7, max_num_seqs=8, max_mixed_tokens=32)
    for i in range(8):
        engine.add(make_request(str(i), prompt(4, seed=i), max_tokens=4 + 2 * i * i))
    deltas = run(engine)
    for i in range(8):
        assert output(deltas[str(i)]) == naive_tokens(prompt(4, seed=i), 4 + 2 * i * i)
    most = {}
    for plan in runner.plans[1:]:
        assert plan.num_tokens <= 8
        assert plan.num_drafts == sum(part.num_drafts for part in plan.scheduled)
        drafts = max(part.num_drafts for part in plan.scheduled)
        most[len(plan.scheduled)] = max(most.get(len(plan.scheduled), 0), drafts)
    assert most == {1: 7, 2: 3, 3: 1, 4: 1, 5: 0, 6: 0, 7: 0, 8: 0}


def test_nobody_is_preempted_for_a_draft():
    engine, _ = make_engine(num_pages=9, page_size=8, max_num_seqs=2, max_drafts=7)
    for i in range(2):
        engine.add(make_request(str(i), prompt(8, seed=i), max_tokens=24))
    deltas = run(engine)
    assert engine.load().num_preemptions == 0, "both fit, as they do without drafts"
    for i in range(2):
        assert output(deltas[str(i)]) == naive_tokens(prompt(8, seed=i), 24)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_pages=st.integers(8, 30),
    max_num_seqs=st.integers(1, 6),
    max_mixed_tokens=st.integers(8, 20),
    caching=st.booleans(),
    max_drafts=st.sampled_from([0, 1, 3, 7]),
    eos=st.sampled_from([(), tuple(range(0, 1000, 23))]),
)
def test_any_traffic_gives_the_models_tokens(
    seed, num_pages, max_num_seqs, max_mixed_tokens, caching, max_drafts, eos
):
    rng = random.Random(seed)
    engine, _ = make_engine(
        num_pages=num_pages,
        page_size=4,
        max_num_seqs=max_num_seqs,
        max_mixed_tokens=max_mixed_tokens,
        enable_prefix_caching=caching,
        eos_token_ids=eos,
        max_drafts=max_drafts,
        seed=seed,
    )
    capacity = engine.model_info.max_request_tokens
    shared = prompt(12, seed)
    expected, deltas, aborted = {}, {}, set()
    for i in range(rng.randint(1, 14)):
        tokens = shared[: rng.choice([0, 4, 9, 12])] + prompt(rng.randint(1, 12), seed + i)
        count = rng.randint(1, max(1, min(25, capacity - len(tokens))))
        if len(tokens) + count > capacity:
            continue
        engine.add(make_request(str(i), tokens, max_tokens=count, priority=rng.choice([0, 0, 1])))
        expected[str(i)] = until(eos, naive_tokens(tokens, count))
        for _ in range(rng.randint(0, 6)):
            step(engine, deltas)
        if rng.random() < 0.2:
            victim = rng.choice(list(expected))
            engine.abort(victim)
            aborted.add(victim)
    run(engine, deltas)
    for request_id, tokens in expected.items():
        got = output(deltas[request_id])
        if request_id in aborted:
            assert got == tokens[: len(got)]
        else:
            assert got == tokens
    load = engine.load()
    assert load.num_free_pages == load.num_pages
    assert (load.num_running, load.num_waiting) == (0, 0)
