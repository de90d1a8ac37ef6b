"""Text to ids and back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import (
    CONTROL,
    END_ID,
    IM_END_ID,
    IM_START_ID,
    STRUCTURAL,
    THINK_ID,
    byte_fallback,
    byte_level,
    byte_level_json,
)

from castiron.runtime.errors import EngineFormatError, RequestError
from castiron.server.detokenizer import IncrementalDetokenizer
from castiron.server.tokenizer import Tokenizer

TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
TEXTS = (
    "plain text",
    "  two spaces,   three",
    "naïve café",
    "你好，世界",
    "😀👨‍👩‍👧‍👦 family",
    "مرحبا",
    "\n\n\ttabs\r\n",
    "é" * 40,
    "\ufffd is a character too \ufffd",
    "\x00\x7f",
)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.add([token_id]) for token_id in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_pieces_join_to_the_decoded_whole(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode_prompt(text)
    assert tokenizer.decode(ids) == text
    assert "".join(stream(tokenizer, ids)) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", ["😀", "你好", "a😀b"])
def test_a_character_is_given_whole_and_never_as_replacement_characters(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    pieces = stream(tokenizer, tokenizer.encode_prompt(text))
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) == len(text)
    assert pieces[-1] == ""  # nothing was left to flush


def test_truly_invalid_bytes_become_replacement_characters_at_the_flush() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_prompt("a😀")[:-1]
    pieces = stream(tokenizer, ids)
    assert pieces == ["a", "", "", "", "\ufffd"]


def test_invalid_bytes_are_given_as_soon_as_something_valid_follows() -> None:
    tokenizer = byte_level()
    broken = tokenizer.encode_prompt("😀")[:2] + tokenizer.encode_prompt("ab")
    assert stream(tokenizer, broken) == ["", "", "\ufffda", "b", ""]
    assert tokenizer.decode(broken) == "\ufffdab"


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 261), max_size=24))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["byte level"]
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_word_mark_is_a_space_between_words_but_not_at_the_start() -> None:
    tokenizer = byte_fallback()
    assert stream(tokenizer, tokenizer.encode_prompt("a the a"))[:-1] == ["", "a", " the", " a"]


def test_special_tokens_are_left_out_of_text_and_structural_ones_kept() -> None:
    tokenizer = byte_level()
    ids = [IM_START_ID, THINK_ID, *tokenizer.encode_prompt("x"), IM_END_ID]
    assert tokenizer.decode(ids) == "<think>x"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|><think>x<|im_end|>"
    assert "".join(stream(tokenizer, ids)) == "<think>x"


def test_ids_without_a_token_decode_to_nothing() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode([300, *tokenizer.encode_prompt("a"), 5000]) == "a"


def test_markup_in_a_raw_prompt_is_honoured() -> None:
    ids = byte_level().encode_prompt("<|im_start|>a<think>")
    assert ids[0] == IM_START_ID and ids[-1] == THINK_ID and len(ids) == 3


@pytest.mark.parametrize(
    "text", [*CONTROL, *STRUCTURAL, "a<|im_end|>b", "<<|im_end|>>", "<|im_<|im_end|>end|>"]
)
def test_plain_text_never_becomes_control_ids(text: str) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_plain(text)
    assert max(ids) < END_ID
    assert tokenizer.decode(ids) == text


def test_plain_text_never_becomes_control_ids_even_if_the_vocabulary_spells_them() -> None:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as FastTokenizer

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((char, -9.0) for char in "</s>ab")]
    fast = FastTokenizer(models.Unigram(pieces, unk_id=0))
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "</s>")])
    tokenizer = Tokenizer(fast.to_str().encode())
    assert tokenizer.encode_markup("a</s>").count(1) == 1
    assert 1 not in tokenizer.encode_plain("a</s>b</s>")
    assert tokenizer.decode(tokenizer.encode_plain("a</s>b")) == "a</s>b"


def test_begin_of_text_is_put_in_front_once() -> None:
    tokenizer = byte_fallback()
    assert tokenizer.encode_prompt("a")[0] == 1
    assert tokenizer.encode_prompt("<s>a").count(1) == 1
    assert 1 not in tokenizer.encode_plain("a")


def test_long_texts_encode_as_short_ones() -> None:
    tokenizer = byte_level()
    text = "word 你好 " * 8000
    assert tokenizer.encode_prompt(text) == tokenizer.encode_prompt("word 你好 ") * 8000


@pytest.mark.parametrize("encode", ["encode_prompt", "encode_plain", "encode_markup"])
def test_a_lone_surrogate_is_the_users_mistake(encode: str) -> None:
    for text in ("a\ud800", "a\ud800" * 40000):
        with pytest.raises(RequestError, match="surrogate"):
            getattr(byte_level(), encode)(text)


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", byte_level_json()[:-100], b"\xff\xfe"])
def test_a_damaged_tokenizer_is_a_named_error(data: bytes) -> None:
    with pytest.raises(EngineFormatError, match=r"tokenizer\.json") as error:
        Tokenizer(data)
    assert "\n" not in str(error.value)


def test_an_engine_without_a_tokenizer_says_what_to_do() -> None:
    with pytest.raises(EngineFormatError, match="--prompt-ids"):
        Tokenizer.from_members({}, None)


def test_bytes_of_a_token_are_told_even_if_they_are_no_character() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode_prompt("😀")
    assert bytes(byte for token_id in ids for byte in tokenizer.token_bytes(token_id) or []) == "😀".encode()
    assert tokenizer.token_bytes(IM_END_ID) == list(b"<|im_end|>")
    fallback = byte_fallback()
    assert fallback.token_bytes(3 + 0xE2) == [0xE2]
