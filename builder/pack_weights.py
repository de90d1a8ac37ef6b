"""Weights into the engine file: recipes run slice by slice, packed in their layout, streamed out."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from castiron.builder.checkpoint import Checkpoint
from castiron.builder.checkpoint.parameter_data import read_parameter_rows
from castiron.builder.dummy_tensors import made_up_chunks
from castiron.builder.parameters import Parameter
from castiron.builder.plan.layouts import layout_of
from castiron.builder.plan.weights import WeightsLayout, parameter_bytes
from castiron.builder.safetensors_writer import encode_header
from castiron.models.schemes import row_bytes
from castiron.runtime.engine_file_writer import EngineFileWriter
from castiron.runtime.errors import WorkFailedError
from castiron.runtime.manifest import WeightsFile
from castiron.runtime.zip_format import WEIGHTS_ALIGNMENT

WEIGHTS_MEMBER = "weights/model-00001.safetensors"
SLICE_BYTES = 64 << 20  # of checkpoint rows held at a time
MAX_WEIGHTS_BYTES = 32 << 30  # of one engine file

PackedChunks = Callable[[Parameter], Iterator[np.ndarray]]


def checkpoint_chunks(checkpoint: Checkpoint) -> PackedChunks:
    """Packs parameters from a checkpoint, at most SLICE_BYTES of rows in memory at a time."""

    def chunks(parameter: Parameter) -> Iterator[np.ndarray]:
        if len(parameter.shape) == 1:
            yield read_parameter_rows(checkpoint, parameter, 0, 1).reshape(-1)
            return
        n, k = parameter.shape
        layout = layout_of(parameter)
        panel_bytes = row_bytes(parameter.scheme, k) * layout.ROWS_TOGETHER
        num_rows = max(1, SLICE_BYTES // panel_bytes) * layout.ROWS_TOGETHER
        tails = []
        for start in range(0, n, num_rows):
            rows = read_parameter_rows(checkpoint, parameter, start, min(n, start + num_rows))
            packed = layout.pack(parameter.scheme, rows, k)
            tail_start = packed.size - layout.tail_bytes(parameter.scheme, len(rows))
            yield packed[:tail_start]
            tails.append(packed[tail_start:].copy())
        yield from tails

    return chunks


def random_chunks(parameter: Parameter) -> Iterator[np.ndarray]:
    """Made-up bytes of a parameter (constants are what they are)."""
    if parameter.constant is not None:
        yield constant_bytes(parameter)
    else:
        yield from made_up_chunks(parameter)


def constant_bytes(parameter: Parameter) -> np.ndarray:
    """A computed table as it is stored: float32, flat."""
    assert parameter.constant is not None and parameter.scheme == "f32"
    return np.ascontiguousarray(parameter.constant, dtype="<f4").reshape(-1).view(np.uint8)


def write_weights(
    writer: EngineFileWriter,
    parameters: Iterable[Parameter],
    layout: WeightsLayout,
    chunks: PackedChunks,
    between: Callable[[], None],
) -> WeightsFile:
    """Write the weights member holding these parameters (a prefix of the layout's order); returns its record.

    `between` is called between parameters and may raise to stop. The data section is exactly memory class
    `weights`, from 0 on. Raises WorkFailedError if the weights are too many for one file.
    """
    ordered = sorted(parameters, key=lambda parameter: layout.places[parameter.name][0])
    places = {parameter.name: layout.places[parameter.name] for parameter in ordered}
    header = encode_header(
        {name: ("U8", (size,), start, start + size) for name, (start, size) in places.items()}
    )
    num_bytes = sum(size for _, size in places.values())
    if num_bytes > MAX_WEIGHTS_BYTES:
        raise WorkFailedError(
            f"the weights need {num_bytes} bytes, one engine file holds up to {MAX_WEIGHTS_BYTES}: "
            "quantize the checkpoint first, or build a smaller model"
        )
    writer.begin(WEIGHTS_MEMBER, WEIGHTS_ALIGNMENT)
    writer.write(header)
    for parameter in ordered:
        between()
        written = 0
        for chunk in chunks(parameter):
            writer.write(chunk)
            written += chunk.nbytes
        assert written == parameter_bytes(parameter), f"{parameter.name}: {written} bytes were packed"
        writer.write(bytes(places[parameter.name][1] - written))
    writer.end()
    return WeightsFile(WEIGHTS_MEMBER, data_offset=len(header), data_bytes=num_bytes, weights_offset=0)
