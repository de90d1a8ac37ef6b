"""Which kernel computes a launch: by op, weight scheme and cache dtype; a refusal says why not."""

from dataclasses import dataclass, field, replace

from castiron.builder.dims import format_dim
from castiron.builder.plan.launches import Launch
from castiron.builder.plan.views import View, is_dense
from castiron.plugins_cpu.specs import SPECS, KernelSpec
from castiron.runtime.errors import InputError
from castiron.runtime.plan_format import MemoryClass


@dataclass
class KernelUse:
    """What the report says about a kernel: how often it launches, and why the other candidates didn't."""

    op: str
    launches: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # kernel -> reason, at the first launch


def choose_kernel(launch: Launch, uses: dict[str, KernelUse]) -> Launch:
    """The launch with its kernel, noted in `uses`.

    Raises InputError listing each candidate and why it said no.
    """
    chosen = None
    refused: dict[str, str] = {}
    for spec in SPECS.values():
        if spec.op != launch.op:
            continue
        refusal = why_not(spec, launch)
        if refusal:
            refused[spec.name] = refusal
        elif chosen is None:
            chosen = spec
        else:
            refused[spec.name] = f"{chosen.name} comes first"
    if chosen is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise InputError(
            f"no cpu kernel for node {launch.node} ({launch.op}): {reasons or 'no kernel computes this op'}"
        )
    use = uses.setdefault(chosen.name, KernelUse(launch.op, refused=refused))
    use.launches += 1
    return replace(launch, spec=chosen)


def why_not(spec: KernelSpec, launch: Launch) -> str:
    """Why this kernel can't compute the launch, "" if it can."""
    if spec.weight_input >= 0:
        weight = launch.inputs[spec.weight_input]
        if weight is None or weight.storage.memory_class != MemoryClass.WEIGHTS:
            return f"input {spec.weight_input} is not a parameter"
        if weight.storage.dtype != spec.scheme:
            return f"reads {spec.scheme} weights, not {weight.storage.dtype}"
        if weight.offset or weight.shape != weight.storage.shape:
            return f"needs all of {weight.storage.name}, not a view into it"
    for index, view in enumerate(launch.inputs):
        if view is None or view.storage.memory_class != MemoryClass.WEIGHTS or index == spec.weight_input:
            continue
        if view.storage.dtype != "f32":
            return f"reads input {index} as f32, not {view.storage.dtype}"
    if spec.cache_dtype:
        dtype = _cache_dtype(spec, launch)
        if dtype != spec.cache_dtype:
            return f"works on a {spec.cache_dtype} cache, not {dtype}"
    if spec.k_multiple > 1:
        last = launch.inputs[max(spec.weight_input, 0)]
        k = last.shape[-1] if last is not None and last.shape else 0
        if not isinstance(k, int) or k % spec.k_multiple:
            return f"needs k to be a multiple of {spec.k_multiple}, not {k}"
    return _why_not_strides(spec, launch)


def needs_flat_rows(spec_op: str) -> bool:
    """Whether the op's kernels see every operand as [rows, dim]."""
    return spec_op in ("add", "mul", "silu", "silu_mul", "silu_mul_q8")


def _why_not_strides(spec: KernelSpec, launch: Launch) -> str:
    """Kernels take a stride between rows only where they have a stride parameter for that operand."""
    strided = {p.binding.split(".")[0] for p in spec.parameters if p.binding.endswith(".stride0")}
    for kind, views in (("in", launch.inputs), ("out", launch.outputs)):
        for index, view in enumerate(views):
            if view is None or view.storage.memory_class in (MemoryClass.WEIGHTS, MemoryClass.CACHE):
                continue
            operand = f"{kind}{index}"
            dense_from = 1 if operand in strided and index not in _must_be_dense(spec, kind) else 0
            if not is_dense(view, dense_from):
                shape = tuple(format_dim(dim) for dim in view.shape)
                return f"{operand} has strides {view.strides} over {shape}, which it can't address"
    return ""


def _must_be_dense(spec: KernelSpec, kind: str) -> tuple[int, ...]:
    return spec.dense_inputs if kind == "in" else spec.dense_outputs


def _cache_dtype(spec: KernelSpec, launch: Launch) -> str:
    for parameter in spec.parameters:
        if parameter.name == "cache":
            view: View | None = launch.inputs[int(parameter.binding[2:].split(".")[0])]
            return view.storage.dtype if view is not None else "absent"
    return "absent"
