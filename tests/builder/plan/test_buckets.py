"""Bucket ladders: capacities that grow with the profile and end exactly at it."""

from castiron.builder.plan.buckets import ladder_buckets, top_buckets
from castiron.runtime.manifest import Profile
from castiron.runtime.step_abi import Bucket


def test_the_cpu_has_one_bucket_of_each_ladder_as_large_as_the_profile() -> None:
    profile = Profile(max_seqs=16, max_seq_len=4096, max_batched_tokens=512)
    assert top_buckets(profile) == [
        ("decode", Bucket(max_tokens=16, max_seqs=16, max_logits=16, max_query_len=8)),
        ("mixed", Bucket(max_tokens=512, max_seqs=16, max_logits=16, max_query_len=512)),
    ]


def test_ladders_are_dense_where_batches_are_small_and_end_at_the_profile() -> None:
    buckets = ladder_buckets(Profile(max_seqs=200, max_seq_len=8192, max_batched_tokens=8192))
    decode = [bucket.max_seqs for ladder, bucket in buckets if ladder == "decode"]
    mixed = [bucket.max_tokens for ladder, bucket in buckets if ladder == "mixed"]
    assert decode == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200]
    assert mixed == [128, 256, 512, 1024, 2048, 4096, 8192]
    assert 15 <= len(buckets) <= 25


def test_a_decode_bucket_of_the_full_ladder_holds_tokens_of_any_split_over_sequences() -> None:
    buckets = ladder_buckets(Profile(max_seqs=64, max_seq_len=8192, max_batched_tokens=2048))
    sizes = {
        b.max_seqs: (b.max_tokens, b.max_query_len, b.max_logits) for name, b in buckets if name == "decode"
    }
    assert sizes[4] == (4, 4, 4) and sizes[64] == (64, 8, 64)


def test_capacities_of_a_one_token_engine_are_one() -> None:
    for ladder, bucket in top_buckets(Profile(max_seqs=1, max_seq_len=8, max_batched_tokens=1)):
        assert bucket == Bucket(1, 1, 1, 1), ladder
