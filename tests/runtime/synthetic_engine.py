"""A complete engine small enough for any test: one attention head group over the embeddings, and an lm_head.

    x = embedding(token_ids)                       [T, 16]
    cache = kv_write(k = x, v = x)                 2 heads of 8
    a = paged_attention(q = x, cache)              [T, 16]
    logits = linear(gather_rows(a, logit_rows), head)      [L, 48]

Everything is f32; `SyntheticEngine.reference_logits` computes the same with numpy.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from castiron.plugins_cpu import layouts
from castiron.runtime.devices import kernel_library
from castiron.runtime.engine_file_writer import EngineFileWriter
from castiron.runtime.kernel_bounds import BOUNDS
from castiron.runtime.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    STEP_ABI_VERSION,
    Manifest,
    ModelInfo,
    Profile,
    Provenance,
    QuantizationInfo,
    TargetInfo,
    WeightsFile,
)
from castiron.runtime.plan_format import (
    RECORD_DTYPE,
    RELOCATION_DTYPE,
    CacheTensor,
    Kernel,
    MemoryClass,
    Plan,
    PlanArrays,
    PlanHeader,
    RecordFlag,
    encode_plan,
)
from castiron.runtime.step_abi import (
    MAX_LOGPROBS,
    Bucket,
    CacheGroup,
    bucket_capacities,
    layout,
    output_fields,
    row_fields,
    step_fields,
)
from castiron.runtime.zip_format import WEIGHTS_ALIGNMENT

VOCAB, DIM, HEADS, HEAD_DIM, BLOCK = 48, 16, 2, 8, 4
MAX_SEQS, MAX_SEQ_LEN, MAX_BATCHED, MAX_ROWS = 4, 64, 32, 8
SCALE = HEAD_DIM**-0.5
WEIGHTS_MEMBER = "weights/model-00001.safetensors"
NUM_TOKENS, NUM_SEQS, NUM_LOGITS = 0, 1, 2  # Count in plugins_cpu/abi.h

Pointer = tuple[MemoryClass, int, int]  # class, offset, extent in bytes


@dataclass(frozen=True)
class SyntheticEngine:
    path: Path
    table: np.ndarray  # [VOCAB, DIM]
    head: np.ndarray  # [VOCAB, DIM]

    def reference_logits(self, token_ids: list[int]) -> np.ndarray:
        """float64 [len(token_ids), VOCAB]."""
        x = self.table[token_ids].astype(np.float64)
        heads = x.reshape(-1, HEADS, HEAD_DIM)
        scores = np.einsum("ihd,jhd->hij", heads, heads) * SCALE
        scores[:, *np.triu_indices(len(token_ids), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("hij,jhd->ihd", weights, heads).reshape(-1, DIM) @ self.head.T.astype(np.float64)


class PlanWriter:
    """Collects kernels, records and relocations."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.plans: list[Plan] = []
        self.records: list[tuple[object, ...]] = []
        self.params = bytearray()
        self.relocations: list[tuple[int, ...]] = []
        self.dependencies: list[int] = []

    def add(self, kernel: str, pointers: dict[str, Pointer], **numbers: float) -> None:
        dtype = BOUNDS[kernel.partition(".")[0]].dtype
        block = np.zeros((), dtype)
        for name, value in numbers.items():
            block[name] = value
        data = block.tobytes()
        data += bytes(-len(data) % 8)
        names = [known.name for known in self.kernels]
        if kernel not in names:
            self.kernels.append(Kernel(kernel, len(data)))
            names.append(kernel)
        for name, (memory_class, offset, extent) in pointers.items():
            self.relocations.append((dtype.fields[name][1], 0, memory_class, 0, offset, extent, 0, 0))
        index = len(self.records) - sum(plan.records_count for plan in self.plans)
        if index:
            self.dependencies.append(index - 1)
        self.records.append(
            (
                *(0, RecordFlag.BARRIER, names.index(kernel), 0),
                *((1, 1, 1), (1, 1, 1), (1, 1, 1)),
                *(len(data), len(self.params)),
                *(len(self.relocations) - len(pointers), len(pointers)),
                *(len(self.dependencies) - bool(index), int(bool(index))),
            )
        )
        self.params += data

    def end_plan(self, name: str, kind: str, ladder: str, bucket: Bucket) -> None:
        start = sum(plan.records_count for plan in self.plans)
        self.plans.append(Plan(name, kind, ladder, bucket, start, len(self.records) - start))

    def arrays(self) -> PlanArrays:
        return PlanArrays(
            np.array(self.records, RECORD_DTYPE),
            np.frombuffer(bytes(self.params), np.uint8),
            np.array(self.relocations, RELOCATION_DTYPE),
            np.array(self.dependencies, np.uint32),
        )


def make_plan() -> tuple[PlanHeader, PlanArrays]:
    """Forward and sampling plans of a decode and a mixed bucket."""
    groups = (CacheGroup("kv", "paged", BLOCK, -(-MAX_SEQ_LEN // BLOCK)),)
    tensor = CacheTensor(
        "cache.0", "kv", 2 * HEADS * BLOCK * HEAD_DIM * 4, "f32", (2, HEADS, BLOCK, HEAD_DIM)
    )
    buckets = {
        "decode": Bucket(MAX_SEQS, MAX_SEQS, MAX_SEQS, 1),
        "mixed": Bucket(MAX_BATCHED, MAX_SEQS, MAX_SEQS, MAX_BATCHED),
    }
    row_bytes = 4 * DIM * MAX_BATCHED
    logits_offset = 3 * row_bytes
    packed = layouts.packed_bytes("f32", VOCAB, DIM)
    writer = PlanWriter()
    for ladder, bucket in buckets.items():
        capacities = bucket_capacities(bucket)
        _add_forward(writer, groups, capacities, row_bytes, logits_offset, packed, tensor.block_bytes)
        writer.end_plan(f"forward.{ladder}", "forward", ladder, bucket)
        for variant in ("greedy", "random"):
            _add_sample(writer, groups, capacities, variant, logits_offset)
            writer.end_plan(f"sample.{variant}.{ladder}", "sample", ladder, bucket)
    staging = max(layout(output_fields(), bucket_capacities(bucket))[1] for bucket in buckets.values())
    header = PlanHeader(
        kernels=tuple(writer.kernels),
        plans=tuple(writer.plans),
        cache_groups=groups,
        cache_tensors=(tensor,),
        tensor_maps=(),
        vocab_size=VOCAB,
        max_rows=MAX_ROWS,
        arena_bytes=logits_offset + 4 * VOCAB * MAX_SEQS,
        weights_bytes=2 * packed,
        rows_bytes=layout(row_fields(VOCAB), {"max_rows": MAX_ROWS})[1],
        counters_bytes=0,
        exchange_bytes=0,
        staging_bytes=staging,
        logits_offset=logits_offset,
    )
    return header, writer.arrays()


def _step_pointers(groups: tuple[CacheGroup, ...], capacities: dict[str, int]) -> dict[str, Pointer]:
    fields = step_fields(groups, VOCAB)
    offsets, end = layout(fields, capacities)
    starts = [*offsets.values(), end]
    return {
        field.name: (MemoryClass.STEP, offsets[field.name], starts[i + 1] - starts[i])
        for i, field in enumerate(fields)
    }


def _add_forward(
    writer: PlanWriter,
    groups: tuple[CacheGroup, ...],
    capacities: dict[str, int],
    row_bytes: int,
    logits_offset: int,
    packed: int,
    block_bytes: int,
) -> None:
    step = _step_pointers(groups, capacities)
    x, attended, gathered = ((MemoryClass.ARENA, i * row_bytes, row_bytes) for i in range(3))
    last_token = (MemoryClass.ROWS, 0, 4 * MAX_ROWS)
    cache = (MemoryClass.CACHE, 0, block_bytes)
    writer.add(
        "embedding.f32",
        {
            "token_ids": step["token_ids"],
            "last_token": last_token,
            "table": (MemoryClass.WEIGHTS, 0, packed),
            "y": x,
        },
        y_stride=DIM,
        count=NUM_TOKENS,
        vocab=VOCAB,
        dim=DIM,
        max_rows=MAX_ROWS,
    )
    shape = {"kv_heads": HEADS, "block_size": BLOCK, "head_dim": HEAD_DIM}
    writer.add(
        "kv_write.f32",
        {"k": x, "v": x, "cache": cache, "slot_mapping": step["slot_mapping.kv"]},
        k_stride=DIM,
        v_stride=DIM,
        count=NUM_TOKENS,
        **shape,
    )
    tables = {
        "block_tables": step["block_tables.kv"],
        "seq_lens": step["seq_lens"],
        "query_starts": step["query_starts"],
    }
    writer.add(
        "paged_attention.f32",
        {"q": x, "cache": cache, "y": attended, **tables},
        q_stride=DIM,
        y_stride=DIM,
        num_heads=HEADS,
        table_width=groups[0].table_width,
        scale=SCALE,
        **shape,
    )
    writer.add(
        "gather_rows",
        {"x": attended, "rows": step["logit_rows"], "y": gathered},
        x_stride=DIM,
        y_stride=DIM,
        count=NUM_LOGITS,
        dim=DIM,
    )
    logits = (MemoryClass.ARENA, logits_offset, 4 * VOCAB * MAX_SEQS)
    writer.add(
        "linear.f32",
        {"x": gathered, "weight": (MemoryClass.WEIGHTS, packed, packed), "y": logits},
        x_stride=DIM,
        y_stride=VOCAB,
        count=NUM_LOGITS,
        n=VOCAB,
        k=DIM,
    )


def _add_sample(
    writer: PlanWriter,
    groups: tuple[CacheGroup, ...],
    capacities: dict[str, int],
    variant: str,
    logits_offset: int,
) -> None:
    step = _step_pointers(groups, capacities)
    offsets = layout(output_fields(), capacities)[0]
    max_logits = capacities["max_logits"]
    sizes = {
        "sampled_token_ids": 1,
        "sampled_logprobs": 1,
        "top_token_ids": MAX_LOGPROBS,
        "top_logprobs": MAX_LOGPROBS,
    }
    pointers = {
        "logits": (MemoryClass.ARENA, logits_offset, 4 * VOCAB * MAX_SEQS),
        "sample_rows": step["sample_rows"],
        "num_logprobs": step["num_logprobs"],
        "last_token": (MemoryClass.ROWS, 0, 4 * MAX_ROWS),
    }
    pointers |= {name: (MemoryClass.STAGING, offsets[name], 4 * n * max_logits) for name, n in sizes.items()}
    if variant == "random":
        fields = ("temperature", "top_k", "top_p", "min_p", "seed", "output_position")
        pointers |= {name: step[name] for name in fields}
    writer.add(f"sample_{variant}", pointers, logits_stride=VOCAB, count=NUM_LOGITS, vocab=VOCAB)


def make_manifest(level: str, weights: tuple[WeightsFile, ...]) -> Manifest:
    return Manifest(
        format_major=FORMAT_MAJOR,
        format_minor=FORMAT_MINOR,
        step_abi_version=STEP_ABI_VERSION,
        model=ModelInfo(
            "synthetic", "llama", {"hidden_size": DIM}, VOCAB, MAX_SEQ_LEN, 2 * VOCAB * DIM, 1, (2,), {}
        ),
        target=TargetInfo("cpu", level, kernel_library.abi_hash()),
        profile=Profile(MAX_SEQS, MAX_SEQ_LEN, MAX_BATCHED),
        quantization=QuantizationInfo("none", "f32", "f32", {"f32": 8 * VOCAB * DIM}),
        weights=weights,
        weights_source="file",
        row_stable=True,
        features=(),
        provenance=Provenance("0.1.0", "safetensors", {"model.safetensors": "0" * 64}, {"torch": "2.13.0"}),
        members=(),
    )


def encode_safetensors(tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file: header length, JSON header padded with spaces, data."""
    names = {"uint8": "U8", "int32": "I32", "float32": "F32"}
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, array in tensors.items():
        place = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": names[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
        data += array.tobytes()
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % 256)
    return struct.pack("<Q", len(encoded)) + encoded + data


def make_golden(engine: SyntheticEngine, lengths: tuple[int, ...] = (1, 7, 50)) -> bytes:
    """golden.safetensors with one case per length (all rows of the short ones, some of the long ones)."""
    generator = np.random.default_rng(3)
    tensors: dict[str, np.ndarray] = {}
    for case, length in enumerate(lengths):
        token_ids = generator.integers(0, VOCAB, length)
        logits = engine.reference_logits(token_ids.tolist())
        rows = np.arange(length) if length < 10 else np.array([0, 3, length // 2, length - 2, length - 1])
        order = np.argsort(-logits[rows], axis=1)[:, :32]
        tensors[f"case.{case}.token_ids"] = token_ids.astype(np.int32)
        tensors[f"case.{case}.rows"] = rows.astype(np.int32)
        tensors[f"case.{case}.logit_ids"] = order.astype(np.int32)
        tensors[f"case.{case}.logits"] = np.take_along_axis(logits[rows], order, 1).astype(np.float32)
        tensors[f"case.{case}.logsumexp"] = np.log(np.exp(logits[rows]).sum(1)).astype(np.float32)
    return encode_safetensors(tensors, {"num_cases": str(len(lengths)), "compute": "f32"})


def write_synthetic_engine(
    path: Path,
    *,
    level: str = "generic",
    edit_plan: Callable[[PlanHeader, PlanArrays], tuple[PlanHeader, PlanArrays]] | None = None,
    edit_manifest: Callable[[Manifest], Manifest] | None = None,
    edit_golden: Callable[[bytes], bytes] | None = None,
    with_golden: bool = True,
) -> SyntheticEngine:
    """Write the engine, its parts changed by the given functions before they are written and hashed."""
    generator = np.random.default_rng(1)
    table = generator.standard_normal((VOCAB, DIM)).astype(np.float32)
    head = generator.standard_normal((VOCAB, DIM)).astype(np.float32)
    engine = SyntheticEngine(path, table, head)
    packed = {
        name: layouts.pack("f32", w.view(np.uint8), DIM) for name, w in (("embed", table), ("lm_head", head))
    }
    weights = encode_safetensors(packed)
    data_bytes = sum(array.nbytes for array in packed.values())
    header, arrays = make_plan()
    if edit_plan:
        header, arrays = edit_plan(header, arrays)
    part = WeightsFile(WEIGHTS_MEMBER, len(weights) - data_bytes, data_bytes, 0)
    manifest = make_manifest(level, (part,))
    golden = make_golden(engine)
    report = {
        "passes": [{"name": "fuse_gate_up", "matches": 0}],
        "kernels": {
            "linear.f32": {"op": "linear", "launches": 2, "refused": {"linear.f16": "reads f16 weights"}}
        },
    }
    with EngineFileWriter(path) as writer:
        writer.add("graph.onnx", b"\x08\x0a" + b"graph" * 20)
        for name, data in encode_plan(header, arrays).items():
            writer.add(name, data)
        writer.begin(WEIGHTS_MEMBER, WEIGHTS_ALIGNMENT)
        writer.write(weights)
        writer.end()
        writer.add("tokenizer/tokenizer.json", b'{"version": "1.0"}')
        writer.add("tokenizer/tokenizer_config.json", b'{"bos_token": null}')
        if with_golden:
            writer.add("golden.safetensors", edit_golden(golden) if edit_golden else golden)
        writer.add("report.json", msgspec.json.encode(report))
        writer.finish(edit_manifest(manifest) if edit_manifest else manifest)
    return engine
