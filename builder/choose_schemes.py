"""How the engine stores each parameter and what arithmetic it uses: --quantize and --compute resolved."""

from collections.abc import Iterable
from dataclasses import replace

from castiron.builder.parameters import Parameter
from castiron.builder.targets import Target, target_names
from castiron.models.decoder import EMBEDDING, LM_HEAD
from castiron.models.schemes import SCHEMES
from castiron.runtime.errors import InputError

_INT4_SCHEMES = ("int4_g128", "int4_g64", "int4_g32")
# what a mode makes of a dense linear: the first scheme that fits its rows; one that none fits stays dense
_ROUNDED = {"int4": _INT4_SCHEMES, "fp8": ("fp8",)}
_FP8_COLUMNS = 16  # rows of fp8 are whole 16-byte runs: kernels copy such


def choose_schemes(
    parameters: dict[str, Parameter], quantize: str, compute: str, target: Target
) -> tuple[dict[str, Parameter], str]:
    """The parameters with the schemes and the layout the engine stores, and the compute mode.

    Vectors are always f32. Raises InputError for a compute mode the weights or the target don't allow, and for weights
    that no kernel of the target reads.
    """
    if quantize in _ROUNDED:
        _check_kernels(_ROUNDED[quantize][0], f"--quantize {quantize}", target)
    matrices = [p.source_scheme for p in parameters.values() if _is_matrix(p)]
    resolved = resolve_compute(compute, quantize, matrices, target)
    chosen = {}
    for name, parameter in parameters.items():
        scheme = parameter.scheme
        if _is_matrix(parameter):
            scheme = stored_scheme(parameter.source_scheme, quantize, resolved, target)
            if quantize in _ROUNDED and name not in (EMBEDDING, LM_HEAD):
                scheme = _rounded_scheme(scheme, quantize, parameter.shape[-1])
            _check_kernels(scheme, f"weight {name}, stored as {scheme},", target)
            if not _fits(scheme, parameter.shape[-1]):
                raise InputError(
                    f"weight {name} has {parameter.shape[-1]} columns, kernels of {scheme} need a multiple of"
                    f" {_FP8_COLUMNS}: use --quantize none"
                )
        chosen[name] = replace(parameter, scheme=scheme, layout=target.layout)
    if quantize in _ROUNDED and not any(
        chosen[name].scheme in _ROUNDED[quantize] and not SCHEMES[parameter.source_scheme].is_quantized
        for name, parameter in parameters.items()
    ):
        stored = ", ".join(sorted({p.source_scheme for p in parameters.values() if _is_matrix(p)}))
        raise InputError(
            f"--quantize {quantize} rounds dense linears, this checkpoint has none that fit (its weights are "
            f"{stored}): use keep"
        )
    return chosen, resolved


def resolve_compute(compute: str, quantize: str, schemes: Iterable[str], target: Target) -> str:
    """The arithmetic for matrices stored in these schemes; see BuildOptions.compute for "auto"."""
    stored = set(schemes)
    has_kept_blocks = quantize != "none" and any(SCHEMES[scheme].is_quantized for scheme in stored)
    if compute == "auto":
        wanted = "int8" if has_kept_blocks else "f32" if stored == {"f32"} else "bf16"
        return wanted if wanted in target.compute else "bf16"
    if compute not in target.compute:
        raise InputError(
            f"--compute {compute} is not there on {target.name}: use {' or '.join(target.compute)} or auto"
        )
    if compute == "int8" and not has_kept_blocks:
        raise InputError(
            "--compute int8 needs weights kept quantized, this engine's are all dense: use f32, bf16 or auto"
        )
    return compute


def stored_scheme(scheme: str, quantize: str, compute: str, target: Target) -> str:
    """How the engine stores a matrix that the checkpoint stores as `scheme`."""
    if SCHEMES[scheme].is_quantized:
        if quantize != "none":
            return scheme
        return "f32" if compute == "f32" else "bf16"
    if target.kind == "cuda":
        return "bf16"  # what its matrix units read
    return "bf16" if scheme == "f32" and compute == "bf16" else scheme


def _is_matrix(parameter: Parameter) -> bool:
    return parameter.constant is None and len(parameter.shape) > 1


def _rounded_scheme(dense: str, quantize: str, k: int) -> str:
    if SCHEMES[dense].is_quantized:
        return dense
    return next((scheme for scheme in _ROUNDED[quantize] if _fits(scheme, k)), dense)


def _fits(scheme: str, k: int) -> bool:
    return k % (_FP8_COLUMNS if scheme == "fp8" else SCHEMES[scheme].block_size) == 0


def _check_kernels(scheme: str, what: str, target: Target) -> None:
    kinds = SCHEMES[scheme].kinds
    if target.kind not in kinds and target.name not in kinds:
        names = " or ".join(target_names(kinds))
        raise InputError(f"{what} has no kernels on {target.name}: use --quantize none, or --target {names}")
