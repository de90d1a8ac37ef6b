"""Compares what the kernels of a CPU plan will touch with what the relocations allow.

A relocation says how many bytes may be touched from an address; a kernel touches what its dimensions and
strides say (kernel_bounds.py). Comparing the two for every record means that a plan with a wrong dimension
is refused instead of writing wild. Vectorised over all records of one kernel.
"""

import numpy as np

from castiron.runtime.errors import EngineTargetError
from castiron.runtime.kernel_bounds import (
    BOUNDS,
    OPTIONAL_POINTERS,
    ROW_POINTERS,
    STAGING_POINTERS,
    STEP_POINTERS,
    WEIGHT_BLOCKS,
    WEIGHT_POINTERS,
    KernelBounds,
)
from castiron.runtime.manifest_check import refuse
from castiron.runtime.plan_format import Kernel, MemoryClass, PlanArrays, PlanHeader
from castiron.runtime.printable import printable
from castiron.runtime.step_abi import bucket_capacities, layout, output_fields, row_fields, step_fields

CACHE_ITEM_BYTES = {"f32": 4, "f16": 2}
WEIGHT_ALIGNMENT = 64  # of packed weights, in bytes
Q8_GROUP = 32  # columns sharing an activation scale

# Upper bounds that keep every product of an extent within 63 bits.
MAX_DIM = 1 << 22
MAX_SMALL_DIM = 1 << 13
MAX_STRIDE = 1 << 32
SMALL_DIMS = ("num_heads", "kv_heads", "head_dim", "block_size", "half")


def check_kernel_params(header: PlanHeader, arrays: PlanArrays, label: str) -> None:
    """Raise EngineFormatError for the first record whose kernel would leave its memory.

    Needs a plan whose ranges and relocations are in bounds already. Raises EngineTargetError for a kernel
    this runtime doesn't know.
    """
    relocation_at = np.full(
        len(arrays.params) // 8 + 1, -1, np.int64
    )  # by place in params, in units of 8 bytes
    record_places = np.repeat(arrays.records["params_offset"], arrays.records["relocations_count"])
    places = (record_places + arrays.relocations["param_offset"]).astype(np.int64) // 8
    relocation_at[places] = np.arange(len(places))
    plan_of_record = np.repeat(np.arange(len(header.plans)), [plan.records_count for plan in header.plans])
    fields = _FieldOffsets(header)
    for index, kernel in enumerate(header.kernels):
        records = np.flatnonzero(arrays.records["kernel"] == index)
        if len(records):
            _KernelCheck(header, arrays, kernel, records, relocation_at, plan_of_record, fields, label).run()


class _FieldOffsets:
    """Byte offsets of the fields of the step, rows and staging memory, plan by plan."""

    def __init__(self, header: PlanHeader) -> None:
        capacities = [bucket_capacities(plan.bucket) for plan in header.plans]
        step = step_fields(header.cache_groups, header.vocab_size)
        self.capacities = capacities
        self.step = [layout(step, capacity)[0] for capacity in capacities]
        self.staging = [layout(output_fields(), capacity)[0] for capacity in capacities]
        self.rows = layout(row_fields(header.vocab_size), {"max_rows": header.max_rows})[0]


class _KernelCheck:
    """The check of all records of one kernel."""

    def __init__(
        self,
        header: PlanHeader,
        arrays: PlanArrays,
        kernel: Kernel,
        records: np.ndarray,
        relocation_at: np.ndarray,
        plan_of_record: np.ndarray,
        fields: _FieldOffsets,
        label: str,
    ) -> None:
        self._header = header
        self._relocations = arrays.relocations
        self._records = records
        self._relocation_at = relocation_at
        self._plans: list[int] = plan_of_record[records].tolist()
        self._fields = fields
        self._op, _, self._variant = kernel.name.partition(".")
        self._label = f"{label}: kernel {printable(kernel.name)}"
        self._starts = arrays.records["params_offset"][records].astype(np.int64)
        self._num_relocations = int(arrays.records["relocations_count"][records].sum())
        self._bounds = self._find_bounds(kernel)
        indices = self._starts[:, None] + np.arange(self._bounds.dtype.itemsize)
        self._params = arrays.params[indices].view(self._bounds.dtype)[:, 0]

    def run(self) -> None:
        values = self._values()
        used = 0
        for name, kind in self._bounds.parameters:
            if kind == "p":
                used += self._check_pointer(name, values)
        if used != self._num_relocations:
            refuse(
                self._label, f"{self._num_relocations - used} relocations of parameters that aren't addresses"
            )
        self._check_indices(values)

    def _find_bounds(self, kernel: Kernel) -> KernelBounds:
        bounds = BOUNDS.get(self._op)
        needs_scheme = self._op in ("embedding", "linear", "linear_q8")
        needs_dtype = self._op in ("kv_write", "rope_kv_write", "paged_attention")
        known: tuple[str, ...] = ("",)
        if needs_scheme or needs_dtype:
            known = tuple(WEIGHT_BLOCKS if needs_scheme else CACHE_ITEM_BYTES)
        if bounds is None or self._variant not in known:
            raise EngineTargetError(
                f"{self._label} is unknown to this runtime: rebuild the engine with build-engine of this "
                "version or update castiron"
            )
        size = -(-bounds.dtype.itemsize // 8) * 8
        if kernel.params_bytes != size:
            refuse(self._label, f"takes {size} bytes of parameters, the engine has {kernel.params_bytes}")
        return bounds

    def _values(self) -> dict[str, np.ndarray]:
        """Parameters and capacities, each within bounds that keep extents from overflowing."""
        values: dict[str, np.ndarray] = {}
        for name, kind in self._bounds.parameters:
            if kind not in "li":
                continue
            value = values[name] = self._params[name].astype(np.int64)
            low, high = 1, MAX_SMALL_DIM if name in SMALL_DIMS else MAX_DIM
            if kind == "l":
                low, high = 0, MAX_STRIDE
            elif name == "count":
                low, high = 0, 2
            elif name == "pad":
                low, high = 0, 0
            self._refuse_where((value < low) | (value > high), f"{name} is out of range")
        count = values.get("count", np.zeros(len(self._records), np.int64))
        limits = ("max_tokens", "max_seqs", "max_logits")  # in the order of Count in abi.h
        for name in limits:
            values[name] = np.array([self._fields.capacities[plan][name] for plan in self._plans], np.int64)
        values["num_rows"] = np.choose(count, [values[name] for name in limits])
        values.setdefault("max_rows", np.full(len(self._records), self._header.max_rows, np.int64))
        block_size, block_bytes = WEIGHT_BLOCKS.get(self._variant, (1, 0))
        values["weight_block_size"] = np.full(len(self._records), block_size, np.int64)
        values["weight_block_bytes"] = np.full(len(self._records), block_bytes, np.int64)
        item_bytes = CACHE_ITEM_BYTES.get(self._variant, 0)
        values["cache_item_bytes"] = np.full(len(self._records), item_bytes, np.int64)
        return values

    def _check_pointer(self, name: str, values: dict[str, np.ndarray]) -> int:
        """Every record's pointer must be relocated and reach far enough; returns how many are relocated."""
        found = self._relocation_at[self._places(name)]
        missing = found < 0
        if name in OPTIONAL_POINTERS:
            self._refuse_where(
                missing & (self._params[name] != 0), f"{name} is an address that isn't relocated"
            )
        else:
            self._refuse_where(missing, f"{name} isn't relocated")
        relocations = self._relocations[found]
        needed = self._bounds.extents[name](values).astype(np.uint64)
        self._refuse_where(
            ~missing & (relocations["extent_bytes"] < needed), f"{name} reaches beyond its memory"
        )
        memory_class, offsets = self._expected_place(name)
        elsewhere = relocations["memory_class"] != memory_class
        if offsets is not None:
            elsewhere |= relocations["target_offset"] != np.array(offsets, np.uint64)
        self._refuse_where(
            ~missing & elsewhere, f"{name} isn't in {memory_class.name.lower()} where it belongs"
        )
        if name == "cache":
            self._check_cache(relocations, needed, values)
        alignment = WEIGHT_ALIGNMENT if name in ("weight", "table") and values["weight_block_bytes"][0] else 4
        alignment = 1 if name == "q" else alignment
        misaligned = relocations["target_offset"] % np.uint64(alignment) != 0
        self._refuse_where(~missing & misaligned, f"{name} is not aligned to {alignment} bytes")
        return int(np.count_nonzero(~missing))

    def _expected_place(self, name: str) -> tuple[MemoryClass, list[int] | None]:
        """Memory class of a pointer, and the offset it must have in each record; None: any."""
        if name == "cache":
            return MemoryClass.CACHE, [0] * len(self._plans)
        if name in WEIGHT_POINTERS:
            return MemoryClass.WEIGHTS, None
        if name in ROW_POINTERS:
            return MemoryClass.ROWS, [self._fields.rows[name]] * len(self._plans)
        if name in STAGING_POINTERS:
            return MemoryClass.STAGING, [self._fields.staging[plan][name] for plan in self._plans]
        if name in STEP_POINTERS:
            suffixes = [""] * len(self._plans)
            if name in ("slot_mapping", "block_tables"):
                suffixes = [f".{group}" for group in self._cache_groups()]
            field = STEP_POINTERS[name]
            steps = zip(self._plans, suffixes, strict=True)
            return MemoryClass.STEP, [self._fields.step[plan][field + suffix] for plan, suffix in steps]
        return MemoryClass.ARENA, None

    def _cache_groups(self) -> list[str]:
        """The group of each record's cache; `cache` comes before what needs it in every struct."""
        relocations = self._relocations[self._relocation_at[self._places("cache")]]
        return [self._header.cache_tensors[index].group for index in relocations["target_index"].tolist()]

    def _places(self, name: str) -> np.ndarray:
        """Where the parameter lies in all params, in units of 8 bytes, for each record."""
        fields = self._bounds.dtype.fields
        assert fields is not None
        places: np.ndarray = (self._starts + fields[name][1]) // 8
        return places

    def _check_cache(
        self, relocations: np.ndarray, needed: np.ndarray, values: dict[str, np.ndarray]
    ) -> None:
        """The kernel steps from block to block by its own dimensions: they must be the cache tensor's."""
        tensors = self._header.cache_tensors
        groups = {group.name: group for group in self._header.cache_groups}
        index = relocations["target_index"]
        is_state = np.array([groups[tensor.group].kind != "paged" for tensor in tensors])
        self._refuse_where(is_state[index], "its cache group isn't paged")
        block_bytes = np.array([tensor.block_bytes for tensor in tensors], np.uint64)
        block_size = np.array([groups[tensor.group].block_size for tensor in tensors], np.int64)
        self._refuse_where(block_bytes[index] != needed, "its blocks are not the cache tensor's")
        self._refuse_where(block_size[index] != values["block_size"], "block_size is not the cache group's")
        if "table_width" in values:
            width = np.array([groups[tensor.group].table_width for tensor in tensors], np.int64)
            self._refuse_where(width[index] != values["table_width"], "table_width is not the cache group's")
            # blocks before the window are freed: a kernel that looks further back reads none
            window = np.array([groups[tensor.group].window for tensor in tensors], np.int64)
            self._refuse_where(window[index] != values.get("window", 0), "window is not the cache group's")

    def _check_indices(self, values: dict[str, np.ndarray]) -> None:
        """Dimensions that bound what step data may index, and divisibility the kernels count on."""
        if "vocab" in values:
            self._refuse_where(
                values["vocab"] != self._header.vocab_size, "vocab is not the engine's vocab_size"
            )
        columns = values.get("k", values.get("dim"))
        if columns is not None:
            multiple = Q8_GROUP if self._op.endswith("_q8") else 1
            if self._variant in WEIGHT_BLOCKS and self._variant != "bf16":
                multiple = max(multiple, WEIGHT_BLOCKS[self._variant][0])
            self._refuse_where(columns % multiple != 0, f"a row is no multiple of {multiple}")
        if "num_heads" in values and "kv_heads" in values:
            self._refuse_where(
                values["num_heads"] % values["kv_heads"] != 0, "num_heads is no multiple of kv_heads"
            )
        if "half" in values and "head_dim" in values:
            self._refuse_where(2 * values["half"] > values["head_dim"], "half is more than half of head_dim")

    def _refuse_where(self, bad: np.ndarray, what: str) -> None:
        if bad.any():
            refuse(self._label, f"record {int(self._records[np.argmax(bad)])}: {what}")
