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


def _none(_: Sizes) -> int:
    return 0


def _any(_: Sizes) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class CudaKernelSpec(KernelSpec):
    """One kernel: a .cu file compiled with `defines`, launched with `grid` blocks of `threads` threads.

    `cost` estimates µs at the bucket's full capacity; of the kernels that support a launch the cheapest is taken.
    """

    source: str  # file in kernels/
    entry: str  # extern "C" function in it
    threads: int
    grid: Callable[[Sizes], Grid]
    operands: Mapping[str, str]  # "in0", "out1", ... -> dtype of every operand that isn't a weight or a state
    defines: tuple[tuple[str, str], ...] = ()
    cluster: Grid = (1, 1, 1)
    shared_bytes: Callable[[Sizes], int] = _none  # dynamic shared memory
    scratch_bytes: Callable[[Sizes], int] = _none
    counters_bytes: Callable[[Sizes], int] = _none
    boxes: Mapping[str, tuple[int, int]] = field(
        default_factory=dict
    )  # parameter of type t -> (columns, rows)
    why_not: Callable[[Sizes], str] = _any  # "" = supports these sizes, else the reason
    cost: Callable[[Sizes], float] = lambda _: 1.0
