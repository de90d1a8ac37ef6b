"""Equal nodes on equal inputs become one (onnx_ir's stock pass; safe since states are values).

a = f(x); b = f(x); g(a, b)   ->   a = f(x); g(a, a)
"""

from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from castiron.builder.graph import Program
from castiron.builder.passes.context import PassContext


def eliminate_common_subexpressions(program: Program, context: PassContext) -> int:
    """Number of nodes removed."""
    before = len(program.graph)
    CommonSubexpressionEliminationPass()(program.model)
    return before - len(program.graph)
