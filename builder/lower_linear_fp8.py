"""Linears of fp8 weights read activations quantized to float8: part of the trace, since the checkpoint means it so.

    y = linear(x, W)   ->   q, scale = quantize_fp8(x); y = linear_fp8(q, scale, W)

Golden values hence are those of quantized activations too.
"""

import onnx_ir as ir

from castiron.builder import graph as g


def lower_linear_fp8(program: g.Program) -> None:
    """Lower every linear whose weight has scheme fp8, in place; each quantizes its own input."""
    for node in g.nodes_in_order(program):
        if not g.is_op(node, "linear"):
            continue
        weight = program.parameter_of(g.input_of(node, 1))
        if weight is None or weight.scheme != "fp8":
            continue
        x, old = g.input_of(node, 0), node.outputs[0]
        quantized = quantized_values(g.name_of(old), x)
        output = g.new_value("", g.dtype_of(old), g.shape_of(old))
        quantize = g.new_node("quantize_fp8", [x], quantized, {"input_scale": weight.input_scale})
        lowered = g.new_node("linear_fp8", [*quantized, *node.inputs[1:]], [output])
        g.replace_nodes(program, [node], [quantize, lowered], {old: output})


def quantized_values(name: str, x: ir.Value) -> list[ir.Value]:
    """q and scale of a value, `name`.q and `name`.scale."""
    shape = g.shape_of(x)
    return [
        g.new_value(f"{name}.q", ir.DataType.FLOAT8E4M3FN, shape),
        g.new_value(f"{name}.scale", ir.DataType.FLOAT, shape[:1]),
    ]
