"""Linears that read the same value become one with stacked weights (q, k, v; gate, up).

    q = linear(x, Wq); k = linear(x, Wk); v = linear(x, Wv)
 -> q, k, v = Split(linear(x, [Wq; Wk; Wv]), axis=1)

Likewise linear_fp8, of one quantized input. Only weights of one scheme are stacked: a kernel reads one; and only those
whose inputs are quantized alike. Recipes are rewritten, no data moves.
"""

import re
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.parameters import Parameter
from castiron.builder.passes.context import PassContext

_WEIGHT_INPUT = {"linear": 1, "linear_fp8": 2}


class _Kind(NamedTuple):
    """What linears that are stacked have in common, besides their input."""

    scheme: str
    has_bias: bool
    input_scale: float | None  # by which their input is quantized; 0: each token's own


def merge_linears(program: g.Program, context: PassContext) -> int:
    """Number of linears merged away into another."""
    readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in g.nodes_in_order(program):
        if any(g.is_op(node, op) for op in _WEIGHT_INPUT) and _owns_weight(program, node):
            readers[_source(node)].append(node)
    count = 0
    for nodes in readers.values():
        groups: dict[_Kind, list[ir.Node]] = defaultdict(list)
        for node in nodes:
            kind = _Kind(_weight(program, node).scheme, _bias_value(node) is not None, _input_scale(node))
            groups[kind].append(node)
        if len(groups) > 1:
            context.note(_reason(program, groups))
        for group in groups.values():
            if len(group) > 1:
                _merge(program, group)
                count += len(group) - 1
    program.remove_unused_parameters()
    return count


def _owns_weight(program: g.Program, node: ir.Node) -> bool:
    """True if nothing else reads the node's weight and bias, so that they can be stacked."""
    values = [g.input_of(node, _WEIGHT_INPUT[node.op_type]), _bias_value(node)]
    return all(v is None or (program.parameter_of(v) is not None and g.only_user(v) is node) for v in values)


def _merge(program: g.Program, nodes: list[ir.Node]) -> None:
    weight = program.add_parameter(_stack([_weight(program, n) for n in nodes]))
    op = nodes[0].op_type
    inputs = [*(g.input_of(nodes[0], index) for index in range(_WEIGHT_INPUT[op])), weight]
    biases = [program.parameter_of(_bias_value(n)) for n in nodes]
    if biases[0] is not None:
        inputs.append(program.add_parameter(_stack([b for b in biases if b is not None])))
    rows = [_weight(program, n).shape[0] for n in nodes]
    outputs = [n.outputs[0] for n in nodes]
    num_rows = g.shape_of(outputs[0])[0]
    merged = g.new_value(f"{weight.name}.output", g.dtype_of(outputs[0]), (num_rows, sum(rows)))
    pieces = [g.new_value(f"{o.name}.piece", g.dtype_of(o), g.shape_of(o)) for o in outputs]
    split = g.new_node("Split", [merged, g.add_constant_ints(program.graph, rows)], pieces, {"axis": 1})
    # in place of the first: everything read is there, and readers of any of them come later
    g.replace_nodes(
        program,
        [*nodes[1:], nodes[0]],
        [g.new_node(op, inputs, [merged]), split],
        dict(zip(outputs, pieces, strict=True)),
    )


def _stack(parameters: list[Parameter]) -> Parameter:
    """One parameter whose parts are those of `parameters`, in order."""
    stems = [p.name.split(".")[-2] for p in parameters]
    joined = ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems)
    *prefix, _, kind = parameters[0].name.split(".")
    sources = {p.source_scheme for p in parameters}
    return replace(
        parameters[0],
        name=".".join([*prefix, joined, kind]),
        shape=(sum(p.shape[0] for p in parameters), *parameters[0].shape[1:]),
        parts=tuple(part for p in parameters for part in p.parts),
        source_scheme=sources.pop() if len(sources) == 1 else "",
    )


def _weight(program: g.Program, node: ir.Node) -> Parameter:
    parameter = program.parameter_of(g.input_of(node, _WEIGHT_INPUT[node.op_type]))
    assert parameter is not None
    return parameter


def _bias_value(node: ir.Node) -> ir.Value | None:
    index = _WEIGHT_INPUT[node.op_type] + 1
    return node.inputs[index] if len(node.inputs) > index else None


def _quantize(node: ir.Node) -> ir.Node | None:
    """The node that quantizes the linear's input; None: it reads floats."""
    return g.producer(node.inputs[0], "quantize_fp8") if node.op_type == "linear_fp8" else None


def _source(node: ir.Node) -> ir.Value:
    """The value the linear reads, before it is quantized."""
    quantize = _quantize(node)
    return g.input_of(node if quantize is None else quantize, 0)


def _input_scale(node: ir.Node) -> float | None:
    quantize = _quantize(node)
    return None if quantize is None else g.float_attribute(quantize, "input_scale")


def _reason(program: g.Program, groups: dict[_Kind, list[ir.Node]]) -> str:
    """Why linears of one input stay apart: "not merged: layers.N.q.weight is q4_k, layers.N.v.weight is
    q6_k".
    """
    texts = []
    differ_in_scale = len({kind.input_scale for kind in groups if kind.scheme == "fp8"}) > 1
    for kind, nodes in groups.items():
        for node in nodes:
            name = re.sub(r"\.\d+\.", ".N.", _weight(program, node).name)  # equal layers are counted together
            bias = " with bias" if kind.has_bias else ""
            scale = " with an input scale of its own" if differ_in_scale and kind.input_scale else ""
            texts.append(f"{name} is {kind.scheme}{bias}{scale}")
    return "not merged: " + ", ".join(sorted(texts))
