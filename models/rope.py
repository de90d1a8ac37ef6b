"""Rotary position embedding: the scalings of Llama-like models and their inverse frequencies.

The formulas, and their float32 arithmetic, follow transformers' modeling_rope_utils.py; sources: linear
(u/kaiokendev), llama3 (Llama 3.1's reference code), yarn (arXiv:2309.00071).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from castiron.runtime.errors import CheckpointError

SUPPORTED_KINDS = ("default", "linear", "llama3", "yarn")
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_REQUIRED_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": set(),
}
_OPTIONAL_KEYS: dict[str, set[str]] = {
    # a default rope states nothing more; transformers ignores such leftovers too
    "default": {"factor", "original_max_position_embeddings"},
    "linear": {"original_max_position_embeddings"},
    "llama3": {"original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
}


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding over the whole head, split-half."""

    kind: str  # one of SUPPORTED_KINDS
    theta: float  # base of the geometric series of wavelengths
    factor: float = 1.0  # context is stretched by it
    original_max_position_embeddings: int = 0  # llama3, yarn: context before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a dimension is left alone
    beta_slow: float = 1.0  # yarn: rotations below which it is fully interpolated
    truncate: bool = True  # yarn: round the range of dimensions outwards
    attention_scaling: float = 1.0  # yarn: multiplies cos and sin
    # GGUF stores llama3's scaling as one divisor per frequency instead (tensor rope_freqs.weight)
    divisors: tuple[float, ...] | None = None


def parse_rope(
    *,
    rope_parameters: Any,
    rope_scaling: Any,
    rope_theta: Any,
    max_position_embeddings: int,
    original_max_position_embeddings: Any = None,
) -> RopeConfig:
    """Rope from config fields: rope_parameters (transformers 5) or rope_theta and rope_scaling (4.x).

    Raises CheckpointError for a kind or key that isn't supported, or a missing or senseless value.
    """
    for name, value in (("rope_parameters", rope_parameters), ("rope_scaling", rope_scaling)):
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"config says {name} = {value!r}, expected an object")
    fields: dict[str, Any] = {
        k: v for k, v in (rope_scaling or rope_parameters or {}).items() if v is not None
    }
    if rope_parameters and rope_scaling and dict(rope_parameters) != dict(rope_scaling):
        raise CheckpointError("config has both rope_parameters and rope_scaling and they differ: remove one")
    if rope_theta is not None:
        fields.setdefault("rope_theta", rope_theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in SUPPORTED_KINDS:
        hint = {
            "dynamic": " (its frequencies depend on each sequence's length)",
            "longrope": " (its frequencies depend on each sequence's length)",
        }.get(str(kind), "")
        raise CheckpointError(
            f"rope type {kind!r} isn't supported{hint}, expected one of {', '.join(SUPPORTED_KINDS)}"
        )
    _check_keys(kind, fields)
    rope = RopeConfig(kind, theta=_number(fields, "rope_theta", 10000.0))
    if rope.theta <= 1:
        raise CheckpointError(f"rope says rope_theta = {rope.theta}, expected a number above 1")
    if kind == "default":
        return rope
    original = original_max_position_embeddings or fields.get("original_max_position_embeddings")
    if original is None:
        original = max_position_embeddings
    if isinstance(original, bool) or not isinstance(original, int | float) or original < 1:
        raise CheckpointError(
            f"rope says original_max_position_embeddings = {original!r}, expected a positive integer"
        )
    rope = replace(
        rope,
        factor=_number(fields, "factor", max_position_embeddings / original),
        original_max_position_embeddings=int(original),
    )
    if kind == "llama3":
        rope = replace(
            rope,
            low_freq_factor=_number(fields, "low_freq_factor"),
            high_freq_factor=_number(fields, "high_freq_factor"),
        )
        if rope.high_freq_factor <= rope.low_freq_factor:
            raise CheckpointError(
                f"rope says high_freq_factor = {rope.high_freq_factor}, expected more than "
                f"low_freq_factor = {rope.low_freq_factor}"
            )
    if kind == "yarn":
        rope = replace(
            rope,
            beta_fast=_number(fields, "beta_fast", 32.0),
            beta_slow=_number(fields, "beta_slow", 1.0),
            truncate=bool(fields.get("truncate", True)),
            attention_scaling=_yarn_attention_scaling(fields, rope.factor),
        )
    return rope


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: radians per position of each pair.

    Raises CheckpointError if divisors don't fit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    powers = rope.theta**exponents
    inv_freq = 1.0 / powers
    if rope.divisors is not None:
        if len(rope.divisors) != head_dim // 2 or not all(0 < d < 1e30 for d in rope.divisors):
            raise CheckpointError(
                f"rope_freqs.weight holds {rope.divisors[:8]}, expected {head_dim // 2} positive divisors"
            )
        inv_freq = inv_freq / torch.tensor(rope.divisors, dtype=torch.float32)
    elif rope.kind == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.kind == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope.kind == "yarn":
        inv_freq = _yarn(rope, head_dim, powers)
    return np.asarray(inv_freq)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    blend = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inv_freq / rope.factor + blend * inv_freq
    long = wavelength > original / rope.low_freq_factor
    short = wavelength < original / rope.high_freq_factor
    return torch.where(long, inv_freq / rope.factor, torch.where(short, inv_freq, blended))


def _yarn(rope: RopeConfig, head_dim: int, powers: torch.Tensor) -> torch.Tensor:
    """Dimensions turning more than beta_fast times in the original context are kept, slow ones stretched."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_attention_scaling(fields: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in fields:
        return _number(fields, "attention_factor")
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return mscale(_number(fields, "mscale")) / mscale(_number(fields, "mscale_all_dim"))
    return mscale(1.0)


def _check_keys(kind: str, fields: Mapping[str, Any]) -> None:
    missing = sorted(_REQUIRED_KEYS[kind] - fields.keys())
    if missing:
        raise CheckpointError(f"rope type {kind} needs {missing[0]}, which the config doesn't give")
    known = _COMMON_KEYS | _REQUIRED_KEYS[kind] | _OPTIONAL_KEYS[kind]
    unknown = sorted(fields.keys() - known)
    if unknown:
        raise CheckpointError(
            f"rope parameter {unknown[0]} = {fields[unknown[0]]!r} is unknown for rope type {kind}, "
            f"expected {', '.join(sorted(known))}"
        )
    if fields.get("partial_rotary_factor", 1) != 1:
        raise CheckpointError(
            f"rope says partial_rotary_factor = {fields['partial_rotary_factor']!r}, "
            "castiron rotates whole heads here (1.0)"
        )


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
        raise CheckpointError(f"rope says {name} = {value!r}, expected a positive number")
    return float(value)
