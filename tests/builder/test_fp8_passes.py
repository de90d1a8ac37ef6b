"""Linears of fp8 weights: lowered in the trace, and every later stage means the same."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from float_quantized import INPUT_SCALE, LINEAR, quantization_config, write_float_quantized
from paged_steps import PagedRun, make_tokens, trace_checkpoint
from safetensors.torch import load_file, save_file
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint

from castiron.builder import graph as g
from castiron.builder.dump_passes import describe_program
from castiron.builder.graph import Program
from castiron.builder.interpreter import run
from castiron.builder.pipeline import CUDA_PASSES, PassResult, optimize

torch.set_num_threads(1)
EXACT = 1e-4  # float32, other order of sums; none of it near a tie of e4m3 here
Traced = tuple[Program, Any]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("fp8") / "tiny", attention_bias=True, seed=3)


def traced(folder: Path) -> Traced:
    program, _, load = trace_checkpoint(folder)
    return program, load


def copy_of(program: Program) -> Program:
    return replace(program, model=program.model.clone(), parameters=dict(program.parameters))


def ops_of(program: Program) -> list[str]:
    return [node.op_type for node in program.graph]


def compare_stages(program: Program, load: Any) -> tuple[Program, list[PassResult]]:
    """Run the CUDA pipeline; every stage but the rounding to bfloat16 gives the traced graph's outputs."""
    paged = PagedRun(program, load, [make_tokens(40), make_tokens(19, seed=1)])
    paged.step([23, 0])
    inputs = paged.inputs([17, 19], logit_stride=5)
    expected = run(program, inputs, load)
    changed = copy_of(program)

    def check(stage: str, now: Program) -> None:
        if stage.endswith("narrow_activations"):
            return
        for name, output in run(now, inputs, load).items():
            error = float((output - expected[name]).abs().max())
            assert error <= EXACT, f"{stage}: {name} differs by {error}"

    results = optimize(changed, "bf16", passes=CUDA_PASSES, on_stage=check)
    return changed, results


@pytest.mark.parametrize(("per_channel", "static"), [(True, False), (False, True)])
def test_every_stage_equals_the_traced_graph(
    dense: Path, tmp_path: Path, per_channel: bool, static: bool
) -> None:
    program, load = traced(write_float_quantized(dense, tmp_path / "q", per_channel, static)[0])
    assert ops_of(program).count("linear_fp8") == ops_of(program).count("quantize_fp8") == 3 * 7
    assert ops_of(program).count("linear") == 1  # lm_head
    changed, results = compare_stages(program, load)
    matches = {result.name: result.matches for result in results}
    assert (
        matches["eliminate_common_subexpressions"] >= 3 * 3
    )  # one quantization for q, k, v, one for gate, up
    assert matches["merge_linears"] == 3 * 3
    assert matches["fuse_quantize"] == 3 * 3  # two norms and a silu_mul of every layer
    assert [note for result in results for note in result.notes] == []
    ops = ops_of(changed)
    assert ops.count("linear_fp8") == 3 * 4 and ops.count("quantize_fp8") == 3  # of what attention gives
    assert (
        ops.count("rms_norm_fp8") == 1
        and ops.count("add_rms_norm_fp8") == 5
        and ops.count("silu_mul_fp8") == 3
    )
    scales = {g.float_attribute(n, "input_scale") for n in changed.graph if "input_scale" in n.attributes}
    assert scales == {float(torch.tensor(INPUT_SCALE).bfloat16()) if static else 0.0}
    # only what the logits need of the last layer
    last = next(n for n in reversed(list(changed.graph)) if n.op_type == "quantize_fp8")
    assert str(g.shape_of(last.outputs[0])[0]) == str(g.shape_of(changed.graph.outputs[0])[0])


def test_values_are_stored_as_kernels_read_them(dense: Path, tmp_path: Path) -> None:
    program, _ = traced(write_float_quantized(dense, tmp_path / "q")[0])
    optimize(program, "bf16", passes=CUDA_PASSES)
    text = {node.op_type: [str(value.dtype) for value in node.outputs] for node in program.graph}
    assert text["rms_norm_fp8"] == text["silu_mul_fp8"] == text["quantize_fp8"] == ["FLOAT8E4M3FN", "FLOAT"]
    assert text["add_rms_norm_fp8"] == ["FLOAT8E4M3FN", "FLOAT", "FLOAT"]
    assert text["linear_fp8"] == ["BFLOAT16"] and text["linear"] == ["FLOAT"]
    assert "= linear_fp8(linear.q, linear.scale, layers.0.qkv.weight" in describe_program(program)
    program.save(tmp_path / "graph.onnx")


def test_a_quantized_lm_head_gives_float32_logits_of_the_wanted_rows(dense: Path, tmp_path: Path) -> None:
    linear = re.compile(r"lm_head\.weight|" + LINEAR.pattern)
    folder, _ = write_float_quantized(
        dense, tmp_path / "q", linear=linear, config=quantization_config(ignore=[])
    )
    changed, _ = compare_stages(*traced(folder))
    logits = next(value for value in changed.graph.outputs if value.name == "logits")
    node = logits.producer()
    assert g.is_op(node, "linear_fp8") and str(logits.dtype) == "FLOAT"
    assert g.is_op(node.inputs[0].producer(), "add_rms_norm_fp8")


def test_linears_of_other_input_scales_stay_apart_and_the_report_says_so(dense: Path, tmp_path: Path) -> None:
    folder, _ = write_float_quantized(dense, tmp_path / "q", static=True)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.v_proj.input_scale"] *= 2
    save_file(tensors, folder / "model.safetensors")
    changed, results = compare_stages(*traced(folder))
    assert ops_of(changed).count("linear_fp8") == 3 * 5
    (note,) = [note for result in results for note in result.notes]
    text = "is fp8 with bias with an input scale of its own"
    assert (
        note == "not merged: " + ", ".join(f"layers.N.{name}.weight {text}" for name in "kqv") + " (3 times)"
    )


def test_float8_and_dense_linears_of_one_input_stay_apart(dense: Path, tmp_path: Path) -> None:
    folder, _ = write_float_quantized(
        dense, tmp_path / "q", linear=re.compile(r".*(q|k|gate|up)_proj\.weight")
    )
    changed, results = compare_stages(*traced(folder))
    assert ops_of(changed).count("linear_fp8") == 3 * 2 and ops_of(changed).count("linear") == 3 * 3 + 1
    notes = [note for result in results for note in result.notes]
    assert len(notes) == 1 and "layers.N.v.weight is bf16" in notes[0].replace("f32", "bf16")
    # the norm that both read keeps its float result
    assert ops_of(changed).count("add_rms_norm_fp8") == 3


def test_stage_0_is_near_the_model_it_quantizes(dense: Path, tmp_path: Path) -> None:
    program, load = traced(write_float_quantized(dense, tmp_path / "q")[0])
    tokens = make_tokens(30)
    paged = PagedRun(program, load, [tokens])
    paged.step([30])
    expected = reference_logits(load_reference(dense), tokens).numpy()
    error = np.linalg.norm(paged.all_logits(0).numpy() - expected) / np.linalg.norm(expected)
    assert 0.02 < error < 0.25, error
