"""Made-up weights on the GPU: the engine's fill_dummy kernel launched once for each tensor, at load.

The kernel is plugins_cuda/kernels/fill_dummy.cu; it gives the bytes of runtime/dummy_weights.py.
"""

import ctypes
import struct
from collections.abc import Iterable

from castiron.runtime.devices.cuda_driver import check, driver
from castiron.runtime.dummy_weights import (
    BLOCK_BYTES,
    F16_MULTIPLE,
    KERNEL_MEMBER,
    KINDS,
    MAX_FIELDS,
    DummyTensor,
    generator_key,
)
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.weights_loader import dummy_tensors

ENTRY = "fill_dummy"
PARAMS_FORMAT = "<QQQqii"  # FillDummyParams up to its fields: y, key, num_bytes, unit_bytes, num_fields
FIELD_FORMAT = "iiIifffi"  # FillDummyField: end, kind, mask, blocks_before, mean, amplitude, factor, pad
_THREADS = 256
_MAX_GRID = 1 << 14  # blocks of threads; each thread takes several random blocks of a larger tensor
_DOING = "making up weights"


def make_up_weights(engine_file: EngineFile, address: int, num_bytes: int) -> None:
    """Fill the tensors an engine with dummy weights lists, in memory class `weights` at `address`.

    Nothing for other engines. Returns when they are there. Raises EngineFormatError for a damaged file,
    WorkFailedError if the GPU fails.
    """
    tensors = dummy_tensors(engine_file, num_bytes)
    if not tensors:
        return
    cubin = engine_file.member(KERNEL_MEMBER)
    error, module = driver.cuModuleLoadData(cubin)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise EngineFormatError(
            f"{engine_file.path}: {KERNEL_MEMBER} can't be loaded ({error.name}): rebuild the engine"
        )
    try:
        error, function = driver.cuModuleGetFunction(module, ENTRY.encode())
        if error != driver.CUresult.CUDA_SUCCESS:
            raise EngineFormatError(
                f"{engine_file.path}: {KERNEL_MEMBER} has no function {ENTRY} ({error.name}): rebuild the engine"
            )
        fill_tensors(function, tensors, address)
    finally:
        driver.cuModuleUnload(module)


def fill_tensors(function: object, tensors: Iterable[DummyTensor], address: int) -> None:
    """Launch the loaded kernel for every tensor, and wait. Raises WorkFailedError."""
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), _DOING)
    try:
        for tensor in tensors:
            if tensor.num_bytes == 0:
                continue
            params = ctypes.create_string_buffer(fill_params(tensor, address))
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
            blocks = -(-tensor.num_bytes // (BLOCK_BYTES * _THREADS))
            check(
                driver.cuLaunchKernel(
                    function, min(blocks, _MAX_GRID), 1, 1, _THREADS, 1, 1, 0, stream,
                    ctypes.addressof(pointers), 0,
                ),
                _DOING,
            )  # fmt: skip
        check(driver.cuStreamSynchronize(stream), _DOING)
    finally:
        driver.cuStreamDestroy(stream)


def fill_params(tensor: DummyTensor, address: int) -> bytes:
    """The kernel's parameter struct (FillDummyParams) for one tensor of the weights at `address`."""
    key = generator_key(tensor.name)
    low = (1 << 64) - 1
    block = struct.pack(
        PARAMS_FORMAT,
        address + tensor.weights_offset,
        key & low,
        key >> 64,
        tensor.num_bytes,
        tensor.unit_bytes,
        len(tensor.fields),
    )
    end = 0
    for field in tensor.fields:
        end += field.num_bytes
        block += struct.pack(
            f"<{FIELD_FORMAT}",
            end,
            KINDS.index(field.kind),
            field.mask,
            field.distance // BLOCK_BYTES if field.kind == F16_MULTIPLE else 0,
            field.mean,
            field.amplitude,
            field.factor,
            0,
        )
    return block + bytes((MAX_FIELDS - len(tensor.fields)) * struct.calcsize(FIELD_FORMAT))
