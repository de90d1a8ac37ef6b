"""When linear_few's variants apply and which is chosen. Needs no GPU."""

import pytest

from castiron.plugins_cuda.layouts import ALL_SCHEMES, PACKED_SCHEMES, TILE_ROWS
from castiron.plugins_cuda.linear_few_specs import QUARTER_SPLITS, SPECS, SPLITS, TILINGS, TOKENS, Tiling

LINEARS = [spec for spec in SPECS if spec.op in ("linear", "linear_fp8")]
BY_NAME = {spec.name: spec for spec in SPECS}
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))


def sizes(rows: int, n: int, k: int) -> dict[str, int]:
    return {"rows": rows, "n": n, "k": k, "num_sms": 132}


def test_names_differ() -> None:
    quarters = [tiling for tiling in TILINGS if tiling.quarter]
    assert len(TILINGS) - len(quarters) == len(ALL_SCHEMES) * len(TOKENS)
    splits = (len(TILINGS) - len(quarters)) * len(SPLITS) + len(quarters) * len(QUARTER_SPLITS)
    assert len(BY_NAME) == len(SPECS) == 2 * splits + len(PACKED_SCHEMES)


def test_four_small_ctas_fit_a_multiprocessor() -> None:
    quarters = {(tiling.scheme, tiling.tokens): tiling for tiling in TILINGS if tiling.quarter}
    assert ("int4_g128", 8) in quarters and ("q4_1", 8) in quarters
    assert ("int4_g128", 16) not in quarters and ("q4_k", 8) not in quarters and ("bf16", 8) not in quarters
    for tiling in quarters.values():
        static, reserved = 8 * (4 * 4 + 1), 1024  # barriers; of the system, a CTA
        assert 4 * (tiling.shared_bytes + static + reserved) <= 228 * 1024
        assert tiling.warps == 4 and tiling.slots >= 2
        assert tiling.slots * tiling.slot_bytes >= 4 * tiling.tokens * (TILE_ROWS + 4)


def test_a_large_int4_weight_takes_small_ctas_for_a_token() -> None:
    """All at once: 448 CTAs, of which two a multiprocessor would run 264, then the rest."""
    able = [spec for spec in LINEARS if spec.scheme == "int4_g128" and spec.operands["out0"] == "bf16"]
    large = sizes(1, 28672, 4096)
    chosen = min((spec for spec in able if not spec.why_not(large)), key=lambda spec: spec.cost(large))
    assert chosen.name == "linear_few.int4_g128.8.quarter"


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_shared_memory_fits_a_block_and_mostly_half_a_multiprocessor(scheme: str, tokens: int) -> None:
    tiling = Tiling(scheme, tokens)
    assert tiling.shared_bytes <= 230_000
    assert tiling.shared_bytes <= 115_000 or (scheme in ("q5_k", "q6_k") and tokens == 16)
    assert tiling.slots >= 2 and 3 <= tiling.warps <= 8
    # a warp's sums take the place of its ring
    assert tiling.slots * tiling.slot_bytes >= 4 * tokens * (TILE_ROWS + 4)


def test_refusals_say_why() -> None:
    assert BY_NAME["linear_few.bf16.8"].why_not(sizes(9, 64, 64)) == "holds 8 tokens, not 9"
    assert BY_NAME["linear_few.bf16.8"].why_not(sizes(8, 64, 72)) == "takes k in multiples of 32, not 72"
    assert (
        BY_NAME["linear_few.q4_1.8.s4"].why_not(sizes(8, 64, 192))
        == "splits k into 4 parts of 64 or more, not 192"
    )
    assert not BY_NAME["linear_few.q4_1.8.s4"].why_not(sizes(8, 64, 224))
    assert (
        BY_NAME["linear_few.int4_g128.8.s2"]
        .why_not(sizes(8, 64, 128))
        .startswith("splits k into 2 parts of 128")
    )


@pytest.mark.parametrize("scheme", ["bf16", "q4_1", "q6_k", "int4_g32z"])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_the_smallest_sufficient_capacity_is_the_cheapest(scheme: str, rows: int) -> None:
    for n, k in LLAMA_8B:
        able = [
            spec
            for spec in LINEARS
            if spec.scheme == scheme
            and spec.operands["out0"] == "bf16"
            and not spec.why_not(sizes(rows, n, k))
        ]
        chosen = min(able, key=lambda spec: spec.cost(sizes(rows, n, k)))
        assert int(dict(chosen.defines)["TOKENS"]) == min(tokens for tokens in TOKENS if tokens >= rows)
        clusters = chosen.grid(sizes(rows, n, k))
        assert clusters[0] == chosen.cluster[0] and clusters[0] * clusters[1] >= 64


def test_costs_grow_with_the_weight() -> None:
    for spec in LINEARS:
        small, large = (spec.cost(sizes(1, n, 8192)) for n in (4096, 8192))
        assert small <= large < spec.cost(sizes(1, 65536, 8192)), spec.name
