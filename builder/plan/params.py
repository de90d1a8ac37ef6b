"""A kernel's parameter block from its spec's bindings: raw bytes with addresses zero, and the relocations."""

import struct
from dataclasses import dataclass, field

from castiron.builder.dims import evaluate_dim
from castiron.builder.plan.kernel_choice import operand, scalar_value
from castiron.builder.plan.launches import Launch
from castiron.builder.plan.views import Storage, View
from castiron.models.kernel_spec import TENSOR_MAP_BYTES, TYPE_CODES, KernelParameter, pack_alignment
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.runtime.plan_format import MemoryClass, RelocationKind, TensorMap
from castiron.runtime.step_abi import HEADER_WORDS

_MAP_ELEMENTS = {"bf16": "bf16", "fp8": "u8"}  # dtype of a view -> element type of its tensor map
Relocation = tuple[int, int, int, int, int, int, int, int]  # the fields of RELOCATION_DTYPE


@dataclass(frozen=True)
class Placement:
    """Where storages are in one plan: byte offsets by name, and the capacities behind the symbols."""

    offsets: dict[tuple[MemoryClass, str], int]
    extents: dict[tuple[MemoryClass, str], int]  # bytes, of storages without a dense shape: weights, caches
    symbols: dict[str, int]  # num_tokens, num_seqs, num_logits, max_rows at capacity


@dataclass
class TensorMaps:
    """The tensor maps of an engine, each once."""

    _indices: dict[TensorMap, int] = field(default_factory=dict)

    def index(self, tensor_map: TensorMap) -> int:
        """The map's place in the header, added if it is new."""
        return self._indices.setdefault(tensor_map, len(self._indices))

    def all(self) -> tuple[TensorMap, ...]:
        """All maps in the order of their indices."""
        return tuple(self._indices)


def fill_params(
    launch: Launch, placement: Placement, tensor_maps: TensorMaps
) -> tuple[bytes, list[Relocation]]:
    """The launch's parameter block and relocations, sorted by their place."""
    assert launch.spec is not None
    codes = "<"
    values: list[int | float | bytes] = []
    relocations: list[Relocation] = []
    for parameter in launch.spec.parameters:
        place = struct.calcsize(codes)
        if parameter.type in ("p", "t"):
            relocation = _relocation(launch, parameter, placement, tensor_maps, place)
            if relocation is not None:
                relocations.append(relocation)
            values.append(bytes(TENSOR_MAP_BYTES) if parameter.type == "t" else 0)
        else:
            values.append(scalar_value(launch, parameter.binding, placement.symbols["max_rows"]))
        codes += TYPE_CODES[parameter.type]
    block = struct.pack(codes, *values)
    return block + bytes(-len(block) % pack_alignment(launch.spec)), relocations


def _relocation(
    launch: Launch, parameter: KernelParameter, placement: Placement, tensor_maps: TensorMaps, place: int
) -> Relocation | None:
    """What fills an address or a tensor map; None for an absent operand, and for one the kernel doesn't use."""
    if parameter.binding == "zero":
        return None
    name, _, what = parameter.binding.partition(".")
    kind = RelocationKind.TENSOR_MAP if parameter.type == "t" else RelocationKind.ADDRESS
    memory_class, target_index, map_index = MemoryClass.STEP, 0, 0
    if name == "header":
        start, extent = 0, 4 * HEADER_WORDS
    elif name == "scratch":
        assert launch.shape is not None
        memory_class = MemoryClass.ARENA
        start = placement.offsets[MemoryClass.ARENA, scratch_name(launch)]
        extent = launch.shape.scratch_bytes
    elif name == "counters":
        assert launch.shape is not None
        memory_class, start, extent = MemoryClass.COUNTERS, 0, launch.shape.counters_bytes
    else:
        view = operand(launch, name)
        if view is None:
            assert what.endswith("?"), f"{launch.node}: {parameter.binding} is required"
            return None
        memory_class, target_index = view.storage.memory_class, view.storage.target_index
        start, extent = address(view, placement)
        if parameter.type == "t":
            map_index = tensor_maps.index(_tensor_map(launch, parameter, view, placement))
    return place, kind, memory_class, target_index, start, extent, map_index, 0


def _tensor_map(launch: Launch, parameter: KernelParameter, view: View, placement: Placement) -> TensorMap:
    """The map of a matrix's rows at capacity: dims innermost first, 128-byte swizzle."""
    assert isinstance(launch.spec, CudaKernelSpec) and len(view.shape) == 2, launch.node
    rows, columns = (evaluate_dim(dim, placement.symbols) for dim in view.shape)
    box = launch.spec.boxes[parameter.name]
    return TensorMap(
        element_type=_MAP_ELEMENTS[view.storage.dtype],
        dims=(columns, rows),
        strides_bytes=(view.strides[0] * view.storage.itemsize,),
        box=box,
        swizzle="128",
    )


def scratch_name(launch: Launch) -> str:
    """The arena value that is the launch's scratch."""
    return f"{launch.node}.scratch"


def address(view: View, placement: Placement) -> tuple[int, int]:
    """Byte offset in the memory class, and bytes a kernel may touch from there."""
    key = storage_key(view.storage)
    base = placement.offsets[key]
    if key in placement.extents:
        return base, placement.extents[key]
    itemsize = view.storage.itemsize
    return base + view.offset * itemsize, view.span_elements(placement.symbols) * itemsize


def storage_key(storage: Storage) -> tuple[MemoryClass, str]:
    """How a placement finds the storage."""
    return storage.memory_class, storage.name


def storage_bytes(storage: Storage, symbols: dict[str, int]) -> int:
    """Bytes of a dense storage at these capacities."""
    size = storage.itemsize
    for dim in storage.shape:
        size *= evaluate_dim(dim, symbols)
    return size
