"""Token ids to text while they arrive."""

from castiron.server.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what the decoder gives for bytes that are not (yet) a character


class IncrementalDetokenizer:
    """Gives text as soon as it can't change any more.

    Bytes of an unfinished character are held back until the token that completes it; `flush` gives what is
    left, U+FFFD where it truly is no character. The joined pieces are `tokenizer.decode` of all ids.

        ids      ... | a b c |  d e
                      context   since: decoded together with its context, since decoders treat the very first
                                token of a text differently (they strip its leading space)
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # context + ids since the last point where the text was complete
        self._num_context = 0  # ids of the window that are context
        self._num_given = 0  # characters of the window's text already given

    def add(self, token_ids: tuple[int, ...] | list[int]) -> str:
        """Take the next ids, return the text they complete (often "")."""
        return "".join([self._add_one(token_id) for token_id in token_ids])

    def _add_one(self, token_id: int) -> str:
        if self._skip_special_tokens and token_id in self._tokenizer.control.special_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        stable = text.rstrip(_REPLACEMENT)
        given = stable[self._num_given :]
        self._num_given = max(self._num_given, len(stable))
        if len(stable) == len(text):
            self._window = self._window[self._num_context :]
            self._num_context = len(self._window)
            self._num_given = len(self._decode(self._window))
        return given

    def flush(self) -> str:
        """What was held back; call once, after the last id."""
        rest = self._decode(self._window)[self._num_given :]
        self._window, self._num_context, self._num_given = [], 0, 0
        return rest

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
