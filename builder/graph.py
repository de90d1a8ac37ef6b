"""The program every builder stage works on: an ONNX IR graph, its parameters, its states, its symbols.

Conventions (docs of the ops: models/ops.py)
  nodes    domain "castiron" for our ops; domain "" for Add, Mul and the views Reshape, Split, Slice,
  Transpose,
           whose shape inputs are initializers with data (`constant_ints` reads them).
  inputs   step fields, rows fields, caches, then parameters, all as graph inputs told apart by the metadata
           key "castiron.kind": "step", "rows", "cache", "parameter".
  states   an op that writes a cache (or last_token) takes a value and returns a new one, see
  models.ops.STATES;
           the last version of each is a graph output.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir

from castiron.builder.dims import Affine, Dim, format_dim, parse_dim
from castiron.builder.parameters import Parameter

DOMAIN = "castiron"
KIND_KEY = "castiron.kind"
IR_VERSION = 10
VIEW_OPS = ("Reshape", "Split", "Slice", "Transpose")


@dataclass(frozen=True)
class State:
    """One tensor that outlives a step: a layer's cache, or last_token."""

    name: str  # of the graph input: "cache.0", "last_token"
    output: str  # of the graph output that holds its last version: "cache_out.0", "last_token_out"
    group: str  # cache group, "kv"; "" for rows fields
    dtype: str  # "f32", "f16", "i32"
    shape: tuple[Dim, ...]  # cache: [num_blocks, 2, kv_heads, block_size, head_dim]


@dataclass(frozen=True)
class Symbol:
    """What is known of a symbolic count."""

    name: str
    minimum: int
    sizes_arena: bool  # False: it only sizes states (num_blocks, max_rows), never values of a step


SYMBOLS = {
    symbol.name: symbol
    for symbol in (
        Symbol("num_tokens", 1, True),
        Symbol("num_seqs", 1, True),
        Symbol("num_logits", 1, True),
        Symbol("num_blocks", 1, False),
        Symbol("max_rows", 1, False),
    )
}


@dataclass
class Program:
    """A graph and what its inputs are. Passes change `model` and `parameters` in place."""

    kind: str  # "forward", "sample.greedy", "sample.random"
    model: ir.Model
    parameters: dict[str, Parameter]
    states: tuple[State, ...]
    symbols: dict[str, Symbol] = field(default_factory=lambda: dict(SYMBOLS))

    @property
    def graph(self) -> ir.Graph:
        return self.model.graph

    def inputs_of_kind(self, kind: str) -> list[ir.Value]:
        """Graph inputs whose "castiron.kind" is "step", "rows", "cache" or "parameter"."""
        return [value for value in self.graph.inputs if value.metadata_props.get(KIND_KEY) == kind]

    def parameter_of(self, value: ir.Value | None) -> Parameter | None:
        """The parameter a graph input stands for; None for any other value."""
        if value is None or value.metadata_props.get(KIND_KEY) != "parameter":
            return None
        return self.parameters[name_of(value)]

    def add_parameter(self, parameter: Parameter) -> ir.Value:
        """Add a parameter and its graph input; the name must be new."""
        assert parameter.name not in self.parameters, parameter.name
        value = new_value(parameter.name, ir.DataType.FLOAT, parameter.shape)
        value.metadata_props[KIND_KEY] = "parameter"
        self.graph.inputs.append(value)
        self.parameters[parameter.name] = parameter
        return value

    def remove_unused_parameters(self) -> int:
        """Drop parameters no node reads, with their graph inputs; the number dropped."""
        unused = [v for v in self.inputs_of_kind("parameter") if not v.uses() and not v.is_graph_output()]
        for value in unused:
            self.graph.inputs.remove(value)
            del self.parameters[name_of(value)]
        return len(unused)

    def save(self, path: Path) -> None:
        """Write the graph as .onnx: parameters are inputs with scheme and recipe as metadata, no data."""
        for value in self.inputs_of_kind("parameter"):
            value.metadata_props.update(parameter_metadata(self.parameters[name_of(value)]))
        ir.save(self.model, path)


def parameter_metadata(parameter: Parameter) -> dict[str, str]:
    """What a saved graph says about a parameter: scheme, layout and the recipe as JSON."""
    recipe = [
        {
            "tensor": part.tensor,
            "rows": [part.row_start, part.row_stop],
            "transform": part.transform,
            "head_dim": part.head_dim,
        }
        for part in parameter.parts
    ]
    metadata = {"castiron.scheme": parameter.scheme, "castiron.recipe": json.dumps(recipe)}
    if parameter.source_scheme:
        metadata["castiron.source_scheme"] = parameter.source_scheme
    if parameter.layout:
        metadata["castiron.layout"] = parameter.layout
    if parameter.input_scale:
        metadata["castiron.input_scale"] = repr(parameter.input_scale)
    if parameter.constant is not None:
        metadata["castiron.constant"] = json.dumps(parameter.constant.tolist())
    return metadata


def new_value(name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
    """A value of this type and shape, not yet part of a graph."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir_shape(shape))


def ir_shape(shape: Sequence[Dim]) -> ir.Shape:
    return ir.Shape([format_dim(dim) for dim in shape])


def shape_of(value: ir.Value) -> tuple[Dim, ...]:
    """The value's shape as dimension records."""
    assert value.shape is not None, f"{value.name} has no shape"
    return tuple(
        parse_dim(dim.value if isinstance(dim, ir.SymbolicDim) and dim.value is not None else _known(dim))
        for dim in value.shape
    )


def _known(dim: int | ir.SymbolicDim) -> int:
    assert isinstance(dim, int), "dimension without a value"
    return dim


def dtype_of(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None, f"{value.name} has no type"
    return value.dtype


def name_of(value: ir.Value) -> str:
    assert value.name is not None
    return value.name


def is_op(node: ir.Node | None, op: str) -> bool:
    """True for a node of our domain named `op` ("linear"), or of the standard domain ("Add")."""
    if node is None or node.op_type != op:
        return False
    return node.domain == ("" if op[0].isupper() else DOMAIN)


def producer(value: ir.Value | None, op: str) -> ir.Node | None:
    """The node that makes `value`, if it is an `op`."""
    node = value.producer() if value is not None else None
    return node if is_op(node, op) else None


def input_of(node: ir.Node, index: int) -> ir.Value:
    """The node's input, which must be there."""
    value = node.inputs[index]
    assert value is not None, f"{node.name} has no input {index}"
    return value


def users(value: ir.Value) -> list[ir.Node]:
    """Nodes that read the value, each once, in no particular order (graph outputs aren't users)."""
    return list(value.consumers())


def only_user(value: ir.Value) -> ir.Node | None:
    """The one node that reads the value; None if there are more, or if it is a graph output."""
    nodes = users(value)
    return nodes[0] if len(nodes) == 1 and not value.is_graph_output() else None


def float_attribute(node: ir.Node, name: str) -> float:
    return float(node.attributes[name].as_float())


def int_attribute(node: ir.Node, name: str, default: int | None = None) -> int:
    if name not in node.attributes and default is not None:
        return default
    return int(node.attributes[name].as_int())


def ints_attribute(node: ir.Node, name: str) -> tuple[int, ...]:
    return tuple(int(i) for i in node.attributes[name].as_ints())


def constant_ints(value: ir.Value | None) -> tuple[int, ...]:
    """The data of an integer initializer (the shape input of Reshape, Split, Slice)."""
    assert value is not None and value.const_value is not None, "not a constant"
    return tuple(int(i) for i in value.const_value.numpy().reshape(-1))


def add_constant_ints(graph: ir.Graph, values: Sequence[int]) -> ir.Value:
    """An int64 initializer holding `values`; equal ones share one value."""
    name = "const." + "_".join(str(v) for v in values)
    existing = graph.initializers.get(name)
    if existing is not None:
        return existing
    tensor = ir.tensor(np.array(values, dtype=np.int64), name=name)
    value = ir.Value(
        name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([len(values)]), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def new_node(
    op: str,
    inputs: Sequence[ir.Value | None],
    outputs: Sequence[ir.Value],
    attributes: dict[str, float | int | Sequence[int]] | None = None,
) -> ir.Node:
    """A node of our domain ("linear") or the standard one ("Add"), named after its first output."""
    return ir.Node(
        "" if op[0].isupper() else DOMAIN,
        op,
        inputs,
        [_attribute(key, value) for key, value in (attributes or {}).items()],
        outputs=outputs,
        name=f"node.{outputs[0].name}",
    )


def replace_nodes(
    program: Program, old: Sequence[ir.Node], new: Sequence[ir.Node], replaced: Mapping[ir.Value, ir.Value]
) -> None:
    """Put `new` nodes where the last of `old` is; each key of `replaced` (an output of `old`) gives its uses,
    its name and its place among graph outputs to its value (an output of `new`, or of an earlier node).

    The caller sorts the graph if a user of a new value may come earlier (the pipeline does so after every
    pass).
    """
    program.graph.insert_before(old[-1], list(new))
    for before, after in replaced.items():
        name = before.name
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        if after.producer() in new:
            before.name = f"{name}.replaced"
            after.name = name
    program.graph.remove(list(old), safe=True)


def _attribute(name: str, value: float | int | Sequence[int]) -> ir.Attr:
    if isinstance(value, float):
        return ir.AttrFloat32(name, value)
    if isinstance(value, int):
        return ir.AttrInt64(name, value)
    return ir.AttrInt64s(name, list(value))


def split_sizes(node: ir.Node) -> tuple[int, ...]:
    """Rows of each output of a Split along its axis."""
    assert is_op(node, "Split")
    return constant_ints(node.inputs[1])


def slice_ranges(node: ir.Node) -> dict[int, tuple[int, int]]:
    """axis -> (start, stop) of a Slice; steps are always 1."""
    assert is_op(node, "Slice")
    starts, stops, axes = (constant_ints(node.inputs[i]) for i in (1, 2, 3))
    return {axis: (start, stop) for axis, start, stop in zip(axes, starts, stops, strict=True)}


def nodes_in_order(program: Program) -> Iterator[ir.Node]:
    """A snapshot of the graph's nodes in execution order: passes may change the graph while they walk it."""
    yield from list(program.graph)


def symbol_of(dim: Dim) -> str | None:
    """The live count a dimension is exactly (coefficient 1, offset 0); None otherwise."""
    if isinstance(dim, Affine) and dim.coefficient == 1 and dim.offset == 0:
        return dim.symbol
    return None
