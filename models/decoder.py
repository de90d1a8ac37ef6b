"""The decoder all families share: embedding, layers of attention and gated MLP, final norm, logit rows,
lm_head.

Written in the op vocabulary (ops.py) for tracing on meta tensors. Module parameters carry the names of
ParameterSpec.
"""

import torch
from torch import Tensor, nn

from castiron.models import ops
from castiron.models.config import ModelConfig
from castiron.models.family import ParameterSpec

INV_FREQ = "inv_freq"  # the parameter computed from the config
EMBEDDING = "embedding.weight"
LM_HEAD = "lm_head.weight"

# Rotary frequencies that old checkpoints saved as buffers; recomputed from the config.
IGNORABLE_TENSORS = (
    r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"(model\.)?rotary_emb\.inv_freq",
)


def decoder_parameter_specs(config: ModelConfig, *, gguf_permuted: bool) -> tuple[ParameterSpec, ...]:
    """All parameters the decoder reads from a checkpoint, in execution order.

    gguf_permuted: the family's GGUF files store q and k rows for adjacent-pair rope.
    """
    hidden, heads, kv_heads, head_dim = (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
    )
    specs = [
        ParameterSpec(
            EMBEDDING, (config.vocab_size, hidden), "model.embed_tokens.weight", "token_embd.weight"
        )
    ]
    # ours, Hugging Face's, GGUF's, rows, columns, has a bias, permuted in GGUF
    linears = (
        ("q", "self_attn.q_proj", "attn_q", heads * head_dim, hidden, config.qkv_bias, gguf_permuted),
        ("k", "self_attn.k_proj", "attn_k", kv_heads * head_dim, hidden, config.qkv_bias, gguf_permuted),
        ("v", "self_attn.v_proj", "attn_v", kv_heads * head_dim, hidden, config.qkv_bias, False),
        ("o", "self_attn.o_proj", "attn_output", hidden, heads * head_dim, config.o_bias, False),
        ("gate", "mlp.gate_proj", "ffn_gate", config.intermediate_size, hidden, config.mlp_bias, False),
        ("up", "mlp.up_proj", "ffn_up", config.intermediate_size, hidden, config.mlp_bias, False),
        ("down", "mlp.down_proj", "ffn_down", hidden, config.intermediate_size, config.mlp_bias, False),
    )
    norms = (
        ("attention_norm", "input_layernorm", "attn_norm"),
        ("mlp_norm", "post_attention_layernorm", "ffn_norm"),
    )
    for i in range(config.num_layers):
        for ours, hf, gguf in norms:
            specs.append(
                ParameterSpec(
                    f"layers.{i}.{ours}.weight",
                    (hidden,),
                    f"model.layers.{i}.{hf}.weight",
                    f"blk.{i}.{gguf}.weight",
                )
            )
        for ours, hf, gguf, rows, columns, has_bias, permuted in linears:
            for kind, shape in (("weight", (rows, columns)), ("bias", (rows,))):
                if kind == "bias" and not has_bias:
                    continue
                specs.append(
                    ParameterSpec(
                        f"layers.{i}.{ours}.{kind}",
                        shape,
                        f"model.layers.{i}.{hf}.{kind}",
                        f"blk.{i}.{gguf}.{kind}",
                        gguf_transform="unpermute_rope" if permuted else "",
                        head_dim=head_dim if permuted else 0,
                    )
                )
    specs.append(ParameterSpec("final_norm.weight", (hidden,), "model.norm.weight", "output_norm.weight"))
    if not config.tie_word_embeddings:
        specs.append(ParameterSpec(LM_HEAD, (config.vocab_size, hidden), "lm_head.weight", "output.weight"))
    return tuple(specs)


class Linear(nn.Module):
    """y = x . weight^T (+ bias)."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class Table(nn.Module):
    """A weight that isn't a linear's: the embedding, or one shared with lm_head."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream x f32[T, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.attention_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.q = Linear(self.num_heads * self.head_dim, hidden, config.qkv_bias)
        self.k = Linear(self.num_kv_heads * self.head_dim, hidden, config.qkv_bias)
        self.v = Linear(self.num_kv_heads * self.head_dim, hidden, config.qkv_bias)
        self.o = Linear(hidden, self.num_heads * self.head_dim, config.o_bias)
        self.mlp_norm = RmsNorm(hidden, config.rms_norm_eps)
        self.gate = Linear(inner, hidden, config.mlp_bias)
        self.up = Linear(inner, hidden, config.mlp_bias)
        self.down = Linear(hidden, inner, config.mlp_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, step: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """x, and the layer's cache with this step's keys and values."""
        normed = self.attention_norm(x)
        q = self._split_heads(self.q(normed), self.num_heads)
        k = self._split_heads(self.k(normed), self.num_kv_heads)
        v = self._split_heads(self.v(normed), self.num_kv_heads)
        q, k = ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)
        cache = ops.kv_write(cache, k, v, step["slot_mapping.kv"])
        attended = ops.paged_attention(
            q, cache, step["block_tables.kv"], step["seq_lens"], step["query_starts"], self.head_dim**-0.5
        )
        x = x + self.o(attended.reshape(attended.shape[0], self.num_heads * self.head_dim))
        normed = self.mlp_norm(x)
        return x + self.down(ops.silu(self.gate(normed)) * self.up(normed)), cache

    def _split_heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.reshape(x.shape[0], num_heads, self.head_dim)


class Decoder(nn.Module):
    """forward(step fields by name, last_token i32[R], caches) -> (logits f32[L, vocab], caches).

    Layers of one kind (`layer_kinds`) differ in nothing but their parameters and caches, so that the builder
    traces one of them. x is a layer's first argument and first result; nothing else goes from layer to layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rope_scaling = config.rope.attention_scaling
        self.inv_freq = nn.Parameter(torch.empty(config.head_dim // 2))
        self.embedding = Table(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.layer_kinds = ("attention",) * config.num_layers
        self.final_norm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Table(config.vocab_size, config.hidden_size)

    def forward(
        self, step: dict[str, Tensor], last_token: Tensor, caches: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        x = ops.embedding(step["token_ids"], last_token, self.embedding.weight)
        cos, sin = ops.rope_cos_sin(step["positions"], self.inv_freq, self.rope_scaling)
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, cos, sin, cache, step)
            written.append(cache)
        x = ops.gather_rows(self.final_norm(x), step["logit_rows"])
        head = self.embedding if self.lm_head is None else self.lm_head
        return ops.linear(x, head.weight), written
