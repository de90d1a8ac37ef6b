"""Every stage of the pass pipeline means the same as the traced graph; a broken pass is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from paged_steps import PagedRun, make_tokens, trace_checkpoint
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from castiron.builder import graph as g
from castiron.builder.graph import Program
from castiron.builder.interpreter import run
from castiron.builder.parameters import Parameter
from castiron.builder.passes.context import PassContext
from castiron.builder.passes.eliminate_common_subexpressions import eliminate_common_subexpressions
from castiron.builder.passes.fuse_silu_mul import fuse_silu_mul
from castiron.builder.passes.merge_linears import merge_linears
from castiron.builder.passes.remove_dead_code import remove_dead_code
from castiron.builder.pipeline import CPU_PASSES, PASSES, Pass, optimize
from castiron.builder.verify_graph import GraphError, verify_graph
from castiron.models.ops import STATES

torch.set_num_threads(1)
EXACT = 1e-4  # float32, other order of sums
QUANTIZED = 0.35  # int8 activations; logits spread by about 2
INEXACT_PASSES = {"lower_linear_int8"}  # change the arithmetic: later stages are compared with theirs

Loader = Callable[[Parameter], torch.Tensor]
Traced = tuple[Program, Loader]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("llama"), attention_bias=True, tied=True)
    program, _, load = trace_checkpoint(folder)
    return program, load


@pytest.fixture(scope="module")
def quantized_llama(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """q8_0 weights, but q4_1 v of one layer, and dense up of another."""
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("q8"), seed=2)

    def scheme(name: str, shape: tuple[int, ...]) -> str:
        return {
            "model.layers.1.self_attn.v_proj.weight": "q4_1",
            "model.layers.2.mlp.up_proj.weight": "f16",
        }.get(name, "q8_0")

    program, _, load = trace_checkpoint(write_tiny_gguf(folder, folder / "tiny.gguf", scheme))
    return program, load


def copy_of(program: Program) -> Program:
    return replace(program, model=program.model.clone(), parameters=dict(program.parameters))


def step_inputs(program: Program, load: Loader) -> dict[str, torch.Tensor]:
    """Two sequences, one of them in its second chunk; logits of every fifth row;

    a sampled token among the ids.
    """
    paged = PagedRun(program, load, [make_tokens(40), make_tokens(19, seed=1)])
    paged.step([23, 0])
    inputs = paged.inputs([17, 19], logit_stride=5)
    inputs["token_ids"][3] = -1 - 2
    inputs["last_token"][2] = 77
    return inputs


def compare_stages(traced: Traced, compute: str, passes: tuple[Pass, ...] = CPU_PASSES) -> dict[str, int]:
    """Run the pipeline, comparing every stage's outputs with the stage before the passes; pass -> matches.

    Raises AssertionError naming the first stage that differs.
    """
    program, load = copy_of(traced[0]), traced[1]
    inputs = step_inputs(program, load)
    expected = run(program, inputs, load)

    def check(stage: str, changed: Program) -> None:
        nonlocal expected
        outputs = run(changed, inputs, load)
        inexact = stage.partition("_")[2] in INEXACT_PASSES
        assert list(outputs) == list(expected), f"{stage}: outputs differ"
        for name, output in outputs.items():
            bound = QUANTIZED if inexact else EXACT
            assert output.dtype == expected[name].dtype and output.shape == expected[name].shape, stage
            error = float((output - expected[name]).abs().max())
            assert error <= bound, f"{stage}: {name} differs by {error}"
        if inexact:
            expected = outputs

    results = optimize(program, compute, passes=passes, on_stage=check)
    return {result.name: result.matches for result in results}


@pytest.mark.parametrize("compute", ["f32", "bf16"])
def test_every_stage_equals_the_traced_graph(llama: Traced, compute: str) -> None:
    matches = compare_stages(llama, compute)
    assert matches["merge_linears"] == 3 * 3  # q, k, v and gate, up of three layers
    assert matches["fuse_silu_mul"] == 3
    assert matches["fuse_rope_kv_write"] == 3
    assert matches["fuse_add_rms_norm"] == 6
    assert (
        matches["hoist_logit_gather"] == 10
    )  # final norm, two adds, o, MLP of four, norm; lm_head reads them
    assert matches["lower_linear_int8"] == matches["fuse_quantize"] == 0


def test_every_int8_stage_equals_the_one_before(quantized_llama: Traced) -> None:
    matches = compare_stages(quantized_llama, "int8")
    assert matches["lower_linear_int8"] > 10 and matches["fuse_quantize"] > 5


def test_weights_of_different_schemes_are_not_merged_and_the_report_says_why(quantized_llama: Traced) -> None:
    program = copy_of(quantized_llama[0])
    notes = {r.name: r.notes for r in optimize(program, "int8")}
    assert "layers.1.qk.weight" in program.parameters  # these two agree
    assert "layers.1.v.weight" in program.parameters
    assert "layers.0.qkv.weight" in program.parameters
    assert any("layers.N.v.weight is q4_1" in note for note in notes["merge_linears"])
    assert any("is f16" in note for note in notes["lower_linear_int8"])


def test_merged_parameters_are_recipes_over_the_same_tensors(llama: Traced) -> None:
    program = copy_of(llama[0])
    before = program.parameters["layers.0.k.weight"]
    optimize(program, "f32")
    merged = program.parameters["layers.0.qkv.weight"]
    assert merged.shape == (64 + 32 + 32, 64)
    assert merged.parts[1] == before.parts[0]
    assert "layers.0.k.weight" not in program.parameters
    assert program.parameters["layers.0.qkv.bias"].shape == (128,)


def test_int8_compute_leaves_only_dense_weights_in_float(quantized_llama: Traced) -> None:
    program = copy_of(quantized_llama[0])
    optimize(program, "int8")
    ops = {node.op_type for node in program.graph}
    assert {"rms_norm_q8", "add_rms_norm_q8", "silu_mul_q8", "quantize_q8", "linear_q8", "linear"} <= ops
    # only the pair with the dense weight keeps float activations, and its silu_mul is quantized for down
    dense = [n for n in program.graph if g.is_op(n, "linear")]
    assert [g.name_of(g.input_of(n, 1)) for n in dense] == ["layers.2.up.weight"]


def broken_silu_mul(program: Program, context: PassContext) -> int:
    """fuse_silu_mul, with its operands exchanged."""
    count = fuse_silu_mul(program, context)
    for node in program.graph:
        if g.is_op(node, "silu_mul"):
            a, b = node.inputs
            node.replace_input_with(0, b)
            node.replace_input_with(1, a)
    return count


def broken_merge(program: Program, context: PassContext) -> int:
    """merge_linears, with the parts of one merged weight in the wrong order."""
    count = merge_linears(program, context)
    merged = program.parameters["layers.1.gate_up.weight"]
    program.parameters[merged.name] = replace(merged, parts=merged.parts[::-1])
    return count


@pytest.mark.parametrize(
    ("right", "broken"), [(fuse_silu_mul, broken_silu_mul), (merge_linears, broken_merge)]
)
def test_a_pass_that_changes_the_result_is_named(llama: Traced, right: Pass, broken: Pass) -> None:
    passes = tuple(broken if p is right else p for p in CPU_PASSES)
    with pytest.raises(AssertionError, match=f"{broken.__name__}: "):
        compare_stages(llama, "f32", passes)


def mixes_up_q_and_k(program: Program, context: PassContext) -> int:
    """Readers of q now read k, which has fewer heads."""
    split = next(n for n in program.graph if g.is_op(n, "Split"))
    split.outputs[0].replace_all_uses_with(split.outputs[1])
    return 1


def reads_an_old_cache(program: Program, context: PassContext) -> int:
    """Attention reads the cache as it was before the write."""
    attention = next(n for n in program.graph if g.is_op(n, "paged_attention"))
    write = g.input_of(attention, 1).producer()
    assert write is not None
    attention.replace_input_with(1, write.inputs[STATES[write.op_type][0]])
    return 1


def drops_a_write(program: Program, context: PassContext) -> int:
    """The last version of a cache is no longer an output."""
    program.graph.outputs.pop()
    return 1


def renames_to_a_taken_name(program: Program, context: PassContext) -> int:
    nodes = list(program.graph)
    nodes[5].outputs[0].name = nodes[4].outputs[0].name
    return 1


def states_a_wrong_shape(program: Program, context: PassContext) -> int:
    norm = next(n for n in program.graph if g.is_op(n, "add_rms_norm"))
    norm.outputs[1].shape = ir.Shape(["num_seqs", 64])
    return 1


def invents_an_op(program: Program, context: PassContext) -> int:
    next(n for n in program.graph if g.is_op(n, "silu_mul")).op_type = "silu_mul_fast"
    return 1


def loses_a_parameter(program: Program, context: PassContext) -> int:
    del program.parameters["layers.0.o.weight"]
    return 1


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (mixes_up_q_and_k, "node.*Reshape"),
        (reads_an_old_cache, "reads cache.0 after .* wrote over it"),
        (drops_a_write, "output cache_out.2"),
        (renames_to_a_taken_name, "two values are named"),
        (states_a_wrong_shape, "is stated as"),
        (invents_an_op, "no reference"),
        (loses_a_parameter, "layers.0.o.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_pass_that_breaks_the_graph_is_named(llama: Traced, broken: Pass, message: str) -> None:
    with pytest.raises(GraphError, match=f"after {broken.__name__}: .*{message}"):
        optimize(copy_of(llama[0]), "f32", passes=(*CPU_PASSES, broken))


def test_stock_passes_keep_cache_writes(llama: Traced) -> None:
    """A write whose result no attention reads must survive, since the next step reads it."""
    program = copy_of(llama[0])
    for node in list(program.graph):  # nothing reads the caches within the step any more
        if g.is_op(node, "paged_attention"):
            node.outputs[0].replace_all_uses_with(g.input_of(node, 0))
    context = PassContext("f32")
    eliminate_common_subexpressions(program, context)
    removed = remove_dead_code(program, context)
    verify_graph(program, "stock passes")
    assert removed >= 3  # the attentions
    assert sum(g.is_op(node, "kv_write") for node in program.graph) == 3


@pytest.mark.parametrize("kind", sorted(PASSES))
def test_the_passes_leave_a_clone_as_it_was_traced(llama: Traced, kind: str) -> None:
    """Golden values are computed from one while the passes run."""
    program = copy_of(llama[0])
    clone = program.model.clone()
    traced = [(value.name, value.dtype, str(value.shape)) for node in clone.graph for value in node.outputs]
    optimize(program, "bf16", None, PASSES[kind])
    assert any(value.dtype == ir.DataType.BFLOAT16 for node in program.graph for value in node.outputs) == (
        kind == "cuda"
    )
    assert [(v.name, v.dtype, str(v.shape)) for node in clone.graph for v in node.outputs] == traced


def test_common_subexpressions_and_dead_code_go(llama: Traced) -> None:
    program = copy_of(llama[0])
    silu = next(n for n in program.graph if g.is_op(n, "silu"))
    twin_value = g.new_value("twin", ir.DataType.FLOAT, g.shape_of(silu.outputs[0]))
    dead_value = g.new_value("dead", ir.DataType.FLOAT, g.shape_of(silu.outputs[0]))
    mul = g.users(silu.outputs[0])[0]
    program.graph.insert_after(
        silu,
        [
            g.new_node("silu", [silu.inputs[0]], [twin_value]),
            g.new_node("Mul", [silu.outputs[0], silu.outputs[0]], [dead_value]),
        ],
    )
    mul.replace_input_with(0, twin_value)
    matches = compare_stages((program, llama[1]), "f32", (eliminate_common_subexpressions, remove_dead_code))
    assert matches == {"eliminate_common_subexpressions": 1, "remove_dead_code": 1}


def test_dumped_stages_load_in_onnx(llama: Traced, tmp_path: Path) -> None:
    optimize(copy_of(llama[0]), "f32", dump_passes=tmp_path / "dump")
    names = sorted(path.stem for path in (tmp_path / "dump").glob("*.onnx"))
    assert names == [f"{i:02d}_{n}" for i, n in enumerate(["traced", *(p.__name__ for p in CPU_PASSES)])]
    for stem in names:
        model = onnx.load(tmp_path / "dump" / f"{stem}.onnx")
        text = (tmp_path / "dump" / f"{stem}.txt").read_text()
        assert text.startswith(f"forward: {len(model.graph.node)} nodes")
    weight: Any = next(v for v in model.graph.input if v.name == "layers.0.qkv.weight")
    metadata = {entry.key: entry.value for entry in weight.metadata_props}
    assert metadata["castiron.scheme"] == "f32"
    assert "model.layers.0.self_attn.k_proj.weight" in metadata["castiron.recipe"]
