"""Bounds checks of an engine's plans, before a device uses any of it.

A plan bakes addresses, so a wrong one reads or writes anywhere. Every index, range and relocation is checked
here, vectorised over the flat arrays; sums of file-given 64-bit values are never formed before each term was
bounded, so nothing can wrap. What the kernels then do with their parameters is checked in params_check.py.
"""

import numpy as np

from castiron.runtime.devices import kernel_library
from castiron.runtime.manifest import PURPOSE_TUNING, Manifest
from castiron.runtime.manifest_check import (
    MAX_CLASS_BYTES,
    MAX_SEQS,
    MAX_TOKENS,
    MAX_VOCAB_SIZE,
    check_range,
    refuse,
)
from castiron.runtime.params_check import check_kernel_params
from castiron.runtime.plan_format import (
    MemoryClass,
    Plan,
    PlanArrays,
    PlanHeader,
    RecordKind,
    RelocationKind,
)
from castiron.runtime.printable import printable
from castiron.runtime.step_abi import bucket_capacities, layout, output_fields, row_fields, step_fields

MAX_PARAMS_BYTES = 1 << 16  # of one record
MAX_BLOCK_BYTES = 1 << 40
CACHE_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1}


def check_plan(header: PlanHeader, arrays: PlanArrays, manifest: Manifest, label: str) -> None:
    """Raise EngineFormatError naming the first thing of a plan that doesn't fit; changes nothing."""
    _check_header(header, manifest, label)
    _check_caches(header, manifest, label)
    for plan in header.plans:
        _check_plan_entry(plan, header, manifest, label)
    _check_records(header, arrays, manifest, label)
    _check_dependencies(header, arrays, label)
    _check_relocations(header, arrays, manifest, label)
    if manifest.target.kind == "cpu" and manifest.target.kernel_abi_hash == kernel_library.abi_hash():
        check_kernel_params(header, arrays, label)  # the CPU device refuses engines of another kernel ABI


def step_bytes(header: PlanHeader, plan: Plan) -> int:
    """Size of the step block of this plan's bucket, in bytes."""
    fields = step_fields(header.cache_groups, header.vocab_size)
    return layout(fields, bucket_capacities(plan.bucket))[1]


def _check_header(header: PlanHeader, manifest: Manifest, label: str) -> None:
    if header.vocab_size != manifest.model.vocab_size:
        refuse(
            label, f"the plan's vocab_size is {header.vocab_size}, the model's {manifest.model.vocab_size}"
        )
    check_range("vocab_size", header.vocab_size, 1, MAX_VOCAB_SIZE, label)
    check_range("max_rows", header.max_rows, 1, MAX_SEQS * 4, label)
    for name in ("arena", "weights", "rows", "counters", "exchange", "staging"):
        check_range(f"{name}_bytes", getattr(header, f"{name}_bytes"), 0, MAX_CLASS_BYTES, label)
    loaded = max((part.weights_offset + part.data_bytes for part in manifest.weights), default=0)
    if loaded > header.weights_bytes:
        refuse(label, f"its weights need {loaded} bytes, the plan has {header.weights_bytes}")
    needed = layout(row_fields(header.vocab_size), {"max_rows": header.max_rows})[1]
    check_range("rows_bytes", header.rows_bytes, needed, MAX_CLASS_BYTES, label)
    if manifest.target.kind == "cpu" and (header.exchange_bytes or header.tensor_maps):
        refuse(label, "exchange memory or tensor maps in a plan for the CPU")

    for kernel in header.kernels:
        what = f"kernel {printable(kernel.name)}"
        check_range(f"params_bytes of {what}", kernel.params_bytes, 0, MAX_PARAMS_BYTES, label)
        if kernel.member and all(kernel.member != member.name for member in manifest.members):
            refuse(label, f"{what} lies in a member {printable(kernel.member)} which doesn't exist")


def _check_caches(header: PlanHeader, manifest: Manifest, label: str) -> None:
    groups = {group.name: group for group in header.cache_groups}
    if len(groups) != len(header.cache_groups) or len(groups) > 16:
        refuse(label, f"it has {len(header.cache_groups)} cache groups, expected up to 16 of different names")
    for group in header.cache_groups:
        if group.kind not in ("paged", "state"):
            refuse(label, f"cache group {printable(group.name)} is of kind {printable(group.kind)}")
        check_range("block_size", group.block_size, 1, MAX_TOKENS, label)
        check_range("table_width", group.table_width, 1, MAX_TOKENS, label)
        check_range("window", group.window, 0, MAX_TOKENS, label)
        if group.kind == "paged" and group.table_width * group.block_size < manifest.profile.max_seq_len:
            refuse(label, f"block tables of {group.table_width} blocks can't hold a sequence of max_seq_len")
    if len(header.cache_tensors) > 1 << 16:
        refuse(label, f"it has {len(header.cache_tensors)} cache tensors")
    for tensor in header.cache_tensors:
        what = f"cache tensor {printable(tensor.name)}"
        if tensor.group not in groups or tensor.dtype not in CACHE_ITEM_BYTES:
            refuse(label, f"{what} is of group {printable(tensor.group)}, dtype {printable(tensor.dtype)}")
        num_bytes = CACHE_ITEM_BYTES[tensor.dtype]
        for dim in tensor.block_shape[:8]:
            check_range(f"block_shape of {what}", dim, 1, MAX_TOKENS, label)
            num_bytes *= dim
        if len(tensor.block_shape) > 8 or num_bytes != tensor.block_bytes or num_bytes > MAX_BLOCK_BYTES:
            refuse(label, f"a block of {what} doesn't have the bytes of its shape")


def _check_plan_entry(plan: Plan, header: PlanHeader, manifest: Manifest, label: str) -> None:
    """The plan's kind, and that its bucket's arrays fit the memory classes."""
    name = printable(plan.name)
    kinds = ("tune",) if manifest.purpose == PURPOSE_TUNING else ("forward", "sample")
    if plan.kind not in kinds or plan.ladder not in ("decode", "mixed"):
        refuse(label, f"plan {name} is of kind {printable(plan.kind)}, ladder {printable(plan.ladder)}")
    bucket = plan.bucket
    check_range(f"max_tokens of plan {name}", bucket.max_tokens, 1, MAX_TOKENS, label)
    check_range(f"max_seqs of plan {name}", bucket.max_seqs, 1, min(MAX_SEQS, bucket.max_tokens), label)
    check_range(f"max_logits of plan {name}", bucket.max_logits, 1, bucket.max_tokens, label)
    check_range(f"max_query_len of plan {name}", bucket.max_query_len, 1, bucket.max_tokens, label)
    check_range(f"step block of plan {name} in bytes", step_bytes(header, plan), 0, MAX_CLASS_BYTES, label)
    if plan.kind == "forward":
        logits_bytes = 4 * bucket.max_logits * header.vocab_size
        check_range("logits_offset", header.logits_offset, 0, header.arena_bytes - logits_bytes, label)
        if header.logits_offset % 4:
            refuse(label, f"logits_offset {header.logits_offset} is no multiple of 4")
    elif plan.kind == "sample":
        needed = layout(output_fields(), bucket_capacities(bucket))[1]
        check_range("staging_bytes", header.staging_bytes, needed, MAX_CLASS_BYTES, label)


def _check_records(header: PlanHeader, arrays: PlanArrays, manifest: Manifest, label: str) -> None:
    records = arrays.records
    main_kind = "tune" if manifest.purpose == PURPOSE_TUNING else "forward"
    if not any(plan.kind == main_kind for plan in header.plans):
        refuse(label, f"it has no {main_kind} plan")
    end = 0
    for plan in header.plans:
        if plan.records_start != end or not 0 <= plan.records_count <= len(records) - end:
            refuse(
                label,
                f"plan {printable(plan.name)} doesn't start where the one before ends or exceeds the records",
            )
        end += plan.records_count
    if end != len(records):
        refuse(label, f"{len(records) - end} records belong to no plan")
    kinds = records["kind"]
    _refuse_where(kinds > max(RecordKind), "record {} is of an unknown kind", label)
    _refuse_where(kinds != RecordKind.KERNEL, "record {} isn't a kernel, all this runtime launches", label)
    is_kernel = kinds == RecordKind.KERNEL
    _refuse_where(is_kernel & (records["kernel"] >= len(header.kernels)), "record {} names no kernel", label)
    kernel_params = np.array([kernel.params_bytes for kernel in header.kernels] + [0], np.int64)
    expected = kernel_params[np.where(is_kernel, records["kernel"], len(header.kernels))]
    params_bytes = records["params_bytes"].astype(np.int64)
    _refuse_where(is_kernel & (params_bytes != expected), "record {} has parameters of another size", label)
    _refuse_where(params_bytes > MAX_PARAMS_BYTES, "record {} has too many parameters", label)
    offsets = records["params_offset"]
    _refuse_where(offsets > len(arrays.params), "the parameters of record {} lie outside", label)
    ends = offsets.astype(np.int64) + params_bytes
    _refuse_where(ends > len(arrays.params), "the parameters of record {} lie outside", label)
    _refuse_where(offsets % 8 != 0, "the parameters of record {} are not aligned", label)
    _refuse_where(
        offsets[1:] < ends[:-1].astype(np.uint64), "the parameters of record {} overlap the next", label
    )
    _check_tiling(records, "relocations", len(arrays.relocations), label)
    _check_tiling(records, "dependencies", len(arrays.dependencies), label)


def _check_tiling(records: np.ndarray, what: str, total: int, label: str) -> None:
    """Each record's range must start where the one before ends, the last end at `total`."""
    counts = records[f"{what}_count"].astype(
        np.int64
    )  # < 2^32 each, and there are far fewer than 2^31 records
    ends = np.cumsum(counts)
    _refuse_where(
        records[f"{what}_start"] != ends - counts, f"the {what} of record {{}} are out of order", label
    )
    if (int(ends[-1]) if len(ends) else 0) != total:
        refuse(label, f"its records list {int(ends[-1]) if len(ends) else 0} {what}, the table has {total}")


def _check_dependencies(header: PlanHeader, arrays: PlanArrays, label: str) -> None:
    """A record may wait only for earlier records of its plan."""
    own_index = np.empty(len(arrays.records), np.int64)
    for plan in header.plans:
        own_index[plan.records_start : plan.records_start + plan.records_count] = np.arange(
            plan.records_count
        )
    waiting = np.repeat(own_index, arrays.records["dependencies_count"])
    _refuse_where(arrays.dependencies >= waiting, "dependency {} points at a later record", label)


def _check_relocations(header: PlanHeader, arrays: PlanArrays, manifest: Manifest, label: str) -> None:
    relocations = arrays.relocations
    owner = np.repeat(np.arange(len(arrays.records)), arrays.records["relocations_count"])
    kinds = relocations["kind"]
    _refuse_where(kinds > max(RelocationKind), "relocation {} is of an unknown kind", label)
    if manifest.target.kind == "cpu":
        _refuse_where(
            kinds != RelocationKind.ADDRESS, "relocation {} is of a kind the CPU doesn't have", label
        )
    _refuse_where(kinds == RelocationKind.SCRATCH, "relocation {} is of scratch, which no kernel has", label)
    width = np.where(kinds == RelocationKind.TENSOR_MAP, 128, 8)
    param_offsets = relocations["param_offset"].astype(np.int64)
    params_bytes = arrays.records["params_bytes"].astype(np.int64)[owner]
    _refuse_where(param_offsets + width > params_bytes, "relocation {} lies outside its parameters", label)
    _refuse_where(param_offsets % 8 != 0, "relocation {} is not aligned", label)
    places = np.sort(arrays.records["params_offset"].astype(np.int64)[owner] + param_offsets)
    _refuse_where(places[1:] == places[:-1], "two relocations at one place, {}", label)
    is_map = kinds == RelocationKind.TENSOR_MAP
    bad_map = is_map & (relocations["tensor_map_index"] >= len(header.tensor_maps))
    _refuse_where(bad_map, "relocation {} names no tensor map", label)

    classes = relocations["memory_class"]
    _refuse_where(classes > max(MemoryClass), "relocation {} is of an unknown memory class", label)
    tensors = relocations["target_index"].astype(np.int64)
    is_cache = classes == MemoryClass.CACHE
    num_tensors = np.where(is_cache, len(header.cache_tensors), 1)
    _refuse_where(tensors >= num_tensors, "relocation {} names no cache tensor", label)
    sizes = _class_sizes(header, arrays, owner, classes)
    block_bytes = np.array([tensor.block_bytes for tensor in header.cache_tensors] + [0], np.uint64)
    limits = np.where(is_cache, block_bytes[np.where(is_cache, tensors, len(header.cache_tensors))], sizes)
    offsets, extents = relocations["target_offset"], relocations["extent_bytes"]
    outside = (offsets > limits) | (extents > limits - np.minimum(offsets, limits))
    _refuse_where(outside, "relocation {} reaches beyond its memory", label)


def _class_sizes(
    header: PlanHeader, arrays: PlanArrays, owner: np.ndarray, classes: np.ndarray
) -> np.ndarray:
    """Bytes (uint64) of each relocation's memory class; of the step block for the plan its record is in."""
    sizes = np.zeros(len(MemoryClass), np.uint64)
    sizes[MemoryClass.WEIGHTS] = header.weights_bytes
    sizes[MemoryClass.ARENA] = header.arena_bytes
    sizes[MemoryClass.ROWS] = header.rows_bytes
    sizes[MemoryClass.COUNTERS] = header.counters_bytes
    sizes[MemoryClass.EXCHANGE] = header.exchange_bytes
    sizes[MemoryClass.STAGING] = header.staging_bytes
    step = np.zeros(len(arrays.records), np.uint64)
    for plan in header.plans:
        step[plan.records_start : plan.records_start + plan.records_count] = step_bytes(header, plan)
    result: np.ndarray = np.where(classes == MemoryClass.STEP, step[owner], sizes[classes])
    return result


def _refuse_where(bad: np.ndarray, what: str, label: str) -> None:
    """Raise EngineFormatError with the first index at which `bad` holds put into `what`."""
    if bad.any():
        refuse(label, what.format(int(np.argmax(bad))))
