"""The "m64" weight layout of the CUDA kernels: one for all of them, the checkpoint's bits only permuted.

A weight [n, k] is cut into tiles of 64 rows x U columns, stored [n / 64][k / U]: a row of tiles is one
contiguous run of bytes, a tile a multiple of 16 bytes. Rows and columns beyond n and k are zero bits, scales
and minimums included, so they stand for zeros.
A fragment (panel p = 0..3, step s) is the A operand of mma.m16n8k16: rows 16p.., columns 16s.. . Lane 4g + t
holds 8 of its elements, pairs (lo, hi) of the columns 2t, 2t + 1 (+ 8):
    a0 = row g, columns 2t..      a1 = row g + 8, columns 2t..
    a2 = row g, columns 2t + 8..  a3 = row g + 8, columns 2t + 8..
Tiles (U = 64 columns; of larger blocks as many as a block, each plane once for every 64 of them):
    bf16   [row 64][16-byte chunk 8], chunk c of row r at position c ^ (r % 8): the 128-byte swizzle of wgmma
    fp8    [row 64][16-byte chunk 8] of 128 columns, placed as bf16's; the rows' scales follow the last tile
    q4_0   f16 scale[2][64]                       nibbles
    q4_1   f16 scale[2][64], f16 minimum[2][64]   nibbles
    q5_0   f16 scale[2][64]                       nibbles, high1
    q5_1   f16 scale[2][64], f16 minimum[2][64]   nibbles, high1
    q8_0   f16 scale[2][64]                       bytes
    q4_k   f16 d[64], f16 dmin[64], u8 scales[12][64]   nibbles
    q5_k   f16 d[64], f16 dmin[64], u8 scales[12][64]   nibbles, high1
    q6_k   f16 d[64], i8 scales[16][64]                 nibbles, high2
    int4_gG   bf16 scale[U / G][64]                         nibbles; of g128, U is 128
    int4_gGz  bf16 scale[U / G][64], u8 zero[U / G][64]     nibbles
Planes of 64 columns (4 steps):
    nibbles [panel][lane][u32 of step s]            bits 4i.. are a_i.lo, bits 16 + 4i.. a_i.hi
    high1   [panel][lane][byte of step s]           bit i is the fifth bit of a_i.lo, bit 4 + i of a_i.hi
    high2   [panel][lane][u16 of step s]            bits 2i.. are the upper two of a_i.lo, bits 8 + 2i.. of a_i.hi
    bytes   [panel][half h][lane][step s = 2h, 2h + 1][i][lo, hi]   signed
After all tiles of an fp8 weight come the scales of its rows, f32 [n / 64][64], zero for rows beyond n.
The 12 scale bytes of q4_k and q5_k keep the checkpoint's 6-bit packing. GGUF block formats: ggml-common.h and
ggml-quants.c of ggml.
"""

from collections.abc import Iterator

import numpy as np

from castiron.models.schemes import SCHEMES, row_bytes

LAYOUT = "m64"  # renamed when packed bytes change
TILE_ROWS = 64
ROWS_TOGETHER = TILE_ROWS  # slices of rows are packed from multiples of this
_STRIP_BYTES = 1 << 20  # packed at a time

# bytes of a checkpoint block's parts, in its order
_BLOCK_PARTS: dict[str, tuple[tuple[str, int], ...]] = {
    "q4_0": (("scale", 2), ("nibbles", 16)),
    "q4_1": (("scale", 2), ("minimum", 2), ("nibbles", 16)),
    "q5_0": (("scale", 2), ("high1", 4), ("nibbles", 16)),
    "q5_1": (("scale", 2), ("minimum", 2), ("high1", 4), ("nibbles", 16)),
    "q8_0": (("scale", 2), ("bytes", 32)),
    "q4_k": (("scale", 2), ("minimum", 2), ("scales", 12), ("nibbles", 128)),
    "q5_k": (("scale", 2), ("minimum", 2), ("scales", 12), ("high1", 32), ("nibbles", 128)),
    "q6_k": (("nibbles", 128), ("high2", 64), ("scales", 16), ("scale", 2)),
    "int4_g32": (("scale", 2), ("nibbles", 16)),
    "int4_g32z": (("scale", 2), ("zero", 1), ("nibbles", 16)),
    "int4_g64": (("scale", 2), ("nibbles", 32)),
    "int4_g64z": (("scale", 2), ("zero", 1), ("nibbles", 32)),
    "int4_g128": (("scale", 2), ("nibbles", 64)),
    "int4_g128z": (("scale", 2), ("zero", 1), ("nibbles", 64)),
}
_HEADER_PARTS = ("scale", "minimum", "zero", "scales")  # in a tile's order, before
_SWIZZLED = ("bf16", "fp8")  # whose tiles are rows of 128 bytes
_PLANE_PARTS = ("nibbles", "bytes", "high1", "high2")  # the code planes in theirs
_CODE_BITS = {"nibbles": 4, "bytes": 8, "high1": 1, "high2": 2}
PACKED_SCHEMES = ("bf16", *_BLOCK_PARTS)  # of linears on bfloat16 activations
ALL_SCHEMES = (*PACKED_SCHEMES, "fp8")


def unit_columns(scheme: str) -> int:
    """Columns of a tile. Raises ValueError for a scheme the layout doesn't have."""
    if scheme not in ALL_SCHEMES:
        raise ValueError(f"{LAYOUT} has no {scheme} tiles, expected one of {', '.join(ALL_SCHEMES)}")
    return 128 if scheme == "fp8" else max(64, SCHEMES[scheme].block_size)


def tile_bytes(scheme: str) -> int:
    """Bytes of a tile of 64 rows x unit_columns: exactly the checkpoint's bytes of as many elements."""
    return TILE_ROWS * (row_bytes(scheme, unit_columns(scheme)) - SCHEMES[scheme].row_header_bytes)


def unit_bytes(scheme: str) -> int:
    """Bytes of the repeating unit of a packed quantized weight: a tile."""
    return tile_bytes(scheme)


def scales_per_unit(scheme: str) -> int:
    """Scales a unit begins with; as many minimums or zero points follow in schemes that have them."""
    return TILE_ROWS * max(1, 64 // SCHEMES[scheme].block_size)


def packed_bytes(scheme: str, n: int, k: int) -> int:
    """Bytes of a weight [n, k] packed as m64. Raises ValueError for a k the scheme can't hold."""
    return tiles_bytes(scheme, n, k) + tail_bytes(scheme, n)


def tiles_bytes(scheme: str, n: int, k: int) -> int:
    """Bytes of a packed weight's tiles; what else it has (tail_bytes) follows. Raises as packed_bytes."""
    unit = unit_columns(scheme)
    row_bytes(scheme, k)
    return -(-n // TILE_ROWS) * -(-k // unit) * tile_bytes(scheme)


def tail_bytes(scheme: str, n: int) -> int:
    """Bytes behind the last tile, the rows' scales of fp8; they stay behind when packs of slices are concatenated."""
    return -(-n // TILE_ROWS) * TILE_ROWS * SCHEMES[scheme].row_header_bytes


def pack(scheme: str, rows: np.ndarray, k: int) -> np.ndarray:
    """Pack checkpoint rows, uint8 [r, row_bytes], into m64: a new flat array of packed_bytes(scheme, r, k).

    Packs of row slices that start at multiples of 64 concatenate to the pack of the whole: their tiles, then their
    tails (tail_bytes). Raises ValueError for a wrong dtype or shape, or a scheme the layout doesn't have.
    """
    packed = np.empty(packed_bytes(scheme, rows.shape[0], k), np.uint8)
    expected = row_bytes(scheme, k)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != expected:
        raise ValueError(f"{scheme} rows are {rows.dtype} {rows.shape}, expected uint8 [r, {expected}]")
    header = SCHEMES[scheme].row_header_bytes
    if header:
        tail = packed[tiles_bytes(scheme, rows.shape[0], k) :].reshape(-1, header)
        tail[: rows.shape[0]], tail[rows.shape[0] :] = rows[:, :header], 0
    padded = row_bytes(scheme, _padded_columns(scheme, k))
    for first, last, strip in _strips(scheme, rows.shape[0], k, packed):
        part = rows[first:last, header:]
        missing = -part.shape[0] % TILE_ROWS
        if missing or padded != expected:
            part = np.pad(part, ((0, missing), (0, padded - expected)))
        part = np.ascontiguousarray(part).reshape(part.shape[0] // TILE_ROWS, TILE_ROWS, -1)
        tiles = strip.reshape(part.shape[0], -1, tile_bytes(scheme))
        if scheme in _SWIZZLED:
            _swizzle(part, tiles)
        else:
            _pack_blocks(scheme, part, tiles)
    return packed


def unpack(scheme: str, packed: np.ndarray, n: int, k: int) -> np.ndarray:
    """The checkpoint rows, uint8 [n, row_bytes], of a weight packed as m64: exactly what was packed.

    Raises ValueError for a wrong dtype or size.
    """
    expected = packed_bytes(scheme, n, k)
    if packed.dtype != np.uint8 or packed.size != expected:
        raise ValueError(
            f"packed {scheme} is {packed.dtype} of {packed.size} bytes, expected uint8 of {expected}"
        )
    rows = np.empty((n, row_bytes(scheme, k)), np.uint8)
    header = SCHEMES[scheme].row_header_bytes
    if header:
        rows[:, :header] = packed.reshape(-1)[tiles_bytes(scheme, n, k) :].reshape(-1, header)[:n]
    for first, last, strip in _strips(scheme, n, k, np.ascontiguousarray(packed).reshape(-1)):
        tiles = strip.reshape(-(-(last - first) // TILE_ROWS), -1, tile_bytes(scheme))
        whole = _unswizzle(tiles) if scheme in _SWIZZLED else _unpack_blocks(scheme, tiles)
        rows[first:last, header:] = whole.reshape(-1, whole.shape[-1])[
            : last - first, : rows.shape[1] - header
        ]
    return rows


def _padded_columns(scheme: str, k: int) -> int:
    unit = unit_columns(scheme)
    return -(-k // unit) * unit


def _strips(scheme: str, n: int, k: int, packed: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Runs of whole rows of tiles that fit the processor's cache: first row, last row (excluded), bytes."""
    step_bytes = tiles_bytes(scheme, TILE_ROWS, k)
    steps = max(1, _STRIP_BYTES // step_bytes)
    for step in range(0, -(-n // TILE_ROWS), steps):
        last = min(n, (step + steps) * TILE_ROWS)
        yield step * TILE_ROWS, last, packed[step * step_bytes : -(-last // TILE_ROWS) * step_bytes]


def _swizzle(rows: np.ndarray, tiles: np.ndarray) -> None:
    """u8 [groups, 64, bytes] -> u8 [groups, tiles, 8192], the 16-byte chunks of a row permuted."""
    chunks = rows.reshape(rows.shape[0], 8, 8, -1, 8, 16)  # [groups, r / 8, r % 8, tiles, chunk, 16]
    out = tiles.reshape(rows.shape[0], -1, 8, 8, 8, 16)  # [groups, tiles, r / 8, r % 8, position, 16]
    for row in range(8):
        order = np.arange(8) ^ row  # the chunk at each position; its own inverse
        out[:, :, :, row] = chunks[:, :, row][:, :, :, order].transpose(0, 2, 1, 3, 4)


def _unswizzle(tiles: np.ndarray) -> np.ndarray:
    stored = tiles.reshape(tiles.shape[0], -1, 8, 8, 8, 16)
    rows = np.empty((tiles.shape[0], 8, 8, stored.shape[1], 8, 16), np.uint8)
    for row in range(8):
        order = np.arange(8) ^ row
        rows[:, :, row] = stored[:, :, :, row][:, :, :, order].transpose(0, 2, 1, 3, 4)
    return rows.reshape(tiles.shape[0], TILE_ROWS, -1)


def _pack_blocks(scheme: str, rows: np.ndarray, tiles: np.ndarray) -> None:
    """u8 [groups, 64, bytes] -> u8 [groups, tiles, tile_bytes]."""
    record = SCHEMES[scheme]
    groups, num_tiles = tiles.shape[:2]
    blocks = rows.reshape(groups, TILE_ROWS, num_tiles, -1, record.block_bytes)
    fields = _tile_fields(scheme, tiles)
    start = 0
    for name, num_bytes in _BLOCK_PARTS[scheme]:
        part = blocks[..., start : start + num_bytes]  # [groups, 64, tiles, blocks of a tile, num_bytes]
        start += num_bytes
        if name == "scales":
            fields[name][...] = part[:, :, :, 0].transpose(0, 2, 3, 1)
        elif name == "zero":
            fields[name][...] = part[..., 0].transpose(0, 2, 3, 1)
        elif name in _HEADER_PARTS:
            fields[name][...] = part.view("<u2")[..., 0].transpose(0, 2, 3, 1)
        else:
            codes = _split(scheme, name, part).reshape(groups, TILE_ROWS, num_tiles, -1, 64)
            fields[name][...] = _join_fragments(name, _to_fragments(codes))


def _unpack_blocks(scheme: str, tiles: np.ndarray) -> np.ndarray:
    """The inverse of _pack_blocks: u8 [groups, 64, bytes]."""
    record = SCHEMES[scheme]
    groups, num_tiles = tiles.shape[:2]
    num_blocks = unit_columns(scheme) // record.block_size
    blocks = np.empty((groups, TILE_ROWS, num_tiles, num_blocks, record.block_bytes), np.uint8)
    fields = _tile_fields(scheme, tiles)
    start = 0
    for name, num_bytes in _BLOCK_PARTS[scheme]:
        part = blocks[..., start : start + num_bytes]
        start += num_bytes
        if name == "scales":
            part[:, :, :, 0] = fields[name].transpose(0, 3, 1, 2)
        elif name == "zero":
            part[..., 0] = fields[name].transpose(0, 3, 1, 2)
        elif name in _HEADER_PARTS:
            part.view("<u2")[..., 0] = fields[name].transpose(0, 3, 1, 2)
        else:
            codes = _from_fragments(_split_fragments(name, fields[name]))
            part[...] = _join(scheme, name, codes.reshape(*part.shape[:4], record.block_size))
    return blocks.reshape(groups, TILE_ROWS, -1)


def _tile_fields(scheme: str, tiles: np.ndarray) -> dict[str, np.ndarray]:
    """Views of the parts of tiles u8 [groups, tiles, bytes].

    scale, minimum: u16 [groups, tiles, blocks, 64], zero: u8 of that shape; scales: u8 [groups, tiles, count, 64];
    planes: per 64 columns, panel and lane the 4 steps' words, [groups, tiles, 64-column parts, 4, 32, 4] (bytes: u64).
    """
    parts = dict(_BLOCK_PARTS[scheme])
    unit = unit_columns(scheme)
    fields: dict[str, np.ndarray] = {}
    start = 0
    for name in (*_HEADER_PARTS, *_PLANE_PARTS):
        if name not in parts:
            continue
        num_bytes = TILE_ROWS * parts[name] * (unit // SCHEMES[scheme].block_size)
        field = tiles[..., start : start + num_bytes]
        start += num_bytes
        lead = tiles.shape[:2]
        if name in ("zero", "scales"):
            fields[name] = field.reshape(*lead, -1, TILE_ROWS)
        elif name in _HEADER_PARTS:
            fields[name] = field.view("<u2").reshape(*lead, -1, TILE_ROWS)
        elif name == "bytes":  # [panel, half, lane, step of the half] -> [panel, lane, step]
            words = field.view("<u8").reshape(*lead, unit // 64, 4, 2, 32, 2)
            fields[name] = words.swapaxes(-2, -3)  # [.., panel, lane, half, 2]
        else:
            words = field.view({"nibbles": "<u4", "high1": "u1", "high2": "<u2"}[name])
            fields[name] = words.reshape(*lead, unit // 64, 4, 32, 4)
    return fields


def _to_fragments(codes: np.ndarray) -> np.ndarray:
    """Codes u8 [groups, 64, tiles, parts, 64] -> u8 [groups, tiles, parts, panel, lane, step, (lo, hi), i]."""
    groups, _, num_tiles, num_parts, _ = codes.shape
    # row = 16 panel + 8 r + g, column = 16 step + 8 c + 2 t + hi, i = 2 c + r
    split = codes.reshape(groups, 4, 2, 8, num_tiles, num_parts, 4, 2, 4, 2)
    ordered = split.transpose(0, 4, 5, 1, 3, 8, 6, 9, 7, 2)
    return np.ascontiguousarray(ordered).reshape(groups, num_tiles, num_parts, 4, 32, 4, 2, 4)


def _from_fragments(fragments: np.ndarray) -> np.ndarray:
    """The inverse of _to_fragments."""
    groups, num_tiles, num_parts = fragments.shape[:3]
    split = fragments.reshape(groups, num_tiles, num_parts, 4, 8, 4, 4, 2, 2, 2)
    ordered = split.transpose(0, 3, 9, 4, 1, 2, 6, 8, 5, 7)
    return np.ascontiguousarray(ordered).reshape(groups, TILE_ROWS, num_tiles, num_parts, 64)


def _join_fragments(name: str, codes: np.ndarray) -> np.ndarray:
    """The 8 codes [..., (lo, hi), i] of a lane and step as one word of the plane."""
    if name == "bytes":
        words = np.ascontiguousarray(codes.swapaxes(-1, -2)).reshape(*codes.shape[:-2], 8).view("<u8")
        return words.reshape(*codes.shape[:-3], 2, 2)
    if name == "high1":
        return np.packbits(codes.reshape(*codes.shape[:-2], 8), axis=-1, bitorder="little")[..., 0]
    words = codes.reshape(*codes.shape[:-2], 8).view("<u8")[..., 0]
    bits = _CODE_BITS[name]
    for width, mask in _gather_steps(bits):  # halve the gaps between fields until none is left
        words = (words | words >> np.uint64(width)) & np.uint64(mask)
    return words.astype("<u4" if name == "nibbles" else "<u2")


def _split_fragments(name: str, words: np.ndarray) -> np.ndarray:
    """The inverse of _join_fragments: u8 [..., step, (lo, hi), i]."""
    if name == "bytes":
        codes = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-2], 4, 4, 2)
        return codes.swapaxes(-1, -2)
    if name == "high1":
        return np.unpackbits(words[..., None], axis=-1, bitorder="little").reshape(*words.shape, 2, 4)
    bits = _CODE_BITS[name]
    shifts = (bits * np.arange(8, dtype=np.uint32)).reshape(2, 4)
    codes = words.astype(np.uint32)[..., None, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.astype(np.uint8)


def _gather_steps(bits: int) -> list[tuple[int, int]]:
    """(shift, mask) that move 8 fields of `bits`, one in each byte of a u64, next to one another."""
    steps = []
    width, slot = bits, 8
    while slot < 64:
        shift = slot - width  # the odd slot's field lands right above the even one's
        width, slot = 2 * width, 2 * slot
        steps.append((shift, sum(((1 << width) - 1) << at for at in range(0, 64, slot))))
    return steps


def _split(scheme: str, name: str, part: np.ndarray) -> np.ndarray:
    """One byte per element, in element order, of a block's code bytes [..., num_bytes]."""
    lead = part.shape[:-1]
    if name == "bytes":
        return part
    if name == "nibbles":
        halves = part.reshape(
            *lead, -1, _run(scheme)
        )  # low nibbles are one run of elements, high ones the next
        return np.stack([halves & 15, halves >> 4], axis=-2).reshape(*lead, -1)
    if name == "high1" and SCHEMES[scheme].block_size == 32:  # bit e of a u32 belongs to element e
        return np.unpackbits(part, axis=-1, bitorder="little")
    if name == "high1":  # bit s of byte e belongs to element 32 s + e
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        return (part[..., None, :] >> shifts & 1).reshape(*lead, -1)
    # high2, halves of 128 elements: bits 2q, 2q + 1 of byte e belong to element 32 q + e
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    return (part.reshape(*lead, 2, 1, 32) >> shifts & 3).reshape(*lead, -1)


def _join(scheme: str, name: str, codes: np.ndarray) -> np.ndarray:
    """The inverse of _split: `codes` u8 [..., block_size]."""
    lead = codes.shape[:-1]
    if name == "bytes":
        return codes
    if name == "nibbles":
        halves = codes.reshape(*lead, -1, 2, _run(scheme))
        joined: np.ndarray = halves[..., 0, :] | halves[..., 1, :] << 4
        return joined.reshape(*lead, -1)
    if name == "high1" and SCHEMES[scheme].block_size == 32:
        return np.packbits(codes, axis=-1, bitorder="little")
    if name == "high1":
        return np.packbits(codes.reshape(*lead, 8, 32), axis=-2, bitorder="little")[..., 0, :]
    fields = codes.reshape(*lead, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    merged: np.ndarray = np.bitwise_or.reduce(fields, axis=-2)
    return merged.reshape(*lead, -1)


def _run(scheme: str) -> int:
    """Consecutive elements whose low nibbles lie in consecutive bytes, the next as many in the high nibbles."""
    if scheme.startswith("int4"):
        return 1
    return {32: 16, 256: 64 if scheme == "q6_k" else 32}[SCHEMES[scheme].block_size]
