"""What both sources of tokenizers, Hugging Face folders and GGUF files, must tell."""

from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer and how its model uses it."""

    tokenizer: Tokenizer
    tokenizer_json: bytes
    chat_template: str  # "" = none
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    add_bos_token: bool  # a prompt begins with BOS
    add_eos_token: bool  # a prompt ends with EOS
    model_max_length: int | None
