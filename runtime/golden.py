"""Golden values baked into an engine, and how far a device may be from them.

They were computed by the unfused graph in float32 on exactly the engine's weights. A case is a sequence of
token ids, some of its rows, and of each row's logits those of the most likely ids and of ids spread over
the vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.printable import printable
from castiron.runtime.safetensors_reader import read_safetensors

GOLDEN_MEMBER = "golden.safetensors"
MAX_CASES = 1024
MAX_F32_DIFFERENCE = 2e-3  # of a logit, times the logits' standard deviation where that is above 1
TOP_IDS = 8  # of each row, whose log probabilities are compared under reduced precision
MAX_MEAN_DIFFERENCE = 0.05
MAX_P99_DIFFERENCE = 0.5
# Activations rounded to float8 take a step of 1/8 where a bfloat16 rounding before it carries them over the middle of
# two values: two right engines of a tiny random model of 3 to 32 layers are 0.2 to 0.4 apart (99th percentile 0.7 to
# 1.2), unrelated logits 5.
MAX_MEAN_DIFFERENCE_FP8 = 0.5
MAX_P99_DIFFERENCE_FP8 = 2.0


@dataclass(frozen=True)
class GoldenCase:
    token_ids: np.ndarray  # int32 [n]
    rows: np.ndarray  # int32 [r], token indices
    logit_ids: np.ndarray  # int32 [r, m]
    logits: np.ndarray  # float32 [r, m]
    logsumexp: np.ndarray  # float32 [r], over the whole vocabulary


@dataclass(frozen=True)
class Comparison:
    """One measured distance and its limit."""

    measure: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.value <= self.limit  # not for NaN


def read_golden(engine_file: EngineFile) -> list[GoldenCase]:
    """The engine's cases. Raises EngineFormatError if they don't fit the engine."""
    label = f"{engine_file.path}: {GOLDEN_MEMBER}"
    tensors, metadata = read_safetensors(engine_file.member(GOLDEN_MEMBER), label)
    text = metadata.get("num_cases", "")
    if not (text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= MAX_CASES):
        raise EngineFormatError(f"{label} has {printable(text, 40)} cases, expected 1 to {MAX_CASES}")
    return [_read_case(tensors, case, engine_file, label) for case in range(int(text))]


def _read_case(tensors: dict[str, np.ndarray], case: int, engine_file: EngineFile, label: str) -> GoldenCase:
    kinds = {
        "token_ids": ("i4", 1),
        "rows": ("i4", 1),
        "logit_ids": ("i4", 2),
        "logits": ("f4", 2),
        "logsumexp": ("f4", 1),
    }
    found = {}
    for name, (kind, ndim) in kinds.items():
        array = tensors.get(f"case.{case}.{name}")
        if array is None or array.dtype.str[1:] != kind or array.ndim != ndim:
            raise EngineFormatError(f"{label}: tensor case.{case}.{name} is missing or of another type")
        found[name] = array
    golden = GoldenCase(**found)
    model = engine_file.manifest.model
    num_tokens, num_rows = len(golden.token_ids), len(golden.rows)
    fits = (
        1 <= num_tokens <= engine_file.manifest.profile.max_seq_len
        and num_rows >= 1
        and golden.logit_ids.shape == golden.logits.shape
        and len(golden.logits) == len(golden.logsumexp) == num_rows
        and golden.logits.shape[1] >= 1
        and _within(golden.token_ids, model.vocab_size)
        and _within(golden.logit_ids, model.vocab_size)
        and _within(golden.rows, num_tokens)
    )
    if not fits:
        raise EngineFormatError(f"{label}: case {case} doesn't fit the engine")
    return golden


def _within(array: np.ndarray, limit: int) -> bool:
    return bool(((array >= 0) & (array < limit)).all())


def compare(
    cases: list[tuple[GoldenCase, np.ndarray]], compute: str, schemes: Collection[str] = ()
) -> list[Comparison]:
    """Distances between golden values and a device's logits, float32 [r, vocab] for each case.

    float32 compute: the largest difference of a logit. Otherwise the mean and the 99th percentile of the
    difference in log probability over each row's TOP_IDS most likely ids. `schemes`: of the engine's weights; fp8
    among them has wider limits.
    """
    if compute == "f32":
        return [_compare_logits(cases)]
    differences = np.concatenate([_logprob_differences(golden, logits) for golden, logits in cases])
    max_mean, max_p99 = MAX_MEAN_DIFFERENCE, MAX_P99_DIFFERENCE
    if "fp8" in schemes:
        max_mean, max_p99 = MAX_MEAN_DIFFERENCE_FP8, MAX_P99_DIFFERENCE_FP8
    return [
        Comparison("mean |difference in logprob|", float(differences.mean()), max_mean),
        Comparison("p99 |difference in logprob|", float(np.percentile(differences, 99)), max_p99),
    ]


def _compare_logits(cases: list[tuple[GoldenCase, np.ndarray]]) -> Comparison:
    differences = [
        np.abs(np.take_along_axis(logits, golden.logit_ids, 1) - golden.logits).max()
        for golden, logits in cases
    ]
    spread = float(np.std(np.concatenate([golden.logits.ravel() for golden, _ in cases])))
    return Comparison(
        "max |difference of logits|", float(np.max(differences)), MAX_F32_DIFFERENCE * max(1.0, spread)
    )


def _logprob_differences(golden: GoldenCase, logits: np.ndarray) -> np.ndarray:
    top = np.argsort(-golden.logits, axis=1, kind="stable")[:, :TOP_IDS]
    expected = np.take_along_axis(golden.logits, top, 1) - golden.logsumexp[:, None]
    wide = logits.astype(np.float64)
    highest = wide.max(1, keepdims=True)
    normalizer = highest + np.log(np.exp(wide - highest).sum(1, keepdims=True))
    got = np.take_along_axis(wide, np.take_along_axis(golden.logit_ids, top, 1), 1) - normalizer
    result: np.ndarray = np.abs(got - expected).ravel()
    return result
