"""Raw logits of given tokens, past the scheduler: for verification, perplexity and tests."""

from collections.abc import Iterator, Sequence

import numpy as np

from castiron.runtime.errors import InputError
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.step_builder import StepInput, fill_step

TokenIds = Sequence[int]


def forward_logits(
    engine: LLMEngine,
    sequences: Sequence[TokenIds],
    chunk: int | None = None,
    rows: Sequence[Sequence[int]] | None = None,
) -> list[np.ndarray]:
    """Logits at the wanted positions of each sequence, float32 [len(rows[i]), vocab_size].

    `rows[i]` lists positions of sequence i in ascending order; None wants all of them. The rest is as for
    iterate_logits.
    """
    wanted = [range(len(ids)) for ids in sequences] if rows is None else rows
    results = [np.empty((len(w), engine.info.vocab_size), np.float32) for w in wanted]
    filled = [0] * len(sequences)
    for index, positions, logits in iterate_logits(engine, sequences, chunk, rows):
        results[index][filled[index] : filled[index] + len(positions)] = logits
        filled[index] += len(positions)
    return results


def iterate_logits(
    engine: LLMEngine,
    sequences: Sequence[TokenIds],
    chunk: int | None = None,
    rows: Sequence[Sequence[int]] | None = None,
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (sequence index, positions [n], logits float32 [n, vocab_size]), positions ascending.

    All sequences run in the same steps, each by `chunk` tokens a step (None: an equal share of the step's
    budget; 1 uses the decode plan). A step with more wanted rows than its plan has is run again for the rest,
    rewriting the cache with the same values. The engine must be idle. Raises InputError if it isn't, or for
    sequences, a chunk or rows that it can't hold.
    """
    wanted = _check(engine, sequences, chunk, rows)
    if not sequences:
        return
    share = engine.info.max_batched_tokens // len(sequences)
    chunk = share if chunk is None else chunk
    owned = [engine.rows.acquire(tuple(ids)) for ids in sequences]
    try:
        for row, ids in zip(owned, sequences, strict=True):
            if not engine.blocks.grow(row, len(ids)):
                raise InputError(
                    f"the sequences have {sum(map(len, sequences))} tokens, the cache holds "
                    f"{engine.info.num_blocks * engine.info.block_size}: give fewer or raise the KV memory"
                )
        lengths = np.array([len(ids) for ids in sequences], np.int32)
        for start in range(0, int(lengths.max()), chunk):
            live = np.flatnonzero(lengths > start)
            counts = np.minimum(lengths[live] - start, chunk).astype(np.int32)
            starts = np.full(len(live), start, np.int32)
            step_rows = np.array(owned, np.int32)[live]
            positions = [
                wanted[i][(wanted[i] >= start) & (wanted[i] < start + n)]
                for i, n in zip(live, counts, strict=True)
            ]
            yield from _run_step(engine, live, StepInput(step_rows, starts, counts, _NONE, _NONE), positions)
    finally:
        for row in owned:
            engine.blocks.release(row)
            engine.rows.release(row)


_NONE = np.empty(0, np.int32)


def _run_step(
    engine: LLMEngine, live: np.ndarray, step: StepInput, positions: list[np.ndarray]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """One step over all its wanted rows, in as many launches as its plan's logit rows need."""
    begins = np.cumsum(step.counts) - step.counts
    logit_tokens = np.concatenate(
        [p - s + b for p, s, b in zip(positions, step.starts, begins, strict=True)]
    ).astype(np.int32)
    owners = np.repeat(live, [len(p) for p in positions])
    flat_positions = np.concatenate(positions)
    max_logits = engine.plans.max_logits
    for first in range(0, max(1, len(logit_tokens)), max_logits):
        part = slice(first, first + max_logits)
        launch = StepInput(step.rows, step.starts, step.counts, logit_tokens[part], _NONE)
        num_logits = max(1, len(launch.logit_tokens))
        forward = engine.plans.choose_forward(
            int(step.counts.sum()), len(step.rows), num_logits, int(step.counts.max())
        )
        fill_step(engine.device.step_views(forward), launch, engine.rows, engine.blocks, 0)
        engine.device.launch(forward, None)
        engine.device.wait()
        if len(launch.logit_tokens) == 0:
            return
        logits = engine.device.read_logits(num_logits)
        for index in np.unique(owners[part]):
            mine = owners[part] == index
            yield int(index), flat_positions[part][mine], logits[mine]


def _check(
    engine: LLMEngine,
    sequences: Sequence[TokenIds],
    chunk: int | None,
    rows: Sequence[Sequence[int]] | None,
) -> list[np.ndarray]:
    info = engine.info
    if engine.blocks.states:
        raise InputError(
            f"the engine keeps a state of its tokens (cache group {engine.blocks.states[0].name}), and a step that "
            f"moves it on can't be run again for more logits: ask for log probabilities instead"
        )
    if engine.has_unfinished():
        raise InputError("the engine has unfinished requests: finish or abort them before reading logits")
    if len(sequences) > info.max_seqs:
        raise InputError(
            f"got {len(sequences)} sequences, the engine runs {info.max_seqs} at once: give fewer"
        )
    for index, ids in enumerate(sequences):
        if not 1 <= len(ids) <= info.max_seq_len or min(ids) < 0 or max(ids) >= info.vocab_size:
            raise InputError(
                f"sequence {index} has {len(ids)} tokens, expected 1 to {info.max_seq_len} ids below "
                f"{info.vocab_size}"
            )
    if chunk is not None and not 1 <= chunk * len(sequences) <= info.max_batched_tokens:
        raise InputError(
            f"chunk {chunk} times {len(sequences)} sequences, expected 1 to {info.max_batched_tokens} tokens "
            f"a step"
        )
    if rows is not None and len(rows) != len(sequences):
        raise InputError(f"got rows of {len(rows)} sequences, expected those of {len(sequences)}")
    wanted = [np.arange(len(ids)) for ids in sequences]
    if rows is not None:
        wanted = [np.asarray(positions, dtype=np.int64) for positions in rows]
    for index, (positions, ids) in enumerate(zip(wanted, sequences, strict=True)):
        is_ascending = len(positions) == 0 or (
            positions[0] >= 0 and positions[-1] < len(ids) and bool((np.diff(positions) > 0).all())
        )
        if not is_ascending:
            raise InputError(f"rows of sequence {index} must ascend from 0 to {len(ids) - 1}")
    return wanted
