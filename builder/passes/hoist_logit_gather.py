"""Rows without wanted logits leave early: the gather moves up through every op that works row by row.

    x -> rms_norm -> linear -> gather_rows        x -> gather_rows -> rms_norm -> linear
    (and so on up to the last layer's attention; a linear_fp8 takes the quantize_fp8 before it along)

A prefill chunk of 512 tokens so runs the last layer's output projection and MLP on one row, not on 512.
"""

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.lower_linear_fp8 import quantized_values
from castiron.builder.passes.context import PassContext

# op -> inputs that hold one row a token; the op's only output does too
_ROW_WISE: dict[str, tuple[int, ...]] = {
    "Add": (0, 1),
    "Mul": (0, 1),
    "silu": (0,),
    "rms_norm": (0,),
    "linear": (0,),
}


def hoist_logit_gather(program: g.Program, context: PassContext) -> int:
    """Number of nodes that now work on gathered rows."""
    count = 0
    while True:
        gather = next((n for n in program.graph if g.is_op(n, "gather_rows") and _can_hoist(n)), None)
        if gather is None:
            return count
        _hoist(program, gather)
        count += 1


def _can_hoist(gather: ir.Node) -> bool:
    source = g.input_of(gather, 0)
    node = source.producer()
    is_quantized = g.is_op(node, "linear_fp8") and _quantize_of(node) is not None
    if not is_quantized and not any(g.is_op(node, op) for op in _ROW_WISE):
        return False
    return not source.is_graph_output() and g.users(source) == [gather]


def _hoist(program: g.Program, gather: ir.Node) -> None:
    node = g.input_of(gather, 0).producer()
    assert node is not None
    rows = g.input_of(gather, 1)
    inputs = list(node.inputs)
    new: list[ir.Node] = []
    quantize = _quantize_of(node) if g.is_op(node, "linear_fp8") else None
    if quantize is not None:
        gathered = _gathered(g.input_of(quantize, 0), rows, new)
        inputs[:2] = _quantized(gathered, quantize, new)
    else:
        for index in dict.fromkeys(_ROW_WISE[node.op_type]):
            inputs[index] = _gathered(g.input_of(node, index), rows, new)
    old_output = gather.outputs[0]
    output = g.new_value("", g.dtype_of(old_output), g.shape_of(old_output))
    moved = ir.Node(
        node.domain, node.op_type, inputs, node.attributes.values(), outputs=[output], name=node.name
    )
    # the node goes with the gather, its only reader; the pipeline's sort moves reused gathers ahead
    g.replace_nodes(program, [node, gather], [*new, moved], {old_output: output})
    if quantize is not None and not any(g.users(value) for value in quantize.outputs):
        program.graph.remove([quantize], safe=True)  # its input's only other reader may be the next gather


def _gathered(source: ir.Value, rows: ir.Value, new: list[ir.Node]) -> ir.Value:
    """These rows of `source`: as they are gathered already, or by a node put into `new`."""
    existing = _existing_gather(source, rows)
    if existing is not None:
        return existing
    columns = g.shape_of(source)[1:]
    gathered = g.new_value(f"{source.name}.gathered", g.dtype_of(source), (g.shape_of(rows)[0], *columns))
    new.append(g.new_node("gather_rows", [source, rows], [gathered]))
    return gathered


def _quantize_of(linear: ir.Node | None) -> ir.Node | None:
    """The node that quantizes what a linear_fp8 reads."""
    return g.producer(linear.inputs[0], "quantize_fp8") if linear is not None else None


def _quantized(x: ir.Value, like: ir.Node, new: list[ir.Node]) -> list[ir.Value]:
    """q and scale of x, quantized as `like` does it: already, or by a node put into `new`."""
    input_scale = g.float_attribute(like, "input_scale")
    for user in g.users(x):
        if g.is_op(user, "quantize_fp8") and g.float_attribute(user, "input_scale") == input_scale:
            return list(user.outputs)
    values = quantized_values(g.name_of(x), x)
    new.append(g.new_node("quantize_fp8", [x], values, {"input_scale": input_scale}))
    return values


def _existing_gather(source: ir.Value, rows: ir.Value) -> ir.Value | None:
    """These rows of `source`, if they are gathered already."""
    for user in g.users(source):
        if g.is_op(user, "gather_rows") and user.inputs[1] is rows:
            return user.outputs[0]
    return None
