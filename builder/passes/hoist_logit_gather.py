"""Rows without wanted logits leave early: the gather moves up through every op that works row by row.

    x -> rms_norm -> linear -> gather_rows        x -> gather_rows -> rms_norm -> linear
    (and so on up to the last layer's attention)

A prefill chunk of 512 tokens so runs the last layer's output projection and MLP on one row, not on 512.
"""

import onnx_ir as ir

from castiron.builder import graph as g
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
    if node is None or not any(g.is_op(node, op) for op in _ROW_WISE):
        return False
    return not source.is_graph_output() and g.users(source) == [gather]


def _hoist(program: g.Program, gather: ir.Node) -> None:
    node = g.input_of(gather, 0).producer()
    assert node is not None
    rows = g.input_of(gather, 1)
    inputs = list(node.inputs)
    new: list[ir.Node] = []
    for index in dict.fromkeys(_ROW_WISE[node.op_type]):
        source = g.input_of(node, index)
        gathered = _existing_gather(source, rows)
        if gathered is None:
            columns = g.shape_of(source)[1:]
            gathered = g.new_value(
                f"{source.name}.gathered", g.dtype_of(source), (g.shape_of(rows)[0], *columns)
            )
            new.append(g.new_node("gather_rows", [source, rows], [gathered]))
        inputs[index] = gathered
    old_output = gather.outputs[0]
    output = g.new_value("", g.dtype_of(old_output), g.shape_of(old_output))
    moved = ir.Node(
        node.domain, node.op_type, inputs, node.attributes.values(), outputs=[output], name=node.name
    )
    # the node goes with the gather, its only reader; the pipeline's sort moves reused gathers ahead
    g.replace_nodes(program, [node, gather], [*new, moved], {old_output: output})


def _existing_gather(source: ir.Value, rows: ir.Value) -> ir.Value | None:
    """These rows of `source`, if they are gathered already."""
    for user in g.users(source):
        if g.is_op(user, "gather_rows") and user.inputs[1] is rows:
            return user.outputs[0]
    return None
