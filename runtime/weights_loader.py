"""Reads an engine's weights straight into the memory class they are used from."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from castiron.runtime.dummy_weights import MEMBER as DUMMY_MEMBER
from castiron.runtime.dummy_weights import DummyTensor, decode_dummy_tensors, fill_dummy_weights
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError

CHUNK_BYTES = 4 << 20  # one pread; reads of several threads overlap with each other's page faults


def load_weights(engine_file: EngineFile, target: np.ndarray, num_threads: int) -> None:
    """Fill `target` (uint8, the weights class) from the weights members, or make dummy weights up.

    Padding between parts stays as it is (zero). Raises EngineFormatError for a damaged file.
    """
    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="castiron-weights") as pool:
        tasks = [pool.map(lambda read: engine_file.read_into(*read), _reads(engine_file, target.data))]
        if engine_file.manifest.weights_source == "dummy":  # the file holds computed tables only
            tensors = _dummy_tensors(engine_file, target.nbytes)
            tasks.append(pool.map(lambda tensor: fill_dummy_weights((tensor,), target), tensors))
        for done in tasks:
            for _ in done:  # raises what a thread raised
                pass


def _reads(engine_file: EngineFile, target: memoryview) -> list[tuple[int, memoryview]]:
    """(offset in the file, where it goes) of all weights, in chunks."""
    reads = []
    for part in engine_file.manifest.weights:
        start = engine_file.member_range(part.member)[0] + part.data_offset
        for done in range(0, part.data_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, part.data_bytes - done)
            into = target[part.weights_offset + done : part.weights_offset + done + size]
            reads.append((start + done, into))
    return reads


def _dummy_tensors(engine_file: EngineFile, weights_bytes: int) -> tuple[DummyTensor, ...]:
    try:
        return decode_dummy_tensors(engine_file.member(DUMMY_MEMBER), weights_bytes)
    except (ValueError, RecursionError) as error:
        raise EngineFormatError(f"{engine_file.path}: {DUMMY_MEMBER} is damaged: {error}") from error
