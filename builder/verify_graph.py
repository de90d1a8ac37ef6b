"""What must hold of a program after every pass; a violation is our own mistake, named with the stage."""

from typing import Any, NamedTuple

import onnx_ir as ir
import torch

from castiron.builder import graph as g
from castiron.builder.dims import evaluate_dim
from castiron.builder.interpreter import knows_op, run_node
from castiron.models.ops import STATES

# distinct primes: a dimension mixed up with another shows
_SIZES = {"num_tokens": 23, "num_seqs": 11, "num_logits": 5, "num_blocks": 31, "max_rows": 47}
_DTYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    # narrow_activations states a float32 result as bfloat16: it is rounded when it is stored
    ir.DataType.BFLOAT16: torch.float32,
    ir.DataType.FLOAT8E4M3FN: torch.float8_e4m3fn,
    ir.DataType.INT8: torch.int8,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.UINT32: torch.uint32,
    ir.DataType.UINT64: torch.uint64,
}


class _Tensor(NamedTuple):
    """A value in examples' sizes."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {self.sizes}"


_Content = _Tensor | tuple[int, ...]  # a tensor, or the data of a constant


class GraphError(AssertionError):
    """A program that breaks a rule; the message names the stage and the node or value."""


def verify_graph(program: g.Program, stage: str) -> None:
    """Check names, order, shapes, states and parameters. Raises GraphError."""
    try:
        _check_values(program)
        _check_states(program)
        _check_parameters(program)
    except (AssertionError, RuntimeError, ValueError, KeyError, IndexError, TypeError) as error:
        raise GraphError(f"after {stage}: {error}") from error


def _check_values(program: g.Program) -> None:
    """SSA and topological order; every op known; shapes and types as the op's own rule gives them."""
    known: dict[ir.Value, _Content] = {}
    names: set[str] = set()
    results_of: dict[tuple[Any, ...], list[_Content]] = {}  # equal nodes, one a layer, are asked once

    def define(value: ir.Value, content: _Content) -> None:
        assert value.name, "a value has no name"
        assert value.name not in names, f"two values are named {value.name}"
        names.add(value.name)
        known[value] = content

    for value in program.graph.inputs:
        define(value, _stated(value))
    for value in program.graph.initializers.values():
        define(value, g.constant_ints(value))
    for node in program.graph:
        assert knows_op(node), f"{node.name} is {node.domain}.{node.op_type}, which has no reference"
        for used in node.inputs:
            assert used is None or used in known, f"{node.name} reads {used.name if used else ''} too early"
        contents = tuple(None if value is None else known[value] for value in node.inputs)
        attributes = tuple((name, attribute.value) for name, attribute in node.attributes.items())
        question = (node.domain, node.op_type, attributes, contents)
        if question not in results_of:
            results_of[question] = _results(node, contents)
        results = results_of[question]
        assert len(results) == len(node.outputs), f"{node.name} has {len(node.outputs)} outputs"
        for value, result in zip(node.outputs, results, strict=True):
            assert value.producer() is node, f"{value.name} isn't made by {node.name}"
            stated = _stated(value)
            assert stated == result, f"{value.name} is stated as {stated}, {node.op_type} makes {result}"
            define(value, stated)
    for value in program.graph.outputs:
        assert value in known, f"output {value.name} isn't made"
        assert value.producer() is not None, f"output {value.name} is an input"


def _results(node: ir.Node, contents: tuple[_Content | None, ...]) -> list[_Content]:
    """What the node's own rule makes of its inputs. Raises AssertionError if it can't take them."""
    arguments = [_meta_tensor(content) if isinstance(content, _Tensor) else content for content in contents]
    try:
        results = run_node(node, arguments, shapes_only=True)
    except (AssertionError, RuntimeError, IndexError, ValueError) as error:
        raise AssertionError(f"{node.name} ({node.op_type}): {error}") from error
    return [_Tensor(result.dtype, tuple(result.shape)) for result in results]


def _check_states(program: g.Program) -> None:
    """Each version is written over once at most, no version is read after the next is written, the last is
    output.
    """
    inputs = {g.name_of(value): value for value in program.graph.inputs}
    missing = [state.name for state in program.states if state.name not in inputs]
    assert not missing, f"no input {missing}"
    newest = {inputs[state.name]: state for state in program.states}
    stale: dict[ir.Value, str] = {}  # versions written over -> by which node
    for node in program.graph:
        for value in node.inputs:
            if value in stale:
                raise AssertionError(f"{node.name} reads {value.name} after {stale[value]} wrote over it")
        rule = STATES.get(node.op_type) if node.domain == g.DOMAIN else None
        if rule is None:
            leaked = [
                v.name for v in node.inputs if v in newest and node.op_type in (*g.VIEW_OPS, "Add", "Mul")
            ]
            assert not leaked, f"{node.name} copies or views the state {leaked}"
            continue
        read, written = g.input_of(node, rule[0]), node.outputs[rule[1]]
        assert read in newest, f"{node.name} writes {read.name}, which isn't a state's newest version"
        newest[written] = newest.pop(read)
        stale[read] = str(node.name)
    outputs = {g.name_of(value): value for value in program.graph.outputs}
    for value, state in newest.items():
        assert outputs.get(state.output) is value, (
            f"output {state.output} isn't the last version of {state.name}"
        )


def _check_parameters(program: g.Program) -> None:
    values = {g.name_of(value): value for value in program.inputs_of_kind("parameter")}
    assert values.keys() == program.parameters.keys(), (
        f"parameters and inputs differ: {sorted(values.keys() ^ program.parameters.keys())[:4]}"
    )
    for name, parameter in program.parameters.items():
        assert parameter.name == name, f"{parameter.name} is kept as {name}"
        assert g.shape_of(values[name]) == parameter.shape, f"{name}: shapes differ"
        if parameter.constant is None:
            rows = sum(part.row_stop - part.row_start for part in parameter.parts)
            assert rows == parameter.shape[0], f"{name}: parts give {rows} of {parameter.shape[0]} rows"


def _stated(value: ir.Value) -> _Tensor:
    """What the graph says of a value."""
    sizes = tuple(evaluate_dim(dim, _SIZES) for dim in g.shape_of(value))
    return _Tensor(_DTYPES[g.dtype_of(value)], sizes)


def _meta_tensor(content: _Tensor) -> torch.Tensor:
    return torch.empty(content.sizes, dtype=content.dtype, device="meta")
