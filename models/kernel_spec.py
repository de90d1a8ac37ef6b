"""Kernels as data, whatever the target: which op and scheme each one computes, and how its parameters are filled.

A parameter is "name:type:binding", in the order of the kernel's parameter struct. Types: p (address, 8 bytes),
l (int64), i (int32), f (float32), t (a tensor map of 128 bytes; CUDA only, first in its struct). Bindings:
    inN.ptr / outN.ptr      address of the node's N-th input / output (inN.ptr? = 0 when absent)
    inN.stride0             elements between rows (dim 0) of its view
    inN.dimD                size of dim D, a known integer or max_rows
    inN.count               which live count (Count in abi.h and abi.cuh) dim 0 is
    inN.itemsize            bytes of an element
    inN.map                 a tensor map of the operand's rows (CUDA)
    attr.NAME               the node's attribute
    header.ptr              the step header (CUDA; CPU kernels get it in their context)
    scratch.ptr             memory of this launch alone (CUDA)
    counters.ptr            memory that is zero between launches (CUDA)
    zero                    padding, or an address this kernel doesn't use
"""

from dataclasses import dataclass

TYPE_CODES = {"p": "Q", "l": "q", "i": "i", "f": "f", "t": "128s"}  # struct module codes
TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class KernelParameter:
    name: str
    type: str  # key of TYPE_CODES
    binding: str


@dataclass(frozen=True)
class KernelSpec:
    """One kernel. `weight_input` is the input that must be packed as `scheme`; -1 = none."""

    name: str
    op: str
    parameters: tuple[KernelParameter, ...]
    params_struct: str  # in abi.h or abi.cuh
    scheme: str = ""  # of the weight
    cache_dtype: str = ""
    weight_input: int = -1
    dense_inputs: tuple[int, ...] = ()  # inputs and
    dense_outputs: tuple[int, ...] = ()  # outputs that must be contiguous
    k_multiple: int = 1  # the weight's k must be a multiple of this


def parameters(text: str) -> tuple[KernelParameter, ...]:
    """Parameters of "name:type:binding name:type:binding ..."."""
    return tuple(KernelParameter(*item.split(":")) for item in text.split())


def pack_alignment(spec: KernelSpec) -> int:
    """Bytes the parameter struct's size is a multiple of: a tensor map wants 64."""
    return 64 if any(parameter.type == "t" for parameter in spec.parameters) else 8
