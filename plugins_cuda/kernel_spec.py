"""A CUDA kernel as data: its source, its parameters, and how it is launched for a bucket's capacities."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from castiron.models.kernel_spec import KernelSpec

# What launch shapes may depend on: every integer parameter of the kernel by name (k, n, dim, num_heads, ...), and
#   rows                                 capacity of the live count the kernel runs over
#   max_tokens, max_seqs, max_logits, max_query_len    the bucket's capacities
#   num_sms                              multiprocessors of the target
Sizes = Mapping[str, int]
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Gpu:
    """What of a target's GPU decides which kernels run there, and how they are launched."""

    architecture: str  # that kernels are compiled for: "sm_80", "sm_90a", ...
    num_sms: int
    shared_bytes_per_block: int  # static and dynamic together

    @property
    def has_programmatic_edges(self) -> bool:
        """Whether it has griddepcontrol."""
        return _number(self.architecture) >= 90


def _none(_: Sizes) -> int:
    return 0


def _any(_: Sizes) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class CudaKernelSpec(KernelSpec):
    """One kernel: a .cu file compiled with `defines`, launched with `grid` blocks of `threads` threads.

    `cost` estimates µs at the bucket's full capacity; of the kernels that support a launch the cheapest is taken.
    """

    # the oldest architecture it runs on; one that ends in "a" is the only one
    architecture: str = "sm_80"
    source: str  # file in kernels/
    entry: str  # extern "C" function in it
    threads: int
    grid: Callable[[Sizes], Grid]
    operands: Mapping[str, str]  # "in0", "out1", ... -> dtype of every operand that isn't a weight or a state
    defines: tuple[tuple[str, str], ...] = ()
    cluster: Grid = (1, 1, 1)
    shared_bytes: Callable[[Sizes], int] = _none  # dynamic shared memory
    static_shared_bytes: int = 0  # at most, of what the source declares beside the dynamic ones
    scratch_bytes: Callable[[Sizes], int] = _none
    counters_bytes: Callable[[Sizes], int] = _none
    boxes: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # parameter of type t -> (columns, rows)
    # Kernels of an op with the same order of sums give a row the same bits, whatever else the step holds. "": this one
    # shares its order with no other. None: its rows' bits depend on the rest of the step.
    order: str | None = ""
    why_not: Callable[[Sizes], str] = _any  # "" = supports these sizes, else the reason
    cost: Callable[[Sizes], float] = lambda _: 1.0

    @property
    def row_order(self) -> str | None:
        """Name of the order in which a row's sums are formed; None if it depends on the rest of the step."""
        return self.name if self.order == "" else self.order


def why_not_on(spec: CudaKernelSpec, gpu: Gpu, sizes: Sizes) -> str:
    """Why the kernel can't run on this GPU at these sizes, "" if it can."""
    if spec.architecture.endswith("a"):
        if spec.architecture != gpu.architecture:
            return f"has instructions of {spec.architecture} only, not of {gpu.architecture}"
    elif _number(gpu.architecture) < _number(spec.architecture):
        return f"needs {spec.architecture} or newer, not {gpu.architecture}"
    shared_bytes = spec.shared_bytes(sizes) + spec.static_shared_bytes
    if shared_bytes > gpu.shared_bytes_per_block:
        return f"takes {shared_bytes} bytes of shared memory, a block has {gpu.shared_bytes_per_block}"
    return ""


def _number(architecture: str) -> int:
    """90 of "sm_90a"."""
    return int(architecture.removeprefix("sm_").rstrip("a"))
