"""Tracing: symbols, names, states and what it refuses."""

from pathlib import Path

import onnx
import pytest
import torch
from paged_steps import trace_checkpoint
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder import graph as g
from castiron.builder.dims import Affine
from castiron.builder.graph import Program
from castiron.builder.interpreter import run
from castiron.builder.trace import TraceOptions, trace_forward, trace_sampler
from castiron.builder.verify_graph import verify_graph
from castiron.models.config import ModelConfig
from castiron.models.decoder import Decoder, Layer
from castiron.models.registry import FAMILIES
from castiron.runtime.errors import WorkFailedError

torch.set_num_threads(1)
T, S, L = Affine("num_tokens"), Affine("num_seqs"), Affine("num_logits")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return trace_checkpoint(save_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))[0]


def test_step_inputs_are_the_step_abi_fields_with_symbolic_counts(program: Program) -> None:
    shapes = {g.name_of(v): g.shape_of(v) for v in program.inputs_of_kind("step")}
    assert shapes == {
        "token_ids": (T,),
        "positions": (T,),
        "query_starts": (Affine("num_seqs", 1, 1),),
        "seq_lens": (S,),
        "logit_rows": (L,),
        "slot_mapping.kv": (T,),
        "block_tables.kv": (S, 24),
    }
    assert [g.name_of(v) for v in program.inputs_of_kind("rows")] == ["last_token"]
    assert [g.name_of(v) for v in program.graph.outputs] == ["logits", *(f"cache_out.{i}" for i in range(3))]
    assert g.shape_of(program.graph.outputs[0]) == (L, 307)


def test_caches_are_states_of_the_kv_group(program: Program) -> None:
    assert [s.name for s in program.states] == ["cache.0", "cache.1", "cache.2"]
    assert program.states[1].output == "cache_out.1" and program.states[1].group == "kv"
    assert program.states[0].shape == (Affine("num_blocks"), 2, 2, 16, 16)
    assert [g.shape_of(v) for v in program.inputs_of_kind("cache")] == [program.states[0].shape] * 3


def test_parameters_are_inputs_with_recipes_and_no_data(program: Program, tmp_path: Path) -> None:
    verify_graph(program, "traced")
    program.save(tmp_path / "graph.onnx")
    model = onnx.load(tmp_path / "graph.onnx")
    assert {o.domain for o in model.opset_import} == {"", "castiron"}
    assert all(t.name.startswith("const.") for t in model.graph.initializer)
    parameters = {
        v.name
        for v in model.graph.input
        if any(e.key == "castiron.kind" and e.value == "parameter" for e in v.metadata_props)
    }
    assert parameters == set(program.parameters)
    assert (tmp_path / "graph.onnx").stat().st_size < 100_000


def test_samplers_trace_to_one_op() -> None:
    for variant in ("greedy", "random"):
        sampler = trace_sampler(variant, 307)
        verify_graph(sampler, "traced")
        assert [n.op_type for n in sampler.graph] == [f"sample_{variant}"]
        assert [g.name_of(v) for v in sampler.graph.outputs] == [
            "sampled_token_ids",
            "sampled_logprobs",
            "top_token_ids",
            "top_logprobs",
            "last_token_out",
        ]
        assert sampler.states[0].name == "last_token"


def test_a_traced_sampler_updates_last_token() -> None:
    logits = torch.zeros(2, 11)
    logits[0, 4], logits[1, 9] = 3.0, 3.0
    inputs = {
        "logits": logits,
        "sample_rows": torch.tensor([2, -1], dtype=torch.int32),
        "num_logprobs": torch.tensor([-1, 1], dtype=torch.int32),
        "last_token": torch.tensor([7, 7, 7], dtype=torch.int32),
    }
    outputs = run(trace_sampler("greedy", 11), inputs, lambda parameter: torch.empty(0))
    assert outputs["sampled_token_ids"].tolist() == [4, 9]
    assert outputs["last_token_out"].tolist() == [7, 7, 4]
    assert outputs["top_token_ids"][1, 0] == 9
    assert inputs["last_token"].tolist() == [7, 7, 7]


def _config() -> ModelConfig:
    return FAMILIES.by_name["llama"].parse_config(
        {
            "vocab_size": 31,
            "hidden_size": 8,
            "intermediate_size": 12,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
        }
    )


def test_an_op_outside_the_vocabulary_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from castiron.builder.model_parameters import model_parameters

    right = Layer.forward

    def with_tanh(self: Layer, x: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        return right(self, torch.tanh(x), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Layer, "forward", with_tanh)
    family = FAMILIES.by_name["llama"]
    parameters = model_parameters(family, _config(), "safetensors")
    with pytest.raises(WorkFailedError, match="tanh"):
        trace_forward(family, _config(), parameters, TraceOptions(16, 4, "f32"))


def test_a_module_with_other_parameters_is_refused() -> None:
    from castiron.builder.model_parameters import model_parameters

    family = FAMILIES.by_name["llama"]
    parameters = model_parameters(family, _config(), "safetensors")
    del parameters["layers.0.o.weight"]
    with pytest.raises(AssertionError, match=r"layers\.0\.o\.weight"):
        trace_forward(family, _config(), parameters, TraceOptions(16, 4, "f32"))


def test_module_parameters_are_the_specs() -> None:
    family, config = FAMILIES.by_name["llama"], _config()
    with torch.device("meta"):
        module = Decoder(config)
    names = {name for name, _ in module.named_parameters()}
    assert names == {spec.name for spec in family.parameter_specs(config)} | {"inv_freq"}
