"""The "n16" weight layout of the CPU kernels: one for all levels, the checkpoint's bits only permuted.

A weight [n, k] is cut into panels of 16 rows (the last one padded with zero rows), stored one after another.
Dense panels, k outermost:
    f32, f16   [k][16 rows]
    bf16       [ceil(k / 2)][16 rows][2 k]         odd k padded with zero
Quantized panels are a sequence of blocks along k, the checkpoint's blocks of the 16 rows taken together, so a
panel has exactly 16 rows' bytes. Scales come first, then the code planes of each 32 k:
    q4_0       f16 scale[16]                       nibbles[4][16][4]
    q4_1       f16 scale[16], f16 minimum[16]      nibbles[4][16][4]
    q5_0       f16 scale[16]                       nibbles[4][16][4], high1[16][4]
    q5_1       f16 scale[16], f16 minimum[16]      nibbles[4][16][4], high1[16][4]
    q8_0       f16 scale[16]                       bytes[8][16][4] (signed)
    q4_k       f16 d[16], f16 dmin[16], scales[12][16]       8 x nibbles[4][16][4]
    q5_k       f16 d[16], f16 dmin[16], scales[12][16]       8 x (nibbles[4][16][4], high1[16][4])
    q6_k       f16 d[16], i8 scales[16][16]                  8 x (nibbles[4][16][4], high2[2][16][4])
The 32 k are 8 groups of 4 (the last index above), so 64 bytes hold 4 consecutive k of 16 rows, the operand of
the byte dot products of AVX2, AVX-512 VNNI and AMX:
    nibbles[p]   low half: group p, high half: group p + 4
    high1        bit g is the fifth bit of group g's code
    high2[p]     bits 2f, 2f + 1 are the upper bits of group 4p + f's code
    bytes[g]     group g
The 12 scale bytes of q4_k and q5_k keep the checkpoint's 6-bit packing. GGUF block formats: ggml-common.h and
ggml-quants.c of ggml.
"""

from collections.abc import Iterator

import numpy as np

from castiron.models.schemes import SCHEMES, row_bytes

LAYOUT = "n16"  # kWeightLayout of abi.h; renamed there and here when packed bytes change
PANEL_ROWS = 16
ROWS_TOGETHER = PANEL_ROWS  # slices of rows are packed from multiples of this
_BLOCK_32 = 32  # k covered by one set of code planes
_STRIP_BYTES = 1 << 19  # packed at a time

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
}
_HEADER_PARTS = ("scale", "minimum", "scales")  # in the packed block's order
_PLANE_PARTS = ("nibbles", "high1", "high2", "bytes")


def unit_bytes(scheme: str) -> int:
    """Bytes of the repeating unit of a packed quantized weight: one block of each of a panel's rows."""
    return PANEL_ROWS * SCHEMES[scheme].block_bytes


def scales_per_unit(scheme: str) -> int:
    """f16 scales a unit begins with; as many minimums follow in schemes that have them."""
    return PANEL_ROWS


def tail_bytes(scheme: str, n: int) -> int:
    """Bytes at a pack's end that stay behind when packs of row slices are concatenated: none."""
    return 0


def packed_bytes(scheme: str, n: int, k: int) -> int:
    """Bytes of a weight [n, k] packed as n16.

    Raises ValueError for a k the scheme can't hold, or for a scheme the layout doesn't have.
    """
    if "cpu" not in SCHEMES[scheme].kinds:
        raise ValueError(f"{LAYOUT} has no {scheme} panels")
    padded_k = k + k % 2 if scheme == "bf16" else k
    return -(-n // PANEL_ROWS) * PANEL_ROWS * row_bytes(scheme, padded_k)


def pack(scheme: str, rows: np.ndarray, k: int) -> np.ndarray:
    """Pack checkpoint rows, uint8 [r, row_bytes], into n16: a new flat array of packed_bytes(scheme, r, k).

    The last panel is padded with zero rows: packs of row slices that start at multiples of 16 concatenate to
    the pack of the whole. Raises ValueError for a wrong dtype or shape.
    """
    expected = row_bytes(scheme, k)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != expected:
        raise ValueError(f"{scheme} rows are {rows.dtype} {rows.shape}, expected uint8 [r, {expected}]")
    packed = np.empty(packed_bytes(scheme, rows.shape[0], k), np.uint8)
    pack_strip = _pack_blocks if SCHEMES[scheme].is_quantized else _pack_dense
    for first, last, strip in _strips(scheme, rows.shape[0], k, packed):
        part = np.ascontiguousarray(rows[first:last])
        if part.shape[0] % PANEL_ROWS:
            part = np.concatenate([part, np.zeros((-part.shape[0] % PANEL_ROWS, expected), np.uint8)])
        pack_strip(scheme, part, strip, k)
    return packed


def unpack(scheme: str, packed: np.ndarray, n: int, k: int) -> np.ndarray:
    """The checkpoint rows, uint8 [n, row_bytes], of a weight packed as n16: exactly what was packed.

    Raises ValueError for a wrong dtype or size.
    """
    expected = packed_bytes(scheme, n, k)
    if packed.dtype != np.uint8 or packed.size != expected:
        raise ValueError(
            f"packed {scheme} is {packed.dtype} of {packed.size} bytes, expected uint8 of {expected}"
        )
    rows = np.empty((n, row_bytes(scheme, k)), np.uint8)
    unpack_strip = _unpack_blocks if SCHEMES[scheme].is_quantized else _unpack_dense
    for first, last, strip in _strips(scheme, n, k, np.ascontiguousarray(packed).reshape(-1)):
        rows[first:last] = unpack_strip(scheme, strip, k)[: last - first]
    return rows


def _strips(scheme: str, n: int, k: int, packed: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """Runs of whole panels that fit the processor's cache: first row, last row (excluded), packed bytes."""
    panel_bytes = packed_bytes(scheme, PANEL_ROWS, k)
    panels_per_strip = max(1, _STRIP_BYTES // panel_bytes)
    for panel in range(0, -(-n // PANEL_ROWS), panels_per_strip):
        last = min(n, (panel + panels_per_strip) * PANEL_ROWS)
        yield panel * PANEL_ROWS, last, packed[panel * panel_bytes : (panel + panels_per_strip) * panel_bytes]


def _pack_blocks(scheme: str, rows: np.ndarray, packed: np.ndarray, k: int) -> None:
    block_bytes = SCHEMES[scheme].block_bytes
    blocks = rows.reshape(-1, PANEL_ROWS, k // SCHEMES[scheme].block_size, block_bytes)
    fields = _packed_fields(
        scheme, packed.reshape(blocks.shape[0], blocks.shape[2], PANEL_ROWS * block_bytes)
    )
    start = 0
    for name, num_bytes in _BLOCK_PARTS[scheme]:
        part = blocks[..., start : start + num_bytes]  # [panels, 16, blocks, num_bytes]
        start += num_bytes
        if name == "scales":
            fields[name][...] = part.transpose(0, 2, 3, 1)
        elif name in _HEADER_PARTS:
            fields[name][...] = part.view("<u2")[..., 0].swapaxes(1, 2)
        else:
            words = (
                _regroup(scheme, name, part).view("<u4").reshape(*part.shape[:3], *fields[name].shape[2:4])
            )
            fields[name][...] = words.transpose(0, 2, 3, 4, 1)


def _unpack_blocks(scheme: str, packed: np.ndarray, k: int) -> np.ndarray:
    block_bytes = SCHEMES[scheme].block_bytes
    num_blocks = k // SCHEMES[scheme].block_size
    packed = packed.reshape(-1, num_blocks, PANEL_ROWS * block_bytes)
    blocks = np.empty((packed.shape[0], PANEL_ROWS, num_blocks, block_bytes), np.uint8)
    fields = _packed_fields(scheme, packed)
    start = 0
    for name, num_bytes in _BLOCK_PARTS[scheme]:
        part = blocks[..., start : start + num_bytes]
        start += num_bytes
        if name == "scales":
            part[...] = fields[name].transpose(0, 3, 1, 2)
        elif name in _HEADER_PARTS:
            part.view("<u2")[..., 0] = fields[name].swapaxes(1, 2)
        else:
            words = np.ascontiguousarray(fields[name].transpose(0, 4, 1, 2, 3)).reshape(*part.shape[:3], -1)
            part.view("<u4")[...] = _ungroup(scheme, name, words.view(np.uint8)).view("<u4")
    return blocks.reshape(packed.shape[0] * PANEL_ROWS, -1)


def _pack_dense(scheme: str, rows: np.ndarray, packed: np.ndarray, k: int) -> None:
    values = rows.view(f"<u{SCHEMES[scheme].block_bytes}").reshape(-1, PANEL_ROWS, k)
    if scheme == "bf16":
        values = np.pad(values, ((0, 0), (0, 0), (0, k % 2))).view("<u4")
    panels = packed.view(values.dtype).reshape(values.shape[0], -1, PANEL_ROWS)
    panels[...] = values.swapaxes(1, 2)


def _unpack_dense(scheme: str, packed: np.ndarray, k: int) -> np.ndarray:
    dtype = "<u4" if scheme == "bf16" else f"<u{SCHEMES[scheme].block_bytes}"
    num_panels = packed.size // packed_bytes(scheme, PANEL_ROWS, k)
    values = np.ascontiguousarray(packed.view(dtype).reshape(num_panels, -1, PANEL_ROWS).swapaxes(1, 2))
    return values.view(np.uint8).reshape(num_panels * PANEL_ROWS, -1)[:, : row_bytes(scheme, k)]


def _packed_fields(scheme: str, packed: np.ndarray) -> dict[str, np.ndarray]:
    """Views of the parts of packed blocks, uint8 [panels, blocks, bytes].

    scale and minimum: u16 [panels, blocks, 16]; scales: u8 [panels, blocks, count, 16]; planes: u32 (4 k of a
    row) [panels, blocks, subblocks, planes, 16].
    """
    parts = dict(_BLOCK_PARTS[scheme])
    fields = {}
    start = 0
    for name in _HEADER_PARTS:
        if name in parts:
            field = packed[..., start : start + PANEL_ROWS * parts[name]]
            start += PANEL_ROWS * parts[name]
            fields[name] = (
                field.reshape(*packed.shape[:2], -1, PANEL_ROWS) if name == "scales" else field.view("<u2")
            )
    num_subblocks = SCHEMES[scheme].block_size // _BLOCK_32
    words = packed[..., start:].view("<u4").reshape(*packed.shape[:2], num_subblocks, -1, PANEL_ROWS)
    start = 0
    for name in _PLANE_PARTS:
        if name in parts:
            num_planes = parts[name] // num_subblocks // 4
            fields[name] = words[..., start : start + num_planes, :]
            start += num_planes
    return fields


def _rotate_bits(words: np.ndarray, steps: int) -> np.ndarray:
    """Each bit of a u32 moves from index e to e rotated right by `steps` of its 5 binary digits."""
    low, high = _rotation_tables()[steps]
    rotated: np.ndarray = low[words & 0xFFFF] | high[words >> 16]
    return rotated


def _rotation_tables() -> dict[int, tuple[np.ndarray, np.ndarray]]:
    if not _ROTATIONS:
        halves = np.arange(1 << 16, dtype=np.uint32)
        for steps in (2, 3):
            tables = []
            for first in (0, 16):
                table = np.zeros(1 << 16, np.uint32)
                for bit in range(16):
                    index = first + bit
                    target = (index >> steps | index << (5 - steps)) & 31
                    table |= (halves >> bit & 1) << np.uint32(target)
                tables.append(table)
            _ROTATIONS[steps] = (tables[0], tables[1])
    return _ROTATIONS


_ROTATIONS: dict[int, tuple[np.ndarray, np.ndarray]] = {}


def _regroup(scheme: str, name: str, part: np.ndarray) -> np.ndarray:
    """Code bytes of a block [..., bytes], checkpoint order to plane order: subblocks, planes, 4 k."""
    lead = part.shape[:-1]
    if SCHEMES[scheme].block_size == _BLOCK_32:
        return _rotate_bits(part.view("<u4"), 2).view(np.uint8) if name == "high1" else part
    part = np.ascontiguousarray(part)
    if name == "nibbles":  # 32 bytes: low nibbles are one subblock, high nibbles another
        first, second = np.moveaxis(part.view("<u8").reshape(*lead, 4, 2, 2), -2, 0)
        low, high = _exchange_nibbles(first, second)
        if scheme == "q6_k":  # halves of 128: subblocks 0 and 1 low, 2 and 3 high
            codes = np.stack([low.reshape(*lead, 2, 2, 2), high.reshape(*lead, 2, 2, 2)], axis=-3)
        else:  # even subblocks low, odd ones high
            codes = np.stack([low, high], axis=-2)
        return codes.view(np.uint8).reshape(*lead, -1)
    words = part.view("<u4")
    if name == "high1":  # group g, bit s -> subblock s, bit g
        return _transpose_fields(words, 1).view(np.uint8).reshape(*lead, -1)
    # high2: half h, plane p, group f of 4, field q -> subblock 4h + q, plane p, field f
    fields = _transpose_fields(words.reshape(*lead, 2, 2, 4), 2)  # [..., h, p, q]
    return np.ascontiguousarray(fields.swapaxes(-1, -2)).view(np.uint8).reshape(*lead, -1)


def _ungroup(scheme: str, name: str, codes: np.ndarray) -> np.ndarray:
    """The inverse of _regroup; `codes` is contiguous."""
    lead = codes.shape[:-1]
    if SCHEMES[scheme].block_size == _BLOCK_32:
        return _rotate_bits(codes.view("<u4"), 3).view(np.uint8) if name == "high1" else codes
    if name == "nibbles":
        words = codes.view("<u8")
        if scheme == "q6_k":
            low, high = np.moveaxis(words.reshape(*lead, 2, 2, 4), -2, 0)
        else:
            low, high = np.moveaxis(words.reshape(*lead, 4, 2, 2), -2, 0)
        first, second = (half.reshape(*lead, 4, 2) for half in _exchange_nibbles(low, high))
        return np.stack([first, second], axis=-2).view(np.uint8).reshape(*lead, -1)
    words = codes.view("<u4")
    if name == "high1":
        return _transpose_fields(words, 1).view(np.uint8).reshape(*lead, -1)
    fields = np.ascontiguousarray(words.reshape(*lead, 2, 4, 2).swapaxes(-1, -2))  # [..., h, p, q]
    return _transpose_fields(fields, 2).view(np.uint8).reshape(*lead, -1)


def _exchange_nibbles(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Byte by byte: the high nibble of `first` and the low nibble of `second` change places."""
    first, second = np.ascontiguousarray(first), np.ascontiguousarray(second)
    low = np.uint64(0x0F0F0F0F0F0F0F0F)
    return first & low | (second & low) << np.uint64(4), first >> np.uint64(4) & low | second & ~low


def _transpose_fields(words: np.ndarray, bits: int) -> np.ndarray:
    """u32 [..., 8 / bits]: in each of the 4 bytes, field b of word a moves to field a of word b.

    A matrix transposed by exchanging its off-diagonal quarters, and theirs (Hacker's Delight 7-3).
    """
    count = 8 // bits
    matrix = np.moveaxis(words, -1, 0).copy()
    distance = count // 2
    while distance:
        fields = [((1 << bits) - 1) << bits * b for b in range(count) if not b & distance]
        mask, shift = np.uint32(0x01010101 * sum(fields)), np.uint32(bits * distance)
        pairs = matrix.reshape(-1, 2, distance, *matrix.shape[1:])
        moved = (pairs[:, 0] >> shift ^ pairs[:, 1]) & mask
        pairs[:, 1] ^= moved
        pairs[:, 0] ^= moved << shift
        distance //= 2
    return np.ascontiguousarray(np.moveaxis(matrix, 0, -1))
