"""paged_attention kernels against the op's reference in f32: split-KV decode, tiles, and both for mixed steps."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

pytest.importorskip("cuda.bindings")
from cuda_kernel_caller import call, poisoned

from castiron.models.ops import REFERENCES
from castiron.plugins_cuda.attention_specs import SPECS as ALL_SPECS

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
SPECS = {spec.name: spec for spec in ALL_SPECS}
VARIANTS = ("mixed", "wgmma", "tiles")
DECODES = ("decode", "decode.w8")
PAD = 8  # elements of padding after a row
UNTOUCHED = 77.0
Part = tuple[int, int]  # (query tokens, length with them) of a sequence


@dataclass(frozen=True)
class Heads:
    num_heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 64
    scale: float = 0.0  # 0 = 1 / sqrt(head_dim)

    @property
    def factor(self) -> float:
        return self.scale or self.head_dim**-0.5

    def spec(self, variant: str) -> str:
        kind, _, warps = variant.partition(".")
        return f"paged_attention.bf16.{kind}.d{self.head_dim}" + (f".{warps}" if warps else "")


@dataclass
class Step:
    """One step, as the kernel gets it but on the CPU; arrays have rows to spare that hold garbage."""

    heads: Heads
    parts: list[Part]
    qkv: Tensor  # bf16 [tokens + 2, row]; the queries are its columns PAD .. PAD + heads * head_dim
    cache: Tensor  # bf16 [blocks, 2, kv_heads, block_size, head_dim], NaN where nothing is stored
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor

    @property
    def num_tokens(self) -> int:
        return sum(n for n, _ in self.parts)

    @property
    def queries(self) -> Tensor:
        columns = self.heads.num_heads * self.heads.head_dim
        q = self.qkv[: self.num_tokens, PAD : PAD + columns]
        return q.reshape(self.num_tokens, self.heads.num_heads, self.heads.head_dim)

    def cache_before(self) -> Tensor:
        """The cache before this step's keys and values are written: NaN in their rows."""
        cache = self.cache.clone()
        for i, (num_tokens, length) in enumerate(self.parts):
            for position in range(length - num_tokens, length):
                block = int(self.block_tables[i, position // self.heads.block_size])
                cache[block, :, :, position % self.heads.block_size] = torch.nan
        return cache

    def reference(self) -> Tensor:
        return REFERENCES["paged_attention"](
            self.queries.float(), self.cache, self.block_tables, self.seq_lens[: len(self.parts)],
            self.query_starts, self.heads.factor,
        )  # fmt: skip


def make_step(heads: Heads, parts: list[Part], seed: int = 0, q_size: float = 2.0) -> Step:
    """Random queries, keys and values; blocks are dealt out in random order."""
    generator = torch.Generator().manual_seed(seed)
    size, dim, num_seqs = heads.block_size, heads.head_dim, len(parts)
    needed = [-(-length // size) for _, length in parts]
    cache = torch.full((sum(needed) + 3, 2, heads.kv_heads, size, dim), torch.nan, dtype=torch.bfloat16)
    free = torch.randperm(len(cache), generator=generator).int()
    block_tables = torch.full((num_seqs + 3, max(needed) + 2), -1, dtype=torch.int32)
    taken = 0
    for i, (_, length) in enumerate(parts):
        blocks = free[taken : taken + needed[i]]
        taken += needed[i]
        block_tables[i, : needed[i]] = blocks
        stored = torch.full((needed[i] * size, 2, heads.kv_heads, dim), torch.nan, dtype=torch.bfloat16)
        stored[:length] = torch.randn((length, 2, heads.kv_heads, dim), generator=generator).bfloat16()
        cache[blocks.long()] = stored.reshape(needed[i], size, 2, heads.kv_heads, dim).permute(0, 2, 3, 1, 4)
    num_tokens = sum(n for n, _ in parts)
    row = (heads.num_heads + 2 * heads.kv_heads) * dim + 2 * PAD
    qkv = torch.full((num_tokens + 2, row), torch.nan, dtype=torch.bfloat16)
    columns = heads.num_heads * dim
    q = torch.randn((num_tokens, columns), generator=generator) * q_size
    qkv[:num_tokens, PAD : PAD + columns] = q.bfloat16()
    starts = [0]
    for n, _ in parts:
        starts.append(starts[-1] + n)
    seq_lens = torch.tensor([*(length for _, length in parts), -5, 1 << 30, 7], dtype=torch.int32)
    query_starts = torch.tensor([*starts, -7, 1 << 30, 3], dtype=torch.int32)
    return Step(heads, parts, qkv, cache, block_tables, seq_lens, query_starts)


def attend(step: Step, variant: str, *, spare: int = 3, late: tuple[str, ...] = ()) -> Tensor:
    """The kernel's y bf16 [tokens, heads, head_dim], launched for `spare` more tokens and sequences."""
    heads = step.heads
    columns = heads.num_heads * heads.head_dim
    y = poisoned(step.num_tokens + 2, columns + PAD, dtype=torch.bfloat16)
    y.fill_(UNTOUCHED)
    qkv = step.qkv.to(DEVICE)
    q = qkv.view(-1)[PAD:]  # contiguous from the first query on
    call(
        SPECS[heads.spec(variant)],
        num_tokens=step.num_tokens,
        num_seqs=len(step.parts),
        capacities={
            "max_tokens": step.num_tokens + spare,
            "max_seqs": len(step.parts) + spare,
            "max_query_len": max(n for n, _ in step.parts),
        },
        late=late,
        early={"cache": step.cache_before()} if "cache" in late else None,
        q=q,
        cache=step.cache.to(DEVICE),
        block_tables=step.block_tables.to(DEVICE),
        seq_lens=step.seq_lens.to(DEVICE),
        query_starts=step.query_starts.to(DEVICE),
        y=y,
        q_stride=qkv.stride(0),
        y_stride=y.stride(0),
        num_heads=heads.num_heads,
        kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        block_size=heads.block_size,
        table_width=step.block_tables.shape[1],
        scale=heads.factor,
    )
    y = y.cpu()
    assert (y[step.num_tokens :] == UNTOUCHED).all(), "wrote beyond the live rows"
    assert (y[:, columns:] == UNTOUCHED).all(), "wrote beyond a row"
    return (
        y[: step.num_tokens, :columns].reshape(step.num_tokens, heads.num_heads, heads.head_dim).contiguous()
    )


def assert_close(result: Tensor, expected: Tensor) -> None:
    """Error of bf16 weights and a bf16 result."""
    difference = result.float() - expected
    assert not difference.isnan().any(), f"{int(difference.isnan().sum())} NaNs"
    error = float(difference.norm() / expected.norm())
    assert error < 5e-3, f"relative error {error:.2e}"
    # per row: no single row may hide in the norm of all
    rows = difference.flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
    assert rows.max() < 2e-2, f"relative error {float(rows.max()):.2e} in row {int(rows.argmax())}"
    assert difference.abs().max() < 0.02 * max(1.0, float(expected.abs().max()))


def check(heads: Heads, parts: list[Part], variant: str, seed: int = 0, late: tuple[str, ...] = ()) -> None:
    """The kernel's result is the reference's, and the same bits when it runs again."""
    step = make_step(heads, parts, seed)
    result = attend(step, variant, late=late)
    assert_close(result, step.reference())
    assert torch.equal(attend(step, variant).view(torch.int16), result.view(torch.int16))


# Every head_dim, block_size, and group sizes 1, 3, 4, 7, 8 and 16.
SHAPES = (
    Heads(2, 2, 16, 16),
    Heads(6, 2, 32, 32),
    Heads(9, 3, 64, 64),
    Heads(8, 1, 64, 16),
    Heads(8, 2, 128, 64),
    Heads(14, 2, 128, 128, scale=0.25),
    Heads(16, 1, 128, 32),
    Heads(4, 1, 256, 64, scale=0.01),
)


def _name(heads: Heads) -> str:
    return f"{heads.num_heads}q{heads.kv_heads}kv{heads.head_dim}d{heads.block_size}b"


def _runs(heads: Heads, variant: str) -> bool:
    return heads.spec(variant) in SPECS


LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 300)
MIXED = [(heads, variant) for heads in SHAPES for variant in VARIANTS if _runs(heads, variant)]
MIXED_NAMES = [f"{_name(heads)}-{variant}" for heads, variant in MIXED]


def _decodes(*shapes: Heads) -> pytest.MarkDecorator:
    """Parameters heads and variant: every decode kernel of the shapes."""
    pairs = [(heads, variant) for heads in shapes for variant in DECODES if _runs(heads, variant)]
    return pytest.mark.parametrize(
        ("heads", "variant"), pairs, ids=[f"{_name(heads)}-{variant}" for heads, variant in pairs]
    )


@_decodes(*SHAPES)
def test_decode_of_ragged_lengths(heads: Heads, variant: str) -> None:
    check(heads, [(1, length) for length in LENGTHS], variant)
    check(heads, [(1, 4097), (1, 3)], variant)


@pytest.mark.parametrize("heads", SHAPES, ids=_name)
def test_tiles_of_ragged_lengths(heads: Heads) -> None:
    check(heads, [(1, length) for length in (*LENGTHS, 1025)], "tiles")


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_of_one_sequence(length: int) -> None:
    check(Heads(8, 2, 128), [(1, length)], "decode", seed=length)
    check(Heads(8, 2, 128), [(1, length)], "decode.w8", seed=length)
    check(Heads(3, 1, 64, 16), [(1, length)], "decode", seed=length)


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_small_steps(variant: str) -> None:
    check(Heads(4, 2, 128), [(1, 70), (1, 1)] if variant in DECODES else [(1, 70), (20, 33)], variant)


@_decodes(Heads(8, 2, 64), Heads(4, 1, 128, 16))
def test_decode_of_a_long_sequence_is_split_over_all_ctas(heads: Heads, variant: str) -> None:
    check(heads, [(1, 33_000)], variant)
    check(heads, [(1, 5), (1, 33_000), (1, 700)], variant, seed=1)


@_decodes(Heads(9, 3, 64, 16), Heads(8, 2, 128))
def test_decode_of_64_ragged_sequences(heads: Heads, variant: str) -> None:
    lengths = torch.randint(1, 600, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    check(heads, [(1, length) for length in lengths], variant)
    check(heads, [(1, 256)] * 64, variant)


@_decodes(*SHAPES)
def test_decode_of_several_query_tokens(heads: Heads, variant: str) -> None:
    pasts = (0, 3, 60, 64, 0, 500, 1021, 8)
    check(heads, [(n, n + past) for n, past in zip(range(1, 9), pasts, strict=True)], variant)


@pytest.mark.parametrize(("heads", "variant"), MIXED, ids=MIXED_NAMES)
def test_mixed_prompts_chunks_and_decode_rows(heads: Heads, variant: str) -> None:
    parts = [(1, 700), (130, 130), (1, 1), (67, 300), (3, 64), (65, 65), (1, 65), (17, 17), (64, 128)]
    check(heads, parts, variant)


@pytest.mark.parametrize(("heads", "variant"), MIXED, ids=MIXED_NAMES)
def test_mixed_one_prompt(heads: Heads, variant: str) -> None:
    for length in (1, 17, 63, 64, 65, 129, 300):
        check(heads, [(length, length)], variant, seed=length)
    check(heads, [(20, 1500)], variant)
    check(heads, [(80, 1500)], variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_with_many_sequences_and_long_ones(variant: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 300, (70,), generator=generator).tolist()
    parts = [(min(length, 1 + i % 70), length) for i, length in enumerate(lengths)]
    check(Heads(8, 2, 64, 32), parts, variant)
    check(Heads(8, 2, 128), [(1, 4097), (90, 4097), (1, 33_000)], variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_mixed_without_long_or_short_queries(variant: str) -> None:
    check(Heads(8, 2, 128), [(1, length) for length in LENGTHS], variant)
    check(Heads(8, 2, 128), [(500, 700), (300, 300)], variant)


@pytest.mark.parametrize("late", ("q", "cache"))
@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_inputs_that_arrive_late_are_waited_for(variant: str, late: str) -> None:
    parts = [(1, 700), (2, 64)] if variant in DECODES else [(1, 700), (140, 300)]
    check(Heads(8, 2, 128), parts, variant, late=(late,))


@pytest.mark.parametrize("heads", [Heads(8, 2, 128), Heads(3, 1, 64, 16), Heads(4, 1, 256, 64)], ids=_name)
@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_only_tokens_of_earlier_steps_are_read_before_the_wait(heads: Heads, variant: str) -> None:
    if not _runs(heads, variant):
        pytest.skip(f"no {variant} kernel of head_dim {heads.head_dim}")
    # this step's tokens in the first, a middle and the last stages of the ring, across and at their edges
    for length in (1, 16, 17, 64, 65, 192, 193, 400):
        check(heads, [(1, length), (min(length, 5), length)], variant, seed=length, late=("cache",))
    many = [(1 + i % 4, 5 + 7 * i) for i in range(64)]
    check(heads, many, variant, late=("cache",))


@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_launch_for_many_more_sequences_and_tokens(variant: str) -> None:
    step = make_step(Heads(8, 2, 128), [(1, 100), (5, 40)] if variant in DECODES else [(1, 100), (30, 40)])
    assert_close(attend(step, variant, spare=900), step.reference())


@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_large_scores_neither_overflow_nor_lose_the_largest(variant: str) -> None:
    parts = [(1, 80), (6, 300)] if variant in DECODES else [(1, 80), (60, 300)]
    step = make_step(Heads(4, 2, 128), parts, q_size=300.0)
    assert_close(attend(step, variant), step.reference())


@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_nan_reaches_the_queries_that_see_it_and_no_others(variant: str) -> None:
    step = make_step(Heads(4, 2, 128), [(1, 90), (1, 300), (8 if variant in DECODES else 40, 40)])
    block = int(step.block_tables[1, 2])
    step.cache[block, 0, 0, 5] = torch.nan  # key 133 of sequence 1, kv head 0
    expected = step.reference()
    result = attend(step, variant)
    seen = expected.isnan()
    assert seen[1, :2].all() and int(seen.sum()) == 2 * 128
    assert torch.equal(result.isnan(), seen)
    assert_close(result[~seen[:, 0, 0]], expected[~seen[:, 0, 0]])


@pytest.mark.parametrize("variant", (*DECODES, *VARIANTS))
def test_blocks_beyond_2_to_the_31_elements(variant: str) -> None:
    heads = Heads(8, 8, 128)
    step = make_step(heads, [(1, 150), (4, 70), (2 if variant in DECODES else 65, 65)])
    expected = step.reference()
    many = (1 << 31) // (2 * heads.kv_heads * heads.block_size * heads.head_dim) + 1
    cache = torch.empty((many + len(step.cache), *step.cache.shape[1:]), dtype=torch.bfloat16, device=DEVICE)
    cache[many:] = step.cache.to(DEVICE)
    step.cache = cache
    step.block_tables = torch.where(step.block_tables >= 0, step.block_tables + many, step.block_tables)
    assert_close(attend(step, variant), expected)
