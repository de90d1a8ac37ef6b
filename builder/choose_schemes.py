"""How the engine stores each parameter and what arithmetic it uses: --quantize and --compute resolved."""

from collections.abc import Iterable
from dataclasses import replace

from castiron.builder.parameters import Parameter
from castiron.models.schemes import SCHEMES
from castiron.runtime.errors import InputError


def choose_schemes(
    parameters: dict[str, Parameter], quantize: str, compute: str
) -> tuple[dict[str, Parameter], str]:
    """The parameters with the schemes the engine stores, and the compute mode ("f32", "bf16", "int8").

    Vectors are always f32. Raises InputError for a compute mode the weights don't allow.
    """
    matrices = [p.source_scheme for p in parameters.values() if _is_matrix(p)]
    resolved = resolve_compute(compute, quantize, matrices)
    return {
        name: replace(p, scheme=stored_scheme(p.source_scheme, quantize, resolved)) if _is_matrix(p) else p
        for name, p in parameters.items()
    }, resolved


def cache_dtype(compute: str) -> str:
    """What keys and values are stored as."""
    return "f32" if compute == "f32" else "f16"


def resolve_compute(compute: str, quantize: str, schemes: Iterable[str]) -> str:
    """The arithmetic for matrices stored in these schemes; see BuildOptions.compute for "auto"."""
    stored = set(schemes)
    has_kept_blocks = quantize == "keep" and any(SCHEMES[scheme].is_quantized for scheme in stored)
    if compute == "int8" and not has_kept_blocks:
        raise InputError(
            "--compute int8 needs weights kept quantized, this engine's are all dense: use f32, bf16 or auto"
        )
    if compute != "auto":
        return compute
    if has_kept_blocks:
        return "int8"
    return "f32" if stored == {"f32"} else "bf16"


def stored_scheme(scheme: str, quantize: str, compute: str) -> str:
    """How the engine stores a matrix that the checkpoint stores as `scheme`."""
    if SCHEMES[scheme].is_quantized:
        if quantize == "keep":
            return scheme
        return "f32" if compute == "f32" else "bf16"
    return "bf16" if scheme == "f32" and compute == "bf16" else scheme


def _is_matrix(parameter: Parameter) -> bool:
    return parameter.constant is None and len(parameter.shape) > 1
