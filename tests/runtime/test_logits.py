"""forward_logits: raw logits of chosen positions, several sequences and chunks at a time."""

import numpy as np
import pytest
from simulated_device import VOCAB_SIZE, device_of, logits_of, prefix_hashes, request, simulated_engine

from castiron.runtime.errors import InputError
from castiron.runtime.logits import forward_logits, iterate_logits
from castiron.runtime.step_abi import CacheGroup


def ids(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * 7) % VOCAB_SIZE for i in range(length)]


def right(token_ids: list[int]) -> np.ndarray:
    return np.stack([logits_of(h) for h in prefix_hashes(np.array(token_ids))])


@pytest.mark.parametrize("chunk", [None, 1, 3, 8])
def test_every_position_of_ragged_sequences_is_right_whatever_the_chunk(chunk: int | None) -> None:
    engine = simulated_engine(max_seqs=4, max_batched_tokens=32)
    sequences = [ids(1), ids(23, 1), ids(7, 2), ids(40, 3)]
    got = forward_logits(engine, sequences, chunk=chunk)
    for logits, token_ids in zip(got, sequences, strict=True):
        assert np.array_equal(logits, right(token_ids))
    engine.scheduler.check_integrity()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_only_wanted_rows_come_back_in_order() -> None:
    engine = simulated_engine()
    got = forward_logits(engine, [ids(20), ids(9, 1)], rows=[[0, 7, 19], []])
    assert np.array_equal(got[0], right(ids(20))[[0, 7, 19]]) and got[1].shape == (0, VOCAB_SIZE)


def test_more_rows_than_a_plan_has_take_several_launches_of_the_same_step() -> None:
    engine = simulated_engine(max_seqs=4, max_batched_tokens=32)
    positions = [p.tolist() for _, p, _ in iterate_logits(engine, [ids(10)], chunk=10)]
    assert positions == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert device_of(engine).launches == [("forward.mixed", None)] * 3


def test_single_tokens_use_the_decode_plan() -> None:
    engine = simulated_engine()
    forward_logits(engine, [ids(3)], chunk=1)
    assert device_of(engine).launches == [("forward.decode", None)] * 3


def test_an_iterator_left_early_gives_its_rows_back() -> None:
    engine = simulated_engine()
    for _ in iterate_logits(engine, [ids(30), ids(30, 1)], chunk=2):
        break
    engine.scheduler.check_integrity()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_what_does_not_fit_is_refused() -> None:
    engine = simulated_engine(num_blocks=16, max_seqs=2, max_batched_tokens=8)
    for arguments, message in (
        ({"sequences": [[]]}, "sequence 0 has 0 tokens"),
        ({"sequences": [[1], [VOCAB_SIZE]]}, "ids below 97"),
        ({"sequences": [[1], [2], [3]]}, "3 sequences, the engine runs 2"),
        ({"sequences": [ids(40), ids(40)]}, "80 tokens, the cache holds 64"),
        ({"sequences": [[1], [2]], "chunk": 5}, "chunk 5 times 2 sequences"),
        ({"sequences": [[1]], "chunk": 0}, "chunk 0"),
        ({"sequences": [[1]], "rows": [[1]]}, "must ascend from 0 to 0"),
        ({"sequences": [[1, 2]], "rows": [[1, 0]]}, "must ascend"),
        ({"sequences": [[1, 2]], "rows": []}, "rows of 0 sequences"),
    ):
        with pytest.raises(InputError, match=message):
            forward_logits(engine, **arguments)  # type: ignore[arg-type]
    engine.scheduler.check_integrity()
    engine.add_request(request("a", (1, 2)))
    with pytest.raises(InputError, match="unfinished requests"):
        forward_logits(engine, [[1]])
    assert forward_logits(simulated_engine(), []) == []


def test_an_engine_with_states_is_refused() -> None:
    engine = simulated_engine(groups=(CacheGroup("gdn", "state", 8, 0),))
    with pytest.raises(InputError, match=r"keeps a state of its tokens \(cache group gdn\)"):
        forward_logits(engine, [[1, 2, 3]])
