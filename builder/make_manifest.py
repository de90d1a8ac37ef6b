"""engine.json from what the build decided."""

import importlib.metadata

import msgspec
import numpy as np

import castiron
from castiron.builder.checkpoint import Checkpoint
from castiron.builder.model_parameters import BoundModel
from castiron.builder.parameters import Parameter
from castiron.builder.targets import Target
from castiron.builder.tokenizer import TokenizerFiles
from castiron.runtime.devices.kernel_library import abi_hash
from castiron.runtime.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    STEP_ABI_VERSION,
    Manifest,
    ModelInfo,
    Profile,
    Provenance,
    QuantizationInfo,
    TargetInfo,
    WeightsFile,
)

FEATURES = ("greedy", "temperature", "top_k", "top_p", "min_p", "seed", "logprobs")
_TOOLS = ("numpy", "onnx-ir", "torch")


def model_info(
    checkpoint: Checkpoint,
    model: BoundModel,
    parameters: dict[str, Parameter],
    tokenizer: TokenizerFiles | None,
    max_seq_len: int,
) -> ModelInfo:
    """The model as the runtime sees it. The tokenizer's end-of-sequence ids win over the config's."""
    config = model.config
    return ModelInfo(
        name=checkpoint.name,
        family=model.family.name,
        config=msgspec.json.decode(msgspec.json.encode(config)),  # plain JSON data
        vocab_size=config.vocab_size,
        max_seq_len=max_seq_len,
        num_parameters=sum(int(np.prod(p.shape)) for p in parameters.values() if p.constant is None),
        bos_token_id=tokenizer.bos_token_id if tokenizer is not None else config.bos_token_id,
        eos_token_ids=(tokenizer.eos_token_ids if tokenizer is not None else ()) or config.eos_token_ids,
        generation_defaults=tokenizer.generation_defaults if tokenizer is not None else {},
    )


def make_manifest(
    model: ModelInfo,
    target: Target,
    profile: Profile,
    quantization: QuantizationInfo,
    weights: tuple[WeightsFile, ...],
    weights_source: str,
    source_format: str,
    source_files: dict[str, str],
    row_stable: bool,
    purpose: str,
) -> Manifest:
    """The manifest without its members, which the writer fills in."""
    return Manifest(
        format_major=FORMAT_MAJOR,
        format_minor=FORMAT_MINOR,
        step_abi_version=STEP_ABI_VERSION,
        model=model,
        # a CUDA engine brings its kernels, and with them what they take
        target=TargetInfo(
            target.kind,
            target.level,
            abi_hash() if target.kind == "cpu" else "",
            target.requirements,
            target.status,
        ),
        profile=profile,
        quantization=quantization,
        weights=weights,
        weights_source=weights_source,
        row_stable=row_stable,
        features=FEATURES,
        provenance=Provenance(
            castiron_version=castiron.__version__,
            source_format=source_format,
            source_files=source_files,
            tool_versions={tool: importlib.metadata.version(tool) for tool in _TOOLS},
        ),
        members=(),
        purpose=purpose,
    )
