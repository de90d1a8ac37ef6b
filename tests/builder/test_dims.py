"""Dimension records: parsed from and written to ONNX dim text, compared as records."""

import pytest

from castiron.builder.dims import (
    Affine,
    Dim,
    add_dim,
    divide_dim,
    evaluate_dim,
    format_dim,
    multiply_dim,
    num_elements,
    parse_dim,
)

T = Affine("num_tokens")


@pytest.mark.parametrize(
    ("text", "dim"),
    [
        (7, 7),
        ("7", 7),
        ("num_tokens", T),
        ("num_seqs+1", Affine("num_seqs", 1, 1)),
        ("num_seqs + 1", Affine("num_seqs", 1, 1)),
        ("1 + num_seqs", Affine("num_seqs", 1, 1)),
        ("2*num_tokens", Affine("num_tokens", 2)),
        ("2 * num_tokens - 3", Affine("num_tokens", 2, -3)),
    ],
)
def test_dims_of_any_spelling_are_equal_records(text: int | str, dim: Dim) -> None:
    assert parse_dim(text) == dim
    assert parse_dim(format_dim(dim)) == dim


@pytest.mark.parametrize("text", ["", "a*b", "2*(n+1)", "n//2", "n*2", "-n", "0*n"])
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_dim(text)


def test_arithmetic_stays_linear_in_one_symbol() -> None:
    assert add_dim(T, add_dim(T, 1)) == Affine("num_tokens", 2, 1)
    assert multiply_dim(3, add_dim(T, 2)) == Affine("num_tokens", 3, 6)
    assert multiply_dim(T, 0) == 0
    assert divide_dim(multiply_dim(T, 6), 3) == Affine("num_tokens", 2)
    assert num_elements((T, 4, 8)) == Affine("num_tokens", 32)
    assert evaluate_dim(Affine("num_tokens", 3, -1), {"num_tokens": 5}) == 14
    for bad in (
        lambda: add_dim(T, Affine("num_seqs")),
        lambda: multiply_dim(T, T),
        lambda: divide_dim(T, 2),
        lambda: divide_dim(7, 2),
    ):
        with pytest.raises(ValueError):
            bad()
    with pytest.raises(KeyError):
        evaluate_dim(T, {"num_seqs": 1})
