"""The passes, in order. The list is the pipeline; each pass is one file with a picture of what it does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from castiron.builder.dump_passes import dump_stage
from castiron.builder.graph import Program
from castiron.builder.passes.context import PassContext
from castiron.builder.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from castiron.builder.passes.fuse_add_rms_norm import fuse_add_rms_norm
from castiron.builder.passes.fuse_quantize import fuse_quantize
from castiron.builder.passes.fuse_rope_kv_write import fuse_rope_kv_write
from castiron.builder.passes.fuse_silu_mul import fuse_silu_mul
from castiron.builder.passes.hoist_logit_gather import hoist_logit_gather
from castiron.builder.passes.lower_linear_int8 import lower_linear_int8
from castiron.builder.passes.merge_linears import merge_linears
from castiron.builder.passes.narrow_activations import narrow_activations
from castiron.builder.passes.remove_dead_code import remove_dead_code
from castiron.builder.verify_graph import verify_graph

Pass = Callable[[Program, PassContext], int]

_COMMON: tuple[Pass, ...] = (
    # the same work only once, and only what is asked for
    eliminate_common_subexpressions,
    remove_dead_code,
    hoist_logit_gather,
    # fewer, larger launches
    merge_linears,
    fuse_silu_mul,
    fuse_add_rms_norm,
    fuse_rope_kv_write,
)
CPU_PASSES: tuple[Pass, ...] = (
    *_COMMON,
    # int8 arithmetic
    lower_linear_int8,
    fuse_quantize,
    # what the others left over
    remove_dead_code,
)
CUDA_PASSES: tuple[Pass, ...] = (*_COMMON, fuse_quantize, remove_dead_code, narrow_activations)
PASSES = {"cpu": CPU_PASSES, "cuda": CUDA_PASSES}  # by kind of target


@dataclass(frozen=True)
class PassResult:
    """What one pass did."""

    name: str
    matches: int
    nodes: int  # in the graph afterwards
    notes: tuple[str, ...]  # what it left undone and why


def optimize(
    program: Program,
    compute: str,
    dump_passes: Path | None = None,
    passes: Sequence[Pass] = CPU_PASSES,
    on_stage: Callable[[str, Program], None] | None = None,
) -> list[PassResult]:
    """Run the passes on the program in place, verifying it after each.

    compute: "f32", "bf16" or "int8". dump_passes: folder for the graph at every stage. on_stage is called
    with the stage's name ("00_traced", "01_<pass>", ...) and the program. Raises GraphError naming the pass
    that broke a rule, WorkFailedError if the dump folder can't be written.
    """
    results: list[PassResult] = []

    def end_stage(index: int, name: str) -> None:
        verify_graph(program, name)
        if dump_passes is not None:
            dump_stage(dump_passes, index, name, program)
        if on_stage is not None:
            on_stage(f"{index:02d}_{name}", program)

    end_stage(0, "traced")
    for index, run_pass in enumerate(passes, start=1):
        context = PassContext(compute)
        name = run_pass.__name__
        matches = run_pass(program, context)
        program.graph.sort()
        end_stage(index, name)
        notes = tuple(f"{text} ({count} times)" for text, count in sorted(context.notes.items()))
        results.append(PassResult(name, matches, len(program.graph), notes))
    return results
