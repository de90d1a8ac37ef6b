"""What the planner makes of a graph: kernel launches over views; kernels and launch shapes depend on the bucket."""

from dataclasses import dataclass, field

from castiron.builder.plan.views import View
from castiron.models.kernel_spec import KernelSpec


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel is launched for one bucket, and the memory it needs beside its operands (CUDA)."""

    grid: tuple[int, int, int]
    threads: int
    cluster: tuple[int, int, int]
    shared_bytes: int
    scratch_bytes: int  # its own while it runs
    counters_bytes: int  # zero before and after it


@dataclass(frozen=True)
class Launch:
    """One kernel call. State (caches, last_token) is an input and, one version later, an output."""

    node: str  # the graph node it comes from
    op: str
    inputs: tuple[View | None, ...]  # None: an optional input that is absent
    outputs: tuple[View, ...]
    attributes: dict[str, float | int] = field(default_factory=dict, hash=False)
    spec: KernelSpec | None = None  # chosen by kernel_choice, for one bucket
    shape: LaunchShape | None = None  # None: a CPU kernel, which every thread calls


@dataclass(frozen=True)
class Program:
    """One graph, lowered: what a plan launches, in order."""

    name: str  # "forward", "sample.greedy", "sample.random"
    launches: tuple[Launch, ...]
    logits: View  # the last output of a forward, an input of a sampling program
    num_views: int  # nodes that became views instead of launches
