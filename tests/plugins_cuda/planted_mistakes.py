"""Launches the planted mistake that a tool of compute-sanitizer finds, for perf/sanitize.py.

    compute-sanitizer --tool racecheck python planted_mistakes.py racecheck
A check that finds nothing says nothing unless the tool is seen to find something here.
"""

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cuda.bindings import driver

from castiron.plugins_cuda.compile import ARCHITECTURES, FLAGS, find_nvcc

COUNT = 64  # elements, one a thread: the allocation ends where they end


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, its error raised."""
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else values


def compiled() -> bytes:
    """The cubin of planted_mistakes.cu."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "planted.cubin"
        source = Path(__file__).with_suffix(".cu")
        command = [find_nvcc(), f"-arch={ARCHITECTURES['sm_90']}", *FLAGS, "-o", str(output), str(source)]
        subprocess.run(command, check=True)
        return output.read_bytes()


def main(tool: str) -> None:
    """Launch it and wait; what the driver says afterwards is the tool's matter."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    module = check(driver.cuModuleLoadData(compiled()))
    function = check(driver.cuModuleGetFunction(module, f"planted_{tool}".encode()))
    y = ctypes.c_uint64(int(check(driver.cuMemAlloc(4 * COUNT))))
    count = ctypes.c_int32(COUNT)
    pointers = (ctypes.c_void_p * 2)(ctypes.addressof(y), ctypes.addressof(count))
    threads = COUNT + 1 if tool == "memcheck" else COUNT
    driver.cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, 0, ctypes.addressof(pointers), 0)
    driver.cuCtxSynchronize()


if __name__ == "__main__":
    main(sys.argv[1])
