"""Engines with int4 weights for a GPU, built here without one: what they hold, and what their golden values say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pack_quantized import write_pack_quantized
from safetensors.numpy import load
from safetensors.torch import save_file
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint

from castiron.builder import build as build_module
from castiron.builder.build import BuildResult, build_engine
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.kernel_files import KernelFiles
from castiron.builder.options import BuildOptions
from castiron.plugins_cuda.layouts import packed_bytes, unpack
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError

LIMITS = {"max_seqs": 4, "max_seq_len": 256, "max_batched_tokens": 128}
LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("int4") / "tiny",
        dtype="bf16", hidden_size=256, intermediate_size=384, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' own tests compile them."""
    monkeypatch.setattr(build_module, "compile_for_cuda", lambda *_: KernelFiles("none", {}))


def build(model: Path | str, output: Path, **options: Any) -> BuildResult:
    values = {"model": str(model), "output": output, "target": "sm_90", **LIMITS, **options}
    return build_engine(BuildOptions(**values), quiet=True)


def weight(engine: EngineFile, name: str, scheme: str, n: int, k: int) -> np.ndarray:
    """float32 [n, k] of a packed weight in the engine file."""
    packed = load(engine.member("weights/model-00001.safetensors"))[name][: packed_bytes(scheme, n, k)]
    return dequantize(scheme, unpack(scheme, packed, n, k), k)


def check_golden(engine: EngineFile, reference: Path) -> None:
    """The golden logits are transformers' for the dense checkpoint `reference`, but for keys and values as bf16."""
    golden = load(engine.member("golden.safetensors"))
    model = load_reference(reference)
    ids, rows = golden["case.1.token_ids"], golden["case.1.rows"]
    expected = reference_logits(model, ids.tolist()).numpy()[rows]
    expected = np.take_along_axis(expected, golden["case.1.logit_ids"].astype(np.int64), axis=1)
    error = np.linalg.norm(golden["case.1.logits"] - expected) / np.linalg.norm(expected)
    assert error < 0.005, error  # of int4 rounding it is 0.1


def save_dense(folder: Path, source: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A float32 checkpoint of these tensors, otherwise as `source`."""
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("group_size", "symmetric"), [(128, True), (32, False)])
def test_packed_checkpoints_keep_their_values(
    dense: Path, tmp_path: Path, group_size: int, symmetric: bool
) -> None:
    folder, meant = write_pack_quantized(dense, tmp_path / "packed", group_size, symmetric)
    result = build(folder, tmp_path / "x.engine")
    scheme = f"int4_g{group_size}" + ("" if symmetric else "z")
    assert result.manifest is not None and set(result.manifest.quantization.schemes) == {
        scheme,
        "bf16",
        "f32",
    }
    assert result.report["quantization_error"] == 0 and result.manifest.quantization.compute == "bf16"
    with EngineFile.open(tmp_path / "x.engine") as engine:
        qkv = torch.cat([meant[f"{LAYER}self_attn.{name}_proj.weight"] for name in "qkv"]).numpy()
        assert np.array_equal(weight(engine, "layers.1.qkv.weight", scheme, 512, 256), qkv)
        down = meant[f"{LAYER}mlp.down_proj.weight"].numpy()
        assert np.array_equal(weight(engine, "layers.1.down.weight", scheme, 256, 384), down)
        check_golden(engine, save_dense(tmp_path / "meant", dense, meant))


def test_dense_checkpoints_are_rounded_on_request(dense: Path, tmp_path: Path) -> None:
    result = build(dense, tmp_path / "x.engine", quantize="int4")
    assert result.manifest is not None and set(result.manifest.quantization.schemes) == {
        "int4_g128",
        "bf16",
        "f32",
    }
    assert result.manifest.quantization.mode == "int4"
    assert 0.05 < result.report["quantization_error"] < 0.15
    with EngineFile.open(tmp_path / "x.engine") as engine:
        values = weight(engine, "layers.1.down.weight", "int4_g128", 256, 384)
        exact = load_reference(dense).state_dict()
        down = exact[f"{LAYER}mlp.down_proj.weight"].numpy()
        assert np.sqrt(np.mean((values - down) ** 2) / np.mean(down**2)) < 0.13
        rounded = dict(exact)
        for layer in (0, 1):
            prefix = f"model.layers.{layer}."
            shapes = {
                "qkv": ((512, 256), [f"self_attn.{name}_proj" for name in "qkv"]),
                "o": ((256, 256), ["self_attn.o_proj"]),
                "gate_up": ((768, 256), ["mlp.gate_proj", "mlp.up_proj"]),
                "down": ((256, 384), ["mlp.down_proj"]),
            }
            for name, (shape, sources) in shapes.items():
                merged = torch.from_numpy(
                    weight(engine, f"layers.{layer}.{name}.weight", "int4_g128", *shape)
                )
                sizes = [exact[f"{prefix}{source}.weight"].shape[0] for source in sources]
                for source, rows in zip(sources, merged.split(sizes), strict=True):
                    rounded[f"{prefix}{source}.weight"] = rows.contiguous()
        check_golden(engine, save_dense(tmp_path / "meant", dense, rounded))


def test_made_up_weights_can_be_int4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build("llama-3.2-1b", tmp_path / "x", quantize="int4", weights="dummy", dry_run=True)
    output = capsys.readouterr().out
    assert (
        "int4_g128: " in output and "linear_few.int4_g128." in output and "linear_many.int4_g128." in output
    )


def test_a_cpu_builds_packed_checkpoints_only_dense(dense: Path, tmp_path: Path) -> None:
    folder, _ = write_pack_quantized(dense, tmp_path / "packed", 64, symmetric=False)
    with pytest.raises(
        InputError, match=r"stored as int4_g64z, has no kernels on cpu:generic: use --quantize none"
    ):
        build(folder, tmp_path / "x.engine", target="cpu:generic", dry_run=True)
    with pytest.raises(
        InputError, match=r"--quantize int4 has no kernels on cpu:generic: use .*--target sm_80 or .*sm_90"
    ):
        build(dense, tmp_path / "x.engine", target="cpu:generic", quantize="int4")
    result = build(
        folder, tmp_path / "x.engine", target="cpu:generic", quantize="none", compute="f32", dry_run=True
    )
    assert set(result.report["schemes"]) == {"f32", "bf16"}
