"""Golden values: logits of the unfused stage-0 graph in float32, for an engine to verify itself with.

Each case is one sequence fed in one chunk; parameters stream through one at a time, with the exact values the
engine stores. Member layout (safetensors): case.i.token_ids int32 [n], case.i.rows int32 [r] (token indices),
case.i.logit_ids int32 [r, 256] (the 64 most likely ids, then evenly spread ones), case.i.logits
float32 [r, 256], case.i.logsumexp float32 [r].
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from castiron.builder.graph import Program
from castiron.builder.interpreter import run
from castiron.builder.parameters import Parameter
from castiron.builder.plan.weights import parameter_bytes
from castiron.builder.safetensors_writer import encode_safetensors
from castiron.runtime.step_abi import Bucket, CacheGroup

MEMBER = "golden.safetensors"
CASE_LENGTHS = (1, 7, 64)  # tokens
MAX_ROWS = 16  # logit rows kept of a case
TOP_IDS, SPREAD_IDS = 64, 192
MAX_FULL_WEIGHTS = 2_000_000_000  # above, a full forward in float32 takes too long
_SPARE_BYTES = 640 << 20  # for one float32 parameter, beyond twice the largest stored one
_SEED = 20240229


@dataclass(frozen=True)
class Case:
    """One prompt and the token indices whose logits are kept."""

    token_ids: np.ndarray  # int32 [n]
    rows: np.ndarray  # int32 [r], ascending, the last token included


class GoldenMember(NamedTuple):
    """What the engine gets."""

    level: str  # "full", or "none: why"
    data: bytes  # b"" for none


def golden_cases(vocab_size: int, special_ids: Iterable[int], bucket: Bucket, max_seq_len: int) -> list[Case]:
    """Seeded prompts without special ids, as long as the engine's mixed bucket and sequences allow."""
    ordinary = np.setdiff1d(np.arange(vocab_size, dtype=np.int32), np.fromiter(special_ids, np.int32))
    if not len(ordinary):
        ordinary = np.arange(vocab_size, dtype=np.int32)
    rng = np.random.Generator(np.random.Philox(_SEED))
    longest = min(bucket.max_tokens, bucket.max_query_len, max_seq_len)
    cases = []
    for length in dict.fromkeys(min(length, longest) for length in CASE_LENGTHS):
        num_rows = min(length, MAX_ROWS, bucket.max_logits)
        rows = np.unique(np.linspace(length - 1, 0, num_rows).astype(np.int32))
        cases.append(Case(ordinary[rng.integers(0, len(ordinary), length)], rows))
    return cases


def why_no_golden(parameters: Iterable[Parameter]) -> str:
    """Why a full float32 forward can't be had within the builder's time and memory; "" if it can."""
    weights = [p for p in parameters if p.constant is None]
    total = sum(int(np.prod(p.shape)) for p in weights)
    if total > MAX_FULL_WEIGHTS:
        return f"{total} weights, a full forward is made up to {MAX_FULL_WEIGHTS}"
    largest = max(4 * int(np.prod(p.shape)) for p in weights)
    budget = _SPARE_BYTES + 2 * max(parameter_bytes(p) for p in weights)
    if largest > budget:
        return f"a parameter takes {largest} bytes as float32, {budget} are allowed"
    return ""


def compute_golden(
    program: Program,
    cases: list[Case],
    group: CacheGroup,
    load_parameter: Callable[[Parameter], torch.Tensor],
    compute: str,
    keep_going: Callable[[], None],
) -> bytes:
    """The golden member. `program` is the stage-0 forward; `load_parameter` gives float32 values.

    `keep_going` is called after every node and may raise to stop.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums, so the same file, on any number of cores
    try:
        inputs = _inputs(program, cases, group)
        logits = run(program, inputs, load_parameter, lambda *_: keep_going())["logits"].numpy()
    finally:
        torch.set_num_threads(num_threads)
    tensors: dict[str, np.ndarray] = {}
    ends = np.cumsum([len(case.rows) for case in cases])
    for index, (case, own) in enumerate(zip(cases, np.split(logits, ends[:-1]), strict=True)):
        ids = _kept_ids(own)
        tensors[f"case.{index}.token_ids"] = case.token_ids
        tensors[f"case.{index}.rows"] = case.rows
        tensors[f"case.{index}.logit_ids"] = ids
        tensors[f"case.{index}.logits"] = np.take_along_axis(own, ids, axis=1)
        tensors[f"case.{index}.logsumexp"] = _logsumexp(own)
    return encode_safetensors(tensors, {"num_cases": str(len(cases)), "compute": compute})


def _inputs(program: Program, cases: list[Case], group: CacheGroup) -> dict[str, torch.Tensor]:
    """One step that holds every case as a sequence of its own, each in blocks of its own."""
    lengths = [len(case.token_ids) for case in cases]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    num_blocks = [-(-length // group.block_size) for length in lengths]
    first_blocks = np.concatenate([[0], np.cumsum(num_blocks)])
    tables = np.full((len(cases), group.table_width), -1, np.int32)
    for index, count in enumerate(num_blocks):
        tables[index, :count] = first_blocks[index] + np.arange(count)
    slots = [np.arange(n) + first * group.block_size for n, first in zip(lengths, first_blocks, strict=False)]
    inputs = {
        "token_ids": (np.concatenate([case.token_ids for case in cases]), np.int32),
        "positions": (np.concatenate([np.arange(length) for length in lengths]), np.int32),
        "query_starts": (starts, np.int32),
        "seq_lens": (np.array(lengths), np.int32),
        "logit_rows": (
            np.concatenate([start + c.rows for start, c in zip(starts, cases, strict=False)]),
            np.int32,
        ),
        f"slot_mapping.{group.name}": (np.concatenate(slots), np.int64),
        f"block_tables.{group.name}": (tables, np.int32),
        "last_token": (np.zeros(1), np.int32),
    }
    tensors = {name: torch.from_numpy(values.astype(dtype)) for name, (values, dtype) in inputs.items()}
    for state in program.states:
        if state.group:
            sizes = [int(first_blocks[-1]) if not isinstance(dim, int) else dim for dim in state.shape]
            tensors[state.name] = torch.zeros(sizes, dtype=torch.float32)
    return tensors


def _kept_ids(logits: np.ndarray) -> np.ndarray:
    """int32 [r, 256]: the most likely ids of each row, ties to the lowest, then evenly spread ones."""
    vocab_size = logits.shape[1]
    top = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_IDS].astype(np.int32)
    num_spread = TOP_IDS + SPREAD_IDS - top.shape[1]
    spread = np.linspace(0, vocab_size - 1, num_spread).astype(np.int32)
    return np.concatenate([top, np.broadcast_to(spread, (len(logits), num_spread))], axis=1)


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1)
    total = np.exp((logits - top[:, None]).astype(np.float64)).sum(axis=1)
    return np.asarray(top + np.log(total), dtype=np.float32)
