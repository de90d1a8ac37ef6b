"""Running a parameter's recipe: rows of checkpoint tensors become rows of the parameter, streamed."""

from typing import TYPE_CHECKING

import numpy as np

from castiron.builder.checkpoint.checkpoint import Checkpoint, TensorInfo
from castiron.builder.checkpoint.dequantize import check_finite, dequantize, to_dense
from castiron.builder.checkpoint.fp8_blocks import quantize_fp8
from castiron.builder.checkpoint.int4_blocks import quantize_int4
from castiron.builder.parameters import Parameter, Part
from castiron.models.schemes import SCHEMES, row_bytes
from castiron.runtime.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 16 << 20


def read_parameter_rows(checkpoint: Checkpoint, parameter: Parameter, start: int, stop: int) -> np.ndarray:
    """Rows start..stop of a parameter in its own scheme: uint8 [stop - start, row_bytes], C order.

    Rows are the parameter's dim 0; a vector is one row. Converts where the parameter's scheme differs from
    the tensor's: to dense types, rounded to nearest even, and from them to symmetric int4 and fp8. Raises
    CheckpointError for tensors that are missing, of another shape, or hold NaN or infinite values, and for values
    a float16 can't hold.
    """
    num_rows = parameter.shape[0] if len(parameter.shape) > 1 else 1
    if not 0 <= start <= stop <= num_rows:
        raise ValueError(f"rows {start}..{stop} of {parameter.name}, which has {num_rows}")
    if parameter.constant is not None:
        values = np.asarray(parameter.constant, dtype=np.float32).reshape(num_rows, -1)
        return to_dense(parameter.scheme, values[start:stop])
    _check_recipe(checkpoint, parameter)
    if len(parameter.shape) == 1:
        pieces = [_vector_part(checkpoint, parameter, part) for part in parameter.parts]
        return np.concatenate(pieces).reshape(1, -1)[start:stop]
    k = parameter.shape[-1]
    result = np.empty((stop - start, row_bytes(parameter.scheme, k)), dtype=np.uint8)
    part_start = 0  # parameter row at which the part begins
    for part in parameter.parts:
        part_stop = part_start + part.row_stop - part.row_start
        first, last = max(start, part_start), min(stop, part_stop)
        info = checkpoint.tensor(part.tensor)
        step = max(1, _CHUNK_BYTES // info.row_bytes)
        for row in range(first, last, step):
            row_end = min(row + step, last)
            source = row - part_start + part.row_start
            rows = _transformed_rows(checkpoint, info, part, source, source + row_end - row)
            check_finite(info.scheme, rows, info.name)
            result[row - start : row_end - start] = _convert(info, rows, k, parameter)
        part_start = part_stop
    return result


def load_parameter(checkpoint: Checkpoint, parameter: Parameter) -> "torch.Tensor":
    """The whole parameter, float32 of its shape: exactly the values the engine's weights mean."""
    import torch

    num_rows = parameter.shape[0] if len(parameter.shape) > 1 else 1
    k = parameter.shape[-1]
    values = torch.empty((num_rows, k), dtype=torch.float32)
    target = values.numpy()
    step = max(1, _CHUNK_BYTES // row_bytes(parameter.scheme, k))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = read_parameter_rows(checkpoint, parameter, start, stop)
        dequantize(parameter.scheme, rows, k, out=target[start:stop])
    return values.reshape(parameter.shape)


def _check_recipe(checkpoint: Checkpoint, parameter: Parameter) -> None:
    """Every part must lie in a tensor of the parameter's width, and the parts must fill it exactly."""
    filled = 0
    for part in parameter.parts:
        info = checkpoint.tensor(part.tensor)
        is_vector = len(parameter.shape) == 1
        size = info.num_cols if is_vector else info.num_rows
        fits = (
            info.num_rows == 1 if is_vector else info.num_cols == parameter.shape[-1] and len(info.shape) > 1
        )
        if not fits or not 0 <= part.row_start <= part.row_stop <= size:
            raise CheckpointError(
                f"tensor {info.name} has shape {list(info.shape)}: rows {part.row_start}..{part.row_stop}"
                f" of it can't be part of {parameter.name} {list(parameter.shape)}"
            )
        if parameter.scheme != info.scheme and not _can_convert(info.scheme, parameter.scheme):
            raise CheckpointError(
                f"tensor {info.name} is stored as {info.scheme} and {parameter.name} wants"
                f" {parameter.scheme}: only conversions to f32, f16 and bf16, and from these to int4 and fp8, are"
                " supported"
            )
        if part.transform == "unpermute_rope" and (
            part.head_dim <= 0 or part.head_dim % 2 or size % part.head_dim
        ):
            raise CheckpointError(
                f"tensor {info.name} has {size} rows, not a multiple of the head size {part.head_dim}"
            )
        assert part.transform in ("", "unpermute_rope"), part.transform
        filled += part.row_stop - part.row_start
    if filled != parameter.shape[0]:
        raise CheckpointError(f"{parameter.name} has {parameter.shape[0]} rows, its tensors give {filled}")


def _can_convert(source: str, target: str) -> bool:
    record = SCHEMES[target]
    if not record.is_quantized:
        return True
    is_made = record.name == "fp8" or (record.scale_dtype == "bf16" and not record.has_zero_points)
    return not SCHEMES[source].is_quantized and is_made


def unpermuted_rows(start: int, stop: int, head_dim: int) -> np.ndarray:
    """int64 [stop - start]: the stored row behind each row of the split-half order.

    llama-arch GGUF stores the rows of a head so that the two of a rotated pair are neighbours: stored row
    2 * p + s is row s * head_dim / 2 + p (llama.cpp, conversion of q_proj and k_proj).
    """
    row = np.arange(start, stop, dtype=np.int64)
    head, inside = np.divmod(row, head_dim)
    half, pair = np.divmod(inside, head_dim // 2)
    stored: np.ndarray = head * head_dim + 2 * pair + half
    return stored


def _transformed_rows(
    checkpoint: Checkpoint, info: TensorInfo, part: Part, start: int, stop: int
) -> np.ndarray:
    if part.transform == "":
        return checkpoint.read_rows(info.name, start, stop)
    first = start // part.head_dim * part.head_dim  # whole heads hold every row asked for
    last = -(-stop // part.head_dim) * part.head_dim
    stored = checkpoint.read_rows(info.name, first, last)
    rows: np.ndarray = stored[unpermuted_rows(start, stop, part.head_dim) - first]
    return rows


def _vector_part(checkpoint: Checkpoint, parameter: Parameter, part: Part) -> np.ndarray:
    """Elements of one vector, as bytes of the parameter's scheme: uint8 [bytes]."""
    info = checkpoint.tensor(part.tensor)
    rows = checkpoint.read_rows(info.name, 0, 1)
    check_finite(info.scheme, rows, info.name)
    values = dequantize(info.scheme, rows, info.num_cols)[0]
    if part.transform == "unpermute_rope":
        values = values[unpermuted_rows(0, info.num_cols, part.head_dim)]
    chosen = values[part.row_start : part.row_stop].reshape(1, -1)
    return _checked_dense(parameter, info, chosen).reshape(-1)


def _convert(info: TensorInfo, rows: np.ndarray, k: int, parameter: Parameter) -> np.ndarray:
    if info.scheme == parameter.scheme:
        return rows
    values = dequantize(info.scheme, rows, k)
    if parameter.scheme == "fp8":
        return quantize_fp8(values)
    if SCHEMES[parameter.scheme].is_quantized:
        return quantize_int4(parameter.scheme, values)
    return _checked_dense(parameter, info, values)


def _checked_dense(parameter: Parameter, info: TensorInfo, values: np.ndarray) -> np.ndarray:
    rows = to_dense(parameter.scheme, values)
    if parameter.scheme != "f32":
        try:
            check_finite(parameter.scheme, rows, info.name)
        except CheckpointError:
            raise CheckpointError(
                f"tensor {info.name}: holds values beyond what {parameter.scheme} can hold: use --compute f32"
            ) from None
    return rows
