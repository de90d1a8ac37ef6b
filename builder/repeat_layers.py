"""One layer of each kind is traced; its nodes are repeated for every layer of that kind.

    x = embedding(..)                          x = embedding(..)
    x, cache_out.0 = layer(x, cache.0)    ->   x, cache_out.0 = layer(x, cache.0)
    logits = final(x)                          x, cache_out.1 = layer(x, cache.1)
                                               x, cache_out.2 = layer(x, cache.2)
                                               logits = final(x)

A mark at a traced layer's entry and one at its end tell which nodes are its own and which value passes from
layer to layer. Marks aren't in the graph.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_LAYER_NAME = re.compile(r"(layers|cache|cache_out)\.(\d+)(\..+)?")


def _define_mark(name: str) -> Any:
    """castiron_trace::<name>, the identity to torch."""
    qualified = f"castiron_trace::{name}"
    torch.library.define(qualified, "(Tensor x) -> Tensor")
    torch.library.impl(qualified, "CompositeExplicitAutograd", torch.Tensor.clone)
    torch.library.register_fake(qualified, torch.empty_like)
    return getattr(torch.ops.castiron_trace, name).default


_ENTER, _LEAVE = _define_mark("enter_layer"), _define_mark("leave_layer")


@dataclass(frozen=True)
class LayerKinds:
    """Which layers of a model are traced, and which of those each layer repeats."""

    traced: tuple[int, ...]  # traced layer -> the model's layer it is
    repeats: tuple[int, ...]  # layer of the model -> the traced layer it is like

    @staticmethod
    def of(kinds: Sequence[Hashable]) -> "LayerKinds":
        """kinds: one for each layer of the model; the first layer of a kind is traced."""
        distinct = list(dict.fromkeys(kinds))
        return LayerKinds(
            tuple(kinds.index(kind) for kind in distinct), tuple(distinct.index(kind) for kind in kinds)
        )


@dataclass
class TracedLayer:
    """The nodes between the marks of one traced layer."""

    entry: torch.fx.Node  # the mark whose argument flows in
    nodes: list[torch.fx.Node] = field(default_factory=list)
    end: torch.fx.Node | None = None  # the mark whose argument flows out


@dataclass
class SplitTrace:
    """A traced graph's nodes by where they belong."""

    before: list[torch.fx.Node] = field(default_factory=list)
    layers: list[TracedLayer] = field(default_factory=list)
    after: list[torch.fx.Node] = field(default_factory=list)


def layer_of(name: str) -> int | None:
    """2 for "layers.2.q.weight", "cache.2" and "cache_out.2", None for names that aren't a layer's."""
    match = _LAYER_NAME.fullmatch(name)
    return int(match[2]) if match else None


def in_layer(name: str, layer: int) -> str:
    """The name another layer has for the same thing: ("cache.2", 5) -> "cache.5"."""
    match = _LAYER_NAME.fullmatch(name)
    assert match, f"{name} isn't a layer's"
    return f"{match[1]}.{layer}{match[3] or ''}"


def keep_traced_layers(module: torch.nn.Module, kinds: LayerKinds) -> None:
    """Leave only the layers to trace in `module.layers`, with marks around each.

    A layer takes what flows through the layers as its first argument and returns it as the first of its
    results.
    """
    layers: Any = module.layers
    module.layers = torch.nn.ModuleList(layers[i] for i in kinds.traced)
    for layer in module.layers:
        layer.register_forward_pre_hook(lambda _, arguments: (_ENTER(arguments[0]), *arguments[1:]))
        layer.register_forward_hook(lambda _, __, results: (_LEAVE(results[0]), *results[1:]))


def split_trace(nodes: Sequence[torch.fx.Node]) -> SplitTrace:
    """Sort the nodes that make tensors into layers and the rest; a graph without marks is all `before`."""
    split = SplitTrace()
    current = split.before
    for node in nodes:
        if node.target is _ENTER:
            split.layers.append(TracedLayer(node))
            assert current is split.before or not split.after, f"{split.after[:1]} is between two layers"
            current = split.layers[-1].nodes
        elif node.target is _LEAVE:
            split.layers[-1].end = node
            current = split.after
        else:
            current.append(node)
    return split


def check_separate(
    layer: TracedLayer, placeholders: Sequence[torch.fx.Node], results: Sequence[torch.fx.Node]
) -> None:
    """Assert that nothing but its end and `results` leaves a layer, and that nobody else reads its inputs."""
    own = {*layer.nodes, layer.end}
    for node in (*placeholders, *layer.nodes):
        readers = {user for user in node.users if user.meta.get("val") is not None or user.op == "output"}
        outside = {user for user in readers - own if user.op != "output" or node not in results}
        assert not outside, f"{node} of a layer is read outside of it by {sorted(map(str, outside))}"
