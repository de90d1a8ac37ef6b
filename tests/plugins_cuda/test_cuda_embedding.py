"""embedding.*: rows of the packed table, exactly the checkpoint's values."""

import numpy as np
import pytest
import torch
from checkpoint_blocks import decode_rows, random_rows

from castiron.models.ops import REFERENCES
from castiron.models.schemes import SCHEMES
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, pack, packed_bytes
from castiron.plugins_cuda.linear_few_specs import SPECS

pytest.importorskip("cuda.bindings")
from cuda_kernel_caller import NUM_TOKENS, call, poisoned

pytestmark = pytest.mark.gpu

BY_SCHEME = {spec.scheme: spec for spec in SPECS if spec.op == "embedding"}


def embed(
    scheme: str,
    table: torch.Tensor,
    ids: list[int],
    last: list[int],
    vocab: int,
    dim: int,
    pad: int = 4,
    late: tuple[str, ...] = ("last_token",),
) -> torch.Tensor:
    """y [len(ids), dim]; checks that nothing beyond it is written."""
    capacity = len(ids) + 3
    y = poisoned(capacity, dim + pad, dtype=torch.float32)
    token_ids = torch.full((capacity,), -(2**31), dtype=torch.int32, device="cuda")
    token_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    call(
        BY_SCHEME[scheme], num_tokens=len(ids), capacities={"max_tokens": capacity}, late=late, token_ids=token_ids,
        last_token=torch.tensor(last, dtype=torch.int32, device="cuda"), table=table, y=y, y_stride=dim + pad,
        count=NUM_TOKENS, vocab=vocab, dim=dim, max_rows=len(last),
    )  # fmt: skip
    bits = y.view(torch.int32)
    assert (bits[len(ids) :] == -1).all() and (bits[:, dim:] == -1).all()
    return y[: len(ids), :dim]


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
def test_rows_equal_the_checkpoints_and_nothing_else_is_written(scheme: str) -> None:
    block = SCHEMES[scheme].block_size
    for vocab, dim, pad in ((1, block, 4), (100, 3 * block, 3), (200, 768 if block > 1 else 577, 0)):
        rows = random_rows(scheme, vocab, dim, np.random.default_rng(0))
        ids = [0, vocab - 1, -2, vocab // 2, -1, vocab // 3]
        last = [vocab - 1, vocab // 3]
        y = embed(scheme, torch.from_numpy(pack(scheme, rows, dim)).cuda(), ids, last, vocab, dim, pad)
        expected = REFERENCES["embedding"](
            torch.tensor(ids), torch.tensor(last), torch.from_numpy(decode_rows(scheme, rows))
        )
        assert torch.equal(y.cpu(), expected)


@pytest.mark.sanitize
def test_ids_outside_the_vocabulary_and_rows_beyond_max_rows_are_clamped() -> None:
    rows = random_rows("q4_1", 70, 64, np.random.default_rng(0))
    table = torch.from_numpy(pack("q4_1", rows, 64)).cuda()
    ids = [70, 2**31 - 1, -1, -2, -3, -(2**31)]
    y = embed("q4_1", table, ids, [-5, 2**31 - 1], 70, 64)
    expected = decode_rows("q4_1", rows)[[69, 69, 0, 69, 69, 69]]
    assert torch.equal(y.cpu(), torch.from_numpy(expected))


@pytest.mark.sanitize
def test_no_sampled_ids_at_all_read_nothing() -> None:
    rows = random_rows("bf16", 3, 64, np.random.default_rng(0))
    table = torch.from_numpy(pack("bf16", rows, 64)).cuda()
    y = embed("bf16", table, [1, -1], [], 3, 64, late=())
    assert torch.equal(y.cpu(), torch.from_numpy(decode_rows("bf16", rows)[[1, 0]]))


@pytest.mark.parametrize("scheme", ["bf16", "q4_1"])
def test_tables_beyond_2_to_the_31_elements_are_addressed(scheme: str) -> None:
    vocab, dim = (1 << 19) + 64, 4160
    assert vocab * dim > 2**31
    rows = random_rows(scheme, 64, dim, np.random.default_rng(0))
    table = torch.zeros(packed_bytes(scheme, vocab, dim), dtype=torch.uint8, device="cuda")
    table[-packed_bytes(scheme, 64, dim) :] = torch.from_numpy(pack(scheme, rows, dim)).cuda()
    y = embed(scheme, table, [vocab - 1, 0], [0], vocab, dim)
    assert torch.equal(y[0].cpu(), torch.from_numpy(decode_rows(scheme, rows)[63]))
    assert not y[1].any()
