"""Qwen2 and Qwen2.5: the shared decoder with q, k, v biases; GGUF rows are in Hugging Face's order."""

from collections.abc import Collection, Mapping
from typing import Any

from castiron.models.config import ConfigReader, ModelConfig, parse_decoder_config
from castiron.models.decoder import IGNORABLE_TENSORS, Decoder, decoder_parameter_specs
from castiron.models.family import ModelFamily, ParameterSpec
from castiron.models.gguf_metadata import decoder_gguf_config
from castiron.runtime.errors import CheckpointError


def _parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    reader = ConfigReader("qwen2", raw)
    _refuse_sliding_window(reader)
    return parse_decoder_config(reader, qkv_bias=True, o_bias=False, mlp_bias=False)


def _refuse_sliding_window(reader: ConfigReader) -> None:
    """A window is active if use_sliding_window says so and a layer from max_window_layers on exists."""
    uses_window = reader.flag("use_sliding_window")
    window = reader.get("sliding_window")  # written, and ignored, when use_sliding_window is false
    first_layer = reader.get("max_window_layers", 0)
    layer_types = reader.get("layer_types", [])
    has_layers = not isinstance(first_layer, int) or first_layer < reader.integer("num_hidden_layers")
    sliding = [t for t in layer_types if t != "full_attention"]
    if sliding or (uses_window and window is not None and has_layers and not layer_types):
        raise CheckpointError(
            f"config asks for sliding-window attention (sliding_window = {window!r}), which isn't supported: "
            "castiron's qwen2 attends to the whole sequence"
        )


def _gguf_config(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> dict[str, Any]:
    config = decoder_gguf_config("qwen2", metadata, tensor_names)
    # the biases are the family's own, not an option: a missing one is found when parameters are filled
    del config["attention_bias"], config["mlp_bias"]
    return config


def _parameter_specs(config: ModelConfig) -> tuple[ParameterSpec, ...]:
    return decoder_parameter_specs(config, gguf_permuted=False)


QWEN2 = ModelFamily(
    name="qwen2",
    hf_architectures=("Qwen2ForCausalLM",),
    hf_model_types=("qwen2",),
    gguf_architectures=("qwen2",),
    parse_config=_parse_config,
    gguf_config=_gguf_config,
    parameter_specs=_parameter_specs,
    make_module=Decoder,
    ignorable_tensors=IGNORABLE_TENSORS,
)
