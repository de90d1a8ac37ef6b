"""Binding a checkpoint: ties, missing and surplus tensors, wrong shapes, unknown architectures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.model_parameters import BoundModel, bind_model
from castiron.models.rope import inverse_frequencies
from castiron.runtime.errors import CheckpointError

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def bind(folder: Path, change: Change | None = None) -> BoundModel:
    """Bind the checkpoint after changing its tensors and config in place."""
    if change is not None:
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(str(folder)) as checkpoint:
        return bind_model(checkpoint)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_every_parameter_names_its_tensor_and_scheme(tmp_path: Path) -> None:
    model = bind(save_tiny_checkpoint(tmp_path, dtype="bf16", attention_bias=True))
    q = model.parameters["layers.1.q.weight"]
    assert (q.parts[0].tensor, q.scheme) == ("model.layers.1.self_attn.q_proj.weight", "bf16")
    assert q.source_scheme == "bf16" and q.shape == (64, 64) and q.parts[0].row_stop == 64
    norm = model.parameters["final_norm.weight"]
    assert (norm.scheme, norm.source_scheme) == ("f32", "bf16")
    assert model.parameters["inv_freq"].constant is not None
    assert model.warnings == ()


def test_a_tied_model_has_no_lm_head(tmp_path: Path) -> None:
    model = bind(save_tiny_checkpoint(tmp_path, tied=True))
    assert HEAD not in model.parameters and model.config.tie_word_embeddings


def test_tied_with_an_equal_lm_head_ties_and_warns(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    model = bind(save_tiny_checkpoint(tmp_path, tied=True), add_head)
    assert HEAD not in model.parameters
    assert len(model.warnings) == 1 and HEAD in model.warnings[0]


def test_tied_with_another_lm_head_is_an_error(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[HEAD][-1, -1] += 1

    with pytest.raises(CheckpointError, match=r"tie_word_embeddings = true, but lm_head\.weight differs"):
        bind(save_tiny_checkpoint(tmp_path, tied=True), add_head)


def test_untied_without_lm_head_names_it_and_the_tie(tmp_path: Path) -> None:
    def drop_head(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        del tensors[HEAD]

    with pytest.raises(CheckpointError, match=r"no tensor lm_head\.weight.*tie_word_embeddings"):
        bind(save_tiny_checkpoint(tmp_path), drop_head)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t, c: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"no tensor model\.layers\.1\.mlp\.up_proj",
        ),
        (lambda t, c: t.update({"model.extra": torch.ones(3)}), r"tensor model\.extra \(1 in all\)"),
        (
            lambda t, c: t.update({"model.norm.weight": torch.ones(63)}),
            r"model\.norm\.weight has shape \[63\], expected \[64\]",
        ),
        (lambda t, c: c.update(num_hidden_layers=2), r"tensor model\.layers\.2\."),
        (lambda t, c: c.update(num_hidden_layers=4), r"no tensor model\.layers\.3\."),
        (lambda t, c: c.update(attention_bias=True), r"no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        (
            lambda t, c: c.update(architectures=["GPT9ForCausalLM"]),
            r"GPT9ForCausalLM isn't supported, expected one of LlamaForCausalLM, Qwen2ForCausalLM",
        ),
        (lambda t, c: c.update(hidden_act="gelu"), "hidden_act = 'gelu'"),
        (lambda t, c: c.update(logit_softcapping=30.0), "logit_softcapping"),
    ],
)
def test_a_contradiction_is_named(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        bind(save_tiny_checkpoint(tmp_path), change)


def test_saved_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    def add_buffer(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    assert "inv_freq" in bind(save_tiny_checkpoint(tmp_path), add_buffer).parameters


def test_gguf_llama_rows_are_unpermuted_and_qwen2_rows_are_not(tmp_path: Path) -> None:
    for architecture, transform in (("llama", "unpermute_rope"), ("qwen2", "")):
        folder = save_tiny_checkpoint(tmp_path / architecture, architecture)
        model = bind(write_tiny_gguf(folder, tmp_path / f"{architecture}.gguf"))
        for name in ("q", "k"):
            part = model.parameters[f"layers.0.{name}.weight"].parts[0]
            assert (part.tensor, part.transform) == (f"blk.0.attn_{name}.weight", transform)
            assert part.head_dim == (16 if transform else 0)
        assert model.parameters["layers.0.v.weight"].parts[0].transform == ""
        assert model.parameters["layers.0.v.weight"].scheme == "q8_0"


def test_gguf_ties_by_absence(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "hf")
    assert HEAD in bind(write_tiny_gguf(folder, tmp_path / "a.gguf")).parameters
    tied = bind(write_tiny_gguf(folder, tmp_path / "b.gguf", skip=("output.weight",)))
    assert HEAD not in tied.parameters and tied.config.tie_word_embeddings


def test_gguf_llama3_rope_divisors_equal_the_formula(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "hf", rope="llama3", rope_theta=10000.0, head_dim=32)
    from_config, from_tensor = bind(folder), bind(write_tiny_gguf(folder, tmp_path / "a.gguf"))
    expected = torch.from_numpy(inverse_frequencies(from_config.config.rope, 32))
    constant = from_tensor.parameters["inv_freq"].constant
    assert constant is not None and from_tensor.config.rope.divisors is not None
    torch.testing.assert_close(torch.from_numpy(constant), expected, rtol=1e-6, atol=0)
