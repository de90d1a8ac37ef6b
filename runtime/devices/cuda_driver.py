"""The CUDA driver through cuda.bindings.driver: imported here alone, with one check for every call."""

import importlib
from typing import Any

from castiron.runtime.errors import EngineTargetError, WorkFailedError

driver: Any
try:
    driver = importlib.import_module("cuda.bindings.driver")
except ImportError:  # the CPU target does without it
    driver = None


def check(result: tuple[Any, ...], doing: str) -> Any:
    """The value a driver call returned (None, one, or a list). Raises WorkFailedError naming what was done."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise WorkFailedError(f"the GPU failed while {doing}: {_error_name(error)}")
    return values[0] if len(values) == 1 else values or None


def initialize() -> None:
    """Load the driver. Raises EngineTargetError if cuda-bindings, the driver or a GPU is missing."""
    if driver is None:
        raise EngineTargetError(
            "this engine runs on an NVIDIA GPU, which needs the package cuda-bindings: "
            "pip install 'castiron[cuda]'"
        )
    try:
        (error,) = driver.cuInit(0)
    except (
        Exception
    ) as missing:  # cuda-bindings loads the library at the first call, and says so in its own ways
        raise EngineTargetError(
            "no NVIDIA driver found (libcuda can't be loaded): install the driver, or build the engine for "
            "this machine with `build-engine MODEL --target cpu`"
        ) from missing
    if error != driver.CUresult.CUDA_SUCCESS:
        raise EngineTargetError(
            f"the NVIDIA driver finds no usable GPU ({_error_name(error)}): check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or build the engine for this machine with `build-engine MODEL --target cpu`"
        )


def _error_name(error: Any) -> str:
    try:
        _, name = driver.cuGetErrorName(error)
        _, text = driver.cuGetErrorString(error)
        return f"{name.decode()}, {text.decode()}"
    except Exception:  # an error code this driver doesn't know
        return str(error)
