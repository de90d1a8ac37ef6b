"""torch.export nodes as ONNX IR nodes: castiron ops as they are, a few aten ops as ONNX ones, nothing
else.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import sympy
import torch

from castiron.builder import graph as g
from castiron.builder.dims import Affine, Dim
from castiron.runtime.errors import WorkFailedError

_DATA_TYPES = {
    torch.float32: ir.DataType.FLOAT,
    torch.float16: ir.DataType.FLOAT16,
    torch.int8: ir.DataType.INT8,
    torch.int32: ir.DataType.INT32,
    torch.int64: ir.DataType.INT64,
    torch.uint64: ir.DataType.UINT64,
}
_OPSETS = {"": 22, g.DOMAIN: 1}


class NodeTranslator:
    """Builds one ir.Graph from one torch.export graph. Add the inputs in order, then translate."""

    def __init__(self) -> None:
        self._symbols: dict[sympy.Symbol, str] = {}  # torch's symbol -> ours
        self._values: dict[torch.fx.Node, ir.Value] = {}
        self._outputs: dict[torch.fx.Node, list[ir.Value]] = {}  # of nodes with several
        self._inputs: list[ir.Value] = []
        self._graph = ir.Graph((), (), nodes=(), opset_imports=_OPSETS)

    def add_input(self, node: torch.fx.Node, name: str, kind: str, shape: Sequence[Dim]) -> None:
        """A placeholder becomes the graph input `name`; its symbolic sizes get their names from `shape`."""
        tensor = node.meta["val"]
        assert len(tensor.shape) == len(shape), name
        for size, dim in zip(tensor.shape, shape, strict=True):
            if isinstance(dim, Affine) and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self._symbols[size.node.expr] = dim.symbol
        value = g.new_value(name, _DATA_TYPES[tensor.dtype], shape)
        value.metadata_props[g.KIND_KEY] = kind
        self._values[node] = value
        self._inputs.append(value)

    def translate(self, fx_graph: torch.fx.Graph, output_names: Sequence[str], name: str) -> ir.Graph:
        """The whole graph. Raises WorkFailedError naming ops that have no translation."""
        self._graph.name = name
        self._graph.inputs.extend(self._inputs)
        unknown: set[str] = set()
        for node in fx_graph.nodes:
            if node.op != "call_function" or not _makes_tensors(node):
                continue
            if node.target is operator.getitem:
                self._values[node] = self._outputs[node.args[0]][node.args[1]]
                continue
            translate = _translation(node)
            if translate is None:
                unknown.add(str(node.target))
            elif not unknown:
                translate(self, node)
        if unknown:
            raise WorkFailedError(
                f"the traced model uses {', '.join(sorted(unknown))}: write it with the ops of models/ops.py"
            )
        outputs: Any = fx_graph.output_node().args[0]
        for output_name, node in zip(output_names, outputs, strict=True):
            value = self._values[node]
            assert value.producer() is not None, f"output {output_name} is an input"
            value.name = output_name
            self._graph.outputs.append(value)
        return self._graph

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
        names = [f"{node.name}.{i}" for i in range(len(tensors))] if several else [node.name]
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
