"""The packed weight layouts by name: one per kind of hardware, every kernel of it reads that one."""

from types import ModuleType

from castiron.builder.parameters import Parameter
from castiron.plugins_cpu import layouts as n16
from castiron.plugins_cuda import layouts as m64

LAYOUTS: dict[str, ModuleType] = {n16.LAYOUT: n16, m64.LAYOUT: m64}


def layout_of(parameter: Parameter) -> ModuleType:
    """The module that packs the parameter: pack, unpack, packed_bytes, tail_bytes, ROWS_TOGETHER."""
    return LAYOUTS[parameter.layout]
