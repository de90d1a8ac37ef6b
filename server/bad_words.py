"""Bad words as the token sequences an output must not contain."""

from collections.abc import Sequence

from castiron.runtime.errors import RequestError
from castiron.runtime.sampling_params import MAX_BAD_WORDS, Words
from castiron.server.tokenizer import Tokenizer

MAX_BAD_WORD_CHARS = 256


def checked_bad_words(bad_words: Sequence[str] | None) -> tuple[str, ...]:
    """The field `bad_words` as a tuple. Raises RequestError for other things than words, too many or overlong ones."""
    words = () if bad_words is None else bad_words
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise RequestError("`bad_words` is not a list of words", "bad_words")
    if len(words) > MAX_BAD_WORDS // 2:  # each may have two forms
        raise RequestError(
            f"`bad_words` has {len(words)} entries, at most {MAX_BAD_WORDS // 2} are allowed", "bad_words"
        )
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"a bad word has {len(word)} characters, expected 1 to {MAX_BAD_WORD_CHARS}, not blank",
                "bad_words",
            )
    return tuple(words)


def bad_words_token_ids(bad_words: Sequence[str] | None, tokenizer: Tokenizer) -> Words:
    """Each word as it begins a text, and as it follows a space where that is another first token (as vLLM does).

    Raises RequestError as checked_bad_words does.
    """
    found: list[tuple[int, ...]] = []
    for word in checked_bad_words(bad_words):
        plain, spaced = (tuple(tokenizer.encode_plain(prefix + word.lstrip())) for prefix in ("", " "))
        found.append(plain)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return tuple(found)
