"""One request inside the engine loop: its tokens so far and how far they are computed.

A token that a running step samples is pending: it has its place, and the next step may already read it on the
device, before the host knows its id.
"""

import os
from dataclasses import dataclass, field

import numpy as np

from castiron.runtime.block_manager import PrefixKeys
from castiron.runtime.grammar_compiler import Grammar
from castiron.runtime.messages import AddRequest, TokenLogprobs
from castiron.runtime.sampling_params import SamplingParams


@dataclass(eq=False, slots=True)
class Sequence:
    """A request's tokens: prompt, then output. Of these the first `num_computed_tokens` are in the cache."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    order: tuple[int, int]  # (priority, arrival): lower runs first and is preempted last
    seed: int  # 0 .. 2^64 - 1
    stop_token_ids: frozenset[int]  # EOS included unless it is ignored
    num_tokens: int  # prompt and output
    prompt_array: np.ndarray  # the prompt, int32
    prefix_keys: PrefixKeys | None = None  # what its blocks are found by; None: they aren't
    skip_cache_read: bool = False  # compute the whole prompt: what was asked needs every token's logits
    output_token_ids: list[int] = field(default_factory=list)
    row: int = -1  # -1 = waiting
    num_computed_tokens: int = 0  # in the cache once the steps that were launched are done
    num_pending_tokens: int = 0  # sampled by steps that the host hasn't read yet: 0 or 1
    # by position, of the prompt's tokens but the first, as they are read; [] unless they are asked for
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    grammar: Grammar | None = None
    needs_output: bool = False  # its next token depends on the last one in ways only the host knows
    is_finished: bool = False  # ended or aborted: tokens still to come are dropped
    num_scheduled_tokens: int = 0  # in the step being put together
    num_cached_tokens: int = -1  # of its prompt, when it first started; -1 = it hasn't
    most_held: tuple[
        int, ...
    ] = ()  # blocks of each group and a row, at most until it ends; () = not computed
    start_by: int = -1  # step up to which it may be overtaken while it waits for blocks; -1 = it doesn't

    @classmethod
    def from_request(
        cls,
        request: AddRequest,
        arrival: int,
        eos_token_ids: tuple[int, ...],
        prefix_keys: PrefixKeys | None = None,
        grammar: Grammar | None = None,
    ) -> "Sequence":
        """Admit a validated request; without a seed one is drawn."""
        sampling = request.sampling
        seed = int.from_bytes(os.urandom(8), "little") if sampling.seed is None else sampling.seed
        eos = () if sampling.ignore_eos else eos_token_ids
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=sampling,
            order=(request.priority, arrival),
            seed=seed & 0xFFFF_FFFF_FFFF_FFFF,
            stop_token_ids=frozenset(eos) | frozenset(sampling.stop_token_ids),
            num_tokens=len(request.prompt_token_ids),
            grammar=grammar,
            needs_output=sampling.needs_output or grammar is not None,
            prompt_logprobs=_empty_prompt_logprobs(request),
            skip_cache_read=sampling.prompt_logprobs is not None,
            prompt_array=np.array(request.prompt_token_ids, np.int32),
            prefix_keys=prefix_keys,
        )

    @property
    def known_tokens(self) -> np.ndarray:
        """All tokens that the host knows, int32 [num_tokens]."""
        if not self.output_token_ids:
            return self.prompt_array
        return np.concatenate([self.prompt_array, np.array(self.output_token_ids, np.int32)])

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens, known or pending, that aren't computed; 0 while a pending one is the last, or must be known first."""
        num_pending = self.num_pending_tokens
        if num_pending and (
            self.needs_output or len(self.output_token_ids) + num_pending >= self.sampling.max_tokens
        ):
            return 0
        return self.num_tokens + num_pending - self.num_computed_tokens

    def num_steps_left(self, max_batched_tokens: int) -> int:
        """Steps until it ends, if nothing ends it before its max_tokens and it gets the whole token budget."""
        num_chunks = -(-max(1, self.num_remaining_tokens) // max_batched_tokens)
        return num_chunks + self.sampling.max_tokens - self.num_output_tokens - 1

    @property
    def num_output_tokens(self) -> int:
        """Sampled tokens, a pending one included."""
        return len(self.output_token_ids) + self.num_pending_tokens

    def append(self, token_id: int) -> str | None:
        """Add a sampled token; the finish reason if it was the last one."""
        output_token_ids, sampling = self.output_token_ids, self.sampling
        output_token_ids.append(token_id)
        self.num_tokens += 1
        if self.grammar is not None and not self.grammar.accept(token_id):
            return "error"  # all that the grammar allows is banned
        if token_id in self.stop_token_ids and len(output_token_ids) >= sampling.min_tokens:
            return "stop"
        if self.grammar is not None and self.grammar.has_ended:
            return "stop"
        if len(output_token_ids) >= sampling.max_tokens:
            return "length"  # never past max_seq_len: prompt + max_tokens was checked at admission
        return None


def _empty_prompt_logprobs(request: AddRequest) -> list[TokenLogprobs | None]:
    is_asked = request.sampling.prompt_logprobs is not None
    return [None] * (len(request.prompt_token_ids) - 1) if is_asked else []
