"""Small tokenizers of the common kinds, and templates in the style of well-known models."""

import json

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from castiron.server.tokenizer import Tokenizer, TokenizerConfig

CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")  # special
STRUCTURAL = ("<think>", "</think>", "<tool_call>")  # added, not special
END_ID, IM_START_ID, IM_END_ID, THINK_ID, END_THINK_ID, TOOL_CALL_ID = range(256, 262)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# cuts the thoughts out of past answers, as Qwen3's template does
THINKING = (
    "{%- for message in messages %}{%- set content = message.content %}"
    "{%- if message.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)
# trims contents, and makes its markup out of the role
TRIMMING = (
    "{% for message in messages %}<|{{ 'im_start' }}|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{% endfor %}"
)


def byte_level_json() -> bytes:
    """tokenizer.json of a GPT-2 style tokenizer: 256 bytes, then the control and structural tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = FastTokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    fast.add_tokens([AddedToken(text, special=False, normalized=False) for text in STRUCTURAL])
    return fast.to_str().encode()


def byte_level() -> Tokenizer:
    return Tokenizer(
        byte_level_json(), TokenizerConfig(bos_token="<|im_start|>", eos_token="<|im_end|>"), None
    )


def byte_fallback() -> Tokenizer:
    """A Llama 2 style tokenizer: word marks, bytes as <0xNN>, a leading space that decoding strips."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "▁a", "▁the", "th", "▁t", "he"]:
        vocab.setdefault(piece, len(vocab))
    merges = [("▁", "t"), ("▁", "a"), ("h", "e"), ("t", "h"), ("▁t", "he")]
    fast = FastTokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    )
    config = TokenizerConfig(bos_token="<s>", eos_token="</s>", add_bos_token=True)
    return Tokenizer(fast.to_str().encode(), config, 1)


def members(template: str | None = CHATML) -> dict[str, bytes]:
    """Engine-file members of the byte-level tokenizer."""
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    result = {"tokenizer.json": byte_level_json(), "tokenizer_config.json": json.dumps(config).encode()}
    if template is not None:
        result["chat_template.jinja"] = template.encode()
    return result
