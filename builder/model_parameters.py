"""A checkpoint's tensors bound to a model's parameters: every tensor used, every parameter filled, ties
resolved.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from castiron.builder.checkpoint.checkpoint import Float8Pieces, TensorInfo
from castiron.builder.parameters import Parameter, Part
from castiron.models.config import ModelConfig
from castiron.models.decoder import EMBEDDING, INV_FREQ, LM_HEAD
from castiron.models.family import ModelFamily, ParameterSpec
from castiron.models.registry import FAMILIES
from castiron.models.rope import inverse_frequencies
from castiron.runtime.errors import CheckpointError

_GGUF_ROPE_DIVISORS = "rope_freqs.weight"
_COMPARED_ROWS = 1024  # read at a time when a tied lm_head is compared


class CheckpointTensors(Protocol):
    """What binding needs of builder.checkpoint.Checkpoint."""

    source_format: str
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray: ...


@dataclass(frozen=True)
class BoundModel:
    """A model whose parameters all have a source."""

    family: ModelFamily
    config: ModelConfig  # ties and rope divisors resolved
    parameters: dict[str, Parameter]  # schemes as in the checkpoint; 1-D ones f32
    warnings: tuple[str, ...]


def bind_model(checkpoint: CheckpointTensors) -> BoundModel:
    """Read the config, resolve ties, bind every parameter.

    Raises CheckpointError (see check_tensors, _resolve_tie).
    """
    family, config = read_model_config(checkpoint)
    config, warnings, tied_copy = _resolve_tie(config, checkpoint)
    config = _with_rope_divisors(config, checkpoint)
    specs = family.parameter_specs(config)
    check_tensors(family, config, specs, checkpoint, tied_copy)
    parameters = {}
    for name, parameter in model_parameters(family, config, checkpoint.source_format).items():
        if parameter.constant is None:
            info = checkpoint.tensors[parameter.parts[0].tensor]
            scheme = info.scheme if len(parameter.shape) > 1 else "f32"
            input_scale = info.pieces.input_scale if isinstance(info.pieces, Float8Pieces) else 0.0
            parameter = replace(parameter, scheme=scheme, source_scheme=info.scheme, input_scale=input_scale)
        parameters[name] = parameter
    return BoundModel(family, config, parameters, tuple(warnings))


def read_model_config(checkpoint: CheckpointTensors) -> tuple[ModelFamily, ModelConfig]:
    """The checkpoint's family and config, before ties are compared. Raises CheckpointError."""
    if checkpoint.source_format == "gguf":
        family = FAMILIES.for_gguf(checkpoint.config)
        raw = family.gguf_config(checkpoint.config, checkpoint.tensors.keys())
    else:
        family = FAMILIES.for_hf_config(checkpoint.config)
        raw = checkpoint.config
    return family, family.parse_config(raw)


def model_parameters(family: ModelFamily, config: ModelConfig, source_format: str) -> dict[str, Parameter]:
    """All parameters of the traced module with their recipes over a "safetensors" or "gguf" checkpoint.

    Schemes are "f32" until a checkpoint says otherwise (bind_model).
    """
    parameters = {}
    for spec in family.parameter_specs(config):
        is_gguf = source_format == "gguf"
        part = Part(
            tensor=spec.gguf_name if is_gguf else spec.hf_name,
            row_start=0,
            row_stop=spec.shape[0],
            transform=spec.gguf_transform if is_gguf else "",
            head_dim=spec.head_dim if is_gguf else 0,
        )
        parameters[spec.name] = Parameter(spec.name, spec.shape, "f32", parts=(part,))
    inv_freq = inverse_frequencies(config.rope, config.head_dim)
    parameters[INV_FREQ] = Parameter(INV_FREQ, inv_freq.shape, "f32", constant=inv_freq)
    return parameters


def check_tensors(
    family: ModelFamily,
    config: ModelConfig,
    specs: tuple[ParameterSpec, ...],
    checkpoint: CheckpointTensors,
    tied_copy: str | None = None,
) -> None:
    """Raise CheckpointError naming the first tensor that is missing, of another shape, or that nothing
    uses.
    """
    is_gguf = checkpoint.source_format == "gguf"
    used = {tied_copy, _GGUF_ROPE_DIVISORS if is_gguf else None}
    for spec in specs:
        name = spec.gguf_name if is_gguf else spec.hf_name
        info = checkpoint.tensors.get(name)
        if info is None:
            hint = ""
            if spec.name == LM_HEAD:
                hint = ": set tie_word_embeddings to true in config.json if the embedding serves for it"
            raise CheckpointError(
                f"the checkpoint has no tensor {name}, shape {_text(spec.shape)} expected{hint}"
            )
        if info.shape != spec.shape:
            raise CheckpointError(
                f"tensor {name} has shape {_text(info.shape)}, expected {_text(spec.shape)}"
            )
        used.add(name)
    ignorable = [re.compile(pattern) for pattern in family.ignorable_tensors]
    surplus = sorted(
        name
        for name in checkpoint.tensors.keys() - used
        if not any(pattern.fullmatch(name) for pattern in ignorable)
    )
    if surplus:
        raise CheckpointError(
            f"tensor {surplus[0]} ({len(surplus)} in all) isn't part of a {family.name} model with this"
            " config: the config contradicts the file, or it is another model"
        )


def _resolve_tie(
    config: ModelConfig, checkpoint: CheckpointTensors
) -> tuple[ModelConfig, list[str], str | None]:
    """The config, warnings, and the name of an lm_head tensor that only repeats the embedding.

    Raises CheckpointError if tie_word_embeddings is true and the file's lm_head differs from its embedding.
    """
    if not config.tie_word_embeddings or checkpoint.source_format == "gguf":
        return config, [], None
    specs = {
        s.name: s.hf_name
        for s in FAMILIES.by_name[config.family].parameter_specs(replace(config, tie_word_embeddings=False))
    }
    head, embedding = specs[LM_HEAD], specs[EMBEDDING]
    if head not in checkpoint.tensors or embedding not in checkpoint.tensors:
        return config, [], None
    if not _same_rows(checkpoint, embedding, head):
        raise CheckpointError(
            f"config says tie_word_embeddings = true, but {head} differs from {embedding}: "
            "set it to false to use both"
        )
    return config, [f"{head} repeats {embedding} (tie_word_embeddings is true): only one is kept"], head


def _same_rows(checkpoint: CheckpointTensors, a: str, b: str) -> bool:
    first, second = checkpoint.tensors[a], checkpoint.tensors[b]
    if (first.shape, first.scheme) != (second.shape, second.scheme):
        return False
    return all(
        np.array_equal(
            checkpoint.read_rows(a, start, min(start + _COMPARED_ROWS, first.num_rows)),
            checkpoint.read_rows(b, start, min(start + _COMPARED_ROWS, first.num_rows)),
        )
        for start in range(0, first.num_rows, _COMPARED_ROWS)
    )


def _with_rope_divisors(config: ModelConfig, checkpoint: CheckpointTensors) -> ModelConfig:
    """Llama 3's rope scaling as GGUF files hold it: a float32 tensor of one divisor per frequency."""
    info = checkpoint.tensors.get(_GGUF_ROPE_DIVISORS)
    if checkpoint.source_format != "gguf" or info is None:
        return config
    if info.scheme != "f32" or info.shape != (config.head_dim // 2,):
        raise CheckpointError(
            f"tensor {_GGUF_ROPE_DIVISORS} is {info.scheme} {_text(info.shape)}, "
            f"expected f32 [{config.head_dim // 2}]"
        )
    divisors = checkpoint.read_rows(_GGUF_ROPE_DIVISORS, 0, 1).reshape(-1).view(np.float32)
    return replace(config, rope=replace(config.rope, divisors=tuple(float(d) for d in divisors)))


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
