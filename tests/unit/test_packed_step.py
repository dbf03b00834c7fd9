"""The packed vector of a plain step: what its rows say of a plan."""

import numpy as np
import pytest

from replicas.engine.buckets import Bucket
from replicas.engine.scheduler import ScheduledSequence, StepPlan
from replicas.engine.sequence import Sequence
from replicas.engine.step import PackedLayout, SlotTable
from replicas.page_keys import hash_root
from replicas.wire import GenerateRequest, SamplingParams, SinkAddress

NUM_SLOTS = 4


def make_sequence(prompt: list[int], *, slot: int, **sampling: int) -> Sequence:
    request = GenerateRequest(
        request_id=str(slot),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=8, **sampling),
        sink=SinkAddress(host="", port=0, sink_id="", key=b""),
    )
    sequence = Sequence(
        request,
        arrival_number=slot,
        arrival_s=0.0,
        max_total_tokens=len(prompt) + 8,
        root_key=hash_root("model", ""),
    )
    sequence.start(slot, [slot + 1], num_matched_pages=0, page_size=16)
    return sequence


def pack(*scheduled: ScheduledSequence) -> dict[str, np.ndarray]:
    table = SlotTable(num_slots=NUM_SLOTS, pages_per_seq=2, vocab_size=100)
    layout = PackedLayout(Bucket(num_tokens=8, num_seqs=4), table)
    plan = StepPlan(scheduled, num_tokens=sum(part.num_tokens for part in scheduled))
    return layout.fields.views(layout.pack(plan))


def test_rows_of_decodes_and_a_chunk_behind_them():
    known = make_sequence([10, 11, 12], slot=2)
    in_flight = make_sequence([20, 21], slot=0)
    prompt = make_sequence([30, 31, 32, 33], slot=1)
    view = pack(
        ScheduledSequence(known, 2, 2, 1, samples=True),
        ScheduledSequence(in_flight, 0, 2, 1, samples=True),
        ScheduledSequence(prompt, 1, 1, 2, samples=False),
    )
    assert view["token_ids"][:4].tolist() == [12, 0, 31, 32]
    assert view["token_slots"].tolist() == [NUM_SLOTS, 0] + 6 * [NUM_SLOTS]
    assert view["positions"][:4].tolist() == [2, 2, 1, 2]
    assert view["kv_lens"].tolist() == [3, 3, 3, 0]
    assert view["cu_q_lens"].tolist() == [0, 1, 2, 4, 4]
    assert view["slots"].tolist() == [2, 0, NUM_SLOTS, NUM_SLOTS]
    assert view["page_indices"][:, 0].tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_chunk_of_any_length_gives_its_prompt_logprobs(num_tokens: int):
    sequence = make_sequence([10, 11, 12, 13], slot=0, prompt_logprobs=0)
    view = pack(ScheduledSequence(sequence, 0, 1, num_tokens, samples=False))
    assert view["token_ids"][:num_tokens].tolist() == [11, 12][:num_tokens]
    assert view["targets"][:num_tokens].tolist() == [1 + 12, 1 + 13][:num_tokens]
    assert not view["targets"][num_tokens:].any()
