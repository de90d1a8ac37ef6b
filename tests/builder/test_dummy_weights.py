"""Made-up weights: finite, of the right spread, the same in any slices, whatever the scheme."""

import numpy as np
import pytest

from castiron.builder.dummy_tensors import dummy_values, parameter_tensors
from castiron.builder.parameters import Parameter, Part
from castiron.builder.weight_values import made_up_values
from castiron.models.schemes import schemes_for
from castiron.runtime.dummy_weights import (
    decode_dummy_tensors,
    dummy_chunks,
    dummy_units,
    encode_dummy_tensors,
    fill_dummy_weights,
    unit_bytes,
)

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
    for tensor in parameter_tensors(matrix(scheme, layout=layout), 0):
        whole = np.concatenate(list(dummy_chunks(tensor)))
        assert whole.size == tensor.num_bytes
        unit = unit_bytes(tensor)
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
        *parameter_tensors(matrix("q4_1", name="a"), 256),
        *parameter_tensors(matrix("f32", name="b"), 1 << 20),
        *parameter_tensors(matrix("fp8", name="c", layout="m64"), 2 << 20),
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
    (tensor,) = parameter_tensors(parameter, 0)
    packed = np.concatenate(list(dummy_chunks(tensor))).reshape(-1, 128 + 64 + 2048)
    assert sorted(np.unique(packed[:, 128:192])) == list(range(16))


def test_made_up_float8_codes_are_all_the_finite_ones_and_row_scales_follow_them() -> None:
    parameter = matrix("fp8", rows=70, columns=1040, layout="m64")
    codes, scales = parameter_tensors(parameter, 0)
    assert (codes.num_bytes, scales.weights_offset, scales.num_bytes) == (2 * 9 * 8192, 2 * 9 * 8192, 128 * 4)
    whole = np.concatenate(list(dummy_chunks(codes)))
    assert np.array_equal(dummy_units(codes, 37, 50), whole[37:87])
    found = set(np.unique(whole))
    assert found == set(range(256)) - {0x7F, 0xFF}
    rows = np.concatenate(list(dummy_chunks(scales))).view(np.float32)
    assert (rows > 0).all() and len(np.unique(rows)) > 100


def test_unknown_scale_types_are_refused() -> None:
    data = encode_dummy_tensors(parameter_tensors(matrix("int4_g32", layout="m64"), 0))
    with pytest.raises(ValueError, match="has scales of 'bf8'"):
        decode_dummy_tensors(data.replace(b'"scale_element":"bf16"', b'"scale_element":"bf8"'), 1 << 20)


def test_a_list_that_reaches_outside_the_weights_is_refused() -> None:
    data = encode_dummy_tensors(parameter_tensors(matrix("q4_1"), 256))
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
