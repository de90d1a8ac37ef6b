"""The plan of a Llama with float8 weights takes the row kernels that quantize."""

from pathlib import Path

import pytest
from float_quantized import write_float_quantized
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder import targets
from castiron.builder.build import build_engine
from castiron.builder.options import BuildOptions
from castiron.models.kernel_spec import parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec

LINEAR = CudaKernelSpec(  # in name only: nothing is compiled
    name="named.linear_fp8", op="linear_fp8", scheme="fp8", weight_input=2, params_struct="None", source="none.cu",
    parameters=parameters(
        "x:p:in0.ptr x_stride:l:in0.stride0 scale:p:in1.ptr y:p:out0.ptr y_stride:l:out0.stride0 count:i:in0.count"
    ),
    entry="none", threads=32, grid=lambda _: (1, 1, 1), operands={"in0": "fp8", "in1": "f32"},
)  # fmt: skip


@pytest.mark.parametrize("static", [False, True])
def test_a_tiny_llama_quantizes_in_its_norms_and_silu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    rows = {name: spec for name, spec in targets._SPECS["cuda"].items() if spec.op != "linear_fp8"}
    monkeypatch.setitem(targets._SPECS, "cuda", {**rows, LINEAR.name: LINEAR})
    dense = save_tiny_checkpoint(
        tmp_path / "tiny", dtype="bf16", hidden_size=256, intermediate_size=384, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=64,
    )  # fmt: skip
    folder, _ = write_float_quantized(dense, tmp_path / "q", static=static)
    options = BuildOptions(
        model=str(folder), output=tmp_path / "x.engine", target="sm_90", max_seqs=4, max_seq_len=256,
        max_batched_tokens=128, dry_run=True,
    )  # fmt: skip
    kernels = build_engine(options, quiet=True).report["kernels"]
    assert {name for name in kernels if "_fp8" in name and name != LINEAR.name} == {
        "quantize_fp8.4096",  # of attention's output
        "rms_norm_fp8.512",
        "add_rms_norm_fp8.512",
        "silu_mul_fp8.4096",
    }
    assert not any(name.startswith("silu_mul.") or name == "silu_mul" for name in kernels)
