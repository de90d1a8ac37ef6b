"""Hugging Face folders open when config, index and shards agree, and say what is wrong when they don't."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder.checkpoint import open_checkpoint
from castiron.runtime.errors import CheckpointError

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("single") / "tiny", dtype="bf16")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "sharded", sharded=True, with_tokenizer=False)


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (content | changes).items() if v is not None}))


def test_single_file_reads_exactly_what_was_saved(single: Path) -> None:
    with open_checkpoint(single) as checkpoint:
        assert (checkpoint.source_format, checkpoint.name) == ("safetensors", "tiny")
        assert checkpoint.architecture == "LlamaForCausalLM"
        assert checkpoint.config == json.loads((single / "config.json").read_text())
        assert checkpoint.generation_config == json.loads((single / "generation_config.json").read_text())
        assert checkpoint.tokenizer_source == single
        saved = load_file(single / "model.safetensors")
        assert set(checkpoint.tensors) == set(saved)
        for name, tensor in saved.items():
            info = checkpoint.tensor(name)
            assert (info.shape, info.scheme) == (tuple(tensor.shape), "bf16")
            raw = tensor.view(torch.int16).numpy().tobytes()
            assert checkpoint.read_rows(name, 0, info.num_rows).tobytes() == raw


def test_shards_together_hold_what_one_file_would(sharded: Path, tmp_path: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    whole = save_tiny_checkpoint(tmp_path / "whole", with_tokenizer=False)
    with open_checkpoint(sharded) as many, open_checkpoint(whole) as one:
        assert set(many.tensors) == set(one.tensors)
        for name, info in one.tensors.items():
            assert many.tensor(name).shape == info.shape
            assert (many.read_rows(name, 0, info.num_rows) == one.read_rows(name, 0, info.num_rows)).all()
        assert INDEX in many.files and INDEX not in one.files


def test_hashes_cover_every_file_read(single: Path) -> None:
    hashes = open_checkpoint(single).hash_files()
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"} <= set(hashes)
    for name, digest in hashes.items():
        assert digest == hashlib.sha256((single / name).read_bytes()).hexdigest()


def test_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(CheckpointError, match=f"shard {gone.name} is missing"):
        open_checkpoint(sharded)


def test_index_listing_an_absent_tensor_is_refused(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    shard = weight_map["model.norm.weight"]
    edit_json(sharded / INDEX, weight_map=weight_map | {"model.ghost.weight": shard})
    with pytest.raises(CheckpointError, match=r"lists model\.ghost\.weight"):
        open_checkpoint(sharded)


def test_tensor_the_index_does_not_list_is_refused(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    edit_json(sharded / INDEX, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight, which"):
        open_checkpoint(sharded)


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(first)
    save_file(tensors | load_file(second), second)
    with pytest.raises(CheckpointError, match=f"is in both {first.name} and {second.name}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", 3])
def test_index_can_not_lead_out_of_the_folder(sharded: Path, shard: Any) -> None:
    edit_json(sharded / INDEX, weight_map={"model.norm.weight": shard})
    with pytest.raises(CheckpointError, match="expected a safetensors file name"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        ("config.json", "[]", "holds a list, expected a JSON object"),
        ("config.json", '{"architectures": []}', "architectures is"),
        ("config.json", '{"architectures": "LlamaForCausalLM"}', "architectures is"),
        ("generation_config.json", "\xff", "not valid JSON"),
        (INDEX, '{"weight_map": {}}', "weight_map is missing or empty"),
        (INDEX, '{"weight_map": 3}', "weight_map is missing or empty"),
    ],
)
def test_damaged_json_is_named(sharded: Path, name: str, content: str, message: str) -> None:
    (sharded / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(sharded)
    assert "\n" not in str(caught.value)


def test_quantized_checkpoints_are_refused_by_method(single: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(single, tmp_path / "quantized")
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(CheckpointError, match=r"quantized \(gptq\), which isn't supported"):
        open_checkpoint(folder)


def test_folder_without_weights_says_what_it_wants(single: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(single, tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"convert pytorch_model\.bin to safetensors first"):
        open_checkpoint(folder)


def test_unknown_tensor_name_is_a_checkpoint_error(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    with pytest.raises(CheckpointError, match=r"no tensor model\.ghost"):
        checkpoint.read_rows("model.ghost", 0, 1)
    with pytest.raises(ValueError, match=r"rows 0\.\.9999"):
        checkpoint.read_rows("model.norm.weight", 0, 9999)


@pytest.mark.parametrize("path", ["/no/such/folder", "model.gguf", "no/such.gguf", "a/b/c", ""])
def test_a_path_that_is_not_there_is_a_checkpoint_error(path: str) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(path) if path else open_checkpoint("/dev/null/x")


def test_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        CheckpointError, match="some-owner/some-model: not a local path, and the hub can't"
    ) as caught:
        open_checkpoint("some-owner/some-model")
    assert "\n" not in str(caught.value)


def test_hub_id_opens_the_snapshot_under_its_own_name(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked = []

    def snapshot(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(single)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    checkpoint = open_checkpoint("some-owner/some-model")
    assert checkpoint.name == "some-model"
    assert asked == [("some-owner/some-model", ["*.json", "*.safetensors", "*.jinja"])]
