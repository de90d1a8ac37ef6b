"""The inputs of kernels of linear and linear_fp8 as data: they differ in the type of x, and in its scales."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LinearInputs:
    """Of a kernel that reads weights of one scheme; bindings as models/kernel_spec.py describes them."""

    op: str
    weight_input: int
    x_bytes: int  # of an element of x
    x_scale: str  # the parameter
    weight: str  # inputs
    bias: str
    operands: Mapping[str, str]  # dtypes of the inputs

    def parameters(self, x: str, strides: str) -> str:
        """The parameters of LinearParams and LinearTmaParams; x: its type and binding."""
        return (
            f"x:{x} weight:p:{self.weight}.ptr bias:p:{self.bias}.ptr? {self.x_scale} y:p:out0.ptr "
            f"header:p:header.ptr {strides} count:i:in0.count n:i:{self.weight}.dim0 k:i:{self.weight}.dim1 pad:i:zero"
        )


_BF16 = LinearInputs("linear", 1, 2, "x_scale:l:zero", "in1", "in2", {"in0": "bf16", "in2": "f32"})
_FP8 = LinearInputs(
    "linear_fp8", 2, 1, "x_scale:p:in1.ptr", "in2", "in3", {"in0": "fp8", "in1": "f32", "in3": "f32"}
)


def linear_inputs(scheme: str) -> LinearInputs:
    """Of kernels that read weights of the scheme."""
    return _FP8 if scheme == "fp8" else _BF16
