"""The m64 layout keeps every bit of the checkpoint and is what its docstring says. Needs no GPU."""

import hashlib

import numpy as np
import pytest
from checkpoint_blocks import decode_rows, random_rows

from castiron.models.schemes import SCHEMES, row_bytes, schemes_for
from castiron.plugins_cuda import layouts
from castiron.plugins_cuda.layouts import (
    ALL_SCHEMES,
    PACKED_SCHEMES,
    pack,
    packed_bytes,
    tail_bytes,
    tile_bytes,
    unit_columns,
    unpack,
)


def random_bytes(scheme: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes(scheme, k)), np.uint8)


def ks_of(scheme: str) -> tuple[int, ...]:
    block = SCHEMES[scheme].block_size
    return (block, 3 * block, 8 * block) if block > 1 else (1, 8, 63, 64, 200)


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
@pytest.mark.parametrize("n", [1, 63, 64, 65, 200])
def test_unpack_returns_the_packed_bits(scheme: str, n: int) -> None:
    for k in ks_of(scheme):
        rows = random_bytes(scheme, n, k)
        rows.flags.writeable = False
        packed = pack(scheme, rows, k)
        packed.flags.writeable = False
        assert packed.dtype == np.uint8 and packed.shape == (packed_bytes(scheme, n, k),)
        np.testing.assert_array_equal(unpack(scheme, packed, n, k), rows)


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_packs_of_tile_aligned_slices_concatenate_to_the_pack_of_the_whole(scheme: str) -> None:
    k = ks_of(scheme)[1]
    rows = random_bytes(scheme, 270, k)
    tiles, tails = [], []
    for start, stop in ((0, 64), (64, 256), (256, 270)):
        packed = pack(scheme, rows[start:stop], k)
        tail = packed.size - tail_bytes(scheme, stop - start)
        tiles.append(packed[:tail])
        tails.append(packed[tail:])
    np.testing.assert_array_equal(np.concatenate(tiles + tails), pack(scheme, rows, k))


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_weights_larger_than_a_strip_round_trip(scheme: str) -> None:
    k = 2048
    n = (2 << 20) // row_bytes(scheme, k) + 3
    rows = random_bytes(scheme, n, k)
    np.testing.assert_array_equal(unpack(scheme, pack(scheme, rows, k), n, k), rows)


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
def test_tiles_take_the_checkpoints_bytes_and_are_multiples_of_16(scheme: str) -> None:
    assert tile_bytes(scheme) == 64 * row_bytes(scheme, unit_columns(scheme))
    assert tile_bytes(scheme) % 16 == 0
    assert packed_bytes(scheme, 65, unit_columns(scheme)) == 2 * tile_bytes(scheme)


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_rows_and_columns_beyond_the_weight_are_packed_as_zero_bits(scheme: str) -> None:
    k = ks_of(scheme)[0]
    padded_k = unit_columns(scheme)
    whole = unpack(scheme, pack(scheme, random_bytes(scheme, 3, k), k), 64, padded_k)
    assert not whole[3:].any() and not whole[:, row_bytes(scheme, k) :].any()


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
def test_every_element_is_where_the_docstring_says(scheme: str) -> None:
    n, k = 128, 2 * unit_columns(scheme)
    rows = random_rows(scheme, n, k, np.random.default_rng(0))
    packed = pack(scheme, rows, k).reshape(2, 2, -1)
    expected = decode_rows(scheme, rows)
    for row, column in np.random.default_rng(1).integers(0, (n, k), (300, 2)):
        tile = packed[row // 64, column // unit_columns(scheme)]
        value = element(scheme, tile, row % 64, column % unit_columns(scheme))
        assert value == expected[row, column], (row, column)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (70, 208), (1, 16), (192, 1024)])
def test_fp8_codes_and_scales_are_where_the_docstring_says(n: int, k: int) -> None:
    rows = random_bytes("fp8", n, k)
    packed = pack("fp8", rows, k)
    bands, tiles = -(-n // 64), -(-k // 128)
    assert packed.size == bands * tiles * 8192 + bands * 256 == packed_bytes("fp8", n, k)
    scales = packed[bands * tiles * 8192 :]
    np.testing.assert_array_equal(scales[: 4 * n], rows[:, :4].reshape(-1))
    assert not scales[4 * n :].any()
    codes = packed[: bands * tiles * 8192].reshape(bands, tiles, 8192)
    for row, column in np.random.default_rng(1).integers(0, (n, k), (300, 2)):
        r, c = row % 64, column % 128
        at = r * 128 + (c // 16 ^ r % 8) * 16 + c % 16
        assert codes[row // 64, column // 128, at] == rows[row, 4 + column], (row, column)


def element(scheme: str, tile: np.ndarray, row: int, column: int) -> np.float32:
    """One value of a tile, read plainly by the docstring of layouts.py."""
    if scheme == "bf16":
        at = row * 128 + (column // 8 ^ row % 8) * 16 + column % 8 * 2
        return (tile[at : at + 2].view(np.uint16).astype(np.uint32) << 16).view(np.float32)[0]
    part, step, panel = column // 64, column % 64 // 16, row // 16
    lane = row % 8 * 4 + column % 8 // 2
    i, hi = row % 16 // 8 + column % 16 // 8 * 2, column % 2
    parts = unit_columns(scheme) // 64
    header = {"q4_0": 256, "q4_1": 512, "q5_0": 256, "q5_1": 512, "q8_0": 256, "q6_k": 1152}.get(scheme, 1024)
    if scheme.startswith("int4"):
        header = unit_columns(scheme) // SCHEMES[scheme].group_size * 64 * (3 if scheme.endswith("z") else 2)
    codes = tile[header:]
    if scheme == "q8_0":
        at = panel * 1024 + step // 2 * 512 + lane * 16 + step % 2 * 8 + 2 * i + hi
        code = int(codes[at : at + 1].view(np.int8)[0])
    else:
        nibbles = codes[: parts * 2048].view(np.uint32).reshape(parts, 4, 32, 4)
        code = int(nibbles[part, panel, lane, step]) >> (4 * i + 16 * hi) & 15
    high = codes[parts * 2048 :]
    if scheme in ("q5_0", "q5_1", "q5_k"):
        code |= (int(high.reshape(parts, 4, 32, 4)[part, panel, lane, step]) >> (i + 4 * hi) & 1) << 4
    if scheme == "q6_k":
        word = int(high.view(np.uint16).reshape(parts, 4, 32, 4)[part, panel, lane, step])
        code |= (word >> (2 * i + 8 * hi) & 3) << 4
    return header_value(scheme, tile, row, column, code)


def header_value(scheme: str, tile: np.ndarray, row: int, column: int, code: int) -> np.float32:
    if scheme.startswith("int4"):
        groups, group = (
            unit_columns(scheme) // SCHEMES[scheme].group_size,
            column // SCHEMES[scheme].group_size,
        )
        bits = tile[: groups * 128].view(np.uint16).reshape(groups, 64)[group, row]
        zeros = tile[groups * 128 : groups * 192].reshape(-1, 64)
        zero = int(zeros[group, row]) if scheme.endswith("z") else 8
        return (np.uint32(bits) << np.uint32(16)).view(np.float32) * np.float32(code - zero)
    halves = tile[:256].view(np.float16).reshape(2, 64).astype(np.float32)
    if SCHEMES[scheme].block_size == 32:
        scale = halves[column // 32, row]
        if SCHEMES[scheme].has_minimum:
            return scale * code + tile[256:512].view(np.float16).reshape(2, 64)[column // 32, row]
        return scale * np.float32(code - SCHEMES[scheme].zero_point)
    if scheme == "q6_k":
        scales = tile[128:1152].view(np.int8).reshape(16, 64)
        return halves[0, row] * np.float32(scales[column // 16, row]) * np.float32(code - 32)
    packed = tile[256:1024].reshape(12, 64)[:, row].astype(int)
    group = column // 32
    if group < 4:
        scale, minimum = packed[group] & 63, packed[group + 4] & 63
    else:
        scale = packed[group + 4] & 15 | packed[group - 4] >> 6 << 4
        minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4
    return halves[0, row] * np.float32(scale) * np.float32(code) - halves[1, row] * np.float32(minimum)


def test_decoded_blocks_are_those_of_gguf() -> None:
    gguf = pytest.importorskip("gguf")
    for scheme in schemes_for("cpu", quantized=True):
        rows = random_rows(scheme, 20, 768, np.random.default_rng(0))
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(SCHEMES[scheme].ggml_type))
        np.testing.assert_array_equal(decode_rows(scheme, rows), expected)


def test_wrong_shapes_and_schemes_are_refused_with_what_was_expected() -> None:
    with pytest.raises(ValueError, match="33 elements, expected a positive multiple of 32"):
        packed_bytes("q4_0", 16, 33)
    with pytest.raises(ValueError, match=r"expected uint8 \[r, 20\]"):
        pack("q4_1", np.zeros((2, 18), np.uint8), 32)
    with pytest.raises(ValueError, match="expected uint8 of 2560"):
        unpack("q4_1", np.zeros(319, np.uint8), 16, 32)
    with pytest.raises(ValueError, match="m64 has no f16 tiles, expected one of bf16"):
        packed_bytes("f16", 16, 32)


def test_packed_bytes_are_those_of_the_named_layout() -> None:
    """Engines hold packed weights: bytes that change need a new LAYOUT, then a new hash here."""
    assert layouts.LAYOUT == "m64"
    for schemes, expected in (
        (PACKED_SCHEMES, "5251fbeccb1031f3e8028f499ad605cf5bca57b69802009aaf22de3fbb8c7e56"),
        (("fp8",), "850e8f26a4b33dc8fc60cd1866ad7dd7e541b0ef3e87e7044222e9dd7c313202"),
    ):
        digest = hashlib.sha256()
        for scheme in schemes:
            digest.update(pack(scheme, random_bytes(scheme, 67, 512), 512))
        assert digest.hexdigest() == expected, schemes
