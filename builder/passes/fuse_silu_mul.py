"""The gated activation becomes one op.

silu(a) * b   ->   silu_mul(a, b)
"""

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext


def fuse_silu_mul(program: g.Program, context: PassContext) -> int:
    """Number of fusions."""
    count = 0
    for mul in g.nodes_in_order(program):
        if not g.is_op(mul, "Mul"):
            continue
        for gate_index in (0, 1):
            gate = g.input_of(mul, gate_index)
            silu = g.producer(gate, "silu")
            if silu is None or g.only_user(gate) is not mul or mul.inputs[0] is mul.inputs[1]:
                continue
            old = mul.outputs[0]
            output = g.new_value("", g.dtype_of(old), g.shape_of(old))
            fused = g.new_node("silu_mul", [silu.inputs[0], mul.inputs[1 - gate_index]], [output])
            g.replace_nodes(program, [silu, mul], [fused], {old: output})
            count += 1
            break
    return count
