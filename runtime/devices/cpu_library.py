"""The CPU kernel library through ctypes: kernels by name, a thread pool, one call that walks records."""

import ctypes
from pathlib import Path

import numpy as np

from castiron.runtime.errors import EngineTargetError, WorkFailedError

# CiRecord in plugins_cpu/abi.h: a record with its relocations applied
CI_RECORD_DTYPE = np.dtype([("fn", "<u8"), ("params", "<u8"), ("flags", "<u4"), ("pad", "<u4")])


class _KernelInfo(ctypes.Structure):
    """CiKernelInfo in plugins_cpu/abi.h."""

    _fields_ = (("name", ctypes.c_char_p), ("fn", ctypes.c_void_p), ("params_bytes", ctypes.c_uint32))


class CpuLibrary:
    """A loaded library. Calls release the GIL while the kernels run."""

    def __init__(self, path: Path, level: str) -> None:
        """Raises EngineTargetError if the file can't be loaded or holds another level."""
        try:
            library = ctypes.CDLL(str(path))
            library.ci_level.restype = ctypes.c_char_p
            library.ci_num_kernels.restype = ctypes.c_uint32
            library.ci_kernels.restype = ctypes.POINTER(_KernelInfo)
            library.ci_last_error.restype = ctypes.c_char_p
            library.ci_pool_create.restype = ctypes.c_void_p
            library.ci_pool_create.argtypes = (ctypes.c_int32, ctypes.c_void_p)
            library.ci_pool_destroy.restype = None
            library.ci_pool_destroy.argtypes = (ctypes.c_void_p,)
            library.ci_run.restype = ctypes.c_int32
            library.ci_run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)
        except (OSError, AttributeError) as error:
            raise EngineTargetError(
                f"cannot load the CPU kernel library {path}: {error}; build it again"
            ) from error
        found = library.ci_level().decode()
        if found != level:
            raise EngineTargetError(f"the CPU kernel library {path} is of level {found}, expected {level}")
        self._library = library
        infos = library.ci_kernels()
        # kernel name -> (address, bytes of its parameter struct)
        self.kernels: dict[str, tuple[int, int]] = {
            infos[i].name.decode(): (infos[i].fn, infos[i].params_bytes)
            for i in range(library.ci_num_kernels())
        }

    def create_pool(self, cores: list[int]) -> int:
        """Start one thread a core (the caller is the first); returns a handle. Raises WorkFailedError."""
        array = (ctypes.c_int32 * len(cores))(*cores)
        pool: int | None = self._library.ci_pool_create(len(cores), array)
        if not pool:
            raise WorkFailedError(f"cannot start {len(cores)} CPU threads: {self._last_error()}")
        return pool

    def destroy_pool(self, pool: int) -> None:
        """Stop the threads."""
        self._library.ci_pool_destroy(pool)

    def run(self, pool: int, records_address: int, num_records: int, header_address: int) -> None:
        """Run CI_RECORD_DTYPE records in order. Raises WorkFailedError."""
        if self._library.ci_run(pool, records_address, num_records, header_address) != 0:
            raise WorkFailedError(f"the CPU device failed: {self._last_error()}")

    def _last_error(self) -> str:
        message: bytes | None = self._library.ci_last_error()
        return (message or b"unknown error").decode("utf-8", "replace")
