"""How far stored weights are from the checkpoint's where the builder converted them."""

from collections.abc import Iterable

import numpy as np

from castiron.builder.checkpoint import Checkpoint
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.parameter_data import read_parameter_rows
from castiron.builder.parameters import Parameter

_SAMPLE_ROWS = 16


def relative_error(checkpoint: Checkpoint, parameters: Iterable[Parameter]) -> float:
    """Largest relative RMS error over the first rows of each converted matrix; 0 if none was converted."""
    worst = 0.0
    for parameter in parameters:
        if parameter.constant is not None or len(parameter.shape) == 1:
            continue
        part = parameter.parts[0]
        info = checkpoint.tensor(part.tensor)
        if info.scheme == parameter.scheme or part.transform:
            continue
        rows = min(_SAMPLE_ROWS, part.row_stop - part.row_start)
        k = parameter.shape[-1]
        exact = dequantize(
            info.scheme, checkpoint.read_rows(info.name, part.row_start, part.row_start + rows), k
        )
        stored = dequantize(parameter.scheme, read_parameter_rows(checkpoint, parameter, 0, rows), k)
        norm = float(np.sqrt(np.mean(np.square(exact))))
        if norm:
            worst = max(worst, float(np.sqrt(np.mean(np.square(stored - exact)))) / norm)
    return worst
