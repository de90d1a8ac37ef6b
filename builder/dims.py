"""A dimension as a record: an integer, or coefficient * symbol + offset. Never compared as text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

_TERM = re.compile(r"^(?:(\d+)\s*\*\s*)?([A-Za-z_]\w*)(?:\s*([+-])\s*(\d+))?$")
_REVERSED = re.compile(r"^(-?\d+)\s*\+\s*(.+)$")


@dataclass(frozen=True)
class Affine:
    """coefficient * symbol + offset, coefficient >= 1; symbol is one of the graph's live counts."""

    symbol: str
    coefficient: int = 1
    offset: int = 0


Dim = int | Affine


@cache
def parse_dim(text: int | str) -> Dim:
    """The dimension an ONNX dim value or dim text states. Raises ValueError for any other expression."""
    if isinstance(text, int):
        return text
    stripped = text.strip()
    if re.fullmatch(r"\d+", stripped):
        return int(stripped)
    reversed_match = _REVERSED.match(stripped)
    if reversed_match:  # "1 + num_seqs"
        return add_dim(parse_dim(reversed_match[2]), int(reversed_match[1]))
    match = _TERM.match(stripped)
    if not match:
        raise ValueError(f"dimension {text!r} is not an integer or coefficient * symbol + offset")
    coefficient, symbol, sign, offset = match.groups()
    return _affine(symbol, int(coefficient or 1), int(f"{sign or '+'}{offset or 0}"))


def format_dim(dim: Dim) -> int | str:
    """What ONNX stores: the integer, or text such as "2*num_seqs+1" that parse_dim reads back."""
    if isinstance(dim, int):
        return dim
    text = dim.symbol if dim.coefficient == 1 else f"{dim.coefficient}*{dim.symbol}"
    return f"{text}{dim.offset:+d}" if dim.offset else text


def add_dim(a: Dim, b: Dim) -> Dim:
    """a + b. Raises ValueError for two different symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a + b
    if isinstance(a, int):
        a, b = b, a
    assert isinstance(a, Affine)
    if isinstance(b, int):
        return _affine(a.symbol, a.coefficient, a.offset + b)
    if a.symbol != b.symbol:
        raise ValueError(f"{format_dim(a)} + {format_dim(b)} has two symbols")
    return _affine(a.symbol, a.coefficient + b.coefficient, a.offset + b.offset)


def multiply_dim(a: Dim, b: Dim) -> Dim:
    """a * b. Raises ValueError for two symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if isinstance(a, int):
        a, b = b, a
    assert isinstance(a, Affine)
    if isinstance(b, Affine):
        raise ValueError(f"{format_dim(a)} * {format_dim(b)} is not linear")
    return _affine(a.symbol, a.coefficient * b, a.offset * b) if b else 0


def divide_dim(a: Dim, b: int) -> Dim:
    """a / b. Raises ValueError if it isn't whole for every value of the symbol."""
    if isinstance(a, int):
        whole = a % b == 0
        result: Dim = a // b
    else:
        whole = a.coefficient % b == 0 and a.offset % b == 0
        result = _affine(a.symbol, a.coefficient // b, a.offset // b) if whole else 0
    if not whole:
        raise ValueError(f"{format_dim(a)} / {b} is not whole")
    return result


def evaluate_dim(dim: Dim, symbols: Mapping[str, int]) -> int:
    """The dimension in numbers. Raises KeyError for a symbol that isn't given."""
    if isinstance(dim, int):
        return dim
    return dim.coefficient * symbols[dim.symbol] + dim.offset


def num_elements(shape: tuple[Dim, ...]) -> Dim:
    """Product of the dimensions. Raises ValueError if two of them have symbols."""
    product: Dim = 1
    for dim in shape:
        product = multiply_dim(product, dim)
    return product


def _affine(symbol: str, coefficient: int, offset: int) -> Affine:
    if coefficient < 1:
        raise ValueError(f"coefficient {coefficient} of {symbol} is not positive")
    return Affine(symbol, coefficient, offset)
