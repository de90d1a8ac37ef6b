"""A safetensors header is believed only where names, shapes and byte ranges add up."""

import json
from pathlib import Path

import pytest

from castiron.builder.checkpoint.safetensors_header import read_safetensors_header
from castiron.runtime.errors import CheckpointError


def encode(header: object, data: bytes = bytes(64)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(shape: object = (4, 2), offsets: object = (0, 32), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TWO = {"a": entry(), "b": entry((16,), (32, 64), "BF16"), "__metadata__": {"format": "pt"}}
HOSTILE = {
    "empty": (b"", "too short"),
    "seven bytes": (b"1234567", "too short"),
    "header of 2^63 bytes": ((2**63).to_bytes(8, "little") + b"{}", "truncated"),
    "header longer than the file": ((100).to_bytes(8, "little") + b"{}", "truncated"),
    "header beyond the format's limit": ((100_000_001).to_bytes(8, "little") + b"{}", "truncated"),
    "not JSON": (encode(b"{'a'"), "isn't valid JSON"),
    "not UTF-8": (encode(b'{"\xff": 1}'), "isn't valid JSON"),
    "deep nesting": (encode(b"[" * 100_000), "isn't valid JSON"),
    "number of 5000 digits": (encode(b'{"a": ' + b"9" * 5000 + b"}"), "isn't valid JSON"),
    "a list": (encode([]), "expected a JSON object"),
    "same name twice": (encode(b'{"a": 1, "a": 2}'), "twice"),
    "name of two lines": (encode({"a\nb": entry()}), "control characters"),
    "entry not an object": (encode({"a": 3}), "needs exactly dtype, shape and data_offsets"),
    "entry lacks a field": (encode({"a": {"dtype": "F32"}}), "needs exactly dtype, shape and data_offsets"),
    "float8": (encode({"a": entry((64,), (0, 64), "F8_E4M3")}), "F8_E4M3', which isn't supported"),
    "int64": (encode({"a": entry((8,), (0, 64), "I64")}), "I64', which isn't supported"),
    "dtype a list": (encode({"a": entry(dtype=["F32"])}), "isn't supported"),
    "negative dimension": (encode({"a": entry((-4, -2))}), "expected a list of positive integers"),
    "zero dimension": (encode({"a": entry((0, 2), (0, 0))}), "expected a list of positive integers"),
    "boolean dimension": (encode({"a": entry((True, 8))}), "expected a list of positive integers"),
    "fractional dimension": (encode({"a": entry((4.0, 2))}), "expected a list of positive integers"),
    "dimensions that wrap": (encode({"a": entry((2**32, 2**32), (0, 64))}), "data_offsets give it 64"),
    "three offsets": (encode({"a": entry(offsets=(0, 32, 64))}), "expected [start, stop]"),
    "offsets backwards": (encode({"a": entry(offsets=(32, 0))}), "data_offsets give it -32"),
    "wrong size": (encode({"a": entry((4, 4), (0, 32))}), "needs 64 bytes, data_offsets give it 32"),
    "overlap": (encode({"a": entry(), "b": entry(offsets=(16, 48))}), "'b' overlaps"),
    "hole": (encode({"a": entry(), "b": entry((4,), (48, 64))}), "'b' leaves a hole"),
    "hole in front": (encode({"a": entry(offsets=(32, 64))}), "'a' leaves a hole"),
    "past the end": (encode(TWO, bytes(63)), "truncated or damaged"),
    "bytes left over": (encode(TWO, bytes(65)), "truncated or damaged"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_header_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_safetensors_header(path)
    assert message in str(caught.value).replace('"', "'")
    assert "\n" not in str(caught.value)


def test_sound_header_places_every_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    content = encode(TWO)
    path.write_bytes(content)
    a, b = read_safetensors_header(path)
    start = len(content) - 64
    assert (a.name, a.shape, a.scheme, a.offset, a.row_bytes, a.num_rows) == ("a", (4, 2), "f32", start, 8, 4)
    assert (b.name, b.shape, b.scheme, b.offset, b.row_bytes, b.num_rows) == (
        "b",
        (16,),
        "bf16",
        start + 32,
        32,
        1,
    )
