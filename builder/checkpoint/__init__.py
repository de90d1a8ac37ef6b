"""Checkpoints as they come: Hugging Face folders and GGUF files, read strictly and row by row."""

from castiron.builder.checkpoint.checkpoint import Checkpoint, TensorInfo
from castiron.builder.checkpoint.open_checkpoint import open_checkpoint

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]
