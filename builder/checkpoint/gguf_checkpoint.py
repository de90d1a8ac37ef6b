"""GGUF files: the header parsed strictly, tensors left in place."""

from pathlib import Path

from castiron.builder.checkpoint.checkpoint import Checkpoint
from castiron.builder.checkpoint.gguf_header import read_gguf_header
from castiron.runtime.errors import CheckpointError


def open_gguf(path: Path) -> Checkpoint:
    """Open a .gguf file by its header. Raises CheckpointError for damaged or unsupported files."""
    header = read_gguf_header(path)
    architecture = header.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture.isprintable() or not architecture:
        raise CheckpointError(f"{path}: general.architecture is missing or damaged: not a model file")
    if header.metadata.get("split.count", 0) > 1:
        raise CheckpointError(
            f"{path}: part of a GGUF split into {header.metadata['split.count']} files, which isn't"
            " supported: merge them first (llama-gguf-split --merge)"
        )
    if not header.tensors:
        raise CheckpointError(f"{path}: holds no tensors")
    return Checkpoint(
        source_format="gguf",
        name=path.stem,
        architecture=architecture,
        config=header.metadata,
        tensors=header.tensors,
        files={path.name: path},
        generation_config={},
        folder=None,
    )
