"""Inputs of the full sampling variant's kernels, as the step block and the rows hold them."""

from dataclasses import dataclass, field

import numpy as np
import torch

from castiron.models import sampling_ops
from castiron.models.logit_ops import IN_PROMPT
from castiron.runtime.step_abi import MAX_BIASES_PER_ROW

_ = sampling_ops  # imported to register its references
VOCABS = (1, 31, 32, 33, 200, 1003)
ROWS = 5  # live ones; one more of capacity, poisoned


@dataclass
class Step:
    """Inputs of ROWS + 1 rows, the last of them poison; as the step block and the rows hold them."""

    vocab: int
    seed: int = 0
    fields: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        rows, vocab, words = ROWS + 1, self.vocab, -(-self.vocab // 32)
        logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
        logits[1, rng.integers(0, vocab, 3)] = np.nan
        logits[2, rng.integers(0, vocab, 3)] = -np.inf
        logits[3, :] = np.round(logits[3, :])  # ties
        counts = rng.integers(0, 4, (rows + 3, vocab), dtype=np.uint32)
        counts[rng.random(counts.shape) < 0.5] = 0
        counts |= np.where(rng.random(counts.shape) < 0.3, IN_PROMPT, 0).astype(np.uint32)
        starts, ids, values = [0], [], []
        for row in range(ROWS):
            count = min(vocab, int(rng.integers(0, 9))) if row else 0
            ids += rng.permutation(vocab)[:count].tolist()
            values += [(-np.inf if rng.random() < 0.3 else rng.normal(0, 5)) for _ in range(count)]
            starts.append(len(ids))
        biases = (
            np.full((rows, MAX_BIASES_PER_ROW), -7, np.int32),
            np.full((rows, MAX_BIASES_PER_ROW), np.nan),
        )
        biases[0].reshape(-1)[: len(ids)], biases[1].reshape(-1)[: len(ids)] = ids, values
        masks = rng.integers(0, 2**32, (2, rows, words), dtype=np.uint32)
        masks[:, 1] = 0xFFFFFFFF
        self.fields = {
            "logits": logits,
            "sample_rows": np.array([4, 2, -1, 0, 7, 99], np.int32),
            "token_counts": counts,
            "repetition_penalty": np.array([1.3, 1, 2, 0.7, 1, np.nan], np.float32),
            "presence_penalty": np.array([0, 0, 1, -0.5, 0.25, np.nan], np.float32),
            "frequency_penalty": np.array([0.5, 0, 1, 0, -2, np.nan], np.float32),
            "bias_starts": np.array([*starts, -5], np.int32),
            "bias_token_ids": biases[0],
            "bias_values": biases[1].astype(np.float32),
            "mask_rows": np.array([2, -1, 0, 1, 3, 99], np.int32),
            "grammar_masks": masks[0],
            "allowed_rows": np.array([-1, 3, 1, 0, -1, 99], np.int32),
            "allowed_masks": masks[1],
            "num_logprobs": np.array([5, 0, -1, 20, 3, 77], np.int32),
            "temperature": np.array([0, 1.5, 0.7, 1, 2, np.nan], np.float32),
            "top_k": np.array([0, 0, 5, 3, 0, 9], np.int32),
            "top_p": np.array([1, 0.8, 1, 0.9, 0.95, np.nan], np.float32),
            "min_p": np.array([0, 0.05, 0, 0.1, 0.2, np.nan], np.float32),
            "seed": np.arange(6, dtype=np.uint64) << np.uint64(40),
            "output_position": np.array([3, 0, 9, 70, 1, -1], np.int32),
            "last_token": np.full(ROWS + 4, -3, np.int32),
        }

    def live(self, *names: str) -> list[torch.Tensor]:
        """Copies of the live rows, for a reference."""
        whole = (
            "token_counts",
            "bias_token_ids",
            "bias_values",
            "grammar_masks",
            "allowed_masks",
            "last_token",
        )
        counts = {"bias_starts": ROWS + 1}
        return [
            torch.from_numpy(
                self.fields[name].copy()
                if name in whole
                else self.fields[name][: counts.get(name, ROWS)].copy()
            )
            for name in names
        ]

    def given(self, *names: str) -> dict[str, np.ndarray]:
        return {name: self.fields[name] for name in names}


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
BIASES = ("bias_starts", "bias_token_ids", "bias_values", "allowed_rows", "allowed_masks")
CHOICE = ("temperature", "top_k", "top_p", "min_p", "seed", "output_position")
