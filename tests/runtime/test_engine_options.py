"""Options: limits may only be lowered, and what they mean for the cache's size."""

import msgspec
import pytest
from simulated_device import BLOCK_SIZE, KV, simulated_header

from castiron.runtime.engine_options import EngineOptions, ServingLimits, resolve_limits
from castiron.runtime.errors import EngineFormatError, EngineTargetError, InputError
from castiron.runtime.kv_memory import FREE_MEMORY_SHARE, choose_num_blocks
from castiron.runtime.manifest import Profile
from castiron.runtime.step_abi import CacheGroup

PROFILE = Profile(max_seqs=16, max_seq_len=2048, max_batched_tokens=512)
SMALL = Profile(max_seqs=4, max_seq_len=64, max_batched_tokens=32)
BLOCK_BYTES = BLOCK_SIZE * 16  # of the simulated header


def test_unset_limits_are_the_engines() -> None:
    assert resolve_limits(EngineOptions(), PROFILE) == ServingLimits(16, 2048, 512)


def test_limits_can_be_lowered_one_by_one() -> None:
    options = EngineOptions(max_seqs=1, max_batched_tokens=1, max_seq_len=2)
    assert resolve_limits(options, PROFILE) == ServingLimits(1, 2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (EngineOptions(max_seqs=17), "`max_seqs` is 17, the engine was built for 16"),
        (EngineOptions(max_seq_len=4096), "`max_seq_len` is 4096, the engine was built for 2048"),
        (EngineOptions(max_batched_tokens=513), "`max_batched_tokens` is 513, the engine was built for 512"),
        (EngineOptions(max_seqs=0), "`max_seqs` is 0, expected a positive integer"),
        (EngineOptions(kv_memory_bytes=-1), "`kv_memory_bytes` is -1"),
        (EngineOptions(num_threads=0), "`num_threads` is 0"),
        (EngineOptions(max_batched_tokens=8), "`max_batched_tokens` 8 is below `max_seqs` 16"),
    ],
)
def test_other_limits_are_refused_with_both_numbers(options: EngineOptions, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_limits(options, PROFILE)


def test_a_profile_whose_step_cannot_hold_its_sequences_is_refused() -> None:
    with pytest.raises(EngineFormatError, match="max_seqs 16 and max_batched_tokens 8"):
        resolve_limits(EngineOptions(), Profile(16, 2048, 8))


def test_options_are_frozen_and_unknown_ones_are_an_error() -> None:
    options = EngineOptions()
    with pytest.raises(AttributeError):
        options.max_seqs = 3  # type: ignore[misc]
    with pytest.raises(msgspec.ValidationError, match="max_sequences"):
        msgspec.json.decode(b'{"max_sequences": 3}', type=EngineOptions)


def num_blocks(
    kv_memory_bytes: int | None, free_bytes: int | None, limits: ServingLimits | None = None
) -> int:
    limits = limits or ServingLimits(4, 64, 32)
    return choose_num_blocks(simulated_header(SMALL), limits, kv_memory_bytes, free_bytes)["kv"]


def test_by_default_the_cache_holds_every_sequence_at_full_length() -> None:
    assert num_blocks(None, None) == num_blocks(None, 1 << 40) == 4 * 64 // BLOCK_SIZE
    assert num_blocks(None, None, ServingLimits(2, 30, 32)) == 2 * 8  # lowered limits need less, whole blocks


def test_by_default_the_cache_takes_no_more_than_its_share_of_free_memory() -> None:
    free = 20 * BLOCK_BYTES
    assert num_blocks(None, free) == int(20 * FREE_MEMORY_SHARE)


def test_a_given_size_is_used_to_the_last_whole_block() -> None:
    assert num_blocks(7 * BLOCK_BYTES - 1, None) == 6
    assert num_blocks(7 * BLOCK_BYTES, 7 * BLOCK_BYTES) == 7


def test_a_size_beyond_free_memory_or_below_a_block_is_refused() -> None:
    with pytest.raises(EngineTargetError, match="asks for 3 MiB, 2 MiB are free"):
        num_blocks(3 << 20, 2 << 20)
    with pytest.raises(InputError, match=f"may take 5 bytes, one block needs {BLOCK_BYTES}"):
        num_blocks(5, None)
    with pytest.raises(InputError, match="one block needs"):
        num_blocks(None, -100)


def test_groups_get_memory_for_what_a_sequence_holds_of_each() -> None:
    """Of a window its blocks and those of two steps under way, of a state four slots, however long it gets."""
    groups = (
        KV,
        CacheGroup("sliding", "paged", BLOCK_SIZE, 0, window=8),
        CacheGroup("gdn", "state", 8, 0),
    )
    header = simulated_header(Profile(4, 512, 32), groups)
    blocks = choose_num_blocks(header, ServingLimits(4, 512, 16), None, None)
    window_blocks = -(-(7 + 2 * 16) // BLOCK_SIZE) + 2
    assert blocks == {"kv": 4 * 512 // BLOCK_SIZE, "sliding": 4 * window_blocks, "gdn": 4 * 4}
