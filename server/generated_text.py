"""One request's output tokens as text: detokenized, cut at stop strings, with its finish reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from castiron.runtime.messages import RequestOutput, TokenLogprobs
from castiron.server.detokenizer import IncrementalDetokenizer
from castiron.server.stop_strings import StopStringMatcher
from castiron.server.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What one engine output adds."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token id, if asked for
    text_offsets: tuple[int, ...]  # characters of text there were before each token
    finish_reason: str | None  # "stop", "length", "abort", "error"
    error: str | None = None


class GeneratedText:
    """Feed it a request's outputs in order; once a delta has a finish_reason, the text is complete.

    A stop string may end the text before the engine is done (finish_reason "stop" while the output had none):
    the caller then aborts the request. In the text of the first `min_tokens` tokens none is looked for.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStringMatcher(stop_strings)
        self._min_tokens = min_tokens
        self._num_chars = 0  # detokenized, given or held back for a stop string
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def add(self, output: RequestOutput) -> TextDelta:
        """The next output as text. The token that ended the request is counted but not shown."""
        assert self.finish_reason is None, "output after the end of a request"
        finish_reason = output.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        shown = output.new_token_ids
        if output.stop_token_id is not None and shown:
            shown = shown[:-1]
        pieces = []
        offsets = []
        num_taken = len(output.new_token_ids)
        for index, token_id in enumerate(shown):
            offsets.append(self._num_chars)
            text = self._detokenizer.add((token_id,))
            self._num_chars += len(text)
            is_early = len(self.token_ids) + index < self._min_tokens
            pieces.append(text if is_early else self._stop.add(text))
            if self._stop.found is not None:
                num_taken = index + 1
                finish_reason = "stop"
                break
        if finish_reason is not None and self._stop.found is None:
            pieces.append(self._stop.add(self._detokenizer.flush()))
            if self._stop.found is not None:
                finish_reason = "stop"
            pieces.append(self._stop.flush())
        delta = TextDelta(
            "".join(pieces),
            output.new_token_ids[:num_taken],
            output.logprobs[:num_taken],
            tuple(offsets + [self._num_chars] * (num_taken - len(offsets))),
            finish_reason,
            output.error,
        )
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason = finish_reason
        return delta
