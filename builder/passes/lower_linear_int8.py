"""With int8 compute, linears of quantized weights read activations quantized to pairs of int8.

    y = linear(x, W)   ->   q, scale, sum = quantize_q8(x); y = linear_q8(q, scale, sum, W)

Linears of one input share its quantization. Dense weights, and rows that aren't whole groups of 32, stay as
they are.
"""

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext
from castiron.models.lowered_ops import DIGITS, GROUP, SUM_GROUP
from castiron.models.schemes import SCHEMES


def lower_linear_int8(program: g.Program, context: PassContext) -> int:
    """Number of linears lowered."""
    if context.compute != "int8":
        return 0
    quantized: dict[ir.Value, list[ir.Value]] = {}  # x -> q, scale, sum
    count = 0
    for node in g.nodes_in_order(program):
        if not g.is_op(node, "linear"):
            continue
        weight = program.parameter_of(g.input_of(node, 1))
        assert weight is not None, f"{node.name} has a computed weight"
        if not SCHEMES[weight.scheme].is_quantized:
            context.note(f"not lowered to int8: a linear whose weight is {weight.scheme}")
            continue
        if weight.shape[1] % GROUP:
            context.note(
                f"not lowered to int8: a linear with {weight.shape[1]} columns, not a multiple of {GROUP}"
            )
            continue
        x = g.input_of(node, 0)
        new = []
        if x not in quantized:
            quantized[x] = _quantized_values(x)
            new.append(g.new_node("quantize_q8", [x], quantized[x]))
        old = node.outputs[0]
        output = g.new_value("", g.dtype_of(old), g.shape_of(old))
        new.append(g.new_node("linear_q8", [*quantized[x], *node.inputs[1:]], [output]))
        g.replace_nodes(program, [node], new, {old: output})
        count += 1
    return count


def _quantized_values(x: ir.Value) -> list[ir.Value]:
    rows, k = g.shape_of(x)
    assert isinstance(k, int)
    return [
        g.new_value(f"{x.name}.q", ir.DataType.INT8, (rows, DIGITS, k)),
        g.new_value(f"{x.name}.scale", ir.DataType.FLOAT, (rows, k // GROUP)),
        g.new_value(f"{x.name}.sum", ir.DataType.FLOAT, (rows, k // SUM_GROUP)),
    ]
