"""rope_cos_sin and rope_kv_write kernels against the ops' references."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")
from cuda_kernel_caller import NUM_TOKENS, call, poisoned

from castiron.models.lowered_ops import REFERENCES
from castiron.plugins_cuda.attention_specs import SPECS as ALL_SPECS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPECS = {spec.name: spec for spec in ALL_SPECS}
UNTOUCHED = 77.0
SPARE = 5  # rows beyond the live ones


@pytest.mark.parametrize(
    ("tokens", "half"), [(1, 64), pytest.param(3, 20, marks=pytest.mark.sanitize), (300, 32), (129, 8)]
)
def test_cos_sin_of_positions_up_to_a_million(tokens: int, half: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    positions = torch.randint(0, 1_000_000, (tokens + SPARE,), generator=generator, dtype=torch.int32)
    positions[0] = 999_999
    inv_freq = 500_000.0 ** -(torch.arange(half) / half)
    outputs = [torch.full((tokens + SPARE, half), UNTOUCHED, device=DEVICE) for _ in range(2)]
    call(
        SPECS["rope_cos_sin"], num_tokens=tokens, capacities={"max_tokens": tokens + SPARE},
        positions=positions.to(DEVICE), inv_freq=inv_freq.to(DEVICE), cos=outputs[0], sin=outputs[1],
        count=NUM_TOKENS, half=half, scaling=1.25,
    )  # fmt: skip
    angles = (positions[:tokens].float()[:, None] * inv_freq).double()  # rounded to f32 as the reference does
    for output, expected in zip(outputs, (angles.cos(), angles.sin()), strict=True):
        assert (output[tokens:] == UNTOUCHED).all()
        torch.testing.assert_close(output[:tokens].cpu().double(), 1.25 * expected, atol=5e-7, rtol=0)
    for output, expected in zip(
        outputs, REFERENCES["rope_cos_sin"](positions[:tokens], inv_freq, 1.25), strict=True
    ):
        torch.testing.assert_close(output[:tokens].cpu(), expected, atol=1e-6, rtol=0)


def rotate_and_write(
    tokens: int,
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    half: int,
    block_size: int,
    late: tuple[str, ...] = (),
    first_block: int = 0,
) -> None:
    """Queries, keys and values are parts of one row; the cache holds a mark where nothing is written."""
    generator = torch.Generator().manual_seed(tokens)
    widths = [num_heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    row = sum(widths) + 8
    qkv = torch.full((tokens + SPARE, row), torch.nan).bfloat16()
    qkv[:tokens, : sum(widths)] = torch.randn((tokens, sum(widths)), generator=generator).bfloat16()
    angles = torch.rand((tokens + SPARE, half), generator=generator) * 6
    cos, sin = angles.cos(), angles.sin()
    num_blocks = -(-tokens // block_size) + 2
    cache = torch.full((num_blocks, 2, kv_heads, block_size, head_dim), UNTOUCHED, dtype=torch.bfloat16)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[: tokens + SPARE]
    slots[1::7] = -1
    q, k, v = (
        part.reshape(tokens, -1, head_dim).float()
        for part in qkv[:tokens, : sum(widths)].split(widths, dim=1)
    )
    expected_q, expected_cache = REFERENCES["rope_kv_write"](
        q, k, v, cos[:tokens], sin[:tokens], cache.float(), slots[:tokens]
    )
    on_device = qkv.to(DEVICE)
    flat = on_device.view(-1)
    big_cache = torch.empty((first_block + num_blocks, *cache.shape[1:]), dtype=torch.bfloat16, device=DEVICE)
    big_cache[first_block:] = cache.to(DEVICE)
    q_out = poisoned(tokens + SPARE, widths[0] + 16, dtype=torch.bfloat16)
    q_out.fill_(UNTOUCHED)
    call(
        SPECS["rope_kv_write.bf16"], num_tokens=tokens, capacities={"max_tokens": tokens + SPARE}, late=late,
        q=flat, k=flat[widths[0] :], v=flat[widths[0] + widths[1] :], cos=cos.to(DEVICE), sin=sin.to(DEVICE),
        q_out=q_out, cache=big_cache,
        slot_mapping=torch.where(slots < 0, slots, slots + first_block * block_size).to(DEVICE),
        q_stride=row, k_stride=row, v_stride=row, q_out_stride=q_out.stride(0), count=NUM_TOKENS,
        num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, half=half, block_size=block_size,
    )  # fmt: skip
    q_out = q_out.cpu()
    assert (q_out[tokens:] == UNTOUCHED).all() and (q_out[:, widths[0] :] == UNTOUCHED).all()
    assert_rounded(q_out[:tokens, : widths[0]].reshape(expected_q.shape), expected_q)
    assert_rounded(big_cache[first_block:].cpu(), expected_cache)


def assert_rounded(result: Tensor, expected: Tensor) -> None:
    """`result` is `expected` rounded to bf16, give or take the last bit of its f32 value."""
    torch.testing.assert_close(result.float(), expected, rtol=2**-8 * 1.001, atol=1e-6)


@pytest.mark.parametrize(
    ("tokens", "num_heads", "kv_heads", "head_dim", "half", "block_size"),
    [
        (1, 32, 8, 128, 64, 64),
        pytest.param(2, 9, 3, 64, 32, 16, marks=pytest.mark.sanitize),
        (77, 4, 4, 128, 32, 32),
        (300, 14, 2, 64, 16, 64),
        (33, 3, 1, 256, 128, 128),
        (5, 2, 1, 16, 8, 16),
        (2000, 8, 2, 32, 16, 64),
    ],
)
def test_rotates_queries_and_writes_keys_and_values(
    tokens: int, num_heads: int, kv_heads: int, head_dim: int, half: int, block_size: int
) -> None:
    rotate_and_write(tokens, num_heads, kv_heads, head_dim, half, block_size)


@pytest.mark.parametrize("late", ["q", "cos", "sin"])
def test_inputs_that_arrive_late_are_waited_for(late: str) -> None:
    rotate_and_write(40, 8, 2, 128, 64, 64, late=(late,))


def test_slots_beyond_2_to_the_31_elements() -> None:
    block_elements = 2 * 8 * 64 * 128
    rotate_and_write(70, 8, 8, 128, 64, 64, first_block=(1 << 31) // block_elements + 1)
