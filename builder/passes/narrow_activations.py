"""Values between ops are kept in bfloat16 where the CUDA kernels read and write them so (CUDA targets only).

embedding -> f32 x                                   the residual stream stays float32; so do scales of float8
rms_norm, add_rms_norm -> bf16 y (, f32 residual)
linear, linear_fp8, silu_mul, paged_attention, rope_kv_write -> bf16        logits stay float32
"""

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.builder.passes.context import PassContext

# op -> its outputs that are stored in bfloat16; views and gathers keep what they read
_BF16_OUTPUTS: dict[str, tuple[int, ...]] = {
    "rms_norm": (0,),
    "add_rms_norm": (0,),
    "linear": (0,),
    "linear_fp8": (0,),
    "silu_mul": (0,),
    "rope_kv_write": (0,),
    "paged_attention": (0,),
}
_SAME_AS_INPUT = (*g.VIEW_OPS, "gather_rows")


def narrow_activations(program: g.Program, context: PassContext) -> int:
    """Number of values that became bfloat16."""
    count = 0
    for node in program.graph:
        if node.op_type in _SAME_AS_INPUT:
            narrowed = list(node.outputs) if g.input_of(node, 0).dtype == ir.DataType.BFLOAT16 else []
        else:
            narrowed = [node.outputs[index] for index in _BF16_OUTPUTS.get(node.op_type, ())]
        for value in narrowed:
            if value.dtype == ir.DataType.FLOAT and not value.is_graph_output():
                # a new type: the program as traced, whose golden values are computed meanwhile, shares the old one
                value.type = ir.TensorType(ir.DataType.BFLOAT16)
                count += 1
    return count
