"""MODEL of the command line: a checkpoint on disk or the hub, or an alias of known size without weights."""

import importlib.resources
import json
from importlib.resources.abc import Traversable
from pathlib import Path

from castiron.builder.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from castiron.models.registry import FAMILIES
from castiron.runtime.errors import InputError

_ALIAS_SCHEME = "bf16"


def open_model(name: str, weights: str) -> tuple[Checkpoint, bool]:
    """The checkpoint of a Hugging Face folder, a .gguf file, a hub id or an alias; whether it is an alias.

    An alias' checkpoint has shapes and no data, so `weights` must be "dummy" or "random" for it. Raises
    InputError otherwise, CheckpointError for anything wrong with a checkpoint.
    """
    aliases = _aliases()
    if name not in aliases or Path(name).exists():
        return open_checkpoint(name), False
    if weights == "file":
        raise InputError(
            f"{name} is an alias: its size is known, its weights are not; "
            "give a checkpoint, or --weights random or dummy"
        )
    return _alias_checkpoint(name, aliases[name]), True


def _alias_checkpoint(name: str, file: Traversable) -> Checkpoint:
    raw = json.loads(file.read_text(encoding="utf-8"))
    family = FAMILIES.for_hf_config(raw)
    return Checkpoint(
        source_format="safetensors",
        name=name,
        architecture=raw["architectures"][0],
        config=raw,
        tensors={
            spec.hf_name: TensorInfo(spec.hf_name, spec.shape, _ALIAS_SCHEME, Path(), 0)
            for spec in family.parameter_specs(family.parse_config(raw))
        },
        files={},
        generation_config={},
        folder=None,
    )


def _aliases() -> dict[str, Traversable]:
    folder = importlib.resources.files("castiron.configs").joinpath("models")
    return {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}
