"""Damaged files: every truncation and every flipped bit either leaves a file that reads consistently, or is a
CheckpointError of one line; never another exception, a hang, or memory out of proportion."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from float_quantized import write_float_quantized
from peak_memory import peak_kib, reset_peak
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.checkpoint.dequantize import check_finite
from castiron.builder.tokenizer import build_tokenizer
from castiron.runtime.errors import CheckpointError

SHORT, FULL = 60, 600  # cases a kind
MAX_SECONDS = 3.0  # one case; milliseconds on an idle machine
MAX_GROWTH_KIB = 200 << 10

Damage = Callable[[bytearray, random.Random], bytearray]


def truncate(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(len(content))]


def truncate_header(content: bytearray, rng: random.Random) -> bytearray:
    return content[: rng.randrange(min(len(content), 12_000))]


def flip_header_bit(content: bytearray, rng: random.Random) -> bytearray:
    position = rng.randrange(min(len(content), 12_000))
    content[position] ^= 1 << rng.randrange(8)
    return content


def flip_three_bits(content: bytearray, rng: random.Random) -> bytearray:
    for _ in range(3):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def overwrite_eight_bytes(content: bytearray, rng: random.Random) -> bytearray:
    position = rng.randrange(min(len(content), 12_000) - 8)
    value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**42 + 1, 2**60, 2**63, 2**64 - 1])
    content[position : position + 8] = value.to_bytes(8, "little")
    return content


DAMAGES = (truncate, truncate_header, flip_header_bit, flip_three_bits, overwrite_eight_bytes)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "tiny"
    return save_tiny_checkpoint(folder, num_layers=1, dtype="bf16")


@pytest.fixture(scope="module")
def tiny_gguf_file(tiny_folder: Path) -> Path:
    return write_tiny_gguf(tiny_folder, tiny_folder.parent / "tiny.gguf", "q4_0")


def outcome(path: Path, with_tokenizer: bool) -> str:
    """Open and read everything; "" if that went well, else the CheckpointError's text."""
    try:
        with open_checkpoint(path) as checkpoint:
            for info in checkpoint.tensors.values():
                rows = checkpoint.read_rows(info.name, 0, info.num_rows)
                assert rows.shape == (info.num_rows, info.row_bytes)
                assert rows.size == info.num_bytes
                check_finite(info.scheme, rows, info.name)
            if with_tokenizer:
                build_tokenizer(checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


def fuzz(path: Path, target: Path, opened: Path, with_tokenizer: bool, cases: range) -> list[str]:
    original = path.read_bytes()
    results = []
    reset_peak()
    before = peak_kib()
    for case in cases:
        rng = random.Random(case)
        damage: Damage = DAMAGES[case % len(DAMAGES)]
        target.write_bytes(damage(bytearray(original), rng))
        started = time.perf_counter()
        message = outcome(opened, with_tokenizer)
        assert time.perf_counter() - started < MAX_SECONDS, f"case {case}"
        assert "\n" not in message, f"case {case}: {message}"
        assert not damage.__name__.startswith("truncate") or message, f"case {case}: a truncated file passed"
        results.append(message)
    assert peak_kib() - before < MAX_GROWTH_KIB
    assert outcome(path if opened == target else path.parent, with_tokenizer) == ""  # the sound one
    return results


def fuzz_gguf(tiny_gguf_file: Path, tmp_path: Path, cases: range) -> None:
    target = tmp_path / "x.gguf"
    results = fuzz(tiny_gguf_file, target, target, True, cases)
    assert sum(map(bool, results)) > len(results) // 3


def fuzz_safetensors(tiny_folder: Path, tmp_path: Path, cases: range) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "damaged")
    results = fuzz(tiny_folder / "model.safetensors", folder / "model.safetensors", folder, False, cases)
    assert sum(map(bool, results)) > len(results) // 3


def fuzz_json(tiny_folder: Path, tmp_path: Path, name: str, cases: range) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "damaged")
    original = (tiny_folder / name).read_bytes()
    for case in cases:
        (folder / name).write_bytes(flip_header_bit(bytearray(original), random.Random(case)))
        assert "\n" not in outcome(folder, True), f"case {case}"


def test_damaged_gguf_files_are_errors_or_read_consistently(tiny_gguf_file: Path, tmp_path: Path) -> None:
    fuzz_gguf(tiny_gguf_file, tmp_path, range(SHORT))


def test_damaged_safetensors_are_errors_or_read_consistently(tiny_folder: Path, tmp_path: Path) -> None:
    fuzz_safetensors(tiny_folder, tmp_path, range(SHORT))


@pytest.mark.parametrize("static", [False, True])
def test_damaged_float8_checkpoints_are_errors_or_read_consistently(
    tiny_folder: Path, tmp_path: Path, static: bool
) -> None:
    folder, _ = write_float_quantized(tiny_folder, tmp_path / "float8", static=static)
    (tmp_path / "tensors").mkdir()
    (tmp_path / "config").mkdir()
    fuzz_safetensors(folder, tmp_path / "tensors", range(30))
    fuzz_json(folder, tmp_path / "config", "config.json", range(15))


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_damaged_json_files_never_raise_anything_else(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    fuzz_json(tiny_folder, tmp_path, name, range(15))


@pytest.mark.long
def test_many_damaged_gguf_files(tiny_gguf_file: Path, tmp_path: Path) -> None:
    fuzz_gguf(tiny_gguf_file, tmp_path, range(SHORT, FULL))


@pytest.mark.long
def test_many_damaged_safetensors(tiny_folder: Path, tmp_path: Path) -> None:
    fuzz_safetensors(tiny_folder, tmp_path, range(SHORT, FULL))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_many_damaged_json_files(tiny_folder: Path, tmp_path: Path, name: str) -> None:
    fuzz_json(tiny_folder, tmp_path, name, range(15, FULL // 2))


def test_a_flip_that_makes_a_scale_infinite_is_seen(tiny_gguf_file: Path, tmp_path: Path) -> None:
    content = bytearray(tiny_gguf_file.read_bytes())
    with open_checkpoint(tiny_gguf_file) as checkpoint:
        info = checkpoint.tensor("blk.0.attn_v.weight")
    scale = np.frombuffer(bytes(content[info.offset : info.offset + 2]), dtype="<u2")[0] | 0x7C00
    content[info.offset : info.offset + 2] = int(scale).to_bytes(2, "little")
    target = tmp_path / "x.gguf"
    target.write_bytes(content)
    assert "tensor blk.0.attn_v.weight: a block scale is NaN or infinite" in outcome(target, False)
