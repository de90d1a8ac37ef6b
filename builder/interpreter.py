"""Runs a program node by node with the plain torch references of its ops, after any pass.

Slow and exact in meaning: it is what golden values and the comparison of pass stages come from.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from castiron.builder import graph as g
from castiron.builder.parameters import Parameter
from castiron.models import fp8_ops, logit_ops, lowered_ops, ops, sampling_ops

_ = (fp8_ops, logit_ops, lowered_ops, sampling_ops)  # imported to register their references


def run(
    program: g.Program,
    inputs: Mapping[str, torch.Tensor],
    load_parameter: Callable[[Parameter], torch.Tensor],
    on_node: Callable[[ir.Node, list[torch.Tensor]], None] | None = None,
) -> dict[str, torch.Tensor]:
    """The graph's outputs by name, for graph inputs (step fields, rows fields, caches) by name.

    load_parameter gives a parameter's float32 values; each is loaded when a node needs it and dropped after
    that node, so that weights stream. Values are dropped after their last use. `on_node` sees each node's
    results. Inputs aren't changed. Raises KeyError for a missing input, ValueError for one of another rank or
    dtype.
    """
    values: dict[ir.Value, torch.Tensor] = {}
    for kind in ("step", "rows", "cache"):
        for value in program.inputs_of_kind(kind):
            values[value] = _checked_input(value, inputs[g.name_of(value)])
    remaining = _count_uses(program)
    with torch.no_grad():
        for node in program.graph:
            arguments = [_argument(program, values, load_parameter, value) for value in node.inputs]
            results = run_node(node, arguments)
            if on_node is not None:
                on_node(node, results)
            for used in node.inputs:
                if used is not None and used in values:
                    remaining[used] -= 1
                    if remaining[used] == 0:
                        del values[used]
            for output, result in zip(node.outputs, results, strict=True):
                if remaining[output]:
                    values[output] = _stored(output, result)
    return {g.name_of(output): values[output] for output in program.graph.outputs}


def _count_uses(program: g.Program) -> Counter[ir.Value]:
    uses: Counter[ir.Value] = Counter()
    for node in program.graph:
        uses.update(value for value in node.inputs if value is not None)
    uses.update(program.graph.outputs)
    return uses


def _stored(value: ir.Value, result: torch.Tensor) -> torch.Tensor:
    """The result as a later op reads it: rounded where the graph keeps it in bfloat16."""
    if value.dtype == ir.DataType.BFLOAT16 and result.dtype == torch.float32:
        return result.to(torch.bfloat16).float()
    return result


def _checked_input(value: ir.Value, tensor: torch.Tensor) -> torch.Tensor:
    rank = len(g.shape_of(value))
    if tensor.dim() != rank:
        raise ValueError(f"input {value.name} has {tensor.dim()} dimensions, expected {rank}")
    is_float = g.dtype_of(value).is_floating_point()
    if tensor.dtype.is_floating_point != is_float:
        raise ValueError(f"input {value.name} is {tensor.dtype}, expected {g.dtype_of(value)}")
    return tensor


def _argument(
    program: g.Program,
    values: Mapping[ir.Value, torch.Tensor],
    load_parameter: Callable[[Parameter], torch.Tensor],
    value: ir.Value | None,
) -> Any:
    if value is None:
        return None
    if value in values:
        return values[value]
    if value.const_value is not None:
        return g.constant_ints(value)
    parameter = program.parameter_of(value)
    assert parameter is not None, f"{value.name} is read before it is made"
    tensor = load_parameter(parameter)
    assert tuple(tensor.shape) == parameter.shape, f"{parameter.name} was loaded as {tuple(tensor.shape)}"
    return tensor


def knows_op(node: ir.Node) -> bool:
    """True if the node's op has a reference."""
    return node.op_type in (ops.REFERENCES if node.domain == g.DOMAIN else STANDARD_OPS)


def run_node(node: ir.Node, arguments: Sequence[Any], shapes_only: bool = False) -> list[torch.Tensor]:
    """One node on tensors, absent inputs None and constants tuples of ints.

    shapes_only: arguments are meta tensors, and so are the results; raises AssertionError or RuntimeError if
    the op can't take them.
    """
    if node.domain == g.DOMAIN:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        functions = ops.SHAPE_RULES if shapes_only else ops.REFERENCES
        results = functions[node.op_type](*arguments, **attributes)
    else:
        results = STANDARD_OPS[node.op_type](node, arguments)
    return [results] if isinstance(results, torch.Tensor) else list(results)


def _reshape(node: ir.Node, arguments: Sequence[Any]) -> torch.Tensor:
    tensor: torch.Tensor = arguments[0]
    sizes: Sequence[int] = arguments[1]
    return tensor.reshape([tensor.shape[i] if size == 0 else size for i, size in enumerate(sizes)])


def _slice(node: ir.Node, arguments: Sequence[Any]) -> torch.Tensor:
    tensor: torch.Tensor = arguments[0]
    for axis, (start, stop) in g.slice_ranges(node).items():
        tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def _elementwise(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    def run(node: ir.Node, arguments: Sequence[Any]) -> torch.Tensor:
        a, b = arguments
        assert a.shape == b.shape, f"{node.name}: {tuple(a.shape)} and {tuple(b.shape)}"
        return function(a, b)

    return run


# ops of the standard ONNX domain
STANDARD_OPS: dict[str, Callable[[ir.Node, Sequence[Any]], Any]] = {
    "Add": _elementwise(torch.add),
    "Mul": _elementwise(torch.mul),
    "Reshape": _reshape,
    "Slice": _slice,
    "Split": lambda node, arguments: torch.split(
        arguments[0], list(arguments[1]), dim=g.int_attribute(node, "axis", 0)
    ),
    "Transpose": lambda node, arguments: arguments[0].permute(g.ints_attribute(node, "perm")),
}
