"""linear_many: what its specs promise, its cubins, and the helpers of its GPU tests. Needs no GPU."""

import struct

import numpy as np
import pytest
import torch
from checkpoint_blocks import decode_rows, random_rows
from dense_tiles import pack_dense
from linear_times import MANY_BF16

from castiron.builder.checkpoint.int4_blocks import dequantize_int4
from castiron.models.kernel_spec import TYPE_CODES, pack_alignment
from castiron.plugins_cuda.compile import compile_cubin
from castiron.plugins_cuda.layouts import PACKED_SCHEMES, pack
from castiron.plugins_cuda.linear_many_specs import SHARED_BYTES, SPECS

NUM_SMS = 132
BY_NAME = {spec.name: spec for spec in SPECS}


def sizes(n: int, k: int, rows: int) -> dict[str, int]:
    return {"n": n, "k": k, "rows": rows, "num_sms": NUM_SMS}


def fastest(scheme: str, n: int, k: int, rows: int) -> str:
    """The kernel the planner would take for a bf16 output, without its scheme."""
    given = sizes(n, k, rows)
    able = [s for s in SPECS if s.scheme == scheme and s.operands["out0"] == "bf16" and not s.why_not(given)]
    return min(able, key=lambda spec: spec.cost(given)).name.removeprefix(f"linear_many.{scheme}.")


def test_names_are_unique_and_the_struct_has_its_size() -> None:
    assert len(BY_NAME) == len(SPECS)
    spec = SPECS[0]
    size = struct.calcsize("<" + "".join(TYPE_CODES[p.type] for p in spec.parameters))
    assert size + -size % pack_alignment(spec) == 192  # sizeof(LinearTmaParams)


@pytest.mark.parametrize("rows", [1, 64, 65, 128, 500, 8192])
def test_grids_are_whole_clusters_and_cover_the_capacity(rows: int) -> None:
    for spec in SPECS:
        given = sizes(576, 1536, rows)
        defines = dict(spec.defines)
        split, multicast = int(defines["SPLIT_K"]), int(defines["MULTICAST"])
        grid = spec.grid(given)[0]
        assert grid % spec.cluster[0] == 0 and spec.cluster[0] == split * multicast
        tiles = -(-576 // (int(defines["ROWS"]) * multicast)) * -(-rows // int(defines["TOKENS"]))
        resident = NUM_SMS * int(defines["PER_SM"])
        if split > 1:
            assert grid == tiles * split  # a CTA has one tile
        else:
            assert grid <= resident and grid == min(tiles, resident // multicast) * multicast


def test_refusals_say_why() -> None:
    spec = BY_NAME["linear_many.bf16.256x128.s8"]
    assert "multiple of 8" in spec.why_not(sizes(64, 100, 64))
    assert "8 parts" in spec.why_not(sizes(64, 448, 64))
    assert not spec.why_not(sizes(64, 449 + 7, 64))
    assert "parts of 256" in BY_NAME["linear_many.q4_k.256x128.s8"].why_not(sizes(64, 1792, 64))


def test_costs_prefer_large_tiles_for_many_tokens_and_split_k_for_few() -> None:
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        assert fastest("bf16", n, k, 2048) == "128x256.m2"
        assert fastest("bf16", n, k, 32).startswith("128x32")
    assert fastest("bf16", 4096, 4096, 64).startswith("128x64.s")
    assert fastest("bf16", 28672, 4096, 64) == "128x64.m4"


@pytest.mark.parametrize(("n", "k", "rows"), MANY_BF16)
def test_costs_choose_the_measured_best_within_5_percent(n: int, k: int, rows: int) -> None:
    measured = MANY_BF16[n, k, rows]
    chosen = min(measured, key=lambda name: BY_NAME[f"linear_many.bf16.{name}"].cost(sizes(n, k, rows)))
    assert measured[chosen] <= 1.05 * min(measured.values()), chosen


def test_costs_are_monotone_in_rows() -> None:
    for spec in SPECS:
        costs = [spec.cost(sizes(4096, 4096, rows)) for rows in (1, 64, 128, 512, 2048, 8192)]
        assert costs == sorted(costs), spec.name


@pytest.mark.parametrize("name", ["bf16.128x256.m2", "q4_1.128x32.s4"])
def test_cubins_compile(name: str) -> None:
    spec = BY_NAME[f"linear_many.{name}"]
    cubin = compile_cubin(spec.source, spec.defines, "sm_90")
    assert spec.entry.encode() in cubin
    assert spec.shared_bytes({}) == SHARED_BYTES[int(dict(spec.defines)["PER_SM"])]


@pytest.mark.parametrize("scheme", PACKED_SCHEMES)
def test_the_tests_decoder_agrees_with_others(scheme: str) -> None:
    gguf = pytest.importorskip("gguf")
    from castiron.models.schemes import SCHEMES

    rows = random_rows(scheme, 3, 512, np.random.default_rng(0))
    if scheme.startswith("int4"):
        expected = dequantize_int4(scheme, rows)
    elif scheme == "bf16":
        expected = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16).float().numpy()
    else:
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(SCHEMES[scheme].ggml_type))
    np.testing.assert_allclose(decode_rows(scheme, rows), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("n", "k"), [(64, 64), (100, 72), (130, 200)])
def test_packing_on_the_gpu_equals_the_layout(n: int, k: int) -> None:
    rows = random_rows("bf16", n, k, np.random.default_rng(1))
    weight = torch.from_numpy(rows.view(np.int16)).view(torch.bfloat16)
    packed = pack_dense(weight).view(torch.uint8).numpy()
    np.testing.assert_array_equal(packed, pack("bf16", rows, k))
