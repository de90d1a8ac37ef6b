"""The residual addition joins the norm that reads it.

sum = residual + x; y = rms_norm(sum, w)   ->   y, sum = add_rms_norm(x, residual, w)
"""

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext


def fuse_add_rms_norm(program: g.Program, context: PassContext) -> int:
    """Number of fusions; an addition read by several norms joins the first."""
    count = 0
    for norm in g.nodes_in_order(program):
        if not g.is_op(norm, "rms_norm"):
            continue
        old_sum = g.input_of(norm, 0)
        add = g.producer(old_sum, "Add")
        if add is None:
            continue
        residual, x = g.input_of(add, 0), g.input_of(add, 1)
        old_y = norm.outputs[0]
        y = g.new_value("", g.dtype_of(old_y), g.shape_of(old_y))
        new_sum = g.new_value("", g.dtype_of(old_sum), g.shape_of(old_sum))
        fused = g.new_node(
            "add_rms_norm",
            [x, residual, norm.inputs[1]],
            [y, new_sum],
            {"eps": g.float_attribute(norm, "eps")},
        )
        # where the addition was: other readers of the sum may come before the norm
        g.replace_nodes(program, [norm, add], [fused], {old_y: y, old_sum: new_sum})
        count += 1
    return count
