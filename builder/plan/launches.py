"""What the planner makes of a graph before capacities are known: kernel launches over views."""

from dataclasses import dataclass, field

from castiron.builder.plan.views import View
from castiron.plugins_cpu.specs import KernelSpec


@dataclass(frozen=True)
class Launch:
    """One kernel call. State (caches, last_token) is an input and, one version later, an output."""

    node: str  # the graph node it comes from
    op: str
    inputs: tuple[View | None, ...]  # None: an optional input that is absent
    outputs: tuple[View, ...]
    attributes: dict[str, float | int] = field(default_factory=dict, hash=False)
    spec: KernelSpec | None = None  # chosen by kernel_choice


@dataclass(frozen=True)
class Program:
    """One graph, lowered: what a plan of any bucket launches, in order."""

    name: str  # "forward", "sample.greedy", "sample.random"
    launches: tuple[Launch, ...]
    logits: View  # the last output of a forward, an input of a sampling program
    num_views: int  # nodes that became views instead of launches
