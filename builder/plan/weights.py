"""Where each parameter goes in memory class `weights`, and its one layout."""

from collections.abc import Iterable
from dataclasses import dataclass

from castiron.builder.parameters import Parameter
from castiron.builder.plan.layouts import layout_of
from castiron.models.schemes import row_bytes

WEIGHT_ALIGNMENT = 256  # bytes, of every parameter inside the weights class


@dataclass(frozen=True)
class WeightsLayout:
    """Byte ranges of the parameters, in file order."""

    places: dict[str, tuple[int, int]]  # name -> offset, bytes (padding included)
    constants_bytes: int  # of the computed tables, which come first
    num_bytes: int


def layout_weights(parameters: Iterable[Parameter]) -> WeightsLayout:
    """Constants first (an engine with dummy weights still stores them), then the rest in the order given."""
    ordered = list(parameters)
    constants = [p for p in ordered if p.constant is not None]
    others = [p for p in ordered if p.constant is None]
    places: dict[str, tuple[int, int]] = {}
    end = constants_bytes = 0
    for parameter in (*constants, *others):
        num_bytes = -(-parameter_bytes(parameter) // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
        places[parameter.name] = (end, num_bytes)
        end += num_bytes
        if parameter.constant is not None:
            constants_bytes = end
    return WeightsLayout(places, constants_bytes, end)


def parameter_bytes(parameter: Parameter) -> int:
    """Bytes of the parameter in its layout, without padding: matrices are packed, vectors stay."""
    if len(parameter.shape) == 1:
        return row_bytes(parameter.scheme, parameter.shape[0])
    n, k = parameter.shape
    return int(layout_of(parameter).packed_bytes(parameter.scheme, n, k))
