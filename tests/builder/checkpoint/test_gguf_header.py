"""A GGUF header is believed only where every count, size and type in it adds up."""

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from ggml_blocks import ggml_type, quantize_rows
from raw_gguf import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    FLOAT32,
    STRING,
    UINT8,
    UINT32,
    RawGguf,
    array,
    pair,
    tensor,
    text,
)
from tiny_checkpoints import save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from castiron.builder.checkpoint import open_checkpoint
from castiron.models.schemes import schemes_for
from castiron.runtime.errors import CheckpointError

u32 = struct.Struct("<I").pack


def alignment(value: int) -> bytes:
    return pair("general.alignment", UINT32, u32(value))


HOSTILE = {
    "magic": (RawGguf(magic=b"GGML"), "not a GGUF file"),
    "version 1": (RawGguf(version=1), "GGUF version 1, expected 2 or 3"),
    "version 4": (RawGguf(version=4), "GGUF version 4"),
    "big endian": (RawGguf(version=3 << 24), "big-endian"),
    "2^60 tensors": (RawGguf(num_tensors=2**60), f"{2**60} tensors, more than"),
    "2^64-1 tensors": (RawGguf(num_tensors=2**64 - 1), "tensors, more than"),
    "2^60 pairs": (RawGguf(num_pairs=2**60), f"{2**60} metadata pairs, more than"),
    "a pair too many": (RawGguf(num_pairs=3), "metadata"),
    "a tensor too many": (RawGguf(num_tensors=2), "tensor"),
    "huge key": (RawGguf(pairs=[u32(0xFFFFFFFF) + u32(0) + b"x"]), "4294967295 bytes, more than"),
    "huge string": (RawGguf(pairs=[pair("k", STRING, struct.pack("<Q", 2**62))]), "metadata k has"),
    "bad utf-8": (RawGguf(pairs=[pair("k", STRING, text(b"\xff\xfe"))]), "metadata k isn't valid UTF-8"),
    "bad utf-8 in array": (
        RawGguf(pairs=[pair("k", ARRAY, array(STRING, 2, text("ok") + text(b"\xff")))]),
        "string 1 of metadata k isn't valid UTF-8",
    ),
    "value type": (RawGguf(pairs=[pair("k", 13, bytes(8))]), "value type 13"),
    "array of arrays": (RawGguf(pairs=[pair("k", ARRAY, array(ARRAY, 1, bytes(12)))]), "array of arrays"),
    "array length": (RawGguf(pairs=[pair("k", ARRAY, array(FLOAT32, 2**61, b""))]), "items in metadata k"),
    "strings' length": (RawGguf(pairs=[pair("k", ARRAY, array(STRING, 2**61, b""))]), "items in metadata"),
    "bool of 2": (RawGguf(pairs=[pair("k", BOOL, b"\x02")]), "bool with value 2"),
    "same key twice": (RawGguf(pairs=[ARCHITECTURE, ARCHITECTURE]), "'general.architecture' appears twice"),
    "empty key": (RawGguf(pairs=[pair("", UINT8, b"\x00")]), "key 0 is '': empty"),
    "scores as uint8": (
        RawGguf(pairs=[ARCHITECTURE, pair("tokenizer.ggml.scores", ARRAY, array(UINT8, 4, bytes(4)))]),
        "tokenizer.ggml.scores is uint8[], expected float32[]",
    ),
    "tokens as one string": (
        RawGguf(pairs=[ARCHITECTURE, pair("tokenizer.ggml.tokens", STRING, text("a"))]),
        "tokenizer.ggml.tokens is string, expected string[]",
    ),
    "alignment 24": (RawGguf(pairs=[ARCHITECTURE, alignment(24)]), "power of two"),
    "alignment 0": (RawGguf(pairs=[ARCHITECTURE, alignment(0)]), "power of two"),
    "no architecture": (RawGguf(pairs=[]), "general.architecture is missing"),
    "architecture not text": (RawGguf(pairs=[pair("general.architecture", UINT32, u32(1))]), "string"),
    "no tensors": (RawGguf(tensors=[], data=b""), "holds no tensors"),
    "no dimensions": (RawGguf(tensors=[tensor("a", ())]), "0 dimensions, expected 1 to 4"),
    "five dimensions": (RawGguf(tensors=[tensor("a", (2, 2, 2, 2, 2))]), "5 dimensions"),
    "2^31 dimensions": (RawGguf(tensors=[tensor("a", (8, 4), num_dims=2**31)]), "2147483648 dimensions"),
    "zero dimension": (RawGguf(tensors=[tensor("a", (8, 0))]), "one is zero"),
    "dimension 2^42+1": (RawGguf(tensors=[tensor("a", (2**42 + 1, 2**22))]), "tensor 'a' of dimensions"),
    "dimensions that wrap to 0": (RawGguf(tensors=[tensor("a", (2**32, 2**32))]), "tensor 'a' of dimensions"),
    "past the end": (RawGguf(tensors=[tensor("a", (8, 5))]), "truncated or damaged"),
    "offset past the end": (RawGguf(tensors=[tensor("a", (8, 4), offset=2**63)]), "truncated or damaged"),
    "offset that wraps": (RawGguf(tensors=[tensor("a", (8, 4), offset=2**64 - 32)]), "truncated or damaged"),
    "misaligned": (RawGguf(tensors=[tensor("a", (8, 2), offset=4)]), "multiple of the alignment 32"),
    "overlap": (
        RawGguf(tensors=[tensor("a", (8, 2)), tensor("b", (8, 2), offset=32)]),
        "tensors 'a' and 'b' overlap",
    ),
    "same name twice": (RawGguf(tensors=[tensor("a", (8, 1))] * 2), "appears twice"),
    "no name": (RawGguf(tensors=[tensor("", (8, 4))]), "name of tensor 0 is '': empty"),
    "name of two lines": (RawGguf(tensors=[tensor("a\nb", (8, 4))]), "name of tensor 0 is 'a\\nb'"),
    "huge name": (RawGguf(tensors=[tensor("a" * 300, (8, 4))]), "300 bytes, more than the 255"),
    "unknown type": (RawGguf(tensors=[tensor("a", (8, 4), 4711)]), "tensor 'a' has ggml type 4711, unknown"),
    "unsupported type": (RawGguf(tensors=[tensor("a", (256, 4), 10)]), "Q2_K (10), which isn't supported"),
    "broken block": (RawGguf(tensors=[tensor("a", (8, 4), 8)]), "the 32 a q8_0 block holds"),
    "split file": (
        RawGguf(pairs=[ARCHITECTURE, pair("split.count", 2, struct.pack("<H", 3))]),
        "split into 3 files",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_in_one_line_and_at_once(name: str, tmp_path: Path) -> None:
    raw, message = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(raw.encode())
    started = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert time.perf_counter() - started < 2
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_sound_file_behind_the_hostile_ones_opens(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(RawGguf(version=2, data=bytes(range(128))).encode())
    with open_checkpoint(tmp_path / "x.gguf") as checkpoint:
        assert (checkpoint.source_format, checkpoint.name, checkpoint.architecture) == ("gguf", "x", "llama")
        info = checkpoint.tensor("a")
        assert (info.shape, info.scheme, info.row_bytes) == ((4, 8), "f32", 32)
        assert checkpoint.read_rows("a", 1, 3).tobytes() == bytes(range(32, 96))


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    raw = RawGguf(
        pairs=[ARCHITECTURE, pair("general.alignment", UINT32, u32(256))], alignment=256, data=b"\x01" * 128
    )
    (tmp_path / "x.gguf").write_bytes(raw.encode())
    assert (open_checkpoint(tmp_path / "x.gguf").read_rows("a", 0, 4) == 1).all()


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_every_tensor_type_reads_back_what_was_written(scheme: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    rows = quantize_rows(scheme, values)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("before", np.ones(3, dtype=np.float32))
    writer.add_tensor("w", rows, raw_shape=rows.shape, raw_dtype=ggml_type(scheme))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(tmp_path / "x.gguf") as checkpoint:
        info = checkpoint.tensor("w")
        assert (info.shape, info.scheme) == ((6, 512), scheme)
        assert np.array_equal(checkpoint.read_rows("w", 0, 6), rows)
        assert np.array_equal(checkpoint.read_rows("w", 2, 5), rows[2:5])
        assert checkpoint.read_rows("w", 3, 3).shape == (0, info.row_bytes)
        assert checkpoint.read_rows("before", 0, 1).view(np.float32).tolist() == [[1, 1, 1]]


def test_a_vocabulary_of_250_000_tokens_is_parsed_within_a_second(tmp_path: Path) -> None:
    count = 250_000
    tokens = b"".join(text(f"token{i}") for i in range(count))
    pairs = [
        ARCHITECTURE,
        pair("tokenizer.ggml.tokens", ARRAY, array(STRING, count, tokens)),
        pair("tokenizer.ggml.scores", ARRAY, array(FLOAT32, count, np.arange(count, dtype="<f4").tobytes())),
    ]
    path = tmp_path / "x.gguf"
    path.write_bytes(RawGguf(pairs=pairs).encode())
    started = time.process_time()
    checkpoint = open_checkpoint(path)
    assert time.process_time() - started < 1
    assert checkpoint.config["tokenizer.ggml.tokens"][-1] == "token249999"
    assert checkpoint.config["tokenizer.ggml.scores"][-1] == 249999


def test_tiny_file_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "tiny", "qwen2", num_layers=1, with_tokenizer=False)
    compare_with_gguf_package(write_tiny_gguf(folder, tmp_path / "x.gguf"))


@pytest.mark.long
def test_real_file_reads_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    compare_with_gguf_package(smollm2_gguf)


def compare_with_gguf_package(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert set(checkpoint.config) == set(fields)
    for name, field in fields.items():
        ours = checkpoint.config[name]
        if isinstance(ours, list):
            assert len(ours) == len(field.data)
            assert ours[-50:] == field.contents(slice(-50, None)), name
        else:
            assert ours == field.contents(), name
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        t.name: (t.offset, t.num_bytes) for t in checkpoint.tensors.values()
    }


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(RawGguf().encode())
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 64)
    with pytest.raises(CheckpointError, match="ends inside tensor a"):
        checkpoint.read_rows("a", 0, 4)
