"""An op whose result is only read quantized writes it quantized.

    y = rms_norm(x, w); q, scale, sum = quantize_q8(y)   ->   q, scale, sum = rms_norm_q8(x, w)
    y = rms_norm(x, w); q, scale = quantize_fp8(y)       ->   q, scale = rms_norm_fp8(x, w)

Likewise add_rms_norm (which keeps its sum in float) and silu_mul.
"""

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext

_SUFFIXES = {"quantize_q8": "q8", "quantize_fp8": "fp8"}  # the fused op: rms_norm_q8
_FUSABLE = ("rms_norm", "add_rms_norm", "silu_mul")


def fuse_quantize(program: g.Program, context: PassContext) -> int:
    """Number of fusions."""
    count = 0
    for quantize in g.nodes_in_order(program):
        if quantize.domain != g.DOMAIN or quantize.op_type not in _SUFFIXES:
            continue
        y = g.input_of(quantize, 0)
        node = y.producer()
        if node is None or node.domain != g.DOMAIN or node.op_type not in _FUSABLE:
            continue
        if y is not node.outputs[0] or g.only_user(y) is not quantize:
            continue
        old = [*quantize.outputs, *node.outputs[1:]]
        new = [g.new_value("", g.dtype_of(value), g.shape_of(value)) for value in old]
        op = f"{node.op_type}_{_SUFFIXES[quantize.op_type]}"
        attributes = [*node.attributes.values(), *quantize.attributes.values()]
        fused = ir.Node(g.DOMAIN, op, node.inputs, attributes, outputs=new, name=node.name)
        # where the op was: its sum may be read before the quantization
        g.replace_nodes(program, [quantize, node], [fused], dict(zip(old, new, strict=True)))
        count += 1
    return count
