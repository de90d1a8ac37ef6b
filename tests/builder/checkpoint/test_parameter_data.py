"""Recipes: stacked parts, row slices, rope unpermuting and conversions give the rows the graph expects."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import dequantized_state, gguf_name, write_tiny_gguf

from castiron.builder.checkpoint import Checkpoint, open_checkpoint
from castiron.builder.checkpoint import parameter_data as module
from castiron.builder.checkpoint.dequantize import dequantize, to_dense
from castiron.builder.checkpoint.parameter_data import load_parameter, read_parameter_rows
from castiron.builder.parameters import Parameter, Part
from castiron.models.schemes import schemes_for
from castiron.runtime.errors import CheckpointError

LAYER = "model.layers.1.self_attn."
Q, K, V = (LAYER + f"{name}_proj.weight" for name in "qkv")
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 64, 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "tiny"
    return save_tiny_checkpoint(
        path, hidden_size=HIDDEN, intermediate_size=512, attention_bias=True, num_layers=2
    )


@pytest.fixture(scope="module")
def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def qkv(scheme: str, unpermute: bool) -> Parameter:
    rope = ("unpermute_rope", HEAD_DIM) if unpermute else ("", 0)
    rename = gguf_name if unpermute else str
    q, k, v = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    parts = (Part(rename(Q), 0, q, *rope), Part(rename(K), 0, k, *rope), Part(rename(V), 0, v))
    return Parameter("layers.1.qkv.weight", (q + k + v, HIDDEN), scheme, parts)


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_gguf_rows_are_unpermuted_whole_blocks_kept(folder: Path, tmp_path: Path, scheme: str) -> None:
    path = write_tiny_gguf(folder, tmp_path / "x.gguf", scheme)
    meant = dequantized_state(folder, path)
    expected = np.concatenate([meant[Q], meant[K], meant[V]])
    with open_checkpoint(path) as checkpoint:
        parameter = qkv(scheme, unpermute=True)
        rows = read_parameter_rows(checkpoint, parameter, 0, parameter.shape[0])
        assert np.array_equal(dequantize(scheme, rows, HIDDEN), expected)
        assert np.array_equal(load_parameter(checkpoint, parameter).numpy(), expected)
        stored = checkpoint.read_rows(gguf_name(Q), 0, HEADS * HEAD_DIM)
        assert sorted(map(bytes, rows[: len(stored)])) == sorted(map(bytes, stored))


def test_any_row_range_equals_that_range_of_the_whole(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(folder, tmp_path / "x.gguf", "q4_k")
    with open_checkpoint(path) as checkpoint:
        parameter = qkv("q4_k", unpermute=True)
        whole = read_parameter_rows(checkpoint, parameter, 0, parameter.shape[0])
        for start, stop in [
            (0, 1),
            (5, 70),
            (63, 65),
            (250, 262),
            (255, 257),
            (380, 400),
            (511, 512),
            (9, 9),
        ]:
            assert np.array_equal(read_parameter_rows(checkpoint, parameter, start, stop), whole[start:stop])
        with pytest.raises(ValueError, match=r"rows 0\.\.513"):
            read_parameter_rows(checkpoint, parameter, 0, 513)


def test_small_chunks_give_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_gguf(folder, tmp_path / "x.gguf", "q6_k")
    with open_checkpoint(path) as checkpoint:
        for scheme in ("q6_k", "bf16"):
            parameter = qkv(scheme, unpermute=True)
            whole = read_parameter_rows(checkpoint, parameter, 3, 500)
            with monkeypatch.context() as patch:
                patch.setattr(module, "_CHUNK_BYTES", 1000)
                assert np.array_equal(read_parameter_rows(checkpoint, parameter, 3, 500), whole)


def test_slices_of_parts_are_rows_after_the_transform(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(folder, tmp_path / "x.gguf", "f32")
    meant = dequantized_state(folder, path)
    parts = (Part(gguf_name(K), 10, 90, "unpermute_rope", HEAD_DIM), Part(gguf_name(V), 64, 65))
    parameter = Parameter("p", (81, HIDDEN), "f32", parts)
    with open_checkpoint(path) as checkpoint:
        values = load_parameter(checkpoint, parameter).numpy()
    assert np.array_equal(values, np.concatenate([meant[K][10:90], meant[V][64:65]]))


def test_vectors_stack_by_elements_and_unpermute(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(folder, tmp_path / "x.gguf", "q8_0")
    meant = dequantized_state(folder, path)
    q, v = (LAYER + f"{name}_proj.bias" for name in "qv")
    parts = (Part(gguf_name(q), 0, 256, "unpermute_rope", HEAD_DIM), Part(gguf_name(v), 32, 128))
    parameter = Parameter("layers.1.qkv.bias", (352,), "f32", parts)
    with open_checkpoint(path) as checkpoint:
        rows = read_parameter_rows(checkpoint, parameter, 0, 1)
        assert rows.shape == (1, 4 * 352)
        assert load_parameter(checkpoint, parameter).shape == (352,)
    assert np.array_equal(rows.view(np.float32)[0], np.concatenate([meant[q], meant[v][32:128]]))


@pytest.mark.parametrize("target", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_dense_conversions_round_as_torch(folder: Path, tmp_path: Path, source: str, target: str) -> None:
    dtypes = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    made = save_tiny_checkpoint(
        tmp_path / "x", dtype=source, hidden_size=HIDDEN, num_layers=2, with_tokenizer=False
    )
    saved = load_file(made / "model.safetensors")
    parameter = qkv(target, unpermute=False)
    with open_checkpoint(made) as checkpoint:
        values = load_parameter(checkpoint, parameter)
    expected = torch.cat([saved[Q], saved[K], saved[V]]).to(dtypes[target]).float()
    assert torch.equal(values, expected)


def test_dequantizing_to_f32_equals_keeping(folder: Path, tmp_path: Path) -> None:
    path = write_tiny_gguf(folder, tmp_path / "x.gguf", "q5_0")
    with open_checkpoint(path) as checkpoint:
        kept = load_parameter(checkpoint, qkv("q5_0", unpermute=True))
        assert torch.equal(load_parameter(checkpoint, qkv("f32", unpermute=True)), kept)
        assert torch.equal(load_parameter(checkpoint, qkv("bf16", unpermute=True)), kept.bfloat16().float())


def test_constants_are_stored_in_the_parameters_scheme(folder: Path) -> None:
    table = np.linspace(0.1, 1, 8)
    with open_checkpoint(folder) as checkpoint:
        for scheme in ("f32", "bf16"):
            parameter = Parameter("inv_freq", (8,), scheme, constant=table)
            rows = read_parameter_rows(checkpoint, parameter, 0, 1)
            assert np.array_equal(rows, to_dense(scheme, table.reshape(1, 8)))


def with_recipe(*parts: Part, shape: tuple[int, ...] = (256, HIDDEN), scheme: str = "f32") -> Parameter:
    return Parameter("p", shape, scheme, parts)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (with_recipe(Part("model.ghost", 0, 256)), "no tensor model.ghost"),
        (with_recipe(Part(Q, 0, 257), shape=(257, HIDDEN)), "can't be part of"),
        (with_recipe(Part(Q, 0, 256), shape=(256, 128)), "can't be part of"),
        (with_recipe(Part("model.norm.weight", 0, 1), shape=(1, HIDDEN)), "can't be part of"),
        (with_recipe(Part(Q, 0, 256), shape=(256,)), "can't be part of"),
        (with_recipe(Part(Q, 0, 200)), "p has 256 rows, its tensors give 200"),
        (with_recipe(Part(Q, 0, 256), scheme="q8_0"), "is stored as f32 and p wants q8_0"),
        (with_recipe(Part(Q, 0, 256, "unpermute_rope", 96)), "not a multiple of the head size 96"),
    ],
)
def test_a_recipe_that_does_not_fit_names_tensor_and_parameter(
    folder: Path, parameter: Parameter, message: str
) -> None:
    with open_checkpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=message):
        read_parameter_rows(checkpoint, parameter, 0, 1)


def damaged(folder: Path, target: Path, value: float) -> Checkpoint:
    tensors = load_file(folder / "model.safetensors")
    tensors[Q][17, 3] = value
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return open_checkpoint(target)


def test_values_that_are_not_finite_name_their_tensor(folder: Path, tmp_path: Path) -> None:
    parameter = with_recipe(Part(Q, 0, 256))
    with (
        damaged(folder, tmp_path / "x", float("nan")) as checkpoint,
        pytest.raises(CheckpointError, match=f"tensor {Q}: a value is NaN or infinite"),
    ):
        read_parameter_rows(checkpoint, parameter, 0, 256)


def test_values_beyond_float16_are_refused_not_made_infinite(folder: Path, tmp_path: Path) -> None:
    with damaged(folder, tmp_path / "x", 1e6) as checkpoint:
        assert load_parameter(checkpoint, with_recipe(Part(Q, 0, 256)))[17, 3] == 1e6
        with pytest.raises(CheckpointError, match="beyond what f16 can hold"):
            load_parameter(checkpoint, with_recipe(Part(Q, 0, 256), scheme="f16"))
