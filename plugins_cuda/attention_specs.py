"""CUDA kernels of attention: rotary embedding, cache writes, and attention over the paged cache."""

from collections.abc import Callable

from castiron.models.kernel_spec import KernelParameter, parameters
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Grid, Sizes

READ_BYTES_PER_US = 4.0e6
MMA_FLOPS_PER_US = 250e6
WGMMA_FLOPS_PER_US = 400e6
WGMMA_HEAD_DIMS = (64, 128)
HEAD_DIMS = (16, 32, 64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
CHUNK = 8  # bf16 elements in 16 bytes
SPLIT_ROWS = 16  # rows (query tokens * heads of a group) of a unit of split-KV attention
WARP_TOKENS = 16  # kv tokens of a warp's stage there
MOST_SEQS = 1024  # kMaxSeqs in attention_decode.cuh
MOST_SPLIT_CTAS = 512  # kMaxCtas there
MOST_GROUP = 16
MOST_DECODE_QUERY_LEN = 16
DECODE_WARPS = 4
MIXED_TOKENS = 64  # kv tokens of a stage of the mixed kernel, half as many if head_dim > 128
MIXED_SPLIT_ROWS = 64  # rows up to which it splits a sequence over its kv tokens
# The mixed kernel with nothing but tiles, for GPUs whose blocks have 99 KiB of shared memory
TILES_WARPS = 4
TILES_CACHE_FACTOR = 4  # how much longer than split-KV attention it reads the cache: few CTAs have all of it
TILES_FLOPS_PER_US = 150e6
_STATIC_SHARED_BYTES = 20 * 1024  # at most, of split-KV attention and tiles
_TILES_STATIC_SHARED_BYTES = 4352
ROPE_COS_SIN_THREADS = 128
ROPE_KV_WRITE_THREADS = 256


def _blocks(items: int, threads: int) -> Grid:
    return (max(1, -(-items // threads)), 1, 1)


# rope_kv_write


def _rope_items(sizes: Sizes) -> int:
    """Threads of a token: one per 16 elements."""
    return (sizes["num_heads"] + 2 * sizes["kv_heads"]) * (sizes["head_dim"] // (2 * CHUNK))


def _rope_why_not(sizes: Sizes) -> str:
    if sizes["head_dim"] % (2 * CHUNK) or sizes["half"] % CHUNK:
        return f"head_dim {sizes['head_dim']} and half {sizes['half']} aren't multiples of {2 * CHUNK} and {CHUNK}"
    return ""


def _rope_cost(sizes: Sizes) -> float:
    return 1.5 + sizes["rows"] * _rope_items(sizes) * 2 * CHUNK * 4 / READ_BYTES_PER_US


# paged_attention


def _mixed_warps(head_dim: int) -> int:
    return 8 if head_dim <= 128 else 4


def _split_stages(head_dim: int, mixed: bool) -> int:
    """Stages of a warp's ring in split-KV attention."""
    if head_dim <= 64:
        return 4 if mixed else 6
    return 2


def _tile_stages(head_dim: int, wgmma: bool) -> int:
    """Stages of keys and values in the mixed kernel's tiles: wgmma has three tiles in use at once."""
    if wgmma:
        return 6
    return 4 if head_dim <= 128 else 3


def _split_shared_bytes(head_dim: int, warps: int, mixed: bool) -> int:
    ring = _split_stages(head_dim, mixed) * 2 * WARP_TOKENS * head_dim * 2
    merge = SPLIT_ROWS * (head_dim + 8) * 4
    return warps * (ring + merge)


def _mixed_stage_tokens(head_dim: int) -> int:
    return MIXED_TOKENS if head_dim <= 128 else MIXED_TOKENS // 2


def _mixed_shared_bytes(head_dim: int, wgmma: bool) -> int:
    tile = _tile_stages(head_dim, wgmma) * 2 * _mixed_stage_tokens(head_dim) * head_dim * 2
    queries = _mixed_warps(head_dim) * 16 * head_dim * 2 if head_dim > 128 else 0
    return 1024 + max(
        tile + queries, _split_shared_bytes(head_dim, _mixed_warps(head_dim), mixed=True)
    )  # 1024 to align


def _split_ctas(sizes: Sizes) -> int:
    return min(sizes["num_sms"], MOST_SPLIT_CTAS)


def _scratch_bytes(ctas: Callable[[Sizes], int]) -> Callable[[Sizes], int]:
    """Two units' partial results of each CTA of the split: o [16, head_dim], (m, l) [16]."""
    return lambda sizes: ctas(sizes) * 2 * (SPLIT_ROWS * sizes["head_dim"] + 2 * SPLIT_ROWS) * 4


def _counters_bytes(ctas: Callable[[Sizes], int]) -> Callable[[Sizes], int]:
    return lambda sizes: ctas(sizes) * 4


def _group(sizes: Sizes) -> int:
    return sizes["num_heads"] // sizes["kv_heads"]


def _tiles_stage_tokens(head_dim: int) -> int:
    return MIXED_TOKENS if head_dim <= 128 else MIXED_TOKENS // 4


def _tiles_stages(head_dim: int) -> int:
    return 2 if head_dim == 128 else 3


def _tiles_shared_bytes(head_dim: int) -> int:
    tile = _tiles_stages(head_dim) * 2 * _tiles_stage_tokens(head_dim) * head_dim * 2
    queries = TILES_WARPS * 16 * head_dim * 2 if head_dim > 128 else 0
    return 1024 + tile + queries  # 1024 to align


def _tiles_grid(sizes: Sizes) -> Grid:
    tiles = -(-sizes["max_tokens"] * _group(sizes) // (16 * TILES_WARPS)) + sizes["max_seqs"]
    return (sizes["num_sms"], -(-tiles * sizes["kv_heads"] // sizes["num_sms"]), 1)


def _mixed_grid(sizes: Sizes) -> Grid:
    rows = 16 * _mixed_warps(sizes["head_dim"])
    tiles = -(-sizes["max_tokens"] * _group(sizes) // rows) + sizes["max_seqs"]
    ctas = _split_ctas(sizes)
    return (ctas, 1 + -(-tiles * sizes["kv_heads"] // ctas), 1)


def _attention_why_not(head_dim: int, most_query_len: int) -> Callable[[Sizes], str]:
    def why_not(sizes: Sizes) -> str:
        if sizes["head_dim"] != head_dim:
            return f"head_dim {sizes['head_dim']} isn't {head_dim}"
        if sizes["block_size"] not in BLOCK_SIZES:
            return f"block_size {sizes['block_size']} is none of {BLOCK_SIZES}"
        if sizes["num_heads"] % sizes["kv_heads"] or _group(sizes) > MOST_GROUP:
            return f"{sizes['num_heads']} heads don't fit {sizes['kv_heads']} kv heads"
        if sizes["max_seqs"] > MOST_SEQS:
            return f"{sizes['max_seqs']} sequences, at most {MOST_SEQS}"
        if most_query_len and sizes["max_query_len"] > most_query_len:
            return f"{sizes['max_query_len']} query tokens a sequence, at most {most_query_len}"
        return ""

    return why_not


def _cache_us(sizes: Sizes) -> float:
    """Reading the longest contexts of all sequences once."""
    tokens = sizes["max_seqs"] * sizes["table_width"] * sizes["block_size"]
    return tokens * sizes["kv_heads"] * sizes["head_dim"] * 4 / READ_BYTES_PER_US


def _decode_cost(warps: int) -> Callable[[Sizes], float]:
    few_seqs = 16  # up to which more warps a CTA are faster, on an H200

    def cost(sizes: Sizes) -> float:
        has_best = (warps > DECODE_WARPS) == (sizes["max_seqs"] <= few_seqs)
        return (3.0 if has_best else 3.3) + _cache_us(sizes)  # rows beyond 16 read the cache again, from L2

    return cost


def _mixed_cost(fixed: float, flops_per_us: float) -> Callable[[Sizes], float]:
    def cost(sizes: Sizes) -> float:
        pairs = sizes["max_tokens"] * sizes["table_width"] * sizes["block_size"] / 2
        flops = 4 * pairs * sizes["num_heads"] * sizes["head_dim"]
        return fixed + _cache_us(sizes) + flops / flops_per_us

    return cost


def _tiles_cost(sizes: Sizes) -> float:
    return _mixed_cost(8.0, TILES_FLOPS_PER_US)(sizes) + (TILES_CACHE_FACTOR - 1) * _cache_us(sizes)


def _attention_parameters(partials: str, counters: str) -> tuple[KernelParameter, ...]:
    """Where the memory for sums of a sequence that is split comes from."""
    return parameters(
        "q:p:in0.ptr cache:p:in1.ptr block_tables:p:in2.ptr seq_lens:p:in3.ptr query_starts:p:in4.ptr "
        f"y:p:out0.ptr partials:p:{partials} counters:p:{counters} header:p:header.ptr q_stride:l:in0.stride0 "
        "y_stride:l:out0.stride0 num_heads:i:in0.dim1 kv_heads:i:in1.dim2 head_dim:i:in0.dim2 "
        "block_size:i:in1.dim3 table_width:i:in2.dim1 scale:f:attr.scale"
    )


_ATTENTION = _attention_parameters("scratch.ptr", "counters.ptr")
_ATTENTION_OPERANDS = {"in0": "bf16", "in2": "i32", "in3": "i32", "in4": "i32", "out0": "bf16"}


def _decode(head_dim: int, warps: int, per_sm: int) -> CudaKernelSpec:
    """`per_sm`: CTAs on a multiprocessor, where one's waits (queries, merging warps) pass in another's work. One CTA
    of twice the warps has fewer partial results to merge: better for few sequences.
    """

    def ctas(sizes: Sizes) -> int:
        return min(sizes["num_sms"] * per_sm, MOST_SPLIT_CTAS)

    return CudaKernelSpec(
        name=f"paged_attention.bf16.decode.d{head_dim}" + (f".w{warps}" if warps != DECODE_WARPS else ""),
        op="paged_attention",
        cache_dtype="bf16",
        parameters=_ATTENTION,
        params_struct="PagedAttentionParams",
        source="paged_attention_decode.cu",
        entry="paged_attention_decode",
        defines=(
            ("HEAD_DIM", str(head_dim)),
            ("STAGES", str(_split_stages(head_dim, mixed=False))),
            ("WARPS", str(warps)),
            ("PER_SM", str(per_sm)),
        ),
        threads=32 * warps,
        grid=lambda sizes: (ctas(sizes), 1, 1),
        operands=_ATTENTION_OPERANDS,
        shared_bytes=lambda _: _split_shared_bytes(head_dim, warps, mixed=False),
        static_shared_bytes=_STATIC_SHARED_BYTES,
        scratch_bytes=_scratch_bytes(ctas),
        counters_bytes=_counters_bytes(ctas),
        order=None,  # sequences are split so that all CTAs have as much to do
        why_not=_attention_why_not(head_dim, MOST_DECODE_QUERY_LEN),
        cost=_decode_cost(warps),
    )


def _mixed(head_dim: int, *, wgmma: bool) -> CudaKernelSpec:
    return CudaKernelSpec(
        name=f"paged_attention.bf16.{'wgmma' if wgmma else 'mixed'}.d{head_dim}",
        op="paged_attention",
        cache_dtype="bf16",
        parameters=_ATTENTION,
        params_struct="PagedAttentionParams",
        source="paged_attention_mixed.cu",
        entry="paged_attention_mixed",
        defines=(
            ("HEAD_DIM", str(head_dim)),
            ("STAGES", str(_split_stages(head_dim, mixed=True))),
            ("PREFILL_STAGES", str(_tile_stages(head_dim, wgmma))),
            ("WGMMA", str(int(wgmma))),
            ("WARPS", str(_mixed_warps(head_dim))),
            ("TILE_TOKENS", str(_mixed_stage_tokens(head_dim))),
            ("SPLIT_ROWS", str(MIXED_SPLIT_ROWS)),
        ),
        architecture="sm_90a" if wgmma else "sm_80",
        threads=32 * _mixed_warps(head_dim),
        grid=_mixed_grid,
        operands=_ATTENTION_OPERANDS,
        shared_bytes=lambda _: _mixed_shared_bytes(head_dim, wgmma),
        static_shared_bytes=_STATIC_SHARED_BYTES,
        scratch_bytes=_scratch_bytes(_split_ctas),
        counters_bytes=_counters_bytes(_split_ctas),
        order=None,
        why_not=_attention_why_not(head_dim, 0),
        cost=_mixed_cost(6.0, WGMMA_FLOPS_PER_US if wgmma else MMA_FLOPS_PER_US),
    )


def _tiles(head_dim: int) -> CudaKernelSpec:
    return CudaKernelSpec(
        name=f"paged_attention.bf16.tiles.d{head_dim}",
        op="paged_attention",
        cache_dtype="bf16",
        parameters=_attention_parameters("zero", "zero"),
        params_struct="PagedAttentionParams",
        source="paged_attention_mixed.cu",
        entry="paged_attention_mixed",
        defines=(
            ("HEAD_DIM", str(head_dim)),
            ("PREFILL_STAGES", str(_tiles_stages(head_dim))),
            ("WGMMA", "0"),
            ("WARPS", str(TILES_WARPS)),
            ("TILE_TOKENS", str(_tiles_stage_tokens(head_dim))),
            ("SPLIT_ROWS", "0"),
        ),
        threads=32 * TILES_WARPS,
        grid=_tiles_grid,
        operands=_ATTENTION_OPERANDS,
        shared_bytes=lambda _: _tiles_shared_bytes(head_dim),
        static_shared_bytes=_TILES_STATIC_SHARED_BYTES,
        why_not=_attention_why_not(head_dim, 0),
        cost=_tiles_cost,
    )


SPECS = (
    CudaKernelSpec(
        name="rope_cos_sin",
        op="rope_cos_sin",
        parameters=parameters(
            "positions:p:in0.ptr inv_freq:p:in1.ptr cos:p:out0.ptr sin:p:out1.ptr header:p:header.ptr "
            "count:i:in0.count half:i:in1.dim0 scaling:f:attr.scaling pad:i:zero"
        ),
        params_struct="RopeCosSinParams",
        dense_outputs=(0, 1),
        source="rope_cos_sin.cu",
        entry="rope_cos_sin",
        threads=ROPE_COS_SIN_THREADS,
        grid=lambda sizes: _blocks(sizes["rows"] * sizes["half"], ROPE_COS_SIN_THREADS),
        operands={"in0": "i32", "in1": "f32", "out0": "f32", "out1": "f32"},
        cost=lambda sizes: 1.5 + sizes["rows"] * sizes["half"] * 8 / READ_BYTES_PER_US,
    ),
    CudaKernelSpec(
        name="rope_kv_write.bf16",
        op="rope_kv_write",
        cache_dtype="bf16",
        parameters=parameters(
            "q:p:in0.ptr k:p:in1.ptr v:p:in2.ptr cos:p:in3.ptr sin:p:in4.ptr q_out:p:out0.ptr cache:p:in5.ptr "
            "slot_mapping:p:in6.ptr header:p:header.ptr q_stride:l:in0.stride0 k_stride:l:in1.stride0 "
            "v_stride:l:in2.stride0 q_out_stride:l:out0.stride0 count:i:in0.count num_heads:i:in0.dim1 "
            "kv_heads:i:in1.dim1 head_dim:i:in0.dim2 half:i:in3.dim1 block_size:i:in5.dim3"
        ),
        params_struct="RopeKvWriteParams",
        dense_inputs=(3, 4),
        source="rope_kv_write.cu",
        entry="rope_kv_write",
        threads=ROPE_KV_WRITE_THREADS,
        grid=lambda sizes: _blocks(sizes["rows"] * _rope_items(sizes), ROPE_KV_WRITE_THREADS),
        operands={
            "in0": "bf16", "in1": "bf16", "in2": "bf16", "in3": "f32", "in4": "f32", "in6": "i64", "out0": "bf16",
        },
        why_not=_rope_why_not,
        cost=_rope_cost,
    ),
    *(_decode(head_dim, DECODE_WARPS, 2 if head_dim == 128 else 1) for head_dim in HEAD_DIMS),
    _decode(128, 2 * DECODE_WARPS, 1),
    *(_mixed(head_dim, wgmma=False) for head_dim in HEAD_DIMS),
    *(_mixed(head_dim, wgmma=True) for head_dim in WGMMA_HEAD_DIMS),
    *(_tiles(head_dim) for head_dim in HEAD_DIMS),
)  # fmt: skip
