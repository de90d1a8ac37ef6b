"""What a model file states: a family of architectures, how its config is read, where its parameters come
from.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from castiron.models.config import ModelConfig


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a model and the checkpoint tensor that fills it."""

    name: str  # in the graph and the engine file: "layers.0.q.weight"
    shape: tuple[int, ...]  # [rows, columns] or [rows]
    hf_name: str  # tensor name in a Hugging Face checkpoint
    gguf_name: str
    gguf_transform: str = ""  # builder.parameters.Part.transform that undoes what GGUF's converter did
    head_dim: int = 0  # for "unpermute_rope"


@dataclass(frozen=True)
class ModelFamily:
    """One family. Its module is the shared decoder (decoder.py) unless `make_module` says otherwise."""

    name: str
    hf_architectures: tuple[str, ...]  # entries of config.json's "architectures"
    hf_model_types: tuple[str, ...]  # config.json's "model_type", used if "architectures" is absent
    gguf_architectures: tuple[str, ...]  # "general.architecture"
    parse_config: Callable[[Mapping[str, Any]], ModelConfig]  # raises CheckpointError
    # GGUF metadata and tensor names -> a config in Hugging Face's words, for parse_config
    gguf_config: Callable[[Mapping[str, Any], Collection[str]], dict[str, Any]]
    # all parameters but inv_freq and, when tied, lm_head
    parameter_specs: Callable[[ModelConfig], tuple[ParameterSpec, ...]]
    # torch module to trace, with `layers` and `layer_kinds` as decoder.Decoder has them
    make_module: Callable[[ModelConfig], Any]
    # regular expressions of tensors that checkpoints carry and nobody needs
    ignorable_tensors: tuple[str, ...] = ()
