"""Values as storage + offset + strides: reshape, slice, split and transpose are views, never launches."""

from dataclasses import dataclass, replace

from castiron.builder.dims import Dim, evaluate_dim, format_dim
from castiron.builder.graph import SYMBOLS
from castiron.runtime.plan_format import MemoryClass

# Two unrelated assignments of every symbol: what holds for both doesn't depend on the symbols.
_PROBES = tuple(
    dict(zip(SYMBOLS, primes, strict=True))
    for primes in ((10007, 20011, 30011, 40009, 50021), (60013, 70001, 80021, 90001, 10037))
)


ITEMSIZES = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1, "i8": 1, "i32": 4, "i64": 8, "u64": 8, "u32": 4}


@dataclass(frozen=True)
class Storage:
    """Bytes some value owns. Views of one storage share it."""

    name: str  # unique in a program: the parameter, the step or staging field, the cache, or the arena value
    memory_class: MemoryClass
    shape: tuple[Dim, ...]  # row major and dense
    dtype: str  # "f32", "f16", "bf16", "fp8", "i8", "i32", "i64", "u64"; of packed weights the scheme
    target_index: int = 0  # of the cache tensor

    @property
    def itemsize(self) -> int:
        """Bytes of one element; packed weights have none, they are addressed as a whole."""
        return ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class View:
    """A value: elements of a storage, `offset` and `strides` in elements."""

    storage: Storage
    offset: int
    shape: tuple[Dim, ...]
    strides: tuple[int, ...]
    version: int = 0  # of a state's storage: how many writes came before

    def span_elements(self, symbols: dict[str, int]) -> int:
        """Elements from the first to one past the last, at these symbol values; 0 if the view is empty."""
        sizes = [evaluate_dim(dim, symbols) for dim in self.shape]
        if 0 in sizes:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))


def whole(storage: Storage, version: int = 0) -> View:
    """The dense view of all of a storage. Only dim 0 may be symbolic."""
    return View(storage, 0, storage.shape, dense_strides(storage.shape), version)


def dense_strides(shape: tuple[Dim, ...]) -> tuple[int, ...]:
    """Row-major strides in elements. Raises ValueError if a dim other than the first is symbolic."""
    strides = []
    step = 1
    for dim in reversed(shape[1:]):
        strides.append(step)
        if not isinstance(dim, int):
            raise ValueError(f"dim {format_dim(dim)} is symbolic, expected only the first to be")
        step *= dim
    if shape:
        strides.append(step)
    return tuple(reversed(strides))


def is_dense(view: View, from_dim: int = 0) -> bool:
    """Whether dims `from_dim` and later are row major without gaps."""
    step = 1
    for dim, stride in reversed(list(zip(view.shape[from_dim:], view.strides[from_dim:], strict=True))):
        if dim == 1:
            continue
        if stride != step:
            return False
        if not isinstance(dim, int):
            step = -1  # only the outermost can be symbolic: nothing may follow it
        else:
            step *= dim
    return True


def reshape(view: View, shape: tuple[Dim, ...]) -> View | None:
    """The same elements under another shape, or None if that needs a copy."""
    results = {_reshaped_strides(view, shape, probe) for probe in _PROBES}
    strides = results.pop()
    if results or strides is None:
        return None
    return replace(view, shape=shape, strides=strides)


def transpose(view: View, permutation: tuple[int, ...]) -> View:
    """Dims in another order."""
    return replace(
        view,
        shape=tuple(view.shape[axis] for axis in permutation),
        strides=tuple(view.strides[axis] for axis in permutation),
    )


def narrow(view: View, axis: int, start: int, shape: tuple[Dim, ...], step: int = 1) -> View:
    """Elements start, start + step, ... of one axis; `shape` is the result's."""
    strides = list(view.strides)
    strides[axis] *= step
    return replace(view, offset=view.offset + start * view.strides[axis], shape=shape, strides=tuple(strides))


def flatten_inner(view: View) -> View | None:
    """The view as [dim 0, everything else], or None if its inner dims have gaps."""
    if len(view.shape) == 2:
        return view
    inner = 1
    for dim in view.shape[1:]:
        if not isinstance(dim, int):
            return None
        inner *= dim
    return reshape(view, (view.shape[0], inner)) if view.shape else None


def _reshaped_strides(view: View, shape: tuple[Dim, ...], symbols: dict[str, int]) -> tuple[int, ...] | None:
    """Strides of the reshaped view: new dims are cut out of runs of old dims that collapse into one."""
    new = [evaluate_dim(dim, symbols) for dim in shape]
    strides = [1] * len(new)
    axis = len(new) - 1
    for run_size, run_stride in _dense_runs(view, symbols):
        filled = 1
        while axis >= 0 and (filled < run_size or new[axis] == 1):
            strides[axis] = run_stride * filled
            filled *= new[axis]
            axis -= 1
        if filled != run_size:
            return None
    return tuple(strides) if all(size == 1 for size in new[: axis + 1]) else None


def _dense_runs(view: View, symbols: dict[str, int]) -> list[tuple[int, int]]:
    """(elements, stride of the innermost) of maximal runs of dims that collapse into one, innermost first."""
    runs: list[tuple[int, int]] = []
    for dim, stride in reversed(list(zip(view.shape, view.strides, strict=True))):
        size = evaluate_dim(dim, symbols)
        if size == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * size, runs[-1][1])
        else:
            runs.append((size, stride))
    return runs
