"""Every step the scheduler may plan fits a bucket, and padding is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engine.buckets import MIN_ROWS, Bucket, make_buckets, smallest_bucket


@given(
    max_num_seqs=st.integers(1, 300),
    mixed_slack=st.integers(0, 200),
    batched_slack=st.integers(0, 2000),
    is_head_cost_fixed=st.booleans(),
    data=st.data(),
)
def test_every_plan_fits_and_decode_padding_is_below_half(
    max_num_seqs, mixed_slack, batched_slack, is_head_cost_fixed, data
):
    max_mixed = max(8, max_num_seqs + mixed_slack)
    max_batched = max_mixed + batched_slack
    buckets = make_buckets(
        max_num_seqs=max_num_seqs,
        max_mixed_tokens=max_mixed,
        max_num_batched_tokens=max_batched,
        is_head_cost_fixed=is_head_cost_fixed,
    )
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    num_tokens = data.draw(st.integers(num_seqs, max_batched))
    bucket = smallest_bucket(buckets, num_tokens=num_tokens, num_seqs=num_seqs)
    assert bucket.num_tokens >= num_tokens
    assert bucket.num_seqs >= num_seqs

    decode = smallest_bucket(buckets, num_tokens=num_seqs, num_seqs=num_seqs)
    assert decode.num_seqs <= max(MIN_ROWS, 2 * num_seqs)
    assert decode.num_tokens <= max(MIN_ROWS, 2 * num_seqs)


def test_no_bucket_is_below_the_fewest_rows():
    buckets = make_buckets(max_num_seqs=1, max_mixed_tokens=8, max_num_batched_tokens=64)
    assert min(b.num_tokens for b in buckets) == MIN_ROWS
    assert min(b.num_seqs for b in buckets) == MIN_ROWS
    assert Bucket(64, 8) in buckets


def test_a_tpu_has_one_program_for_each_token_count():
    sizes = {"max_num_seqs": 128, "max_mixed_tokens": 512, "max_num_batched_tokens": 2048}
    buckets = make_buckets(**sizes, is_head_cost_fixed=True)
    assert [bucket.num_tokens for bucket in buckets] == [8 << i for i in range(9)]
    assert {bucket.num_seqs for bucket in buckets[4:]} == {128}


def test_an_oversized_step_is_our_bug():
    buckets = make_buckets(max_num_seqs=8, max_mixed_tokens=8, max_num_batched_tokens=64)
    with pytest.raises(AssertionError, match="65 tokens"):
        smallest_bucket(buckets, num_tokens=65, num_seqs=1)
