"""What one request asks of its logits beside penalties: biases, bans and allowed ids, as the step block holds them."""

from collections.abc import Iterable

import numpy as np

from castiron.runtime.sampling_params import SamplingParams
from castiron.runtime.step_abi import MASK_WORD_BITS

BANNED = -np.inf


class LogitRules:
    """Of one running request. `allowed`: uint32 [ceil(vocab / 32)], a bit set = allowed; None = all are."""

    def __init__(self, sampling: SamplingParams, stop_token_ids: Iterable[int], vocab_size: int) -> None:
        """stop_token_ids: EOS included unless it is ignored; banned until min_tokens."""
        self.allowed = (
            None if sampling.allowed_token_ids is None else mask_of(sampling.allowed_token_ids, vocab_size)
        )
        self._biases = dict(sampling.logit_bias)
        self._biases |= {words[0]: BANNED for words in sampling.bad_words_token_ids if len(words) == 1}
        self._min_tokens = sampling.min_tokens
        self._banned_early = dict.fromkeys(stop_token_ids, BANNED) if sampling.min_tokens else {}
        self._bad_words = tuple(words for words in sampling.bad_words_token_ids if len(words) > 1)

    def biases_at(self, output_token_ids: np.ndarray) -> dict[int, float]:
        """The biases of the token that follows these (int32 [n], the request's output so far); -infinity bans."""
        biases = self._biases
        if len(output_token_ids) < self._min_tokens and self._banned_early:
            biases = biases | self._banned_early
        for words in self._bad_words:
            start = len(output_token_ids) + 1 - len(words)
            if start >= 0 and output_token_ids[start:].tolist() == list(words[:-1]):
                biases = biases | {words[-1]: BANNED}
        return biases


def mask_of(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(vocab_size / 32)] with these tokens' bits."""
    bits = np.zeros(-(-vocab_size // MASK_WORD_BITS) * MASK_WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
