"""Runs one sequence through a device's forward plans by hand, without scheduler or cache manager."""

import numpy as np

from castiron.runtime.devices.base import Device
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.plan_format import Plan, PlanHeader
from castiron.runtime.printable import printable


def prefill_plan(header: PlanHeader) -> int:
    """Index of the forward plan that takes the longest chunk of one sequence."""
    return max(_forwards(header), key=lambda index: _chunk_tokens(header.plans[index]))


def decode_plan(header: PlanHeader) -> int:
    """Index of the smallest forward plan, the one single tokens run through."""
    return min(_forwards(header), key=lambda index: header.plans[index].bucket.max_tokens)


def blocks_needed(header: PlanHeader, num_tokens: int) -> dict[str, int]:
    """Cache blocks of each group for one sequence. Raises EngineTargetError for other groups than paged."""
    for group in header.cache_groups:
        if group.kind != "paged":
            raise EngineTargetError(
                f"cache group {printable(group.name)} is of kind {printable(group.kind)}, this runtime "
                "runs paged groups: use the castiron version that built the engine"
            )
    return {group.name: -(-num_tokens // group.block_size) for group in header.cache_groups}


def sequence_logits(device: Device, token_ids: np.ndarray, rows: np.ndarray, num_decoded: int) -> np.ndarray:
    """Logits, float32 [len(rows), vocab], of the token indices `rows`.

    All tokens but the last `num_decoded` go through the prefill plan in chunks as large as it takes, those
    one by one through the decode plan. The device must have `blocks_needed` blocks.
    """
    header = device.header
    rows, order = np.unique(rows, return_inverse=True)
    num_prefilled = len(token_ids) - num_decoded
    result = np.empty((len(rows), header.vocab_size), np.float32)
    start = 0
    while start < len(token_ids):
        plan_index = prefill_plan(header) if start < num_prefilled else decode_plan(header)
        bucket = header.plans[plan_index].bucket
        stop = (
            min(num_prefilled, start + _chunk_tokens(header.plans[plan_index]))
            if start < num_prefilled
            else start + 1
        )
        wanted = rows[(rows >= start) & (rows < stop)]
        if len(wanted) > bucket.max_logits:  # end the chunk where its logit rows are full
            wanted = wanted[: bucket.max_logits]
            stop = int(wanted[-1]) + 1
        logit_rows = (
            wanted - start if len(wanted) else np.array([stop - start - 1])
        )  # a step has at least one
        _fill_step(device.step_views(plan_index), header, token_ids, start, stop, logit_rows)
        device.launch(plan_index, None)
        device.wait()
        if len(wanted):
            result[np.searchsorted(rows, wanted)] = device.read_logits(len(wanted))
        start = stop
    return result[order]


def _forwards(header: PlanHeader) -> list[int]:
    return [index for index, plan in enumerate(header.plans) if plan.kind == "forward"]


def _chunk_tokens(plan: Plan) -> int:
    return min(plan.bucket.max_tokens, plan.bucket.max_query_len)


def _fill_step(
    views: dict[str, np.ndarray],
    header: PlanHeader,
    token_ids: np.ndarray,
    start: int,
    stop: int,
    logit_rows: np.ndarray,
) -> None:
    """One sequence's tokens start .. stop, its blocks being 0, 1, 2, ... of every group."""
    num_tokens = stop - start
    positions = np.arange(start, stop)
    views["header"][:] = 0
    views["header"][:4] = (num_tokens, 1, len(logit_rows), num_tokens)
    views["token_ids"][:num_tokens] = token_ids[start:stop]
    views["positions"][:num_tokens] = positions
    views["query_starts"][:2] = (0, num_tokens)
    views["seq_lens"][0] = stop
    views["row_ids"][0] = 0
    views["logit_rows"][: len(logit_rows)] = logit_rows
    for group in header.cache_groups:
        num_blocks = -(-stop // group.block_size)
        views[f"slot_mapping.{group.name}"][:num_tokens] = positions  # block i is at slots i * block_size ...
        views[f"block_tables.{group.name}"][0] = -1
        views[f"block_tables.{group.name}"][0, :num_blocks] = np.arange(num_blocks)
