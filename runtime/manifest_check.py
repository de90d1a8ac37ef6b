"""Range checks of engine.json: every number the runtime computes sizes from is sane before it is used."""

import re
from typing import NoReturn

from castiron.runtime.errors import EngineFormatError
from castiron.runtime.manifest import PURPOSE_SERVING, PURPOSE_TUNING, Manifest
from castiron.runtime.printable import printable

MAX_TOKENS = 1 << 24  # of a sequence or a step
MAX_SEQS = 1 << 16
MAX_VOCAB_SIZE = 1 << 24
MAX_CLASS_BYTES = 1 << 46  # 64 TiB
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_manifest(manifest: Manifest, label: str) -> None:
    """Raise EngineFormatError naming the first field of `manifest` that can't be right."""
    model, profile = manifest.model, manifest.profile
    checks = (
        ("model.vocab_size", model.vocab_size, 1, MAX_VOCAB_SIZE),
        ("model.max_seq_len", model.max_seq_len, 1, MAX_TOKENS),
        ("model.num_parameters", model.num_parameters, 0, 1 << 60),
        ("profile.max_seqs", profile.max_seqs, 1, MAX_SEQS),
        ("profile.max_seq_len", profile.max_seq_len, 1, MAX_TOKENS),
        ("profile.max_batched_tokens", profile.max_batched_tokens, 1, MAX_TOKENS),
    )
    for field, value, low, high in checks:
        check_range(field, value, low, high, label)
    for token_id in (*model.eos_token_ids, *([] if model.bos_token_id is None else [model.bos_token_id])):
        check_range("model.eos_token_ids and bos_token_id", token_id, 0, model.vocab_size - 1, label)
    if manifest.target.kind not in ("cpu", "cuda"):
        refuse(label, f"target.kind is {printable(manifest.target.kind)}, expected cpu or cuda")
    if manifest.purpose not in (PURPOSE_SERVING, PURPOSE_TUNING):
        refuse(label, f"purpose is {printable(manifest.purpose)}, expected serving or tuning")
    if manifest.purpose == PURPOSE_TUNING and manifest.target.kind != "cuda":
        refuse(label, f"a tuning engine for {manifest.target.kind}, whose kernels have no rivals")
    if manifest.weights_source not in ("file", "dummy"):
        refuse(label, f"weights_source is {printable(manifest.weights_source)}, expected file or dummy")
    sizes = {}
    for member in manifest.members:
        sizes[member.name] = member.size
        if not _SHA256.fullmatch(member.sha256):
            refuse(label, f"the sha256 of member {member.name} is {printable(member.sha256)}")
    end = 0
    for weights in manifest.weights:
        if weights.member not in sizes:
            refuse(label, f"weights name a member {printable(weights.member)} which doesn't exist")
        size = sizes[weights.member]
        check_range("weights.data_offset", weights.data_offset, 0, size, label)
        check_range("weights.data_bytes", weights.data_bytes, 0, size - weights.data_offset, label)
        check_range("weights.weights_offset", weights.weights_offset, end, MAX_CLASS_BYTES, label)
        end = weights.weights_offset + weights.data_bytes


def check_range(field: str, value: int, low: int, high: int, label: str) -> None:
    """Raise EngineFormatError unless low <= value <= high."""
    if not low <= value <= high:
        refuse(label, f"{field} is {value}, expected {low} to {high}")


def refuse(label: str, what: str) -> NoReturn:
    """Raise the EngineFormatError of a file whose parts don't fit together."""
    raise EngineFormatError(f"{label} is not a sound engine file: {what}; rebuild it with build-engine")
