"""The one door to checkpoints: a folder, a .gguf file or a hub id becomes a Checkpoint."""

import re
from pathlib import Path

from castiron.builder.checkpoint.checkpoint import Checkpoint
from castiron.builder.checkpoint.gguf_checkpoint import open_gguf
from castiron.builder.checkpoint.huggingface_checkpoint import open_huggingface_folder
from castiron.runtime.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


def open_checkpoint(path_or_id: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, a .gguf file, or a hub id ("owner/name", downloaded by huggingface_hub).

    Only headers are read. Raises CheckpointError for anything damaged, incomplete or unsupported.
    """
    path = Path(path_or_id)
    try:
        if path.is_dir():
            return open_huggingface_folder(path)
        if path.is_file():
            return open_gguf(path)
    except OSError as error:
        raise CheckpointError(f"{path}: can't read: {error.strerror or error}") from error
    if path.suffix != ".gguf" and _HUB_ID.fullmatch(str(path_or_id)):
        return open_huggingface_folder(_download(str(path_or_id)), name=str(path_or_id).split("/")[1])
    raise CheckpointError(
        f"{path_or_id}: no such file or folder: give a Hugging Face folder, a .gguf file"
        " or a hub id owner/name"
    )


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises errors of many libraries; all mean the same here
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{hub_id}: not a local path, and the hub can't provide it"
            f" ({type(error).__name__}: {reason[0] if reason else 'no reason given'}):"
            " check the name and the network, or give a local folder"
        ) from error
