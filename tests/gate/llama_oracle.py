"""The oracle for real models: transformers in float32 on the dequantized GGUF, loaded without our own code."""

from pathlib import Path

import numpy as np
import torch

GGUF_LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _split_half(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama-arch GGUF's row order (adjacent rope pairs): rows of a head back to two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def load_llama_gguf(path: Path) -> torch.nn.Module:
    """A transformers LlamaForCausalLM in float32 with the weights of a llama-arch GGUF file."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(path)

    def field(name: str) -> int | float:
        return reader.fields[f"llama.{name}"].contents()

    config = LlamaConfig(
        vocab_size=next(t for t in reader.tensors if t.name == "token_embd.weight").shape[1].item(),
        hidden_size=field("embedding_length"),
        intermediate_size=field("feed_forward_length"),
        num_hidden_layers=field("block_count"),
        num_attention_heads=field("attention.head_count"),
        num_key_value_heads=field("attention.head_count_kv"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=field("context_length"),
        rope_parameters={"rope_type": "default", "rope_theta": field("rope.freq_base")},
        tie_word_embeddings=True,
    )
    state = {}
    for tensor in reader.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if parts[2] == "attn_q" else config.num_key_value_heads
                weight = _split_half(weight, heads)
            name = f"model.layers.{parts[1]}.{GGUF_LINEARS[parts[2]]}.weight"
        else:
            name = {
                "token_embd.weight": "model.embed_tokens.weight",
                "output_norm.weight": "model.norm.weight",
            }[tensor.name]
        state[name] = torch.from_numpy(np.ascontiguousarray(weight))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers were made on meta
    return model.eval()


@torch.no_grad()
def reference_logits(model: torch.nn.Module, token_ids: list[int]) -> np.ndarray:
    """Logits at every position of one sequence, float32 [len(token_ids), vocab_size]."""
    return model(torch.tensor([token_ids])).logits[0].numpy()


def greedy_after(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> list[int]:
    """The model's choice (ties to the lowest id) of each token of `answer`, given the prompt and those before it.

    Up to the first that differs from `answer`, that is the model's own greedy answer.
    """
    logits = reference_logits(model, prompt + answer[:-1])
    return logits[len(prompt) - 1 :].argmax(axis=1).tolist()
