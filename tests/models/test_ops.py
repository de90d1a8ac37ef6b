"""The ops' plain references against their definitions, written out another way."""

import pytest
import torch

from castiron.models import (
    lowered_ops,
    ops,
    sampling_ops,  # noqa: F401  registers its ops
)
from castiron.models.lowered_ops import dequantize_q8
from castiron.models.ops import REFERENCES, SHAPE_RULES, STATES

torch.set_num_threads(1)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_negative_token_id_reads_the_row_it_names() -> None:
    table = random(9, 4)
    result = ops.embedding(ints(3, -1, -3), ints(5, 0, 8), table)
    assert torch.equal(result, table[[3, 5, 8]])


def test_kv_write_skips_minus_one_and_leaves_the_old_version() -> None:
    cache = random(3, 2, 2, 4, 6)
    before = cache.clone()
    k, v = random(3, 2, 6, seed=1), random(3, 2, 6, seed=2)
    written = ops.kv_write(cache, k, v, torch.tensor([9, -1, 0]))
    assert torch.equal(cache, before)
    expected = before.clone()
    expected[2, 0, :, 1], expected[2, 1, :, 1] = k[0], v[0]
    expected[0, 0, :, 0], expected[0, 1, :, 0] = k[2], v[2]
    assert torch.equal(written, expected)


def test_a_float16_cache_holds_rounded_values() -> None:
    cache = torch.zeros(1, 2, 1, 4, 2, dtype=torch.float16)
    k = torch.full((1, 1, 2), 1 + 2**-13)
    assert ops.kv_write(cache, k, k, torch.tensor([1]))[0, 0, 0, 1, 0] == 1


def test_paged_attention_is_softmax_over_each_tokens_own_past() -> None:
    heads, kv_heads, dim, block_size = 4, 2, 8, 4
    lengths, queries = [6, 3, 9], [2, 3, 1]
    tables = torch.tensor([[5, 1, -1], [0, -1, -1], [3, 2, 6]], dtype=torch.int32)
    keys = [random(n, kv_heads, dim, seed=n) for n in lengths]
    values = [random(n, kv_heads, dim, seed=n + 50) for n in lengths]
    cache = torch.full((7, 2, kv_heads, block_size, dim), torch.nan)
    for i, n in enumerate(lengths):
        for position in range(n):
            block = int(tables[i, position // block_size])
            cache[block, 0, :, position % block_size] = keys[i][position]
            cache[block, 1, :, position % block_size] = values[i][position]
    q = random(sum(queries), heads, dim, seed=9)
    result = ops.paged_attention(q, cache, tables, ints(*lengths), ints(0, 2, 5, 6), 0.3)
    token = 0
    for i, (length, count) in enumerate(zip(lengths, queries, strict=True)):
        for j in range(count):
            past = length - count + j + 1
            for head in range(heads):
                kv = head // 2
                weights = torch.softmax(keys[i][:past, kv] @ q[token, head] * 0.3, dim=0)
                torch.testing.assert_close(result[token, head], weights @ values[i][:past, kv])
            token += 1


def test_apply_rope_turns_pairs_and_leaves_the_rest() -> None:
    x = random(2, 1, 6)
    cos, sin = ops.rope_cos_sin(ints(0, 3), torch.tensor([1.0, 0.1]), 1.0)
    turned = ops.apply_rope(x, cos, sin)
    assert torch.equal(turned[0], x[0]) and torch.equal(turned[1, :, 4:], x[1, :, 4:])
    pairs = torch.complex(x[1, 0, :2], x[1, 0, 2:4]) * torch.polar(torch.ones(2), torch.tensor([3.0, 0.3]))
    torch.testing.assert_close(turned[1, 0, :4], torch.cat((pairs.real, pairs.imag)))


def test_quantize_q8_rounds_half_to_even_within_half_a_step() -> None:
    x = random(3, 64) * 3
    x[0, :32] = 0
    x[1, :7] = torch.tensor([127.0 * 256, 0.5, 1.5, 127, 128, -128, 200])
    x[1, 7:32] = 0
    q, scale, sums = lowered_ops.quantize_q8(x)
    assert q.shape == (3, 2, 64) and q.dtype == torch.int8 and q.min() >= -127
    assert q[0, :, :32].eq(0).all() and scale[0, 0] == 0
    assert q[1, 0, :7].tolist() == [
        127,
        0,
        0,
        0,
        1,
        0,
        1,
    ]  # high digits; 128 = 256 - 128, whose low becomes -127
    assert q[1, 1, :7].tolist() == [0, 0, 2, 127, -127, -127, -56]
    step = scale.repeat_interleave(32, dim=1)
    allowed = torch.where(q[:, 1] == -127, 1.5001, 0.5001) * step
    assert ((dequantize_q8(q, scale) - x).abs() <= allowed).all()
    torch.testing.assert_close(sums, dequantize_q8(q, scale).reshape(3, 4, 16).sum(-1))


def test_fused_ops_are_their_parts() -> None:
    x, residual, weight = random(3, 64), random(3, 64, seed=1), random(64, seed=2)
    y, total = lowered_ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual) and torch.equal(y, ops.rms_norm(total, weight, 1e-5))
    *quantized, total = lowered_ops.add_rms_norm_q8(x, residual, weight, 1e-5)
    for ours, expected in zip(quantized, lowered_ops.quantize_q8(y), strict=True):
        assert torch.equal(ours, expected)
    gated = lowered_ops.silu_mul(x, residual)
    assert torch.equal(gated, ops.silu(x) * residual)
    for ours, expected in zip(
        lowered_ops.silu_mul_q8(x, residual), lowered_ops.quantize_q8(gated), strict=True
    ):
        assert torch.equal(ours, expected)
    q, scale, sums = lowered_ops.quantize_q8(x)
    matrix, bias = random(5, 64, seed=3), random(5, seed=4)
    torch.testing.assert_close(
        lowered_ops.linear_q8(q, scale, sums, matrix, bias), dequantize_q8(q, scale) @ matrix.T + bias
    )


def test_shape_rules_refuse_what_does_not_fit() -> None:
    meta = torch.device("meta")
    cases = [
        ("linear", (torch.empty(3, 8, device=meta), torch.empty(5, 7, device=meta))),
        ("rms_norm", (torch.empty(3, 8, device=meta), torch.empty(9, device=meta), 1e-5)),
        ("quantize_q8", (torch.empty(3, 40, device=meta),)),
        ("silu_mul", (torch.empty(3, 8, device=meta), torch.empty(3, 9, device=meta))),
    ]
    for name, arguments in cases:
        with pytest.raises(AssertionError):
            SHAPE_RULES[name](*arguments)


def test_every_op_has_a_reference_and_a_shape_rule() -> None:
    assert REFERENCES.keys() == SHAPE_RULES.keys()
    assert STATES.keys() <= REFERENCES.keys()
