"""Finding the tensors that a quantized weight is put together from."""

from collections.abc import Mapping

from castiron.builder.checkpoint.checkpoint import TensorInfo
from castiron.runtime.errors import CheckpointError


def find_piece(
    name: str,
    tensors: Mapping[str, TensorInfo],
    schemes: tuple[str, ...],
    shapes: tuple[tuple[int, ...], ...],
    whole: str,
) -> TensorInfo:
    """The tensor of this name. Raises CheckpointError if it is missing or none of these types and shapes.

    whole: what needs it, "a packed weight".
    """
    info = tensors.get(name)
    if info is None:
        raise CheckpointError(f"the checkpoint has no tensor {name}, which {whole} needs")
    if info.scheme not in schemes or info.shape not in shapes:
        raise CheckpointError(
            f"tensor {name} is {info.scheme} {list(info.shape)}, expected {' or '.join(schemes)}"
            f" {' or '.join(str(list(shape)) for shape in shapes)}"
        )
    return info
