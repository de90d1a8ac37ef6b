"""How the next token of a request is chosen, validated before the request is admitted."""

import msgspec

from castiron.runtime.errors import RequestError


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling parameters.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `seed` None draws one at admission;
    a negative one stands for its two's complement, as 64-bit integers have it.
    `logprobs` None returns none, 0 the sampled token's, n the n most likely as well.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def validate(self) -> None:
        """Raise RequestError naming the first field that is out of range."""
        from castiron.runtime.step_abi import MAX_LOGPROBS  # brings NumPy: records cross to processes without

        checks = (
            ("temperature", 0.0 <= self.temperature <= 100.0, "a number from 0 to 100"),
            ("top_k", -1 <= self.top_k < 2**31, "an integer from 1 to 2^31 - 1, or 0 or -1 (off)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "a number above 0 and up to 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "a number from 0 to 1"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "an integer of 64 bits"),
            ("max_tokens", 1 <= self.max_tokens < 2**31, "an integer from 1 to 2^31 - 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "an integer from 0 to `max_tokens`"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"an integer from 0 to {MAX_LOGPROBS}",
            ),
        )
        for name, holds, expected in checks:
            if not holds:
                raise RequestError(f"`{name}` is {getattr(self, name)}, expected {expected}", name)
