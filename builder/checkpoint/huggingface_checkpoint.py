"""Hugging Face folders: config.json beside one model.safetensors, or shards listed by an index."""

import json
from pathlib import Path
from typing import Any

from castiron.builder.checkpoint.checkpoint import Checkpoint, TensorInfo
from castiron.builder.checkpoint.compressed_tensors import (
    QUANTIZATION_FIELDS,
    combine_tensors,
    parse_quantization,
)
from castiron.builder.checkpoint.quantization_config import Quantization
from castiron.builder.checkpoint.safetensors_header import read_safetensors_header
from castiron.runtime.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_JSON_BYTES = 256 << 20
_SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX_NAME,
)


def open_huggingface_folder(folder: Path, name: str = "") -> Checkpoint:
    """Open a folder by its config.json and the headers of its safetensors files.

    Raises CheckpointError for missing, contradictory or damaged files, and for checkpoints quantized in another way
    than compressed_tensors.py reads.
    """
    config = read_json_object(folder / "config.json")
    quantization = parse_quantization(folder / "config.json", config)
    architectures = config.get("architectures")
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        raise CheckpointError(
            f"{folder / 'config.json'}: architectures is {architectures!r}, expected a list of names"
        )
    weights = _weight_files(folder)
    generation_path = folder / "generation_config.json"
    generation_config = read_json_object(generation_path) if generation_path.is_file() else {}
    tensors = _collect_tensors(folder, weights, quantization)
    files = {side: folder / side for side in _SIDE_FILES if (folder / side).is_file()}
    return Checkpoint(
        source_format="safetensors",
        name=name or folder.resolve().name,
        architecture=architectures[0],
        # what the quantization fields say is in the tensors' schemes
        config={key: value for key, value in config.items() if key not in QUANTIZATION_FIELDS},
        tensors=tensors,
        files=files | {path.name: path for path in weights},
        generation_config=generation_config,
        folder=folder,
    )


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file holding one object. Raises CheckpointError if it is missing, damaged or something else."""
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes, more than a JSON file here may have")
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file: a Hugging Face folder needs it") from error
    except OSError as error:
        raise CheckpointError(f"{path}: can't read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def _weight_files(folder: Path) -> list[Path]:
    single = folder / SINGLE_NAME
    if single.is_file():
        return [single]
    if (folder / INDEX_NAME).is_file():
        return [folder / shard for shard in sorted(set(_weight_map(folder).values()))]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CheckpointError(
            f"{folder}: {len(found)} safetensors files but no {INDEX_NAME} to say which belong"
        )
    hint = (
        "; convert pytorch_model.bin to safetensors first" if any(folder.glob("pytorch_model*.bin")) else ""
    )
    raise CheckpointError(f"{folder}: no {SINGLE_NAME} and no {INDEX_NAME}{hint}")


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / INDEX_NAME
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {tensor} is said to be in {shard!r}, expected a safetensors file name"
            )
        if not (folder / shard).is_file():
            raise CheckpointError(f"{path}: shard {shard} is missing from the folder: download it again")
    return weight_map


def _collect_tensors(
    folder: Path, weights: list[Path], quantization: Quantization | None
) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for path in weights:
        for info in read_safetensors_header(path, with_pieces=quantization is not None):
            if info.name in tensors:
                raise CheckpointError(
                    f"tensor {info.name} is in both {tensors[info.name].file.name} and {path.name}"
                )
            tensors[info.name] = info
    if weights[0].name != SINGLE_NAME and (folder / INDEX_NAME).is_file():
        weight_map = _weight_map(folder)
        for name, shard in weight_map.items():
            if name not in tensors or tensors[name].file.name != shard:
                raise CheckpointError(
                    f"{folder / INDEX_NAME}: lists {name} in {shard}, which doesn't hold it"
                )
        for name, info in tensors.items():
            if name not in weight_map:
                raise CheckpointError(f"{info.file}: holds {name}, which {INDEX_NAME} doesn't list")
    if not tensors:
        raise CheckpointError(f"{folder}: the safetensors files hold no tensors")
    return tensors if quantization is None else combine_tensors(tensors, quantization)
