"""Made-up weights: finite, of the right spread, the same in any slices, whatever the scheme."""

import numpy as np
import pytest

from castiron.builder.dummy_tensors import dummy_values, made_up
from castiron.builder.parameters import Parameter, Part
from castiron.builder.weight_values import made_up_values
from castiron.models.schemes import schemes_for
from castiron.runtime.dummy_weights import (
    DummyField,
    DummyTensor,
    decode_dummy_tensors,
    dummy_chunks,
    dummy_units,
    encode_dummy_tensors,
    fill_dummy_weights,
    generator_key,
)


def dummy_tensor(parameter: Parameter, weights_offset: int) -> DummyTensor:
    """The one run of units that a parameter is made of."""
    (tensor,) = made_up(parameter, weights_offset)
    return tensor


STORED = [("n16", scheme) for scheme in schemes_for("cpu")] + [
    ("m64", scheme) for scheme in schemes_for("cuda")
]


def matrix(
    scheme: str,
    rows: int = 40,
    columns: int = 1024,
    name: str = "linear.weight",
    layout: str = "n16",
) -> Parameter:
    return Parameter(name, (rows, columns), scheme, (Part(name, 0, rows),), scheme, layout=layout)


@pytest.mark.parametrize(("layout", "scheme"), STORED)
def test_values_are_finite_with_mean_0_and_deviation_one_over_root_fan_in(layout: str, scheme: str) -> None:
    values = dummy_values(matrix(scheme, rows=160, layout=layout))
    assert values.shape == (160, 1024)
    assert np.isfinite(values).all()
    assert values.std() * 32 == pytest.approx(1, rel=0.06)
    assert abs(values.mean()) * 32 < 0.12  # signed codes (-8 to 7) have a mean of half a step
    assert len(np.unique(values[:, 0])) > 20  # rows differ


@pytest.mark.parametrize(("layout", "scheme"), STORED)
def test_any_slice_gives_the_bytes_of_the_whole(layout: str, scheme: str) -> None:
    for tensor in made_up(matrix(scheme, layout=layout), 0):
        whole = np.concatenate(list(dummy_chunks(tensor)))
        assert whole.size == tensor.num_bytes
        unit = tensor.unit_bytes
        for first, count in ((0, 1), (1, 2), (2, 2), (tensor.num_bytes // unit - 1, 1)):
            expected = whole[first * unit : (first + count) * unit]
            assert np.array_equal(dummy_units(tensor, first, count), expected)


def test_tensors_of_different_names_differ_and_the_same_name_repeats() -> None:
    one, again, other = (dummy_values(matrix("bf16", name=name)) for name in ("a", "a", "b"))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_norm_weights_are_near_one_and_biases_near_zero() -> None:
    norm = dummy_values(Parameter("final_norm.weight", (5000,), "f32", (Part("n", 0, 5000),), layout="n16"))
    bias = dummy_values(Parameter("q.bias", (5000,), "f32", (Part("b", 0, 5000),), layout="n16"))
    assert 0.7 <= norm.min() < 0.75 and 1.25 < norm.max() <= 1.3
    assert np.abs(bias).max() <= 0.1 and np.abs(bias).mean() > 0.04


def test_the_list_in_an_engine_reads_back_and_fills_each_tensor_in_its_place() -> None:
    tensors = [
        *made_up(matrix("q4_1", name="a"), 256),
        *made_up(matrix("f32", name="b"), 1 << 20),
        *made_up(matrix("fp8", name="c", layout="m64"), 2 << 20),
    ]
    end = tensors[-1].weights_offset + tensors[-1].num_bytes
    assert list(decode_dummy_tensors(encode_dummy_tensors(tensors), end)) == tensors
    weights = np.zeros(end, np.uint8)
    fill_dummy_weights(tensors, weights)
    for tensor in tensors:
        expected = np.concatenate(list(dummy_chunks(tensor)))
        assert np.array_equal(weights[tensor.weights_offset :][: tensor.num_bytes], expected)
    assert not weights[:256].any()


def test_made_up_zero_points_are_those_of_4_bits() -> None:
    parameter = matrix("int4_g64z", layout="m64")
    (tensor,) = made_up(parameter, 0)
    packed = np.concatenate(list(dummy_chunks(tensor))).reshape(-1, 128 + 64 + 2048)
    assert sorted(np.unique(packed[:, 128:192])) == list(range(16))


def test_a_tensor_that_ends_inside_a_unit_is_a_prefix_of_a_longer_one() -> None:
    whole, cut = (DummyTensor("t", 0, size, (DummyField(32, "f32", amplitude=1.0),)) for size in (4096, 1332))
    long, short = (np.concatenate(list(dummy_chunks(tensor))) for tensor in (whole, cut))
    assert short.size == 1332 and np.array_equal(long[:1332], short)


def test_made_up_e4m3_codes_are_finite_and_take_every_other_value() -> None:
    tensor = DummyTensor("t", 0, 1 << 16, (DummyField(32, "e4m3"),))
    codes = np.unique(np.concatenate(list(dummy_chunks(tensor))))
    assert np.array_equal(codes, [code for code in range(256) if code not in (0x7F, 0xFF)])


def test_made_up_float8_weights_have_row_scales_after_their_codes() -> None:
    codes, scales = made_up(matrix("fp8", rows=70, columns=1040, layout="m64"), 0)
    assert (codes.num_bytes, scales.weights_offset, scales.num_bytes) == (2 * 9 * 8192, 2 * 9 * 8192, 128 * 4)
    rows = np.concatenate(list(dummy_chunks(scales))).view(np.float32)
    assert (rows > 0).all() and len(np.unique(rows)) > 100


def test_multiples_are_those_of_the_stored_scales() -> None:
    tensor = dummy_tensor(matrix("q4_1", layout="m64"), 0)
    header = np.concatenate(list(dummy_chunks(tensor))).reshape(-1, tensor.unit_bytes)[:, :512].view("<f2")
    scales, minimums = header[:, :128].astype(np.float32), header[:, 128:]
    assert len(np.unique(scales)) > 100
    assert np.array_equal((scales * np.float32(-7.5)).astype("<f2"), minimums)


def test_random_bytes_are_philox_4x64_of_the_counter_from_1_on() -> None:
    """Against the algorithm in whole numbers; the GPU's kernel computes the same."""
    key = generator_key("t")
    tensor = DummyTensor("t", 0, 96, (DummyField(32, "bits"),))
    made = np.concatenate(list(dummy_chunks(tensor))).view("<u8").tolist()
    assert made == [word for block in range(3) for word in philox4x64(block + 1, key)]


def philox4x64(counter: int, key: int) -> list[int]:
    """10 rounds, as in section 3.3 of the paper."""
    low = 2**64 - 1
    c, k = [counter & low, counter >> 64, 0, 0], [key & low, key >> 64]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [b >> 64 ^ c[1] ^ k[0], b & low, a >> 64 ^ c[3] ^ k[1], a & low]
        k = [k[0] + 0x9E3779B97F4A7C15 & low, k[1] + 0xBB67AE8584CAA73B & low]
    return c


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((), "has 0 fields, expected 1 to 4"),
        ((DummyField(32, "bits"),) * 5, "has 5 fields"),
        ((DummyField(32, "bf8"),), "of kind 'bf8', expected one of bits"),
        ((DummyField(16, "bits"),), "a field of 16 bytes, no multiple of 32"),
        ((DummyField(-32, "bits"),), "a field of -32 bytes"),
        ((DummyField(1 << 17, "bits"),), "units of 131072 bytes"),
        ((DummyField(32, "bits", mask=256),), "a mask of 256"),
        ((DummyField(32, "f16_multiple", distance=32),), "32 bytes before byte 0"),
        ((DummyField(32, "f16"), DummyField(32, "f16_multiple", distance=0)), "0 bytes before byte 32"),
        ((DummyField(32, "f32", mean=1e39),), "finite float32"),
    ],
)
def test_fields_that_can_not_be_made_are_refused(fields: tuple[DummyField, ...], message: str) -> None:
    data = encode_dummy_tensors([DummyTensor("t", 0, 64, fields)])
    with pytest.raises(ValueError, match=message):
        decode_dummy_tensors(data, 1 << 20)


def test_a_tensor_that_starts_inside_a_random_block_is_refused() -> None:
    data = encode_dummy_tensors([DummyTensor("t", 8, 64, (DummyField(32, "bits"),))])
    with pytest.raises(ValueError, match="starts at 8, no multiple of 32"):
        decode_dummy_tensors(data, 1 << 20)


def test_a_list_that_reaches_outside_the_weights_is_refused() -> None:
    data = encode_dummy_tensors(made_up(matrix("q4_1"), 256))
    with pytest.raises(ValueError, match="lies outside the weights"):
        decode_dummy_tensors(data, 256)


def test_parameters_that_were_merged_are_cut_out_of_the_merged_one() -> None:
    q, k = Part("q", 0, 32), Part("k", 0, 16)
    merged = Parameter("qk.weight", (48, 64), "q8_0", (q, k), "q8_0", layout="n16")
    load = made_up_values([merged])
    values = dummy_values(merged)
    assert np.array_equal(
        load(Parameter("q.weight", (32, 64), "q8_0", (q,), "q8_0", layout="n16")).numpy(), values[:32]
    )
    assert np.array_equal(
        load(Parameter("k.weight", (16, 64), "q8_0", (k,), "q8_0", layout="n16")).numpy(), values[32:]
    )
