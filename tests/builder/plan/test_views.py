"""Views against numpy's own: the same elements under the same shapes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from castiron.builder.dims import Affine, Dim, evaluate_dim
from castiron.builder.plan.views import (
    Storage,
    View,
    dense_strides,
    flatten_inner,
    is_dense,
    narrow,
    reshape,
    transpose,
    whole,
)
from castiron.runtime.plan_format import MemoryClass

TOKENS = Affine("num_tokens")
SYMBOLS = {"num_tokens": 5}


def storage(*shape: Dim) -> Storage:
    return Storage("x", MemoryClass.ARENA, shape, "f32")


def materialize(view: View) -> np.ndarray:
    """The view's elements, of a storage holding 0, 1, 2, ..."""
    size = int(np.prod([evaluate_dim(dim, SYMBOLS) for dim in view.storage.shape]))
    base = np.arange(size, dtype=np.int64)[view.offset :]
    shape = [evaluate_dim(dim, SYMBOLS) for dim in view.shape]
    return as_strided(base, shape, [stride * base.itemsize for stride in view.strides])


def test_splitting_heads_of_a_merged_projection_needs_no_copy() -> None:
    qkv = whole(storage(TOKENS, 4 * 8 + 2 * 2 * 8))
    k = narrow(qkv, 1, 32, (TOKENS, 16))
    heads = reshape(k, (TOKENS, 2, 8))
    assert heads is not None
    assert (heads.offset, heads.strides) == (32, (64, 8, 1))
    assert is_dense(heads, from_dim=1) and not is_dense(heads)
    expected = np.arange(5 * 64).reshape(5, 64)[:, 32:48].reshape(5, 2, 8)
    assert np.array_equal(materialize(heads), expected)


def test_joining_heads_with_a_gap_needs_a_copy() -> None:
    part = narrow(whole(storage(TOKENS, 4, 8)), 2, 0, (TOKENS, 4, 4))
    assert reshape(part, (TOKENS, 16)) is None
    assert flatten_inner(part) is None


def test_rows_of_a_slice_cannot_be_joined_with_their_columns() -> None:
    part = narrow(whole(storage(TOKENS, 16)), 1, 0, (TOKENS, 8))
    assert reshape(part, (Affine("num_tokens", 8),)) is None


def test_a_live_count_can_move_into_a_product() -> None:
    joined = reshape(whole(storage(TOKENS, 6)), (Affine("num_tokens", 6),))
    assert joined is not None and joined.strides == (1,)


def test_only_the_first_dim_may_be_symbolic() -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        dense_strides((4, TOKENS))


@given(st.data())
def test_any_chain_of_views_shows_the_elements_numpy_shows(data: st.DataObject) -> None:
    view = whole(storage(5, 4, 6))
    expected = np.arange(5 * 4 * 6).reshape(5, 4, 6)
    for _ in range(data.draw(st.integers(1, 5))):
        kind = data.draw(st.sampled_from(["narrow", "transpose", "reshape"]))
        if kind == "narrow":
            axis = data.draw(st.integers(0, expected.ndim - 1))
            start = data.draw(st.integers(0, expected.shape[axis] - 1))
            stop = data.draw(st.integers(start + 1, expected.shape[axis]))
            expected = expected.take(range(start, stop), axis)
            view = narrow(view, axis, start, expected.shape)
        elif kind == "transpose":
            permutation = tuple(data.draw(st.permutations(range(expected.ndim))))
            expected = expected.transpose(permutation)
            view = transpose(view, permutation)
        else:
            shape = data.draw(st.sampled_from(_factorings(expected.size)))
            reshaped = reshape(view, shape)
            if reshaped is None:
                strided = materialize(view)
                assert not np.shares_memory(strided, strided.reshape(shape)), "a view was possible"
                continue
            view, expected = reshaped, expected.reshape(shape)
        assert np.array_equal(materialize(view), expected)
        assert view.offset + view.span_elements(SYMBOLS) <= 5 * 4 * 6


def _factorings(size: int) -> list[tuple[int, ...]]:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    return (
        [(d, size // d) for d in divisors] + [(size,), (1, size, 1)] + [(d, 1, size // d) for d in divisors]
    )
