"""Where an engine's weights come from, in chunks that threads can fill: read from the file, or made up."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from castiron.runtime.dummy_weights import MEMBER as DUMMY_MEMBER
from castiron.runtime.dummy_weights import DummyTensor, decode_dummy_tensors, dummy_units
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError

CHUNK_BYTES = 4 << 20  # one pread; reads of several threads overlap with each other's page faults


@dataclass(frozen=True)
class WeightChunk:
    """A piece of memory class `weights`; `fill` writes it into a uint8 array of `num_bytes`."""

    offset: int  # bytes, in memory class `weights`
    num_bytes: int
    fill: Callable[[np.ndarray], None]


def weight_chunks(engine_file: EngineFile, weights_bytes: int) -> list[WeightChunk]:
    """All weights of the engine, each chunk at most CHUNK_BYTES. What no chunk covers is padding.

    Raises EngineFormatError for a damaged file, as `fill` does. The file must stay open while chunks are filled.
    """
    chunks = stored_chunks(engine_file)
    for tensor in dummy_tensors(engine_file, weights_bytes):
        chunks += _made_up_chunks(tensor)
    return chunks


def dummy_tensors(engine_file: EngineFile, weights_bytes: int) -> tuple[DummyTensor, ...]:
    """What is to be made up beside the stored weights: nothing, unless the engine was built with dummy weights.

    Raises EngineFormatError for a damaged list.
    """
    if engine_file.manifest.weights_source != "dummy":
        return ()
    try:
        return decode_dummy_tensors(engine_file.member(DUMMY_MEMBER), weights_bytes)
    except (ValueError, RecursionError) as error:
        raise EngineFormatError(
            f"{engine_file.path}: {DUMMY_MEMBER} is damaged: {error}: rebuild the engine"
        ) from error


def load_weights(engine_file: EngineFile, target: np.ndarray, num_threads: int) -> None:
    """Fill `target` (uint8, the weights class). Padding stays as it is (zero)."""

    def fill(chunk: WeightChunk) -> None:
        chunk.fill(target[chunk.offset : chunk.offset + chunk.num_bytes])

    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="castiron-weights") as pool:
        for _ in pool.map(fill, weight_chunks(engine_file, target.nbytes)):  # raises what a thread raised
            pass


def stored_chunks(engine_file: EngineFile) -> list[WeightChunk]:
    """The chunks the file holds: of an engine with dummy weights, computed tables only."""
    chunks = []
    for part in engine_file.manifest.weights:
        start = engine_file.member_range(part.member)[0] + part.data_offset
        for done in range(0, part.data_bytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, part.data_bytes - done)

            def fill(target: np.ndarray, file_offset: int = start + done) -> None:
                engine_file.read_into(file_offset, target.data)

            chunks.append(WeightChunk(part.weights_offset + done, size, fill))
    return chunks


def _made_up_chunks(tensor: DummyTensor) -> Iterator[WeightChunk]:
    unit = tensor.unit_bytes
    step = max(1, CHUNK_BYTES // unit)
    for first in range(0, tensor.num_units, step):
        count = min(step, tensor.num_units - first)
        start = first * unit
        num_bytes = min(count * unit, tensor.num_bytes - start)

        def fill(target: np.ndarray, first: int = first, count: int = count) -> None:
            target[:] = dummy_units(tensor, first, count)

        yield WeightChunk(tensor.weights_offset + start, num_bytes, fill)
