"""A model's configuration as castiron uses it, and the strict reading of Hugging Face config fields.

A field that is not read, not known to be harmless and not null is an error: it may change the math.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castiron.models.rope import RopeConfig, parse_rope
from castiron.runtime.errors import CheckpointError

_MAX_DIMENSION = 1 << 31  # larger sizes are damage, not models


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer with grouped-query attention and a gated MLP."""

    family: str  # "llama", "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int  # tokens the model was made for
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


# Fields that don't change what a forward pass computes: bookkeeping, training, generation defaults that older
# transformers versions wrote into config.json, and other tools' notes.
HARMLESS_FIELDS = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "hidden_dropout_prob", "id2label",
    "initializer_range", "is_llama_config", "label2id", "length_penalty", "max_length", "min_length",
    "min_p", "model_type", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values",
    "repetition_penalty", "resid_pdrop", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers.js_config", "transformers_version", "typical_p",
    "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
))  # fmt: skip

# Fields that would change the math at any other value than these.
_FIXED_FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, []),
    "use_mrope": (False,),
    "partial_rotary_factor": (1.0, None),
}


class ConfigReader:
    """Reads fields of a config dict and remembers which, so that `finish` can refuse the rest."""

    def __init__(self, family: str, raw: Mapping[str, Any]) -> None:
        self.family = family
        self._raw = raw
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The field's value as it is; `default` if absent or null."""
        self._read.add(name)
        value = self._raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer. Raises CheckpointError if it is missing (without a default) or out of range."""
        value = self.get(name, default)
        if value is None:
            raise CheckpointError(f"config has no {name}, which a {self.family} model needs")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_DIMENSION:
            raise CheckpointError(f"config says {name} = {value!r}, expected a positive integer below 2^31")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive number. Raises CheckpointError otherwise."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise CheckpointError(f"config says {name} = {value!r}, expected a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean. Raises CheckpointError otherwise."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"config says {name} = {value!r}, expected true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A token id, a list of them, or nothing. Raises CheckpointError for ids outside the vocabulary."""
        value = self.get(name, [])
        ids = value if isinstance(value, list | tuple) else [value]
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise CheckpointError(
                    f"config says {name} = {value!r}, expected ids below vocab_size = {vocab_size}"
                )
        return tuple(ids)

    def finish(self) -> None:
        """Raise CheckpointError for the first field that may change the math and that nobody has read."""
        for name, value in self._raw.items():
            if name in self._read or name in HARMLESS_FIELDS or value is None:
                continue
            allowed = _FIXED_FIELDS.get(name)
            if allowed is None:
                raise CheckpointError(
                    f"config field {name} = {_short(value)} is unknown for {self.family} and may change the"
                    " math: remove it from config.json if you know that it doesn't"
                )
            if value not in allowed:
                raise CheckpointError(
                    f"config says {name} = {_short(value)}, expected {allowed[0]!r}: castiron's {self.family}"
                    " knows no other"
                )


def parse_decoder_config(
    reader: ConfigReader, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool
) -> ModelConfig:
    """The fields all families share; `reader` has already read the family's own. Raises CheckpointError."""
    vocab_size = reader.integer("vocab_size")
    hidden_size = reader.integer("hidden_size")
    num_heads = reader.integer("num_attention_heads")
    num_kv_heads = reader.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config says num_attention_heads = {num_heads}, expected a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    head_dim = reader.integer("head_dim", hidden_size // num_heads or 1)
    if reader.get("head_dim") is None and hidden_size % num_heads:
        raise CheckpointError(
            f"config says hidden_size = {hidden_size}, expected a multiple of num_attention_heads ="
            f" {num_heads} (or an explicit head_dim)"
        )
    if head_dim % 2:
        raise CheckpointError(
            f"head_dim is {head_dim}, expected an even number (rotary embedding turns pairs)"
        )
    max_positions = reader.integer("max_position_embeddings")
    rope = parse_rope(
        rope_parameters=reader.get("rope_parameters"),
        rope_scaling=reader.get("rope_scaling"),
        rope_theta=reader.get("rope_theta"),
        max_position_embeddings=max_positions,
        original_max_position_embeddings=reader.get("original_max_position_embeddings"),
    )
    bos_token_ids = reader.token_ids("bos_token_id", vocab_size)
    config = ModelConfig(
        family=reader.family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=max_positions,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
    )
    reader.finish()
    return config


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
