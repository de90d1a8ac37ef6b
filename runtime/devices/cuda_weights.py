"""Weights from the engine file to the GPU: threads read into pinned buffers, copies overlap with reading.

The file is not mapped: a copy from pageable memory runs at a sixth of the speed of one from pinned memory.
"""

import concurrent.futures
import queue
from typing import Any

import numpy as np

from castiron.runtime.devices.cuda_driver import check, driver
from castiron.runtime.devices.cuda_memory import PinnedMemory
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.weights_loader import CHUNK_BYTES, WeightChunk, stored_chunks

_BUFFERS_PER_THREAD = 2
_DOING = "copying weights to the GPU"


def upload_weights(engine_file: EngineFile, address: int, context: Any, num_threads: int) -> None:
    """Fill device memory at `address` (memory class `weights`, zeroed before) with the weights the file holds.

    Returns when all copies are done. Raises EngineFormatError for a damaged file, WorkFailedError if the GPU
    fails.
    """
    chunks = stored_chunks(engine_file)
    num_threads = max(1, min(num_threads, len(chunks)))
    num_buffers = num_threads * _BUFFERS_PER_THREAD
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING), _DOING)
    buffers = PinnedMemory(num_buffers * CHUNK_BYTES)
    free: queue.SimpleQueue[tuple[np.ndarray, Any]] = queue.SimpleQueue()
    events = []
    for index in range(num_buffers):
        events.append(check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING), _DOING))
        free.put((buffers.array[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES], events[-1]))

    def upload(chunk: WeightChunk) -> None:
        check(driver.cuCtxSetCurrent(context), _DOING)
        buffer, copied = free.get()
        try:
            check(driver.cuEventSynchronize(copied), _DOING)  # the buffer's last copy
            chunk.fill(buffer[: chunk.num_bytes])
            check(
                driver.cuMemcpyHtoDAsync(address + chunk.offset, buffer.ctypes.data, chunk.num_bytes, stream),
                _DOING,
            )
            check(driver.cuEventRecord(copied, stream), _DOING)
        finally:
            free.put((buffer, copied))

    try:
        with concurrent.futures.ThreadPoolExecutor(num_threads, "castiron-weights") as pool:
            for _ in pool.map(upload, chunks):  # raises what a thread raised
                pass
        check(driver.cuStreamSynchronize(stream), _DOING)
    finally:
        driver.cuStreamSynchronize(stream)  # after an error too: a copy may still read a buffer
        for event in events:
            driver.cuEventDestroy(event)
        driver.cuStreamDestroy(stream)
        buffers.free()
