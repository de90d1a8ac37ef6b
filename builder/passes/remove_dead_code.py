"""Nodes nobody reads go (onnx_ir's stock pass), then the parameters only they read.

a = f(x, w); b = g(x) -> output   ->   b = g(x) -> output
"""

from onnx_ir.passes.common import RemoveUnusedNodesPass

from castiron.builder.graph import Program
from castiron.builder.passes.context import PassContext


def remove_dead_code(program: Program, context: PassContext) -> int:
    """Number of nodes and parameters removed. State writes stay: their last versions are graph outputs."""
    before = len(program.graph)
    RemoveUnusedNodesPass()(program.model)
    return before - len(program.graph) + program.remove_unused_parameters()
