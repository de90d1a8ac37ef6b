"""Memory of the CUDA device: one allocation a memory class, pinned host memory for what travels."""

import ctypes

import numpy as np

from castiron.runtime.devices.cuda_driver import check, driver

_ALIGNMENT = 256  # bytes, of what shares an allocation


class GpuMemory:
    """One allocation, or none for 0 bytes."""

    def __init__(self, num_bytes: int, what: str, fill: int | None = 0) -> None:
        """`fill`: byte value it is set to, None leaves it as it is. Raises WorkFailedError."""
        self.num_bytes = num_bytes
        self.address = 0
        if num_bytes:
            self.address = int(check(driver.cuMemAlloc(num_bytes), f"allocating {num_bytes} bytes of {what}"))
            if fill is not None:
                check(driver.cuMemsetD8(self.address, fill, num_bytes), f"clearing {what}")

    def free(self) -> None:
        """Give it back. Calling it twice is fine."""
        if self.address:
            driver.cuMemFree(self.address)
            self.address = 0


class PinnedMemory:
    """Page-locked host memory as a uint8 array `array`; views of it must not outlive `free`."""

    def __init__(self, num_bytes: int) -> None:
        self._address = int(
            check(driver.cuMemHostAlloc(num_bytes, 0), f"pinning {num_bytes} bytes of memory")
        )
        self.array = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self._address))
        self.array.fill(0)

    def free(self) -> None:
        """Give it back. Calling it twice is fine."""
        if self._address:
            driver.cuMemFreeHost(self._address)
            self._address = 0


def aligned(num_bytes: int) -> int:
    """The next multiple of what parts of an allocation are aligned to."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
