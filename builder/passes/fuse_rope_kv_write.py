"""Rotating q and k and writing k and v to the cache become one op.

   q' = apply_rope(q); k' = apply_rope(k); cache' = kv_write(cache, k', v, slots)
-> q', cache' = rope_kv_write(q, k, v, cos, sin, cache, slots)
"""

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext


def fuse_rope_kv_write(program: g.Program, context: PassContext) -> int:
    """Number of fusions."""
    count = 0
    for write in g.nodes_in_order(program):
        if not g.is_op(write, "kv_write"):
            continue
        cache, rotated_k, v, slots = (g.input_of(write, i) for i in range(4))
        rope_k = g.producer(rotated_k, "apply_rope")
        rope_q = _query_rope(write)
        if rope_k is None or rope_q is None or g.only_user(rotated_k) is not write:
            continue
        cos, sin = g.input_of(rope_k, 1), g.input_of(rope_k, 2)
        if rope_q is rope_k or rope_q.inputs[1] is not cos or rope_q.inputs[2] is not sin:
            continue
        old_q, old_cache = rope_q.outputs[0], write.outputs[0]
        new_q = g.new_value("", g.dtype_of(old_q), g.shape_of(old_q))
        new_cache = g.new_value("", g.dtype_of(old_cache), g.shape_of(old_cache))
        inputs = [g.input_of(rope_q, 0), g.input_of(rope_k, 0), v, cos, sin, cache, slots]
        fused = g.new_node("rope_kv_write", inputs, [new_q, new_cache])
        g.replace_nodes(program, [rope_q, rope_k, write], [fused], {old_q: new_q, old_cache: new_cache})
        count += 1
    return count


def _query_rope(write: ir.Node) -> ir.Node | None:
    """The rotation of the queries that attend to the cache this node writes."""
    for user in g.users(write.outputs[0]):
        if g.is_op(user, "paged_attention"):
            return g.producer(user.inputs[0], "apply_rope")
    return None
