"""Traced models against transformers in float32, on checkpoints where every tensor is random."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_steps import make_tokens, run_in_chunks, trace_checkpoint
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

torch.set_num_threads(1)
BOUND = 1e-4  # max |logit difference|; logits spread by about 2
LENGTHS = (1, 7, 64, 300)

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied_one_kv_head": {"tied": True, "num_kv_heads": 1, "seed": 1},
    "llama_biases_wide_heads": {"attention_bias": True, "mlp_bias": True, "head_dim": 24, "seed": 2},
    "llama_all_heads_own_kv_bf16": {"num_kv_heads": 4, "dtype": "bf16", "seed": 3},
    "llama_linear_rope": {"rope": "linear"},
    "llama_llama3_rope": {"rope": "llama3", "rope_theta": 10000.0, "head_dim": 32},
    "llama_yarn_rope": {"rope": "yarn", "rope_theta": 10000.0, "head_dim": 32},
    "qwen2": {"architecture": "qwen2", "seed": 4},
    "qwen2_tied_sharded_f16": {"architecture": "qwen2", "tied": True, "sharded": True, "dtype": "f16"},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp(request.param), **MODELS[request.param])
    program, _, load = trace_checkpoint(folder)
    oracle = load_reference(folder)
    return program, load, cache(lambda n: reference_logits(oracle, make_tokens(n)))


@pytest.mark.parametrize("length", LENGTHS)
def test_a_prompt_alone_matches(model: Any, length: int) -> None:
    program, load, reference = model
    (logits,) = run_in_chunks(program, load, [make_tokens(length)], chunk=length)
    assert reference(length).std() >= 1, "the checkpoint doesn't show mistakes"
    assert (logits - reference(length)).abs().max() <= BOUND


@pytest.mark.parametrize("chunk", [17, 300])
def test_ragged_batches_match_chunked_or_not(model: Any, chunk: int) -> None:
    program, load, reference = model
    results = run_in_chunks(program, load, [make_tokens(n) for n in LENGTHS], chunk)
    for length, logits in zip(LENGTHS, results, strict=True):
        assert (logits - reference(length)).abs().max() <= BOUND


def test_one_token_at_a_time_matches(model: Any) -> None:
    program, load, reference = model
    (logits,) = run_in_chunks(program, load, [make_tokens(64)], chunk=1)
    assert (logits - reference(64)).abs().max() <= BOUND


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_bias": True, "num_kv_heads": 1, "seed": 5},
        {"tied": True, "rope": "llama3", "rope_theta": 10000.0, "head_dim": 32},
        {"architecture": "qwen2", "seed": 6},
    ],
    ids=["llama_permuted", "llama_biases_permuted", "llama3_rope_as_tensor", "qwen2_not_permuted"],
)
def test_gguf_means_the_same_model(tmp_path: Path, options: dict[str, Any]) -> None:
    folder = save_tiny_checkpoint(tmp_path / "hf", **options)
    program, bound, load = trace_checkpoint(write_tiny_gguf(folder, tmp_path / "tiny.gguf", "f32"))
    (logits,) = run_in_chunks(program, load, [make_tokens(64)], chunk=64)
    expected = reference_logits(load_reference(folder), make_tokens(64))
    assert bound.config.eos_token_ids == (256,)
    assert (logits - expected).abs().max() <= BOUND
