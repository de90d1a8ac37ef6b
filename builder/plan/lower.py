"""From a program's graph to launches: values get storages, view nodes become views, states get versions.

Storages: step fields, rows fields, caches, parameters and staging fields by their names in the step ABI and
the graph; logits are one arena storage shared by forward and sampling; every other node output is an arena
storage of its own.
"""

import onnx_ir as ir

from castiron.builder.dims import Affine, Dim, add_dim
from castiron.builder.graph import (
    VIEW_OPS,
    input_of,
    ints_attribute,
    name_of,
    shape_of,
    slice_ranges,
    split_sizes,
)
from castiron.builder.graph import (
    Program as GraphProgram,
)
from castiron.builder.plan.kernel_choice import needs_flat_rows
from castiron.builder.plan.launches import Launch, Program
from castiron.builder.plan.views import Storage, View, flatten_inner, narrow, reshape, transpose, whole
from castiron.models.ops import STATES
from castiron.runtime.errors import InputError
from castiron.runtime.plan_format import MemoryClass
from castiron.runtime.step_abi import output_fields

LOGITS = "logits"
_DTYPES = {
    ir.DataType.FLOAT: "f32",
    ir.DataType.FLOAT16: "f16",
    ir.DataType.BFLOAT16: "bf16",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.INT8: "i8",
    ir.DataType.INT32: "i32",
    ir.DataType.INT64: "i64",
    ir.DataType.UINT64: "u64",
    ir.DataType.UINT32: "u32",
}


def lower(program: GraphProgram, cache_indices: dict[str, int]) -> Program:
    """All launches of the program; kernels are chosen later, bucket by bucket.

    `cache_indices`: state name -> index of its cache tensor.

    Raises InputError naming the node if a view can't be expressed.
    """
    lowering = _Lowering(program, cache_indices)
    for node in program.graph:
        lowering.add_node(node)
    return lowering.finish()


class _Lowering:
    """The view of every value met so far."""

    def __init__(self, program: GraphProgram, cache_indices: dict[str, int]) -> None:
        self._program = program
        self._views: dict[ir.Value, View] = {}
        self._written: dict[Storage, int] = {}  # state storage -> newest version
        self._launches: list[Launch] = []
        self._num_views = 0
        self._staging = _staging_outputs(program)
        for kind, memory_class in (
            ("step", MemoryClass.STEP),
            ("rows", MemoryClass.ROWS),
            ("cache", MemoryClass.CACHE),
            ("parameter", MemoryClass.WEIGHTS),
        ):
            for value in program.inputs_of_kind(kind):
                is_logits = name_of(value) == LOGITS  # a sampling program's, left in the arena by the forward
                storage = (
                    self._logits_storage(value)
                    if is_logits
                    else self._input_storage(value, memory_class, cache_indices)
                )
                self._views[value] = whole(storage)

    def add_node(self, node: ir.Node) -> None:
        """Views for view nodes, a launch for any other."""
        if node.domain == "" and node.op_type in (*VIEW_OPS, "Identity"):
            self._num_views += 1
            for value, view in zip(node.outputs, self._view_node(node), strict=True):
                self._views[value] = view
            return
        inputs = tuple(None if value is None else self._read(value, node) for value in node.inputs)
        state = STATES.get(node.op_type)
        outputs = []
        for index, value in enumerate(node.outputs):
            if state is not None and index == state[1]:
                outputs.append(self._next_version(inputs[state[0]], node))
            else:
                outputs.append(whole(self._output_storage(value)))
            self._views[value] = outputs[-1]
        op = node.op_type.lower() if node.domain == "" else node.op_type
        attributes = {name: _number(attribute) for name, attribute in node.attributes.items()}
        launch = Launch(str(node.name), op, inputs, tuple(outputs), attributes)
        if needs_flat_rows(op):
            launch = _with_flat_rows(launch)
        self._launches.append(launch)

    def finish(self) -> Program:
        """The lowered program; its logits must be a whole storage of their own."""
        logits = next(
            v for v in (*self._program.graph.outputs, *self._program.graph.inputs) if v.name == LOGITS
        )
        view = self._views[logits]
        if view != whole(self._logits_storage(logits)):
            raise InputError(f"logits are a view of {view.storage.name}, expected an op's own output")
        return Program(self._program.kind, tuple(self._launches), view, self._num_views)

    def _read(self, value: ir.Value, node: ir.Node) -> View:
        """The value's view; a state must be read in its newest version: its bytes are reused."""
        view = self._views[value]
        newest = self._written.get(view.storage, 0)
        assert view.version == newest, (
            f"{node.name} reads version {view.version} of {view.storage.name} "
            f"after version {newest} was written"
        )
        return view

    def _next_version(self, view: View | None, node: ir.Node) -> View:
        assert view is not None, f"{node.name} writes a state it doesn't read"
        self._written[view.storage] = view.version + 1
        return whole(view.storage, view.version + 1)

    def _view_node(self, node: ir.Node) -> list[View]:
        source = self._read(input_of(node, 0), node)
        shapes = [shape_of(value) for value in node.outputs]
        if node.op_type == "Identity":
            return [source]
        if node.op_type == "Transpose":
            return [transpose(source, ints_attribute(node, "perm"))]
        if node.op_type == "Split":
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
            axis %= len(source.shape)
            starts = [sum(split_sizes(node)[:index]) for index in range(len(shapes))]
            return [narrow(source, axis, start, shape) for start, shape in zip(starts, shapes, strict=True)]
        if node.op_type == "Slice":
            view = source
            for axis, (start, _) in slice_ranges(node).items():
                axis %= len(source.shape)
                view = narrow(view, axis, _slice_start(start, source.shape[axis], node), shapes[0])
            return [view]
        reshaped = reshape(source, shapes[0])
        if reshaped is None:
            raise InputError(
                f"node {node.name}: a reshape of strides {source.strides} needs a copy, which no kernel "
                "makes: reshape before the slice or transpose"
            )
        return [reshaped]

    def _input_storage(
        self, value: ir.Value, memory_class: MemoryClass, cache_indices: dict[str, int]
    ) -> Storage:
        parameter = self._program.parameter_of(value)
        name = name_of(value)
        dtype = parameter.scheme if parameter is not None else _DTYPES[_dtype(value)]
        return Storage(name, memory_class, shape_of(value), dtype, cache_indices.get(name, 0))

    def _output_storage(self, value: ir.Value) -> Storage:
        if value in self._staging:
            return Storage(self._staging[value], MemoryClass.STAGING, shape_of(value), _DTYPES[_dtype(value)])
        if name_of(value) == LOGITS:
            return self._logits_storage(value)
        return Storage(name_of(value), MemoryClass.ARENA, shape_of(value), _DTYPES[_dtype(value)])

    def _logits_storage(self, value: ir.Value) -> Storage:
        return Storage(LOGITS, MemoryClass.ARENA, shape_of(value), "f32")


def _staging_outputs(program: GraphProgram) -> dict[ir.Value, str]:
    """Graph outputs the host reads back, by their names in the step ABI."""
    names = {field.name for field in output_fields()}
    return {value: name_of(value) for value in program.graph.outputs if value.name in names}


def _with_flat_rows(launch: Launch) -> Launch:
    """Operands of an elementwise op as [rows, dim] where their inner dims have no gaps."""
    inputs = tuple(view if view is None else flatten_inner(view) or view for view in launch.inputs)
    return Launch(
        launch.node,
        launch.op,
        inputs,
        tuple(flatten_inner(view) or view for view in launch.outputs),
        launch.attributes,
    )


def _slice_start(start: int, size: Dim, node: ir.Node) -> int:
    if start >= 0:
        return start
    from_end = add_dim(size, start)
    if isinstance(from_end, Affine):
        raise InputError(f"node {node.name} slices from the end of a live count: slice from its start")
    return from_end


def _number(attribute: ir.Attr) -> float | int:
    return attribute.as_float() if attribute.type == ir.AttributeType.FLOAT else attribute.as_int()


def _dtype(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None, f"{value.name} has no type"
    return value.dtype
