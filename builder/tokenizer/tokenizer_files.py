"""A checkpoint's tokenizer as engine members, with what serving must know about its tokens."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from castiron.builder.checkpoint.checkpoint import Checkpoint
from castiron.builder.tokenizer.gguf_bpe import build_bpe, pre_tokenization
from castiron.builder.tokenizer.gguf_sentencepiece import build_sentencepiece
from castiron.builder.tokenizer.gguf_vocabulary import read_vocabulary
from castiron.builder.tokenizer.huggingface_tokenizer import read_huggingface_tokenizer
from castiron.builder.tokenizer.tokenizer_facts import TokenizerFacts
from castiron.builder.tokenizer.tokenizer_json import tokenizer_json
from castiron.runtime.errors import CheckpointError

TOKENIZER_MEMBER = "tokenizer/tokenizer.json"
CONFIG_MEMBER = "tokenizer/tokenizer_config.json"
TEMPLATE_MEMBER = "tokenizer/chat_template.jinja"

# Added tokens that structure a prompt though they aren't marked special: turn, thinking and tool marks.
_STRUCTURAL = re.compile(
    r"<\|.+\|>|<\uff5c.+\uff5c>|\[/?[A-Z][A-Z_]*\]|\[gMASK\]|</?s>"
    r"|</?(think\w*|reasoning|tool\w*|function\w*|start_of_\w+|end_of_\w+|\w*turn\w*|sop|eop)\|?>"
)


@dataclass(frozen=True)
class TokenizerFiles:
    """Engine members of a tokenizer, and the facts the builder records in engine.json."""

    members: dict[str, bytes]  # engine member name -> content
    vocab_size: int  # highest token id + 1; the model's may be larger
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]  # temperature, top_p, …; {} unless the model asks to sample


def build_tokenizer(checkpoint: Checkpoint) -> TokenizerFiles:
    """The tokenizer of a checkpoint, from tokenizer.json or rebuilt from GGUF metadata.

    Raises CheckpointError when there is none, when it is damaged, or when its kind isn't known exactly.
    """
    facts = read_huggingface_tokenizer(checkpoint) if checkpoint.folder else _from_gguf(checkpoint)
    members = {TOKENIZER_MEMBER: facts.tokenizer_json, CONFIG_MEMBER: _config(facts)}
    if facts.chat_template:
        members[TEMPLATE_MEMBER] = facts.chat_template.encode()
    return TokenizerFiles(
        members=members,
        vocab_size=max(facts.tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=facts.eos_token_ids,
        generation_defaults=_generation_defaults(checkpoint),
    )


def _from_gguf(checkpoint: Checkpoint) -> TokenizerFacts:
    metadata = checkpoint.config
    vocabulary = read_vocabulary(checkpoint.name, metadata)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is not None and embedding.num_rows != len(vocabulary.tokens):
        raise vocabulary.fail(
            f"{len(vocabulary.tokens)} tokens, but token_embd.weight has {embedding.num_rows} rows"
        )
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = build_bpe(vocabulary, metadata)
        adds_bos = pre_tokenization(vocabulary, metadata).adds_bos
    elif kind == "llama":
        tokenizer = build_sentencepiece(vocabulary, metadata)
        adds_bos = True
    else:
        raise vocabulary.fail(
            f"tokenizer.ggml.model is {kind!r}, expected gpt2 or llama:"
            " build from the Hugging Face folder instead"
        )
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
    if add_bos and vocabulary.bos_token_id is None:
        raise vocabulary.fail(
            "a prompt should begin with a BOS token, but tokenizer.ggml.bos_token_id is missing"
        )
    return TokenizerFacts(
        tokenizer=tokenizer,
        tokenizer_json=tokenizer_json(tokenizer),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.eos_token_ids,
        pad_token_id=vocabulary.pad_token_id,
        add_bos_token=add_bos,
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        model_max_length=metadata.get(f"{checkpoint.architecture}.context_length"),
    )


def _config(facts: TokenizerFacts) -> bytes:
    """tokenizer_config.json of the engine: what serving needs, nothing else."""
    added = sorted(facts.tokenizer.get_added_tokens_decoder().items())
    content = {
        "bos_token": _text(facts.tokenizer, facts.bos_token_id),
        "bos_token_id": facts.bos_token_id,
        "eos_token": _text(facts.tokenizer, facts.eos_token_ids[0] if facts.eos_token_ids else None),
        "eos_token_ids": facts.eos_token_ids,
        "pad_token": _text(facts.tokenizer, facts.pad_token_id),
        "pad_token_id": facts.pad_token_id,
        "add_bos_token": facts.add_bos_token,
        "add_eos_token": facts.add_eos_token,
        "model_max_length": facts.model_max_length,
        "added_tokens": [
            {
                "id": token_id,
                "content": token.content,
                "special": token.special,
                "structural": token.special or _STRUCTURAL.fullmatch(token.content) is not None,
            }
            for token_id, token in added
        ],
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _text(tokenizer: Tokenizer, token_id: int | None) -> str | None:
    return None if token_id is None else tokenizer.id_to_token(token_id)


def _generation_defaults(checkpoint: Checkpoint) -> dict[str, float]:
    config: dict[str, Any] = checkpoint.generation_config
    if config.get("do_sample") is not True:
        return {}
    defaults = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**31:
            raise CheckpointError(
                f"generation_config.json: {name} is {value!r}, expected a number that isn't negative"
            )
        defaults[name] = float(value)
    return defaults
