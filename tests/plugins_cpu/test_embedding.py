"""embedding.*: a row of the table, exactly as gguf dequantizes it."""

import numpy as np
import pytest
from kernel_caller import NUM_TOKENS, call
from quantized_weights import dequantize, random_rows

from castiron.models.schemes import SCHEMES, schemes_for
from castiron.plugins_cpu.layouts import pack, packed_bytes
from castiron.runtime.devices import kernel_library

LEVELS = [level for level in kernel_library.LEVELS if kernel_library.supports(level)]


def embed(
    scheme: str, table: np.ndarray, ids: list[int], last: list[int], vocab: int, dim: int, **options: object
) -> np.ndarray:
    """Rows of y [len(ids) + 1, dim + 3], poisoned beforehand; the last row isn't live."""
    y = np.full((len(ids) + 1, dim + 3), np.nan, np.float32)
    call(
        f"embedding.{scheme}", token_ids=np.array([*ids, 0], np.int32), last_token=np.array(last, np.int32),
        table=table, y=y, y_stride=dim + 3, vocab=vocab, dim=dim, max_rows=len(last), count=NUM_TOKENS,
        num_tokens=len(ids),
        **options,
    )  # fmt: skip
    return y


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scheme", schemes_for("cpu"))
def test_rows_equal_ggufs_and_nothing_else_is_written(scheme: str, level: str) -> None:
    rng = np.random.default_rng(0)
    block = SCHEMES[scheme].block_size
    for vocab, dim in ((1, block), (33, 3 * block), (100, 768 if block > 1 else 31)):
        rows = random_rows(scheme, vocab, dim, rng)
        ids = [0, vocab - 1, -2, vocab // 2, -1]
        last = [vocab - 1, vocab // 3]
        expected = dequantize(scheme, rows)[[0, vocab - 1, last[1], vocab // 2, last[0]]]
        for threads in (1, 3):
            y = embed(scheme, pack(scheme, rows, dim), ids, last, vocab, dim, level=level, threads=threads)
            np.testing.assert_array_equal(y[:5, :dim], expected)
            assert np.isnan(y[:, dim:]).all() and np.isnan(y[5]).all()


def test_an_id_outside_the_vocabulary_gives_zeros() -> None:
    rows = random_rows("q4_1", 16, 32, np.random.default_rng(0))
    y = embed("q4_1", pack("q4_1", rows, 32), [16, -1, 2**31 - 1], [-5], 16, 32)
    assert not y[:3, :32].any()


def test_an_id_that_stands_for_no_row_gives_zeros() -> None:
    rows = random_rows("q4_1", 16, 32, np.random.default_rng(0))
    y = embed("q4_1", pack("q4_1", rows, 32), [-1, -2, -3, -(2**31)], [3, 5], 16, 32)
    np.testing.assert_array_equal(y[:2, :32], dequantize("q4_1", rows)[[3, 5]])
    assert not y[2:4, :32].any()


def test_tables_beyond_2_to_the_31_elements_are_addressed() -> None:
    vocab, dim = (1 << 22) + 16, 512
    table = np.zeros(packed_bytes("q4_1", vocab, dim), np.uint8)  # untouched pages take no memory
    rows = random_rows("q4_1", 16, dim, np.random.default_rng(0))
    table[-packed_bytes("q4_1", 16, dim) :] = pack("q4_1", rows, dim)
    y = embed("q4_1", table, [vocab - 1, 0], [0], vocab, dim)
    np.testing.assert_array_equal(y[0, :dim], dequantize("q4_1", rows)[15])
    assert not y[1, :dim].any()
