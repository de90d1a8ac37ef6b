"""compressed-tensors checkpoints: packed weights read as their exact values; everything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pack_quantized import quantization_config, write_pack_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.checkpoint.compressed_tensors import parse_quantization
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.pack_quantized import PackedGroup, scale_warnings
from castiron.builder.checkpoint.parameter_data import load_parameter
from castiron.builder.model_parameters import bind_model
from castiron.builder.parameters import Parameter, Part
from castiron.runtime.errors import CheckpointError

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("dense") / "tiny",
        dtype="bf16", hidden_size=128, intermediate_size=256, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=32,
    )  # fmt: skip


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("group_size", "stored"), [(32, 32), (64, 64), (128, 128), (0, 128)], ids=lambda value: str(value)
)
def test_every_tensor_reads_as_what_it_means(
    dense: Path, tmp_path: Path, group_size: int, stored: int, symmetric: bool
) -> None:
    folder, meant = write_pack_quantized(dense, tmp_path / "packed", group_size, symmetric)
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(meant)
        for name, values in meant.items():
            info = checkpoint.tensor(name)
            is_packed = "_proj" in name
            assert info.scheme == (f"int4_g{stored}{'' if symmetric else 'z'}" if is_packed else "bf16")
            assert info.shape == tuple(values.shape)
            rows = checkpoint.read_rows(name, 0, info.num_rows)
            assert rows.shape == (info.num_rows, info.row_bytes)
            read = dequantize(info.scheme, rows, info.num_cols).reshape(info.shape)
            assert np.array_equal(read, values.numpy()), name
        assert set(bind_model(checkpoint).parameters["layers.0.q.weight"].parts) == {
            Part(Q + ".weight", 0, 128)
        }
        assert scale_warnings(checkpoint) == ()


@pytest.mark.parametrize("symmetric", [True, False])
def test_any_row_range_equals_that_range_of_the_whole(dense: Path, tmp_path: Path, symmetric: bool) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((dense / "config.json").read_text())
    weights = {name: torch.randn(rows, 192) for name, rows in (("a_proj.weight", 141), ("b_proj.weight", 3))}
    save_file(weights, source / "model.safetensors")
    folder, meant = write_pack_quantized(source, tmp_path / "packed", 32, symmetric)
    with open_checkpoint(folder) as checkpoint:
        whole = checkpoint.read_rows("a_proj.weight", 0, 141)
        for start, stop in ((0, 1), (3, 3), (5, 23), (7, 9), (140, 141)):
            assert np.array_equal(checkpoint.read_rows("a_proj.weight", start, stop), whole[start:stop])
        scheme = checkpoint.tensor("a_proj.weight").scheme
        parts = (Part("a_proj.weight", 9, 80), Part("b_proj.weight", 0, 3))
        values = load_parameter(checkpoint, Parameter("ab", (74, 192), scheme, parts, scheme)).numpy()
        assert np.array_equal(
            values, torch.cat([meant["a_proj.weight"][9:80], meant["b_proj.weight"]]).numpy()
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales_of_other_types_are_rounded_to_bf16_with_a_warning(
    dense: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder, meant = write_pack_quantized(dense, tmp_path / "packed", 64, scale_dtype=dtype)
    with open_checkpoint(folder) as checkpoint:
        (warning,) = scale_warnings(checkpoint)
        assert "rounded to bf16, by a relative error of up to" in warning
        error = float(warning.split("up to ")[1].split(" ")[0])
        assert 1e-3 < error < 2**-8
        rows = checkpoint.read_rows(DOWN + ".weight", 0, 128)
        assert np.array_equal(dequantize("int4_g64", rows, 256), meant[DOWN + ".weight"].numpy())


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) pieces of DOWN."""
    tensors = load_file(folder / "model.safetensors")
    for piece, value in changes.items():
        name = f"{DOWN}.{piece}"
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, "no tensor {DOWN}.weight_scale, which a packed weight needs"),
        ({"weight_shape": None}, "no tensor {DOWN}.weight_shape"),
        ({"weight_packed": None}, "{DOWN}.weight_shape holds i64 and is no part of a quantized weight"),
        ({"weight_shape": torch.tensor([128, 250])}, "250 columns in groups of 32, expected whole groups"),
        ({"weight_shape": torch.tensor([128, 512])}, "is i32 [128, 32], expected i32 [128, 64]"),
        ({"weight_shape": torch.tensor([-1, 256])}, "says [-1, 256], expected positive numbers"),
        ({"weight_shape": torch.tensor([128, 256, 1])}, "is i64 [3], expected i32 or i64 [2]"),
        ({"weight_scale": torch.ones(128, 4)}, "is f32 [128, 4], expected bf16 or f16 or f32 [128, 8]"),
        ({"weight_packed": torch.ones(128, 32)}, "is f32 [128, 32], expected i32 [128, 32]"),
        ({"weight_zero_point": torch.zeros(16, 8, dtype=torch.int32)}, "says that {DOWN} is symmetric"),
        ({"weight_g_idx": torch.zeros(256, dtype=torch.int32)}, "order of activations (actorder) aren't supported"),
        ({"weight": torch.zeros(128, 256)}, "are both there: one is too many"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_pieces_that_do_not_fit_are_named(
    dense: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    folder, _ = write_pack_quantized(dense, tmp_path / "packed")
    edit_tensors(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message.replace("{DOWN}", DOWN) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_zero_point_is_named(dense: Path, tmp_path: Path) -> None:
    folder, _ = write_pack_quantized(dense, tmp_path / "packed", symmetric=False)
    edit_tensors(folder, weight_zero_point=None)
    with pytest.raises(CheckpointError, match=r"no tensor .*down_proj\.weight_zero_point"):
        open_checkpoint(folder)


def test_a_damaged_scale_is_found_when_it_is_read(dense: Path, tmp_path: Path) -> None:
    folder, _ = write_pack_quantized(dense, tmp_path / "packed")
    scale = torch.ones(128, 8, dtype=torch.bfloat16)
    scale[3, 5] = float("nan")
    edit_tensors(folder, weight_scale=scale)
    with open_checkpoint(folder) as checkpoint:
        part = Part(DOWN + ".weight", 0, 128)
        parameter = Parameter("down", (128, 256), "int4_g32", (part,), "int4_g32")
        with pytest.raises(CheckpointError, match="a block scale is NaN or infinite"):
            load_parameter(checkpoint, parameter)


def test_a_packed_weight_that_the_config_ignores_is_a_contradiction(dense: Path, tmp_path: Path) -> None:
    folder, _ = write_pack_quantized(dense, tmp_path / "packed", ignore=["lm_head", "re:.*mlp.*"])
    with pytest.raises(CheckpointError, match=r"says that model\.layers\.0\.mlp\.\w+ isn't quantized"):
        open_checkpoint(folder)


def config_with(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": quantization_config(**changes)}


def test_groups_are_found_by_name_then_expression_then_kind() -> None:
    config = quantization_config()
    config["config_groups"] = {
        kind: {
            "targets": targets,
            "weights": quantization_config(size)["config_groups"]["group_0"]["weights"],
        }
        for kind, targets, size in (
            ("a", ["Linear"], 32),
            ("b", ["re:.*mlp.*"], 64),
            ("c", ["x.mlp.up"], 128),
        )
    }
    config["ignore"] = ["re:.*gate$"]
    parsed = parse_quantization(Path("config.json"), {"quantization_config": config})
    assert parsed is not None
    sizes = {}
    for name in ("x.q", "x.mlp.down", "x.mlp.up", "x.mlp.gate"):
        group = parsed.group_of(name)
        assert group is None or isinstance(group, PackedGroup)
        sizes[name] = group.group_size if group is not None else None
    assert sizes == {"x.q": 32, "x.mlp.down": 64, "x.mlp.up": 128, "x.mlp.gate": None}


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"quantization_config": {}}])
def test_no_quantization_is_none(config: dict[str, Any]) -> None:
    assert parse_quantization(Path("config.json"), config) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized (gptq), which isn't supported: give a compr"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized (awq), which isn't supported: give a compr"),
        ({"quantization_config": {"bits": 4}}, "quantized (method not named)"),
        ({"compression_config": "x"}, "quantized (x)"),
        (config_with(format="naive-quantized"), "format = 'naive-quantized', expected pack-quantized or float-q"),
        (config_with(config_groups={}), "has config_groups = {}, expected at least one group"),
        (config_with(config_groups={"a": {"targets": ["Linear"]}}), "expected groups with targets and weights"),
        (config_with(num_bits=8), "has num_bits = 8, expected 4"),
        (config_with(type="float"), "has type = 'float', expected int"),
        (config_with(symmetric=1), "has symmetric = 1, expected True or False"),
        (config_with(group_size=48), "has group_size = 48, expected a multiple of 32"),
        (config_with(group_size=True), "has group_size = True, expected a multiple of 32"),
        (config_with(strategy="tensor"), "has strategy = 'tensor', expected group or channel"),
        (config_with(actorder="group"), "has actorder = 'group', expected null or weight"),
        (config_with(dynamic=True), "has dynamic = True, expected False or None"),
        (config_with(block_structure="2x4"), "block_structure = '2x4', which may change the math"),
        (config_with(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme = {'num_bits': 8}, which may change the math"),
        (config_with(transform_config={"r": 1}), "transform_config = {'r': 1}, which may change the math"),
        (config_with(sparsity_config={"format": "sparse-24"}), "sparsity_config = {'format': 'sparse-24'}"),
        (config_with(quantization_status="initialized"), "quantization_status = 'initialized', expected compressed"),
        (config_with(surprise=3), "has surprise = 3, which may change the math"),
        (config_with(ignore="lm_head"), "has ignore = 'lm_head', expected a list of names"),
        (config_with(ignore=["re:("]), "has ignore = 're:(', expected a regular expression"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_supported_is_said_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_quantization(Path("config.json"), json.loads(json.dumps(config)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_quantized_activations_are_refused() -> None:
    config = quantization_config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match=r"input_activations = .*, which may change the math"):
        parse_quantization(Path("config.json"), {"quantization_config": config})
