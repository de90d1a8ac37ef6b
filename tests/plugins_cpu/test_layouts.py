"""The n16 layout keeps every bit of the checkpoint and is what its docstring says."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from castiron.models.schemes import SCHEMES, row_bytes, schemes_for
from castiron.plugins_cpu import layouts
from castiron.plugins_cpu.layouts import pack, packed_bytes, unpack


def random_bytes(scheme: str, n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, row_bytes(scheme, k)), np.uint8)


def ks_of(scheme: str) -> tuple[int, ...]:
    block = SCHEMES[scheme].block_size
    return (block, 3 * block, 8 * block) if block > 1 else (1, 2, 31, 64)


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100])
def test_unpack_returns_the_packed_bits(scheme: str, n: int) -> None:
    for k in ks_of(scheme):
        rows = random_bytes(scheme, n, k)
        rows.flags.writeable = False
        packed = pack(scheme, rows, k)
        packed.flags.writeable = False
        assert packed.dtype == np.uint8 and packed.shape == (packed_bytes(scheme, n, k),)
        np.testing.assert_array_equal(unpack(scheme, packed, n, k), rows)


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_packs_of_panel_aligned_slices_concatenate_to_the_pack_of_the_whole(scheme: str) -> None:
    k = ks_of(scheme)[1]
    rows = random_bytes(scheme, 70, k)
    parts = [pack(scheme, rows[start:stop], k) for start, stop in ((0, 16), (16, 64), (64, 70))]
    np.testing.assert_array_equal(np.concatenate(parts), pack(scheme, rows, k))


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_weights_larger_than_a_strip_round_trip(scheme: str) -> None:
    k = 2048
    n = (1 << 20) // row_bytes(scheme, k) + 3
    rows = random_bytes(scheme, n, k)
    np.testing.assert_array_equal(unpack(scheme, pack(scheme, rows, k), n, k), rows)


@pytest.mark.parametrize("scheme", schemes_for("cpu", quantized=True))
def test_a_quantized_weight_takes_the_checkpoints_bytes(scheme: str) -> None:
    assert packed_bytes(scheme, 32, 512) == 32 * row_bytes(scheme, 512)
    assert packed_bytes(scheme, 33, 512) == 48 * row_bytes(scheme, 512)


def test_dense_panels_run_over_k_first_and_bf16_in_pairs() -> None:
    values = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    f32 = pack("f32", values.view(np.uint8), 3).view(np.float32).reshape(3, 16)
    np.testing.assert_array_equal(f32, values.T)
    f16 = pack("f16", values.astype(np.float16).view(np.uint8), 3).view(np.float16).reshape(3, 16)
    np.testing.assert_array_equal(f16, values.T)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    pairs = pack("bf16", bits.view(np.uint8), 3).view(np.uint16).reshape(2, 16, 2)
    np.testing.assert_array_equal(pairs[0], bits[:, :2])
    np.testing.assert_array_equal(pairs[1, :, 0], bits[:, 2])
    assert not pairs[1, :, 1].any()


def test_a_4_bit_byte_holds_the_codes_of_k_and_k_plus_16() -> None:
    rows = np.zeros((16, 20), np.uint8)
    rows[5, 4 + 6] = 0x93  # q4_1: element 6 is 3, element 22 is 9
    planes = pack("q4_1", rows, 32)[64:].reshape(4, 16, 4)
    assert planes[1, 5, 2] == 0x93
    assert np.count_nonzero(planes) == 1


@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_rows_beyond_n_are_packed_as_zeros(scheme: str) -> None:
    k = ks_of(scheme)[1]
    packed = pack(scheme, random_bytes(scheme, 3, k), k)
    assert not unpack(scheme, packed, 16, k)[3:].any()


def test_wrong_shapes_are_refused_with_what_was_expected() -> None:
    with pytest.raises(ValueError, match="33 elements, expected a positive multiple of 32"):
        packed_bytes("q4_0", 16, 33)
    with pytest.raises(ValueError, match=r"expected uint8 \[r, 20\]"):
        pack("q4_1", np.zeros((2, 18), np.uint8), 32)
    with pytest.raises(ValueError, match="expected uint8 of 320"):
        unpack("q4_1", np.zeros(319, np.uint8), 16, 32)


def test_packed_bytes_are_those_of_the_named_layout() -> None:
    """Engines hold packed weights: bytes that change need a new LAYOUT, then new hashes here."""
    assert layouts.LAYOUT == "n16"
    header = Path(layouts.__file__).with_name("abi.h").read_text()
    assert f'kWeightLayout[] = "{layouts.LAYOUT}"' in header
    digest = hashlib.sha256()
    for scheme in schemes_for("cpu"):
        digest.update(pack(scheme, random_bytes(scheme, 17, 512), 512))
    assert digest.hexdigest() == "441d57fe797bf7b3f92ad64145638f4ccab1f140106f3c4fb86dd63bb7c275bb"
