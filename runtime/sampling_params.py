"""How the next token of a request is chosen, validated before the request is admitted."""

import math

import msgspec

from castiron.runtime.errors import RequestError

# of a request, so that its bans and biases fit step_abi.MAX_BIASES_PER_ROW and checking takes microseconds
MAX_LOGIT_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 32

Words = tuple[tuple[int, ...], ...]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling parameters.

    Each token is drawn from its logits in this order (vLLM's): ids not in `allowed_token_ids`, bad words and, before
    `min_tokens`, EOS and stop tokens are banned, `logit_bias` is added, then repetition_penalty (of prompt and output),
    frequency_penalty and presence_penalty (of the output); then temperature, min_p, top_k, top_p.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `seed` None draws one at admission;
    a negative one stands for its two's complement, as 64-bit integers have it.
    `logprobs` None returns none, 0 the sampled token's, n the n most likely as well: of the model's own distribution.
    `prompt_logprobs`: the same for the prompt's tokens, but the first; such a prompt is computed whole, never cached.
    `bad_words_token_ids`: sequences of ids that an output must not contain.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: Words = ()
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def has_penalty(self) -> bool:
        """Whether it matters which tokens there have been."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_rules(self) -> bool:
        """Whether single tokens are favoured or banned."""
        return bool(
            self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words_token_ids
            or self.min_tokens
        )

    @property
    def needs_output(self) -> bool:
        """Whether the last token must be known on the host before the next one is drawn."""
        return any(len(words) > 1 for words in self.bad_words_token_ids)

    def validate(self) -> None:
        """Raise RequestError naming the first field that is out of range."""
        from castiron.runtime.step_abi import MAX_LOGPROBS  # brings NumPy: records cross to processes without

        allowed = self.allowed_token_ids
        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_k", -1 <= self.top_k < 2**31, "an integer from 1 to 2^31 - 1, or 0 or -1 (off)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and up to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 to 1"),
            (
                "repetition_penalty",
                0.0 < self.repetition_penalty <= 100.0,
                "a number above 0 and up to 100 (1 = off)",
            ),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "a number from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "a number from -2 to 2"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "an integer of 64 bits"),
            ("max_tokens", 1 <= self.max_tokens < 2**31, "an integer from 1 to 2^31 - 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "an integer from 0 to `max_tokens`"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"an integer from 0 to {MAX_LOGPROBS}",
            ),
            (
                "prompt_logprobs",
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"an integer from 0 to {MAX_LOGPROBS}",
            ),
        )
        for name, holds, expected in checks:
            if not holds:
                raise RequestError(f"`{name}` is {getattr(self, name)}, expected {expected}", name)
        for name, count, most in (
            ("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES),
            ("allowed_token_ids", len(allowed or ()), MAX_ALLOWED_TOKEN_IDS),
            ("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS),
            ("bad_words", len(self.bad_words_token_ids), MAX_BAD_WORDS),
        ):
            if count > most:
                raise RequestError(f"`{name}` has {count} entries, at most {most} are allowed", name)
        if allowed is not None and not allowed:
            raise RequestError(
                "`allowed_token_ids` is empty, expected at least one id, or none given", "allowed_token_ids"
            )
        for token_id, bias in self.logit_bias.items():
            if not (math.isfinite(bias) and -100.0 <= bias <= 100.0):
                raise RequestError(
                    f"`logit_bias` of token {token_id} is {bias}, expected a number from -100 to 100",
                    "logit_bias",
                )
        for words in self.bad_words_token_ids:
            if not 1 <= len(words) <= MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"a bad word has {len(words)} tokens, expected 1 to {MAX_BAD_WORD_TOKENS}", "bad_words"
                )
