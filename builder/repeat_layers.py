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
from collections.abc import Hashable, Iterable, Sequence
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

    entry: torch.fx.Node  # the first mark: what flows in
    nodes: list[torch.fx.Node]
    end: torch.fx.Node  # the last mark: what flows out

    @property
    def source(self) -> torch.fx.Node:
        """What is marked as flowing in."""
        return _argument(self.entry)

    @property
    def result(self) -> torch.fx.Node:
        """What is marked as flowing out."""
        return _argument(self.end)


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
    entry: torch.fx.Node | None = None
    current = split.before
    for node in nodes:
        if node.target is _ENTER:
            assert not split.after, f"{split.after[0]} is between two layers"
            entry, current = node, []
        elif node.target is _LEAVE:
            assert entry is not None
            split.layers.append(TracedLayer(entry, current, node))
            entry, current = None, split.after
        else:
            current.append(node)
    return split


def check_separate(
    layer: TracedLayer, placeholders: Iterable[torch.fx.Node], results: Iterable[torch.fx.Node]
) -> None:
    """Assert that only what flows on and `results` leave the layer, and that it alone reads its inputs."""
    own, results = {*layer.nodes, layer.end}, set(results)
    for node in (*placeholders, *layer.nodes):
        for user in node.users:
            is_result = user.op == "output" and node in results
            is_check = user.op == "call_function" and not isinstance(
                user.meta.get("val"), torch.Tensor | tuple
            )
            assert user in own or is_result or is_check, f"{node}, of a layer, is read outside it by {user}"


def _argument(mark: torch.fx.Node) -> torch.fx.Node:
    argument = mark.args[0]
    assert isinstance(argument, torch.fx.Node)
    return argument
