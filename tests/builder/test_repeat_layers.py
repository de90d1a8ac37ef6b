"""Repeating traced layers gives the graph that a trace of every layer gives."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder import graph as g
from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.model_parameters import BoundModel, bind_model
from castiron.builder.repeat_layers import LayerKinds, in_layer, layer_of
from castiron.builder.trace import TraceOptions, trace_forward
from castiron.models import ops
from castiron.models.config import ModelConfig
from castiron.models.decoder import Decoder, Layer

torch.set_num_threads(1)
OPTIONS = TraceOptions(16, 24, "f32")


def trace(model: BoundModel, kinds: tuple[Any, ...] | None = None) -> g.Program:
    """The model's graph, its layers of these kinds."""

    def make_module(config: ModelConfig) -> Decoder:
        module = Decoder(config)
        if kinds is not None:
            module.layer_kinds = kinds
        return module

    return trace_forward(
        replace(model.family, make_module=make_module), model.config, model.parameters, OPTIONS
    )


def described(program: g.Program) -> list[Any]:
    """Everything a graph says, with its connections."""
    graph = program.graph
    values = [*graph.inputs, *(output for node in graph for output in node.outputs)]
    return [
        [(n.name, n.domain, n.op_type, [v and v.name for v in n.inputs]) for n in graph],
        [[(name, a.value) for name, a in n.attributes.items()] for n in graph],
        [(v.name, v.dtype, g.shape_of(v), dict(v.metadata_props)) for v in values],
        {name: g.constant_ints(v) for name, v in graph.initializers.items()},
        [v.name for v in graph.outputs],
        program.states,
        program.parameters,
    ]


@pytest.fixture(scope="module", params=["llama", "qwen2", "llama with biases"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BoundModel:
    biases = {"attention_bias": True, "mlp_bias": True} if request.param.endswith("biases") else {}
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param.split()[0], **biases)
    with open_checkpoint(str(folder)) as checkpoint:
        return bind_model(checkpoint)


@pytest.fixture(scope="module")
def full_trace(model: BoundModel) -> g.Program:
    return trace(model, kinds=(0, 1, 2))


@pytest.mark.parametrize("kinds", [("a", "a", "a"), ("a", "b", "a"), ("a", "b", "b")])
def test_repeated_layers_are_those_of_a_full_trace(
    model: BoundModel, full_trace: g.Program, kinds: tuple[str, ...]
) -> None:
    assert len(full_trace.graph) > 60
    assert described(trace(model, kinds)) == described(full_trace)


def test_models_are_traced_one_layer_a_kind(model: BoundModel, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    right = Layer.forward

    def counted(self: Layer, *arguments: Any) -> Any:
        calls.append(self)
        return right(self, *arguments)

    monkeypatch.setattr(Layer, "forward", counted)
    program = trace(model)
    assert len({id(layer) for layer in calls}) == 1
    assert [s.name for s in program.states] == ["cache.0", "cache.1", "cache.2"]


def test_layers_of_one_kind_that_differ_in_shape_are_refused(model: BoundModel) -> None:
    def make_module(config: ModelConfig) -> Decoder:
        module = Decoder(config)
        module.layers[2].gate = type(module.layers[2].gate)(7, config.hidden_size, config.mlp_bias)
        return module

    parameters = dict(model.parameters)
    for name in ("layers.2.gate.weight", "layers.2.gate.bias"):
        if name in parameters:
            shape = (7, *parameters[name].shape[1:])
            parameters[name] = replace(parameters[name], shape=shape)
    with pytest.raises(AssertionError, match=r"layers\.2\.gate\.\w+ is .* of the same kind of layer"):
        trace_forward(replace(model.family, make_module=make_module), model.config, parameters, OPTIONS)


def test_a_value_that_leaves_a_layer_unseen_is_refused(
    model: BoundModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Decoder.forward

    def leaking(self: Decoder, *arguments: Any) -> Any:
        logits, caches = right(self, *arguments)
        return logits + ops.linear(ops.gather_rows(kept[-1], arguments[0]["logit_rows"]), head(self)), caches

    def head(decoder: Decoder) -> torch.Tensor:
        return (decoder.embedding if decoder.lm_head is None else decoder.lm_head).weight

    kept: list[torch.Tensor] = []
    silu = ops.silu

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(silu(x)[:, : model.config.hidden_size])
        return silu(x)

    monkeypatch.setattr(ops, "silu", keep)
    monkeypatch.setattr(Decoder, "forward", leaking)
    with pytest.raises(AssertionError, match="of a layer, is read outside it"):
        trace(model)


def test_the_first_layer_of_each_kind_is_traced() -> None:
    assert LayerKinds.of("aab") == LayerKinds(traced=(0, 2), repeats=(0, 0, 1))
    assert LayerKinds.of(()) == LayerKinds((), ())


def test_names_tell_their_layer() -> None:
    names = ("layers.12.q.weight", "cache.3", "cache_out.0", "final_norm.weight", "slot_mapping.kv")
    assert [layer_of(name) for name in names] == [12, 3, 0, None, None]
    assert in_layer("layers.12.q.weight", 3) == "layers.3.q.weight" and in_layer("cache.3", 10) == "cache.10"
