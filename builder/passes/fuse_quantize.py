"""An op whose result is only read quantized writes it quantized.

    y = rms_norm(x, w); q, scale, sum = quantize_q8(y)   ->   q, scale, sum = rms_norm_q8(x, w)

Likewise add_rms_norm (which keeps its sum in float) and silu_mul.
"""

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext

_FUSED = {"rms_norm": "rms_norm_q8", "add_rms_norm": "add_rms_norm_q8", "silu_mul": "silu_mul_q8"}


def fuse_quantize(program: g.Program, context: PassContext) -> int:
    """Number of fusions."""
    count = 0
    for quantize in g.nodes_in_order(program):
        if not g.is_op(quantize, "quantize_q8"):
            continue
        y = g.input_of(quantize, 0)
        node = y.producer()
        if node is None or node.domain != g.DOMAIN or node.op_type not in _FUSED:
            continue
        if y is not node.outputs[0] or g.only_user(y) is not quantize:
            continue
        old = [*quantize.outputs, *node.outputs[1:]]
        new = [g.new_value("", g.dtype_of(value), g.shape_of(value)) for value in old]
        fused = ir.Node(
            g.DOMAIN, _FUSED[node.op_type], node.inputs, node.attributes.values(), outputs=new, name=node.name
        )
        # where the op was: its sum may be read before the quantization
        g.replace_nodes(program, [quantize, node], [fused], dict(zip(old, new, strict=True)))
        count += 1
    return count
