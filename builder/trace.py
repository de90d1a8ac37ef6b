"""From a model definition to the stage-0 graph: torch.export on meta tensors, then ONNX IR (see graph.py).

Counts are symbols; each gets a prime of its own as example size, since torch.export ties equal sizes
together. One layer of each kind is traced (repeat_layers.py), so a trace takes as long for 60 layers as for
one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir
import torch

from castiron.builder import graph as g
from castiron.builder.dims import Affine, Dim, add_dim
from castiron.builder.lower_linear_fp8 import lower_linear_fp8
from castiron.builder.parameters import Parameter
from castiron.builder.repeat_layers import LayerKinds, keep_traced_layers
from castiron.builder.trace_nodes import NodeTranslator
from castiron.models.config import ModelConfig
from castiron.models.family import ModelFamily
from castiron.models.sampler import SAMPLERS
from castiron.runtime.step_abi import CacheGroup, Field, row_fields, step_fields

_EXAMPLE_SIZES = {"num_tokens": 23, "num_seqs": 11, "num_logits": 5, "num_blocks": 31, "max_rows": 47}
_CAPACITY_SYMBOLS = {
    "max_tokens": "num_tokens",
    "max_seqs": "num_seqs",
    "max_logits": "num_logits",
    "max_rows": "max_rows",
}
_MAX_SIZES = {"num_seqs": (1 << 20) - 1}  # num_seqs + 1 stays within the others' bound
_DTYPES = {
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
}
_STATE_DTYPES = {torch.int32: "i32", torch.uint32: "u32"}  # of the rows' state


@dataclass(frozen=True)
class TraceOptions:
    """What of the serving side is baked into a graph."""

    block_size: int  # tokens a cache block holds
    table_width: int  # blocks a sequence may own
    cache_dtype: str  # "f32", "f16" or "bf16"


@dataclass(frozen=True)
class _Input:
    """One input of a graph."""

    name: str
    kind: str  # "step", "rows", "cache", "parameter"
    dtype: torch.dtype
    shape: tuple[Dim, ...]

    def example(self) -> torch.Tensor:
        sizes = [d if isinstance(d, int) else _EXAMPLE_SIZES[d.symbol] + d.offset for d in self.shape]
        return torch.empty(sizes, dtype=self.dtype, device="meta")

    def dynamic_shape(self, symbols: Mapping[str, Any]) -> dict[int, Any]:
        return {
            i: symbols[d.symbol] + d.offset if d.offset else symbols[d.symbol]
            for i, d in enumerate(self.shape)
            if isinstance(d, Affine)
        }


def trace_forward(
    family: ModelFamily, config: ModelConfig, parameters: Mapping[str, Parameter], options: TraceOptions
) -> g.Program:
    """The forward graph of a model at stage 0: step fields, last_token and caches in; logits and caches out.

    Linears of fp8 weights are lowered (lower_linear_fp8.py).

    Raises AssertionError if the module's parameters aren't exactly `parameters`.
    """
    group = CacheGroup("kv", "paged", options.block_size, options.table_width)
    fields = {f.name: f for f in step_fields((group,), config.vocab_size)}
    step = [_step_input(fields[name]) for name in _FORWARD_FIELDS]
    cache_shape: tuple[Dim, ...] = (
        Affine("num_blocks"),
        2,
        config.num_kv_heads,
        options.block_size,
        config.head_dim,
    )
    cache_dtype = _DTYPES[options.cache_dtype]
    caches = [_Input(f"cache.{i}", "cache", cache_dtype, cache_shape) for i in range(config.num_layers)]
    last_token = _row_input("last_token", config.vocab_size)
    with torch.device("meta"):
        module = family.make_module(config)
    parameter_inputs = _parameter_inputs(module, parameters)
    kinds = LayerKinds.of(module.layer_kinds)
    keep_traced_layers(module, kinds)
    traced_caches = [replace(caches[i], name=f"cache.{traced}") for traced, i in enumerate(kinds.traced)]

    def call(run: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        logits, written = run(
            {field.name: tensors[field.name] for field in step},
            tensors["last_token"],
            [tensors[cache.name] for cache in traced_caches],
        )
        return {"logits": logits} | {f"cache_out.{i}": cache for i, cache in enumerate(written)}

    states = tuple(
        g.State(cache.name, f"cache_out.{i}", "kv", options.cache_dtype, cache_shape)
        for i, cache in enumerate(caches)
    )
    graph = _trace(
        "forward",
        module,
        call,
        [*step, last_token, *traced_caches],
        [*parameter_inputs, *step, last_token, *caches],
        ["logits", *(state.output for state in states)],
        kinds,
    )
    unused = [v.name for v in graph.inputs if v.name in parameters and not v.uses()]
    assert not unused, f"parameters nothing reads: {unused[:4]}"
    program = g.Program("forward", _model(graph), dict(parameters), states)
    lower_linear_fp8(program)
    return program


_FORWARD_FIELDS = (
    "token_ids",
    "positions",
    "query_starts",
    "seq_lens",
    "logit_rows",
    "slot_mapping.kv",
    "block_tables.kv",
)


def trace_sampler(variant: str, vocab_size: int) -> g.Program:
    """The sampling graph "greedy", "random" or "full": logits f32[num_logits, vocab] and step fields in, ids out."""
    sampler = SAMPLERS[variant]
    fields = {f.name: f for f in step_fields((), vocab_size)}
    logits = _Input("logits", "step", torch.float32, (Affine("num_logits"), vocab_size))
    step = [_step_input(fields[name]) for name in sampler.FIELDS]
    rows = [_row_input(name, vocab_size) for name in sampler.STATES]

    def call(run: Callable[..., Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state, read = ({value.name: tensors[value.name] for value in values} for values in (rows, step))
        return dict(zip(sampler.outputs(), run(tensors["logits"], state, read), strict=True))

    states = tuple(
        g.State(row.name, f"{row.name}_out", "", _STATE_DTYPES[row.dtype], row.shape) for row in rows
    )
    kind, inputs = f"sample.{variant}", [logits, *step, *rows]
    graph = _trace(kind, sampler(), call, inputs, inputs, sampler.outputs(), LayerKinds.of(()))
    return g.Program(kind, _model(graph), {}, states)


def _parameter_inputs(module: torch.nn.Module, parameters: Mapping[str, Parameter]) -> list[_Input]:
    """The module's parameters in its order. Raises AssertionError if they aren't exactly `parameters`."""
    held = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
    stated = {name: parameter.shape for name, parameter in parameters.items()}
    assert held == stated, f"parameters differ: {sorted(set(held.items()) ^ set(stated.items()))[:4]}"
    return [_Input(name, "parameter", torch.float32, shape) for name, shape in held.items()]


def _step_input(field: Field) -> _Input:
    return _Input(field.name, "step", _DTYPES[field.dtype], tuple(_field_dim(d) for d in field.dims))


def _row_input(name: str, vocab_size: int) -> _Input:
    field = next(f for f in row_fields(vocab_size) if f.name == name)
    return _Input(name, "rows", _DTYPES[field.dtype], tuple(_field_dim(d) for d in field.dims))


def _field_dim(dim: int | str) -> Dim:
    if isinstance(dim, int):
        return dim
    capacity, _, plus = dim.partition("+")
    return add_dim(Affine(_CAPACITY_SYMBOLS[capacity]), int(plus or 0))


class _Named(torch.nn.Module):
    """A module called with the graph inputs in order, returning its outputs by name as a tuple."""

    def __init__(
        self, module: torch.nn.Module, call: Callable[..., Any], names: list[str], output_names: list[str]
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._names = names
        self._output_names = output_names  # filled by the call: torch.export keeps positions only

    def forward(self, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        outputs = self._call(self.module, dict(zip(self._names, tensors, strict=True)))
        self._output_names[:] = outputs
        return tuple(outputs.values())


def _trace(
    kind: str,
    module: torch.nn.Module,
    call: Callable[..., Any],
    traced_inputs: Sequence[_Input],
    graph_inputs: Sequence[_Input],
    output_names: Sequence[str],
    kinds: LayerKinds,
) -> ir.Graph:
    """The module's graph. `call` runs it on tensors named as traced_inputs; graph_inputs and output_names are
    the graph's, of all layers.
    """
    traced_names: list[str] = []
    named = _Named(module, call, [i.name for i in traced_inputs], traced_names)
    used = {d.symbol for i in traced_inputs for d in i.shape if isinstance(d, Affine)}
    symbols = {
        name: torch.export.Dim(name, min=g.SYMBOLS[name].minimum, max=_MAX_SIZES.get(name, 1 << 20))
        for name in sorted(used)
    }
    module.requires_grad_(False)  # autograd's bookkeeping is half the time of a trace
    with torch.no_grad():
        exported = torch.export.export(
            named,
            ([i.example() for i in traced_inputs],),
            dynamic_shapes=([i.dynamic_shape(symbols) for i in traced_inputs],),
            strict=False,
        )
    parameter_names = exported.graph_signature.inputs_to_parameters
    translator = NodeTranslator(kinds)
    for stated in graph_inputs:
        translator.add_input(stated.name, stated.kind, stated.dtype, stated.shape)
    remaining = iter(traced_inputs)
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            parameter = parameter_names.get(node.name)
            translator.bind(node, parameter.removeprefix("module.") if parameter else next(remaining).name)
    assert next(remaining, None) is None
    return translator.translate(exported.graph, traced_names, output_names, kind)


def _model(graph: ir.Graph) -> ir.Model:
    return ir.Model(graph, ir_version=g.IR_VERSION, producer_name="castiron")
