"""float8 checkpoints: weights read as their exact values, input scales kept; everything else is refused by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from float_quantized import INPUT_SCALE, fp8_method_config, quantization_config, write_float_quantized
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.checkpoint.compressed_tensors import parse_quantization
from castiron.builder.checkpoint.dequantize import dequantize
from castiron.builder.checkpoint.float_quantized import Float8Group
from castiron.builder.checkpoint.parameter_data import load_parameter, read_parameter_rows
from castiron.builder.model_parameters import bind_model
from castiron.builder.parameters import Parameter, Part
from castiron.runtime.errors import CheckpointError

DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(
        tmp_path_factory.mktemp("dense") / "tiny",
        dtype="bf16", hidden_size=64, intermediate_size=144, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=16,
    )  # fmt: skip


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
def test_every_tensor_reads_as_what_it_means(
    dense: Path, tmp_path: Path, per_channel: bool, static: bool, scale_dtype: torch.dtype
) -> None:
    folder, meant = write_float_quantized(dense, tmp_path / "q", per_channel, static, scale_dtype)
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(meant)
        for name, values in meant.items():
            info = checkpoint.tensor(name)
            assert info.scheme == ("fp8" if "_proj" in name else "bf16") and info.shape == tuple(values.shape)
            rows = checkpoint.read_rows(name, 0, info.num_rows)
            assert rows.shape == (info.num_rows, info.row_bytes)
            read = dequantize(info.scheme, rows, info.num_cols).reshape(info.shape)
            assert np.array_equal(read, values.numpy()), name
            part = checkpoint.read_rows(name, info.num_rows // 3, info.num_rows)
            assert np.array_equal(part, rows[info.num_rows // 3 :])
        parameters = bind_model(checkpoint).parameters
        expected = float(torch.tensor(INPUT_SCALE).to(scale_dtype)) if static else 0.0
        assert parameters["layers.0.q.weight"].input_scale == expected
        assert parameters["layers.0.q.weight"].scheme == "fp8"
        assert parameters["lm_head.weight"].input_scale == 0
        down = load_parameter(checkpoint, parameters["layers.0.down.weight"])
        assert torch.equal(down, meant[DOWN + ".weight"])


@pytest.mark.parametrize("static", [False, True])
def test_the_older_fp8_method_is_read_alike(dense: Path, tmp_path: Path, static: bool) -> None:
    config = fp8_method_config(static)
    folder, meant = write_float_quantized(dense, tmp_path / "q", False, static, torch.float32, config)
    with open_checkpoint(folder) as checkpoint:
        parameters = bind_model(checkpoint).parameters
        assert torch.equal(
            load_parameter(checkpoint, parameters["layers.0.down.weight"]), meant[DOWN + ".weight"]
        )
        assert parameters["layers.0.down.weight"].input_scale == (
            float(np.float32(INPUT_SCALE)) if static else 0
        )


def test_scales_of_one_element_and_of_a_column_are_alike(dense: Path, tmp_path: Path) -> None:
    folder, meant = write_float_quantized(dense, tmp_path / "q", per_channel=True)
    edit_tensors(folder, weight_scale=load_file(folder / "model.safetensors")[f"{DOWN}.weight_scale"][:, 0])
    with open_checkpoint(folder) as checkpoint:
        rows = checkpoint.read_rows(DOWN + ".weight", 5, 64)
        assert np.array_equal(dequantize("fp8", rows, 144), meant[DOWN + ".weight"].numpy()[5:])
    folder, meant = write_float_quantized(dense, tmp_path / "t", per_channel=False)
    edit_tensors(
        folder, weight_scale=load_file(folder / "model.safetensors")[f"{DOWN}.weight_scale"].reshape(1)
    )
    with open_checkpoint(folder) as checkpoint:
        rows = checkpoint.read_rows(DOWN + ".weight", 5, 64)
        assert np.array_equal(dequantize("fp8", rows, 144), meant[DOWN + ".weight"].numpy()[5:])


def test_fp8_weights_can_be_stored_dense(dense: Path, tmp_path: Path) -> None:
    folder, meant = write_float_quantized(dense, tmp_path / "q")
    with open_checkpoint(folder) as checkpoint:
        parameter = Parameter("down", (64, 144), "f32", (Part(DOWN + ".weight", 0, 64),), "fp8")
        rows = read_parameter_rows(checkpoint, parameter, 0, 64)
        assert np.array_equal(rows.view(np.float32), meant[DOWN + ".weight"].numpy())


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) pieces of DOWN."""
    tensors = load_file(folder / "model.safetensors")
    for piece, value in changes.items():
        name = f"{DOWN}.{piece}"
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


FLOAT8 = torch.zeros(64, 144).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("static", "changes", "message"),
    [
        (False, {"weight_scale": None}, "no tensor {DOWN}.weight_scale, which a float8 weight needs"),
        (False, {"weight_scale": torch.ones(1)}, "is f32 [1], expected bf16 or f16 or f32 [64] or [64, 1]"),
        (False, {"weight_scale": torch.ones(64, 2)}, "is f32 [64, 2], expected"),
        (False, {"weight_scale": torch.ones(64, dtype=torch.int32)}, "is i32 [64], expected bf16 or f16 or f32"),
        (False, {"input_scale": torch.ones(1)}, "says that activations of {DOWN} have dynamic scales"),
        (False, {"weight": None}, "{DOWN}.weight_scale belongs to no float8 weight"),
        (False, {"weight": torch.zeros(64, 144)}, "{DOWN}.weight_scale belongs to no float8 weight"),
        (False, {"weight": FLOAT8.reshape(-1)}, "is float8 [9216], expected [rows, columns]"),
        (False, {"weight": FLOAT8.to(torch.float8_e5m2)}, "has dtype 'F8_E5M2', which isn't supported yet"),
        (False, {"weight_zero_point": FLOAT8[:, :1]}, "weight_zero_point holds e4m3 and is no part of a quantized"),
        (True, {"input_scale": None}, "no tensor {DOWN}.input_scale, which a float8 weight with a static scale needs"),
        (True, {"input_scale": torch.ones(64)}, "input_scale is f32 [64], expected bf16 or f16 or f32 [] or [1]"),
        (True, {"input_scale": torch.zeros(1)}, "input_scale is 0.0, expected a positive number"),
        (True, {"input_scale": torch.tensor(float("nan"))}, "input_scale is nan, expected a positive number"),
        (True, {"input_scale": torch.tensor(-1.0)}, "input_scale is -1.0, expected a positive number"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_pieces_that_do_not_fit_are_named(
    dense: Path, tmp_path: Path, static: bool, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    folder, _ = write_float_quantized(dense, tmp_path / "q", static=static)
    edit_tensors(folder, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert message.replace("{DOWN}", DOWN) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_damaged_scale_is_found_when_it_is_read(dense: Path, tmp_path: Path, value: float) -> None:
    folder, _ = write_float_quantized(dense, tmp_path / "q")
    scale = torch.ones(64, 1)
    scale[40] = value
    edit_tensors(folder, weight_scale=scale)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(
            CheckpointError, match=r"down_proj\.weight: a scale of its float8 rows is not a positive"
        ),
    ):
        load_parameter(checkpoint, bind_model(checkpoint).parameters["layers.0.down.weight"])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_weight_is_found_when_it_is_read(dense: Path, tmp_path: Path, code: int) -> None:
    folder, _ = write_float_quantized(dense, tmp_path / "q")
    weight = FLOAT8.clone()
    weight.view(torch.uint8)[63, 143] = code
    edit_tensors(folder, weight=weight)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=r"down_proj\.weight: a float8 value is NaN"),
    ):
        load_parameter(checkpoint, bind_model(checkpoint).parameters["layers.0.down.weight"])


@pytest.mark.parametrize("ignore", [["lm_head", "re:.*mlp.*"], ["lm_head", DOWN]])
def test_a_float8_weight_that_the_config_ignores_is_a_contradiction(
    dense: Path, tmp_path: Path, ignore: list[str]
) -> None:
    folder, _ = write_float_quantized(dense, tmp_path / "q", config=quantization_config(ignore=ignore))
    with pytest.raises(CheckpointError, match=r"says that model\.layers\.0\.mlp\.\w+ isn't quantized"):
        open_checkpoint(folder)


def test_layers_the_older_method_ignores_include_what_is_inside_them() -> None:
    config = fp8_method_config(modules_to_not_convert=["model.layers.1"])
    parsed = parse_quantization(Path("config.json"), {"quantization_config": config})
    assert parsed is not None
    assert parsed.group_of("model.layers.0.mlp.up_proj") == Float8Group(("Linear",), False, False)
    for name in ("lm_head", "model.layers.1.mlp.up_proj"):
        assert parsed.group_of(name) is None
    assert parsed.group_of("model.layers.10.mlp.up_proj") is not None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quantization_config(num_bits=4), "has num_bits = 4, expected 8"),
        (quantization_config(type="int"), "has type = 'int', expected float"),
        (quantization_config(symmetric=False), "has symmetric = False, expected True"),
        (quantization_config(strategy="block"), "has strategy = 'block', expected tensor or channel"),
        (quantization_config(strategy="group", group_size=128), "has group_size = 128, expected None"),
        (quantization_config(block_structure=[128, 128]), "block_structure = [128, 128], which may change the math"),
        (quantization_config(dynamic=True), "has dynamic = True, expected False or None"),
        (quantization_config(group={"input_activations": None}), "weights alone in float8 (W8A16) aren't supported"),
        (quantization_config(group={"input_activations": 8}), "has input_activations = 8, expected an object"),
        (quantization_config(group={"format": "pack-quantized"}), "has format = 'pack-quantized', expected float-q"),
        (quantization_config(group={"output_activations": {"num_bits": 8}}), "output_activations = {'num_bits': 8}"),
        (quantization_config(activations={"num_bits": 4}), "has num_bits = 4, expected 8"),
        (quantization_config(activations={"symmetric": False}), "has symmetric = False, expected True"),
        (quantization_config(activations={"strategy": "tensor"}), "activations.strategy = 'tensor', expected token"),
        (quantization_config(activations={"strategy": "group"}), "activations.strategy = 'group', expected token"),
        (quantization_config(activations={"dynamic": "local"}), "has dynamic = 'local', expected True or False"),
        (quantization_config(static=True, activations={"strategy": "token"}), "strategy = 'token', expected tensor"),
        (quantization_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme = {'num_bits': 8}, which may change"),
        (fp8_method_config(weight_block_size=[128, 128]), "weight_block_size = [128, 128], expected null"),
        (fp8_method_config(activation_scheme=None), "has activation_scheme = None, expected dynamic or static"),
        (fp8_method_config(fmt="e5m2"), "has fmt = 'e5m2', expected e4m3"),
        (fp8_method_config(ignored_layers="lm_head"), "has ignored_layers = 'lm_head', expected a list of names"),
        (fp8_method_config(kv_cache_scheme="static"), "kv_cache_scheme = 'static', which may change the math"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_supported_is_said_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse_quantization(Path("config.json"), json.loads(json.dumps({"quantization_config": config})))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
