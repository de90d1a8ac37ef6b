"""Llama 2, 3, 3.x and everything built like them: the shared decoder with optional biases and rope
scaling.
"""

from collections.abc import Mapping
from typing import Any

from castiron.models.config import ConfigReader, ModelConfig, parse_decoder_config
from castiron.models.decoder import IGNORABLE_TENSORS, Decoder, decoder_parameter_specs
from castiron.models.family import ModelFamily, ParameterSpec
from castiron.models.gguf_metadata import decoder_gguf_config


def _parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader("llama", raw)
    attention_bias = reader.flag("attention_bias")
    return parse_decoder_config(
        reader, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=reader.flag("mlp_bias")
    )


def _parameter_specs(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    return decoder_parameter_specs(config, gguf_permuted=True)


LLAMA = ModelFamily(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    hf_model_types=("llama",),
    gguf_architectures=("llama",),
    parse_config=_parse_config,
    gguf_config=lambda metadata, tensor_names: decoder_gguf_config("llama", metadata, tensor_names),
    parameter_specs=_parameter_specs,
    make_module=Decoder,
    ignorable_tensors=IGNORABLE_TENSORS,
)
