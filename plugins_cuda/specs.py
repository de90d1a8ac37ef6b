"""All CUDA kernels by name. Each *_specs.py beside this lists those of one kind as data."""

from collections.abc import Iterable

from castiron.plugins_cuda import (
    attention_specs,
    linear_few_specs,
    linear_many_specs,
    linear_mma_specs,
    row_specs,
    sampling_specs,
)
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec


def by_name(*kinds: Iterable[CudaKernelSpec]) -> dict[str, CudaKernelSpec]:
    """The kernels of all kinds by name. Raises ValueError if two share one."""
    specs: dict[str, CudaKernelSpec] = {}
    for spec in (spec for kind in kinds for spec in kind):
        if spec.name in specs:
            raise ValueError(f"two CUDA kernels are called {spec.name}")
        specs[spec.name] = spec
    return specs


SPECS: dict[str, CudaKernelSpec] = by_name(
    row_specs.SPECS,
    sampling_specs.SPECS,
    linear_few_specs.SPECS,
    linear_many_specs.SPECS,
    linear_mma_specs.SPECS,
    attention_specs.SPECS,
)
