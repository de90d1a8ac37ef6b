"""engine.json: what an engine file says about itself. Unknown fields are ignored on read (newer minor)."""

from typing import Any

import msgspec

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
STEP_ABI_VERSION = 2
PURPOSE_SERVING, PURPOSE_TUNING = "serving", "tuning"


class Member(msgspec.Struct, frozen=True):
    """One member of the ZIP other than engine.json: its data's place and hash."""

    name: str
    offset: int  # of the data, from the start of the file; a multiple of 4096 (weights: 65536)
    size: int  # bytes
    sha256: str


class WeightsFile(msgspec.Struct, frozen=True):
    """One safetensors member (or part file) whose data section is read as it is into class `weights`."""

    member: str
    data_offset: int  # of the data section inside the member
    data_bytes: int
    weights_offset: int  # where it goes in the memory class


class ModelInfo(msgspec.Struct, frozen=True):
    name: str
    family: str  # "llama", "qwen2"
    config: dict[str, Any]  # the normalized model config the graph was traced from
    vocab_size: int
    max_seq_len: int  # tokens the engine allows a sequence
    num_parameters: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]  # of the model's generation config: temperature, top_p, ...


RUN = "run"  # TargetInfo.status: engines for the target have run and passed the tests


class TargetInfo(msgspec.Struct, frozen=True):
    kind: str  # "cpu" or "cuda"
    level: str  # cpu: "generic", "x86-64-v3", "avx512-vnni", "amx"; cuda: "sm_90", "sm_80", ...
    kernel_abi_hash: str  # cpu: of abi.h
    requirements: dict[str, Any] = {}  # cuda: driver, compute capability, memory, SM count
    status: str = RUN  # else what was done: "compiled, not run"


class Profile(msgspec.Struct, frozen=True):
    """What the engine was built to serve; serving limits may only lower these."""

    max_seqs: int
    max_seq_len: int
    max_batched_tokens: int


class QuantizationInfo(msgspec.Struct, frozen=True):
    mode: str  # "keep", "none"
    compute: str  # "f32", "bf16", "int8"
    cache_dtype: str  # "f32", "f16"
    schemes: dict[str, int]  # scheme -> weight bytes in it


class Provenance(msgspec.Struct, frozen=True):
    castiron_version: str
    source_format: str  # "safetensors", "gguf"
    source_files: dict[str, str]  # file name (no folder) -> sha256 ("" for dummy weights)
    tool_versions: dict[str, str]


class Manifest(msgspec.Struct, frozen=True):
    format_major: int
    format_minor: int
    step_abi_version: int
    model: ModelInfo
    target: TargetInfo
    profile: Profile
    quantization: QuantizationInfo
    weights: tuple[WeightsFile, ...]
    weights_source: str  # "file" or "dummy"
    row_stable: bool  # a row's result doesn't depend on batch, chunking or caching
    features: tuple[str, ...]
    provenance: Provenance
    members: tuple[Member, ...]
    purpose: str = PURPOSE_SERVING  # "tuning": its plans only time kernels (tuning_format.py)
