"""torch.export nodes as ONNX IR nodes: castiron ops as they are, a few aten ops as ONNX ones, nothing
else.
"""

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch

from castiron.builder import graph as g
from castiron.builder.dims import Affine, Dim
from castiron.builder.repeat_layers import (
    LayerKinds,
    TracedLayer,
    check_separate,
    in_layer,
    layer_of,
    split_trace,
)
from castiron.runtime.errors import WorkFailedError

_DATA_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.bfloat16: ir.DataType.BFLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.uint32: ir.DataType.UINT32,
    torch.uint64: ir.DataType.UINT64,
}
_OPSETS = {"": 22, g.DOMAIN: 1}


class NodeTranslator:
    """Builds one ir.Graph from one torch.export graph: add the inputs, bind the placeholders, translate."""

    def __init__(self, kinds: LayerKinds) -> None:
        self._kinds = kinds
        self._symbols: dict[sympy.Symbol, str] = {}  # torch's symbol -> ours
        self._dims: dict[sympy.Expr, Dim] = {}
        self._inputs: dict[str, ir.Value] = {}
        self._placeholders: dict[str, torch.fx.Node] = {}
        self._values: dict[torch.fx.Node, ir.Value] = {}
        self._outputs: dict[torch.fx.Node, list[ir.Value]] = {}  # of nodes with several
        self._num_named: Counter[str] = Counter()  # op -> nodes so far
        self._graph = ir.Graph((), (), nodes=(), opset_imports=_OPSETS)

    def add_input(self, name: str, kind: str, dtype: torch.dtype, shape: Sequence[Dim]) -> None:
        """The next graph input."""
        value = g.new_value(name, _DATA_TYPES[dtype], shape)
        value.metadata_props[g.KIND_KEY] = kind
        self._inputs[name] = value

    def bind(self, node: torch.fx.Node, name: str) -> None:
        """A placeholder stands for the graph input `name`, whose shape gives the placeholder's symbols names.

        The number in a name such as "cache.0" is that of a traced layer: every layer of its kind has such an
        input.
        """
        traced = layer_of(name)
        layers = [i for i, repeated in enumerate(self._kinds.repeats) if repeated == traced]
        values = [self._inputs[in_layer(name, i)] for i in layers] if layers else [self._inputs[name]]
        tensor = node.meta["val"]
        for size, dim in zip(tensor.shape, g.shape_of(values[0]), strict=True):
            if isinstance(dim, Affine) and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self._symbols[size.node.expr] = dim.symbol
        assert _DATA_TYPES[tensor.dtype] == values[0].dtype, name
        for value in values:
            assert (value.dtype, value.shape) == (values[0].dtype, values[0].shape), (
                f"{value.name} is {value.dtype} {value.shape}, {values[0].name} of the same kind of layer is "
                f"{values[0].dtype} {values[0].shape}"
            )
        self._placeholders[name] = node
        if traced is None:
            self._values[node] = values[0]

    def translate(
        self, fx_graph: torch.fx.Graph, traced_names: Sequence[str], output_names: Sequence[str], name: str
    ) -> ir.Graph:
        """The whole graph. traced_names: outputs of the traced graph in order; output_names: of all layers.

        Raises WorkFailedError naming ops that have no translation.
        """
        self._graph.name = name
        self._graph.inputs.extend(self._inputs.values())
        nodes = [node for node in fx_graph.nodes if node.op == "call_function" and _makes_tensors(node)]
        split = split_trace(nodes)
        _check_translations(
            [*split.before, *(n for layer in split.layers for n in layer.nodes), *split.after]
        )
        results: Any = fx_graph.output_node().args[0]
        traced = dict(zip(traced_names, results, strict=True))
        self._translate_nodes(split.before)
        outputs = self._translate_layers(split.layers, traced)
        self._translate_nodes(split.after)
        outputs |= {name: self._values[node] for name, node in traced.items() if layer_of(name) is None}
        for output_name in output_names:
            value = outputs[output_name]
            assert value.producer() is not None, f"output {output_name} is an input"
            value.name = output_name
            self._graph.outputs.append(value)
        return self._graph

    def _translate_nodes(self, nodes: Sequence[torch.fx.Node]) -> None:
        for node in nodes:
            if node.target is operator.getitem:
                source, index = node.args
                assert isinstance(source, torch.fx.Node) and isinstance(index, int)
                self._values[node] = self._outputs[source][index]
            else:
                translate = _translation(node)
                assert translate is not None
                translate(self, node)

    def _translate_layers(
        self, layers: Sequence[TracedLayer], traced: Mapping[str, torch.fx.Node]
    ) -> dict[str, ir.Value]:
        """Every layer of the model, each from the nodes of the traced one it repeats; the layers' outputs."""
        assert len(layers) == len(self._kinds.traced)
        outputs: dict[str, ir.Value] = {}
        if not layers:
            return outputs
        own_inputs = [_of_layer(self._placeholders, i) for i in range(len(layers))]
        own_outputs = [_of_layer(traced, i) for i in range(len(layers))]
        for layer, placeholders, results in zip(layers, own_inputs, own_outputs, strict=True):
            check_separate(layer, placeholders.values(), results.values())
        flowing = self._values[layers[0].source]
        for index, repeated in enumerate(self._kinds.repeats):
            layer = layers[repeated]
            self._values[layer.entry] = flowing
            for name, node in own_inputs[repeated].items():
                self._values[node] = self._inputs[in_layer(name, index)]
            self._translate_nodes(layer.nodes)
            flowing = self._values[layer.result]
            for name, node in own_outputs[repeated].items():
                outputs[in_layer(name, index)] = self._values[node]
        self._values[layers[-1].end] = flowing
        return outputs

    def shape(self, tensor: torch.Tensor) -> tuple[Dim, ...]:
        """A traced tensor's shape as dimension records."""
        return tuple(size if isinstance(size, int) else self._dim(size.node.expr) for size in tensor.shape)

    def value(self, node: Any) -> ir.Value:
        return self._values[node]

    def ints(self, values: Sequence[int]) -> ir.Value:
        return g.add_constant_ints(self._graph, values)

    def append(
        self, node: torch.fx.Node, op: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any]
    ) -> None:
        """Add the node's translation; its outputs take the traced shapes."""
        tensors = node.meta["val"]
        several = isinstance(tensors, tuple | list)
        count = self._num_named[op]
        self._num_named[op] += 1
        name = f"{op.lower()}_{count}" if count else op.lower()
        names = [f"{name}.{i}" for i in range(len(tensors))] if several else [name]
        outputs = [
            g.new_value(name, _DATA_TYPES[tensor.dtype], self.shape(tensor))
            for name, tensor in zip(names, tensors if several else [tensors], strict=True)
        ]
        self._graph.append(g.new_node(op, inputs, outputs, attributes))
        if several:
            self._outputs[node] = outputs
        else:
            self._values[node] = outputs[0]

    def _dim(self, expression: sympy.Expr) -> Dim:
        if expression not in self._dims:
            self._dims[expression] = self._new_dim(expression)
        return self._dims[expression]

    def _new_dim(self, expression: sympy.Expr) -> Dim:
        if expression.is_Integer:
            return int(expression)
        symbols = list(expression.free_symbols)
        assert len(symbols) == 1, f"size {expression} isn't linear in one symbol"
        coefficients = sympy.Poly(expression, symbols[0]).all_coeffs()
        assert len(coefficients) == 2, f"size {expression} isn't linear"
        return Affine(self._symbols[symbols[0]], int(coefficients[0]), int(coefficients[1]))


def _makes_tensors(node: torch.fx.Node) -> bool:
    """False for size arithmetic and shape checks, which dimension records already hold."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor | tuple | list)


def _of_layer(named: Mapping[str, torch.fx.Node], layer: int) -> dict[str, torch.fx.Node]:
    """Those of `named` that are the traced layer's."""
    return {name: node for name, node in named.items() if layer_of(name) == layer}


def _check_translations(nodes: Sequence[torch.fx.Node]) -> None:
    """Raises WorkFailedError naming ops that have no translation."""
    unknown = {str(n.target) for n in nodes if n.target is not operator.getitem and _translation(n) is None}
    if unknown:
        raise WorkFailedError(
            f"the traced model uses {', '.join(sorted(unknown))}: write it with the ops of models/ops.py"
        )


def _translation(node: torch.fx.Node) -> Callable[[NodeTranslator, torch.fx.Node], None] | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target.namespace == g.DOMAIN:
        return _castiron_op
    return _ATEN.get(_op_name(node))


def _op_name(node: torch.fx.Node) -> str:
    """ "aten::split.Tensor"."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return str(node.target.name())  # type: ignore[no-untyped-call]


def _castiron_op(t: NodeTranslator, node: torch.fx.Node) -> None:
    """Tensor arguments become inputs (an absent last one is left out), numbers attributes."""
    assert isinstance(node.target, torch._ops.OpOverload)
    inputs: list[ir.Value | None] = []
    attributes: dict[str, Any] = {}
    for i, argument in enumerate(node.target._schema.arguments):
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
        if "Tensor" in str(argument.type):
            inputs.append(None if given is None else t.value(given))
        else:
            attributes[argument.name] = given
    while inputs and inputs[-1] is None:
        inputs.pop()
    t.append(node, node.target._schema.name.split("::")[1], inputs, attributes)


def _binary(op: str) -> Callable[[NodeTranslator, torch.fx.Node], None]:
    def translate(t: NodeTranslator, node: torch.fx.Node) -> None:
        a, b = node.args[:2]
        assert isinstance(a, torch.fx.Node) and isinstance(b, torch.fx.Node), f"{node}: {op} with a number"
        assert node.kwargs.get("alpha", 1) == 1
        assert t.shape(a.meta["val"]) == t.shape(b.meta["val"]), f"{node}: {op} broadcasts"
        t.append(node, op, [t.value(a), t.value(b)], {})

    return translate


def _reshape(t: NodeTranslator, node: torch.fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    before, after = t.shape(source.meta["val"]), t.shape(node.meta["val"])
    sizes = []
    for i, dim in enumerate(after):
        if isinstance(dim, int):
            sizes.append(dim)
        else:
            sizes.append(0 if i < len(before) and before[i] == dim else -1)  # ONNX: 0 copies, -1 infers
    assert sizes.count(-1) <= 1, f"{node}: reshape to {after}"
    t.append(node, "Reshape", [t.value(source), t.ints(sizes)], {})


def _split(t: NodeTranslator, node: torch.fx.Node) -> None:
    axis = _axis(node, 2)
    sizes = [t.shape(piece)[axis] for piece in node.meta["val"]]
    assert all(isinstance(size, int) for size in sizes), f"{node}: split of a symbolic dimension"
    t.append(
        node,
        "Split",
        [t.value(node.args[0]), t.ints([s for s in sizes if isinstance(s, int)])],
        {"axis": axis},
    )


def _slice(t: NodeTranslator, node: torch.fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    axis = _axis(node, 1)
    length = t.shape(source.meta["val"])[axis]
    start = node.args[2] if len(node.args) > 2 else None
    stop = node.args[3] if len(node.args) > 3 else None
    assert (node.args[4] if len(node.args) > 4 else 1) == 1, f"{node}: slice with a step"
    assert isinstance(length, int), f"{node}: slice of a symbolic dimension"
    first, last, _ = slice(start, stop).indices(length)
    t.append(node, "Slice", [t.value(source), t.ints([first]), t.ints([last]), t.ints([axis])], {})


def _transpose(t: NodeTranslator, node: torch.fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, torch.fx.Node)
    rank = len(source.meta["val"].shape)
    arguments: tuple[Any, ...] = node.args[1:]
    if _op_name(node) == "aten::permute":
        permutation = [int(d) % rank for d in arguments[0]]
    else:
        permutation = list(range(rank))
        a, b = (int(d) % rank for d in arguments)
        permutation[a], permutation[b] = b, a
    t.append(node, "Transpose", [t.value(source)], {"perm": permutation})


def _silu(t: NodeTranslator, node: torch.fx.Node) -> None:
    t.append(node, "silu", [t.value(node.args[0])], {})


def _same(t: NodeTranslator, node: torch.fx.Node) -> None:
    """Copies mean nothing in a graph of values."""
    t._values[node] = t.value(node.args[0])


def _axis(node: torch.fx.Node, position: int) -> int:
    axis = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    source = node.args[0]
    assert isinstance(axis, int) and isinstance(source, torch.fx.Node)
    return axis % len(source.meta["val"].shape)


_ATEN: dict[str, Callable[[NodeTranslator, torch.fx.Node], None]] = {
    "aten::add.Tensor": _binary("Add"),
    "aten::mul.Tensor": _binary("Mul"),
    "aten::view": _reshape,
    "aten::reshape": _reshape,
    "aten::_unsafe_view": _reshape,
    "aten::unflatten.int": _reshape,
    "aten::flatten.using_ints": _reshape,
    "aten::split.Tensor": _split,
    "aten::split_with_sizes": _split,
    "aten::split.sizes": _split,
    "aten::chunk": _split,
    "aten::slice.Tensor": _slice,
    "aten::transpose.int": _transpose,
    "aten::permute": _transpose,
    "aten::silu": _silu,
    "aten::contiguous": _same,
    "aten::clone": _same,
    "aten::alias": _same,
}
