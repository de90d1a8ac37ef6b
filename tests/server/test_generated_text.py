"""Output tokens to text: ends, stop strings, held-back text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import END_ID, byte_level

from castiron.runtime.errors import RequestError
from castiron.runtime.messages import RequestOutput, TokenLogprobs
from castiron.server.generated_text import GeneratedText, TextDelta
from castiron.server.stop_strings import MAX_STOP_STRINGS, StopStringMatcher, checked_stop_strings

TOKENIZER = byte_level()


def feed(generated: GeneratedText, text: str, finish: str | None = "length") -> list[TextDelta]:
    """One output a token, as long as the text isn't complete."""
    deltas = []
    ids = TOKENIZER.encode_plain(text)
    for index, token_id in enumerate(ids):
        reason = finish if index == len(ids) - 1 else None
        deltas.append(generated.add(RequestOutput("r", (token_id,), finish_reason=reason)))
        if generated.finish_reason is not None:
            break
    return deltas


def test_the_end_token_is_counted_but_not_shown() -> None:
    generated = GeneratedText(TOKENIZER)
    feed(generated, "hi", finish=None)
    delta = generated.add(RequestOutput("r", (END_ID,), finish_reason="stop", stop_token_id=END_ID))
    assert (delta.text, delta.finish_reason) == ("", "stop")
    assert generated.text == "hi" and len(generated.token_ids) == 3


def test_a_stop_token_that_is_ordinary_text_is_not_shown_either() -> None:
    generated = GeneratedText(TOKENIZER)
    (dot,) = TOKENIZER.encode_plain(".")
    feed(generated, "hi", finish=None)
    generated.add(RequestOutput("r", (dot,), finish_reason="stop", stop_token_id=dot))
    assert generated.text == "hi"


def test_a_stop_string_is_found_across_tokens_and_cut_off() -> None:
    generated = GeneratedText(TOKENIZER, ("END",))
    deltas = feed(generated, "the END of it")
    assert generated.text == "the " and generated.finish_reason == "stop"
    assert "".join(delta.text for delta in deltas) == "the "
    assert len(generated.token_ids) == len("the END")


def test_a_stop_string_may_be_made_of_several_characters_of_bytes() -> None:
    generated = GeneratedText(TOKENIZER, ("好😀",))
    feed(generated, "你好😀!")
    assert generated.text == "你" and generated.finish_reason == "stop"


def test_what_only_began_like_a_stop_string_is_given_in_the_end() -> None:
    generated = GeneratedText(TOKENIZER, ("ENDING",))
    deltas = feed(generated, "the EN")
    assert generated.text == "the EN" and generated.finish_reason == "length"
    assert deltas[-1].text == "EN"


def test_an_unfinished_character_is_flushed_at_the_end() -> None:
    generated = GeneratedText(TOKENIZER)
    first, second, *_ = TOKENIZER.encode_plain("😀")
    assert generated.add(RequestOutput("r", (first,))).text == ""
    assert generated.add(RequestOutput("r", (second,), finish_reason="length")).text == "\ufffd"


def test_logprobs_and_offsets_go_with_their_tokens() -> None:
    logprob = TokenLogprobs(-1.0, 1, (), ())
    ids = tuple(TOKENIZER.encode_plain("aéb"))
    delta = GeneratedText(TOKENIZER, ("b",)).add(
        RequestOutput("r", ids, (logprob,) * 4, finish_reason="length")
    )
    assert delta.text == "aé" and delta.finish_reason == "stop"
    assert delta.text_offsets == (0, 1, 1, 2)
    assert len(delta.logprobs) == len(delta.token_ids) == 4


@given(
    st.text(alphabet="abE", max_size=30),
    st.lists(st.text(alphabet="abE", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streamed_matching_equals_searching_the_whole(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    pieces = [matcher.add(char) for char in text]
    if matcher.found is None:
        pieces.append(matcher.flush())
        assert not any(stop in text for stop in stops)
        assert "".join(pieces) == text
    else:
        # the one whose last character comes first
        end = min(text.find(stop) + len(stop) for stop in stops if stop in text)
        given = "".join(pieces)
        assert text.startswith(given) and text[len(given) :].startswith(matcher.found)
        assert len(given) + len(matcher.found) == end


def test_stop_strings_have_limits_checked_at_once() -> None:
    assert checked_stop_strings(None) == ()
    assert checked_stop_strings("a") == ("a",)
    for wrong in (["x"] * (MAX_STOP_STRINGS + 1), ["x"] * 500_000, "", ["a", ""], "x" * 5000):
        with pytest.raises(RequestError) as error:
            checked_stop_strings(wrong)
        assert error.value.param == "stop"
