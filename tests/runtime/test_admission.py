"""What a prompt that is too long is told depends on what limits the engine."""

import pytest

from castiron.runtime.admission import longer_sequences, tokens_left
from castiron.runtime.engine_info import EngineInfo
from castiron.runtime.errors import RequestError


def info(served: int, asked: int, built: int, context: int) -> EngineInfo:
    return EngineInfo(
        model_name="m",
        family="llama",
        vocab_size=10,
        max_seq_len=served,
        built_seq_len=built,
        context_len=context,
        asked_seq_len=asked,
        max_seqs=1,
        max_batched_tokens=8,
        block_size=16,
        num_blocks=1,
        bos_token_id=None,
        eos_token_ids=(),
        generation_defaults={},
        compute="f32",
        cache_dtype="f32",
        target_level="generic",
        num_threads=1,
        row_stable=True,
        has_tokenizer=True,
        sample_variants=("greedy",),
        timings={},
    )


@pytest.mark.parametrize(
    ("lengths", "advice"),
    [
        ((16, 32, 64, 128), "raise `kv_memory_bytes`"),
        ((32, 32, 64, 128), "load the engine with a higher `max_seq_len`"),
        ((64, 64, 64, 128), "rebuild the engine with a larger `max_seq_len`"),
        ((64, 64, 64, 64), ""),
    ],
)
def test_only_what_helps_is_advised(lengths: tuple[int, int, int, int], advice: str) -> None:
    engine = info(*lengths)
    assert longer_sequences(engine) == advice
    with pytest.raises(RequestError) as error:
        tokens_left(100, engine.max_seq_len, advice=longer_sequences(engine))
    wanted = f"shorten the prompt to {engine.max_seq_len - 1} tokens" + (f" or {advice}" if advice else "")
    assert str(error.value).endswith(wanted)
